"""The page of a sweep shows what is in its rows, in whatever state the sweep is."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import Watched
from pages import EVIL, data_of, read, written
from runmaker import make_sweep
from twophase.cli.main import main
from twophase.report.sweep import read_sweep, sweep_report
from twophase.sweeps.table import State, read_rows, readable, settings, write_rows

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HEAD = "arm,run,outer.lr,seed,perplexity,validation_loss,diverged,state,seconds,control_of\n"
CELL = re.compile(r'<td class="\w+"[^>]*>\s*<(?:span|button)[^>]*>([^<]*)<')


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that is made once and copied."""
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    folder.mkdir()
    make_sweep(folder)
    return folder


@pytest.fixture
def sweep_folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "sweep")


@pytest.mark.slow
def test_a_sweep(sweep_folder: Path) -> None:
    """The maps have each setting's result, those with a run are buttons, and every run's page leads back."""
    text, rows = written(sweep_folder, "--runs"), read_rows(sweep_folder / "cells.csv")
    cells = settings(rows)
    words = {"diverged": "div.", "missing": "\N{MIDDLE DOT}"}
    assert sorted(CELL.findall(text)) == sorted(readable(cell.result) or words[cell.state] for cell in cells)
    best = min(cell.result for cell in cells if cell.result)
    assert f"<dt>best perplexity</dt><dd>{readable(best)} " in text
    # The best setting of each method is on the chart at first.
    (data,) = data_of(text)
    assert sorted(map(int, re.findall(r'data-curve="(\d+)"', text))) == [*range(6)] == [*range(len(data["series"]))]
    shown = [data["series"][number]["name"] for number in data["shown"]]
    assert [name.split(",")[0] for name in shown] == ["heavy ball", "momentum-free"]
    assert f"restart 3: {readable(best)}" in shown[0]
    targets = set(read(text).links)
    assert len(targets) == len({row.run for row in rows if row.state != "missing"})
    for target in targets:
        assert "../../report.html" in (sweep_folder / target).read_text()


def test_an_unfinished_sweep_loads_again(sweep_folder: Path) -> None:
    """Only the page of a sweep with missing cells does; cells that could not be run are counted."""
    again = 'data-refresh="7"'
    assert again in sweep_report(read_sweep(sweep_folder), refresh=7)
    rows = read_rows(sweep_folder / "cells.csv")
    failed = [dataclasses.replace(row, state="failed") if row.state == "missing" else row for row in rows]
    write_rows(sweep_folder / "cells.csv", failed)
    text = sweep_report(read_sweep(sweep_folder), refresh=7)
    assert again not in text
    assert "1 of 12 cells could not be run" in text


def test_a_part_of_a_sweep_has_a_page_of_its_own(tmp_path: Path) -> None:
    """It says which cells it is of, and the page of the whole stays as it was."""
    lines = [f"a,r{seed}{lr},{lr},{seed},8.5,2.1,false,finished,1,\n" for seed in range(3) for lr in (1, 2, 3)]
    (tmp_path / "cells.csv").write_text(HEAD + "".join(lines))
    whole = written(tmp_path)
    assert "3 of" not in whole
    assert written(tmp_path, "--where", "seed=1.0", "--out", str(tmp_path / "part.html")) == whole
    assert "seed=1.0" in (part := (tmp_path / "part.html").read_text(encoding="utf-8"))
    assert set(re.findall(r'<tr><th scope="row">r(\d)', part)) == {"1"}
    (tmp_path / "cells.csv").write_text(HEAD + "".join([*lines, "b,r9,,1,8.5,2.1,false,finished,1,\n"]))
    main(["report", str(tmp_path), "--where", "outer.lr=", "--out", str(tmp_path / "part.html")])
    assert set(re.findall(r'<tr><th scope="row">r(\d)', (tmp_path / "part.html").read_text())) == {"9"}


@pytest.mark.parametrize("states", [[], ["missing", "missing"], ["diverged", "failed"]])
def test_a_sweep_without_a_result_has_a_page(tmp_path: Path, states: list[State]) -> None:
    """A table without a finished cell, or without a cell, is told as it is: no number, no chart."""
    (tmp_path / "cells.csv").write_text(HEAD + "".join(f"a,r{k},{k},0,,,,{each},,\n" for k, each in enumerate(states)))
    text = written(tmp_path)
    assert data_of(text) == []
    assert f"<dt>settings diverged</dt><dd>{states.count('diverged')}</dd>" in text
    assert "best perplexity" not in text


def test_hostile_names_in_a_sweep(sweep_folder: Path) -> None:
    """Names of methods, runs and values are text, and a run's name leads to no place outside of the sweep."""
    rows = read_rows(sweep_folder / "cells.csv")
    evil = EVIL.encode("utf-8", "replace").decode()
    runs = ["javascript:alert(1)", "../../../etc/passwd", "<img src=x>"]
    hostile = [
        dataclasses.replace(row, arm=evil, run=run, values=dict.fromkeys(row.values, evil))
        for row, run in zip(rows, runs, strict=False)
    ]
    write_rows(sweep_folder / "cells.csv", [*hostile, *rows[3:]])
    text = written(sweep_folder)
    assert "&lt;script&gt;alert(1)" in text
    assert all(target.startswith("runs/") for target in read(text).links)


@pytest.mark.browser
def test_in_a_browser(browser: Browser, watched: Watched, made: Path, tmp_path: Path) -> None:
    """Numbers put their curves on the chart, by mouse and keyboard, under the page's policy; WCAG A and AA hold."""
    path = tmp_path / "sweep.html"
    path.write_text(sweep_report(read_sweep(made)), encoding="utf-8")
    for width, scheme in ((390, "light"), (1280, "dark")):
        watched.check(path, width, scheme)
    under_policy = Watched(browser.new_page())
    page = under_policy.page
    page.goto(path.as_uri())
    names = page.locator("figure.plot .legend button")
    before = names.all_text_contents()
    number = page.locator("[data-curve][aria-pressed=false]").first
    label = number.get_attribute("aria-label") or ""
    number.click()
    (added,) = set(names.all_text_contents()) - set(before)
    assert added.strip() in label
    page.get_by_role("button", name=label).press("Enter")
    assert names.all_text_contents() == before
    names.first.click()
    assert names.all_text_contents() == before[1:]
    assert under_policy.troubles == []
    page.close()
