"""`twophase spectrum`: a run's blocks end to end, the theory where it is exact, and what cannot be measured."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runmaker
import textmaker
from twophase.base.config import fingerprint
from twophase.cli.main import main
from twophase.figures.style import rendered
from twophase.rule import OuterRule
from twophase.runs.folder import RunFolder
from twophase.runs.record import read_record
from twophase.spectrum.blocks import PLACES, Facts, Setting, choose, forecast, loss_curve, seen, setting_of
from twophase.spectrum.figure import draw
from twophase.spectrum.report import describe
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.model import BLOCKS
from twophase.tasks.lm.task import LanguageTask, corpus_of
from twophase.tasks.restored import inverse_scale, restore
from twophase.theory.modes import effective_progress
from twophase.theory.periods import best_period, rounded_period
from twophase.training import checkpoint
from twophase.training.config import inner_lr
from twophase.training.train import train

FRAGMENTS = ("ends=embedding|head", "rest=.")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return textmaker.write(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(autouse=True)
def few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Densities here need not be fine, and one test looks at the figure."""
    monkeypatch.setattr("twophase.spectrum.blocks.STEPS", 8)
    monkeypatch.setattr("twophase.spectrum.blocks.PROBES", 1)
    monkeypatch.setattr("twophase.spectrum.blocks._APART", 2)
    monkeypatch.setattr("twophase.spectrum.report.rendered", lambda _: {})


def config_of(text: Path, **values: Any) -> TrainConfig:
    base = {"data.sequence_length": 16, "data.validation_windows": 8, "inner.lr": 4e-3, "checkpoint_every": 100}
    return textmaker.small_run(text, 8, **base | {"steps": 36, "inner_steps": 3} | values)


def trained(folder: Path, config: TrainConfig) -> Path:
    with RunFolder.claim(folder, config) as claimed:
        train(LanguageTask(config), config, claimed)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run that is combined as one."""
    return trained(tmp_path_factory.mktemp("run") / "run", config_of(text))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run in two named fragments."""
    config = config_of(text, **{"sync.fragments": FRAGMENTS, "sync.stagger": False})
    return trained(tmp_path_factory.mktemp("cut") / "run", config)


def answer_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["spectrum", *words])
    out, err = capsys.readouterr()
    return status, out, err


# ------------------------------------------------------------------------------------------------------ the command


@pytest.mark.slow
def test_a_run_is_measured_and_drawn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The five usual blocks in words and numbers, the four files, and progress on stderr."""
    monkeypatch.setattr("twophase.spectrum.report.rendered", rendered)
    status, out, err = answer_of([str(run), "--out", str(tmp_path / "out"), "--batches", "2"], capsys)
    assert status == 0
    assert "spectrum 5/5" in err
    facts = json.loads((tmp_path / "out" / "spectrum.json").read_text())
    assert [block["name"] for block in facts["blocks"]] == list(BLOCKS)
    model = restore(run).model
    assert sum(block["parameters"] for block in facts["blocks"]) == sum(weight.numel() for weight in model.parameters())
    for block in facts["blocks"]:
        assert block["name"] in out
        assert (len(block["largest"]), len(block["largest_preconditioned"])) == (5, 2)
        assert block["largest_preconditioned"][0] == pytest.approx(block["density"]["eigenvalue"][-1], rel=0.02)
        assert sum(block["density"]["share"]) == pytest.approx(1)
        assert all(0 <= block["progress"][place]["mean"] <= 1 for place in PLACES)
        assert block["period"] is None or 1 <= block["period"] < 12
    assert facts["tokens"] == 2 * 2 * 16
    assert list(facts["from_rounds"]) == ["whole model"]
    assert "recorded of the whole model as one" in " ".join(out.split())
    with (tmp_path / "out" / "spectrum.csv").open() as file:
        assert {row["panel"] for row in csv.DictReader(file)} >= {"spectrum", "progress", "loss"}
    for ending in ("png", "pdf", "csv", "json"):
        assert (tmp_path / "out" / f"spectrum.{ending}").stat().st_size > 0
        assert f"spectrum.{ending}" in out


@pytest.mark.slow
def test_a_runs_own_fragments_are_its_blocks(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named fragments are measured as they were trained, each beside what its own rounds show; --json is the file.

    `--blocks` cuts the model in another way, which the rounds know nothing of.
    """
    words = [str(cut), "--batches", "1", "--quiet", "--out", str(tmp_path)]
    status, out, err = answer_of([*words, "--json"], capsys)
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts == json.loads((tmp_path / "spectrum.json").read_text())
    patterns = {block["name"]: block["pattern"] for block in facts["blocks"]}
    assert patterns == {"ends": "embedding|head", "rest": "."}
    assert list(facts["from_rounds"]) == ["ends", "rest"]
    assert all(block["shown"] or block["why_not"] for block in facts["from_rounds"].values())
    status, out, _ = answer_of([*words, "--blocks", "down=down", "rest=."], capsys)
    assert status == 0
    assert "The rounds were recorded of fragment ends, fragment rest" in " ".join(out.split())
    facts = json.loads((tmp_path / "spectrum.json").read_text())
    assert facts["blocks"][0]["parameters"] == 8 * 12


