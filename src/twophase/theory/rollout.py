"""Simulate the outer iteration on quadratic modes, round by round: any rule, any policy, with noise, with blocks.

In a mode with residual x the inner phase of a round makes the pseudo-gradient `g = sigma x`, and the outer rule and
the restart policy act on it as the optimizer does: the same rule objects, the same policy objects, the equations of
the rule's own form. What closed forms say about a schedule can be checked here, and adaptive policies, for which there
is no closed form, can be studied here.

The model: every replica has the same curvature. Replicas r of curvatures H_r still make `g = P x` with the mean
progress operator `P = mean_r (I - (I - inner_lr H_r)^S)`: pass its eigenvalues as sigma (in one eigenbasis, the mean
of the sigmas). What fails for them is the formula of `effective_progress` on the pooled curvature (R1); the study
`linear_network` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.policies.base import (
    AGREEMENT,
    MEASURED,
    PROBES,
    Answer,
    Never,
    RestartPolicy,
    RoundSignal,
    State,
    answered,
    ask,
)
from twophase.policies.checks import check_count
from twophase.policies.text import parse
from twophase.rule import OuterRule
from twophase.theory.inputs import (
    Floats,
    Rules,
    check_modes,
    check_weights,
    common_shape,
    rule_arrays,
)
from twophase.theory.noise import Noise, check_finite, disturbance

_LOSSES = frozenset({"loss_start", "loss_end"})
_SUPPLIED = MEASURED | _LOSSES | {PROBES, AGREEMENT, "inner_lr", "progress"}
"""What the model can show a policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Hold what happened, for every trajectory: rounds first, modes last, the trajectories' own axes between.

    Args:
        residual: x before the first round and after each, shape (rounds + 1, ..., modes).
        buffer: m of the rule's own form at the same times, after any restart, shape (rounds + 1, ..., modes).
        pseudo_gradient: g that the outer rule saw, averaged over replicas, shape (rounds, ..., modes).
        restarts: whether the buffer restarted in each round, shape (rounds, ...).
        loss: `1/2 sum_j w_j x_j^2` with weights of sum 1, at the times of `residual`, shape (rounds + 1, ...).
        not_finite: whether what the policy needs was not finite in each round, shape (rounds, ...): the trajectory has
            diverged, and the policy was not asked.
    """

    residual: Floats
    buffer: Floats
    pseudo_gradient: Floats
    restarts: NDArray[np.bool_]
    loss: Floats
    not_finite: NDArray[np.bool_]


def rollout(
    rule: Rules,
    sigma: ArrayLike,
    rounds: int,
    restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
    *,
    weights: ArrayLike | None = None,
    initial: ArrayLike = 1.0,
    noise: ArrayLike = 0.0,
    replicas: int = 1,
    seeds: int | Sequence[int] | None = None,
) -> Rollout:
    """Simulate the outer rule with a restart policy on quadratic modes.

    `g = sigma x + mean of the replicas' noise`; `m <- b m + w g` with w = 1 (sum form) or 1 - b (EMA form);
    `x <- x - lr m` (heavy ball) or `x <- x - lr (w g + b m)` (Nesterov, the new m); then the policy's restart, if any:
    `m <- retain m + inject g`, on the buffer of the rule's own form.

    The policy is asked once a round and sees what it would see in `OuterSGD`: the rule, the counters and, if it `needs`
    them, norms and cosine over all modes of its trajectory, before g is mixed in (at momentum 0 the buffer counts as
    0). What an engine would have to supply is here

    * `loss_start`, `loss_end`: the model's loss at the anchor x, and at x - g, where the replicas' mean has come to;
    * `probes`: its loss at each candidate anchor, without noise;
    * `agreement`: `|g|^2` over the mean of the replicas' own squared norms; needs at least two replicas;
    * `inner_lr`: 1, for it is constant; `progress`: the share of the rounds that are done, this one included.

    A policy that needs nothing is asked once for all trajectories of a rule, others for each. A mode that diverges
    becomes inf and nan without a warning; where that makes what the policy needs inf or nan it is not asked any more,
    and `not_finite` says so.

    Args:
        rule: an outer rule, or an array of rules of any shape B.
        sigma: effective progress of the modes, in [0, 1], modes on the last axis: shape (modes,), or leading axes that
            broadcast with B.
        rounds: T >= 1.
        restart: a policy, its text form, or a period.
        weights: w_j >= 0 of the modes in the loss, shape (modes,), normalised to sum 1; None means equal.
        initial: x before the first round: a number, or an array that broadcasts as `sigma` does.
        noise: standard deviation >= 0 of the white Gaussian noise in every replica's pseudo-gradient, mode and round;
            or the disturbances themselves, shape (rounds, replicas, modes). All rules see the same noise.
        replicas: how many draw noise of their own and are averaged, >= 1; explicit noise brings its own number.
        seeds: a count N (seeds 0 to N - 1) or a list of whole numbers >= 0: one independent draw of the noise each, as
            a leading axis of all trajectories. The draws of a seed depend neither on the other seeds nor on the number
            of rounds. None is seed 0 without the axis.

    Returns:
        Rollout with trajectories of shape ([seeds], broadcast of B and the leading axes of sigma).

    Raises:
        ValueError: a value outside its range, shapes that do not broadcast, or a policy that needs what the model
            does not have.

    Source: paper section 2; theory notes R1 to R4, loss R20.

    >>> from twophase.rule import OuterRule
    >>> run = rollout(OuterRule(1.0, 0.9, form="ema"), [0.95], 80, "5")
    >>> run.residual.shape, round(float(np.log10(run.loss[-1])), 2)
    ((81, 1), -64.54)
    """
    where = "rollout"
    modes = check_modes(where, sigma)
    share = check_weights(where, weights, modes.shape[-1])
    rounds = check_count(where, "rounds", rounds)
    disturbed = disturbance(where, noise, replicas, seeds, size=(rounds, modes.shape[-1]))
    return _simulate(
        where,
        rule,
        modes,
        rounds,
        restart=restart,
        weights=share,
        initial=check_finite(where, "initial", initial),
        noise=disturbed,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Hold modes that have an outer rule and a restart policy of their own, as a param group of `OuterSGD` has.

    Args:
        sigma: effective progress of the modes, in [0, 1], modes on the last axis.
        rule: an outer rule, or an array of rules.
        restart: a policy, its text form, or a period. It sees the norms of this block only.
        weights: weights >= 0 of the modes in the loss, not normalised: `rollout_blocks` normalises over all blocks.
            None means 1 each.
    """

    sigma: ArrayLike
    rule: Rules
    restart: RestartPolicy | str | int = Never()  # noqa: RUF009 - a frozen value
    weights: ArrayLike | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockRollout:
    """Hold what happened in each block, and to the loss over all of them.

    Args:
        blocks: a `Rollout` for each block; its loss has the block's weights normalised to sum 1.
        loss: `1/2 sum w_j x_j^2` over the modes of all blocks, weights of sum 1 over all, shape (rounds + 1, ...).
    """

    blocks: tuple[Rollout, ...]
    loss: Floats


