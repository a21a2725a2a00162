"""`Restarting`: any torch optimizer as outer optimizer, whose state begins anew where a restart policy says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from twophase.optim.outer_sgd import COUNTERS, count_round, decide, is_init_step, with_gradients
from twophase.restart import Restart, RestartPolicy, Soft, parse


class Restarting(Optimizer):
    """A torch optimizer whose state begins anew at a restart: moments, their bias correction, step counts.

    Param groups and state are the optimizer's own, so schedulers of torch work. A group may name its own `restart`, and
    counts `rounds`, `rounds_since_restart` and `restarts`; without gradients it takes no round.

    Args:
        optimizer: a new torch optimizer, or several over different parameters, which then are one.
        restart: a hard policy of `twophase.restart` that measures nothing, its text form, or a period.

    A ValueError refuses a policy that takes its own steps, keeps a share of a buffer, or needs norms or signals.

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
        super().__init__(groups, {"restart": str(parse(restart)), "policy_state": "{}", **dict.fromkeys(COUNTERS, 0)})
        self.optimizers = optimizers

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return super().__getstate__() | {"optimizers": self.optimizers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned, or refuse the state of other optimizers and change nothing."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if missing := group.keys() - saved.keys() - {"param_names", "initial_lr"}:
                raise ValueError(f"Restarting: the state must be of the same optimizers, lacks {min(missing)}")
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last of the optimizers; its own `restart` overrides the default."""
        policy = parse(param_group.get("restart", self.defaults["restart"]))
        if policy.takes_steps or policy.needs or isinstance(policy, Soft):
            raise ValueError(f"Restarting: restart must be hard and measure nothing, got {policy}; OuterSGD takes it")
        param_group["restart"] = str(policy)
        super().add_param_group(param_group)
        if self.optimizers:
            self.optimizers[-1].add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one outer round with each parameter's `.grad` as pseudo-gradient; return the closure's value or None."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        rounds = [] if is_init_step(self) else [(group, *decide(group)) for group, _ in with_gradients(self)]
        for group, _, decision, _ in rounds:
            if decision not in (None, Restart(), Restart(before=True)):
                raise ValueError(f"Restarting: restart {group['restart']} must be hard, got {decision}; try OuterSGD")
        for group, _, decision, _ in rounds:
            # What is there after a restart is of the cycle before, and at the start of torch's init step.
            if group["rounds_since_restart"] == 0 or decision == Restart(before=True):
                for p in group["params"]:
                    self.state.pop(p, None)
        groups = iter(self.param_groups)
        for each in self.optimizers:  # it has this one's groups and state, which loading replaces
            each.param_groups, each.state = list(islice(groups, len(each.param_groups))), self.state
            each.step()
        for group, memory, decision, _ in rounds:
            count_round(group, memory, decision)
        return loss
