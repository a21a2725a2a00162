"""`Restarting`: any torch optimizer as outer optimizer, whose state begins anew where a restart policy says so."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from twophase.optim.outer_sgd import COUNTERS, count_round, decide, dots, is_init_step, keep_types
from twophase.restart import MEASURED, Decision, Restart, RestartPolicy, Soft, Step, parse

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class Restarting(Optimizer):
    """A torch optimizer whose state begins anew at a restart: moments, their bias correction, step counts.

    Param groups and state are the optimizer's own, so schedulers of torch work. A group may name its own `restart`, and
    counts `rounds`, `rounds_since_restart` and `restarts`; without gradients it takes no round.

    Args:
        optimizer: a torch optimizer, or several over different parameters, which then are one.
        restart: a hard policy of `twophase.restart`, its text form, or a period. Norms and cosine that it needs are
            those of the gradients and the first moment.

    A ValueError refuses a policy that takes its own steps, keeps a share of a buffer, or needs other signals.

    >>> x = torch.nn.Parameter(torch.ones(2))
    >>> outer = Restarting(torch.optim.AdamW([x], lr=0.1), restart=3)
    >>> outer.param_groups[0]["restart"]
    '3'
    """

    def __init__(
        self, optimizer: Optimizer | Sequence[Optimizer], restart: RestartPolicy | str | int = "never"
    ) -> None:
        self.optimizers: list[Optimizer] = []
        self._is_probed = False
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__(groups, {"restart": str(parse(restart)), "policy_state": "{}", **dict.fromkeys(COUNTERS, 0)})
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
        self._is_probed = False
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned, or refuse the state of other optimizers and change nothing."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if missing := group.keys() - saved.keys() - {"param_names", "initial_lr"}:
                raise ValueError(f"Restarting: the state must be of the same optimizers, lacks {min(missing)}")
        super().load_state_dict(state_dict)
        keep_types(self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last of the optimizers; its own `restart` overrides the default."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        policy = parse(group["restart"])
        if policy.takes_steps or policy.needs - MEASURED or isinstance(policy, Soft):
            self.param_groups.pop()
            raise ValueError(f"Restarting: restart must be hard and need no signals, got {policy}; OuterSGD takes it")
        group["restart"] = str(policy)
        if self.optimizers:
            self.optimizers[-1].add_param_group(group)

    @property
    def needs(self) -> frozenset[str]:
        """Everything that the policies of the groups need."""
        return frozenset().union(*(parse(group["restart"]).needs for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one outer round with each parameter's `.grad` as pseudo-gradient; return the closure's value or None."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = [group for group in self.param_groups if any(p.grad is not None for p in group["params"])]
        if self._is_probed:  # the init step has left a count behind
            self.state.clear()
        self._is_probed = is_init_step(self)
        if self._is_probed:
            groups = []
        memories, decisions = zip(*map(self._decide, groups), strict=True) if groups else ((), ())
        self._begin_anew(groups, decisions, before=True)
        for each in self.optimizers:
            each.step()
        self._begin_anew(groups, decisions, before=False)
        for group, memory, decision in zip(groups, memories, decisions, strict=True):
            count_round(group, memory, decision)
        return loss

    def _decide(self, group: dict[str, Any]) -> tuple[dict[str, float], Decision]:
        """Return the next memory and the decision of a group's policy."""
        measured = None
        if parse(group["restart"]).needs:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state.get(p, {}) for p in params]
            moments = [next((state[key] for key in _FIRST_MOMENTS if key in state), None) for state in states]
            measured = dots([p.grad for p in params], moments)
        memory, decision, broken = decide(group, measured)
        if broken:
            warnings.warn(f"Restarting: {broken} are not finite, and nothing restarted", RuntimeWarning, stacklevel=3)
        if isinstance(decision, Step) or (decision and (decision.retain or decision.inject)):
            raise ValueError(f"Restarting: restart {group['restart']} must be a hard one, got {decision}; try OuterSGD")
        return memory, decision

    def _begin_anew(self, groups: Sequence[dict[str, Any]], decisions: Sequence[Decision], *, before: bool) -> None:
        for group, decision in zip(groups, decisions, strict=True):
            if isinstance(decision, Restart) and decision.before == before:
                for p in group["params"]:
                    self.state.pop(p, None)