def rollout_blocks(
    blocks: Sequence[Block],
    rounds: int,
    *,
    initial: ArrayLike = 1.0,
    noise: ArrayLike = 0.0,
    replicas: int = 1,
    seeds: int | Sequence[int] | None = None,
) -> BlockRollout:
    """Simulate blocks of modes, each with a rule and a restart policy of its own.

    Args:
        blocks: at least one; their trajectories' axes must broadcast.
        rounds: T >= 1.
        initial: as in `rollout`; its last axis, if longer than 1, runs over the modes of all blocks in their order.
        noise: as in `rollout`; explicit disturbances have the modes of all blocks on their last axis.
        replicas: as in `rollout`.
        seeds: as in `rollout`. Noise is independent between blocks, and the same as in one `rollout` of all modes.

    Returns:
        BlockRollout: a Rollout a block, and the joint loss.

    Raises:
        ValueError: no blocks, or what `rollout` refuses.

    Source: blockwise periods of the paper's section 4; theory notes R20 and A3.

    >>> from twophase.rule import OuterRule
    >>> rule = OuterRule(1.0, 0.9, form="ema")
    >>> run = rollout_blocks([Block([0.95], rule, "5"), Block([0.6, 0.5], rule, "7")], 35)
    >>> [block.residual.shape for block in run.blocks], run.loss.shape
    ([(36, 1), (36, 2)], (36,))
    """
    where = "rollout_blocks"
    blocks = list(blocks)
    wrong = next((block for block in blocks if not isinstance(block, Block)), None)
    if wrong is not None or not blocks:
        raise ValueError(
            f"{where}: blocks is {wrong if blocks else blocks!r}; give one or more, as [Block(sigma, rule, 3)]"
        )
    rounds = check_count(where, "rounds", rounds)
    names = [f"{where}: blocks[{number}]" for number in range(len(blocks))]
    sigmas = [check_modes(name, block.sigma) for name, block in zip(names, blocks, strict=True)]
    ends = np.cumsum([sigma.shape[-1] for sigma in sigmas]).tolist()
    modes = [slice(end - sigma.shape[-1], end) for sigma, end in zip(sigmas, ends, strict=True)]
    start = check_finite(where, "initial", initial)
    if start.ndim == 0 or start.shape[-1] == 1:
        start = np.broadcast_to(start, (*start.shape[:-1], ends[-1]))
    if start.shape[-1] != ends[-1]:
        raise ValueError(f"{where}: initial has {start.shape[-1]} modes; give a number, or all {ends[-1]} values")
    disturbed = disturbance(where, noise, replicas, seeds, size=(rounds, ends[-1]))
    runs, raw = [], []
    for name, block, sigma, part in zip(names, blocks, sigmas, modes, strict=True):
        share = check_weights(name, block.weights, sigma.shape[-1])
        raw.append(np.ones_like(share) if block.weights is None else np.atleast_1d(block.weights))
        inputs = {"restart": block.restart, "weights": share, "initial": start[..., part], "noise": disturbed.of(part)}
        runs.append(_simulate(name, block.rule, sigma, rounds, **inputs))
    joint = check_weights(where, np.concatenate(raw), ends[-1])
    common_shape(where, **{f"blocks[{number}]": run.loss.shape[1:] for number, run in enumerate(runs)})
    with np.errstate(all="ignore"):
        loss = sum(joint[part].sum() * run.loss for run, part in zip(runs, modes, strict=True))
    return BlockRollout(tuple(runs), np.asarray(loss))


