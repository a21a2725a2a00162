"""Tasks by name and of one's own: trained, swept, killed, resumed, reported; and what is refused."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import shardmaker
import twophase
from commands import outcome
from forked import Forked, Program
from twophase.base import source
from twophase.base.config import RunError, UsageError, overlaid
from twophase.cli.main import main
from twophase.report.results import Run, Sweep
from twophase.runs.folder import read_lines
from twophase.runs.record import read_record
from twophase.tasks import build, digits, hf, named
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.named import config_class, name_of
from twophase.training import session
from twophase.training.config import inner_lr

RINGS = (Path(__file__).parents[2] / "examples" / "rings.py").read_text(encoding="utf-8")
SHORT = {"steps": 16, "inner_steps": 4, "inner.lr": 1e-2, "checkpoint_every": 1, "outer.method": "nesterov"}

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(autouse=True)
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the file of a task, which no other test has imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rings.py").write_text(RINGS)
    forget()
    yield tmp_path / "rings.py"
    forget()


def forget() -> None:
    """Import the file of a task anew, as another process would."""
    named._module.cache_clear()
    named.config_class.cache_clear()
    build._task_of_options.cache_clear()
    source._digest.cache_clear()
    sys.modules.pop("rings", None)


def rewrite(path: Path, text: str) -> None:
    """Change the file of a task, and import it anew."""
    path.write_text(text)
    forget()


def summary_of(run: Run) -> dict[str, Any]:
    assert run.summary is not None
    return run.summary


def words(values: dict[str, Any]) -> list[str]:
    return [word for path, value in values.items() for word in (f"--{path}", str(value))]


@pytest.mark.slow
def test_killed_and_resumed_byte_for_byte(tmp_path: Path, rings: Path) -> None:
    """A run with dropout that is killed by SIGKILL in its last round ends with the bytes of one that was not."""
    batch = "        return self.points((seed, step, replica), 16)"
    kill = "        if step == 14 and os.path.exists('dies'):\n            os.kill(os.getpid(), 9)\n"
    rewrite(rings, RINGS.replace("import numpy", "import os\nimport numpy").replace(batch, kill + batch))
    command = ["train", "--task", "rings:Rings", *words(SHORT | {"outer.restart": 3}), "--quiet"]
    Path("dies").touch()
    assert Forked(*command, "--out", tmp_path / "killed").wait(60) == -signal.SIGKILL
    Path("dies").unlink()
    assert len(list((tmp_path / "killed" / "checkpoint").glob("*/manifest.json"))) > 0
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert main([*command, "--out", str(tmp_path / "killed")]) == 0
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_buffers_are_averaged(rings: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BatchNorm's statistics are those of all replicas, in runs and sweeps, beside the weights."""
    rings.write_text(RINGS.replace("nn.GELU()", "nn.BatchNorm1d(self.width)"))
    caplog.set_level("WARNING", logger="twophase")
    alone = twophase.train("rings:Rings", SHORT, "run", quiet=True)
    swept = twophase.sweep("rings:Rings", {"outer.lr": [0.7, 1.0]}, SHORT, "sweep", workers=1, quiet=True)
    (row,) = [row for row in swept.record.rows if row.values["outer.lr"] == 0.7]
    assert row.validation_loss == summary_of(alone)["validation_loss"]
    assert caplog.messages == []
    module: Any = importlib.import_module("rings")
    module.Rings().model(0).load_state_dict(load_file(alone.path / "weights.safetensors"))


