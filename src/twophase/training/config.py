"""The configuration of a run of any task; without torch, so that the command line and sweeps start quickly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twophase.base.config import LATER, UsageError, get
from twophase.number import shortened
from twophase.optim.names import RULES, TORCH, read_filter
from twophase.optim.schedules import Schedule
from twophase.restart import RestartPolicy, Soft, parse
from twophase.rule import Form, OuterRule
from twophase.runs.method import check_method, describe, numbers_of, rule_of

OF_STEPS = OuterRule(1.0, 0.5)
"""Stands for a rule without momentum beside a policy that takes the steps itself."""
LARGEST_LR = 1e30
"""A factor well inside float32's range; a larger one fails inside torch."""
MOST_STEPS, MOST_REPLICAS, MOST_FRAGMENTS, MOST_THREADS = 10**8, 10**5, 10**4, 1024
"""Far beyond any use, and small enough that plans, names and threads of so many can be made."""


@dataclass(frozen=True)
class InnerConfig:
    """The inner optimizer, with linear warmup, then a schedule over the rest of the run."""

    method: Literal["adamw", "sgd", "muon", "schedule-free"] = field(default="adamw", metadata=LATER)
    """adamw; sgd; muon: hidden weight matrices by Muon and the rest by AdamW; or schedule-free: schedule-free AdamW,
    which wants the constant schedule."""
    lr: float = 2e-3
    """Peak inner learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay; that of sgd is part of the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment coefficients; the first of schedule-free is its share of the average in the gradient's point."""
    momentum: float = field(default=0.9, metadata=LATER)
    """Momentum of sgd and muon, in [0, 1)."""
    warmup: float = 0.1
    """Share of the inner steps that is linear warmup."""
    clip_norm: float = 0.0
    """Bound on the gradient norm; 0 means none."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"
    """Schedule after the warmup: cosine or linear decay to zero at the run's end, constant, or wsd (warmup, stable,
    decay): constant, then linear decay."""
    decay: float = field(default=0.2, metadata=LATER)
    """Share of the inner steps, at the run's end, over which wsd decays."""


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

    def rule(self) -> OuterRule | None:
        """Return the rule, with a momentum where the policy needs a buffer; None for a method that is no rule."""
        rule = rule_of(self.method, self.lr, self.momentum, self.form)
        is_unused = rule is not None and rule.momentum == 0 and self.policy().takes_steps
        return OF_STEPS if is_unused else rule

    def known_rule(self) -> OuterRule:
        """Return the rule of a method that is one."""
        rule = self.rule()
        assert rule is not None, f"{self.method} is no rule"
        return rule

    def describe(self) -> str:
        """Describe the outer optimizer in words, without its restart policy."""
        return describe(vars(self))

    def numbers(self) -> dict[str, float]:
        """Return learning rate and momentum as they are used; nothing for a user's function."""
        return numbers_of(vars(self))

    def ignored(self) -> list[str]:
        """Return the names of the values that are given and change nothing."""
        rule, policy = rule_of(self.method, self.lr, self.momentum), self.policy()
        names = ["lr", "momentum"] if rule is None and self.method not in TORCH else []
        if policy.takes_steps:
            names += ["lr", "momentum", "form", "schedule", "method"]
        elif rule is None or rule.momentum == 0:
            names += ["form", *(["restart"] if rule is not None else [])]
        defaults = OuterConfig()
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    def plain(self) -> OuterConfig:
        """Return the same outer optimizer with every number written out and what changes nothing left out."""
        usual = {name: getattr(OuterConfig(), name) for name in self.ignored()}
        return replace(self, **(self.numbers() | usual))

    @property
    def is_rule(self) -> bool:
        """True if a rule and a restart policy describe it completely."""
        return self.method in RULES and self.filter == "none" and self.schedule == "constant"

    def policy(self) -> RestartPolicy:
        """Return the restart policy as a value."""
        return parse(self.restart)


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

    def parts(self) -> int | dict[str, str]:
        """Return the number of fragments, or their patterns by name."""
        if len(self.fragments) == 1 and re.fullmatch("[0-9]+", self.fragments[0]):
            count = int(self.fragments[0][:40])
            if not 1 <= count <= MOST_FRAGMENTS:
                raise _refusal("sync.fragments", shortened(self.fragments[0]), f"from 1 to {MOST_FRAGMENTS:,}")
            return count
        return named_values("sync.fragments", self.fragments, "ends=embedding|head blocks=blocks, or one number")

    def policies(self) -> dict[str, RestartPolicy] | None:
        """Return each fragment's restart policy by name; None where all have outer.restart."""
        if not self.restart:
            return None
        texts = named_values("sync.restart", self.restart, "ends=3 blocks=5")
        return {name: parse(text) for name, text in texts.items()}


