"""Reading a run's folder: what is missing is named, one torn last line is left out, other damage is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmaker import EMA, config_of, write_lines, write_run
from twophase.advice.text import describe
from twophase.advice.verdict import diagnose
from twophase.base.config import UsageError, dump_yaml
from twophase.runs.record import LARGEST, WHOLE, RunRecord, _columns, read_record, run_config

Lines = list[dict[str, Any]]


def changed(folder: Path, change: Callable[[Lines], Lines]) -> RunRecord:
    """The record of a run of 20 rounds whose lines were changed."""
    write_run(folder, EMA, [0.3] * 3, 20)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    write_lines(folder / "rounds.jsonl", change(lines))
    return read_record(folder)


def put(lines: Lines, **values: Any) -> Lines:
    """The lines with the sixth changed."""
    lines[5] |= values
    return lines


def test_a_recorded_loop_is_named(tmp_path: Path) -> None:
    """What needs its model says that the run is of another program, and not that its configuration is damaged."""
    (tmp_path / "config.yaml").write_text("recorded: true\nsteps: 8\n")
    with pytest.raises(UsageError, match="recorded from another program's loop"):
        run_config(tmp_path, dict)


@pytest.mark.parametrize(
    ("environment", "config", "unit"),
    [
        ({"loss_unit": "bits a byte"}, {"task.name": "digits"}, " bits a byte"),
        ({"loss_unit": ""}, {}, ""),
        ({}, {"task.name": "digits"}, ""),
        ({}, {"recorded": True}, ""),
        ({"loss_unit": 3}, {}, " nats a token"),
    ],
)
def test_unit_of_the_losses(environment: dict[str, Any], config: dict[str, Any], unit: str) -> None:
    """The unit is the one that the task has described; earlier versions recorded none, and had one task with a unit."""
    assert RunRecord(Path(), config, environment).unit == unit


def test_missing_rounds_are_named(tmp_path: Path) -> None:
    """Nothing is said of a sound folder; a gap is a sentence with its length and place."""
    record = changed(tmp_path / "sound", lambda lines: lines)
    assert record.blocks[0].number.tolist() == list(range(1, 21))
    assert record.blocks[0].index.tolist() == list(range(20))
    assert (record.recorded, record.problems) == (20, [])
    record = changed(tmp_path / "gap", lambda lines: lines[:5] + lines[8:])
    assert record.problems == ["Rounds of fragment 0 are missing: 3, the first of them before round 9."]
    assert record.recorded == diagnose(record).rounds == 17


DAMAGE: dict[str, Callable[[Lines], Lines]] = {
    "rounds that come twice": lambda lines: lines[:5] + lines[4:],
    "seconds that are none": lambda lines: put(lines, seconds=3),
    "a round that goes back": lambda lines: [*lines[:4], lines[6], *lines[4:6]],
    "a list for a round": lambda lines: put(lines, round=[1], fragments=[]),
    "a float for a round": lambda lines: put(lines, round=6.5, fragments=[]),
    "a fragment without a name": lambda lines: put(lines, fragments=[{"round": 6}]),
    "null for a group": lambda lines: put(lines, groups=[None]),
    "a number for a group": lambda lines: put(lines, groups=[3]),
    "a number for the fragments": lambda lines: put(lines, fragments=3),
    "an object for the groups": lambda lines: put(lines, groups={"0": 1}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_rounds_are_refused(tmp_path: Path, damage: Callable[[Lines], Lines]) -> None:
    """What no trainer writes is refused with the file, the line and a remedy."""
    with pytest.raises(UsageError, match=r"rounds\.jsonl: line 6 is no round as twophase writes it .*take the line"):
        changed(tmp_path, damage)


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "summary.json", "metrics.jsonl", "rounds.jsonl"])
def test_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file with foreign bytes is refused by its name; a log's torn last line alone is left out and named."""
    path = write_run(tmp_path, EMA, [0.3] * 3, 20) / name
    whole = path.read_bytes()
    path.write_bytes(b"{{{\n" + whole)
    with pytest.raises(UsageError, match=rf"^{path}: .*put it back"):
        read_record(tmp_path)

    def denied(read: Callable[..., Any]) -> Callable[..., Any]:
        def answer(self: Path, *arguments: Any, **options: Any) -> Any:
            if self == path:
                raise PermissionError(13, "Permission denied", str(self))
            return read(self, *arguments, **options)

        return answer

    with monkeypatch.context() as patch:
        for method in ("read_bytes", "read_text"):
            patch.setattr(Path, method, denied(getattr(Path, method)))
        with pytest.raises(UsageError, match=rf"^{path}: .*Permission denied\).*; put it back, or move it"):
            read_record(tmp_path)
    if name.endswith(".jsonl"):
        path.write_bytes(whole[:-30])
        assert read_record(tmp_path).problems == [f"The last line of {name} is cut in its middle; left out."]


