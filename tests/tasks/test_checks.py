"""A task of one's own: seeded, identified, evaluated, and the checks that protect its results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import twophase
from trained import run
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.tasks.registry import config_class, config_of, task_of

RINGS = Path(__file__).parents[2] / "examples" / "rings.py"
POINTS = "self.points((seed, step, replica), 16)"
CPU = torch.device("cpu")
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return the task of the rings' file, changed by replacements of its text."""
    names: list[str] = []

    def made(*changes: tuple[str, str], **values: Any) -> Any:
        text = RINGS.read_text()
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        file = tmp_path / f"rings_{len(names)}_{tmp_path.name.replace('-', '_')}.py"
        file.write_text(text)
        names.append(file.stem)
        return task_of(config_of({"task.name": f"{file}:Rings"} | {f"task.{name}": values[name] for name in values}))

    yield made
    for name in names:
        sys.modules.pop(name, None)


def test_a_sound_task_is_left_as_it_is(make: Make) -> None:
    """It passes, with NaN in its batch; the caller's generators and the model's mode are as before."""
    batch = "{'x': (np.full(3, np.nan, np.float32), torch.full((2,), torch.nan)), 'y': ['a', 1.5]}"
    make((POINTS, batch)).check(CPU)
    task, state = make(), torch.get_rng_state()
    task.check(CPU)
    assert torch.equal(torch.get_rng_state(), state)
    model = task.model(0).train()
    assert {"loss", "accuracy"} == task.evaluate(model).keys()
    assert model.training
    assert not model.eval().training
    task.evaluate(model)
    assert not model.training


def test_dropout_is_drawn_by_seed_step_and_replica(make: Make) -> None:
    """The loss after a batch is the same whatever was drawn before, and another at another step."""
    task, losses = make(), []
    model = task.model(0)
    for step in (3, 3, 4):
        torch.rand(7)
        losses.append(task.loss(model, tuple(map(torch.from_numpy, task.batch(0, step, 1)))).item())
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(next(task.model(2).parameters()), next(task.model(2).parameters()))


@pytest.mark.parametrize(
    ("call", "before", "after"),
    [
        (r"model\(0\)", "torch.manual_seed(seed)", "torch.seed()"),
        (r"model\(0\)", "return nn.Sequential(", "return nn.Sequential(*[nn.ReLU()] * next(COUNT), "),
        (r"batch\(0, 0, 0\)", POINTS, "self.points(None, 16)"),
        (r"batch\(0, 0, 0\)", f"return {POINTS}", "return {'points': torch.rand(3) * next(COUNT)}"),
    ],
)
def test_what_differs_the_second_time_is_refused(make: Make, call: str, before: str, after: str) -> None:
    """Weights and batches that are others, or more, the second time would make runs that cannot be compared."""
    counted = ("import numpy as np", "import itertools\nimport numpy as np\nCOUNT = itertools.count()")
    with pytest.raises(UsageError, match=rf"^--task .*{call}[^\n]*$"):
        make(counted, (before, after)).check(CPU)


def test_a_seed_that_changes_nothing_is_refused(make: Make, tmp_path: Path) -> None:
    """Model and batch ignore it, or some seeds, in a sweep before its first run; dropout that is drawn by it counts."""
    blind, half = (
        [("torch.manual_seed(seed)", f"torch.manual_seed({word})"), (POINTS, POINTS.replace("seed", word))]
        for word in ("0", "min(seed, 1)")
    )
    make(*blind).check(CPU, 1)
    plain, few = (make(*changes, (", nn.Dropout(0.1)", "")) for changes in (blind, half))
    plain.check(CPU)
    few.check_seeds([0, 1])
    for task in (plain, few):
        with pytest.raises(UsageError, match="--seed"):
            task.check(CPU, 1)
    with pytest.raises(UsageError, match="seed"):
        twophase.tune(few.name, seeds=[0], fresh=[1, 2], out=tmp_path / "out")
    with pytest.raises(UsageError, match="seed"):
        twophase.sweep(few.name, {"seed": [0, 1, 2]}, out=tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_numbers_of_an_evaluation(make: Make, tmp_path: Path) -> None:
    """One without a loss is refused before the first step; the columns of the record's own cannot be overwritten."""
    with pytest.raises(UsageError, match=r"^--task .*evaluate\(\)[^\n]*$"):
        make(('{"loss": loss.item(), ', "{")).check(CPU)
    task = make(('{"loss": loss.item(), ', '{"loss": loss.item(), "step": -1.0, "train_loss": -1.0, "steps": -1.0, '))
    summary = run(config_of({"task.name": task.name, "steps": 16}), tmp_path / "run")
    assert summary["steps"] == 16
    (line,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["step"] == 16
    assert line["train_loss"] > 0


def test_a_missing_method(make: Make) -> None:
    """It is named."""
    with pytest.raises(UsageError, match=r"--task .*loss"):
        make(("def loss(", "def unloss("))


def test_the_fingerprint_changes_with_file_options_and_description(make: Make) -> None:
    """And with nothing else: the same file and options have the same; plain facts and a unit are passed on."""
    described = (
        "    def evaluate",
        "    def describe(self):\n        return {'rows': 3, 'loss_unit': 'nats'}\n\n    def evaluate",
    )
    other = described[0], described[1].replace("3", "4")
    tasks = [make(), make(("draw", "drawn")), make(described), make(other)]
    prints = [task.describe()["fingerprint"] for task in tasks]
    assert len({*prints, make(width=9).describe()["fingerprint"]}) == 5
    assert tasks[0].describe() == tasks[0].describe()
    assert {"rows": 3, "loss_unit": "nats"}.items() <= tasks[2].describe().items()
    assert tasks[0].describe()["loss_unit"] == ""


def test_the_fingerprint_changes_with_a_base_class_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base of another file in the same folder counts; what is installed does not."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "rings_base.py").write_text(RINGS.read_text())
    (tmp_path / "rings_child.py").write_text("import rings_base\n\n\nclass Child(rings_base.Rings):\n    pass\n")
    config = config_class(f"{tmp_path}/rings_child.py:Child")()
    before = task_of(config).describe()["fingerprint"]
    (tmp_path / "rings_base.py").write_text(RINGS.read_text() + "\n")
    assert task_of(config).describe()["fingerprint"] != before
    for name in ("rings_base", "rings_child"):
        del sys.modules[name]


def test_optional_methods_are_passed_on(make: Make) -> None:
    """`inner`, `logits` and `check_data` are the task's own, and are not there where it has none."""
    head = "    def evaluate"
    text = "".join(
        f"    def {name}(self, *given):\n        return given\n\n" for name in ("inner", "logits", "check_data")
    )
    task = make((head, text + head))
    for name in ("inner", "logits", "check_data"):
        assert getattr(task, name)(1, 2) == (1, 2)
        assert not hasattr(make(), name)