@pytest.mark.slow
def test_a_sweep_is_its_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that share steps have the bits of runs alone; the task's values are axes; report and verdict work."""
    axes = {"outer.lr": [0.3, 0.7], "outer.restart": ["never", 2], "task.width": [8, 12]}
    results = twophase.sweep("rings.py:Rings", axes, SHORT, "sweep", controls=True, workers=1, quiet=True)
    assert isinstance(results, Sweep)
    plan = json.loads((tmp_path / "sweep" / "plan.json").read_text())
    assert plan["counts"]["steps"] < plan["counts"]["steps_asked"]
    frame = results.frame()
    assert frame["perplexity"].isna().all()
    best = results.best()
    assert best is not None
    assert (best.result, best.measure) == (frame["validation_loss"].min(), "validation loss")
    for _, cell in frame[frame["arm"] == "K=2"].iterrows():
        values = SHORT | {"outer.lr": cell["outer.lr"], "outer.restart": 2, "task.width": int(cell["task.width"])}
        alone = twophase.train("rings.py:Rings", values, tmp_path / cell["run"], quiet=True)
        assert (
            summary_of(alone)["checksum"]
            == json.loads((tmp_path / "sweep" / "runs" / cell["run"] / "summary.json").read_text())["checksum"]
        )
    assert main(["report", "sweep"]) == 0
    assert "validation loss" in capsys.readouterr().out


def test_report_and_diagnosis_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of a task has a page, a diagnosis and the columns of its evaluation; an object and its name are one run."""
    run = twophase.train("rings:Rings", SHORT | {"task.width": 12}, "run", quiet=True)
    assert 0 < summary_of(run)["accuracy"] <= 1
    for command in ("report", "diagnose"):
        assert main([command, "run"]) == 0
    assert "None" not in capsys.readouterr().out
    assert "Tokens" not in Path("run", "report.html").read_text()
    assert read_record(Path("run")).unit == ""
    kind = named.task_class("rings.py:Rings")
    assert (name_of(kind), name_of(digits.Digits)) == ("rings.py:Rings", "digits")
    again = twophase.train(kind(width=12), SHORT, "object", quiet=True)
    assert summary_of(again)["checksum"] == summary_of(run)["checksum"]


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All images and labels are those that scikit-learn gives; without the package of a task there is a remedy."""
    pixels, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    images, targets = digits._images.__wrapped__()
    assert np.array_equal(images, (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8))
    assert np.array_equal(targets, labels)
    monkeypatch.setattr(digits, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="scikit-learn"):
        digits._images.__wrapped__()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="--task hf:tiny needs transformers"):
        hf.HuggingFace("tiny").model(0)


@pytest.mark.slow
def test_shipped_tasks_train(tmp_path: Path) -> None:
    """`digits` and `hf:` learn, from a configuration and from weights, tied ones included; both resume as finished."""
    pytest.importorskip("sklearn")
    transformers = pytest.importorskip("transformers")
    run = twophase.train("digits", SHORT | {"steps": 60}, quiet=True)
    assert summary_of(run)["accuracy"] > 0.5
    tiny = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path / "tiny")
    values = SHORT | {"task.sequence_length": 16, "task.batch_size": 4, "task.validation_windows": 8}
    fresh = twophase.train("hf:tiny", values, quiet=True)
    loaded = twophase.train("hf:tiny", values | {"task.weights": True}, quiet=True)
    for run in (fresh, loaded):
        assert summary_of(run)["perplexity"] < 256
    assert summary_of(fresh)["checksum"] != summary_of(loaded)["checksum"]
    assert all(hf.HuggingFace("tiny", weights=weights).model(0).training for weights in (False, True))  # with dropout
    assert twophase.train("hf:tiny", values, quiet=True).summary == fresh.summary
    torch.manual_seed(2)  # weights of the same sizes under the same name
    transformers.AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path / "tiny")
    forget()
    with pytest.raises(UsageError, match="changed"):
        twophase.train("hf:tiny", values | {"task.weights": True}, quiet=True)
    assert twophase.train("hf:tiny", values, quiet=True).summary == fresh.summary


def test_a_package_of_the_working_directory_is_a_workers_too(rings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's -P, with which workers start, takes the working directory from the path."""
    (rings.parent / "beside").mkdir()
    rings.rename(rings.parent / "beside" / "tasks.py")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(rings.parent))])
    assert named.task_class("beside.tasks:Rings").__name__ == "Rings"
    for module in ("beside", "beside.tasks"):
        sys.modules.pop(module)


