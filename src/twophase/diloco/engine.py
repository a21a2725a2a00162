"""`DiLoCo`: many inner steps alone, then one outer step together.

One round, with anchor a (the last agreed parameters) and R replicas theta_r over all processes:

    theta_r <- inner optimizer, `inner_steps` times           (the caller's loop)
    g = (1/R) sum_r (a - theta_r)                             one reduction of one flat buffer
    a <- outer optimizer (a, g)                               momentum, restarts
    theta_r <- a                                              the inner optimizer keeps its state

(16-bit replicas hold a rounded to their type, and their progress counts from there.)

Source: DiLoCo (arXiv 2311.08105), algorithm 1; the restart paper, section 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.comm import Communicator, default_communicator
from twophase.diloco.flat import Layout, checksum, plan
from twophase.optim.outer import GroupRound, OuterSGD
from twophase.restart import Never, RestartPolicy, check_count
from twophase.rule import OuterRule

OuterFactory = Callable[[list[tuple[str, Tensor]]], Optimizer]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What happened in a round. The same on every process, except `bytes_sent` and `seconds`.

    Args:
        round: number of the round, from 1.
        inner_steps: inner steps that each replica took in it.
        partial: whether the round was ended early, by `finish()`.
        replicas: replicas that took part.
        restarted: whether the momentum of any param group restarted.
        groups: each param group's norms, cosine, gain and restart; empty for an outer optimizer other than `OuterSGD`.
        pseudo_gradient_norm: Euclidean norm of g over all parameters.
        bytes_sent: payload that this process handed to the reduction; 0 in a single process.
        seconds: wall time of the phases `pseudo_gradient`, `reduce`, `outer`, `restore`, `checksum`. On an
            accelerator the first four only launch work, which is waited for where a number is read.
        checksum: digits that depend on every bit of the new anchor.
    """

    round: int
    inner_steps: int
    partial: bool
    replicas: int
    restarted: bool
    groups: tuple[GroupRound, ...]
    pseudo_gradient_norm: float
    bytes_sent: int
    seconds: Mapping[str, float]
    checksum: str

    @property
    def buffer_norm(self) -> float:
        """Euclidean norm of the momentum buffer before g was mixed in, over all groups."""
        return sum(group.buffer_norm**2 for group in self.groups) ** 0.5

    @property
    def cosine(self) -> float:
        """Cosine of the angle between g and that buffer, over all groups; 0 when either vanishes."""
        scale = self.pseudo_gradient_norm * self.buffer_norm
        inner = sum(group.cosine * group.pseudo_gradient_norm * group.buffer_norm for group in self.groups)
        return inner / scale if scale != 0 else 0.0

    @property
    def gain(self) -> float:
        """Effective outer gain <update, g> / <g, g> over all groups; 1 would be plain averaging."""
        square = sum(group.pseudo_gradient_norm**2 for group in self.groups)
        along = sum(group.gain * group.pseudo_gradient_norm**2 for group in self.groups if group.pseudo_gradient_norm)
        return along / square if square != 0 else float("nan")


