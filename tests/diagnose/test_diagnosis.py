"""`twophase diagnose`: simulated runs get the state of their truth, and a change that makes a run which can be made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import textmaker
from runmaker import EMA, NESTEROV, SUM, config_of, observed, round_lines, write_lines, write_run, write_summary
from twophase.api import train_run
from twophase.cli.main import main
from twophase.diagnose import Diagnosis, describe, diagnose
from twophase.rule import OuterRule
from twophase.runs.record import read_record

AVERAGING = OuterRule(1.0, 0.0)
LIGHT = OuterRule(1.0, 0.3)


def of(folder: Path) -> Diagnosis:
    return diagnose(read_record(folder))


def values_of(diagnosis: Diagnosis) -> dict[str, str]:
    """The options that the command of a diagnosis gives, without --config and --out."""
    words = shlex.split(diagnosis.command or "")
    options = dict(zip(words[2::2], words[3::2], strict=True))
    return {name: value for name, value in options.items() if name not in ("--config", "--out")}


AVERAGE = {"--outer.method": "averaging", "--outer.lr": "none", "--outer.momentum": "none", "--outer.restart": "never"}
TRUTHS: dict[str, tuple[OuterRule, list[float], str, float, str, dict[str, str]]] = {
    "an unstable mode": (OuterRule(4.0, 0.9), [0.99] * 3, "never", 0.0, "diverges", AVERAGE),
    "restarts at the wrong time": (OuterRule(3.5, 0.9), [0.95] * 3, "3", 0.0, "diverges", AVERAGE),
    "too large a rate": (OuterRule(2.3, 0.0), [0.99] * 3, "never", 0.0, "diverges", AVERAGE),
    "DiLoCo's rule": (NESTEROV, [0.5] * 3, "never", 0.0, "large step", AVERAGE),
    "heavy ball": (SUM, np.linspace(0.01, 0.9, 30).tolist(), "never", 0.01, "large step", AVERAGE),
    "a large rate": (OuterRule(2.5, 0.0), [0.3] * 3, "never", 0.0, "large step", AVERAGE),
    "a mode that turns": (EMA, [0.95] * 3, "never", 0.0, "oscillates", AVERAGE),
    "one that seldom restarts": (OuterRule(1.0, 0.95, form="ema"), [0.3] * 3, "20", 0.0, "oscillates", AVERAGE),
    "a restart at the zero": (EMA, [0.95] * 3, "5", 0.0, "fine", AVERAGE),
    "a small step": (OuterRule(0.05, 0.9), [0.02] * 30, "never", 0.001, "fine", AVERAGE),
    "a light momentum": (LIGHT, [0.3] * 60, "never", 0.1, "fine", {}),
    "averaging": (AVERAGING, [0.02] * 60, "never", 0.01, "fine", {"--inner.method": "muon"}),
}


@pytest.mark.parametrize("truth", TRUTHS)
def test_simulated_truths(tmp_path: Path, truth: str) -> None:
    """A simulated run gets the state of its truth and the change for it; without noise it shows its sigma."""
    rule, sigma, restart, noise, state, values = TRUTHS[truth]
    found = of(write_run(tmp_path / "a run", rule, sigma, restart=restart, noise=noise))
    assert found.state == state
    assert values_of(found) == values | ({"--inner.lr": "0.008"} if "--inner.method" in values else {})
    if not noise and rule.momentum and state != "diverges" and restart != "20":  # of which there are too few cycles
        (shown,) = [value for label, value in found.numbers if label.startswith("sigma")]
        assert shown.startswith(f"{sigma[0]:g} (")


@pytest.mark.parametrize("restart", ["never", "3"])
@pytest.mark.parametrize("rule", [EMA, LIGHT, OuterRule(0.1, 0.9, nesterov=True)], ids=["ema", "light", "nesterov"])
def test_noise_is_no_oscillation(tmp_path: Path, rule: OuterRule, restart: str) -> None:
    """Runs at the floor of their noise, and runs of noise alone, are fine, and show no sigma."""
    for number, sigma in enumerate(([1e-9] * 60, [0.5] * 60, np.linspace(0.01, 0.9, 60).tolist())):
        folder = write_run(tmp_path / str(number), rule, sigma, restart=restart, noise=1.0, initial=0.0)
        assert of(folder).state == "fine"
    assert not [label for label, _ in of(tmp_path / "0").numbers if label.startswith("sigma")]


def test_a_recorded_loop_gets_code(tmp_path: Path) -> None:
    """The change of a loop that only its user can start is a line of code."""
    folder = write_run(tmp_path, SUM, [0.5] * 3)
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "recorded: true\n")
    assert (of(folder).command or "").endswith("OuterRule(lr=1, momentum=0)")


def test_blocks_have_states_of_their_own(tmp_path: Path) -> None:
    """Each fragment has a state under its name, with its own restarts; the run has the worst and its change."""
    config = config_of(EMA)
    found = of(write_run(tmp_path, EMA, [], blocks={"ends": [0.95] * 3, "blocks": [0.002] * 3}, config=config))
    assert {block.name: block.state for block in found.blocks} == {"ends": "oscillates", "blocks": "fine"}
    assert found.state == "oscillates"
    text = describe(found)
    assert "ends: oscillates" in text
    assert "blocks: fine" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [line | {"groups": []} for line in lines],
        lambda lines: [line | {"groups": [dict.fromkeys(line["groups"][0])]} for line in lines],
        lambda _: [],
        lambda lines: lines[:5],
    ],
)
def test_records_with_little_in_them(tmp_path: Path, change: Any) -> None:
    """Rounds without norms, without numbers, few or none: a state, and no nan in the text."""
    folder = write_run(tmp_path, OuterRule(1.0, 0.3), [0.3] * 3, finished=False)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    write_lines(folder / "rounds.jsonl", change(lines))
    (folder / "metrics.jsonl").unlink()
    found = of(folder)
    assert found.state in ("cannot tell", "fine")
    assert "nan" not in describe(found)


@pytest.mark.parametrize("rounds", [0, 1, 60])
def test_a_run_that_was_ended_for_divergence(tmp_path: Path, rounds: int) -> None:
    """It diverges whatever its last norms were, also in its first round and before any."""
    folder = write_run(tmp_path, EMA, [0.95] * 3, finished=False)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:rounds]))
    write_summary(folder, config_of(EMA), perplexity=None)
    assert of(folder).state == "diverges"


@pytest.mark.parametrize(
    ("outer", "state", "option"),
    [
        ({"outer.method": "adamw"}, "cannot tell", "--outer.method"),
        ({"outer.method": "averaging", "outer.filter": "clip:1"}, "fine", "--inner.lr"),
        ({"outer.method": "averaging", "inner_steps": 5}, "fine", "--inner.lr"),  # 4 rounds
        ({"outer.restart": "auto"}, "fine", None),
    ],
)
def test_what_is_more_than_a_rule(tmp_path: Path, outer: dict[str, Any], state: str, option: str | None) -> None:
    """A trained run with another outer optimizer, or with few rounds of averaging, has a state and a next step."""
    text = textmaker.write(tmp_path / "text.txt")
    train_run(textmaker.small_run(text, **{"steps": 20, "inner_steps": 2} | outer), tmp_path / "run", quiet=True)
    found = of(tmp_path / "run")
    assert found.state == state
    assert option is None or next(iter(values_of(found))) == option


ROUND = np.arange(60)
COSINE = (1e-3 * (1 + np.cos(np.pi * (ROUND + 0.5) / 60))).tolist()
CONSTANT, WARM_UP = [2e-3] * 60, (2e-5 * np.exp(0.1 * ROUND)).tolist()
SHAPES = {
    "explodes": (np.exp(0.1 * ROUND), True),
    "explodes in the end": (np.exp(0.3 * np.maximum(ROUND - 40, 0)), True),
    "has risen and rests": (20 ** np.clip((ROUND - 30) / 22, 0, 1), False),
    "rises by less than chance could": (np.exp(0.01 * ROUND), False),
    "decays, more slowly than the rate": (np.exp(-0.003 * ROUND), False),
}


def reshaped(folder: Path, norms: Sequence[float | None], rates: Sequence[float]) -> Diagnosis:
    """The diagnosis of a run whose pseudo-gradients have these norms, and its rounds these inner learning rates."""
    block = observed(LIGHT, [0.3], 60)
    lines = round_lines({"0": block})
    for line, norm in zip(lines, norms, strict=True):
        line["groups"][0]["pseudo_gradient_norm"] = norm
        if norm is None:
            line["groups"][0] |= {"cosine": None, "buffer_norm": None}
    write_lines(folder / "rounds.jsonl", lines)
    write_lines(folder / "metrics.jsonl", [{"step": t + 1, "inner_lr": rate} for t, rate in enumerate(rates)])
    return of(folder)


@pytest.mark.parametrize(("shape", "diverges"), SHAPES.values(), ids=SHAPES)
def test_what_explodes_diverges(tmp_path: Path, shape: NDArray[np.float64], diverges: bool) -> None:
    """A norm that rises threefold and goes on rising diverges; what rises with the inner rate does not."""
    folder = write_run(tmp_path, LIGHT, [0.3])
    noisy = (shape * np.exp(0.05 * np.random.default_rng(1).standard_normal(60))).tolist()
    for rates in (COSINE, CONSTANT):
        assert (reshaped(folder, noisy, rates).state == "diverges") is diverges
    assert reshaped(folder, (np.exp(0.1 * ROUND)).tolist(), WARM_UP).state != "diverges"


@pytest.mark.parametrize(("lost", "diverges"), [(1, False), (3, True), (60, False)])
def test_norms_that_are_no_numbers_any_more(tmp_path: Path, lost: int, diverges: bool) -> None:
    """Where norms and cosine end to be numbers the run diverges; a single round or a run without any is no proof."""
    folder = write_run(tmp_path, LIGHT, [0.3])
    found = reshaped(folder, [*[1.0] * (60 - lost), *[None] * lost], CONSTANT)
    assert (found.state == "diverges") is diverges


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text or one JSON object, status 0; a folder that is no run's is one line that names it."""
    folder = write_run(tmp_path / "run", EMA, [0.95] * 3)
    assert main(["diagnose", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("oscillates\n")
    assert main(["diagnose", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "oscillates"
    (tmp_path / "other").mkdir()
    for name in ("none", "other"):
        assert main(["diagnose", str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line


@pytest.mark.parametrize("state", ["large step", "fine"])
def test_the_command_makes_the_changed_run(tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed command is understood, in a folder with a space too, and its run has the changed rule."""
    folder = write_run(tmp_path / "a run", NESTEROV if state == "large step" else AVERAGING, [0.02] * 3)
    found = of(folder)
    assert found.state == state
    with pytest.raises(SystemExit, match="0"):
        main([*shlex.split(found.command or "")[1:], "--print-config"])
    shown = capsys.readouterr().out
    assert "method: averaging" in shown
    assert ("method: muon" in shown) == (state == "fine")
    (folder / "env.json").write_text('{"hidden_matrices": 0}')  # on which Muon would fail
    assert "muon" not in (of(folder).command or "")
