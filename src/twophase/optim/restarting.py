"""`Restarting`: any torch optimizer as outer optimizer, whose state begins anew where a restart policy says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.names import RULES, TORCH
from twophase.optim.outer import OuterSGD, Part, dots_of
from twophase.optim.products import Angles
from twophase.policies.base import MEASURED, Answer, RestartPolicy, RoundSignal, ask
from twophase.policies.scheduled import Soft
from twophase.policies.text import parse
from twophase.rule import OuterRule
from twophase.schedule import Schedule

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class Restarting(Optimizer):
    """A torch optimizer whose state begins anew at a restart: moments, their bias correction, step counts.

    Each `step()` is a step of the optimizer, then a restart if the policy says so. Param groups and state are the
    optimizer's own, so schedulers of torch work; a group may name its own `restart`. Each group also counts its
    `rounds`, `rounds_since_restart` and `restarts`, and has the policy's memory, so that `state_dict()` holds
    everything (also for `torch.load(weights_only=True)`). A group without gradients takes no round.

    Args:
        optimizer: a torch optimizer, or several over different parameters, which then are one.
        restart: a policy of `twophase.restart`, its text form, or a period. It may need norms and the cosine, which are
            those of the gradients and the first moment.

    Raises:
        ValueError: a policy that takes its own steps, keeps a share of a buffer, or needs other signals.

    >>> x = torch.nn.Parameter(torch.ones(2))
    >>> outer = Restarting(torch.optim.AdamW([x], lr=0.1), restart=3)
    >>> outer.param_groups[0]["restart"]
    '3'
    """

    def __init__(
        self, optimizer: Optimizer | Sequence[Optimizer], restart: RestartPolicy | str | int = "never"
    ) -> None:
        self.optimizers: list[Optimizer] = []
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        groups = [group for each in optimizers for group in each.param_groups]
        counters = {"rounds": 0, "rounds_since_restart": 0, "restarts": 0, "policy_state": {}}
        super().__init__(groups, {"restart": str(parse(restart)), **counters})
        self.optimizers = optimizers
        for each in optimizers:
            self.state.update(each.state)
        self._share()

    def _share(self) -> None:
        """Give the optimizers this one's groups and state, which loading replaces."""
        groups = iter(self.param_groups)
        for each in self.optimizers:
            each.param_groups = list(itertools.islice(groups, len(each.param_groups)))
            each.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return super().__getstate__() | {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a loaded or copied state."""
        super().__setstate__(state)
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned; its settings win over the constructor's.

        Raises:
            ValueError: a state of other optimizers; nothing has been changed.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if missing := group.keys() - saved.keys() - {"param_names", "initial_lr"}:
                raise ValueError(f"Restarting: the state must be of the same optimizers, lacks {min(missing)}")
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last of the optimizers; its own `restart` overrides the default."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        policy = parse(group["restart"])
        if policy.takes_steps or policy.needs - MEASURED or isinstance(policy, Soft):
            self.param_groups.pop()
            raise ValueError(
                f"Restarting: restart must be hard and need no signals, got {policy}; take OuterSGD for it"
            )
        group["restart"] = str(policy)
        if self.optimizers:
            self.optimizers[-1].add_param_group(group)

    @property
    def needs(self) -> frozenset[str]:
        """What the policies of the groups need."""
        return frozenset().union(*(parse(group["restart"]).needs for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one outer round with each parameter's `.grad` as pseudo-gradient; return the closure's value or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        answers = [self._ask(group) for group in self.param_groups]
        for group, answer in zip(self.param_groups, answers, strict=True):
            if answer is not None and answer.restart is not None and answer.restart.before:
                self._begin_anew(group)
        for each in self.optimizers:
            each.step()
        for group, answer in zip(self.param_groups, answers, strict=True):
            if answer is None:
                continue
            if answer.restart is not None and not answer.restart.before:
                self._begin_anew(group)
            group["rounds"] += 1
            group["rounds_since_restart"] = answer.age(group["rounds_since_restart"] + 1)
            group["restarts"] += answer.restarted
            group["policy_state"] = answer.state
        return loss

    def _begin_anew(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            self.state.pop(p, None)

    def _ask(self, group: dict[str, Any]) -> Answer | None:
        """Return the answer of a group's policy; None for a group without gradients."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return None
        policy, norms = parse(group["restart"]), (None, None, None)
        if policy.needs & MEASURED:
            states = [self.state.get(p, {}) for p in params]
            moments = [next((state[key] for key in _FIRST_MOMENTS if key in state), None) for state in states]
            angles = Angles.of(dots_of(Part(group, params, [p.grad for p in params], moments)))
            norms = (angles.pseudo_gradient_norm, angles.buffer_norm, angles.cosine)
        signal = RoundSignal(group["rounds"] + 1, group["rounds_since_restart"] + 1, *norms)
        answer = ask(policy, group["policy_state"], signal)
        if answer.step or (answer.restart and (answer.restart.retain or answer.restart.inject)):
            raise ValueError(f"Restarting: restart {policy} must be a hard one, got {answer}; take OuterSGD for it")
        return answer


def named_optimizer(
    named: Iterable[tuple[str, Tensor]], method: str, lr: float | None = None, momentum: float | None = None
) -> list[Optimizer]:
    """Return torch's optimizers of `adamw` or `muon`, without weight decay, for `Restarting`.

    Muon takes the matrices. Vectors and tensors of more axes take Nesterov's momentum in sum form at learning rate 0.7.

    Args:
        named: parameters by name.
        method: a name of `names.TORCH`.
        lr: learning rate; None takes the table's.
        momentum: of AdamW beta_1; None takes the table's.
    """
    lr, momentum = (own if given is None else given for given, own in zip((lr, momentum), TORCH[method], strict=True))
    named = list(named)
    if method == "adamw":
        return [torch.optim.AdamW(named, lr, (momentum, 0.99), weight_decay=0.0)]
    matrices, rest = ([(n, p) for n, p in named if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
    made: list[Optimizer] = [torch.optim.Muon(matrices, lr, 0.0, momentum)] if matrices else []
    if rest:
        made.append(torch.optim.SGD(rest, RULES["nesterov"].lr, momentum, nesterov=momentum > 0))
    return made


def follow(optimizer: Optimizer, schedule: Schedule, rounds: int) -> None:
    """Set learning rate and momentum of each param group before every step, as a schedule over `rounds` says.

    Args:
        optimizer: an `OuterSGD` or a `Restarting`, whose groups count their rounds.
        schedule: of learning rates; one of the momentum goes with an `OuterSGD`.
        rounds: of the run.

    Raises:
        ValueError: a schedule of the momentum of another optimizer.
    """
    if schedule.kind == "constant":
        return
    if schedule.kind == "momentum" and not isinstance(optimizer, OuterSGD):
        raise ValueError(f"schedule {schedule} must be of heavy-ball or nesterov, got {type(optimizer).__name__}")
    rules = [
        OuterRule(group["lr"], group["momentum"] if isinstance(optimizer, OuterSGD) else 0.0)
        for group in optimizer.param_groups
    ]

    def set_numbers(optimizer: Optimizer, *_: Any) -> None:
        for group, rule in zip(optimizer.param_groups, rules, strict=True):
            now = schedule.at(rule, group["rounds"] + 1, rounds)
            group["lr"] = now.lr
            if schedule.kind == "momentum":
                group["momentum"] = now.momentum

    optimizer.register_step_pre_hook(set_numbers)
