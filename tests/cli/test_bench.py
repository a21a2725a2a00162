"""`twophase bench`: an arm through places made tiny, its card, and what is never compared in silence."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import madeup
from twophase.base.config import UsageError
from twophase.base.files import file_sha256, table_text
from twophase.cli import bench as command
from twophase.cli import benching, tuning
from twophase.cli.own_arm import read_arm
from twophase.cli.tuning import Tuned, TuneResults
from twophase.recipes import bench as recipe
from twophase.recipes.bench import Place, Size
from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.table import write_rows

PLACES = (
    Place("first", "digits, 2 replicas", {"replicas": 2, "inner_steps": 4, "steps": 8, "inner.lr": 0.01}, "digits"),
    Place("second", "digits, alone", {"replicas": 1, "inner_steps": 4, "steps": 8, "inner.lr": 0.01}, "digits"),
)
ARMS = ("memoryless", "averaging+filter=orthogonal")
Bench = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The command with two places of eight steps, and stored tables in a folder of the test's own."""
    for module in (recipe, benching):
        monkeypatch.setattr(module, "PLACES", PLACES)
        monkeypatch.setitem(recipe.SIZES, "full", Size(3, (0,), (100, 101, 102), ("first", "second")))
        monkeypatch.setitem(recipe.SIZES, "quick", Size(2, (0,), (100, 101), ("first", "second")))
    monkeypatch.setattr(Place, "arms", property(lambda _: ARMS))
    monkeypatch.setattr(recipe, "_FROM_WHEEL", tmp_path / "stored")

    def run(*words: str, out: str = "out") -> Path:
        folder = tmp_path / out
        assert command.main([*words, "--out", str(folder), "--workers", "1", "--quiet"]) == 0
        return folder

    return run


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results by a formula in place of those of runs, in the files that a sweep writes."""

    def result(cell: Cell) -> float | str:
        inner, chance = math.log(cell.config.inner.lr / 0.016), math.sin(cell.config.seed * len(cell.arm))
        return "diverged" if "1e30" in cell.arm else (1 + inner**2) * (1 + 0.02 * chance)

    def complete(sweep: Sweep, folder: Path, *, texts: Mapping[str, str], **_: Any) -> None:
        folder.mkdir(exist_ok=True)
        write_rows(folder / "cells.csv", madeup.rows(sweep, result))
        (folder / "plan.json").write_text(json.dumps({"texts": texts}))

    monkeypatch.setattr(tuning, "complete", complete)
    monkeypatch.setattr("os.fsync", lambda _: None)


def card(folder: Path) -> dict[str, Any]:
    """The card as JSON; its page and its picture are there."""
    assert (folder / "card.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "card.html").read_text(encoding="utf-8")
    assert "Bench card" in page
    assert base64.b64encode((folder / "card.png").read_bytes()).decode() in page  # the whole picture
    return json.loads((folder / "card.json").read_text(encoding="utf-8"))


def store(bench: Bench, folder: Path, **options: str) -> tuple[Path, Path]:
    """Put a bench's references into a folder; their table and their facts."""
    bench("--reference", "--into", str(folder), **options)
    return folder / "reference.csv", folder / "reference.json"


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("made_up")
def test_references_and_a_card(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A card holds an arm against averaging and against the stored arms, of the seeds that both have."""
    folder, (stored, stored_facts) = bench("--reference"), store(bench, tmp_path / "stored")
    rows, whole, facts = read_table(stored), stored.read_bytes(), json.loads(stored_facts.read_text())
    assert len(rows) == 2 * 3 * 3  # places, arms with averaging, seeds
    assert (folder / "results.csv").read_bytes() == whole
    assert facts["protocol"] == recipe.PROTOCOL
    assert set(facts["places"]) == {"first", "second"}
    lucky = rows[-1] | {"seed": "999", "result": "0.001"}  # of a seed that this size has not
    stored.write_text(f"{stored.read_text()}{','.join(lucky.values())}\n")
    made = card(bench("heavy-ball", out="card"))
    assert max(made["behind"][lucky["arm"]]) < 1  # and not a thousand times better there
    stored.write_bytes(whole)
    assert [place["place"] for place in made["places"]] == ["first", "second"]
    for place in made["places"]:
        assert place["note"] == ""
        assert place["control"]["other"] == "averaging"
        assert [against["other"] for against in place["stored"]] == sorted(ARMS)
        assert place["settings"] == 2
    assert made["comparisons"] == {"averaging": 2, "stored": 2 * 2}
    assert set(made["behind"]) == {"averaging", *ARMS, "heavy-ball"}
    assert made["line"] in capsys.readouterr().out

    # Where all that is stored came out 10 % larger, as on another machine, each side's averaging takes it away.
    larger = [row | {"result": repr(1.1 * float(row["result"]))} for row in rows if row["place"] == "first"]
    stored.write_text(table_text(larger + [row for row in rows if row["place"] == "second"]))
    there = {"first": facts["places"]["first"] | {"torch": "0", "texts": ["x"]}}
    stored_facts.write_text(json.dumps({**facts, "places": there}))
    changed = card(bench("heavy-ball", out="card"))
    first, second = changed["places"]
    for before, after in zip(made["places"][0]["stored"], first["stored"], strict=True):
        assert after["word"] == before["word"]
        assert after["ratio"] == pytest.approx(before["ratio"], rel=1e-9)
    assert "torch 0 for" in first["note"]
    assert "another text" in first["note"]
    assert second["note"] == "second: there are no stored arms."

    # Rows of another protocol are not compared with, nor an arm that diverged everywhere.
    stored.write_text(stored.read_text().replace("\n1,first,", "\n2,first,"))
    first, second = card(bench("memoryless:lr=1e30", out="lost"))["places"]
    assert first["stored"] == []
    assert first["note"] == "first: there are no stored arms."
    assert {other["word"] for other in second["stored"]} == {"all diverged"}
    page = (tmp_path / "lost" / "card.html").read_text()
    assert "diverged at every setting" in page
    assert "Not named: undecided" not in page

    # Another protocol: none is compared with.
    stored_facts.write_text(json.dumps({**facts, "protocol": 0}))
    other = card(bench("heavy-ball", out="card"))
    assert [place["stored"] for place in other["places"]] == [[], []]
    assert other["behind"] == {}
    assert "protocol 0" in other["places"][0]["note"]


@pytest.mark.usefixtures("made_up")
def test_a_table_in_parts(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some arms of one place leave all others as they are; those that do not repeat are refused."""
    monkeypatch.setitem(recipe.SIZES, "full", Size(1, (0,), (100, 101), ("first", "second")))
    bench("--reference")
    stored, stored_facts = store(bench, tmp_path / "stored")
    rows, whole, facts = read_table(stored), stored.read_bytes(), json.loads(stored_facts.read_text())
    bench("--reference", "--places", "second", "--arms", "memoryless", out="part")
    store(bench, tmp_path / "stored", out="part")
    again = stored.read_text()
    assert [row.split(",")[:5] for row in again.splitlines()] == [row.split(",")[:5] for row in whole.decode().split()]
    stored.write_bytes(whole)
    other_torch = {**facts["places"]["second"], "torch": "0"}
    stored_facts.write_text(json.dumps({**facts, "places": {"second": other_torch}}))
    with pytest.raises(UsageError, match="another text, Python or torch"):
        store(bench, tmp_path / "stored", out="part")
    stored_facts.write_text(json.dumps(facts))
    first = next(row for row in rows if (row["place"], row["arm"]) == ("second", "averaging"))
    stored.write_bytes(whole.replace(first["result"].encode(), b"99.5"))
    with pytest.raises(UsageError, match="averaging does not repeat"):
        store(bench, tmp_path / "stored", out="part")


@pytest.mark.slow
def test_a_card_without_references(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that diverges in every setting, a place that cannot be run here, and no stored arms: each is said."""
    monkeypatch.setattr(recipe, "_stored", lambda name: (_ for _ in ()).throw(UsageError(f"{name} is not here")))
    broken = Place("broken", "no such file", {"replicas": 1, "data.corpus": "file:/nowhere.txt"})
    monkeypatch.setattr(benching, "PLACES", (*PLACES, broken))
    monkeypatch.setattr(recipe, "PLACES", (*PLACES, broken))
    monkeypatch.setitem(recipe.SIZES, "quick", Size(2, (0,), (100, 101), ("first", "broken")))
    made = card(bench("memoryless:lr=1e30"))
    (place,) = made["places"]
    assert place["control"]["word"] == "all diverged"
    assert place["result"] is None
    assert place["seconds"] > place["seconds_of_control"] / 100
    assert "reference.csv is not here" in place["note"]
    assert "nowhere" in made["refused"]["broken"]


@pytest.mark.parametrize("text", ["averaging", "no-such", "adamw@sometimes", "adamw:beta2=~0.9"])
def test_what_is_no_arm(bench: Bench, tmp_path: Path, text: str) -> None:
    """Is refused once, before there is a folder."""
    with pytest.raises(UsageError) as raised:
        bench(text)
    assert str(raised.value).count(text.partition("@")[0].partition(":")[0]) <= 2
    assert not (tmp_path / "out").exists()


def test_other_folders(bench: Bench, tmp_path: Path) -> None:
    """A folder of another arm or size, and a table of a bench that has not begun, are refused."""
    (tmp_path / "out").mkdir()
    spec = tmp_path / "out" / "bench.json"
    spec.write_text('{"protocol": 1, "arms": ["x"]}')
    with pytest.raises(UsageError, match="another bench"):
        bench("memoryless")
    spec.write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        bench("memoryless")
    with pytest.raises(UsageError, match="no place"):
        store(bench, tmp_path / "stored", out="none")
    spec.write_text(json.dumps({"protocol": 1, "fingerprint": "", "points": 3, "arms": ["x"]}))
    results = tmp_path / "out" / "results.csv"
    results.write_text("place,arm,seed,result\n")
    with pytest.raises(UsageError, match="an arm that is not the protocol's, or of another size or protocol"):
        store(bench, tmp_path / "stored")
    results.write_text("place\nfirst\n")
    with pytest.raises(UsageError, match=r"results\.csv: is damaged; put it back, or delete it"):
        bench("memoryless")
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / recipe.FACTS).write_text("{")
    with pytest.raises(UsageError, match="of this copy is damaged"):
        recipe.stored_facts()
    with pytest.raises(UsageError, match=r"no-such\.csv is not in this copy; make it"):
        recipe._stored("no-such.csv")
    for words in ([], ["memoryless", "--reference"], ["memoryless", "--into", "x"], ["--reference", "--arms", "lion"]):
        with pytest.raises(UsageError, match=r"ARM|--into|--arms"):
            bench(*words)


MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from twophase.restart import Restart, RestartPolicy, Step, register
from twophase.rule import OuterRule

@register("test-bench-often")
@dataclass(frozen=True)
class Often(RestartPolicy):
    every: int = 2
    def decide(self, state, signal):
        return state, Restart() if signal.round % self.every == 0 else None

@register("test-bench-alone")
@dataclass(frozen=True)
class Alone(RestartPolicy):
    takes_steps: ClassVar[bool] = True
    gain: float = 0.9
    def decide(self, state, signal):
        return state, Step(self.gain, 0.0)
    def canonical(self, rule):
        return OuterRule(1.0, 0.5)

class Nameless(RestartPolicy):
    def decide(self, state, signal):
        return state, None
"""


def test_arms_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class becomes its registered name, alone or as Nesterov's restart; its module is named for the workers."""
    (tmp_path / "bench_policies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment: dict[str, str] = {}
    text, code = read_arm("bench_policies:Often:3", environment)
    assert text == "nesterov:momentum=~0.6@test-bench-often:3"
    assert file_sha256(tmp_path / "bench_policies.py")[:12] == code
    assert read_arm(f"{tmp_path}/bench_policies.py:Alone", environment) == ("test-bench-alone", code)
    assert read_arm("bench_policies:Alone:~0.5", environment)[0] == "test-bench-alone:~0.5"
    assert environment["TWOPHASE_POLICIES"] == "bench_policies"
    assert environment["PYTHONPATH"] == str(tmp_path)
    for text in ("nesterov:lr=0.7@3", "along:~0.5", "auto+filter=orthogonal"):
        assert read_arm(text, environment) == (text, "")
    for text in ("bench_policies:Nameless", "bench_policies:Missing", "no_such_module:Often"):
        with pytest.raises(UsageError, match=text.rpartition(":")[2]):
            read_arm(text, {})
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "bench_lower.py").write_text(MODULE.replace("Often", "often").replace("test-", "lower-"))
    assert read_arm(f"{tmp_path}/a folder/bench_lower.py:often", {})[0].endswith("@lower-bench-often")
    (tmp_path / "statistics.py").write_text(MODULE)
    for text, match in (
        ("statistics.py:Often", "rename the file"),
        ("bench_missing.py:Often", "there is no file"),
        ("bench_policies.py", "name of a class"),
    ):
        with pytest.raises(UsageError, match=match):
            read_arm(f"{tmp_path}/{text}", {})


def test_numbers_of_an_arm_of_ones_own() -> None:
    """A tuned field of another name than those of this package stands in the table and on the card."""
    numbers = {"inner.lr": 0.01, "policy.gain": 0.45}
    arms = (
        Tuned("averaging", {"inner.lr": 0.02}, True, 3, 1.0, 1.0, (1.0, 1.1), None),
        Tuned("test-bench-alone:~0.5", numbers, True, 3, 1.0, 1.0, (0.9, 0.8), None),
    )
    rows = benching.rows_of("first", TuneResults(Path(), "loss", (100, 101), arms))
    header, _, _, row, _ = csv.reader(table_text(rows).splitlines())
    assert dict(zip(header, row, strict=True))["policy.gain"] == "0.45"
    place = benching._place_card(PLACES[0], Size(3, (0,), (100, 101), ("first",)), arms[1].arm, rows, [None])
    assert dict(place.setting) == numbers