def test_a_multimodal_configuration_has_its_language_models_sizes(tmp_path: Path) -> None:
    """Its vocabulary is that of its text part."""
    transformers = pytest.importorskip("transformers", "5.6")  # earlier ones want types of tokens to train
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 256, "num_key_value_heads": 1, "head_dim": 8} | sizes
    vision = {"image_size": 32, "patch_size": 16} | sizes
    transformers.Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path / "gemma")
    task = hf.HuggingFace(str(tmp_path / "gemma"), sequence_length=16, batch_size=2, validation_windows=4)
    model = task.model(0)
    tokens, targets = map(torch.from_numpy, task.batch(0, 0, 0))
    assert math.isfinite(task.loss(model, (tokens, targets)).item())
    assert task.evaluate(model)["perplexity"] > 1


@pytest.mark.parametrize(("kind", "learned"), [("GPT2", True), ("OPT", True), ("Llama", False)])
def test_a_sequence_longer_than_the_learned_positions(tmp_path: Path, kind: str, learned: bool) -> None:
    """It is refused before a run, by the option and the model's number; rotary positions go on."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    more = {"word_embed_proj_dim": 16, "ffn_dim": 24} if kind == "OPT" else {}
    getattr(transformers, f"{kind}Config")(vocab_size=256, **sizes, **more).save_pretrained(tmp_path / "tiny")
    hf.HuggingFace("tiny", sequence_length=16).model(0)
    with pytest.raises(UsageError, match="no configuration of a model there"):
        hf.HuggingFace(str(tmp_path)).model(0)
    with (
        pytest.raises(UsageError, match=r"--task\.sequence-length is 17, .* 16 positions") if learned else nullcontext()
    ):
        hf.HuggingFace("tiny", sequence_length=17).model(0)


def test_token_shards_of_a_model_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that do not last, sizes below 1 and damage are refused by the task's options; `.bin` files train."""
    transformers = pytest.importorskip("transformers")
    tiny = transformers.LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path / "tiny")
    ids = [np.arange(size, dtype=np.uint16) * 7 % 90 for size in (4000, 600)]
    shards = shardmaker.prepared(tmp_path / "shards", ids[:1], ids[1:], 90)
    wide = shardmaker.prepared(tmp_path / "wide", ids[:1], ids[1:], 101)
    bins = tmp_path / "bins"
    bins.mkdir()
    for name, part in zip(("train.bin", "val.bin"), ids, strict=True):
        part.tofile(bins / name)
    sizes = ["--task.sequence-length", "16", "--task.validation-windows", "8"]
    train = ["train", "--task", "hf:tiny", *words(SHORT), "--quiet", "--out", "run"]
    for more, thing in (
        (["--task.corpus", f"tokens:{shards}", *sizes, "--task.batch-size", "64"], "--task.batch-size 64"),
        (["--task.corpus", f"tokens:{shards}", *sizes, "--task.batch-size", "0"], "--task.batch-size is 0"),
        (["--task.corpus", f"tokens:{shards}", "--task.validation-windows", "256"], "--task.validation-windows 9"),
        (["--task.corpus", f"tokens:{wide}", *sizes], "its 101 tokens are more than the 100 of hf:tiny"),
    ):
        assert main([*train, *more]) == 2
        assert thing in capsys.readouterr().err
    few = [*train, *sizes, "--task.batch-size", "2"]
    assert main([*few, "--task.corpus", f"tokens:{bins}"]) == 0
    assert read_record(Path("run")).unit == " nats a token"
    shardmaker.flip(shards / "train-00000.bin")
    capsys.readouterr()
    assert main([*few[:-1], "2", "--task.corpus", f"tokens:{shards}", "--verify", "--out", "damaged"]) == 2
    assert "train-00000.bin" in capsys.readouterr().err
    assert not Path("damaged").exists()