@pytest.mark.parametrize("fragments", ["3", ".inf", "{a: b}", "a text"])
def test_fragments_that_are_no_list(tmp_path: Path, fragments: str) -> None:
    """A configuration whose fragments are no list counts as one of a single fragment."""
    write_run(tmp_path, EMA, [0.3] * 3, 20)
    (tmp_path / "config.yaml").write_text(f"sync: {{fragments: {fragments}}}\n")
    assert [block.name for block in read_record(tmp_path).blocks] == [WHOLE]


@given(st.floats() | st.integers() | st.just(10**400) | st.booleans() | st.none() | st.text(max_size=3))
def test_numbers_of_a_line(value: Any) -> None:
    """A number up to the largest is itself, true and false count as 1 and 0, and all else is nan."""
    (number,) = _columns([{"a": value}])["a"]
    if isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST:
        assert number == float(value)
    else:
        assert math.isnan(number)


def test_fragments_are_no_further_rounds(tmp_path: Path) -> None:
    """Two fragments that sync apart have two lines a round, and half as many rounds."""
    write_run(tmp_path, EMA, [], 20, blocks={"a": [0.3], "b": [0.5]}, config=config_of(EMA, rounds=40, inner_steps=2))
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    apart = [
        line | {"step": 2 * line["round"] - 1 + index, "fragments": [line["fragments"][index]]}
        | {"groups": [line["groups"][index]]}
        for line in lines
        for index in (0, 1)
    ]  # fmt: skip
    write_lines(tmp_path / "rounds.jsonl", apart)
    (tmp_path / "config.yaml").write_text(dump_yaml(config_of(EMA, rounds=40, inner_steps=2)))
    record = read_record(tmp_path)
    assert [block.name for block in record.blocks] == ["a", "b"]
    assert len(record.rounds["step"]) == 40
    assert "20 of 20 rounds recorded" in describe(diagnose(record), "run")
    assert not any("missing" in problem or "increase" in problem for problem in record.problems)


def test_a_fragment_without_an_outer_step_makes_no_block(tmp_path: Path) -> None:
    """Where a filter has left out all of a fragment's replicas in a common sync, no group is taken for another's."""
    write_run(tmp_path, EMA, [], 20, blocks={"a": [0.3], "b": [0.5]})
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    del lines[5]["groups"][0]
    write_lines(tmp_path / "rounds.jsonl", lines)
    assert [(block.name, len(block.number)) for block in read_record(tmp_path).blocks] == [("a", 19), ("b", 19)]


@pytest.mark.parametrize("name", ["pseudo_gradient_norm", "buffer_norm", "gain"])
def test_the_largest_numbers_warn_of_nothing(tmp_path: Path, name: str) -> None:
    """Norms whose square or sum overflows are described, without a warning."""

    def change(lines: Lines) -> Lines:
        for line in lines[3:12]:
            line["groups"][0][name] = 1e308
        return lines

    assert describe(diagnose(changed(tmp_path, change)), "run")


def test_lost_last_rounds_are_named(tmp_path: Path) -> None:
    """A summary that counts more rounds than the log has."""
    folder = write_run(tmp_path, EMA, [0.3], 10)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    summary = json.loads((folder / "summary.json").read_text()) | {"rounds": len(lines)}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "rounds.jsonl").write_text("".join(lines[:6]))
    assert "The last rounds are missing: 4, after round 6." in read_record(folder).problems
