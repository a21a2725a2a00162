"""`twophase report` writes a page of any run and sweep, in whatever state, and runs nothing from the data."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import Watched, axe_violations
from runmaker import EMA, NESTEROV, SUM, config_of, make_sweep, write_lines, write_run, write_summary
from sitecheck import Page
from twophase.advice import verdict as advice
from twophase.advice.verdict import diagnose
from twophase.cli.main import main
from twophase.files import write_atomic
from twophase.judge.verdict import verdict
from twophase.judge.verdict_text import describe
from twophase.recipes.controls import grid_of
from twophase.report.overlay import overlay
from twophase.report.page import asset
from twophase.report.plot import script
from twophase.report.run import run_report
from twophase.report.sweep import sweep_report
from twophase.report.sweep_record import read_sweep
from twophase.runs.record import read_record
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.table import Row, read_rows, write_rows
from twophase.tasks.registry import config_class
from twophase.theory.advice import advise
from twophase.tuning.methods import METHODS, read_method

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Output = pytest.CaptureFixture[str]
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\ud800=cmd|' /C calc'!A0"


advised = functools.cache(lambda rule, sigma, rounds: advise(rule, [sigma], rounds=rounds))


@pytest.fixture(autouse=True)
def runs_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the theory once about runs that are alike: it takes longer than their pages."""
    monkeypatch.setattr(advice, "advise", lambda rule, sigma, *, rounds: advised(rule, *sigma, rounds))


@dataclasses.dataclass
class Reader(Page):
    """The elements and links of a page; refuses event handlers and elements that are not closed."""

    open: list[str] = dataclasses.field(default_factory=list)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        super().handle_starttag(tag, attrs)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open += [tag] if tag not in ("meta", "input") else []

    def handle_endtag(self, tag: str) -> None:
        """Match the end of an element with its beginning."""
        super().handle_endtag(tag)
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def data_of(text: str) -> list[dict[str, Any]]:
    """Return the data of the charts of a page."""
    return [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]


def harmless(text: str) -> str:
    """Return a page that is well formed and small, without foreign script, picture, frame or link out of the folder."""
    assert len(text.encode()) < 600_000
    scripts = {script(), asset("watch.js")}
    assert set(re.findall(r"<script>(.*?)</script>", text, re.DOTALL)) <= scripts
    data_of(text)
    page = read(text)
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & page.tags
    assert all(re.fullmatch(r"[\w./%-]+", target) for target in page.links + page.loaded)
    return text


def page_of(folder: Path, **options: Any) -> str:
    record = read_record(folder)
    return run_report(record, diagnose(record), **options)