def _simulate(
    where: str,
    rule: Rules,
    sigma: Floats,
    rounds: int,
    *,
    restart: RestartPolicy | str | int,
    weights: Floats,
    initial: Floats,
    noise: Noise,
) -> Rollout:
    """Simulate a flat list of trajectories, shape (trajectories, modes); `noise` is the replicas' mean."""
    rules = rule_arrays(where, rule)
    batch = common_shape(where, rule=rules.shape, sigma=sigma.shape[:-1], initial=initial.shape[:-1])
    modes = sigma.shape[-1]
    if initial.ndim and initial.shape[-1] not in (1, modes):
        raise ValueError(f"{where}: initial has {initial.shape[-1]} modes; give a number, or all {modes} values")
    shape = batch if noise.mean is None else (*noise.mean.shape[1:-1], *batch)
    count = math.prod(shape)

    def flat(values: NDArray[Any]) -> Any:  # of shape (..., modes or 1)
        return np.broadcast_to(values, (*shape, values.shape[-1])).reshape(count, values.shape[-1])

    def of_round(values: Floats) -> Floats:  # of shape ([seeds], modes)
        return flat(values.reshape(*values.shape[:-1], *(1 for _ in batch), modes))

    sigma, lr, b, w = flat(sigma), *(flat(v[..., None]) for v in (rules.lr, rules.momentum, rules.injection))
    nesterov = flat(rules.nesterov[..., None])
    places = np.empty((rounds + 1, count, modes))
    buffers, gradients = np.zeros_like(places), np.empty((rounds, count, modes))
    restarts, not_finite = (np.zeros((rounds, count), dtype=bool) for _ in range(2))
    places[0] = flat(np.atleast_1d(initial))
    forms = flat(np.where(rules.ema, "ema", "sum")[..., None])
    columns = [column[:, 0].tolist() for column in (lr, b, nesterov, forms)]
    policy = _Asked(where, restart, [OuterRule(*row) for row in zip(*columns, strict=True)], weights, noise.replicas)
    there = (b > 0) | (policy.policy.effective(OuterRule(1.0, 0.0)).momentum > 0)
    for t in range(rounds):
        x, m = places[t], buffers[t]
        with np.errstate(all="ignore"):
            g = sigma * x
            square = (g * g).sum(axis=1) if policy.wants(AGREEMENT) else None
            if noise.mean is not None and noise.square is not None:
                mean = of_round(noise.mean[t])
                if square is not None:  # mean_r |sigma x + n_r|^2
                    square += (2 * g * mean + of_round(noise.square[t])).sum(axis=1)
                g = g + mean
            done = policy.ask((t + 1, rounds), x, g, np.where(there, m, 0.0), square)
            old = _restarted(m, g, done, before=True)
            m = _mixed(b * old + w * g, old, g, done)
            gradients[t], places[t + 1] = g, x - _stepped(lr * np.where(nesterov, b * m + w * g, m), old, g, done)
            buffers[t + 1] = _restarted(m, g, done, before=False)
        for rows, answer in done:
            restarts[t, rows], not_finite[t, rows] = answer.restarted, bool(answer.not_finite)
    with np.errstate(all="ignore"):
        loss = _loss(places, weights)
    return Rollout(
        places.reshape(rounds + 1, *shape, modes),
        buffers.reshape(rounds + 1, *shape, modes),
        gradients.reshape(rounds, *shape, modes),
        restarts.reshape(rounds, *shape),
        loss.reshape(rounds + 1, *shape),
        not_finite.reshape(rounds, *shape),
    )


