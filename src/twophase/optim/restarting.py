"""`Restarting`: any torch optimizer as outer optimizer, whose state begins anew where a restart policy says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.outer_sgd import COUNTERS, count_round, decide, dots, is_init_step, needs_of, with_gradients
from twophase.restart import MEASURED, Restart, RestartPolicy, Soft, Step, parse

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class Restarting(Optimizer):
    """A torch optimizer whose state begins anew at a restart: moments, their bias correction, step counts.

    Param groups and state are the optimizer's own, so schedulers of torch work. A group may name its own `restart`, and
    counts `rounds`, `rounds_since_restart` and `restarts`; without gradients it takes no round.

    Args:
        optimizer: a new torch optimizer, or several over different parameters, which then are one.
        restart: a hard policy of `twophase.restart`, its text form, or a period. Norms and cosine that it needs are
            those of the gradients and the first moment.

    A ValueError refuses a policy that takes its own steps, keeps a share of a buffer, or needs other signals.

    >>> x = torch.nn.Parameter(torch.ones(2))
    >>> outer = Restarting(torch.optim.AdamW([x], lr=0.1), restart=3)
    >>> outer.param_groups[0]["restart"]
    '3'
    """

    needs = property(needs_of)

    def __init__(
        self, optimizer: Optimizer | Sequence[Optimizer], restart: RestartPolicy | str | int = "never"
    ) -> None:
        self.optimizers: list[Optimizer] = []
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__(groups, {"restart": str(parse(restart)), "policy_state": "{}", **dict.fromkeys(COUNTERS, 0)})
        self.optimizers = optimizers

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return super().__getstate__() | {"optimizers": self.optimizers}

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one outer round with each parameter's `.grad` as pseudo-gradient; return the closure's value or None."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        active = [] if is_init_step(self) else with_gradients(self)
        for group, _ in active:
            if group["rounds_since_restart"] == 0:
                self._forget(group)
        decided = [(group, *self._decide(group, params)) for group, params in active]
        for group, _, decision in decided:
            if decision and decision.before:
                self._forget(group)
        groups = iter(self.param_groups)
        for each in self.optimizers:  # it has this one's groups and state, which loading replaces
            each.param_groups, each.state = list(islice(groups, len(each.param_groups))), self.state
            each.step()
        for group, memory, decision in decided:
            count_round(group, memory, decision)
        return loss

    def _forget(self, group: Mapping[str, Any]) -> None:
        """Begin a group's state anew; what is there is of the cycle before, or of torch's init step."""
        for p in group["params"]:
            self.state.pop(p, None)

    def _decide(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> tuple[dict[str, float], Restart | None]:
        """Return the next memory and the decision of a group's policy."""
        measured = None
        if parse(group["restart"]).needs:
            states = [self.state.get(p, {}) for p in params]
            moments = [next((state[key] for key in _FIRST_MOMENTS if key in state), None) for state in states]
            measured = dots([p.grad for p in params], moments)
        memory, decision, broken = decide(group, measured)
        if broken:
            warnings.warn(f"Restarting: {broken} are not finite, and nothing restarted", RuntimeWarning, stacklevel=3)
        if isinstance(decision, Step) or (decision and (decision.retain or decision.inject)):
            raise ValueError(f"Restarting: restart {group['restart']} must be a hard one, got {decision}; try OuterSGD")
        return memory, decision