def test_python_refuses_what_the_command_refuses() -> None:
    """A momentum of averaging, which has none; values that are none; an axis that is a value, too."""
    with pytest.raises(UsageError, match=r"--outer\.momentum.*heavy-ball or nesterov"):
        twophase.train("digits", SHORT | {"outer.method": "averaging", "outer.momentum": 0.5}, quiet=True)
    with pytest.raises(UsageError, match="config is a list; give values by dotted path"):
        twophase.train("digits", ["outer.lr"], quiet=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"axes: outer\.lr is in config, too"):
        twophase.sweep("digits", {"outer.lr": [0.3, 0.7]}, SHORT | {"outer.lr": 0.5}, quiet=True)


@pytest.mark.parametrize("method", ["loss", "evaluate"])
def test_a_task_that_does_not_repeat(rings: Path, method: str) -> None:
    """A loss or an evaluation that draws without a seed would be compared as if it were the arm's."""
    text = rings.read_text()
    head = next(line for line in text.splitlines() if f"def {method}(" in line)
    rest = "    " + head.strip().replace(f"def {method}", f"def quiet_{method}")
    drawn = "1 + random.random()"
    body = f"self.quiet_loss(model, batch) * ({drawn})"
    if method == "evaluate":
        body = f"{{name: value * ({drawn}) for name, value in self.quiet_evaluate(model).items()}}"
    rings.write_text("import random\n" + text.replace(head, f"{head}\n        return {body}\n\n{rest}"))
    with pytest.raises(UsageError, match=rf"{method}\(\) of a fresh model was .* the second time"):
        twophase.train("rings:Rings", SHORT, "run", quiet=True)


@pytest.mark.slow
def test_a_whole_configuration_is_taken() -> None:
    """It names its task; options that its method does not look at are no choice; axes and arms have their own."""
    run = twophase.train("rings:Rings", SHORT | {"steps": 8, "outer.method": "adamw"}, "first", quiet=True)
    assert run.config is not None
    again = twophase.train("rings:Rings", {**run.config, "seed": 1}, "second", quiet=True)
    assert again.config == {**run.config, "seed": 1}
    sweep = twophase.sweep("rings:Rings", {"inner.lr": [0.5, 1.0]}, run.config, "sweep", workers=1, quiet=True)
    assert [cell.values["inner.lr"] for cell in sweep.record.rows] == [0.5, 1.0]
    assert twophase.train(config=run.config, out="first", quiet=True).config == run.config
    limits: dict[str, Any] = {"points": 1, "seeds": [0], "fresh": [1, 2]}
    twophase.tune("rings:Rings", ["nesterov"], run.config, "tune", **limits, workers=1, quiet=True)
    options = "--arms nesterov --points 1 --seeds 0 --fresh 1 2 --workers 1 --quiet --out tune".split()
    assert main(["tune", "--config", "first/config.yaml", *options]) == 0  # the same comparison
    with pytest.raises(UsageError, match=r"outer\.method.*--arms"):
        twophase.tune("rings:Rings", ["nesterov"], SHORT | {"outer.method": "adamw"}, "other", **limits)


CALL = """
import twophase
config = {"steps": 4, "inner_steps": 2}
twophase.sweep(Rings(), {"outer.lr": [0.3, 0.7]}, config, "sweep", workers=1, quiet=True)
"""


@pytest.mark.slow
def test_a_program_without_a_guard(rings: Path) -> None:
    """Workers import the file: the message names the guard."""
    Path("program.py").write_text(rings.read_text() + CALL)
    errors = Path("errors")
    assert Program(["program.py"], errors, errors, os.environ).wait(60) != 0
    assert 'below `if __name__ == "__main__":`' in errors.read_text()
    assert "remove that file" not in errors.read_text()


def test_a_class_of_a_program_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no file in which another process could look for it."""
    program = ModuleType("__main__")
    program.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", program)
    exec(RINGS, vars(program))  # noqa: S102 - as Python does it
    with pytest.raises(UsageError, match="define its class at the top of a file"):
        name_of(vars(program)["Rings"])


def test_a_class_of_a_program_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook, or `python -c`, trains a class by its name; a source it has none."""
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    exec(RINGS, vars(program))  # noqa: S102 - as Python does it
    assert twophase.train("__main__:Rings", SHORT, "run", quiet=True).summary


