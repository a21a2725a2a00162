"""Build the outer optimizer of some parameters from what a user chooses: a rule, a name, `auto`, or a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.names import NAMES, RULES, TORCH
from twophase.optim.outer import OuterSGD
from twophase.optim.restarting import Restarting, named_optimizer
from twophase.policies.base import Never, RestartPolicy
from twophase.policies.text import parse
from twophase.rule import OuterRule

OuterFactory = Callable[[list[tuple[str, Tensor]]], Optimizer | Sequence[Optimizer]]
OuterChoice = OuterRule | RestartPolicy | str | OuterFactory


def is_policy(outer: OuterChoice) -> bool:
    """Return whether an outer optimizer is given as a policy that needs no rule."""
    return isinstance(outer, RestartPolicy) or (isinstance(outer, str) and outer not in NAMES)


def chosen(outer: OuterChoice) -> OuterRule | OuterFactory:
    """Return the rule of a name or of a policy that needs none, such as `auto`; a rule or a function as it is.

    Raises:
        ValueError: an unknown name, a policy that needs a rule, an optimizer in the place of a function.
    """
    choices = f"an OuterRule, one of {', '.join(NAMES)}, auto, or a function of named parameters to a torch optimizer"
    if isinstance(outer, str) and outer in RULES:
        return RULES[outer]
    if isinstance(outer, str) and outer in TORCH:
        return partial(named_optimizer, method=outer)
    if is_policy(outer):
        try:
            return parse(cast("str", outer)).own_rule()
        except ValueError as error:
            raise ValueError(f"outer must be {choices}, got {outer} ({error})") from None
    if isinstance(outer, Optimizer | type) or not (isinstance(outer, OuterRule) or callable(outer)):
        raise ValueError(f"outer must be {choices}, got {outer!r:.80}")
    return outer


def outer_optimizer(
    named: Iterable[tuple[str, Tensor]],
    outer: OuterChoice,
    restart: RestartPolicy | str | int | None = None,
    signals: Collection[str] = (),
) -> Optimizer:
    """Return the outer optimizer of some parameters.

    Args:
        named: parameters by name.
        outer: a rule, a name of the table (`optim.names`), `auto`, or a function to one torch optimizer or to several.
        restart: restart policy; of another optimizer than a rule's the whole state begins anew.
        signals: names of the values that the policy of a rule will get.

    Raises:
        ValueError: as `chosen`; a function's `OuterSGD` beside a restart, or parameters that its optimizer lacks.
    """
    named = list(named)
    outer, policy = (
        chosen(outer),
        parse(cast("str", outer) if is_policy(outer) else Never() if restart is None else restart),
    )
    if isinstance(outer, OuterRule):
        return OuterSGD.from_rule(named, outer, policy, signals)
    built = outer(named)
    optimizers: list[Any] = list(built) if isinstance(built, list | tuple) else [built]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise ValueError(f"outer must build a torch optimizer, or a list of them, got {built!r:.80}")
    made: Optimizer = optimizers[0] if isinstance(built, Optimizer) else Restarting(optimizers, policy)
    if isinstance(made, OuterSGD) and policy != Never():
        raise ValueError(f"restart {policy} must be given to the OuterSGD that outer builds")
    if restart is not None and not isinstance(made, OuterSGD | Restarting):
        made = Restarting(made, policy)
    taken = {id(p) for group in getattr(made, "param_groups", []) for p in group["params"]}
    if unused := [name for name, p in named if id(p) not in taken]:
        raise ValueError(f"the {type(made).__name__} that outer built must hold every parameter, lacks {unused[0]}")
    return made