class DiLoCo:
    """The engine: call `step()` once after every inner optimizer step.

        engine = DiLoCo(model, OuterRule(0.7, 0.9, nesterov=True), restart=Periodic(3), inner_steps=500)
        for batch in batches:
            ...                                  # forward, backward, inner.step(), inner.zero_grad()
            report = engine.step()               # a RoundReport when a round ends, else None
        engine.finish()                          # the last, shorter round

    The same object serves one replica in each process of a `torch.distributed` group, several replicas in one process
    (then `step()` follows the inner steps of all of them), and several in each of several processes. All replicas
    start from process 0's first replica. Parameters that require a gradient take part; frozen parameters and module
    buffers (batch-norm statistics) stay as they are.

    The anchor and the pseudo-gradient are two flat buffers, allocated once, in float32 (float64 for float64 models)
    whatever the parameters' dtype; `anchor` maps names to views of it.

    Args:
        replicas: the module, or a list of modules of the same parameters, that train in this process.
        outer: an `OuterRule`, or a function from the named anchor parameters to any torch optimizer over them (param
            groups give blocks their own rule and restart period).
        inner_steps: inner steps a round, >= 1 (S; H in DiLoCo papers).
        restart: when the outer momentum restarts; only with an `OuterRule`.
        communicator: None means the default torch.distributed group where one is initialised.

    Raises:
        ValueError: no trainable parameters, replicas that differ (in this process or between processes), parameters
            spread over devices or sharded, or an argument outside its range.
    """

    def __init__(
        self,
        replicas: nn.Module | Sequence[nn.Module],
        outer: OuterRule | OuterFactory,
        *,
        inner_steps: int,
        restart: RestartPolicy | str | int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.inner_steps = check_count("DiLoCo", "inner_steps", inner_steps)
        self.communicator = communicator or default_communicator()
        self.replicas: list[nn.Module] = [replicas] if isinstance(replicas, nn.Module) else list(replicas)
        self._slots, self.layout = _collect(self.replicas)
        self.replica_count = self._agree()
        first = self._params()[0]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in first) else torch.float32
        self._anchor = torch.zeros(self.layout.numel, dtype=dtype, device=first[0].device)
        self._pseudo_gradient = torch.zeros_like(self._anchor)
        self._anchor_views = self.layout.views(self._anchor)
        with torch.no_grad():
            torch._foreach_copy_(self._anchor_views, first)
            self.communicator.broadcast(self._anchor)
            self._restore()
        self._gradient_views = self.layout.views(self._pseudo_gradient)
        self.anchor: dict[str, Tensor] = dict(zip(self._names, self._anchor_views, strict=True))
        self.outer = self._build_outer(outer, restart)
        settings = {"outer settings": [_settings(group) for group in self.outer.param_groups]}
        self._compare(settings, self.communicator.gather(settings))
        self.round = 0
        self.inner_step = 0

    def step(self, signals: Mapping[str, float] | None = None) -> RoundReport | None:
        """Count one inner step of every replica; end the round when it is the last one.

        Args:
            signals: values for restart policies that need them, the same on every process (see `OuterSGD.step`).

        Returns:
            The report of the round that has just ended, or None inside a round.
        """
        self.inner_step += 1
        return self._synchronize(signals) if self.inner_step >= self.inner_steps else None

    def finish(self, signals: Mapping[str, float] | None = None) -> RoundReport | None:
        """End the run: synchronise the inner steps of an unfinished round; None when there are none."""
        return self._synchronize(signals) if self.inner_step > 0 else None

    @torch.no_grad()
    def _synchronize(self, signals: Mapping[str, float] | None) -> RoundReport:
        seconds: dict[str, float] = {}
        with _phase("pseudo_gradient", seconds):
            self._write_pseudo_gradient()
        with _phase("reduce", seconds):
            pending = self.communicator.launch_sum(self._pseudo_gradient)
            pending.wait()
            if self.replica_count > 1:
                self._pseudo_gradient.div_(self.replica_count)
        with _phase("outer", seconds):
            norm, groups = self._outer_step(signals)
        with _phase("restore", seconds):
            self._restore()
        with _phase("checksum", seconds):
            digits = self.checksum()
        self.round += 1
        steps, self.inner_step = self.inner_step, 0
        return RoundReport(
            round=self.round,
            inner_steps=steps,
            partial=steps < self.inner_steps,
            replicas=self.replica_count,
            restarted=any(group.restarted for group in groups),
            groups=groups,
            pseudo_gradient_norm=norm,
            bytes_sent=pending.bytes_sent,
            seconds=seconds,
            checksum=digits,
        )

    def checksum(self) -> str:
        """Sixteen hexadecimal digits that depend on every bit of the anchor; equal on all processes after a round."""
        return checksum(self._anchor)

    def _write_pseudo_gradient(self) -> None:
        """Write g <- sum over this process's replicas of (a - theta_r).

        Differences are summed, not parameters: a sum of parameters would round away the low bits of a small
        difference, and the order (difference first, then sum) is the one that a reduction over processes has, which
        keeps two replicas in one process equal, bit for bit, to two processes.

        A 16-bit replica began its round at the anchor rounded to its type, so its progress is counted from there: from
        the anchor itself, a replica that stands still would push the rounding error into the momentum every round.
        """
        for number, params in enumerate(self._params()):
            for anchor, gradient, theta in zip(self._anchor_views, self._gradient_views, params, strict=True):
                start = anchor if theta.dtype == anchor.dtype else anchor.to(theta.dtype).to(anchor.dtype)
                theta = theta.to(anchor.device)  # noqa: PLW2901 - a replica may live on another device
                if number == 0:
                    torch.sub(start, theta, out=gradient)
                    anchor.grad = gradient  # anew in every round: a user's zero_grad() may have taken it away
                else:
                    gradient.add_(torch.sub(start, theta))

    def _outer_step(self, signals: Mapping[str, float] | None) -> tuple[float, tuple[GroupRound, ...]]:
        """The norm of g, and each param group's round."""
        if isinstance(self.outer, OuterSGD):
            self.outer.step(signals=signals, measure=True)
            groups = tuple(self.outer.last_round)
            return sum(group.pseudo_gradient_norm**2 for group in groups) ** 0.5, groups
        norm = float(torch.linalg.vector_norm(self._pseudo_gradient))  # before the step: some optimizers overwrite g
        self.outer.step()
        return norm, ()

    def _restore(self) -> None:
        """theta_r <- a."""
        for params in self._params():
            torch._foreach_copy_(params, self._anchor_views)

    def _params(self) -> list[list[Tensor]]:
        """The parameters of each replica as they are now, checked to be those that the engine was built for."""
        return [[slot.tensor() for slot in slots] for slots in self._slots]

    def state_dict(self) -> dict[str, Any]:
        """Anchor, outer optimizer and position in the round: with the models and inner optimizers, the whole run.

        It holds tensors, numbers and text only, so `torch.load(weights_only=True)` reads it. The tensors are the live
        ones; save them before the next step, or clone them.
        """
        return {
            "anchor": self._anchor,
            "layout": self.layout.describe(),
            "outer": self.outer.state_dict(),
            "round": self.round,
            "inner_step": self.inner_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Construct the engine first, then load it, the models and the inner optimizers.

        As for every torch optimizer, the saved settings (lr, momentum, restart policy) win over the constructor's. A
        state of a round's end also sets the replicas to the anchor, as they were.

        Raises:
            ValueError: no engine's state, the state of another model, or a position beyond this engine's rounds;
                nothing has been changed.
        """
        missing = {"anchor", "layout", "outer", "round", "inner_step"} - set(state)
        if missing:
            raise ValueError(
                f"DiLoCo.load_state_dict: the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
            )
        if state["layout"] != self.layout.describe():
            raise ValueError(
                "DiLoCo.load_state_dict: the state belongs to a model of other parameters; build the model of the "
                "checkpoint, or start a new run"
            )
        if state["anchor"].shape != self._anchor.shape:
            raise ValueError(
                f"DiLoCo.load_state_dict: the anchor has {state['anchor'].numel()} elements instead of "
                f"{self._anchor.numel()}; the state is damaged"
            )
        if state["inner_step"] >= self.inner_steps:
            raise ValueError(
                f"DiLoCo.load_state_dict: the state was saved after {state['inner_step']} inner steps of its round, "
                f"but inner_steps is {self.inner_steps}; use the checkpoint's, or a checkpoint of a round's end"
            )
        self.outer.load_state_dict(state["outer"])  # first: it may refuse
        with torch.no_grad():
            self._anchor.copy_(state["anchor"])
            if state["inner_step"] == 0:
                self._restore()
        self.round = state["round"]
        self.inner_step = state["inner_step"]

    @property
    def _names(self) -> list[str]:
        return [slot.name for slot in self.layout.slots]

    def _agree(self) -> int:
        """Number of replicas in the whole run, after comparing what all processes bring."""
        types = [str(p.dtype) for p in self._params()[0]]
        ours = {"parameters": self.layout.describe(), "types": types, "inner_steps": self.inner_steps}
        everyone = self.communicator.gather((ours, len(self.replicas)))
        self._compare(ours, [theirs for theirs, _ in everyone])
        return sum(count for _, count in everyone)

    def _compare(self, ours: dict[str, Any], everyone: list[dict[str, Any]]) -> None:
        """Refuse to train, on every process alike, when the processes were not started alike."""
        rank = self.communicator.rank
        for other, theirs in enumerate(everyone):
            for what, here in ours.items():
                if here != theirs[what]:
                    raise ValueError(
                        f"DiLoCo: {what} differ between process {rank} ({str(here)[:200]}) and process {other} "
                        f"({str(theirs[what])[:200]}); start all processes with the same program and options"
                    )

    def _build_outer(self, outer: OuterRule | OuterFactory, restart: RestartPolicy | str | int | None) -> Optimizer:
        named = list(self.anchor.items())
        if isinstance(outer, OuterRule):
            return OuterSGD.from_rule(named, outer, Never() if restart is None else restart)
        if isinstance(outer, Optimizer) or not callable(outer):
            raise ValueError(
                f"DiLoCo: outer is {type(outer).__name__}; pass an OuterRule, or a function of the engine's anchor "
                "parameters such as lambda params: OuterSGD(params, lr=0.7, momentum=0.9, nesterov=True)"
            )
        if restart is not None:
            raise ValueError("DiLoCo: restart goes with an OuterRule; here give it to the optimizer that outer builds")
        optimizer = outer(named)
        taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in named if id(p) not in taken]
        if left:
            raise ValueError(
                f"DiLoCo: the optimizer that outer built does not hold {', '.join(left[:3])}{' …' * (len(left) > 3)}; "
                "parameters that no group takes would be set back in every round, so give it all that outer receives"
            )
        return optimizer


@dataclass(frozen=True, slots=True)
class _Slot:
    """A trainable parameter and where its module keeps it."""

    name: str
    module: nn.Module
    leaf: str
    parameter: nn.Parameter
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        """Its present values; training on after a silent replacement would synchronise nothing."""
        p = self.parameter
        if self.module._parameters.get(self.leaf) is not p or p.dtype != self.dtype or p.device != self.device:
            raise ValueError(
                f"DiLoCo: parameter {self.name!r} was replaced, moved or cast after the engine was built; call "
                ".to(), .double() or load_state_dict(assign=True) first and build the engine last"
            )
        return p.detach()


def _slots(replica: nn.Module) -> list[_Slot]:
    slots = []
    for name, p in replica.named_parameters():
        if p.requires_grad:
            path, _, leaf = name.rpartition(".")
            slots.append(_Slot(name, replica.get_submodule(path), leaf, p, p.dtype, p.device))
    return slots


def _collect(replicas: list[nn.Module]) -> tuple[list[list[_Slot]], Layout]:
    """The trainable parameters of each replica and their layout, checked to be alike."""
    if not replicas:
        raise ValueError("DiLoCo: replicas is empty; pass at least one module")
    for replica in replicas:
        if not isinstance(replica, nn.Module):
            raise ValueError(
                f"DiLoCo: replicas holds a {type(replica).__name__}; pass the module itself, or a list of modules"
            )
    if len({id(replica) for replica in replicas}) < len(replicas):
        raise ValueError("DiLoCo: the same module is listed twice in replicas; make one copy.deepcopy() a replica")
    collected = [_slots(replica) for replica in replicas]
    named = [[(slot.name, slot.parameter) for slot in slots] for slots in collected]
    layouts = [plan((name, tuple(p.shape)) for name, p in params) for params in named]
    if not layouts[0].slots:
        raise ValueError("DiLoCo: the module has no parameter that requires a gradient; nothing could be synchronised")
    for number, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ValueError(
                f"DiLoCo: replica {number} has other trainable parameters than replica 0; build them alike"
            )
    if len({id(p) for params in named for _, p in params}) < len(named) * len(named[0]):
        raise ValueError("DiLoCo: replicas share parameters; make one copy.deepcopy() of the module a replica")
    _check_kinds(named)
    return collected, layouts[0]


def _check_kinds(named: list[list[tuple[str, nn.Parameter]]]) -> None:
    for params in named:
        if len({p.device for _, p in params}) > 1:
            raise ValueError("DiLoCo: a replica's parameters lie on several devices; put each replica on one device")
        for name, p in params:
            if hasattr(p, "to_local"):
                raise ValueError(
                    f"DiLoCo: parameter {name!r} is sharded (a DTensor); this engine takes whole parameters"
                )
            if not p.is_floating_point():
                raise ValueError(f"DiLoCo: parameter {name!r} is {p.dtype}; only floating-point parameters can train")


def _settings(group: dict[str, Any]) -> dict[str, str]:
    """A param group without its tensors, as text, to be compared between processes."""
    return {key: str(value) for key, value in group.items() if key != "params"}


@contextmanager
def _phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a phase, under a profiler scope of its name."""
    start = time.perf_counter()
    with torch.profiler.record_function(f"twophase::{name}"):
        yield
    seconds[name] = time.perf_counter() - start