def named_values(path: str, words: Sequence[str], example: str) -> dict[str, str]:
    """Return the values of an option's NAME=VALUE by name; each name may stand once."""
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise _refusal(path, word, f"NAME=VALUE, such as {example}")
        if name in pairs:
            raise _refusal(path, word, "a name that is given once")
        pairs[name] = value
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
    attention: Literal["auto", "cudnn", "flash3", "flash", "efficient", "math"] = "auto"
    """Attention kernel on a GPU; `auto` times those available at the run's shape and takes the fastest, the same
    in all processes. `flash3` is FlashAttention 3, for a newer torch with the package flash_attn_interface."""
    recompute: bool = False
    """Keep only each block's input for the backward pass and compute the rest again (activation checkpointing)."""
    autotune: bool = field(default=False, metadata=LATER)
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

    @property
    def rounds(self) -> int:
        """Outer rounds of the run, the last and perhaps shorter one included."""
        return math.ceil(self.steps / self.inner_steps)

    @property
    def shares_steps(self) -> bool:
        """True if an outer step is a rule's update at the end of a round, so that a sweep can share its steps."""
        sync = self.sync
        whole = sync.parts() == 1 and sync.delay == 0 and sync.mixing == 0 and not sync.restart
        return whole and self.outer.is_rule


Range = tuple[str, Callable[[Any], bool], str]
"""A value's dotted path, its condition, and the condition in words."""


def whole_numbers(smallest: int, largest: int, *paths: str) -> list[Range]:
    """Return ranges of whole numbers."""
    requirement = f"a whole number from {smallest} to {largest:,}"
    return [(path, lambda value: smallest <= value <= largest, requirement) for path in paths]


def require(config: Any, ranges: Iterable[Range]) -> None:
    """Refuse a configuration with a value out of its range.

    Raises:
        UsageError: naming the option, its value and the range.
    """
    for path, holds, requirement in ranges:
        if not holds(get(config, path)):
            raise _refusal(path, get(config, path), requirement)


def _refusal(path: str, value: object, requirement: str) -> UsageError:
    return UsageError(f"--{path.replace('_', '-')} is {value}; it must be {requirement}")


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


def check(config: RunConfig) -> None:
    """Refuse a configuration that cannot be run; the task checks its own values.

    Raises:
        UsageError: naming the option, its value, the range and the remedy.
    """
    inner, sync = config.inner, config.sync
    require(
        config,
        [
            *whole_numbers(1, MOST_STEPS, "steps", "inner_steps", "checkpoint_every", "keep_checkpoints"),
            *whole_numbers(0, MOST_STEPS, "log_every", "evaluate_every"),
            *whole_numbers(1, MOST_REPLICAS, "replicas"),
            *whole_numbers(1, MOST_THREADS, "threads"),
            ("inner.lr", lambda lr: 0 < lr <= LARGEST_LR, f"above 0 and at most {LARGEST_LR:g}"),
            ("inner.weight_decay", lambda decay: 0 <= decay <= LARGEST_LR, f"from 0 to {LARGEST_LR:g}"),
            (
                "inner.betas",
                lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
                "two numbers in [0, 1)",
            ),
            ("inner.momentum", lambda momentum: 0 <= momentum < 1, "at least 0 and below 1"),
            ("inner.warmup", lambda share: 0 <= share <= 1, "a share of the steps, in [0, 1]"),
            ("inner.clip_norm", lambda norm: 0 <= norm <= LARGEST_LR, f"from 0 (no clipping) to {LARGEST_LR:g}"),
            ("divergence_loss", lambda loss: loss >= 0, ">= 0 (0 means the task's bound, if it has one)"),
            ("seed", lambda seed: 0 <= seed < 2**63, "a whole number >= 0 and below 2^63"),
            (
                "inner_steps",
                lambda count: count <= config.steps,
                f"at most steps ({config.steps}); lower --inner-steps or raise --steps",
            ),
            ("outer.lr", lambda lr: not (lr or 0) > LARGEST_LR, f"at most {LARGEST_LR:g}, far beyond any use"),
            (
                "sync.delay",
                lambda delay: 0 <= delay < config.inner_steps,
                f"at least 0 and below inner_steps ({config.inner_steps}), so that a reduction ends before the next "
                "begins",
            ),
            ("sync.mixing", lambda share: 0 <= share < 1, "at least 0 and below 1"),
        ],
    )
    _check_inner(inner)
    if config.compute.autotune and not config.compute.compile:
        raise _refusal("compute.autotune", True, "used together with --compute.compile")
    parts = sync.parts()
    names = {str(number) for number in range(parts)} if isinstance(parts, int) else set(parts)
    if not names:
        raise _refusal("sync.fragments", "empty", f"a whole number from 1 to {MOST_FRAGMENTS:,}, or patterns by name")
    policies = _check_outer(config)
    if policies is not None and set(policies) != names:
        raise UsageError(
            f"--sync.restart names {', '.join(sorted(policies))}, and the fragments are {', '.join(sorted(names))}; "
            "give each fragment its policy, on an axis of a sweep with commas between them"
        )


