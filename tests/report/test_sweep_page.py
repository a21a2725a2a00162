"""`twophase report` writes a page of any sweep, in whatever state."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import Watched, axe_violations
from pages import data_of, read
from runmaker import SUM, config_of, make_sweep, write_lines
from twophase.cli.main import main
from twophase.files import write_atomic
from twophase.judge.verdict import verdict
from twophase.judge.verdict_text import describe
from twophase.recipes.controls import grid_of
from twophase.report.sweep import sweep_report
from twophase.report.sweep_record import read_sweep
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.table import Row, read_rows, write_rows
from twophase.tasks.registry import config_class
from twophase.tuning.methods import METHODS, read_method

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Output = pytest.CaptureFixture[str]


def written(folder: Path, *words: str) -> str:
    """Write the report by the command; return the page."""
    assert main(["report", str(folder), *words]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    read(text)
    return text


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
    part = (tmp_path / "report-seed=1.html").read_text(encoding="utf-8")
    assert "Only the cells with seed=1: 3 of 9. A sweep of" in part.partition("In short")[0]


def test_what_a_page_leaves_out(sweep_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and values of an axis beyond its limits are counted, and so are cells that could not be run."""
    rows = read_rows(sweep_folder / "cells.csv")
    failed = [dataclasses.replace(row, state="failed") if row.state == "missing" else row for row in rows]
    write_rows(sweep_folder / "cells.csv", failed)
    assert "1 of 12 cells could not be run." in sweep_report(read_sweep(sweep_folder))
    for name, limit, words in (
        ("maps._MOST_MAPS", 0, "The first 0 of 1 maps"),
        ("maps._LONGEST_AXIS", 1, "An axis has more than 1 values"),
    ):
        monkeypatch.setattr(f"twophase.report.{name}", limit)
        assert words in sweep_report(read_sweep(sweep_folder))


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
    """The pages of a sweep with maps, and along one axis."""
    base, sweep = tmp_path_factory.mktemp("pages"), read_sweep(made[0])
    texts = {
        "watched sweep": sweep_report(sweep, refresh=10),
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
        ("watched sweep", 390, "light"),
        ("watched sweep", 1280, "dark"),
        ("one axis", 390, "light"),
    ],
)
def test_in_a_browser(watched: Watched, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    """No violation of WCAG A or AA, no message, no request but the file, and no page wider than its view."""
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
