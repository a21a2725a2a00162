"""`twophase report` writes a page of any run and sweep, in whatever state, and runs nothing from the data."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runmaker import EMA, NESTEROV, SUM, config_of, write_lines, write_run, write_summary
from twophase.cli.main import main
from twophase.cli.report import Wish, report
from twophase.report.run import run_report
from twophase.report.sweep import sweep_report
from twophase.report.sweep_record import read_sweep
from twophase.runs.record import read_record
from twophase.sweep.grid import Axis, Sweep, product
from twophase.sweep.table import read_rows, rows_of, write_rows

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\ud800=cmd|' /C calc'!A0"


class Reader(HTMLParser):
    """The elements and links of a page, and whether all that was opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.names.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br", "input", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        if tag != "path":
            assert self.open.pop() == tag


def harmless(text: str) -> Reader:
    """A page that is well formed, without script, picture, frame or any link out of the folder."""
    read = Reader(text)
    assert not read.open
    assert not {"script", "img", "iframe", "object", "embed", "link", "base", "form"} & set(read.names)
    inside = re.compile(r"data:text/csv;base64,[A-Za-z0-9+/=]+|[\w./%-]+")
    assert all(inside.fullmatch(target) for target in read.links)
    return read


def page_of(folder: Path) -> str:
    text = run_report(read_record(folder))
    harmless(text)
    return text


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run's page has every part, its rule with the form in both writings, and the command to repeat it."""
    folder = write_run(tmp_path / "run", NESTEROV, [0.3] * 3, restart="5", noise=0.01)
    assert main(["report", str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    text = (folder / "report.html").read_text(encoding="utf-8")
    harmless(text)
    for part in ("In short", "Loss", "Diagnosis", "Effective progress and the period", "Rounds", "Repeat it"):
        assert f">{part}</h2>" in text
    assert "Nesterov lr 0.7 momentum 0.9 (sum form), the same as lr 7 in EMA form" in text
    assert "twophase train --steps 60" in text
    assert text.count("<figure>") == 4
    assert "60 of 60, of 1 inner step<" in text
    assert "refresh" not in text


def test_blocks_have_rows_of_their_own(tmp_path: Path) -> None:
    """Each fragment has its own estimate, period and curve."""
    text = page_of(write_run(tmp_path, EMA, [], blocks={"ends": [0.95] * 3, "blocks": [0.3] * 3}))
    assert '<th scope="row">ends</th>' in text
    assert '<th scope="row">blocks</th>' in text
    assert "0.95 (0.95 to 0.95)" in text
    assert "0.3 (0.3 to 0.3)" in text


def test_rounds_of_one_fragment_each(tmp_path: Path) -> None:
    """Fragments that take turns have a curve each in every chart, and a number alone is no name."""
    write_run(tmp_path, EMA, [], blocks={"0": [0.95] * 3, "1": [0.3] * 3})
    lines = []
    for line in map(json.loads, (tmp_path / "rounds.jsonl").read_text().splitlines()):
        for part in (0, 1):
            own = {name: [line[name][part]] for name in ("groups", "fragments")}
            lines.append(line | own | line["groups"][part] | {"step": 2 * line["step"] - 1 + part})
    write_lines(tmp_path / "rounds.jsonl", lines)
    text = page_of(tmp_path)
    charts = re.findall(r"<figure>.*?</figure>", text)
    assert len(charts) == 5
    for chart in charts[1:]:
        assert re.findall(r"</svg>(fragment \d)</li>", chart) == ["fragment 0", "fragment 1"]
    assert '<th scope="row">fragment 0</th>' in text
    assert "<h3>fragment 1 (restart never)</h3>" in text
    assert "<h3>0 " not in text


def test_the_environment_and_times(tmp_path: Path) -> None:
    """The corpus is a list of its parts, phases are in milliseconds, and no line ends inside of a bracket."""
    write_run(tmp_path, SUM, [0.3], 9)
    corpus = {"corpus": "python", "held_out_documents": 264, "share": [1, 2]}
    (tmp_path / "env.json").write_text(json.dumps({"corpus": corpus}))
    text = page_of(tmp_path)
    assert "<ul><li>corpus: python</li><li>held out documents: 264</li><li>share: 1 2</li></ul>" in text
    assert '<th scope="row">outer</th><td class="n">2</td><td class="n">18</td>' in text
    assert "median (ms)" in text
    assert "&lt;update,\N{NO-BREAK SPACE}g&gt;" in text
    assert "<th>was</th>" not in text


def test_a_run_of_one_round(tmp_path: Path) -> None:
    """Of one round the page speaks in the singular, and the chart of norms says which norm it has."""
    text = page_of(write_run(tmp_path, SUM, [0.3], 1))
    assert "All of 1 round." in text
    assert not re.search(r"\b1 (rounds|restarts|inner steps|values)\b", text)
    norms = next(chart for chart in re.findall(r"<figure>.*?</figure>", text) if "norms.csv" in chart)
    assert "pseudo-gradient</li>" in norms


def test_an_elastic_run(tmp_path: Path) -> None:
    """Where replicas come and go, the page counts them."""
    write_run(tmp_path, SUM, [0.3])
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    lines[7] |= {"newcomers": 1, "attempts": 3, "replicas": 1}
    write_lines(tmp_path / "rounds.jsonl", lines)
    text = page_of(tmp_path)
    assert "Replicas that come and go" in text
    assert "newcomers, without weight" in text
    assert "with any: 1 round<" in text
    assert "with more than one: 1 round<" in text


INCOMPLETE: dict[str, tuple[str, Callable[[str], str | None], str]] = {
    "unfinished": ("summary.json", lambda _: None, "The run has not finished"),
    "torn": ("rounds.jsonl", lambda text: text[:-150], "The last line of rounds.jsonl is cut in its middle"),
    "nulls": (
        "rounds.jsonl",
        lambda text: re.sub(r'"cosine": [-\d.e]+', '"cosine": null', text),
        "60 of 60 rounds have no finite number",
    ),
    "huge numbers": (
        "rounds.jsonl",
        lambda text: re.sub(r'"pseudo_gradient_norm": [-\d.e]+', '"pseudo_gradient_norm": 1' + "0" * 400, text),
        "rounds have no finite number",
    ),
    "no config": ("config.yaml", lambda _: None, "config.yaml is missing"),
    "empty": ("rounds.jsonl", lambda _: "", "No round has been recorded yet"),
}
"""The file that changes, its new text (None: no file), and words that the page then has."""


@pytest.mark.parametrize(("name", "change", "words"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_incomplete_runs(tmp_path: Path, name: str, change: Callable[[str], str | None], words: str) -> None:
    """The report of a run that lacks something is written and says what is missing."""
    file = write_run(tmp_path, EMA, [0.95] * 3) / name
    text = change(file.read_text(encoding="utf-8"))
    file.unlink() if text is None else file.write_text(text, encoding="utf-8")
    assert words in page_of(tmp_path)


def test_values_of_a_newer_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that this version does not know are named on the page and by diagnose; those that it knows never are."""
    folder = write_run(tmp_path, EMA, [0.95] * 3)
    assert main(["report", str(folder)]) == 0
    assert "does not know" not in (folder / "report.html").read_text(encoding="utf-8")
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "quantum:\n  entangled: true\n")
    for command in ("report", "diagnose"):
        assert main([command, str(folder)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "config.yaml holds a value that twophase" in said
        assert "'quantum.entangled'" in said
    text = (folder / "report.html").read_text(encoding="utf-8")
    harmless(text)
    assert "&#x27;quantum.entangled&#x27;" in text


def test_hostile_text_is_text(tmp_path: Path) -> None:
    """Markup in every text of a run's folder is shown and not obeyed; a password in a command is not shown."""
    folder = tmp_path / "<b onclick=x>run"
    write_run(folder, EMA, [], blocks={EVIL: [0.95] * 3, "b": [0.5] * 3})
    config = (folder / "config.yaml").read_text().replace("corpus: python", f"corpus: {json.dumps(EVIL[:-20])}")
    (folder / "config.yaml").write_text(config + f"{json.dumps(EVIL[:50])}: 3\n")
    environment = {"twophase": EVIL, EVIL: [EVIL], "command": ["twophase", EVIL, "--storage", "pg://me:secret@host/x"]}
    (folder / "env.json").write_text(json.dumps(environment))
    write_summary(folder, config_of(EMA), exit_reason=EVIL)
    text = page_of(folder)
    assert "&lt;script&gt;alert(1)" in text
    assert "secret" not in text


def test_a_huge_run_is_thinned(tmp_path: Path) -> None:
    """Twenty thousand rounds make a page below two megabytes that says that it is thinned."""
    write_run(tmp_path, EMA, [0.95] * 2, rounds=200)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    with (tmp_path / "rounds.jsonl").open("w") as file:
        for number in range(20_000):
            line = lines[number % 200]
            file.write(re.sub(r'"(step|round)": \d+', rf'"\1": {number + 1}', line) + "\n")
    text = page_of(tmp_path)
    assert len(text) < 2_000_000
    assert "60 of 20,000 rounds, evenly spread" in text
    assert "of 20,000 points the extremes".lower() in text.lower()


def test_watch_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run goes on its page shows its newest self; the last one has no script; Ctrl-C ends the watch well."""
    folder = write_run(tmp_path, EMA, [0.95] * 3, finished=False)
    page, said = folder / "report.html", []
    seen: list[bool] = []

    def look(_: float) -> None:
        seen.append('data-seconds="2"' in page.read_text() and "<script>" in page.read_text())
        if len(seen) == 2:
            write_summary(folder, config_of(EMA))

    monkeypatch.setattr(time, "sleep", look)
    assert report(Wish(folder, watch=2.0), say=said.append) == 0
    assert seen == [True, True]
    assert len(said) == 3
    harmless(page.read_text())
    assert "Show the newest" not in page.read_text()
    (folder / "summary.json").unlink()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert main(["report", str(folder), "--watch", "3"]) == 0
    harmless(page.read_text())
    assert "Show the newest" not in page.read_text()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of neither kind, options of the other kind and a page that cannot be written end with status 2."""
    run = write_run(tmp_path / "run", SUM, [0.3], 9)
    (tmp_path / "empty").mkdir()
    for words, told in (
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path / "empty"], "neither a run"),
        ([run / "config.yaml"], "is a file"),
        ([run, "--runs"], "--runs is for sweeps"),
        ([run, "--where", "a=1"], "--where is for sweeps"),
        ([run, "--watch", "0"], "--watch 0"),
        ([run, "--out", tmp_path], "give the file to write"),
        ([run, "--out", tmp_path / "no" / "page.html"], "cannot be written"),
    ):
        assert main(["report", *map(str, words)]) == 2
        assert told in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- sweeps


PLACES = ((0, 0.3, 0.5), (1, 0.7, 0.5), (2, 0.3, 0.9), (3, 0.7, 0.9))


def make_sweep(folder: Path, seeds: int = 2) -> Sweep:
    """A sweep whose runs are simulated: an arm, its control, a diverged and a missing cell."""
    base = config_of(SUM, rounds=12)
    axes = [Axis("outer.lr", (0.3, 0.7)), Axis("outer.restart", ("never", "3")), Axis("seed", tuple(range(seeds)))]
    cells = product(base, axes, "heavy ball", {"outer.momentum": 0.9})
    cells += product(base, [axes[0], axes[2]], "momentum-free", {"outer.momentum": 0.0, "outer.restart": "never"})
    sweep = Sweep("sweep", base, cells)
    summaries: dict[str, Any] = {}
    for number, (run, config) in enumerate(sweep.runs.items()):
        if number == 1:
            continue
        diverged = number == 5
        write_run(folder / "runs" / run, config.outer.rule(), [0.3], 12, config=config, finished=False)
        write_summary(folder / "runs" / run, config, None if diverged else 8.0 + number)
        summaries[run] = json.loads((folder / "runs" / run / "summary.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(sweep.spec()))
    write_rows(folder / "cells.csv", rows_of(sweep, summaries))
    return sweep


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep's page shows every setting, apart those that diverged or are missing, and leads to the runs' pages."""
    make_sweep(tmp_path)
    assert main(["report", str(tmp_path), "--runs"]) == 0
    said = capsys.readouterr()
    assert "What each arm reached" in said.out
    assert "and those of 11 runs" in said.out
    assert "pages 11/11" in said.err
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    read = harmless(text)
    for part in ("In short", "Heatmaps", "Curves", "Verdict", "Every cell"):
        assert f">{part}</h2>" in text
    assert 'class="best"' in text
    assert text.count("diverged</span>") == 1
    assert text.count("missing</span>") == 1
    assert "2 seeds: " in text
    assert "1 div." in text
    assert "(control: momentum-free)" in text
    # The names of the axes are in the caption, and the corner takes no width.
    caption = '<span class="once">across: outer.lr</span>; <span class="once">down: outer.restart</span></caption>'
    assert caption + "<thead><tr><td></td><th" in text
    assert re.search(r'<span class="once"><a href="[^"]*">seed 0</a></span>, <span class="once">', text)
    targets = {target for target in read.links if not target.startswith("data:")}
    assert len(targets) == 11
    for target in targets:
        assert (tmp_path / target).is_file()
        assert "../../report.html" in (tmp_path / target).read_text()


def test_a_watch_writes_the_pages_of_runs_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn of a watch writes the page of every run, the next ones only of runs whose files have changed."""
    make_sweep(tmp_path)
    pages = {folder.name: folder / "report.html" for folder in (tmp_path / "runs").iterdir()}
    changed = min(pages)
    written: list[set[str]] = []

    def look(_: float) -> None:
        written.append({name for name, page in pages.items() if page.exists()})
        for page in pages.values():
            page.unlink(missing_ok=True)
        if len(written) == 1:
            with (tmp_path / "runs" / changed / "metrics.jsonl").open("a") as file:
                file.write('{"step": 13, "train_loss": 2.0}\n')
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", look)
    said: list[str] = []
    assert report(Wish(tmp_path, watch=2.0, runs=True), say=said.append) == 0
    assert written == [set(pages), {changed}, set()]
    assert "and those of 11 runs" in said[-1]


def test_an_arm_that_never_restarts_has_a_name(tmp_path: Path) -> None:
    """An arm called after its restart policy "never" is headed by words."""
    make_sweep(tmp_path)
    table = tmp_path / "cells.csv"
    table.write_text(table.read_text().replace("heavy ball,", "never,"))
    assert report(Wish(tmp_path), say=lambda _: None) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h3>no restart</h3>" in text
    assert "<h3>never" not in text
    assert '<th scope="row">never' not in text[text.index('id="verdict"') :]


def test_a_paired_control_stands_with_its_pairs(tmp_path: Path) -> None:
    """The map of a paired control has the axes of what it is paired with, no empty cell, and its own values in it."""
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "cells.csv").write_text(
        "arm,run,outer.lr,outer.momentum,perplexity,validation_loss,diverged,state,seconds,control_of,twin_of\n"
        + "".join(f"K=3,a{n},{lr},{mu},8.{n},2.1,false,finished,1,,\n" for n, lr, mu in PLACES)
        + "".join(f"paired,c{n},{lr * mu},{mu},9.{n},2.2,false,finished,1,a{n},\n" for n, lr, mu in PLACES)
    )
    assert report(Wish(tmp_path), say=lambda _: None) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    harmless(text)
    own = text[text.index("paired (control: paired)") :]
    own = own[: own.index("</table>")]
    assert 'class="void"' not in own
    assert re.findall(r'<th scope="row">([^<]*)<', own) == ["0.5", "0.9"]
    assert re.findall(r"<small>lr ([^<]*)<", own) == ["0.15", "0.35", "0.27", "0.63"]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_sweep_without_its_table(tmp_path: Path, how: str) -> None:
    """Without cells.csv the cells come from the sweep's description and the runs' summaries, which is said."""
    make_sweep(tmp_path)
    whole = tmp_path / "cells.csv"
    whole.unlink() if how == "missing" else whole.write_text(whole.read_text()[:-40])
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"cells.csv is {how}" in text
    assert "8.00" in text
    assert text.count("diverged</span>") == 1


def test_a_table_without_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of which only the header is left counts as damaged; without a description there is nothing to show."""
    make_sweep(tmp_path)
    table = tmp_path / "cells.csv"
    table.write_text(table.read_text().splitlines()[0] + "\n")
    assert len(read_sweep(tmp_path).rows) == 12
    assert main(["report", str(tmp_path)]) == 0
    assert "cells.csv is damaged" in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "sweep.json").write_text("{")
    capsys.readouterr()
    for words in ([], ["--where", "outer.lr=0.3"]):
        assert main(["report", str(tmp_path), *words]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert "cells.csv: holds no cells, only their header; repeat the sweep's command to write it" in said


@pytest.mark.parametrize("plan", ["whole", "missing", "{", "[]", '{"stands_for": 3}', '{"stands_for": {"x": []}}'])
def test_twins_in_a_sweep_without_its_table(tmp_path: Path, plan: str) -> None:
    """Cells whose run another one stands for have its results, as in the table; without a plan it is said why not."""
    sweep = make_sweep(tmp_path)
    first, _, *others = sweep.runs
    twin, done = others[:2]
    for run in (first, twin):
        shutil.rmtree(tmp_path / "runs" / run)
    found = {run: json.loads((tmp_path / "runs" / run / "summary.json").read_text()) for run in others if run != twin}
    write_rows(tmp_path / "cells.csv", rows_of(sweep, found, (), {twin: done}))
    rows = read_rows(tmp_path / "cells.csv")
    (tmp_path / "cells.csv").unlink()
    if plan != "missing":
        (tmp_path / "plan.json").write_text(json.dumps({"stands_for": {twin: done}}) if plan == "whole" else plan)
    record = read_sweep(tmp_path)
    cell = next(row for row in record.rows if row.run == twin)
    said = any("plan.json is missing or damaged, so that cells which share" in text for text in record.problems)
    if plan == "whole":
        assert record.rows == rows
        assert (cell.state, cell.twin_of) == ("finished", done)
    else:
        assert (cell.state, cell.twin_of) == ("missing", None)
    assert said is (plan in ("missing", "{", "[]", '{"stands_for": 3}'))


def test_a_damaged_table_without_a_description_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that was cut, beside a description that is damaged as well, ends with status 2, the line and a remedy."""
    make_sweep(tmp_path)
    table = tmp_path / "cells.csv"
    table.write_text(table.read_text()[:-40])
    (tmp_path / "sweep.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(r"line \d+: has \d+ of \d+ values", capsys.readouterr().err)


def test_runs_that_are_gone_or_damaged(tmp_path: Path) -> None:
    """The page of a sweep counts the runs with a result whose folder is gone or damaged, and names the first."""
    make_sweep(tmp_path)
    assert report(Wish(tmp_path), say=lambda _: None) == 0
    assert "runs with a result" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    names = [row.run for row in read_rows(tmp_path / "cells.csv") if row.state == "finished"]
    for name in names[:5]:
        shutil.rmtree(tmp_path / "runs" / name)
    (tmp_path / "runs" / names[5] / "summary.json").write_text("{")
    assert report(Wish(tmp_path), say=lambda _: None) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        f"Of 5 of 11 runs with a result there is no folder below runs/, so that nothing leads to them: {names[0]}; "
        in text
    )
    assert "and 2 more" in text
    assert "Of 1 of 11 runs with a result there is no sound summary.json" in text
    assert f"in the folder: {names[5]}." in text


def test_hostile_names_in_a_sweep(tmp_path: Path) -> None:
    """Names of arms, runs and values are text, and a run's name leads to no place outside of the sweep."""
    make_sweep(tmp_path)
    table = tmp_path / "cells.csv"
    lines = table.read_text().splitlines()
    evil = ['"<script>alert(1)</script>",javascript:alert(1)', "<b>,../../../etc/passwd", "=cmd(),<img src=x>"]
    for number, words in enumerate(evil, start=1):
        lines[number] = ",".join([words, *lines[number].split(",")[2:]])
    table.write_text("\n".join(lines) + "\n")
    assert report(Wish(tmp_path), say=lambda _: None) == 0
    read = harmless((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert all(target.startswith(("data:", "runs/")) for target in read.links)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a run, of an unfinished and hostile one, and of a sweep."""
    base = tmp_path_factory.mktemp("pages")
    blocks = {"ends": [0.3] * 3, "blocks": [0.6] * 3}
    run = write_run(base / "run", NESTEROV, [], blocks=blocks, rounds=12, restart="5", noise=0.01)
    evil = write_run(base / "evil", EMA, [], 8, blocks={EVIL: [0.95] * 3, "b": [0.2]}, finished=False)
    (base / "sweep").mkdir()
    make_sweep(base / "sweep")
    for folder in (run, evil, base / "sweep"):
        assert report(Wish(folder), say=lambda _: None) == 0
    found = {folder.name: folder / "report.html" for folder in (run, evil, base / "sweep")}
    for folder, text in (
        (evil, run_report(read_record(evil), refresh=10)),
        (base / "sweep", sweep_report(read_sweep(base / "sweep"), base / "sweep", refresh=10)),
    ):
        found[f"watched {folder.name}"] = folder / "watched.html"
        found[f"watched {folder.name}"].write_text(text, encoding="utf-8")
    return found


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("evil", 360, "dark"),
        ("watched evil", 360, "light"),
        ("watched sweep", 1280, "dark"),
        *[(n, w, s) for n in ("run", "sweep") for w in (360, 1280) for s in ("light", "dark")],
    ],
)
def test_in_a_browser(browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: Any) -> None:
    """No violation of WCAG A or AA, no message, no request but the file, nothing run, and no page wider than its view.

    The rules are run by the test, past the page's own policy, which lets nothing run.
    """
    from browser import axe_violations

    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: heard.append(dialog.message))
    page.on("request", lambda request: heard.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(pages[name].as_uri())
    for element in page.query_selector_all("summary"):
        element.click()
    assert axe_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert heard == []
    context.close()


@pytest.mark.browser
def test_a_watched_page_keeps_the_place(browser: Browser, tmp_path: Path) -> None:
    """It shows its newest self with what was opened, scrolled to and focused as it was, and not while it is paused."""
    folder = write_run(tmp_path / "run", EMA, [0.95] * 3, 30, finished=False)
    (tmp_path / "page.html").write_text(text := run_report(read_record(folder), refresh=10), encoding="utf-8")
    page = browser.new_page(viewport={"width": 700, "height": 500})
    page.clock.install(time=0)
    page.clock.pause_at(1_000)  # or the seconds that a busy machine takes would count as well
    page.goto((tmp_path / "page.html").as_uri())
    for element in page.query_selector_all("summary"):
        element.click()
    page.focus("#rounds ~ details summary")
    page.evaluate("document.querySelector('#rounds ~ details summary').scrollIntoView()")
    place = "[document.activeElement.textContent, document.activeElement.getBoundingClientRect().top, scrollY > 0]"
    before = page.evaluate(place)
    # The newest has a paragraph more, far above.
    (tmp_path / "page.html").write_text(text.replace("<main>", "<main><p id='new'>new</p>"), encoding="utf-8")
    page.clock.run_for(9_000)
    assert page.query_selector("#new") is None
    with page.expect_event("load"):
        page.clock.run_for(1_500)
    assert page.query_selector("#new") is not None
    name, height, scrolled = page.evaluate(place)
    assert (name, scrolled) == (before[0], before[2]) == ("The rounds as a table", True)
    assert abs(height - before[1]) <= 1
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    page.get_by_label("Show the newest by itself every 10 s").uncheck()
    page.evaluate("document.title = 'still here'")
    page.clock.run_for(60_000)
    page.wait_for_function("1")
    assert page.title() == "still here"
    with page.expect_event("load"):
        page.get_by_role("link", name="Show the newest").click()
    assert page.title() == "run"
    assert not page.is_checked("#again")
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("refresh", [None, 10])
def test_the_policy_holds(browser: Browser, tmp_path: Path, refresh: float | None) -> None:
    """A script that had got into a page would not run: the browser refuses it by the page's own policy."""
    text = run_report(read_record(write_run(tmp_path / "a run", SUM, [0.3], 9, finished=False)), refresh=refresh)
    (tmp_path / "page.html").write_text(text.replace("<main>", "<main><script>document.title=1</script>"))
    page = browser.new_page()
    refused = threading.Event()
    page.on("console", lambda message: refused.set() if "Content Security Policy" in message.text else None)
    page.goto((tmp_path / "page.html").as_uri())
    assert page.title() == "a run"
    assert refused.is_set()
    page.close()
