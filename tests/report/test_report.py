"""`twophase report` writes a page of any run, in whatever state, and runs nothing from its files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import Watched
from pages import EVIL, data_of, read, written
from runmaker import EMA, NESTEROV, SUM, config_of, make_sweep, write_lines, write_run, write_summary
from twophase.cli.main import main
from twophase.files import read_jsonl
from twophase.report.run import overlay_page, run_page
from twophase.runs.record import read_record

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Output = pytest.CaptureFixture[str]


def page_of(folder: Path, **options: Any) -> str:
    text = run_page(read_record(folder), **options)
    read(text)
    return text


def test_a_run(tmp_path: Path, capsys: Output) -> None:
    """A finished run's page has its result, rule, rounds, curves with every number, and the command to repeat it."""
    folder = write_run(tmp_path / "run", NESTEROV, [0.3] * 3, restart="5", noise=0.01)
    text = written(folder)
    assert capsys.readouterr().out.splitlines()[-1] == f"report {folder / 'report.html'}"
    for part in (
        "<dd>finished: validation loss 2.079 nats a token, perplexity 8</dd>",
        "Nesterov lr 0.7 momentum 0.9 (sum form), restart 5",
        "<dt>Rounds</dt><dd>60 of 60</dd>",
        "<dt>Restarts</dt><dd>12</dd>",
        "<pre>twophase train --steps 60</pre>",
        '<tr><th scope="row">outer</th><td class="n">2</td><td class="n">120</td>',  # milliseconds
    ):
        assert part in text
    charts = data_of(text)
    assert [chart["y"] for chart in charts] == ["loss (nats a token)", *["Euclidean norm"] * 2, "cosine", "gain"]
    assert charts[-1]["series"][0]["y"] == pytest.approx(
        [line["gain"] for line in read_jsonl(folder / "rounds.jsonl")], rel=1e-4
    )
    assert charts[-1]["restarts"] == list(range(5, 61, 5))
    assert 'data-refresh="' not in text


@pytest.mark.parametrize("turns", [False, True])
def test_fragments_have_curves_of_their_own(tmp_path: Path, turns: bool) -> None:
    """Each fragment has its curve, by its own rounds, also where they take turns; a number alone is no name."""
    write_run(tmp_path, EMA, [], blocks={"ends": [0.95] * 3, "1": [0.3] * 3}, restart="20")
    if turns:
        lines = [
            line | {name: [line[name][part]] for name in ("groups", "fragments")} | {"step": 2 * line["step"] + part}
            for line in read_jsonl(tmp_path / "rounds.jsonl")
            for part in (0, 1)
        ]
        write_lines(tmp_path / "rounds.jsonl", lines)
    text = page_of(tmp_path)
    assert "<dt>Restarts</dt><dd>6</dd>" in text
    for chart in data_of(text)[1:]:
        assert [curve["name"] for curve in chart["series"]][:2] == ["ends", "fragment 1"]
        assert (chart["series"][0]["x"][:2], chart["restarts"]) == ([1, 2], [20, 40, 60])


CHANGED: dict[str, tuple[str, Callable[[str], str | None], str]] = {
    "unfinished": ("summary.json", lambda _: None, "The run has not finished"),
    "torn": ("rounds.jsonl", lambda text: text[:-150], "59 of 60"),
    "no config": ("config.yaml", lambda _: None, "config.yaml, 0 values"),
    "a command that is none": ("env.json", lambda _: '{"command": 3}', "in a new folder"),
    "no rounds": ("rounds.jsonl", lambda _: "", "No round has been recorded yet"),
    "no losses": ("metrics.jsonl", lambda _: "", "No loss has been recorded"),
    "no numbers": (
        "metrics.jsonl",
        lambda text: re.sub(r'"train_loss": [\d.]+', '"train_loss": 1e300', text),
        "No loss has been recorded",
    ),
}
"""The file that changes, its new text (None: no file), and words that the page then has."""


