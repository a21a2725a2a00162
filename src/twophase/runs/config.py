"""The configuration of a run of any task; without torch, so that the command line and sweeps start quickly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

from twophase.config import require
from twophase.errors import UsageError
from twophase.optim.names import NAMES, RULES, TORCH, read_filter
from twophase.optim.schedules import Schedule
from twophase.restart import RestartPolicy, mean_outer_gain, parse
from twophase.rule import Form, OuterRule

LARGEST = 1e30
"""The largest factor, well inside float32's range."""


@dataclass(frozen=True)
class InnerConfig:
    """The inner optimizer, with linear warmup, then a schedule over the rest of the run."""

    method: Literal["adamw", "sgd", "muon", "schedule-free"] = "adamw"
    """adamw; sgd; muon: hidden weight matrices by Muon and the rest by AdamW; or schedule-free: schedule-free AdamW,
    which wants the constant schedule."""
    lr: float = 2e-3
    """Peak inner learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay; that of sgd is part of the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment coefficients; the first of schedule-free is its share of the average in the gradient's point."""
    momentum: float = 0.9
    """Momentum of sgd and muon, in [0, 1)."""
    warmup: float = 0.1
    """Share of the inner steps that is linear warmup."""
    clip_norm: float = 0.0
    """Bound on the gradient norm; 0 means none."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"
    """Schedule after the warmup: cosine or linear decay to zero at the run's end, constant, or wsd (warmup, stable,
    decay): constant, then linear decay."""
    decay: float = 0.2
    """Share of the inner steps, at the run's end, over which wsd decays, but not before the warmup has ended."""

    def __post_init__(self) -> None:
        require(0 < self.lr <= LARGEST, "inner.lr", self.lr, f"above 0 and at most {LARGEST:g}")
        require(0 <= self.weight_decay <= LARGEST, "inner.weight_decay", self.weight_decay, f"in [0, {LARGEST:g}]")
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        least = 1e-300 if self.method == "schedule-free" else 0.0  # which takes the gradient between two points
        fits = len(self.betas) == 2 and least <= self.betas[0] < 1 and 0 <= self.betas[1] < 1
        require(fits, "inner.betas", self.betas, f"two numbers in [0, 1){', the first above 0' * (least > 0)}")
        require(0 <= self.momentum < 1, "inner.momentum", self.momentum, "in [0, 1)")
        require(0 <= self.clip_norm <= LARGEST, "inner.clip_norm", self.clip_norm, f"in [0, {LARGEST:g}]; 0 is none")
        for name in ("warmup", "decay"):
            require(0 <= getattr(self, name) <= 1, f"inner.{name}", getattr(self, name), "a share, in [0, 1]")

    def ignored(self) -> dict[str, Any]:
        """Return the values that are given and that method and schedule ignore, by name, as they are by default."""
        names = ["momentum"] * (self.method not in ("sgd", "muon")) + ["betas"] * (self.method == "sgd")
        names += ["decay"] * (self.schedule != "wsd")
        defaults = InnerConfig()
        return {name: getattr(defaults, name) for name in names if getattr(self, name) != getattr(defaults, name)}


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer: how the replicas' progress is combined once a round."""

    method: str = "averaging"
    """averaging of the replicas; heavy-ball or nesterov momentum (nesterov is DiLoCo's published rule); adamw; muon; or
    FILE.py:FUNCTION, your function from named parameters to a torch optimizer."""
    lr: float | None = None
    """Outer learning rate, in the form named below; none is the method's own: averaging 1, heavy-ball and nesterov 0.7,
    adamw 0.02, muon 0.1."""
    momentum: float | None = None
    """Outer momentum, in [0, 1); none is the method's own, 0.9. Averaging has no momentum."""
    form: Form = "sum"
    """`sum` (as torch.optim.SGD) or `ema` (as the restart paper); lr_sum = lr_ema (1 - momentum)."""
    restart: str = "never"
    """Restarts of the momentum: never, a period such as 3, cycle:5,6,10, at:4,9, soft:3:0.2:0.1, or the adaptive policy
    auto."""
    filter: str = "none"
    """Filter of the pseudo-gradient before the update: none, orthogonal, or clip:1, a bound on its norm."""
    schedule: str = "constant"
    """Outer learning rate and momentum over the run: constant, linear:2 (on a line to twice the learning rate) or
    momentum:0 (the momentum rises from 0)."""

    def __post_init__(self) -> None:
        known = self.method in NAMES or ".py:" in self.method
        require(known, "outer.method", self.method, f"one of {', '.join(NAMES)}, or a function FILE.py:FUNCTION")
        name = "restart"
        try:
            object.__setattr__(self, "restart", str(parse(self.restart)))  # one writing of each policy
            name = "filter"
            if self.filter != "none":
                read_filter(self.filter)
            name = "schedule"
            if self.schedule != "constant":
                Schedule.parse(self.schedule)
        except ValueError as error:
            raise UsageError(f"--outer.{name}: {error}") from None
        require(0 <= (self.lr or 0) <= LARGEST, "outer.lr", self.lr, f"in [0, {LARGEST:g}]")
        require(0 <= (self.momentum or 0) < 1, "outer.momentum", self.momentum, "in [0, 1)")

    @cached_property
    def policy(self) -> RestartPolicy:
        """The restart policy."""
        return parse(self.restart)

    def rule(self) -> OuterRule | None:
        """Return the rule; None for a method that is no rule.

        >>> OuterConfig("nesterov", lr=0.5).rule()
        OuterRule(lr=0.5, momentum=0.9, nesterov=True, form='sum')
        """
        if self.method not in RULES:
            return None
        own = RULES[self.method]
        momentum = own.momentum if self.momentum is None or self.method == "averaging" else self.momentum
        return OuterRule(own.lr if self.lr is None else self.lr, momentum, own.nesterov, self.form)

    def numbers(self) -> dict[str, float]:
        """Return learning rate and momentum as they are used; nothing for a user's function."""
        if (rule := self.rule()) is not None:
            return {"lr": rule.lr, "momentum": rule.momentum}
        own = zip(("lr", "momentum"), (self.lr, self.momentum), TORCH.get(self.method, ()), strict=False)
        return {name: number if given is None else float(given) for name, given, number in own}

    def describe(self) -> str:
        """Describe the outer optimizer in words, without its restart policy."""
        if rule := self.rule():
            text = f"averaging lr {rule.lr:g}" if self.method == "averaging" else rule.describe()
        else:
            text = " ".join([self.method, *(f"{name} {value:g}" for name, value in self.numbers().items())])
        text += f", filter {self.filter}" if self.filter != "none" else ""
        return text + (f", schedule {self.schedule}" if self.schedule != "constant" else "")

    def ignored(self) -> dict[str, Any]:
        """Return the values that are given and change nothing, by name, as they are by default."""
        rule, policy = self.rule(), self.policy
        names = ["lr", "momentum"] if rule is None and self.method not in TORCH else []
        if policy.takes_steps:
            names += ["lr", "momentum", "form", "schedule", "method"]
        elif rule is None or rule.momentum == 0:
            names += ["form", *(["restart"] if rule is not None else [])]
        if self.method == "averaging":
            names += ["momentum"]
        defaults = OuterConfig()
        return {name: getattr(defaults, name) for name in names if getattr(self, name) != getattr(defaults, name)}

    def plain(self) -> OuterConfig:
        """Return the same outer optimizer with every number written out and what changes nothing left out."""
        return replace(self, **(self.ignored() | ({} if self.policy.takes_steps else self.numbers())))

    @property
    def is_rule(self) -> bool:
        """True if a rule and a restart policy describe it completely."""
        return self.method in RULES and (self.filter, self.schedule) == ("none", "constant")