def _loss(x: Floats, weights: Floats) -> Floats:
    """Return `1/2 sum_j w_j x_j^2`; a mode without weight may diverge: 0 times inf would be nan."""
    counted = weights > 0
    return 0.5 * (weights[counted] * x[..., counted] ** 2).sum(axis=-1)


Rows = slice | list[int]


class _Asked:
    """Hold a policy and its memory: of all trajectories of a rule together if it needs nothing, otherwise of each."""

    def __init__(
        self, where: str, restart: RestartPolicy | str | int, rules: list[OuterRule], weights: Floats, replicas: int
    ) -> None:
        # A policy object is taken as it is: here it needs no text form, which `parse` would ask for.
        self.policy = restart if isinstance(restart, RestartPolicy) else parse(restart)
        missing = self.policy.needs - _SUPPLIED
        if missing:
            raise ValueError(
                f"{where}: restart policy {self.policy!r} needs {', '.join(sorted(missing))}, which the model does not "
                f"have; use a policy that needs none but {', '.join(sorted(_SUPPLIED))}"
            )
        if self.wants(AGREEMENT) and replicas < 2:
            raise ValueError(
                f"{where}: restart policy {self.policy!r} needs the agreement of the replicas, and there is "
                f"{replicas}; give replicas=2 or more, and noise"
            )
        self.weights = weights
        self.rows: list[tuple[Rows, OuterRule]] = [([row], rule) for row, rule in enumerate(rules)]
        if not self.policy.needs:
            same: dict[OuterRule, list[int]] = {}
            for row, rule in enumerate(rules):
                same.setdefault(rule if self.policy.reads_rule else rules[0], []).append(row)
            self.rows = [(slice(None) if len(same) == 1 else rows, rule) for rule, rows in same.items()]
        self.states: list[State] = [self.policy.initial_state() for _ in self.rows]
        self.ages = [0] * len(self.states)

    def wants(self, name: str) -> bool:
        """True if the policy needs something."""
        return name in self.policy.needs

    def ask(
        self, number: tuple[int, int], x: Floats, g: Floats, m: Floats, square: Floats | None
    ) -> list[tuple[Rows, Answer]]:
        """Return one round's answers, and the trajectories that each is for.

        Args:
            number: of the round, and how many there are.
            x: the anchors, shape (trajectories, modes).
            g: the pseudo-gradients.
            m: the buffers.
            square: the replicas' mean squared norm, shape (trajectories,), where it is needed.
        """
        norms = _norms(g, m) if self.policy.needs & MEASURED else None
        extra: dict[str, list[float]] = {}
        if self.wants("loss_start") or self.wants("loss_end"):
            extra |= {"loss_start": _loss(x, self.weights).tolist(), "loss_end": _loss(x - g, self.weights).tolist()}
        if square is not None:
            whole = (g * g).sum(axis=1)
            extra[AGREEMENT] = np.divide(whole, square, out=np.ones_like(square), where=square != 0).tolist()
        done: list[tuple[Rows, Answer]] = []
        for index, (rows, rule) in enumerate(self.rows):
            measured = (None, None, None) if norms is None else norms[index]
            supplied = {name: values[index] for name, values in extra.items()}
            supplied |= {"inner_lr": 1.0, "progress": number[0] / number[1]}
            probes = self._probes(x[index], g[index], m[index], rule) if self.wants(PROBES) else None
            signal = RoundSignal(number[0], self.ages[index] + 1, *measured, supplied, rule, probes)
            answer = ask(self.policy, self.states[index], signal)
            self.states[index], self.ages[index] = answer.state, answer.age(self.ages[index] + 1)
            if answer.restart is not None or answer.step is not None or answer.not_finite:
                done.append((rows, answer))
        return done

    def _probes(self, x: Floats, g: Floats, m: Floats, rule: OuterRule) -> tuple[float, ...]:
        """Return the losses of the candidate anchors of one trajectory."""
        losses = []
        for decision in self.policy.candidates(rule):
            along_g, along_m = answered({}, decision).weights(rule)
            losses.append(float(_loss(x - along_g * g - (along_m * m if along_m else 0.0), self.weights)))
        return tuple(losses)