@pytest.mark.parametrize(("name", "change", "words"), CHANGED.values(), ids=CHANGED)
def test_changed_runs(tmp_path: Path, name: str, change: Callable[[str], str | None], words: str) -> None:
    """The page of a run that lacks something says what is missing; of one that has more, shows it."""
    file = write_run(tmp_path, EMA, [0.95] * 3) / name
    text = change(file.read_text(encoding="utf-8"))
    file.unlink() if text is None else file.write_text(text, encoding="utf-8")
    assert words in page_of(tmp_path)


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_run_that_diverged_in_its_first_round(tmp_path: Path, rounds: int) -> None:
    """It has a page, alone and beside another."""
    folder = write_run(tmp_path / "run", SUM, [0.3], 1)
    write_summary(folder, config_of(SUM, rounds=1), None)
    (line,) = read_jsonl(folder / "rounds.jsonl")
    line |= dict.fromkeys(("pseudo_gradient_norm", "gain", "cosine"))
    line["groups"] = [dict.fromkeys(line["groups"][0])]
    write_lines(folder / "rounds.jsonl", [line] * rounds)
    (folder / "metrics.jsonl").unlink()
    assert "diverged: no loss recorded" in written(folder)
    assert main(["report", str(folder), str(write_run(tmp_path / "other", SUM, [0.3], 9))]) == 0


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    """Of 1,000 rounds of nine blocks seven are drawn, thinned, below 600 kB; and the page says both."""
    write_run(tmp_path, EMA, [], rounds=100, blocks={f"part {k}": [0.95, 0.3] for k in range(9)}, restart="3", noise=1)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    with (tmp_path / "rounds.jsonl").open("w") as file:
        for number in range(1_000):
            file.write(re.sub(r'"(step|round)": \d+', rf'"\1": {number + 1}', lines[number % 100]) + "\n")
    text = page_of(tmp_path)
    assert "Of 1,000 points the extremes" in text
    assert "the first 7 of 9 blocks" in text
    assert len(data_of(text)[1]["series"]) == 7


def test_losses_that_are_measured_now_and_then_are_lines(tmp_path: Path) -> None:
    """A line of metrics without a loss is no gap in its curve; a task's own metric is no curve of the rounds."""
    folder = write_run(tmp_path / "run", NESTEROV, sigma=(0.3,), rounds=8, finished=False)
    lines: list[dict[str, Any]] = [{"step": step, "train_loss": 9.0 - step, "cosine": 77.5} for step in range(1, 9)]
    lines += [{"step": step, "validation_loss": loss} for step, loss in ((3, 5.0), (5, None), (8, 4.0))]
    write_lines(folder / "metrics.jsonl", sorted(lines, key=lambda line: line["step"]))
    both = page_of(folder) + overlay_page([read_record(folder)] * 2, tmp_path)
    series = [(curve["x"], curve["y"]) for data in data_of(both) for curve in data["series"]]
    for curve in ((list(range(1, 9)), [8, 7, 6, 5, 4, 3, 2, 1]), ([3, 8], [5, 4])):
        assert series.count(curve) == 2
    assert "77.5" not in both
    assert "running: last validation loss 4 nats a token, last train loss 1" in both


def test_runs_over_each_other(tmp_path: Path, capsys: Output) -> None:
    """Several runs share charts; the page says in which settings they differ, and leads to their own pages."""
    names = ["a", "b", "<i>"]
    for name, rule, rounds in zip(names, (SUM, NESTEROV, EMA), (9, 12, 12), strict=True):
        write_run(tmp_path / name, rule, [0.3], rounds, finished=name != "b")
    written(tmp_path / "a")
    assert main(["report", *(str(tmp_path / name) for name in names)]) == 0
    assert f"page {tmp_path / 'compare.html'}" in capsys.readouterr().out
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert [[curve["name"] for curve in chart["series"]][:3] for chart in data_of(text)] == [names] * 5
    rows = set(re.findall(r'<th scope="row">([\w.]+)</th>', text.partition("Settings that differ")[2]))
    assert {"outer.method", "outer.form", "steps"} <= rows
    assert "outer.momentum" not in rows
    assert "b: The run has not finished" in text
    assert read(text).links == ["a/report.html", "b", "%3Ci%3E"]


