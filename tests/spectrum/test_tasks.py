"""`twophase spectrum` of tasks other than the built-in one: end to end, the right matrix, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import twophase
from twophase.base import source
from twophase.base.config import UsageError
from twophase.cli.main import main
from twophase.spectrum.blocks import PLACES, matrix_of, measure, patterns_of, setting_of
from twophase.spectrum.curvature import GaussNewton, Hessian, Matrix
from twophase.tasks.restored import restore
from twophase.training import checkpoint

NET = '''
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Net:
    """A small network with everything that may get in the way: dropout, statistics, frozen and unused parameters."""

    width: int = 6

    def model(self, seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({
            "body": nn.Sequential(
                nn.Linear(3, self.width, bias=False), nn.BatchNorm1d(self.width), nn.Tanh(), nn.Dropout(0.5)
            ),
            "head": nn.Linear(self.width, 2),
            "idle": nn.Linear(2, 1),
            "fixed": nn.Linear(2, 2),
        })
        model["fixed"].requires_grad_(False)
        return model

    def batch(self, seed, step, replica):
        x = np.random.default_rng((seed, step, replica)).standard_normal((8, 3)).astype(np.float32)
        return {"x": x, "y": (x[:, 0] * x[:, 1] > 0).astype(np.int64)}

    def scores(self, model, batch):
        return model["fixed"](model["head"](model["body"](batch["x"])))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.scores(model, batch), batch["y"])

    def evaluate(self, model):
        batch = {name: torch.from_numpy(part) for name, part in self.batch(9, 9, 9).items()}
        return {"loss": self.loss(model, batch).item()}


class Logits(Net):
    logits = Net.scores
'''
SHORT: dict[str, Any] = {"steps": 12, "inner_steps": 3, "inner.lr": 1e-2, "outer.momentum": 0.9}


@pytest.fixture(autouse=True)
def few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Densities here need not be fine, and nothing looks at the figures."""
    monkeypatch.setattr("twophase.spectrum.blocks.STEPS", 8)
    monkeypatch.setattr("twophase.spectrum.blocks.PROBES", 1)
    monkeypatch.setattr("twophase.spectrum.blocks._APART", 2)
    monkeypatch.setattr("twophase.spectrum.report.rendered", lambda _: {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def trained(path: Path, task: str, values: dict[str, Any] | None = None) -> Path:
    twophase.train(task, SHORT | (values or {}), path, quiet=True)
    return path


def refusal(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["spectrum", str(run), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("kind", "matrix"), [("Net", Hessian), ("Logits", GaussNewton)])
@pytest.mark.slow
def test_an_own_task_end_to_end(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, matrix: type[Matrix]
) -> None:
    """Trained parameters fall into the model's top modules; numbers and words name the matrix, and count examples."""
    run = trained(tmp_path / "run", f"{file}:{kind}")
    assert main(["spectrum", str(run), "--quiet", "--batches", "2"]) == 0
    out = capsys.readouterr().out
    facts = json.loads((run / "spectrum.json").read_text())
    assert (facts["task"], facts["matrix"], facts["examples"]) == (f"{file}:{kind}", matrix.title, 16)
    assert {block["name"]: block["parameters"] for block in facts["blocks"]} == {"body": 30, "head": 14, "idle": 3}
    body, head, idle = facts["blocks"]
    assert all(0 < block["progress"][place]["mean"] <= 1 for block in (body, head) for place in PLACES)
    assert (idle["largest"][0], idle["period"]) == (0, None)
    if matrix is Hessian:
        assert 0.01 < body["negative"] < 1
        assert head["negative"] == pytest.approx(0, abs=1e-5)  # the logits are linear in it
    assert matrix.title in out
    assert "tokens" not in out
    assert main(["spectrum", str(run), "--quiet", "--blocks", "out=head", "rest=."]) == 0
    assert [block["parameters"] for block in json.loads((run / "spectrum.json").read_text())["blocks"]] == [14, 33]


def test_what_was_evaluated_is_restored(file: Path, tmp_path: Path) -> None:
    """Anchor, statistics and frozen weights are those of the run's last evaluation, with dropout off."""
    run = trained(tmp_path / "run", f"{file}:Net")
    restored = restore(run)
    summary = json.loads((run / "summary.json").read_text())
    assert restored.task.evaluate(restored.model)["loss"] == summary["validation_loss"]
    assert not restored.model.training
    assert restored.scale is not None
    assert not restored.scale["idle.weight"].any()
    assert restored.scale["head.weight"].all()


def test_gradient_descent_has_no_scale(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For SGD the curvature is as it is, and momentum lengthens each step by 1 / (1 - momentum)."""
    values = {"inner.method": "sgd", "inner.momentum": 0.5, "inner.schedule": "constant", "inner.warmup": 0.0}
    run = trained(tmp_path / "run", f"{file}:Logits", values)
    restored = restore(run)
    (block,) = measure(restored, {"all": "."}, restored.batches(1))
    np.testing.assert_allclose(block["largest_preconditioned"], block["largest"][:2], rtol=1e-6)
    assert setting_of(restored.config).inner_lrs["mid"] == (2e-2,) * 3
    assert main(["spectrum", str(run), "--quiet", "--blocks", "all=."]) == 0
    assert "SGD with momentum 0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_shipped_tasks_have_logits(tmp_path: Path) -> None:
    """`digits` and `hf:` have the Gauss-Newton matrix; where all parameters are in one module, its parts are blocks."""
    pytest.importorskip("sklearn")
    transformers = pytest.importorskip("transformers")
    digits = restore(trained(tmp_path / "digits", "digits", {"task.width": 2}))
    assert list(patterns_of(digits)) == ["0", "3", "7", "9"]
    tiny = transformers.LlamaConfig(
        vocab_size=256, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    tiny.save_pretrained(tmp_path / "tiny")
    values = {"task.sequence_length": 8, "task.batch_size": 2, "task.validation_windows": 8}
    language = restore(trained(tmp_path / "hf", f"hf:{tmp_path / 'tiny'}", values))
    assert list(patterns_of(language)) == ["model.embed_tokens", "model.layers", "model.norm"]
    for restored in (digits, language):
        blocks = measure(restored, patterns_of(restored), restored.batches(2))
        assert matrix_of(restored.task)[0] is GaussNewton
        assert sum(block["parameters"] for block in blocks) == sum(p.numel() for p in restored.model.parameters())
        assert all(block["largest"][0] > 0 and block["negative"] == 0 for block in blocks)


INNER = "\n    def inner(self, model, config):\n        return torch.optim.AdamW(model.parameters(), config.lr)\n"
MISTAKES = {
    "logits of a shape": (
        "logits = Net.scores",
        "def logits(self, *args): return Net.scores(self, *args)[:, 0]",
        "shape (32,)",
    ),
    "no tensor": ("logits = Net.scores", "def logits(self, model, batch): return [1.0]", "list"),
    "one class": (
        "logits = Net.scores",
        "def logits(self, *args): return Net.scores(self, *args)[:, :1]",
        "shape (32, 1)",
    ),
    "not finite": ("logits = Net.scores", "def logits(self, *args): return Net.scores(self, *args) / 0", "not finite"),
    "an error": ("logits = Net.scores", "def logits(self, model, batch): return model.nothing", "net.py"),
    "once only": (
        "logits = Net.scores",
        "def logits(self, *args): return Once.apply(Net.scores(self, *args))",
        "twice",
    ),
    "once, by loss": ("logits = Net.scores", "def loss(self, *args): return Once.apply(Net.loss(self, *args))", "once"),
    "an inner optimizer": ("logits = Net.scores", f"logits = Net.scores\n{INNER}", "--inner.method"),
}
ONCE = """

class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        return slope.clone()
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    """Logits of another shape or that are not finite, operations without a second derivative, unknown inner steps."""
    before, after, named_part = MISTAKES[mistake]
    file.write_text(NET.replace(before, after) + ONCE)
    assert named_part in refusal(trained(tmp_path / "run", f"{file}:Logits"), capsys)


def test_a_run_that_has_changed_or_diverged(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task whose file has changed or is gone, and a run that has diverged, are refused with a remedy."""
    run = trained(tmp_path / "run", f"{file}:Net")
    diverged = trained(tmp_path / "diverged", f"{file}:Net", {"outer.lr": 1e9, "divergence_loss": 2.0})
    assert "diverged" in refusal(diverged, capsys)
    file.write_text(f"{NET}\n# another\n")
    source._digest.cache_clear()
    assert f"--task {file}:Net" in refusal(run, capsys)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("net.py", "moved.py"))
    assert "moved.py" in refusal(run, capsys)


@pytest.mark.parametrize("method", ["muon", "schedule-free"])
def test_other_inner_optimizers_are_refused(file: Path, tmp_path: Path, method: str) -> None:
    """Steps that no curvature describes are named, and what can be measured."""
    if method == "schedule-free":
        pytest.importorskip("schedulefree")
    values = {"inner.method": method, "inner.schedule": "constant"}
    run = trained(tmp_path / "run", f"{file}:Net", values)
    with pytest.raises(UsageError, match=method):
        restore(run)


def test_a_checkpoint_of_another_model_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the task's model does not have are refused before anything is computed."""
    run = trained(tmp_path / "run", f"{file}:Net")
    weights = {"head.weight": torch.zeros(2, 6)}
    monkeypatch.setattr(checkpoint.Checkpoint, "anchor", lambda _saved: weights)
    with pytest.raises(UsageError, match="do not fit"):
        restore(run)
