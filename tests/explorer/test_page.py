"""The page as a file: whole, small, closed to the world; and the command that writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runmaker import config_of, write_run
from twophase.cli.main import main
from twophase.config import update
from twophase.explorer.page import State, build
from twophase.explorer.question import Question, state_of
from twophase.rule import OuterRule

Capture = pytest.CaptureFixture[str]


def data_of(page: Path) -> dict[str, Any]:
    element = re.search(r'<script type="application/json" id="given">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert element
    return json.loads(element[1])


def asked(out: Path, *words: object) -> dict[str, Any]:
    """The first state of the page that the command writes."""
    assert main(["explore", "--out", str(out), *map(str, words)]) == 0
    return data_of(out)["state"]


def refused(capsys: Capture, *words: object) -> str:
    """What the command says to a mistake: one line, exit status 2."""
    assert main(["explore", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_page_is_one_small_closed_file() -> None:
    """No address of anything elsewhere, and a policy that allows only what the file itself holds."""
    page = build(State())
    assert len(page.encode()) < 125_000
    # The library's, in its licence's comment.
    assert set(re.findall(r"\w+://[^\s\"')]*", page)) == {"https://github.com/leeoniya/uPlot"}
    for name in ("src=", "@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "eval(", "innerHTML", "{{"):
        assert name not in page, name
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert "unsafe" not in policy[1]


def test_options_become_the_first_state(tmp_path: Path) -> None:
    """Rule, restarts, horizon and both ways to give modes; the slowest mode is shown first."""
    out = tmp_path / "deep" / "page.html"
    words = "--outer.lr 1 --outer.momentum 0.8 --outer.method heavy-ball --outer.form ema --outer.restart 7".split()
    state = asked(out, *words, "--rounds", 120, "--sigma", 0.9, 0.2, 0.5)
    rule = {"lr": 1.0, "momentum": 0.8, "nesterov": False, "form": "ema", "restart": 7, "rounds": 120}
    assert {name: state[name] for name in rule} == rule
    assert (state["sigmas"], state["mode"]) == ([0.9, 0.2, 0.5], 1)
    state = asked(out, "--sigma-range", 0.2, 0.8, 5, "--outer.restart", "soft:3:0.2:0.1")
    assert state["sigmas"] == [0.2, 0.35, 0.5, 0.65, 0.8]
    assert (state["restart"], state["retain"], state["inject"]) == (3, 0.2, 0.1)
    assert asked(out, "--outer.restart", "never")["restart"] == 0
    assert asked(out, "--outer.method", "averaging")["momentum"] == 0
    assert asked(out) == json.loads(json.dumps(vars(state_of(Question()))))


def test_only_a_page_asked_for_without_values_is_guided(tmp_path: Path) -> None:
    """Options ask for a view of their own, in which the guided steps are folded away."""
    out = tmp_path / "page.html"
    for words, is_guided in (((), True), (("--sigma", 0.4), False), (("--outer.lr", 0.6), False)):
        asked(out, *words)
        assert data_of(out)["guided"] is is_guided


MISTAKES = {
    "--outer.restart auto": "--outer.restart",
    "--outer.restart 10001": "--outer.restart",
    "--outer.restart soft:3:11:0": "--outer.retain",
    "--outer.method adamw": "--outer.method",
    "--outer.filter orthogonal": "--outer.method",
    "--outer.momentum 1": "--outer.momentum",
    "--outer.lr 0": "--outer.lr",
    "--rounds 0": "--rounds",
    "--sigma 1.5": "--sigma",
    "--sigma nan": "--sigma",
    "--sigma 0.5 --sigma-range 0 1": "--sigma-range",
    "--sigma-range 0.9 0.1": "--sigma-range",
    "--sigma-range 0 1 65": "--sigma-range",
    "--run nowhere": "--run",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_refused_by_option(capsys: Capture, tmp_path: Path, words: str) -> None:
    out = tmp_path / "page.html"
    said = refused(capsys, "--out", out, *words.split())
    assert MISTAKES[words] in said or "nowhere" in said
    assert not out.exists()


def test_only_a_page_of_its_own_is_overwritten(capsys: Capture, tmp_path: Path) -> None:
    """An older page is replaced, also one of other settings; any other file stays, whatever it begins with."""
    out = tmp_path / "page.html"
    asked(out)
    assert asked(out, "--sigma", 0.4)["sigmas"] == [0.4]
    for text in ("notes", "<!doctype html>\n<html><p>another page</p></html>"):
        out.write_text(text)
        assert str(out) in refused(capsys, "--out", out)
        assert out.read_text() == text


def test_a_run_gives_rule_restarts_and_length(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the modes that it shows. Options come on top; restarts that the page cannot show are never."""
    rule, out = OuterRule(0.5, 0.8, True, "ema"), tmp_path / "page.html"
    run = write_run(tmp_path / "run", rule, [0.35], restart="5")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert asked(out, "--run", run, "--open")["sigmas"] == pytest.approx([0.35], rel=1e-6)
    assert opened == [out.resolve().as_uri()]
    mixed = update(config_of(rule, "5", 60), {"sync.mixing": 0.5})  # which looks like progress
    assert len(asked(out, "--run", write_run(tmp_path / "mixed", rule, [0.35], config=mixed))["sigmas"]) == 6
    assert "--sigma-range" in capsys.readouterr().out  # which it says
    state = asked(out, "--run", run, "--sigma", 0.4)
    assert "--sigma-range" not in capsys.readouterr().out
    assert OuterRule(*(state[name] for name in ("lr", "momentum", "nesterov", "form"))) == rule
    assert (state["restart"], state["rounds"], state["sigmas"]) == (5, 60, [0.4])
    state = asked(out, "--run", run, "--outer.lr", 0.7, "--outer.restart", "never")
    assert (state["lr"], state["momentum"], state["restart"]) == (0.7, 0.8, 0)
    assert asked(out, "--run", write_run(tmp_path / "auto", rule, [0.35], restart="auto"))["restart"] == 0
    by_fragment = update(config_of(rule, "9", 60), {"sync.fragments": ["2"], "sync.restart": ["0=2", "1=2"]})
    assert asked(out, "--run", write_run(tmp_path / "two", rule, [0.35], config=by_fragment))["restart"] == 0
    filtered = update(config_of(rule, "9", 60), {"outer.filter": "orthogonal"})
    assert "orthogonal" in refused(capsys, "--run", write_run(tmp_path / "more", rule, [0.35], config=filtered))
    (run / "config.yaml").write_text("outer: 3\n")
    assert "config.yaml" in refused(capsys, "--run", run)