def options_of(rule: OuterRule) -> dict[str, Any]:
    """Return the values of an `OuterConfig` that stand for a rule.

    >>> options_of(OuterRule(0.7, 0.9, nesterov=True))
    {'method': 'nesterov', 'lr': 0.7, 'momentum': 0.9, 'form': 'sum'}
    """
    method = "averaging" if rule.momentum == 0 else "nesterov" if rule.nesterov else "heavy-ball"
    return {"method": method, "lr": rule.lr, "momentum": rule.momentum or None, "form": rule.form}


@dataclass(frozen=True)
class SyncConfig:
    """When the replicas' progress is combined, and how it travels."""

    fragments: tuple[str, ...] = ("1",)
    """A number of fragments of about equal size, or NAME=PATTERN for each, such as ends=embedding|head blocks=blocks.
    Each has its own outer optimizer and rounds. A parameter takes the first pattern that its name contains."""
    restart: tuple[str, ...] = ()
    """NAME=POLICY for each fragment, such as ends=3 blocks=5; none means outer.restart for all."""
    stagger: bool = True
    """Spread the fragments' syncs evenly over a round; else all come at its end."""
    delay: int = 0
    """Inner steps between the launch of a reduction and its application: the replicas train on meanwhile."""
    mixing: float = 0.0
    """Share of its own parameters that a replica keeps when the anchor comes back, in [0, 1)."""
    compression: Literal["float32", "bfloat16", "int8"] = "float32"
    """Compression of the pseudo-gradients in transit: float32 is none; bfloat16, and int8 in blocks, with error
    feedback. If all replicas live in one process, each counts as a process here."""

    def __post_init__(self) -> None:
        require(self.delay >= 0, "sync.delay", self.delay, "at least 0")
        require(0 <= self.mixing < 1, "sync.mixing", self.mixing, "in [0, 1)")
        parts = self.parts
        names = [str(number) for number in range(parts)] if isinstance(parts, int) else [*parts]
        require(bool(names), "sync.fragments", self.fragments, "a number >= 1, or NAME=PATTERN for each")
        if self.restart:
            policies, words = named_values("sync.restart", self.restart), " ".join(self.restart)
            fits = policies.keys() == {*names}
            require(fits, "sync.restart", words, f"NAME=POLICY for each of the fragments {', '.join(names)}")
            try:
                for text in policies.values():
                    parse(text)
            except ValueError as error:
                raise UsageError(f"--sync.restart: {error}") from None

    @property
    def parts(self) -> int | dict[str, str]:
        """The number of fragments, or their patterns by name."""
        if len(self.fragments) == 1 and self.fragments[0].isdecimal():
            return int(self.fragments[0])
        return named_values("sync.fragments", self.fragments)


