"""A replica of the model with its inner optimizer, and the inner optimizers by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.errors import UsageError
from twophase.runs.config import InnerConfig, RunConfig
from twophase.training.distributed import to_device
from twophase.training.task import Step, Task


class Replica:
    """A model with its own inner optimizer, which persists over rounds, and its own part of the data.

    The optimizer is the task's, if it has `inner(model, config)`, else the one that `config.inner.method` names. An
    optimizer with `train()` and `eval()`, such as schedule-free AdamW, is in train mode only inside an inner step. The
    engine, evaluations and checkpoints see its average.
    """

    def __init__(self, config: RunConfig, number: int, task: Task, compute: Step) -> None:
        self.config, self.number, self.task, self.compute = config, number, task, compute
        self.model = task.model(config.seed).to(compute.device)
        make_inner = getattr(task, "inner", None) or inner_optimizer
        self.inner: Any = make_inner(self.model, config.inner)
        self.shares = [float(group["lr"]) / config.inner.lr for group in self.inner.param_groups]
        """Learning rate of each param group, in `inner.lr`s: the schedule keeps their ratios."""
        self.round_losses: list[float] = []
        """Training loss of each inner step since the last report."""

    def step(self, step: int, lr: float) -> Tensor:
        """Take one inner step; return the training loss, a scalar that is still on the device.

        Nothing here waits for the device, so its next work is always queued.
        """
        batch = to_device(self.task.batch(self.config.seed, step, self.number), self.compute.device)
        if hasattr(self.inner, "train"):
            self.inner.train()
        loss = self.compute.gradients(self.model, batch)
        if self.config.inner.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.inner.clip_norm)
        for group, share in zip(self.inner.param_groups, self.shares, strict=True):
            group["lr"] = lr * share
        self.inner.step()
        if hasattr(self.inner, "eval"):
            self.inner.eval()
        self.inner.zero_grad()
        return loss


class MuonAdamW(Optimizer):
    """Muon for `hidden_matrices` and AdamW for all other parameters, as one optimizer with two param groups.

    Muon's steps get the size of AdamW's by a factor 0.2 sqrt(larger dimension), so both use one learning rate and one
    weight decay. With this inner optimizer, DiLoCo is MuLoCo.

    Source: Jordan et al., "Muon" (2024); Liu et al., "Muon is scalable for LLM training" (2025), on the size of the
    steps; Thérien et al., "MuLoCo" (2025).
    """

    def __init__(self, model: nn.Module, config: InnerConfig) -> None:
        matrices = hidden_matrices(model)
        lr, decay, chosen = config.lr, config.weight_decay, set(map(id, matrices))
        muon = torch.optim.Muon(matrices, lr, decay, config.momentum, adjust_lr_fn="match_rms_adamw")
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        adamw = torch.optim.AdamW(others, lr, config.betas, weight_decay=decay, fused=True)
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step of Muon and of AdamW."""
        loss = None if closure is None else closure()
        # Set again at each step: loading a state replaces the groups and the memory.
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weight matrices between a model's embedding and its output head, in the order of the parameters.

    These are the parameters of two dimensions, without

    * those of an `nn.Embedding`, or with `embed` in their names;
    * the output head: matrices with a part of their names that is, or ends with `_` and, `head`, `classifier` or
      `score`. Without such a name the last matrix is the head, unless there are embeddings, all with another number of
      rows. The head may then be tied.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: dict[str, nn.Parameter] = {}
    rows: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and (id(parameter) in tables or "embed" in name):
            rows.add(parameter.shape[0])
        elif parameter.ndim == 2:
            matrices[name] = parameter
    hidden = [
        parameter
        for name, parameter in matrices.items()
        if not re.search(r"(^|[._])(head|classifier|score)(\.|$)", name)
    ]
    if len(hidden) == len(matrices) and hidden and (not rows or hidden[-1].shape[0] in rows):
        hidden.pop()
    return hidden


def inner_optimizer(model: nn.Module, config: InnerConfig) -> Optimizer:
    """Return the optimizer that `config.method` names, over all parameters of a model."""
    parameters, lr, decay = list(model.parameters()), config.lr, config.weight_decay
    match config.method:
        case "muon":
            if not hidden_matrices(model):
                raise UsageError("--inner.method: must be another than muon, for the model has no hidden weight matrix")
            return MuonAdamW(model, config)
        case "sgd":
            return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(parameters, lr, config.betas, weight_decay=decay, fused=True)
    if find_spec("schedulefree") is None:
        raise UsageError("--inner.method schedule-free: needs a package; pip install 'twophase[schedulefree]'")
    from twophase.training.schedule_free import ScheduleFreeAdamW  # noqa: PLC0415 - an optional package

    return ScheduleFreeAdamW(parameters, lr, betas=config.betas, weight_decay=decay)
