"""`twophase diagnose`: the right word for runs of a known truth, and "cannot tell" where the record hides it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import textmaker
from runmaker import EMA, NESTEROV, SUM, config_of, observed, round_lines, write_lines, write_run, write_summary
from twophase.advice.evidence import grown
from twophase.advice.text import LIMITS, describe, suggestions
from twophase.advice.verdict import Diagnosis, Finding, as_json, diagnose, weighed
from twophase.api import train_run
from twophase.cli.main import main
from twophase.config import dump_yaml
from twophase.rule import OuterRule
from twophase.runs.record import read_record
from twophase.tasks.lm.config import TrainConfig


def judged(folder: Path) -> Diagnosis:
    return diagnose(read_record(folder))


def finding_of(folder: Path) -> Finding:
    """What is said of the first block."""
    return judged(folder).findings[0]


def round_facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


SLOW, WILD, HUGE = OuterRule(0.05, 0.9), OuterRule(2.0, 0.3), OuterRule(4.0, 0.9)
SPECTRUM = np.linspace(0.3, 0.95, 30).tolist()
TRUTHS = {
    "one mode oscillates": (EMA, [0.95] * 3, "never", 0.0, "oscillates"),
    "it does in sum form too": (SUM, [0.5] * 3, "never", 0.0, "oscillates"),
    "so does a spectrum": (EMA, SPECTRUM, "never", 0.0, "oscillates"),
    "a restart at the zero holds it": (EMA, [0.95] * 3, "5", 0.0, "held"),
    "one far too early does not": (EMA, [0.1] * 3, "3", 0.0, "lags"),
    "a seldom restart changes nothing": (OuterRule(1.0, 0.95, form="ema"), [0.3] * 3, "20", 0.0, "oscillates"),
    "a slow mode lags": (SLOW, [0.02] * 30, "never", 0.0, "lags"),
    "with noise as well": (SLOW, [0.02] * 30, "never", 0.001, "lags"),
    "so does a slow swing": (OuterRule(1.1, 0.85, True, "ema"), [0.05] * 3, "never", 0.0, "lags"),
    "a long step overshoots": (WILD, [0.9] * 3, "never", 0.0, "overshoots"),
    "so does the look-ahead": (NESTEROV, [0.95] * 3, "never", 0.0, "overshoots"),
    "too long a step diverges": (HUGE, [0.99] * 3, "never", 0.0, "diverges"),
    "so does a restart at the wrong time": (OuterRule(3.5, 0.9), [0.95] * 3, "3", 0.0, "diverges"),
}


@pytest.mark.parametrize("truth", TRUTHS)
def test_simulated_truths(tmp_path: Path, truth: str) -> None:
    """A simulated run of known sigma and regime gets the word of its truth, with that sigma inside the interval."""
    rule, sigma, restart, noise, verdict = TRUTHS[truth]
    finding = finding_of(write_run(tmp_path, rule, sigma, restart=restart, noise=noise))
    assert finding.verdict == verdict, finding.reasons
    words = " ".join(finding.reasons)
    assert "many slower modes" not in words
    assert "outside of it" not in words
    if not noise and len(set(sigma)) == 1:
        assert finding.sigma == pytest.approx([sigma[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("restart", ["never", "3"])
@pytest.mark.parametrize("rule", [EMA, SUM, NESTEROV], ids=["ema", "sum", "nesterov"])
def test_noise_is_not_judged(tmp_path: Path, rule: OuterRule, restart: str) -> None:
    """Runs at the floor of their noise, and runs of noise alone, get "cannot tell", whatever they look like."""
    for number, sigma in enumerate(([1e-9] * 60, [0.5] * 60, np.linspace(0.01, 0.9, 60).tolist())):
        folder = write_run(tmp_path / str(number), rule, sigma, restart=restart, noise=1.0, initial=0.0)
        assert finding_of(folder).verdict == "cannot tell"


def without_groups(folder: Path) -> None:
    write_lines(folder / "rounds.jsonl", [line | {"groups": []} for line in round_facts(folder)])


def with_other_settings(folder: Path) -> None:
    (folder / "config.yaml").write_text(dump_yaml(config_of(OuterRule(1.0, 0.5, form="ema"))))


def without_rates(folder: Path) -> None:
    assert finding_of(folder).verdict == "held"
    (folder / "metrics.jsonl").unlink()


SILENCES: dict[str, tuple[OuterRule, int, str, Callable[[Path], None] | None, str]] = {
    "no momentum": (OuterRule(0.7, 0.0), 60, "never", None, "no momentum"),
    "few rounds": (SUM, 5, "never", None, "Too few rounds"),
    "no buffer": (SUM, 60, "1", None, "restarts in every round"),
    "another optimizer": (SUM, 60, "never", without_groups, "not OuterSGD"),
    "another rule": (EMA, 60, "never", with_other_settings, "other settings"),
    "no inner learning rate": (EMA, 60, "5", without_rates, "inner learning rate"),
}


@pytest.mark.parametrize("silence", SILENCES)
def test_reasons_of_silence(tmp_path: Path, silence: str) -> None:
    """Where the record cannot hold an answer the reason is said, and nothing that rests on sigma."""
    rule, rounds, restart, change, why = SILENCES[silence]
    folder = write_run(tmp_path, rule, [0.95] * 3, rounds, restart)
    if change is not None:
        change(folder)
    finding = finding_of(folder)
    assert (finding.verdict, finding.sigma) == ("cannot tell", None)
    assert any(why in reason for reason in finding.reasons), finding.reasons


@pytest.mark.slow
def test_blocks_are_judged_apart(tmp_path: Path) -> None:
    """Each fragment has a finding of its own, under its name, with its own restart policy and period."""
    config = TrainConfig(outer=config_of(EMA).outer, steps=60, inner_steps=1)
    write_run(tmp_path, EMA, [], blocks={"ends": [0.95] * 3, "blocks": [0.002] * 3}, config=config)
    verdicts = {finding.block: finding.verdict for finding in judged(tmp_path).findings}
    assert verdicts == {"ends": "oscillates", "blocks": "lags"}
    text = " ".join(describe(judged(tmp_path), "run").split())
    assert "(--sync.restart ends=" in text  # --outer.restart would be that of all
    assert "(--outer.restart" not in text


def test_missing_numbers(tmp_path: Path) -> None:
    """Nulls in half of the rounds leave a verdict or a reason, never an error; null everywhere is "cannot tell"."""
    lines = round_facts(write_run(tmp_path, EMA, [0.95] * 3))
    for nulls, verdicts in ((lines[::2], {"oscillates", "cannot tell"}), (lines, {"cannot tell"})):
        for line in nulls:
            line["groups"][0] |= {"cosine": None, "pseudo_gradient_norm": None}
        write_lines(tmp_path / "rounds.jsonl", lines)
        assert finding_of(tmp_path).verdict in verdicts


REVIEWED = OuterRule(0.35, 0.9, nesterov=True)


@pytest.mark.parametrize("missing", [("gain",), ("gain", "cosine", "buffer_norm", "pseudo_gradient_norm")])
def test_what_was_not_measured_is_no_number(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """Rounds without gains, or without anything finite, are told in words, not as nan."""
    folder = write_run(tmp_path, SUM, [0.5] * 3)
    lines = round_facts(folder)
    for line in lines[30:]:
        for entry in (line, line["groups"][0]):
            entry.update(dict.fromkeys(missing))
    write_lines(folder / "rounds.jsonl", lines)
    words = describe(judged(folder), "run", verbose=True)
    assert "no gains" in words
    assert "nan" not in words.split()
    assert "nan." not in words


@pytest.mark.slow
def test_what_restarts_hide_is_not_judged(tmp_path: Path) -> None:
    """Where restarts drop every buffer before it could turn, noisy runs are neither lagging nor held, nor told to grow.

    Short of that, whether the buffer would turn is not known.
    """
    sigma = np.linspace(0.01, 0.1, 40).tolist()
    folder = write_run(tmp_path / "noisy", REVIEWED, sigma, 20, "3")
    runs = observed(REVIEWED, sigma, 20, "3", noise=0.05, seeds=list(range(40)))
    for seed in range(40):
        block = {name: np.asarray(values)[:, seed] for name, values in runs.items()}
        write_lines(folder / "rounds.jsonl", round_lines({"0": block}))
        diagnosis = judged(folder)
        assert diagnosis.findings[0].verdict == "cannot tell"
        assert "is faster" not in describe(diagnosis, "run")
    quiet = finding_of(write_run(tmp_path / "quiet", REVIEWED, sigma, 60, "3", noise=0.01))
    assert quiet.verdict == "cannot tell"
    assert any("has not turned before a restart drops it" in reason for reason in quiet.reasons)


def test_the_whole_says_no_more_than_its_parts(tmp_path: Path) -> None:
    """Where no third of a run lags, the whole does only if its own cosine is four standard errors above zero."""
    finding = finding_of(write_run(tmp_path, SLOW, [0.02] * 30))
    latest = finding.latest
    assert latest is not None
    blind = tuple(dataclasses.replace(stage, verdict="cannot tell") for stage in finding.thirds)
    assert weighed(latest, finding.thirds) == weighed(latest, blind) == latest
    unclear = dataclasses.replace(latest.evidence, cosine=0.3, cosine_error=0.1)
    weak = dataclasses.replace(latest, evidence=unclear)
    assert weighed(weak, finding.thirds).verdict == "lags"
    assert weighed(weak, blind).verdict == "cannot tell"
    turning = tuple(dataclasses.replace(stage, verdict="oscillates") for stage in finding.thirds)
    assert weighed(weak, (*turning, *blind)).verdict == "cannot tell"


ADVICE: dict[str, tuple[OuterRule, float | list[float], str, list[str], list[str]]] = {
    "oscillates": (SUM, 0.5, "never", [
        "--outer.restart 2", "the period's own rate is 1.12)", "--outer.method averaging)",
        "half the rate", "10 times too large. It would be --outer.lr 0.07",
    ], []),
    "lags, sigma known, mean gain below 1": (OuterRule(0.7, 0.9, form="ema"), 0.001, "never", [
        "10 times too small. It would be --outer.lr 7 in EMA form",
        "Compare it with half the learning rate (--outer.lr 0.35)", "sigma 0.001; without restarts it is 0.0007",
    ], ["the period's own rate"]),
    "lags, a slow swing": (OuterRule(0.9, 0.85, True, "ema"), 0.06, "never", [
        "goes from side to side in 80 rounds", "a restart slows such a motion down",
        "Whether a larger or a smaller step is better the record does not tell",
    ], ["is faster"]),
    "lags, restarts too soon": (EMA, 0.1, "3", [
        "discard useful momentum", "a restart every 23 rounds (--outer.restart 23)",
    ], ["a restart slows such a motion down"]),
    "lags, many modes": (EMA, np.geomspace(1e-3, 0.9, 30).tolist(), "never", [
        "Its motion is that of many slower modes", "from low to high sigma (--outer.restart ",
    ], []),
    "lags, a large gain": (WILD, 0.1, "never", ["The mean gain of this rule is 2.8"], []),
    "overshoots": (WILD, 0.9, "never", ["below lr 1.11 (sum form)", "at sigma 0.9 (--outer.lr 1)"], []),
    "steps of its own": (SUM, 0.5, "auto", [
        "auto takes its own steps", "plain averaging (--outer.method averaging --outer.restart never)",
    ], ["Controls"]),
    "gain not known in advance": (SUM, 0.001, "gradient", [
        "half the learning rate",
    ], ["mean gain of this rule", "at this mean gain"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_suggestions(tmp_path: Path, case: str) -> None:
    """A run is given the period of the theory, the controls and the form mistake that would look so."""
    rule, sigma, restart, words, absent = ADVICE[case]
    modes = sigma if isinstance(sigma, list) else [sigma] * 3
    diagnosis = judged(write_run(tmp_path, rule, modes, restart=restart))
    text = " ".join([*diagnosis.findings[0].reasons, *suggestions(diagnosis, diagnosis.findings[0])])
    assert diagnosis.findings[0].verdict in case or restart != "never"
    assert [word for word in words if word not in text] == []
    assert [word for word in absent if word in text] == []
    endless = dataclasses.replace(diagnosis, planned=1 << 53)  # a loop over its rounds would not end
    assert bool(suggestions(endless, endless.findings[0])) == bool(text)
    of_a_loop = dataclasses.replace(diagnosis.findings[0], block="param group 0")
    assert not any("Period for" in line and "--outer" in line for line in suggestions(diagnosis, of_a_loop))


def test_a_language_models_run(tmp_path: Path) -> None:
    """A run that was really trained gives words, a sigma or a reason for none, and JSON that can be read back."""
    text = textmaker.write(tmp_path / "text.txt")
    config = textmaker.small_run(text, steps=60, inner_steps=2, **{"outer.restart": "5"})
    train_run(config, tmp_path / "run", quiet=True)
    diagnosis = judged(tmp_path / "run")
    assert diagnosis.rounds == diagnosis.planned == 30
    (finding,) = diagnosis.findings
    assert finding.reasons
    assert finding.latest is not None
    assert finding.latest.evidence.observed.foreign == 0  # the buffer of every round is the rule's
    assert finding.latest.evidence.observed.pairs > 10
    answer = json.dumps(as_json(diagnosis), allow_nan=False)
    assert json.loads(answer)["findings"][0]["verdict"] == finding.verdict
    assert finding.verdict.upper() in describe(diagnosis, "run")


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words or one JSON object, status 0; a folder that is no run's is a mistake with what to give."""
    folder = write_run(tmp_path / "run", EMA, [0.95] * 3)
    assert main(["diagnose", str(folder)]) == 0
    words = capsys.readouterr().out
    assert "OSCILLATES" in words
    assert "heavy ball lr 1 momentum 0.9 (EMA form), the same as lr 0.1 in sum form" in words
    assert "limits   the theory is linear" in words.splitlines()[-1]
    assert main(["diagnose", str(folder), "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(words.rpartition("limits   ")[0])
    assert all(" ".join(text.split()) in " ".join(whole.split()) for text in LIMITS)
    assert main(["diagnose", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["verdict"] == "oscillates"
    (tmp_path / "other").mkdir()
    for name in ("none", "other"):
        assert main(["diagnose", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err


def test_the_advised_command_can_be_pasted(tmp_path: Path) -> None:
    """It stands on one line, in a folder with a long name with hyphens too, and no option is broken elsewhere."""
    diagnosis = judged(write_run(tmp_path / "-".join(["heavy", "ball"] * 12), NESTEROV, [0.5] * 3))
    assert diagnosis.command.startswith("twophase train --config")
    lines = describe(diagnosis, "run", verbose=True).splitlines()
    assert any(diagnosis.command in line for line in lines)
    assert not any(line.endswith("-") for line in lines)


def test_a_run_that_was_ended_for_divergence(tmp_path: Path) -> None:
    """A run that ended as diverged is called so, whatever its last norms were."""
    folder = write_run(tmp_path, EMA, [0.95] * 3, finished=False)
    write_summary(folder, config_of(EMA), perplexity=None)
    assert finding_of(folder).verdict == "diverges"


def reshaped(folder: Path, norms: Sequence[float | None], rates: Sequence[float]) -> Finding:
    """The finding on a run whose pseudo-gradients have these norms, and its rounds these inner learning rates."""
    rounds, metrics = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("rounds.jsonl", "metrics.jsonl")
    )
    for line, norm in zip(rounds, norms, strict=True):
        for entry in (line, line["groups"][0]):
            entry["pseudo_gradient_norm"] = norm
            if norm is None:
                entry["cosine"] = entry["buffer_norm"] = None
    for line, rate in zip(metrics, rates, strict=True):
        line["inner_lr"] = rate
    write_lines(folder / "rounds.jsonl", rounds)
    write_lines(folder / "metrics.jsonl", metrics)
    return finding_of(folder)


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


@pytest.mark.parametrize(("shape", "diverges"), SHAPES.values(), ids=SHAPES)
def test_what_explodes_diverges(tmp_path: Path, shape: NDArray[np.float64], diverges: bool) -> None:
    """A norm that rises threefold and goes on rising diverges, with its own factor; what an inner rate does is none."""
    folder = write_run(tmp_path, SUM, [0.3], noise=0.02)
    noisy = shape * np.exp(0.05 * np.random.default_rng(1).standard_normal(60))
    for rates in (COSINE, CONSTANT):
        finding = reshaped(folder, noisy.tolist(), rates)
        assert (finding.verdict == "diverges") is diverges, finding.reasons
    if shape[-1] > 100 and shape[30] > 10:
        factor = float(finding.reasons[0].partition("grows by a factor ")[2].partition(" a round")[0])
        assert factor == pytest.approx(math.exp(0.1), abs=0.01)
        assert reshaped(folder, noisy.tolist(), WARM_UP).verdict != "diverges"


def test_a_flat_norm_hardly_ever_diverges() -> None:
    """Of norms that only fluctuate, for one round or for many, at most 2 % are told to rise by so much."""
    chance = np.random.default_rng(0)
    for memory, spread in ((0.0, 0.02), (0.0, 0.5), (0.9, 0.3)):
        risen = 0
        for _ in range(300):
            heights = np.zeros(90)
            for t, shock in enumerate(spread * math.sqrt(1 - memory**2) * chance.standard_normal(89), start=1):
                heights[t] = memory * heights[t - 1] + shock
            risen += grown(np.exp(heights[-30:]), np.array(COSINE[-30:]))[0] > 0
        assert risen <= 6, (memory, spread)


def test_norms_that_are_no_numbers_any_more(tmp_path: Path) -> None:
    """Where norms and cosine end to be numbers the run diverges; a single round or a run without any is no proof."""
    for lost, diverges in ((1, False), (3, True), (60, False)):
        folder = write_run(tmp_path / str(lost), SUM, [0.3], noise=0.02)
        finding = reshaped(folder, [*[1.0] * (60 - lost), *[None] * lost], CONSTANT)
        assert (finding.verdict == "diverges") is diverges, (lost, finding.reasons)
        if diverges:
            assert "In the last 3 rounds neither" in finding.reasons[0]
            assert [stage.verdict == "diverges" for stage in finding.thirds] == [False, False, True]
