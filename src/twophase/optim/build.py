"""The outer optimizer of some parameters from what a user chooses: a rule, a name, `auto`, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.names import NAMES, RULES, TORCH
from twophase.optim.outer_sgd import OuterSGD
from twophase.optim.restarting import Restarting
from twophase.restart import Auto, Never, RestartPolicy, parse
from twophase.rule import OuterRule

OuterFactory = Callable[[list[tuple[str, Tensor]]], Optimizer | Sequence[Optimizer]]
OuterChoice = OuterRule | RestartPolicy | str | OuterFactory


def outer_optimizer(
    named: Iterable[tuple[str, Tensor]], outer: OuterChoice, restart: RestartPolicy | str | int | None = None
) -> Optimizer:
    """Return the outer optimizer of some parameters.

    Args:
        named: parameters by name.
        outer: a rule; a name of the table (`optim.names`), or "auto"; a policy that takes the steps itself; or a
            function of the named parameters to a torch optimizer, or to several over parts of them.
        restart: restart policy; of another optimizer than a rule's the whole state begins anew.

    Raises:
        ValueError: another choice; a restart beside a policy, or beside an optimizer that restarts; parameters that the
            function's optimizer lacks.
    """
    named, policy = list(named), Never() if restart is None else parse(restart)
    outer = _BY_NAME.get(outer, outer) if isinstance(outer, str) else outer
    if isinstance(outer, RestartPolicy) and outer.takes_steps and restart is None:
        return OuterSGD(named, 1.0, restart=outer)
    if isinstance(outer, OuterRule):
        return OuterSGD(named, outer.lr, outer.momentum, nesterov=outer.nesterov, form=outer.form, restart=policy)
    if isinstance(outer, Optimizer | type) or not callable(outer):
        choices = f"an OuterRule, one of {', '.join(NAMES)}, auto without a restart, or a function to a torch optimizer"
        raise ValueError(f"outer must be {choices}, got {outer!r:.80}")
    built = outer(named)
    optimizers = list(built) if isinstance(built, Sequence) else [built]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise ValueError(f"outer must build a torch optimizer, or a list of them, got {built!r:.80}")
    for each in optimizers:
        closure = signature(each.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            raise ValueError(f"outer must build an optimizer whose step() needs no closure, got {type(each).__name__}")
    restarts = isinstance(built, OuterSGD | Restarting)
    if restarts and policy != Never():
        raise ValueError(f"restart {policy} must be given to the {type(built).__name__} that outer builds")
    keep = restarts or (restart is None and built is optimizers[0])
    made: Optimizer = optimizers[0] if keep else Restarting(optimizers, policy)
    taken = {id(p) for group in made.param_groups for p in group["params"]}
    if unused := [name for name, p in named if id(p) not in taken]:
        raise ValueError(f"outer must build an optimizer of every parameter, lacks {unused[0]}")
    return made


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


_BY_NAME: dict[str, OuterChoice] = {**RULES, **{m: partial(named_optimizer, method=m) for m in TORCH}, "auto": Auto()}
