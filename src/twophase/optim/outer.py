"""`OuterSGD`: the outer momentum step with restarts, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.functional import (
    Sweep,
    Update,
    buffer_dtype,
    outer_step_,
    restart_,
)
from twophase.optim.groups import (
    GroupRound,
    as_number,
    candidates_of,
    check_promised,
    check_round,
    complete_,
    gradient_of,
    group_round,
    listed,
    loaded_groups,
    memory_text,
    plain_number,
    rule_of,
)
from twophase.optim.products import Angles, Dots, dots
from twophase.policies.base import MEASURED, PROBES, Answer, Never, Restart, RestartPolicy, RoundSignal, answered, ask
from twophase.policies.text import parse
from twophase.rule import Form, OuterRule, check_rule

BUFFER = "momentum_buffer"  # torch.optim.SGD's key, so that its checkpoints load here


class OuterSGD(Optimizer):
    """SGD with momentum on pseudo-gradients; its momentum restarts when a policy says so.

    Each `step()` is one outer round. With g the `.grad` of a parameter x and b the momentum:

        sum form:  m <- b m + g;          x <- x - lr m   or, Nesterov,  x <- x - lr (g + b m)
        EMA form:  m <- b m + (1 - b) g;  x <- x - lr m   or, Nesterov,  x <- x - lr ((1 + b) m - b m_old)

    then, if the policy restarts after this round, `m <- retain m + inject g` (hard: m <- 0). With `Never()` in sum
    form it equals `torch.optim.SGD` (no weight decay, dampening 0) bit for bit, on parameters of float32 and float64.

    | here       | symbol | paper      |
    |------------|--------|------------|
    | `lr`       | lr     | nu (in EMA form) |
    | `momentum` | b      | beta_out   |
    | `.grad`    | g      | pseudo-gradient g_t |
    | `state[p]["momentum_buffer"]` | m | m_t |
    | period of `restart` | K | K      |

    Every argument may be set for a param group, so a restart period for a block of parameters is a param group:

        OuterSGD([{"params": embeddings, "restart": Periodic(5)}, {"params": blocks, "restart": Periodic(9)}], lr=0.7)

    All memory lies in `state` (buffers) and `param_groups` (plain numbers and text: `rounds`, `rounds_since_restart`,
    `restarts`, `policy_state`, in a `state_dict()` as JSON, and the policy in its text form), so `state_dict()` moves
    all of it: to disk, to a healing replica of torchft, through `torch.save` with `weights_only` loading. Buffers of
    16-bit parameters are float32 and stay so when loaded. Gradients are only read. A group in which no parameter has a
    gradient takes no round; in one that takes one, a parameter without a gradient stays where it is, and its buffer
    restarts with the others. A policy that is put into a param group as an object starts without memory; as text it
    takes over the memory that is there.

    Args:
        params: parameters, named parameters, or param groups.
        lr: outer learning rate in the form named, >= 0.
        momentum: in [0, 1).
        nesterov: whether the step looks ahead.
        form: `"sum"` (as torch.optim.SGD) or `"ema"` (as the restart paper).
        restart: a policy of `twophase.restart`, its text form, or a period.
        together: decide by the norms and angles of all groups that say so, instead of each group by its own. Groups
            with the same policy then restart in the same rounds, as long as they have taken the same rounds.
        signals: names of the further values that `step(signals=...)` will be given, and `"probes"` if it will be given
            `probe`; a policy that needs more is refused.

    Raises:
        ValueError: a value outside its range, a policy that is not known, or one that needs what is not promised.

    Source: paper sections 2 and 3; theory notes R2 to R4.

    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> outer = OuterSGD([x], lr=0.5, momentum=0.9, restart=2)
    >>> for _ in range(3):
    ...     x.grad = torch.tensor([0.1])
    ...     outer.step()
    >>> round(x.item(), 4), outer.param_groups[0]["rounds_since_restart"]
    (0.805, 1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        form: Form = "sum",
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
        together: bool = False,
        signals: Collection[str] = (),
    ) -> None:
        self.promised = frozenset(signals)
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "form": form, "restart": str(parse(restart))}
        defaults["together"] = together
        check_rule("OuterSGD", lr, momentum, form, nesterov)
        super().__init__(params, defaults)
        self.last_round: list[GroupRound] = []

    @classmethod
    def from_rule(
        cls,
        params: Iterable[Any],
        rule: OuterRule,
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
        signals: Collection[str] = (),
    ) -> OuterSGD:
        """The optimizer of a rule and a policy (`RestartPolicy.effective`)."""
        rule = parse(restart).effective(rule)
        options: dict[str, Any] = {"nesterov": rule.nesterov, "form": rule.form, "restart": restart, "signals": signals}
        return cls(params, rule.lr, rule.momentum, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its own `lr`, `momentum`, `nesterov`, `form` and `restart` override the defaults."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            complete_(group)
            check_promised(group, self.promised)
            _ = self.candidate_count  # refuses groups that cannot be judged together
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        signals: Mapping[str, float] | None = None,
        probe: Callable[[], float] | None = None,
        measure: bool = False,
        measured: Sequence[Dots] | None = None,
        probes: Sequence[float] | None = None,
        sweep: Sweep | None = None,
    ) -> Any:
        """Take one outer round.

        Args:
            closure: re-evaluates and returns the loss, as for any torch optimizer.
            signals: further values for policies that need them, such as losses; the same on every replica.
            probe: the loss with the parameters as they are when it is called (of several processes, the mean over
                all), for policies that weigh candidates; the same data at each call of a step. No gradient may be
                taken, for `.grad` holds the pseudo-gradient.
            measure: also leave each group's norms, cosine and gain in `last_round` (three more reads of g and m); a
                signal that is not finite is told there, too, in the place of the warning.
            measured: result of `dots()`; of several processes, the same one's for all: equal bits need not give equal
                sums on unlike machines.
            probes: the losses of the candidates where they are known already, in the place of `probe`.
            sweep: the parameters, gradients and buffers of the only group as flat vectors.

        Returns:
            The closure's value, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_round = []
        taking_part = self._taking_part()
        bare = not measure and all(option is None for option in (signals, probe, measured, probes))
        if bare and self._is_rehearsal(taking_part):
            return loss
        for group, params in taking_part:  # all of them before any: a round that is refused has not happened
            check_round(group, params, signals, probes=probes is not None or probe is not None)
        needed = frozenset().union(*(parse(group["restart"]).needs for group, _ in taking_part))
        if signals is not None:  # a tensor would go into the policies' memory as it is, and may change there
            signals = {name: float(value) if name in needed else value for name, value in signals.items()}
        if probes is None and probe is not None and self.candidate_count:
            probes = self._probe(probe)
        losses = None if probes is None else tuple(probes)
        joint = [index for index, (group, _) in enumerate(taking_part) if group["together"]]
        if measured is None and joint and (measure or self.needs_measuring):
            measured = [self._measure(group, params) for group, params in taking_part]
        all_of_them = None
        if measured is not None and joint:
            gg, mm, gm = (sum(values) for values in zip(*(measured[index] for index in joint), strict=True))
            all_of_them = Angles.of((gg, mm, gm))
        for index, (group, params) in enumerate(taking_part):
            seen = None if measured is None else Angles.of(measured[index])
            shown = all_of_them if group["together"] else seen
            self._step_group(group, params, signals, losses, measure=measure, seen=seen, shown=shown, sweep=sweep)
        return loss

    @property
    def needs(self) -> frozenset[str]:
        """What the policies of the groups need."""
        return frozenset().union(*(parse(group["restart"]).needs for group in self.param_groups))

    @property
    def needs_measuring(self) -> bool:
        """Whether the policy of any group decides by norms or angles."""
        return bool(self.needs & MEASURED)

    @property
    def candidate_count(self) -> int:
        """Number of candidates that the groups' policy wants probed; 0 if none does, a ValueError if they differ."""
        return candidates_of(self.param_groups)

    @torch.no_grad()
    def candidate(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that takes part, and what it would be after this round with the candidate of that number.

        Groups with a policy that does not probe take their rule's update in it.

        Args:
            number: of the candidate, from 0. The new tensors have the buffers' dtype.
        """
        moved: list[tuple[Tensor, Tensor]] = []
        for group, params in self._taking_part():
            policy, rule = parse(group["restart"]), rule_of(group)
            decision = policy.candidates(rule)[number] if PROBES in policy.needs else None
            along_g, along_m = answered({}, decision).weights(rule)
            for p in params:
                buffer = self.state[p].get(BUFFER) if group["momentum"] != 0 else None
                new = p.to(buffer_dtype(p), copy=True).sub_(gradient_of(p), alpha=along_g)
                moved.append((p, new if buffer is None or along_m == 0 else new.sub_(buffer, alpha=along_m)))
        return moved

    def _probe(self, probe: Callable[[], float]) -> list[float]:
        """The losses of the candidates; the parameters come out as they were."""
        before = [(p, p.clone()) for _, params in self._taking_part() for p in params]
        losses = []
        for number in range(self.candidate_count):
            try:
                for p, new in self.candidate(number):  # from where they were: each candidate is a step of its own
                    p.copy_(new)
                losses.append(as_number("OuterSGD: what probe() returned", probe()))
            finally:
                for p, old in before:
                    p.copy_(old)
        return losses

    @torch.no_grad()
    def dots(self) -> list[Dots]:
        """`<g, g>`, `<m, m>` and `<g, m>` of each group that has a gradient, before g is mixed in."""
        return [self._measure(group, params) for group, params in self._taking_part()]

    def _is_rehearsal(self, taking_part: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> bool:
        """Whether this step is one of torch.distributed.checkpoint's, which makes buffers and must be no round.

        To learn what a state holds, its `get_optimizer_state_dict` takes a step at learning rate 0 with gradients of 0
        where there is no state yet.
        """
        if self.state or not taking_part or any(group["lr"] != 0 or group["rounds"] for group, _ in taking_part):
            return False
        gradients = [gradient_of(p) for _, params in taking_part for p in params]
        if any(g.is_sparse or bool(getattr(g, "to_local", lambda g=g: g)().any()) for g in gradients):
            return False
        for group, params in taking_part:
            for p in params if group["momentum"] != 0 else ():
                self.state[p][BUFFER] = torch.zeros_like(p, dtype=buffer_dtype(p), requires_grad=False)
        return True

    def _taking_part(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """The groups that take a round, and their parameters that do."""
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        return [(group, params) for group, params in groups if params]

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        signals: Mapping[str, float] | None,
        probes: tuple[float, ...] | None,
        *,
        measure: bool,
        seen: Angles | None,
        shown: Angles | None,
        sweep: Sweep | None,
    ) -> None:
        """One group's round; `seen` are its own angles, `shown` what its policy decides by, where they are known."""
        policy = parse(group["restart"])
        if not isinstance(group["restart"], str):  # the user put a policy there: it starts without memory,
            group["policy_state"] = policy.initial_state()
            group["restart"] = str(policy)  # and becomes text, which every checkpoint can hold
        number, age = group["rounds"] + 1, group["rounds_since_restart"] + 1
        decides, angle = bool(policy.needs & MEASURED), True
        if seen is None and (decides or (measure and not (sweep is not None and sweep.measure))):
            angle = measure or "cosine" in policy.needs
            seen = Angles.of(self._measure(group, params, sweep, angle=angle))
        shown = shown or seen
        norms: tuple[float | None, float | None, float | None] = (None, None, None)
        if shown is not None:
            norms = (shown.pseudo_gradient_norm, shown.buffer_norm, shown.cosine if angle else None)
        signal = RoundSignal(number, age, *norms, signals, rule_of(group), probes)
        answer = ask(policy, group["policy_state"], signal)
        group["policy_state"] = answer.state
        group["rounds"] = number
        if sweep is not None:
            totals = self._sweep(group, params, answer, sweep)
            if seen is None and totals is not None:  # `measured` is of all shards, and the sweep's of this one
                seen = Angles.of(totals)
        else:
            self._update_and_restart(group, params, answer)
        group["restarts"] += answer.restarted
        group["rounds_since_restart"] = answer.age(age)
        if measure and seen is not None:
            self.last_round.append(group_round(group, seen, answer))
        elif answer.not_finite:
            warnings.warn(
                f"OuterSGD: in round {number} {listed(answer.not_finite)} is not finite: the run has diverged, and "
                f"restart policy {policy} cannot decide; go back to an earlier checkpoint with a smaller learning rate",
                RuntimeWarning,
                stacklevel=3,
            )

    def _update_and_restart(self, group: dict[str, Any], params: list[Tensor], answer: Answer) -> None:
        restart = answer.restart
        if restart is not None and restart.before:
            if restart.inject != 0 and group["momentum"] != 0:  # a buffer that is not there yet counts as 0
                for p in params:
                    if BUFFER not in self.state[p]:
                        self.state[p][BUFFER] = torch.zeros_like(p, dtype=buffer_dtype(p), requires_grad=False)
            self._restart(group, params, restart)
        after = None if restart is None or restart.before else restart
        old = [p for p in params if BUFFER in self.state[p]]
        self._update(group, [p for p in params if BUFFER not in self.state[p]], answer, after, fresh=True)
        self._update(group, old, answer, after, fresh=False)
        if after is not None:  # of those that have been updated, only where there is no momentum
            self._restart(group, params if group["momentum"] == 0 else [], after)

    def _sweep(self, group: dict[str, Any], params: list[Tensor], answer: Answer, sweep: Sweep) -> Dots | None:
        """The same on flat vectors, of which the group is all there is."""
        fresh = group["momentum"] != 0 and BUFFER not in self.state[params[0]]
        rule = rule_of(group)
        update = Update(float(rule.lr), rule.momentum, rule.nesterov, rule.form, fresh, answer.step, answer.restart)
        totals = sweep.run(update)
        if rule.momentum == 0 and answer.restart is not None:  # a buffer that is left over from a larger momentum
            self._restart(group, params, answer.restart)
        if fresh:
            for p, buffer in zip(params, sweep.buffers, strict=True):
                self.state[p][BUFFER] = buffer
        return totals

    def _measure(
        self, group: dict[str, Any], params: list[Tensor], sweep: Sweep | None = None, *, angle: bool = True
    ) -> Dots:
        there = group["momentum"] != 0  # one that is left over from a larger momentum takes no part
        if sweep is not None:
            totals = sweep.dots(fresh=not there or BUFFER not in self.state[params[0]], angle=angle)
            if totals is not None:
                return totals
        old = [p for p in params if there and BUFFER in self.state[p]]
        fresh = [p for p in params if not there or BUFFER not in self.state[p]]  # their m is 0
        seen = dots([gradient_of(p) for p in (old or fresh)], [self.state[p][BUFFER] for p in old], angle=angle)
        if not (old and fresh):
            return seen
        return seen[0] + dots([gradient_of(p) for p in fresh], [])[0], seen[1], seen[2]

    def _restart(self, group: dict[str, Any], params: list[Tensor], restart: Restart) -> None:
        old = [p for p in params if BUFFER in self.state[p]]
        buffers, gradients = [self.state[p][BUFFER] for p in old], [gradient_of(p) for p in old]
        restart_(buffers, gradients, restart.retain, restart.inject, opposed=restart.opposed)
        if len(params) < len(group["params"]) and restart.counts and not restart.opposed:
            # For parameters without a gradient in this round g counts as 0: the cycle that begins is theirs, too.
            resting = (p for p in group["params"] if p.grad is None)
            idle = [self.state[p][BUFFER] for p in resting if BUFFER in self.state.get(p, {})]
            restart_(idle, idle, restart.retain, 0.0)

    def _update(
        self, group: dict[str, Any], params: list[Tensor], answer: Answer, restart: Restart | None, *, fresh: bool
    ) -> None:
        buffers: list[Tensor] = []
        if group["momentum"] != 0:
            if fresh:
                for p in params:
                    self.state[p][BUFFER] = torch.empty_like(p, dtype=buffer_dtype(p), requires_grad=False)
            buffers = [self.state[p][BUFFER] for p in params]
        outer_step_(
            params,
            [gradient_of(p) for p in params],
            buffers,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            form=group["form"],
            fresh=fresh,
            step=answer.step,
            restart=restart if buffers else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer; next to tensors it holds plain numbers and text alone."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group |= {key: plain_number(value) for key, value in group.items()}
            group |= {key: bool(group[key]) for key in ("nesterov", "together")}  # NumPy's is no number
            if not isinstance(group["restart"], str):  # the user put a policy there, which has not begun yet
                policy = parse(group["restart"])
                group |= {"restart": str(policy), "policy_state": policy.initial_state()}
            # One leaf, whatever the policy remembers by now: torch.distributed.checkpoint restores those leaves alone
            # that a fresh optimizer's state has as well.
            group["policy_state"] = memory_text(group["policy_state"], group["restart"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned; float32 buffers of 16-bit parameters stay float32.

        What the state has wins over what was given here. A state of `torch.optim.SGD` loads too, unless it used
        dampening, weight decay or maximize, which an outer step has not: it has SGD's form (sum), the restart policy
        and `together` stay those given here, and rounds count from the loading.

        Raises:
            ValueError: groups that do not fit, values that this optimizer cannot honour, or a policy that needs what is
                not promised; nothing has been changed.
        """
        groups = loaded_groups(state_dict, self.param_groups, self.promised)  # refuse before anything is loaded
        super().load_state_dict(state_dict | {"param_groups": groups})
        # The base class has just cast every buffer to its parameter's dtype (and shares the others with the caller's
        # dictionary), so the buffers are put back from the original: as they were, and our own copy.
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(index, {}).get(BUFFER)
                if saved is not None:
                    self.state[param][BUFFER] = saved.to(device=param.device, dtype=buffer_dtype(param), copy=True)
                else:
                    self.state[param].pop(BUFFER, None)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets."""
        return super().__getstate__() | {"promised": self.promised}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill in what states of other versions, or of torch.optim.SGD, do not have."""
        super().__setstate__(state)
        self.last_round = []
        for group in self.param_groups:
            complete_(group)