def named_values(option: str, words: Sequence[str], *, empty: bool = False) -> dict[str, str]:
    """Return the values of an option's NAME=VALUE by name, each name once; `empty` lets values be empty."""
    pairs = {name: value for name, _, value in (word.partition("=") for word in words)}
    fits = len(pairs) == len(words) and all("=" in word[1:] for word in words) and (empty or all(pairs.values()))
    require(fits, option, " ".join(words), "NAME=VALUE for each, every name once")
    return pairs


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed; what it computes stays the same up to rounding."""

    precision: Literal["float32", "bf16-mixed"] = "float32"
    """`bf16-mixed`: weights, gradients' sums and optimizers in float32, everything between them in bfloat16."""
    compile: bool = False
    """Compile forward and backward (torch.compile), once for all replicas and runs of a process."""
    micro_batch: int = 0
    """Sequences a forward and backward pass, a divisor of the batch size; 0 means as many as the memory holds."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Attention kernel on a GPU; `auto` is the first of the others that the GPU and the shape allow."""
    recompute: bool = False
    """Keep only each block's input for the backward pass and compute the rest again (activation checkpointing)."""
    autotune: bool = False
    """With `compile`, let the compiler time several versions of each product and kernel, which takes minutes once."""


@dataclass(frozen=True)
class RunConfig:
    """Configure one DiLoCo run of any task; a task adds its options in a subclass."""

    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    replicas: int = 2
    """Replicas in the whole run, over all processes."""
    steps: int = 960
    """Inner steps of each replica in the whole run."""
    inner_steps: int = 16
    """Inner steps a round (S; H in DiLoCo papers). The last round is shorter when steps is no multiple of it."""
    seed: int = 0
    """Seeds initial weights and data order."""
    device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    threads: int = 1
    """CPU threads a process; results are reproducible for a fixed number."""
    deterministic: bool = False
    """On a GPU, use kernels that give the same bits every time only (slower); a CPU always does."""
    repeat: bool = False
    """Allow more than one epoch if the run needs more data than there is."""
    log_every: int = 0
    """Inner steps between lines of steps.jsonl (training loss, speed, memory) of `train`; 0 means none. The cells of a
    sweep that share their steps write none."""
    evaluate_every: int = 0
    """Rounds between validations; 0 means at the end only."""
    checkpoint_every: int = 20
    """Rounds between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept; older ones are removed after a newer one is complete."""
    divergence_loss: float = 0.0
    """A round whose mean training loss is above this ends the run; 0 means the task's bound, if it has one."""

    def __post_init__(self) -> None:
        for name in ("steps", "inner_steps", "replicas", "threads", "checkpoint_every", "keep_checkpoints"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("log_every", "evaluate_every", "divergence_loss"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2^63)")

    def plain(self) -> Self:
        """Return the same run with every outer number written out and without values that change nothing."""
        return replace(self, inner=replace(self.inner, **self.inner.ignored()), outer=self.outer.plain())

    def describe(self) -> str:
        """Describe the outer optimizer, and when its momentum restarts: each fragment's own policy, or one for all."""
        return f"{self.outer.describe()}, restart {', '.join(self.sync.restart) or self.outer.restart}"

    @property
    def rounds(self) -> int:
        """Outer rounds of the run, the last and perhaps shorter one included."""
        return math.ceil(self.steps / self.inner_steps)


def inner_lr(config: RunConfig, step: int) -> float:
    """Compute the inner learning rate at step t, counted from 0: linear warmup over w = warmup x steps, a schedule.

    * t < w: `lr (t + 1) / w`;
    * cosine: `lr (1 + cos(pi (t - w) / (steps - w))) / 2`;
    * linear: `lr (steps - t) / (steps - w)`; wsd: the same with w = steps - decay x steps, and `lr` before it;
    * constant: `lr`.
    """
    inner, steps = config.inner, config.steps
    start = round(inner.warmup * steps)
    if step < start:
        return inner.lr * (step + 1) / start
    if inner.schedule == "wsd":
        start = max(start, steps - round(inner.decay * steps))
    if inner.schedule == "constant" or step < start:
        return inner.lr
    if inner.schedule == "cosine":
        return inner.lr * (1 + math.cos(math.pi * (step - start) / max(steps - start, 1))) / 2
    return inner.lr * (steps - step) / (steps - start)


def outer_line(config: RunConfig) -> str:
    """Return the first line of a run: the outer optimizer, its mean outer gain, and the values that change nothing."""
    outer, inner, rule = config.outer, config.inner, config.outer.rule()
    line = f"outer optimizer: {config.describe()}"
    if rule is not None and outer.is_rule and not config.sync.restart and not outer.policy.needs:
        line += f", mean outer gain {mean_outer_gain(rule, outer.policy, min(config.rounds, 10_000)):.3g}"
    ignored = [f"outer.{name} {getattr(outer, name)}" for name in outer.ignored()]
    ignored += [f"inner.{name} {getattr(inner, name)}" for name in inner.ignored()]
    return line + (f"; {', '.join(ignored)} changes nothing" if ignored else "")