def written(folder: Path, *words: str) -> str:
    """Write the report by the command; return the harmless page."""
    assert main(["report", str(folder), *words]) == 0
    return harmless((folder / "report.html").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run(tmp_path: Path, capsys: Output) -> None:
    """A finished run's page has every part, its rule with the form in both writings, and the command to repeat it."""
    folder = write_run(tmp_path / "run", NESTEROV, [0.3] * 3, restart="5", noise=0.01)
    text = written(folder)
    assert "report.html" in capsys.readouterr().out
    headings = re.findall(r">([^<]*)</h2>", text)
    assert headings[:4] == ["In short", "Loss", "Rounds", "Diagnosis"]
    assert {"Effective progress and the period", "Record", "Repeat it"} <= set(headings)
    lead = text.partition(">Loss</h2>")[0]
    assert "finished: validation loss 2.079 nats a token, perplexity 8<" in lead
    assert "Cannot tell." in lead
    assert "Average the replicas, without outer momentum" in lead  # the change that `report` prints, too
    assert "Nesterov lr 0.7 momentum 0.9 (sum form), the same as lr 7 in EMA form" in text
    assert "twophase train --steps 60" in text
    assert text.count('<figure class="plot">') == 4
    assert "60 of 60, of 1 inner step<" in text
    assert "Show the newest" not in text


@pytest.mark.slow
def test_blocks_have_rows_and_curves_of_their_own(tmp_path: Path) -> None:
    """Each fragment has its own estimate, period and curve, and a number alone is no name; of turns of one each too."""
    write_run(tmp_path, EMA, [], blocks={"ends": [0.95] * 3, "1": [0.3] * 3}, restart="20")
    together = harmless(page_of(tmp_path))
    lines = []
    for line in map(json.loads, (tmp_path / "rounds.jsonl").read_text().splitlines()):
        for part in (0, 1):
            single = {name: [line[name][part]] for name in ("groups", "fragments")}
            single["fragments"][0]["round"] = line["round"]  # the line's is that of the fragment that is ahead
            ahead = {"round": line["round"] + 1, "step": 2 * line["step"] - 1 + part}
            lines.append(line | single | line["groups"][part] | ahead)
    write_lines(tmp_path / "rounds.jsonl", lines)
    for text in (together, harmless(page_of(tmp_path))):
        assert "<dt>Restarts</dt><dd>6</dd>" in text
        charts = data_of(text)
        assert len(charts) == 5
        for chart in charts[1:]:
            assert [curve["name"] for curve in chart["series"]] == ["ends", "fragment 1"]
            assert chart["series"][0]["x"][:2] == [1, 2]
            assert chart["restarts"] == [20, 40, 60]
        assert '<th scope="row">ends</th>' in text
        assert '<th scope="row">fragment 1</th>' in text
        assert "<h3>fragment 1 (restart 20)</h3>" in text
    assert "0.95 (0.95 to 0.95)" in together
    assert "0.3 (0.3 to 0.3)" in together


CHANGED: dict[str, tuple[str, Callable[[str], str | None], list[str]]] = {
    "unfinished": ("summary.json", lambda _: None, ["The run has not finished"]),
    "torn": ("rounds.jsonl", lambda text: text[:-150], ["59"]),
    "no config": ("config.yaml", lambda _: None, ["No configuration"]),
    "no environment": ("env.json", lambda _: None, ["Configuration"]),
    "empty": ("rounds.jsonl", lambda _: "", ["No round has been recorded yet"]),
    "no losses": ("metrics.jsonl", lambda _: "", ["No loss has been recorded"]),
    "environment and times": (
        "env.json",
        lambda _: '{"corpus": {"name": "python", "share": [1, 2]}}',
        [
            '<th scope="row">corpus.share</th><td>1 2</td>',
            '<th scope="row">outer</th><td class="n">2</td><td class="n">120</td>',  # milliseconds
            "&lt;update,\N{NO-BREAK SPACE}g&gt;",  # no line ends inside of a bracket
        ],
    ),
}
"""The file that changes, its new text (None: no file), and words that the page then has."""


@pytest.mark.parametrize(("name", "change", "words"), CHANGED.values(), ids=CHANGED)
def test_changed_runs(tmp_path: Path, name: str, change: Callable[[str], str | None], words: list[str]) -> None:
    """The report of a run that lacks something is written and says what is missing; of one that has more, shows it."""
    file = write_run(tmp_path, EMA, [0.95] * 3) / name
    text = change(file.read_text(encoding="utf-8"))
    file.unlink() if text is None else file.write_text(text, encoding="utf-8")
    page = harmless(page_of(tmp_path))
    assert all(each in page for each in words)


@pytest.mark.slow
def test_hostile_text_is_text(tmp_path: Path) -> None:
    """Markup in every text of a run's folder is shown and not obeyed; a password in a command is not shown."""
    folder = tmp_path / "<b onclick=x>run"
    write_run(folder, EMA, [], blocks={EVIL: [0.95] * 3, "b": [0.5] * 3})
    config = (folder / "config.yaml").read_text().replace("corpus: python", f"corpus: {json.dumps(EVIL[:-20])}")
    (folder / "config.yaml").write_text(config + f"{json.dumps(EVIL[:50])}: 3\n")
    urls = ["pg://me:secret@host/x", "my://me:a/secret@b@host/x", "my://me@host/x?password=secret&b=1"]
    environment = {"twophase": EVIL, EVIL: [EVIL], "command": ["twophase", EVIL, "--storage", *urls]}
    (folder / "env.json").write_text(json.dumps(environment))
    write_summary(folder, config_of(EMA), exit_reason=EVIL)
    text = harmless(page_of(folder))
    assert "&lt;script&gt;alert(1)" in text
    assert "secret" not in text
    (folder / "env.json").write_text('{"command": 3}')
    assert "As it was started" not in page_of(folder)


@pytest.mark.slow
def test_a_huge_run_is_thinned(tmp_path: Path) -> None:
    """Three thousand rounds make a page below 600 kB that says that it is thinned."""
    write_run(tmp_path, EMA, [0.95] * 2, rounds=100)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    with (tmp_path / "rounds.jsonl").open("w") as file:
        for number in range(3_000):
            file.write(re.sub(r'"(step|round)": \d+', rf'"\1": {number + 1}', lines[number % 100]) + "\n")
    text = harmless(page_of(tmp_path))
    assert "Of 3,000 points the extremes" in text


@pytest.mark.slow
def test_losses_that_are_measured_now_and_then_are_lines(tmp_path: Path) -> None:
    """A line of metrics without a loss is no gap in its curve, and takes no point from it."""
    folder = write_run(tmp_path / "run", NESTEROV, sigma=(0.3,), rounds=8)
    lines: list[dict[str, Any]] = [{"step": step, "train_loss": 9.0 - step} for step in range(1, 9)]
    for step, loss in ((3, 5.0), (5, None), (8, 4.0)):
        lines.append({"step": step, "validation_loss": loss})
    write_lines(folder / "metrics.jsonl", sorted(lines, key=lambda line: line["step"]))
    both = overlay([read_record(folder)] * 2, tmp_path)
    curves = [curve for data in data_of(page_of(folder) + both) for curve in data["series"]]
    series = [(curve["x"], curve["y"]) for curve in curves if "x" in curve]  # else its places are another curve's
    assert series.count((list(range(1, 9)), [8, 7, 6, 5, 4, 3, 2, 1])) == 2
    assert series.count(([3, 8], [5, 4])) == 2


@pytest.mark.slow
def test_watch_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """While a run goes on its page shows its newest self; the last one does not; Ctrl-C ends the watch well."""
    folder = write_run(tmp_path, EMA, [0.95] * 3, 20, finished=False)
    page = folder / "report.html"
    watched: list[bool] = []

    def look(_: float) -> None:
        watched.append('data-seconds="2"' in page.read_text() and asset("watch.js") in page.read_text())
        if len(watched) == 2:
            raise KeyboardInterrupt
        if len(watched) == 4:
            write_summary(folder, config_of(EMA, rounds=20))

    monkeypatch.setattr(time, "sleep", look)
    for turns in (2, 4):
        assert "Show the newest" not in written(folder, "--watch", "2")
        assert watched == [True] * turns
        assert capsys.readouterr().out.count("run      ") == 1  # the words come once, at the end


# -------------------------------------------------------------------------------------------------------------- sweeps


PLACES = ((0, 0.3, 0.5), (1, 0.7, 0.5), (2, 0.3, 0.9), (3, 0.7, 0.9))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    """A sweep that is made once and copied."""
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    folder.mkdir()
    return folder, make_sweep(folder)


@pytest.fixture
def sweep_folder(made: tuple[Path, Sweep], tmp_path: Path) -> Path:
    return shutil.copytree(made[0], tmp_path / "sweep")


@pytest.mark.slow
def test_a_sweep(sweep_folder: Path, capsys: Output) -> None:
    """A sweep's page shows every setting, apart those that diverged or are missing, and leads to the runs' pages."""
    text = written(sweep_folder, "--runs")
    output = capsys.readouterr()
    assert "What each arm reached" in output.out
    for part in ("In short", "Map and curves", "Verdict", "Every cell"):
        assert f">{part}</h2>" in text
    assert text.index(describe(verdict(read_rows(sweep_folder / "cells.csv"))).splitlines()[2][:60]) < text.index(
        "Map and"
    )
    assert "best of all</small>" in text
    assert "(control: momentum-free)" in text
    assert "sound folder" not in text
    # Every setting with a loss is a button, with the best of each arm on the chart at first; what has none is text.
    numbers = re.findall(r'aria-label="[^"]*: its curve" data-curve="(\d+)"', text)
    assert sorted(map(int, numbers)) == list(range(6))
    drawn = text[text.index("Map and curves") : text.index(">Verdict</h2>")]
    assert drawn.count(">diverged</") == 1
    assert drawn.count(">missing</") == 1
    (data,) = data_of(text)
    assert (len(data["series"]), data["shown"]) == (6, [0, 1])
    # The names of the axes are in the caption, and the learning rates below the map, as in the figure.
    assert '<span class="once">across: outer.lr</span>; <span class="once">up: outer.restart</span></caption>' in text
    assert re.search(r'<tfoot><tr><td></td><th scope="col">0.3</th><th scope="col">0.7</th></tr></tfoot>', text)
    targets = set(read(text).links)
    assert len(targets) == 11
    for target in targets:
        assert "../../report.html" in (sweep_folder / target).read_text()


def test_a_page_replaces_no_other_file(sweep_folder: Path, capsys: Output) -> None:
    """A file in the place of a run's page stays as it is."""
    first = min((sweep_folder / "runs").iterdir())
    (first / "report.html").write_text("mine")
    assert main(["report", str(sweep_folder), "--runs"]) == 2
    assert f"{first / 'report.html'}" in capsys.readouterr().err
    assert (first / "report.html").read_text() == "mine"


def test_a_paired_control_stands_with_its_pairs(tmp_path: Path) -> None:
    """The map of a paired control has the axes of what it is paired with, no empty cell, and its own values in it."""
    (tmp_path / "cells.csv").write_text(
        "arm,run,outer.lr,outer.momentum,perplexity,validation_loss,diverged,state,seconds,control_of\n"
        + "".join(f"K=3,a{n},{lr},{mu},8.{n},2.1,false,finished,1,\n" for n, lr, mu in PLACES)
        + "".join(f"paired,c{n},{lr * mu},{mu},9.{n},2.2,false,finished,1,a{n}\n" for n, lr, mu in PLACES)
    )
    text = written(tmp_path)
    assert "sweep.json is missing" in text
    heatmap = text[text.index("paired (control: paired)") :].partition("</table>")[0]
    assert 'class="void"' not in heatmap
    assert re.findall(r'<th scope="row">([^<]*)<', heatmap) == ["0.9", "0.5"]  # momentum grows upwards
    assert re.findall(r"<small>lr ([^<]*)<", heatmap) == ["0.27", "0.63", "0.15", "0.35"]


def test_a_part_of_a_sweep_has_a_page_of_its_own(tmp_path: Path) -> None:
    """It says first which cells it is of, and the page of the whole stays as it was."""
    (tmp_path / "cells.csv").write_text(
        "arm,run,outer.lr,seed,perplexity,validation_loss,diverged,state,seconds,control_of\n"
        + "".join(f"a,r{seed}{lr},{lr},{seed},8.5,2.1,false,finished,1,\n" for seed in range(3) for lr in (1, 2, 3))
    )
    whole = written(tmp_path)
    assert "Only the cells" not in whole
    assert written(tmp_path, "--where", "seed=1") == whole
    part = harmless((tmp_path / "report-seed=1.html").read_text(encoding="utf-8"))
    assert "Only the cells with seed=1: 3 of 9. A sweep of" in part.partition("In short")[0]


def test_what_a_page_leaves_out(sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, maps and values of an axis beyond its limits are counted, and so are cells that could not be run."""
    rows = read_rows(sweep_folder / "cells.csv")
    failed = [dataclasses.replace(row, state="failed") if row.state == "missing" else row for row in rows]
    write_rows(sweep_folder / "cells.csv", failed)
    assert "1 of 12 cells could not be run." in sweep_report(read_sweep(sweep_folder))
    for name, limit, words in (
        ("maps._MOST_MAPS", 0, "The first 0 of 1 maps"),
        ("maps._LONGEST_AXIS", 1, "An axis has more than 1 values"),
        ("rounds.MOST_BLOCKS", 1, "The charts show the first 1 of 2 blocks"),
    ):
        monkeypatch.setattr(f"twophase.report.{name}", limit)
        run = write_run(tmp_path / "run", SUM, [], 9, blocks={"ends": [0.3], "rest": [0.6]})
        assert words in page_of(run) + sweep_report(read_sweep(sweep_folder))


AXES: dict[str, tuple[list[Axis], list[str]]] = {
    "restarts": ([Axis("outer.restart", ("never", "3")), Axis("seed", (0, 1))], ["no restart", "K=3"]),
    "seeds": ([Axis("seed", (0, 1, 2))], ["the setting"]),
    "learning rates near each other": ([Axis("outer.lr", (0.3, 0.30000001))], ["lr 0.3", "lr 0.3"]),
    "a learning rate": ([Axis("outer.lr", (0.3, 0.7))], ["lr 0.3", "lr 0.7"]),
}
"""Axes of a sweep, and its settings."""


@pytest.mark.parametrize(("axes", "names"), AXES.values(), ids=AXES)
def test_a_sweep_along_one_axis_is_points(tmp_path: Path, axes: list[Axis], names: list[str]) -> None:
    """A sweep of one axis, or none but seeds, draws a point for each run, a column a setting, and no None."""
    base = config_of(SUM, rounds=9)
    sweep = Sweep("sweep", base, grid_of(base, axes, controls=False))
    (tmp_path / "sweep.json").write_text(json.dumps(sweep.spec()))
    write_rows(tmp_path / "cells.csv", [Row(c.arm, c.run_id, sweep.values(c), "finished", 8.5) for c in sweep.cells])
    text = written(tmp_path)
    assert "None" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    (data,) = data_of(text)
    assert data["names"] == names
    assert sum(len(curve["y"]) for curve in data["series"]) == len(sweep.cells)


@pytest.mark.parametrize("column", ["perplexity", "validation_loss"])
def test_a_table_with_other_results_than_the_runs(sweep_folder: Path, capsys: Output, column: str) -> None:
    """A digit of cells.csv that was changed is refused with the run and the remedy, whatever --where asks for."""
    rows = read_rows(sweep_folder / "cells.csv")
    index = next(k for k, row in enumerate(rows) if row.state == "finished" and row.values["outer.lr"] == 0.7)
    rows[index] = dataclasses.replace(rows[index], **{column: "diverged" if column == "state" else 8.0625})
    write_rows(sweep_folder / "cells.csv", rows)
    assert main(["report", str(sweep_folder), "--where", "outer.lr=0.3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cells.csv" in line
    assert "repeat the sweep's command" in line


def test_a_table_with_other_cells_than_the_sweep(sweep_folder: Path, capsys: Output) -> None:
    """A changed value, a missing, repeated or moved line of cells.csv is refused; the untouched table is not."""
    assert main(["report", str(sweep_folder)]) == 0
    table = sweep_folder / "cells.csv"
    rows = read_rows(table)
    changed = [
        [rows[0], dataclasses.replace(rows[1], arm="other"), *rows[2:]],
        rows[:-1],
        [*rows, rows[0]],
        [rows[1], rows[0], *rows[2:]],
    ]
    for other in changed:
        write_rows(table, other)
        capsys.readouterr()
        assert main(["report", str(sweep_folder)]) == 2
        assert "cells.csv" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lm", "digits"])
def test_cells_with_values_that_their_description_leaves_out(tmp_path: Path, task: str) -> None:
    """A sweep is read in which only some arms name a value that is left out of a tree while it has its default."""
    base = config_class(task)()
    cells = [method.cell(method.start, 7) for method in (read_method(text, base) for text in METHODS)]
    later = [("inner.schedule", "cosine"), ("compute.autotune", "true")] + [("data.split", "non-iid")] * (task == "lm")
    cells += [cell for path, value in later for cell in product(base, [Axis(path, (value,))], arm=path)]
    sweep = Sweep("fresh", base, cells)
    (tmp_path / "sweep.json").write_text(json.dumps(sweep.spec()))
    write_rows(tmp_path / "cells.csv", [Row(c.arm, c.run_id, sweep.values(c), "missing") for c in cells])
    record = read_sweep(tmp_path)
    assert len(record.rows) == len(cells)
    assert {row.values["outer.filter"] for row in record.rows} == {"none", "orthogonal"}


@pytest.mark.slow
def test_a_large_sweep_is_small_enough(tmp_path: Path) -> None:
    """Four hundred runs, of more rounds than a curve then has points, make a page below 600 kB."""
    base = config_of(SUM, rounds=9)
    axes = [
        Axis("outer.lr", tuple(0.01 * k for k in range(1, 21))),
        Axis("outer.momentum", tuple(0.04 * k for k in range(20))),
    ]
    sweep = Sweep("sweep", base, product(base, axes, "heavy ball"))
    write_lines(tmp_path / "lines", [{"step": 16 * t, "train_loss": 2.0 + 1.0 / t} for t in range(1, 101)])
    for run in sweep.runs:
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "metrics.jsonl").hardlink_to(tmp_path / "lines")
    write_rows(tmp_path / "cells.csv", [Row(c.arm, c.run_id, sweep.values(c), "finished", 8.5) for c in sweep.cells])
    written(tmp_path)


@pytest.mark.slow
def test_runs_over_each_other(tmp_path: Path, capsys: Output) -> None:
    """Several runs share charts; the page says in which settings they differ, and leads to their own pages."""
    names = ["a", "b", "<i>"]
    for name, rule, rounds in zip(names, (SUM, NESTEROV, EMA), (9, 12, 12), strict=True):
        write_run(tmp_path / name, rule, [0.3], rounds, finished=name != "b")
    written(tmp_path / "a")
    assert main(["report", *(str(tmp_path / name) for name in names)]) == 0
    assert f"page {tmp_path / 'compare.html'}" in capsys.readouterr().out
    text = harmless((tmp_path / "compare.html").read_text(encoding="utf-8"))
    assert [[curve["name"] for curve in chart["series"]] for chart in data_of(text)] == [names] * 4
    rows = dict(re.findall(r'<th scope="row">([\w.]+)</th>(.*?)</tr>', text.partition("Settings that differ")[2]))
    assert {"outer.method", "outer.form", "steps"} <= set(rows)
    assert "outer.momentum" not in rows
    assert "b: The run has not finished" in text
    assert read(text).links == ["a/report.html", "b", "%3Ci%3E"]


def test_a_metric_named_as_a_rounds_number_is_no_curve_of_it(tmp_path: Path) -> None:
    """A task may evaluate a cosine of its own; and without a perplexity the last validation loss is the result."""
    for name in ("a", "b"):
        metrics = write_run(tmp_path / name, NESTEROV, [0.3], 9, finished=False) / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            line |= {"cosine": 77.5, "validation_loss": 0.625}
            line.pop("perplexity", None)
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "77.5" not in text
    assert "last validation loss 0.625" in text
    assert re.search("0.625[^<]*, the last one measured", page_of(tmp_path / "a"))


def test_hostile_names_in_a_sweep(sweep_folder: Path) -> None:
    """Names of arms, runs and values are text, and a run's name leads to no place outside of the sweep."""
    (sweep_folder / "sweep.json").unlink()  # which says the names, too
    table = sweep_folder / "cells.csv"
    lines = table.read_text().splitlines()
    evil = ['"<script>alert(1)</script>",javascript:alert(1)', "<b>,../../../etc/passwd", "=cmd(),<img src=x>"]
    for number, words in enumerate(evil, start=1):
        lines[number] = ",".join([words, *lines[number].split(",")[2:]])
    table.write_text("\n".join(lines) + "\n")
    assert all(target.startswith("runs/") for target in read(written(sweep_folder)).links)


# ------------------------------------------------------------------------------------------------------------ mistakes


def damage(sweep: Path, name: str, text: str) -> Path:
    (sweep / name).write_text(text)
    return sweep


MISTAKES: dict[str, Callable[[Path, Path], list[object]]] = {
    "none": lambda run, _: [run / "none"],
    "empty": lambda run, _: [run.parent / "empty"],
    "--runs": lambda run, _: [run, "--runs"],
    "--where:": lambda run, _: [run, "--where", "a=1"],
    "--where: ": lambda _, sweep: [sweep, "--where", "a"],
    "sweep": lambda run, sweep: [run, sweep],
}
"""Words of the refusal, and from a run and a sweep to the words of the command."""


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(sweep_folder: Path, tmp_path: Path, capsys: Output, message: str) -> None:
    """A folder of neither kind, damage, options of the other kind and a page that cannot be written: status 2."""
    (tmp_path / "empty").mkdir()
    run = write_run(tmp_path / "run", SUM, [0.3], 9)
    assert main(["report", *map(str, MISTAKES[message](run, sweep_folder))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_verdict_that_was_cut_off(sweep_folder: Path, capsys: Output) -> None:
    """After a full disk between its two files the same command completes it."""

    def full(path: Path, text: str) -> None:
        if path.suffix == ".md":
            raise OSError(28, "No space left on device")
        write_atomic(path, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twophase.judge.verdict_text.write_atomic", full)
        assert main(["report", str(sweep_folder)]) == 2
    assert "the verdict cannot be written" in capsys.readouterr().err
    assert written(sweep_folder)
    assert (sweep_folder / "verdict.md").is_file()


# ----------------------------------------------------------------------------------------------------------- Chromium


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, made: tuple[Path, Sweep]) -> dict[str, Path]:
    """The pages of a run far down, of a hostile one, of several, of a sweep with maps, and along one axis."""
    base = tmp_path_factory.mktemp("pages")
    blocks = {"ends": [0.3] * 3, "blocks": [0.6] * 3}
    run = write_run(base / ("far_down_" * 20), NESTEROV, [], blocks=blocks, rounds=8, restart="5", noise=0.01)
    evil = write_run(base / "evil", EMA, [], 8, blocks={EVIL: [0.95] * 3, "b": [0.2]}, finished=False)
    sweep = read_sweep(made[0])
    texts = {
        "run": page_of(run),
        "watched evil": page_of(evil, refresh=10),
        "watched sweep": sweep_report(sweep, refresh=10),
        "several": overlay([read_record(run), read_record(evil)], base),
        "one axis": sweep_report(read_sweep(made[0], {"outer.lr": "0.3", "outer.momentum": "0.9"})),
    }
    files = {name: base / f"{name}.html" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text, encoding="utf-8")
    return files


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("watched evil", 360, "dark"),
        ("run", 1280, "light"),
        ("run", 320, "dark"),
        ("watched sweep", 390, "light"),
        ("watched sweep", 1280, "dark"),
        ("several", 390, "dark"),
        ("one axis", 390, "light"),
    ],
)
def test_in_a_browser(watched: Watched, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    """No violation of WCAG A or AA, no message, no request but the file, nothing run, and no page wider than its view.

    The rules are run by the test, past the page's own policy, which lets nothing run. The pages of several runs and
    along one axis are seen once, and narrow: they are made of nothing that those of a run and a sweep have not.
    """
    page = watched.show(pages[name], width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert axe_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert watched.troubles == []


@pytest.mark.browser
def test_numbers_put_their_curves_on_the_chart(browser: Browser, pages: dict[str, Path]) -> None:
    """Pressing a number, by mouse or keyboard, adds its curve; again, or its name, takes it out; a watch keeps them."""
    watched = Watched(browser.new_page())
    page = watched.page
    page.goto(pages["watched sweep"].as_uri())
    names = page.locator("figure.plot .legend button")
    before = names.all_text_contents()
    numbers = page.locator("[data-curve][aria-pressed=false]")
    label = numbers.first.get_attribute("aria-label") or ""
    numbers.first.click()
    added = set(names.all_text_contents()) - set(before)
    assert len(added) == 1
    assert label.split(", ", 1)[1].removesuffix(": its curve") in added.pop()
    chosen = page.get_by_role("button", name=label)
    assert chosen.get_attribute("aria-pressed") == "true"
    page.reload()
    assert chosen.get_attribute("aria-pressed") == "true"
    assert len(names.all()) == len(before) + 1
    chosen.press("Enter")
    assert names.all_text_contents() == before
    names.first.click()
    assert names.all_text_contents() == before[1:]
    while numbers.count():
        numbers.first.click()
    assert len(names.all()) == 6  # all seven cells but the one without a run
    page.reload()
    for _ in range(6):
        names.first.click()
    assert names.all() == []
    assert watched.troubles == []
    page.close()


@pytest.mark.browser
def test_a_watched_page_keeps_the_place(browser: Browser, tmp_path: Path) -> None:
    """It shows its newest self with what was opened, scrolled to and focused as it was, and not while it is paused."""
    folder = write_run(tmp_path / "run", EMA, [0.95] * 3, 30, finished=False)
    (tmp_path / "page.html").write_text(text := page_of(folder, refresh=10), encoding="utf-8")
    page = browser.new_page(viewport={"width": 700, "height": 500})
    page.clock.install(time=0)
    page.clock.pause_at(1_000)  # or the seconds that a busy machine takes would count as well
    page.goto((tmp_path / "page.html").as_uri())
    for element in page.query_selector_all("summary"):
        element.click()
    page.focus("#settings ~ details summary")
    page.evaluate("document.querySelector('#settings ~ details summary').scrollIntoView()")
    script = "[document.activeElement.textContent, document.activeElement.getBoundingClientRect().top, scrollY > 0]"
    before = page.evaluate(script)
    # The newest has a paragraph more, far above.
    (tmp_path / "page.html").write_text(text.replace("<main>", "<main><p id='new'>new</p>"), encoding="utf-8")
    page.clock.run_for(9_000)
    assert page.query_selector("#new") is None
    with page.expect_event("load"):
        page.clock.run_for(1_500)
    assert page.query_selector("#new") is not None
    name, height, scrolled = page.evaluate(script)
    assert (name, scrolled) == (before[0], before[2])
    assert scrolled
    assert name.startswith("Configuration, ")
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
def test_the_policy_holds(browser: Browser, tmp_path: Path) -> None:
    """A script that had got into a page would not run: the browser refuses it by the page's own policy."""
    text = page_of(write_run(tmp_path / "a run", SUM, [0.3], 9, finished=False), refresh=10)
    (tmp_path / "page.html").write_text(text.replace("<main>", "<main><script>document.title=1</script>"))
    page = browser.new_page()
    refused = threading.Event()
    page.on("console", lambda message: refused.set() if "Content Security Policy" in message.text else None)
    page.goto((tmp_path / "page.html").as_uri())
    assert page.title() == "a run"
    assert refused.is_set()
    page.close()
