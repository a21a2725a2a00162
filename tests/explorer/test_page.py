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
from twophase.errors import UsageError
from twophase.explorer.from_run import read_run
from twophase.explorer.page import LIMITS, SCRIPTS, SLIDERS, RunSpectrum, State, build, check
from twophase.explorer.question import Question, of_run, state_of
from twophase.rule import OuterRule

Capture = pytest.CaptureFixture[str]
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


def data_of(page: str) -> dict[str, Any]:
    """What the page is told."""
    element = re.search(r'<script type="application/json" id="given">(.*?)</script>', page, re.DOTALL)
    assert element
    return json.loads(element[1])


def asked(capsys: Capture, out: Path, *words: object) -> dict[str, Any]:
    """The first state of the page that the command writes."""
    assert main(["explore", "--out", str(out), *map(str, words)]) == 0
    assert capsys.readouterr().err == ""
    return data_of(out.read_text(encoding="utf-8"))["state"]


def refused(capsys: Capture, *words: object) -> str:
    """What the command says to a mistake: one line, exit status 2, nothing written."""
    assert main(["explore", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("twophase explore: ")
    assert said.err.count("\n") == 1
    return said.err


# --- the file -----------------------------------------------------------------------------------------------------


def test_page_is_one_small_closed_file() -> None:
    """Below 150 kB, no address of anything elsewhere, and a policy that allows only what the file itself holds."""
    page = build(State())
    assert len(page.encode()) < 150_000
    # The name of SVG's elements is no address that anything is fetched from.
    assert re.findall(r"\w+://[^\s\"')]*", page) == ["http://www.w3.org/2000/svg"]
    for name in ("src=", "@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "eval(", "innerHTML", "{{"):
        assert name not in page.replace("`url(#${cut})`", ""), name
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert "unsafe" not in policy[1]


def test_names_cannot_leave_their_place() -> None:
    """Text that looks like markup stays inside the data of the page, and comes out of it unchanged."""
    run = RunSpectrum(ATTACK, (0.5,), ATTACK + "{{script}}")
    page = build(State(spectrum="run", mode=0), run)
    assert page.count("<script") == build(State()).count("<script")
    assert "onerror=alert" not in page.replace("\\u003e", "").split('id="given">')[0]
    assert data_of(page)["run"] == {"name": ATTACK, "sigma": [0.5], "note": ATTACK + "{{script}}"}


def test_every_field_has_limits_and_every_script_is_there() -> None:
    """The state's numbers, the limits and the sliders speak of the same fields, and sliders stay within limits."""
    numbers = {name for name, value in vars(State()).items() if type(value) in (int, float)}
    assert numbers - {"low", "high"} <= LIMITS.keys()
    assert numbers - {"mode"} == SLIDERS.keys()
    for name, (low, high) in SLIDERS.items():
        limits = LIMITS["sigma" if name in ("low", "high") else name]
        assert limits[0] <= low < high <= limits[1], name
    folder = Path(__file__).parents[2] / "src" / "twophase" / "explorer"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
    check(State())


def test_assets_reach_a_wheel() -> None:
    """Every file that the page is made of is among those that a wheel is built of."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="no hatchling: pip install hatchling")
    root = Path(__file__).parents[2]
    shipped = {Path(file.path).name for file in wheel.WheelBuilder(str(root)).recurse_included_files()}
    assert {*SCRIPTS, "page.html", "style.css"} <= shipped


# --- the command --------------------------------------------------------------------------------------------------


def test_options_become_the_first_state(capsys: Capture, tmp_path: Path) -> None:
    """Rule, restart, horizon and each way to give a spectrum; the slowest mode is shown first."""
    out = tmp_path / "deep" / "page.html"
    words = "--outer.lr 1 --outer.momentum 0.8 --outer.method heavy-ball --outer.form ema --outer.restart 7".split()
    state = asked(capsys, out, *words, "--rounds", 120, "--sigma", 0.9, 0.5, 0.2)
    rule = {"lr": 1.0, "momentum": 0.8, "nesterov": False, "form": "ema", "restart": 7, "rounds": 120}
    assert {name: state[name] for name in rule} == rule
    assert (state["spectrum"], state["sigmas"], state["mode"]) == ("list", [0.9, 0.5, 0.2], 2)
    state = asked(capsys, out, "--sigma", 0.4, "--outer.restart", "never")  # over our own page
    assert (state["spectrum"], state["sigma"], state["restart"], state["mode"]) == ("one", 0.4, 0, 0)
    state = asked(capsys, out, "--sigma-range", 0.2, 0.8, 5)
    assert (state["spectrum"], state["low"], state["high"], state["count"]) == ("range", 0.2, 0.8, 5)
    state = asked(capsys, out, "--eigenvalues", 4, 1, "--inner-lr", 0.1, "--inner-steps", 30)
    assert (state["curvatures"], state["inner_lr"], state["inner_steps"]) == ([4.0, 1.0], 0.1, 30)
    assert asked(capsys, out) == json.loads(json.dumps(vars(state_of(Question()))))
    assert asked(capsys, out, "--outer.restart", "auto")["policy"] == "auto"
    assert asked(capsys, out, "--outer.restart", "soft:3:0.2:0.1")["policy"] == "soft:3:0.2:0.1"


@pytest.mark.parametrize("steepest", [3, 6, 7, 49])
def test_an_inner_rate_that_overshoots_is_refused_with_one_that_does_not(
    capsys: Capture, tmp_path: Path, steepest: float
) -> None:
    """The learning rate that the message names is taken."""
    words = ["--out", tmp_path / "page.html", "--eigenvalues", steepest, "--inner-steps", 5, "--inner-lr"]
    limit = refused(capsys, *words, 2 / steepest).split("lower --inner-lr to ")[1].split(" ")[0]
    assert main(["explore", *map(str, words), limit]) == 0


def test_only_a_page_asked_for_without_words_is_guided(capsys: Capture, tmp_path: Path) -> None:
    """Options ask for a view of their own, in which the guided steps are folded away."""
    out = tmp_path / "page.html"
    for words, is_guided in (((), True), (("--sigma", 0.4), False), (("--outer.lr", 0.6), False)):
        asked(capsys, out, *words)
        assert data_of(out.read_text(encoding="utf-8"))["guided"] is is_guided


def test_policies_that_the_page_lacks_are_refused(capsys: Capture, tmp_path: Path) -> None:
    """A policy that is registered elsewhere: the message names the option, the value and what the page shows."""
    message = refused(capsys, "--outer.restart", "gradient", "--out", tmp_path / "page.html")
    assert "--outer.restart gradient: the page shows never" in message


# --- from a run ---------------------------------------------------------------------------------------------------


def test_spectrum_of_a_run(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the linear model gives back its effective progress, rule, period, length and inner steps."""
    rule = OuterRule(0.5, 0.8, True)
    run = write_run(tmp_path / ATTACK.replace("/", "_"), rule, [0.35], restart="9")
    from_run = read_run(run)
    assert from_run.spectrum.sigma == pytest.approx((0.35,), rel=1e-6)
    assert (from_run.rule, from_run.restart, from_run.rounds, from_run.inner_steps) == (rule, "9", 60, 1)
    state = asked(capsys, tmp_path / "page.html", "--run", run)
    assert (state["spectrum"], state["lr"], state["restart"], state["rounds"]) == ("run", 0.5, 9, 60)
    state = asked(capsys, tmp_path / "page.html", "--run", run, "--outer.lr", 0.7, "--outer.restart", "never")
    assert (state["lr"], state["momentum"], state["restart"]) == (0.7, 0.8, 0)
    assert of_run(from_run).outer.method == "nesterov"
    state = asked(capsys, tmp_path / "page.html", "--run", run, "--eigenvalues", 0.5, "--inner-lr", 0.5)
    assert (state["spectrum"], state["lr"], state["inner_steps"]) == ("curvature", 0.5, 1)
    monkeypatch.setattr("twophase.explorer.from_run._MOST_NAMED", 0)
    monkeypatch.setitem(LIMITS, "rounds", (1, 50))
    assert "and 1 more blocks" in read_run(run).spectrum.note
    assert "Of the run's 60 rounds the page shows the first 50." in read_run(run).spectrum.note


def test_restarts_of_a_run_that_the_page_cannot_show_are_named(capsys: Capture, tmp_path: Path) -> None:
    """More numbers than it reads, a period beyond its limit, a policy for each fragment: said, and never shown."""
    rule = OuterRule(0.5, 0.8)
    many = "at:" + ",".join(map(str, range(1, 67)))
    config = update(config_of(rule, "9", 60), {"sync.fragments": ["2"], "sync.restart": ["0=2", "1=2"]})
    by_fragment = write_run(tmp_path / "fragments", rule, [0.35], config=config)
    by_words = [(write_run(tmp_path / words[:5], rule, [0.35], restart=words), words) for words in (many, "10001")]
    for run, words in (*by_words, (by_fragment, "0=2, 1=2")):
        shown = read_run(run)
        assert shown.restart == "never"
        assert f"own restarts ({words}) are not among those of the page" in shown.spectrum.note
        assert main(["explore", "--run", str(run), "--sigma", "0.5", "--out", str(tmp_path / "page.html")]) == 0
        assert f"own restarts ({words}) are not" in capsys.readouterr().out


def test_no_spectrum_of_a_run_outside_the_model(tmp_path: Path) -> None:
    """Mixing looks like progress: the page shows none."""
    config = update(config_of(OuterRule(0.5, 0.8), "9", 60), {"sync.mixing": 0.5})
    spectrum = read_run(write_run(tmp_path / "run", OuterRule(0.5, 0.8), [0.35], config=config)).spectrum
    assert spectrum.sigma == ()
    assert "--sync.mixing" in spectrum.note


def test_a_given_spectrum_takes_the_place_of_the_runs(capsys: Capture, tmp_path: Path) -> None:
    """With a spectrum by option, a run gives rule, period and rounds only, whether its own can be estimated or not."""
    out, words = tmp_path / "page.html", ("--sigma", 0.5, 0.2)
    for rounds, restart in ((60, "9"), (4, "2"), (20, "1")):
        run = write_run(tmp_path / f"{rounds}", OuterRule(0.5, 0.8, True), [0.35], rounds, restart)
        state = asked(capsys, out, "--run", run, *words)
        assert (state["spectrum"], state["lr"], state["momentum"]) == ("list", 0.5, 0.8)
        assert (state["restart"], state["rounds"]) == (int(restart), rounds)
        assert data_of(out.read_text(encoding="utf-8"))["run"] is None
    assert "--sigma and --sigma-range given; give one" in refused(capsys, *words, "--sigma-range", 0, 1, "--out", out)
    with pytest.raises(UsageError, match="spectrum of a run"):
        build(State(spectrum="run"))


def test_the_guides_run_opens(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's example of --run works as written, on a run that shows no spectrum (a restart every 3 rounds)."""
    guide = (Path(__file__).parents[2] / "docs" / "explorer.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^twophase explore (.*--run.*)$", guide, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda _address: True)
    write_run(tmp_path / "runs" / "one", OuterRule(0.7, 0.9, True), [0.3], 6, "3")
    assert "Give --sigma" in refused(capsys, "--run", "runs/one")
    assert main(["explore", *line.split()]) == 0
    state = data_of((tmp_path / "one.html").read_text(encoding="utf-8"))["state"]
    assert (state["lr"], state["restart"], state["rounds"], state["spectrum"]) == (0.7, 3, 6, "range")


def test_runs_without_an_estimate_are_refused(capsys: Capture, tmp_path: Path) -> None:
    """No run, no rule, too few rounds, no momentum, restarts in every round: said, with what to give instead."""
    rule, out = OuterRule(0.5, 0.8), tmp_path / "page.html"
    cases = {
        "few": (rule, 4, "never", "3 pairs of rounds"),
        "plain": (OuterRule(0.5, 0.0), 20, "never", "without momentum"),
        "always": (rule, 20, "1", "0 pairs of rounds"),
    }
    for name, (outer, rounds, restart, said) in cases.items():
        run = write_run(tmp_path / name, outer, [0.3], rounds, restart)
        message = refused(capsys, "--run", run, "--out", out)
        assert said in message
        assert "Give --sigma" in message
    assert "nowhere" in refused(capsys, "--run", tmp_path / "nowhere", "--out", out)
    (tmp_path / "few" / "config.yaml").write_text("outer: 3\n")
    assert "holds no outer rule" in refused(capsys, "--run", tmp_path / "few", "--out", out)
    assert not out.exists()


LACKING = {
    "norms": ("rounds.jsonl", ("pseudo_gradient_norm", "buffer_norm"), "no round of rounds.jsonl has the norms"),
    "cosines": ("rounds.jsonl", ("cosine",), "and the cosine between them"),
    "groups": ("rounds.jsonl", ("groups",), "no line of rounds.jsonl has the param groups"),
    "all but a few": ("rounds.jsonl", ("cosine",), "(40 of 60 rounds lack a norm or the cosine)"),
    "inner_lr": ("metrics.jsonl", ("inner_lr",), "the inner learning rate of the rounds is unknown (metrics.jsonl)"),
    "all": ("rounds.jsonl", None, "rounds.jsonl records no rounds"),
}


def test_runs_whose_rounds_lack_numbers_are_refused(capsys: Capture, tmp_path: Path) -> None:
    """Numbers that are missing are named, not assumed; the gain is not needed, nor they beside a spectrum."""
    rule, out = OuterRule(0.5, 0.8), tmp_path / "page.html"
    run = write_run(tmp_path / "run", rule, [0.3])
    for name, (file, lost, said) in LACKING.items():
        whole = (run / file).read_text()
        lines = [json.loads(line) for line in whole.splitlines()]
        for place, line in enumerate(lines):
            for part in (line, *line.get("groups", ())):
                for key in lost or ():
                    if name != "all but a few" or place % 3:
                        part.pop(key, None)
        (run / file).write_text("".join(json.dumps(line) + "\n" for line in lines if lost))
        assert said in refused(capsys, "--run", run, "--out", out), name
        assert asked(capsys, tmp_path / "given.html", "--run", run, "--sigma", 0.4)["momentum"] == 0.8
        (run / file).write_text(whole)
    (run / "rounds.jsonl").write_text(re.sub(r', "gain": [^,}]+', "", (run / "rounds.jsonl").read_text()))
    assert asked(capsys, out, "--run", run)["spectrum"] == "run"