def _check_outer(config: RunConfig) -> dict[str, RestartPolicy] | None:
    """Refuse an outer optimizer that cannot be; return the restart policies of the fragments."""
    outer, path = config.outer, "outer.restart"
    try:
        restarts = [outer.policy()]
        path = "sync.restart"
        policies = config.sync.policies()
        restarts = restarts if policies is None else list(policies.values())
        path = "outer.method"
        check_method(outer.method)
        path = "outer.momentum"
        check_method(outer.method, outer.momentum)
        rule = outer.rule()
        if rule is None and outer.numbers():  # the same ranges as a rule's
            OuterRule(outer.numbers()["lr"], outer.numbers()["momentum"])
        path = "outer.filter"
        read_filter(outer.filter)
        path = "outer.schedule"
        schedule = Schedule.parse(outer.schedule)
        if schedule.kind == "momentum" and (rule is None or rule.momentum == 0):
            raise ValueError(f"schedule {schedule} needs a momentum; take --outer.method heavy-ball or nesterov")
        path = "outer.restart"
        for policy in restarts:
            if rule is None and (policy.takes_steps or isinstance(policy, Soft)):
                raise ValueError(f"restart {policy} is for rules; take a period, or --outer.method nesterov")
            if policy.takes_steps and schedule.kind != "constant":
                raise ValueError(f"restart {policy} takes steps that schedule {schedule} would not change")
    except UsageError:
        raise
    except ValueError as error:
        is_of_rule = str(error).startswith(("lr ", "momentum ", "form "))
        raise UsageError(f"--outer.{error}" if is_of_rule else f"--{path}: {error}") from None
    return policies


def _check_inner(inner: InnerConfig) -> None:
    """Refuse options of the inner optimizer that do not go together."""
    usual = InnerConfig()
    if inner.method == "sgd" and inner.betas != usual.betas:
        requirement = "left alone with --inner.method sgd, which has --inner.momentum"
        raise _refusal("inner.betas", inner.betas, requirement)
    if inner.method not in ("sgd", "muon") and inner.momentum != usual.momentum:
        requirement = f"left alone with --inner.method {inner.method}; it is for sgd and muon"
        raise _refusal("inner.momentum", inner.momentum, requirement)
    if inner.method == "schedule-free" and inner.betas[0] == 0:
        requirement = "two numbers, the first above 0, with --inner.method schedule-free"
        raise _refusal("inner.betas", inner.betas, requirement)
    if inner.method == "schedule-free" and inner.schedule != "constant":
        requirement = "constant with --inner.method schedule-free, whose average takes the schedule's place"
        raise _refusal("inner.schedule", inner.schedule, requirement)
    if inner.schedule != "wsd" and inner.decay != usual.decay:
        requirement = f"left alone with --inner.schedule {inner.schedule}; it is for wsd"
        raise _refusal("inner.decay", inner.decay, requirement)
    if inner.schedule == "wsd" and not 0 <= inner.decay <= 1 - inner.warmup:
        requirement = f"a share of the steps, in [0, 1 - inner.warmup] = [0, {1 - inner.warmup:g}]"
        raise _refusal("inner.decay", inner.decay, requirement)