@pytest.fixture(scope="module")
def damaged(run: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs that cannot be measured, by name."""
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("no checkpoint", "cut short", "moved"):
        shutil.copytree(run, folder / name)
    shutil.rmtree(folder / "no checkpoint" / "checkpoint")
    (next((folder / "cut short" / "checkpoint").iterdir()) / "replica-000.safetensors").write_bytes(b"")
    config = folder / "moved" / "config.yaml"
    config.write_text(config.read_text().replace(str(text), str(folder / "gone")))
    (folder / "whole").symlink_to(run)
    (folder / "empty").mkdir()
    (folder / "file").touch()
    other_text = textmaker.write(folder / "text.txt")
    trained(folder / "other text", config_of(other_text))
    textmaker.write(other_text, seed=1)
    corpus_of.cache_clear()
    trained(folder / "diverged", config_of(text, **{"outer.lr": 1e9, "divergence_loss": 6.0}))
    return folder


@pytest.mark.parametrize(
    ("folder", "words", "message"),
    [
        ("none", "", "does not exist; give the folder of a run"),
        ("empty", "", "is not the folder of a run"),
        ("file", "", "is a file; give the folder"),
        ("whole", "--blocks head", "it must be NAME=VALUE"),
        ("whole", "--blocks a=head a=.", "it must be a name that is given once"),
        ("whole", "--blocks a=head", "add one at the end such as rest=."),
        ("whole", "--out FILE", "--out"),
        ("whole", "--out TABLE", "would replace"),
        ("no checkpoint", "", "has no checkpoint"),
        ("no checkpoint", "", "cells of a sweep keep none"),
        ("cut short", "", "is damaged"),
        ("moved", "", "another configuration"),
        ("other text", "", "the text is not the one"),
        ("diverged", "", "has diverged"),
    ],
)
def test_refusals(damaged: Path, capsys: pytest.CaptureFixture[str], folder: str, words: str, message: str) -> None:
    """What is no run, has no checkpoint, has diverged, lacks its text or blocks: status 2, the fault and the remedy."""
    (damaged / "table").mkdir(exist_ok=True)
    (damaged / "table" / "spectrum.csv").write_text("sigma,weight\n0.9,1\n")
    options = words.replace("FILE", str(damaged / "file")).replace("TABLE", str(damaged / "table")).split()
    status, out, err = answer_of([str(damaged / folder), *options, "--quiet"], capsys)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("twophase spectrum: error: ")
    assert message in line
    assert [path.name for path in (damaged / "table").iterdir()] == ["spectrum.csv"]


@pytest.mark.slow
def test_a_run_without_momentum_is_measured(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without momentum there is nothing to restart, and the words say so; a tied head is no block of its own."""
    config = config_of(text, **{"outer.momentum": 0.0, "outer.lr": 1.0, "model.tie_embeddings": True})
    folder = trained(tmp_path / "run", replace(config, replicas=1))
    status, out, _ = answer_of([str(folder), "--quiet", "--batches", "1"], capsys)
    assert status == 0
    assert "The rule has no momentum" in out
    facts = json.loads((folder / "spectrum.json").read_text())
    assert [block["name"] for block in facts["blocks"]] == [name for name in BLOCKS if name != "head"]
    assert all(block["period"] is None for block in facts["blocks"])


# ------------------------------------------------------------------------------------------------------- the inputs


def test_the_preconditioner_is_that_of_adamw() -> None:
    """Without a first moment and decay, a step of AdamW is `-lr gradient` times what is read off its state."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.0, 0.99), weight_decay=0.0, eps=1e-3)
    for _ in range(5):
        before = weight.detach().clone()
        weight.grad = torch.randn(7, generator=generator, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state_dict()
        factor = inverse_scale(state["param_groups"][0], state["state"][0])
        torch.testing.assert_close(weight.detach() - before, -0.01 * factor * weight.grad)


def test_a_coordinate_without_a_gradient_takes_no_step() -> None:
    """A token that a replica has never seen is not the most mobile coordinate of all, as 1 / eps would make it."""
    group = {"betas": (0.9, 0.99), "eps": 1e-8}
    state = {"step": torch.tensor(5.0), "exp_avg_sq": torch.tensor([0.0, 1e-30, 1.0])}
    never, hardly, often = inverse_scale(group, state).tolist()
    assert never == 0
    assert hardly > 1e7
    assert often == pytest.approx((1 - 0.99**5) ** 0.5)


def test_batches_are_those_that_have_been_trained_on(run: Path) -> None:
    """Of a run that is not finished, the steps before its checkpoint; of a finished one all."""
    whole = restore(run)
    asked: list[int] = []

    class Noted:
        def batch(self, seed: int, step: int, replica: int) -> Any:
            asked.append(step)
            return whole.task.batch(seed, step, replica)

    for step, steps in ((36, [0, 9, 18, 27]), (6, [0, 1, 3, 4])):
        asked.clear()
        replace(whole, step=step, task=Noted()).batches(4)  # type: ignore[arg-type]
        assert asked == steps


@pytest.mark.slow
def test_steps_of_a_policys_own_are_told(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Periods are the rule's; a run whose policy takes other steps than its rule is told so."""
    folder = trained(tmp_path / "run", config_of(text, **{"outer.restart": "auto"}, steps=6))
    status, out, _ = answer_of([str(folder), "--quiet", "--batches", "1", "--blocks", "all=."], capsys)
    assert status == 0
    assert "restart  auto takes its own steps" in out


def test_several_replicas_take_the_mean_step(run: Path) -> None:
    """The anchor takes the mean of the replicas' steps, so `D^-1` is the mean of theirs."""
    saved = checkpoint.Checkpoint(checkpoint.latest(run / "checkpoint") or run, fingerprint(restore(run).config))
    states = [saved.part(checkpoint.replica_file(number))["inner"] for number in range(2)]
    restored = restore(run)
    assert restored.replicas == 2
    assert restored.scale is not None
    for place, (name, _) in enumerate(restored.model.named_parameters()):
        each = [inverse_scale(state["param_groups"][0], state["state"][place]) for state in states]
        torch.testing.assert_close(restored.scale[name] ** 2, (each[0] + each[1]) / 2)


def test_the_schedule_is_the_runs_own(text: Path) -> None:
    """The inner learning rates are those of the middle rounds of the run's thirds, step by step."""
    config = config_of(text)
    setting = setting_of(config)
    assert setting.rounds == 12
    for place, middle in zip(PLACES, (2, 6, 10), strict=True):
        assert setting.inner_lrs[place] == tuple(inner_lr(config, 3 * middle + step) for step in range(3))
    short = setting_of(replace(config, steps=4))
    assert [len(lrs) for lrs in short.inner_lrs.values()] == [3, 1, 1]
    delayed = setting_of(replace(config, sync=replace(config.sync, delay=2)))  # the first two steps are given up
    assert delayed.inner_lrs == {place: lrs[2:] for place, lrs in setting.inner_lrs.items()}


# -------------------------------------------------------------------------------------------------------- the theory

RULE = OuterRule(0.7, 0.9, nesterov=True)


def setting_at(lr: float, inner_steps: int = 4, rounds: int = 20) -> Setting:
    return Setting(RULE, rounds, dict.fromkeys(PLACES, (lr,) * inner_steps), 0.0)


def block_of(values: Any, setting: Setting, name: str = "block") -> Facts:
    nodes = np.sort(np.asarray(values))
    block = {"name": name, "parameters": len(nodes), "largest": nodes[::-1]}
    return block | forecast(setting, nodes[::-1], nodes, np.full(len(nodes), 1 / len(nodes)))


def simulated(h: Any, d: Any, setting: Setting, period: int) -> float:
    """Loss over its start after a run of preconditioned inner descent and outer steps in parameter space."""
    values, vectors = np.linalg.eigh(h / np.sqrt(d[:, None] * d[None, :]))
    x = vectors.sum(1) / np.sqrt(d)  # alike in all modes
    start, buffer = x @ h @ x, np.zeros_like(x)
    for round_ in range(1, setting.rounds + 1):
        local = x.copy()
        for lr in setting.inner_lrs["mid"]:
            local = local - lr * (h @ local) / d
        g = x - local
        buffer = RULE.momentum * buffer + g
        x = x - RULE.lr * (g + RULE.momentum * buffer)
        if round_ % period == 0:
            buffer = np.zeros_like(x)
    assert values[0] > 0
    return float(x @ h @ x / start)


def test_on_a_quadratic_the_forecast_is_exact() -> None:
    """Every period of a preconditioned quadratic leaves what is forecast, and the forecast period leaves least."""
    rng = np.random.default_rng(3)
    root = rng.standard_normal((5, 5))
    h, d = root @ root.T + np.eye(5), rng.uniform(0.5, 4, 5)
    values = np.linalg.eigvalsh(h / np.sqrt(d[:, None] * d[None, :]))
    setting = setting_at(0.12 / values[-1])
    block = block_of(values, setting)
    np.testing.assert_allclose(block["density"]["sigma_mid"], effective_progress(values, 0.12 / values[-1], 4))
    losses = np.array([simulated(h, d, setting, period) for period in range(1, setting.rounds + 1)])
    without = losses[-1]
    np.testing.assert_allclose(
        loss_curve(setting, block, range(1, setting.rounds + 1)), np.log(losses / without), rtol=0, atol=1e-9
    )
    best = int(np.argmin(losses)) + 1
    assert (block["period"] or setting.rounds) == best
    assert block["log_gain"] == pytest.approx(np.log(losses.min() / without), abs=1e-9)
    assert block["period"] is not None  # or the test would show little


def test_slow_modes_outvote_the_mean() -> None:
    """A block with a wide spectrum wants no restart though a mode at its mean would: what is left is in slow modes."""
    setting = setting_at(0.1, inner_steps=5, rounds=30)
    wide = block_of(10.0 ** np.linspace(-3, 1, 60), setting)
    assert wide["period"] is None
    assert wide["period_at_mean"] == rounded_period(RULE, wide["progress"]["mid"]["mean"])
    text = describe([], setting, [wide], {})
    assert "no restart is best although a single" in " ".join(text.split())
    narrow = block_of([1.0], setting)
    assert narrow["period"] == best_period(RULE, narrow["density"]["sigma_mid"], max_period=30, rounds=30)


def test_steep_modes_are_named() -> None:
    """Modes that an inner step carries past the minimum count as removed, and the words say how much lies in them."""
    setting = setting_at(0.5)
    block = block_of([0.2, 3.0, 8.0], setting)
    there = block["progress"]["mid"]
    assert there["step"] == 4
    assert there["passing"] == pytest.approx(11 / 11.2)
    assert there["unstable"] == pytest.approx(8 / 11.2)
    assert block["density"]["sigma_mid"][1:].tolist() == [1, 1]
    text = " ".join(describe([], setting, [block], {}).split())
    assert (
        "passes the minimum of the steepest mode (early: lr times eigenvalue 4). Such modes have 98 % of the loss"
        in text
    )
    assert "beyond 2, where gradient descent would diverge, 71 %" in text


def test_a_block_without_curvature_is_left_alone() -> None:
    """Parameters that the text does not use have no progress and no period, and are named."""
    setting = setting_at(0.5)
    block = block_of([0.0, 0.0], setting, "idle")
    assert (block["period"], block["period_at_mean"], block["progress"]["mid"]["mean"]) == (None, None, 0)
    assert "idle: no curvature was found" in describe([], setting, [block], {})
    assert choose(setting, np.zeros(2), np.zeros(2)) == (None, 0)


def test_a_block_without_a_largest_eigenvalue_has_its_row() -> None:
    """Where ARPACK converges to none in its time, the row says so beside the quantiles of the density."""
    setting, none = setting_at(0.5), np.zeros(0)
    block = block_of([0.1, 0.2], setting) | forecast(setting, none, np.array([0.1, 0.2]), np.full(2, 0.5))
    block["largest"] = none
    row = next(line for line in describe([], setting, [block], {}).splitlines() if line.count("not found"))
    assert row.count("not found") == 2
    assert "0.2" in row


def test_the_rounds_show_the_progress_of_each_block(tmp_path: Path) -> None:
    """From the record of a simulated run each fragment's sigma comes back, and with it its first cancellation."""
    blocks = {"fast": [0.8], "slow": [0.1]}
    rule = OuterRule(0.7, 0.9)
    folder = runmaker.write_run(tmp_path / "run", rule, [0.5], rounds=40, blocks=blocks)
    setting = Setting(rule, 40, dict.fromkeys(PLACES, (0.1,)), 0.0)
    shown = seen(read_record(folder), setting)
    assert list(shown) == ["fast", "slow"]
    for name, (sigma,) in blocks.items():
        interval = shown[name]["interval"]
        assert interval is not None
        assert interval[1] == pytest.approx(sigma, rel=1e-6)
        assert set(shown[name]["periods"]) == {rounded_period(rule, sigma)}
        assert all(part.sigma == pytest.approx(sigma, rel=1e-4) for part in shown[name]["thirds"].values())
    text = describe([], setting, [block_of([1.0], setting, "fast")], shown)
    assert "slow, from the rounds: sigma 0.1 to 0.1" in text
    figure, rows = draw("run", setting, [block_of([1.0], setting, name) for name in blocks], shown)
    drawn = {(row["block"], row["place"]): row["y"] for row in rows if row["panel"] == "rounds"}
    assert drawn == {(name, place): pytest.approx(blocks[name][0], rel=1e-4) for name in blocks for place in PLACES}
    assert figure.axes[2].get_xscale() == "log", "of more than 30 periods"