def test_a_watched_page_loads_again_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run goes on its page is written again and loads again; the last one does not; Ctrl-C ends the watch."""
    folder = write_run(tmp_path, EMA, [0.95] * 3, 20, finished=False)
    watched: list[bool] = []

    def look(_: float) -> None:
        watched.append('data-refresh="2"' in (folder / "report.html").read_text())
        if len(watched) == 2:
            raise KeyboardInterrupt
        if len(watched) == 4:
            write_summary(folder, config_of(EMA, rounds=20))

    monkeypatch.setattr(time, "sleep", look)
    for turns in (2, 4):
        assert 'data-refresh="' not in written(folder, "--watch", "2")
        assert watched == [True] * turns


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a sweep with a file in the place of a page, and what is neither."""
    base = tmp_path_factory.mktemp("folders")
    for name in ("empty", "sweep", "edited"):
        (base / name).mkdir()
    make_sweep(base / "sweep")
    (min((base / "sweep/runs").iterdir()) / "report.html").write_text("mine")
    (base / "edited/cells.csv").write_text((base / "sweep/cells.csv").read_text()[:-9])
    write_run(base / "run", SUM, [0.3], 9)
    (base / "other.html").write_text("<!doctype html>\n<title>mine</title>")
    return base


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none"),
        (["empty"], "empty"),
        (["run/config.yaml"], "config.yaml"),
        (["run", "--runs"], "--runs"),
        (["run", "--where", "a=1"], "--where"),
        (["run", "--watch", "-1"], "--watch"),
        (["run", "--watch", "inf"], "--watch"),
        (["run", "--out", "run/config.yaml"], "--out"),
        (["run", "run", "--out", "other.html"], "--out"),
        (["run", "sweep"], "sweep"),
        (["sweep", "--runs"], "report.html"),
        (["edited"], "cells.csv"),
    ],
)
def test_mistakes(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, words: list[str], message: str
) -> None:
    """Another folder, an option out of its range, and a file that is no page of ours: one line, and nothing written."""
    monkeypatch.chdir(folders)
    before = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
    assert main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()} == before


# ----------------------------------------------------------------------------------------------------------- Chromium


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of a run far down, of one with hostile text everywhere, and of both."""
    base = tmp_path_factory.mktemp("pages")
    blocks = {"ends": [0.3] * 3, "blocks": [0.6] * 3}
    run = write_run(base / ("far_down_" * 20), NESTEROV, [], blocks=blocks, rounds=8, restart="5", noise=0.01)
    write_summary(run, config_of(NESTEROV, "5", 8), exit_reason=EVIL, tokens=EVIL)
    evil = write_run(base / "<b onclick=x>run", EMA, [], 8, blocks={EVIL: [0.95] * 3, "b": [0.2]}, finished=False)
    config = (evil / "config.yaml").read_text().replace("corpus: python", f"corpus: {json.dumps(EVIL[:-20])}")
    (evil / "config.yaml").write_text(config + f"{json.dumps(EVIL[:50])}: 3\n")
    (evil / "env.json").write_text(json.dumps({"twophase": EVIL, EVIL: [EVIL], "command": ["twophase", EVIL]}))
    both = overlay_page([read_record(run), read_record(evil)], base)
    for name, text in {"run": page_of(run), "evil": page_of(evil, refresh=600), "both": both}.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return base


@pytest.mark.parametrize("name", ["run", "evil", "both"])
def test_hostile_text_is_text(pages: Path, name: str) -> None:
    """Markup in every text of a run's folder is shown and not obeyed."""
    text = (pages / f"{name}.html").read_text(encoding="utf-8")
    read(text)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("run", 1280, "light"), ("run", 390, "dark"), ("evil", 390, "light"), ("both", 390, "dark")],
)
def test_in_a_browser(watched: Watched, pages: Path, name: str, width: int, scheme: str) -> None:
    """Charts are drawn, in light and dark and on a phone; no violation of WCAG A or AA, no request, no message."""
    assert watched.check(pages / f"{name}.html", width, scheme).locator("canvas").count() == 5


@pytest.mark.browser
def test_the_policy_holds_and_a_watched_page_loads_again(browser: Browser, tmp_path: Path) -> None:
    """A script that had got into a page would not run; the page of a run that goes on loads again until stopped."""
    folder = write_run(tmp_path / "a run", SUM, [0.3], 9, finished=False)
    (tmp_path / "page.html").write_text(page_of(folder, refresh=1))
    page, newest = (
        browser.new_page(),
        page_of(folder, refresh=3).replace("<main>", "<main><script>document.title=1</script>"),
    )
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto((tmp_path / "page.html").as_uri())
    (tmp_path / "page.html").write_text(newest)
    page.locator("main > script").wait_for(state="attached", timeout=20_000)
    page.get_by_role("button", name="Stop").click()
    assert page.title() == "a run"
    assert any("Content Security Policy" in text for text in refused)
    (tmp_path / "page.html").write_text(page_of(folder))
    page.wait_for_timeout(4_000)
    assert page.locator("main > script").count() == 1
    page.close()