def test_a_module_that_trains_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its dotted name it is refused as a file is; each worker process would begin the run anew."""
    (tmp_path / "pack").mkdir()
    call = 'import twophase\ntwophase.train("pack.rings:Rings", {"steps": 4, "inner_steps": 2}, "run", quiet=True)\n'
    (tmp_path / "pack" / "rings.py").write_text(RINGS + call)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="its file trains when it is imported"):
        twophase.train("pack.rings:Rings", SHORT, "run", quiet=True)
    assert not Path("run").exists()


def test_data_that_may_be_read_again_where_the_task_says_so(rings: Path) -> None:
    """A task of one's own whose data end refuses more steps, and its remedy is no option that is refused."""
    error = 'twophase.base.config.UsageError("4 steps of rows; --repeat reads them again")'
    text = "import twophase.base.config\n" + RINGS.split('"""', 2)[2]
    rings.write_text(text + f"\n    def check_data(self, steps):\n        raise {error}\n")
    with pytest.raises(UsageError, match="--repeat reads them again"):
        twophase.train("rings:Rings", SHORT, "run", quiet=True)
    assert twophase.train("rings:Rings", SHORT | {"repeat": True}, "run", quiet=True).summary


POINTS = "self.points((seed, step, replica), 16)"
MISTAKES = {
    "no evaluate": ("def evaluate", "def judge", "evaluate"),
    "loss of a shape": ("nn.functional.cross_entropy(model(batch[0]), batch[1])", "model(batch[0])", "loss"),
    "loss is NaN": (POINTS, "(np.full((16, 2), np.nan, np.float32), np.zeros(16, int))", "nan"),
    "random batches": (POINTS, "self.points(None, 16)", "batch"),
    "random weights": ("torch.manual_seed(seed)", "torch.seed()", "model"),
    "no loss in the evaluation": ('{"loss": loss.item(), ', "{", "loss"),
    "a loss without a gradient": ("batch[0]), batch[1])", "batch[0]), batch[1]).detach()", "gradient"),
    "a NaN in the evaluation": ('{"loss": loss.item()', '{"loss": np.nan', "nan"),
    "a column of the record's own": ('"accuracy": ', '"restarts": ', "restarts, a column"),
    "a batch of words": (POINTS, f"{POINTS}, np.array(['a'])", "cannot be moved"),
    "weights without a shape": ("nn.Linear(2, self.width)", "nn.LazyLinear(self.width)", "run a batch through"),
    "a type for checkers alone": ("width: int = 8", "width: 'Table' = 8", "TYPE_CHECKING"),
    "no inner optimizer": ("    def evaluate", "    def inner(self, model, config): ...\n\n    def evaluate", "inner"),
    "a field without a default": ("width: int = 8", "width: int", "width"),
    "a field of two types": ("width: int = 8", "width: int = 8\n    sizes: tuple[int, float] = (3, 0.5)", "sizes"),
    "a model that is none": ("return nn.Sequential", "return lambda *_: nn.Sequential", "a function; return a torch"),
    "nothing to train": ("nn.Linear(self.width, 2))", "nn.Linear(self.width, 2)).requires_grad_(False)", "a gradient"),
    "numbers without names": ('return {"loss": loss.item(), ', "return loss, {", "return numbers by name"),
    "a description of tensors": (
        "    def evaluate",
        "    def describe(self):\n        return {'data': torch.zeros(2)}\n\n    def evaluate",
        "describe() holds what is not JSON",
    ),
    "a unit that is no text": (
        "    def evaluate",
        "    def describe(self):\n        return {'loss_unit': {1, 2}}\n\n    def evaluate",
        "describe() has loss_unit {1, 2}",
    ),
    "values that it refuses": (
        "width: int = 8",
        "width: int = 8\n\n    def __post_init__(self):\n        raise ValueError(self.width)",
        "Rings cannot be made (ValueError: 8)",
    ),
    "an error of its own": ("nn.Linear(2, self.width)", "nn.Linear(3, self.width)", "rings.py"),
    "a file that fails": ("import numpy as np", "import numpy_that_is_not_there as np", "numpy_that_is_not_there"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_and_leave_nothing(rings: Path, mistake: str) -> None:
    """A task that cannot be trained is refused with the task's name and the fault, before a folder is made."""
    before, after, named_part = MISTAKES[mistake]
    assert before in RINGS
    rings.write_text(RINGS.replace(before, after))
    with pytest.raises(UsageError, match=r"--task rings:Rings") as refusal:
        twophase.train("rings:Rings", SHORT, "run", quiet=True)
    assert named_part in str(refusal.value)
    assert not Path("run").exists()


UNSAVED = """
class Odd(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["helper"] = object()
"""


def test_a_model_that_does_not_fit(rings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No mistake of the class: the message is that of a full memory."""
    rings.write_text(RINGS.replace("torch.manual_seed(seed)", "raise MemoryError"))
    assert main(["train", "--task", "rings:Rings", "--out", "run"]) == 1
    assert "the memory is full" in capsys.readouterr().err


def test_a_plain_class_whose_model_reads_a_value(rings: Path) -> None:
    """It has no options, and its model cannot be built without memory for its weights: it trains as another."""
    seeds = "        torch.manual_seed(seed)\n"
    text = RINGS.replace("@dataclass(frozen=True)\n", "").replace(seeds, f"{seeds}        torch.rand(1).item()\n")
    assert "torch.rand" in text
    assert "@dataclass" not in text
    rings.write_text(text)
    run = twophase.train("rings:Rings", SHORT, "run", quiet=True)
    assert summary_of(run)["exit_reason"] == "finished"
    assert [path for path in run.config or {} if path.startswith("task.")] == ["task.name"]


def test_an_optimizer_that_no_checkpoint_can_hold(rings: Path) -> None:
    """Said after the first step, and not at the first checkpoint, when what was trained would be lost."""
    inner = "    def inner(self, model, config):\n        return Odd(model.parameters(), config.lr)\n\n    def evaluate"
    head, dataclass_line, rest = RINGS.partition("@dataclass")
    rings.write_text(head + UNSAVED.lstrip() + "\n\n" + dataclass_line + rest.replace("    def evaluate", inner, 1))
    with pytest.raises(UsageError, match=r"cannot be saved: a checkpoint cannot hold .*helper, of type object"):
        twophase.train("rings:Rings", SHORT | {"checkpoint_every": 5}, "run", quiet=True)
    assert not read_lines(Path("run/rounds.jsonl"))


def test_training_in_a_thread(tmp_path: Path) -> None:
    """Where Python takes no signals, all else is as ever; and torch's threads are as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(twophase.train, "rings:Rings", SHORT, tmp_path / "run", quiet=True).result()
        twophase.train("rings:Rings", SHORT | {"seed": 1}, tmp_path / "another", quiet=True)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert summary_of(run)["exit_reason"] == "finished"


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_of_either_kind_acts(numbers: tuple[signal.Signals, signal.Signals]) -> None:
    """The first asks for a good end; then both are as they were in a program that asks for nothing."""
    before = [signal.getsignal(number) for number in numbers]
    with session.signals() as stop:
        os.kill(os.getpid(), numbers[0])
        assert stop.wait(1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_task_of_several_files(tmp_path: Path, rings: Path) -> None:
    """A task imports what lies beside its file, wherever it is started, in a sweep too; a base class is part of it."""
    (tmp_path / "own").mkdir()
    base = rings.rename(tmp_path / "own" / "base_of_rings.py")
    (tmp_path / "own" / "rings.py").write_text("from base_of_rings import Rings as Base\nclass Rings(Base): pass\n")
    before = twophase.train("own/rings.py:Rings", SHORT, "run", quiet=True)
    assert len(twophase.sweep("own/rings.py:Rings", {"outer.lr": [0.3]}, SHORT, "sweep", quiet=True).runs) == 1
    rewrite(base, RINGS.replace("nn.GELU()", "nn.ReLU()"))
    sys.modules.pop("base_of_rings")
    with pytest.raises(UsageError, match="changed"):
        twophase.train("own/rings.py:Rings", SHORT, before.path, quiet=True)
    sys.modules.pop("base_of_rings")
    sys.path.remove(str(tmp_path / "own"))


def test_python_values() -> None:
    """A policy is a value of a configuration; a class, no task, and an axis without a list of values are refused."""
    kind: Any = named.task_class("rings:Rings")
    run = twophase.train(kind(), SHORT | {"outer": {"restart": twophase.Periodic(2)}}, quiet=True)
    assert summary_of(run)["restarts"] == 2
    for task in (kind, None):
        with pytest.raises(UsageError):
            twophase.train(task, SHORT, quiet=True)
    with pytest.raises(UsageError, match="the task is digits, and config is one of lm; leave the task out"):
        twophase.train("digits", TrainConfig(), quiet=True)
    for task, config in (("lm", TrainConfig(seed=-1)), ("digits", config_class("digits")(seed=-1))):
        with pytest.raises(UsageError, match="--seed is -1"):
            twophase.train(task, config, quiet=True)
    plain = type("Plain", (), {"__init__": lambda self: vars(self).update(width=3), "__module__": kind.__module__})
    with pytest.raises(UsageError, match=r"Plain holds values .* make it a dataclass"):
        twophase.train(plain(), SHORT, quiet=True)
    wrong: Any
    for wrong in ("never", 3):
        with pytest.raises(UsageError, match="axes"):
            twophase.sweep(kind(), {"outer.restart": wrong}, SHORT, "sweep", quiet=True)


@pytest.mark.parametrize("method", ["muon", "schedule-free"])
def test_an_inner_optimizer_that_cannot_be_made(rings: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Muon without a hidden matrix, or a package that is missing, leaves no folder; an axis of a sweep neither."""
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    layers = "nn.Linear(2, self.width), nn.GELU(), nn.Dropout(0.1), nn.Linear(self.width, 2)"
    assert layers in RINGS
    rings.write_text(RINGS.replace(layers, "nn.Linear(2, 2)"))
    shared = SHORT | {"inner.schedule": "constant"}
    with pytest.raises(UsageError, match=r"--inner\.method"):
        twophase.train("rings:Rings", shared | {"inner.method": method}, "run", quiet=True)
    with pytest.raises(UsageError, match=r"--inner\.method"):
        twophase.sweep("rings:Rings", {"inner.method": ["adamw", method]}, shared, "run", workers=1, quiet=True)
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["digit", "rings:Ring", "nothere.py:Rings", "no_such_module:Rings", "hf:", "rings:"])
def test_unknown_task_names_are_refused(name: str) -> None:
    """A name without a class is refused, and so is another task's name on an axis."""
    with pytest.raises(UsageError, match="--task"):
        config_class(name)
    for other in (name, "digits"):
        with pytest.raises(UsageError, match="--task"):
            twophase.sweep("rings:Rings", {"task.name": ["rings:Rings", other]}, SHORT, quiet=True)


@pytest.mark.slow
def test_a_changed_file_does_not_go_on(rings: Path) -> None:
    """Where the task's file has changed, no run or sweep goes on; a damaged `env.json` has a remedy."""
    checksum = summary_of(twophase.train("rings:Rings", SHORT, "finished", quiet=True))["checksum"]
    axes = {"outer.lr": [0.3, 0.7]}
    twophase.sweep("rings:Rings", axes, SHORT, "sweep", workers=1, quiet=True)
    (Path("finished") / "summary.json").rename("summary.json")
    rewrite(rings, RINGS.replace("GELU", "Sigmoid"))
    with pytest.raises(UsageError, match="rings:Rings"):
        twophase.train("rings:Rings", SHORT, "finished", quiet=True)
    Path("summary.json").rename(Path("finished") / "summary.json")
    with pytest.raises(UsageError, match="rings:Rings"):
        twophase.train("rings:Rings", SHORT, "finished", quiet=True)
    with pytest.raises(UsageError, match="sweep"):
        twophase.sweep("rings:Rings", axes, SHORT, "sweep", workers=1, quiet=True)
    rewrite(rings, RINGS)
    twophase.train("rings:Rings", SHORT, "finished", quiet=True)
    for damaged in ("", "{", "{}", '{"corpus": 3}', None):
        Path("finished", "env.json").unlink(missing_ok=True)
        if damaged is not None:
            Path("finished", "env.json").write_text(damaged)
        with pytest.raises(RunError, match=r"env\.json, .* delete summary\.json and repeat"):
            twophase.train("rings:Rings", SHORT, "finished", quiet=True)
        Path("finished", "summary.json").unlink()
        for _ in range(2):
            assert summary_of(twophase.train("rings:Rings", SHORT, "finished", quiet=True))["checksum"] == checksum


def test_a_first_attempt_that_left_nothing(rings: Path) -> None:
    """A task that is corrected before the first checkpoint is the run's; one that a checkpoint refuses is not."""
    batch = "    def batch(self, seed, step, replica):\n"
    assert batch in RINGS
    rings.write_text(RINGS.replace(batch, f"{batch}        if step == 3:\n            raise ValueError\n"))
    with pytest.raises(UsageError, match=r"batch\(\) failed at rings\.py"):
        twophase.train("rings:Rings", SHORT, "run", quiet=True)
    assert Path("run", "env.json").is_file()
    rewrite(rings, RINGS)
    first, second = (summary_of(twophase.train("rings:Rings", SHORT, "run", quiet=True)) for _ in range(2))
    assert first == second
    Path("run", "summary.json").unlink()
    Path("run", "env.json").write_text("{")
    rewrite(rings, RINGS.replace("GELU", "Sigmoid"))
    with pytest.raises(UsageError, match="is not the one that this run began with"):
        twophase.train("rings:Rings", SHORT, "run", quiet=True)
    rewrite(rings, RINGS)
    for _ in range(2):
        assert summary_of(twophase.train("rings:Rings", SHORT, "run", quiet=True))["checksum"] == first["checksum"]


def test_a_stop_that_reached_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that got no signal itself ends with the status of one, and not with 128."""

    @contextmanager
    def signals() -> Iterator[session.Stop]:
        stop = session.Stop()
        stop.set()
        yield stop

    monkeypatch.setattr(session, "signals", signals)
    assert main(["train", "--task", "rings:Rings", *words(SHORT), "--out", "run", "--quiet"]) == 130
    with pytest.raises(RunError, match=r"again: the run was stopped at step \d+; the same call resumes it"):
        twophase.train("rings:Rings", SHORT, "again", quiet=True)


def test_a_loop_by_hand_has_the_same_rounds(tmp_path: Path) -> None:
    """The same training in a loop of one's own, with `record`, writes the rounds of `twophase train`, times aside."""
    values = SHORT | {"steps": 22, "outer.restart": 2}
    twophase.train("rings:Rings", values, "trained", quiet=True)
    config = overlaid(config_class("rings:Rings")(), values, "test")
    task = build.task_of(config)
    modules = [task.model(0) for _ in range(2)]
    inner = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, fused=True) for m in modules]
    engine = twophase.DiLoCo(modules, config.outer.known_rule(), restart=2, inner_steps=4)
    with twophase.record(engine, "recorded", {"steps": 22, "seed": 0}, inner=inner[0]):
        for step in range(22):
            for number, (module, optimizer) in enumerate(zip(modules, inner, strict=True)):
                points, label = task.batch(0, step, number)
                task.loss(module, (torch.from_numpy(points), torch.from_numpy(label))).backward()
                optimizer.param_groups[0]["lr"] = inner_lr(config, step)
                optimizer.step()
                optimizer.zero_grad()
            engine.step()
        engine.finish()
    trained, recorded = (read_lines(tmp_path / name / "rounds.jsonl") for name in ("trained", "recorded"))
    apart = {"seconds", "signals"}
    assert [{key: line[key] for key in line.keys() - apart} for line in recorded] == [
        {key: line[key] for key in line.keys() - apart} for line in trained
    ]
    assert len(recorded) == 6
    assert main(["report", "recorded"]) == 0
