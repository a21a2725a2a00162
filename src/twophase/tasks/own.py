"""A task that is not the built-in language model, checked where it enters: its methods, shapes and determinism."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from twophase.base.config import RunError, UsageError, to_tree
from twophase.base.errors import first_line, is_out_of_memory
from twophase.base.source import source_digest
from twophase.training.config import InnerConfig
from twophase.training.device import moved
from twophase.training.trainer import RESERVED

_METHODS = ("model", "batch", "loss", "evaluate")


class OwnTask:
    """A task of any class, as the training loop takes it: its results are checked, its errors name it.

    Args:
        task: an object with the methods of `twophase.training.task.Task`; it may lack `describe`.
        options: the values that made it, and its `name`: a dataclass.

    Raises:
        UsageError: a method is missing.
    """

    def __init__(self, task: Any, options: Any) -> None:
        name = options.name
        if missing := [method for method in _METHODS if not callable(getattr(task, method, None))]:
            raise UsageError(
                f"--task {name}: {type(task).__name__} has no method {', '.join(missing)}; a task has "
                f"{', '.join(_METHODS)}"
            )
        self.task, self.name, self.options = task, name, options
        if hasattr(task, "inner"):
            self.inner = self._inner
        for method in ("check_data", "verify_data", "data_fault"):
            if hasattr(task, method):
                setattr(self, method, partial(self._call, method))
        if hasattr(task, "logits"):
            self.logits = self._logits

    def model(self, seed: int) -> nn.Module:
        """Return a model with fresh weights; what torch draws for them is seeded here."""
        _seed(seed)
        model = self._call("model", seed)
        if not isinstance(model, nn.Module):
            raise self._refusal(f"model() returned a {type(model).__name__}; return a torch.nn.Module")
        return model

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Return the batch of a replica's inner step.

        Random numbers that the step draws from torch, such as dropout, are seeded by the same three numbers. So resumed
        runs, and runs that share steps, draw the same.
        """
        batch = self._call("batch", seed, step, replica)
        digest = hashlib.blake2b(f"{seed} {step} {replica}".encode(), digest_size=7).digest()
        _seed(int.from_bytes(digest, "big"))
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss, a scalar."""
        loss = self._call("loss", model, batch)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shape = f" of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else ""
            raise self._refusal(
                f"loss() returned a {type(loss).__name__}{shape}; return a scalar tensor: the mean over the batch"
            )
        return loss

    def _logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits that the loss is the mean cross-entropy of, the classes along the last dimension."""
        logits = self._call("logits", model, batch)
        if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[-1] < 2 or not logits.is_floating_point():
            shape = f" of shape {tuple(logits.shape)}, {logits.dtype}" if isinstance(logits, Tensor) else ""
            raise self._refusal(
                f"logits() returned a {type(logits).__name__}{shape}; return floats of shape (examples, …, classes), "
                "two classes or more, or leave the method out"
            )
        return logits

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return held-out numbers, of a model in evaluation mode, which is in the mode of before at the end."""
        mode = model.training
        try:
            numbers = self._call("evaluate", model.eval())
        finally:
            model.train(mode)
        try:
            numbers = {str(name): float(value) for name, value in numbers.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise self._refusal(f"evaluate() returned {numbers!r:.80}; return numbers by name") from None
        if "loss" not in numbers:
            raise self._refusal(f"evaluate() returned {', '.join(numbers) or 'nothing'}; `loss` must be among them")
        if taken := sorted(RESERVED & set(numbers)):
            raise self._refusal(f"evaluate() returned {', '.join(taken)}, a column of the run's own; name it otherwise")
        return numbers

    def describe(self) -> dict[str, Any]:
        """Return what identifies model and data; `fingerprint` changes with it, and with the code of the class."""
        identity = self._call("describe") if hasattr(self.task, "describe") else {}
        try:
            description = dict(identity)
            unit = description.pop("loss_unit", "")  # for pages alone
            text = json.dumps(description, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise self._refusal(f"describe() holds what is not JSON ({error}); return plain values by name") from None
        if not isinstance(unit, str):
            raise self._refusal(f"describe() has loss_unit {unit!r:.80}; give a text, such as 'nats a token'")
        values = json.dumps([text, to_tree(self.options), self.source()], sort_keys=True)
        digest = description.pop("fingerprint", None)
        text = values if digest is None else f"{values}{digest}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"task": self.name, **description, "loss_unit": unit, "fingerprint": digest}

    def source(self) -> str:
        """Return digits of the file of the task's class and of its bases beside it.

        Of a class that is shipped or has no file, return the name.
        """
        if type(self.task).__module__.startswith("twophase."):
            return type(self.task).__qualname__
        try:
            place = Path(inspect.getfile(type(self.task)))
        except (OSError, TypeError):  # of a notebook, or of `python -c`
            return type(self.task).__qualname__
        bases = [sys.modules[kind.__module__] for kind in type(self.task).__mro__]
        files = {Path(file) for module in bases if (file := getattr(module, "__file__", None))}
        return source_digest({place, *(file for file in files if file.absolute().parent == place.absolute().parent)})

    def check(self, device: torch.device) -> None:
        """Try the task: twice the same model, batch, loss and evaluation, the last two finite.

        Raises:
            UsageError: naming what is missing, not deterministic, or not a finite scalar.
        """
        model, again = self.model(0), self.model(0)
        if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
            raise self._refusal(
                "model(0) has parameters without a shape, as of nn.LazyLinear; run a batch through the model in model()"
            )
        state, repeated = model.state_dict(), again.state_dict()
        if list(state) != list(repeated) or not all(_alike(state[name], repeated[name]) for name in state):
            raise self._refusal("model(0) returned other weights the second time; seed everything that it draws")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise self._refusal("model(0) has no parameter that requires a gradient")
        batch, repeated_batch = (self._moved(self.batch(0, 0, 0), device) for _ in range(2))
        if not _alike(batch, repeated_batch):
            raise self._refusal(
                "batch(0, 0, 0) returned another batch the second time; draw it from (seed, step, replica) alone, as "
                "by numpy.random.default_rng((seed, step, replica))"
            )
        self.describe()
        loss, again = (self.loss(model.to(device), self._moved(self.batch(0, 0, 0), device)) for _ in range(2))
        if not loss.requires_grad:
            raise self._refusal("loss() returned a tensor without a gradient; compute it from the model's output")
        if not math.isfinite(value := loss.item()):
            raise self._refusal(f"the loss of a fresh model is {value}; correct loss(), or the first batch")
        self._check_repeated("loss() of a fresh model", value, again.item())
        value = self.evaluate(model)["loss"]  # now, and not after hours of training
        if not math.isfinite(value):
            raise self._refusal(f"evaluate() of a fresh model returned the loss {value}; correct it, or its data")
        self._check_repeated("evaluate() of a fresh model", value, self.evaluate(model)["loss"])

    def _check_repeated(self, quantity: str, value: float, again: float) -> None:
        # Sums of many threads need not have the same last bits.
        if not math.isclose(value, again, rel_tol=1e-4):
            raise self._refusal(
                f"{quantity} was {value:.6g}, and {again:.6g} the second time; draw all random numbers from its "
                "arguments, or with a generator that it seeds again"
            )

    def _inner(self, model: nn.Module, config: InnerConfig) -> Optimizer:
        made = self._call("inner", model, config)
        if not isinstance(made, Optimizer):
            raise self._refusal(
                f"inner() returned a {type(made).__name__}; return a torch.optim.Optimizer of the model's parameters, "
                "or leave the method out for the one that --inner.method names"
            )
        return made

    def _moved(self, batch: Any, device: torch.device) -> Any:
        try:
            return moved(batch, device)
        except (AttributeError, TypeError, ValueError) as error:
            raise self._refusal(
                f"batch() returned what cannot be moved to a device ({error}); return tensors, NumPy arrays, or "
                "tuples, lists and dictionaries of them"
            ) from None

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call one of the task's methods; an error in it becomes a message that names it."""
        try:
            return getattr(self.task, method)(*arguments, **options)
        except (UsageError, RunError):
            raise
        except Exception as error:  # of the task's own code
            if is_out_of_memory(error):
                raise
            frames, file = inspect.trace(), inspect.getsourcefile(type(self.task))
            origin = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
            raise self._refusal(
                f"{method}() failed at {Path(origin.filename).name}:{origin.lineno} ({type(error).__name__}: "
                f"{first_line(error)})"
            ) from error

    def _refusal(self, fault: str) -> UsageError:
        return UsageError(f"--task {self.name}: {fault}")


def _seed(seed: int) -> None:
    """Seed torch's generators, on an accelerator too.

    Without one `torch.manual_seed` takes 0.8 ms, up to a fifth of a small task's inner step. It records calls for
    absent devices, three times with a traceback.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _alike(first: Any, second: Any) -> bool:
    """Tell whether two trees of tensors and arrays are the same bits."""
    if hasattr(first, "dtype"):
        tensor, other = torch.as_tensor(first), torch.as_tensor(second)
        return tensor.dtype == other.dtype and torch.equal(tensor.nan_to_num(), other.nan_to_num())
    if isinstance(first, Mapping):
        same_keys = isinstance(second, Mapping) and list(first) == list(second)
        return same_keys and all(_alike(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return isinstance(second, type(first)) and len(first) == len(second) and all(map(_alike, first, second))
    return first == second
