"""Studies of a task in place of the built-in model: trained, drawn and drawn again in its own measure; refusals."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from madeup import Value, pages, staged_rows
from twophase.base.config import UsageError, with_values
from twophase.cli.main import main
from twophase.diloco.formats import WIRES
from twophase.figures.style import styled
from twophase.recipes.paper import LAPTOP, PAPER, QUICK, Scale
from twophase.studies import study
from twophase.tasks.named import config_class

FILE = '''
"""The smallest task: a weight is drawn to a noisy 1."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pull:
    noise: float = 0.1

    def model(self, seed):
        return torch.nn.Linear(1, 1, bias=False)

    def batch(self, seed, step, replica):
        torch.manual_seed(1000 * seed + 10 * step + replica)
        return 1 + self.noise * torch.randn(4)

    def loss(self, model, batch):
        return ((model.weight - batch) ** 2).mean()

    def evaluate(self, model):
        return {"loss": (model.weight - 1).square().item() + self.noise**2}
'''
STUDIES = ("retuning", "robustness_heatmaps", "soft_restart", "wires")
COMMAND = ["study", "robustness_heatmaps", "--task", "pull.py:Pull"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the task's file, which stays imported as long as the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pull.py").write_text(FILE)
    monkeypatch.delitem(sys.modules, "pull", raising=False)


def scale_of(task: str, **values: Any) -> Scale:
    return QUICK.at(with_values(config_class(task)(), {"steps": 12, "inner_steps": 1} | values))


def texts_of(figures: Any) -> list[str]:
    """Every text that figures show."""
    from matplotlib.text import Text

    return [text.get_text() for figure in figures for text in figure.findobj(Text) if text.get_text()]


def judged_by_loss(scale: Scale, name: str, value: Value) -> study.Result:
    """A study's result on made-up runs of a task without perplexity, all stages."""
    module = study.load(name)
    every_run = [replace(row, perplexity=None) for row in staged_rows(module, scale, value)]
    return study._table(module, every_run, scale)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_an_own_task_by_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file's task is trained over the grid, in a folder of its own; words and files say loss; it is drawn again."""
    figures: list[Any] = []
    monkeypatch.setattr(study, "rendered", lambda figure, **_: figures.append(figure) or {})
    monkeypatch.setitem(study.SCALES, "quick", replace(QUICK, lrs=(0.7,), momenta=(0.9,)))  # 28 runs
    words = [*COMMAND, "--quick", "--steps", "8", "--inner-steps", "1", "--task.noise", "0.2", "--inner.lr", "0.1"]
    assert main([*words, "--workers", "1", "--quiet"]) == 0
    out = Path("runs", "studies", "Pull")
    numbers = (out / "robustness_heatmaps.json").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "Validation loss of Pull" in shown
    for text in [shown, numbers, *texts_of(figures)]:
        assert "perplexity" not in text.lower()
        assert "language model" not in text
    assert "validation loss of Pull" in " ".join(texts_of(figures))
    facts = json.loads(numbers)
    assert facts["settings"]["task"] == "pull.py:Pull"
    assert facts["numbers"]["controls"]["2"]["rounds"] == 4  # the long period keeps its ratio to the short one
    with (out / "robustness_heatmaps.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["inner_steps"] for line in lines} == {"1", "2"}
    assert all(float(line["validation_loss"]) >= 0.04 for line in lines if line["state"] == "finished")
    assert main([*words, "--redraw"]) == 0
    assert texts_of(figures[4:]) == texts_of(figures[:4])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_others_are_trained_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other study that takes a task trains the shipped one, all stages, and judges every run by its loss."""
    monkeypatch.setattr(study, "rendered", lambda *_, **__: {})
    small = {"lrs": (0.7,), "momenta": (0.9,), "periods": (3, 5), "inject": (0.0, 0.5), "retain": (0.0,)}
    losses: list[float] = []
    for name in ("retuning", "soft_restart", "wires"):
        outcome = study.run(name, tmp_path, scale=replace(scale_of("digits"), **small), workers=1)
        assert "oss of digits" in outcome.answer
        with outcome.paths[0].open(newline="") as file:
            losses = [float(line["validation_loss"]) for line in csv.DictReader(file)]
        assert all(0 < loss < 5 for loss in losses)
    assert len(losses) == len(set(losses)) == 4 * len(WIRES)  # each wire has an effect


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_words_and_figures_name_task_and_measure(name: str) -> None:
    """Of a task without perplexity nothing says perplexity; of one that has it, the words are it and the task."""
    module = study.load(name)
    result = judged_by_loss(scale_of("digits"), name, lambda cell: 0.01 + 0.001 * cell.config.outer.lr)
    with styled():
        words = texts_of(pages(module, result))
    assert not [text for text in [module.answer(result), *words] if "perplexity" in text.lower()]
    assert "loss of digits" in " ".join(words)
    result.settings.update(task="hf:some/Model", measure="perplexity")
    assert module.answer(result).startswith("Validation perplexity of Model")
    with styled():
        words = texts_of([module.draw(result)])
    assert any("perplexity" in text and "of Model" in text for text in words)
    assert not [text for text in words if "loss of" in text or "validation loss" in text]


def test_small_losses_are_told_apart() -> None:
    """Differences of losses keep their digits, however small they are."""
    value: Value = lambda cell: 0.001 * (1 + (cell.config.outer.restart == "never"))  # noqa: E731
    result = judged_by_loss(scale_of("digits"), "robustness_heatmaps", value)
    assert "sum HB S=1 -0.001" in study.load("robustness_heatmaps").answer(result).replace("yes ", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["robustness_heatmaps", "soft_restart"])
def test_small_losses_fit_into_their_cells(name: str) -> None:
    """At the paper's grid, too, no number of a small loss is wider than its cell."""
    scale = PAPER.at(with_values(config_class("digits")(), {"steps": 512, "inner_steps": 16}))
    result = judged_by_loss(scale, name, lambda cell: 0.0612 + 0.01 * cell.config.outer.momentum)
    with styled():
        figure = study.load(name).draw(result)
        figure.draw_without_rendering()
    for panel in figure.axes[:-1]:
        across = panel.get_window_extent().width / len(panel.get_xticks())
        assert all(text.get_window_extent().width < across for text in panel.texts)


def test_a_scale_at_a_task_keeps_grid_and_ratios() -> None:
    """Grid, seeds and ratios of the communication periods are the scale's, everything else is the task's."""
    config = with_values(config_class("digits")(), {"steps": 320, "inner_steps": 10})
    scale = LAPTOP.at(config)
    assert (scale.short, scale.long, scale.retuning) == (10, 40, (10, 20, 40, 80, 160))
    assert (scale.lrs, scale.momenta, scale.seeds, scale.name) == (LAPTOP.lrs, LAPTOP.momenta, LAPTOP.seeds, "laptop")
    assert (scale.base, scale.rounds(40), scale.task, LAPTOP.task) == (config, 8, "digits", "lm")


@pytest.mark.parametrize("name", sorted({*study.names()} - {*STUDIES}))
def test_a_study_without_tasks_names_those_with(name: str, tmp_path: Path) -> None:
    """Whether it trains or not, a study that takes no task says which ones do, and nothing is written."""
    with pytest.raises(UsageError) as refusal:
        study.run(name, tmp_path / "out", scale=scale_of("digits"))
    assert all(word in str(refusal.value) for word in ("--task digits", name, *STUDIES))
    assert not (tmp_path / "out").exists()


def test_help_has_the_options_of_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    """With a task, help shows its values and the run's; groups stay on demand. Without one it is as short as ever."""
    for words, is_there in ((COMMAND, True), (["study"], False)):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        text = capsys.readouterr().out
        assert ("--task.noise" in text) == ("--inner-steps N" in text) == is_there
        assert "--outer.lr" not in text
        assert "--task" in text