def _norms(g: Floats, m: Floats) -> list[tuple[float, float, float]]:
    """Return the norms of g and m and their cosine, as `twophase.optim.functional.angles` takes them."""
    # Squares of a trajectory may over- or underflow long before it does. Powers of two change no other bit.
    exponents = [np.frexp(np.abs(v).max(axis=1))[1] for v in (g, m)]
    g, m = (np.ldexp(v, -exponent[:, None]) for v, exponent in zip((g, m), exponents, strict=True))
    dots = [(g * g).sum(axis=1).tolist(), (m * m).sum(axis=1).tolist(), (g * m).sum(axis=1).tolist()]
    seen = []
    for gg, mm, gm, *sizes in zip(*dots, *exponents, strict=True):
        scale = gg**0.5 * mm**0.5
        cosine = gm / scale if scale != 0 else 0.0
        lengths = [float(np.ldexp(square**0.5, size)) for square, size in zip((gg, mm), sizes, strict=True)]
        seen.append((*lengths, math.copysign(1.0, cosine) if abs(cosine) > 1 else cosine))
    return seen


def _restarted(m: Floats, g: Floats, done: list[tuple[Rows, Answer]], *, before: bool) -> Floats:
    """Return the buffers after the restarts of one moment; exact zeros for retain = inject = 0, whatever m holds."""
    for rows, answer in done:
        event = answer.restart
        if event is not None and event.before == before:
            new = event.retain * m[rows] if event.retain != 0 else np.zeros_like(m[rows])
            new = new + event.inject * g[rows] if event.inject != 0 else new
            m = m.copy()
            m[rows] = np.where(np.sign(m[rows]) * np.sign(g[rows]) < 0, new, m[rows]) if event.opposed else new
    return m


def _stepped(update: Floats, m: Floats, g: Floats, done: list[tuple[Rows, Answer]]) -> Floats:
    """Return the updates, with the policy's steps in the place of the rule's own."""
    for rows, answer in done:
        if answer.step is not None:
            update[rows] = _weighed(answer.step.along_g, g[rows]) + _weighed(answer.step.along_m, m[rows])
    return update


def _mixed(m: Floats, old: Floats, g: Floats, done: list[tuple[Rows, Answer]]) -> Floats:
    """Return the buffers after the mixing, with the policy's in the place of the rule's own."""
    for rows, answer in done:
        if answer.step is not None and answer.step.mix is not None:
            retained, added = answer.step.mix
            m[rows] = _weighed(retained, old[rows]) + _weighed(added, g[rows])
    return m


def _weighed(weight: float, values: Floats) -> Floats:
    return weight * values if weight != 0 else np.zeros_like(values)  # 0 times inf would be nan
