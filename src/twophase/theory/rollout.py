"""Simulate the outer iteration on quadratic modes, round by round: any rule, any policy, with noise, with blocks.

In a mode with residual x the inner phase of a round makes the pseudo-gradient `g = sigma x`. The outer rule and the
restart policy act on it as in the optimizer, with the same objects and the equations of the rule's form.

The model: every replica has the same curvature. Replicas r of curvatures H_r still make `g = P x` with the mean
progress operator `P = mean_r (I - (I - inner_lr H_r)^S)`. Pass its eigenvalues as sigma (in one eigenbasis, the mean
of the sigmas). The study `linear_network` measures what fails for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.optim.schedules import Schedule
from twophase.restart import (
    MEASURED,
    Decision,
    Never,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    age_after,
    ask,
    parse,
)
from twophase.rule import OuterRule
from twophase.theory.inputs import (
    Floats,
    Rules,
    check_count,
    check_finite,
    check_modes,
    check_weights,
    common_shape,
    rule_arrays,
)
from twophase.theory.noise import disturbance

_SUPPLIED = MEASURED | {"inner_lr", "progress"}
"""Signals that the model can supply to a policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Hold the record of every trajectory: rounds first, modes last, the axes of trajectories between.

    Args:
        residual: x before the first round and after each, shape (rounds + 1, ..., modes).
        buffer: m of the rule's own form at the same times, after any restart, the same shape.
        pseudo_gradient: g that the outer rule saw, averaged over replicas, shape (rounds, ..., modes).
        restarts: True where the buffer restarted in a round, shape (rounds, ...).
        loss: `1/2 sum_j w_j x_j^2` with weights of sum 1, at the times of `residual`, shape (rounds + 1, ...).
        not_finite: True where a signal that the policy needs was not finite, shape (rounds, ...): the trajectory has
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
    schedule: Schedule | str = "constant",
    weights: ArrayLike | None = None,
    initial: ArrayLike = 1.0,
    noise: ArrayLike = 0.0,
    replicas: int = 1,
    seeds: int | Sequence[int] | None = None,
) -> Rollout:
    """Simulate the outer rule with a restart policy on quadratic modes.

    `g = sigma x + mean of the replicas' noise`; `m <- b m + w g` with w = 1 (sum form) or 1 - b (EMA form). Then
    `x <- x - lr m` (heavy ball) or `x <- x - lr (w g + b m)` (Nesterov, the new m). Then the policy's restart, if any:
    `m <- retain m + inject g`, on the buffer of the rule's own form.

    The policy is asked once a round and sees the signals of `OuterSGD`: the counters and, if it `needs` them,
    norms and cosine. These are over all modes of its trajectory, before g is mixed in (at momentum 0 the buffer counts
    as 0). Of a run's further signals there are `inner_lr`, which is 1, for it is constant, and `progress`, the share of
    the rounds that are done, this one included.

    A policy that needs nothing is asked once for all trajectories, others for each. A mode that diverges
    becomes inf and nan without a warning. Where a signal that the policy needs is inf or nan, the policy is no longer
    asked, and `not_finite` says so.

    Args:
        rule: an outer rule, or an array of rules of any shape B.
        sigma: effective progress in [0, 1], shape (modes,), or with leading axes that broadcast with B.
        rounds: T >= 1.
        restart: a policy, its text form, or a period.
        schedule: schedule of the outer learning rate and momentum over the rounds, or its text form.
        weights: w_j >= 0 of the modes in the loss, shape (modes,), normalised to sum 1; None means equal.
        initial: x before the first round: a number, or an array that broadcasts as `sigma` does.
        noise: standard deviation >= 0 of the white Gaussian noise in every replica's pseudo-gradient, mode and round;
            or the disturbances themselves, shape (rounds, replicas, modes). All rules see the same noise.
        replicas: number of replicas, with independent noise, in the mean, >= 1; explicit noise has its own number.
        seeds: a count N (seeds 0 to N - 1) or a list of whole numbers >= 0, the leading axis of all trajectories. A
            seed's draw of the noise does not depend on the other seeds or the number of rounds. None is seed 0 without
            the axis.

    Returns:
        Rollout with trajectories of shape ([seeds], broadcast of B and the leading axes of sigma).

    Source: paper section 2; theory notes R1 to R4, loss R20.

    >>> run = rollout(OuterRule(1.0, 0.9, form="ema"), [0.95], 80, "5")
    >>> run.residual.shape, round(float(np.log10(run.loss[-1])), 2)
    ((81, 1), -64.54)
    """
    runs, _ = _rollouts(
        "rollout", {"rollout": Block(sigma, rule, restart, weights, schedule)}, rounds, initial, noise, replicas, seeds
    )
    return runs[0]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Hold modes with their outer rule and restart policy, as a param group of `OuterSGD` has.

    Args:
        sigma: effective progress of the modes, in [0, 1], modes on the last axis.
        rule: an outer rule, or an array of rules.
        restart: a policy, its text form, or a period. It sees the norms of this block only.
        weights: weights >= 0 of the modes in the loss, one of them > 0, not normalised: `rollout_blocks` normalises
            over all blocks. None means 1 each.
        schedule: schedule of the outer learning rate and momentum, or its text form.
    """

    sigma: ArrayLike
    rule: Rules
    restart: RestartPolicy | str | int = Never()  # noqa: RUF009 - a frozen value
    weights: ArrayLike | None = None
    schedule: Schedule | str = "constant"


@dataclass(frozen=True, slots=True, eq=False)
class BlockRollout:
    """Hold the record of each block, and the loss over all of them.

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
    """Simulate blocks of modes, each with its rule and restart policy.

    Args:
        blocks: one block or more; their trajectories' axes must broadcast.
        rounds: T >= 1.
        initial: x before the first round; its last axis, if longer than 1, runs over the modes of all blocks in order.
        noise: noise as in `rollout`, over the modes of all blocks; it is independent between blocks.
        replicas: number of replicas, as in `rollout`.
        seeds: seeds of the noise, as in `rollout`.

    Source: blockwise periods of the paper's section 4; theory notes R20 and A3.

    >>> rule = OuterRule(1.0, 0.9, form="ema")
    >>> run = rollout_blocks([Block([0.95], rule, "5"), Block([0.6, 0.5], rule, "7")], 35)
    >>> [block.residual.shape for block in run.blocks], run.loss.shape
    ([(36, 1), (36, 2)], (36,))
    """
    where = "rollout_blocks"
    blocks = list(blocks)
    refused = next((block for block in blocks if not isinstance(block, Block)), None)
    if refused is not None or not blocks:
        raise ValueError(
            f"{where}: blocks is {refused if blocks else blocks!r}; give one or more, as [Block(sigma, rule, 3)]"
        )
    by_name = {f"{where}: blocks[{number}]": block for number, block in enumerate(blocks)}
    runs, modes = _rollouts(where, by_name, rounds, initial, noise, replicas, seeds)
    weights = [
        np.ones(size) if block.weights is None else np.atleast_1d(block.weights)
        for block, size in zip(blocks, modes, strict=True)
    ]
    joint = np.split(check_weights(where, np.concatenate(weights), sum(modes)), np.cumsum(modes)[:-1])
    common_shape(where, **{f"blocks[{number}]": run.loss.shape[1:] for number, run in enumerate(runs)})
    with np.errstate(all="ignore"):
        loss = sum(share.sum() * run.loss for share, run in zip(joint, runs, strict=True))
    return BlockRollout(tuple(runs), np.asarray(loss))


def _rollouts(  # noqa: PLR0917 - the arguments of both public functions
    where: str,
    blocks: Mapping[str, Block],
    rounds: int,
    initial: ArrayLike,
    noise: ArrayLike,
    replicas: int,
    seeds: int | Sequence[int] | None,
) -> tuple[list[Rollout], list[int]]:
    """Check the arguments and simulate each block by itself; return the rollouts and the blocks' numbers of modes."""
    rounds = check_count(where, "rounds", rounds)
    sigmas = [check_modes(name, block.sigma) for name, block in blocks.items()]
    modes = [sigma.shape[-1] for sigma in sigmas]
    total = sum(modes)
    start = np.atleast_1d(check_finite(where, "initial", initial))
    if start.shape[-1] not in (1, total):
        raise ValueError(f"{where}: initial has {start.shape[-1]} modes; give a number, or all {total} values")
    start = np.broadcast_to(start, (*start.shape[:-1], total))
    disturbed = disturbance(where, noise, replicas, seeds, size=(rounds, total))
    runs = []
    for (name, block), sigma, end in zip(blocks.items(), sigmas, np.cumsum(modes).tolist(), strict=True):
        part = slice(end - sigma.shape[-1], end)
        runs.append(_simulate(name, block, sigma, start[..., part], disturbed[..., part]))
    return runs, modes


def _simulate(where: str, block: Block, sigma: Floats, initial: Floats, noise: Floats) -> Rollout:
    """Simulate the modes of a block; all trajectories are rows of arrays (trajectories, modes)."""
    rounds, *seeds, modes = noise.shape
    # A policy object is not parsed: here it needs no text form, which `parse` would ask for.
    restart = block.restart if isinstance(block.restart, RestartPolicy) else parse(block.restart)
    schedule = Schedule.parse(block.schedule)
    rules = rule_arrays(where, block.rule)
    weights = check_weights(where, block.weights, sigma.shape[-1])
    batch = common_shape(where, rule=rules.shape, sigma=sigma.shape[:-1], initial=initial.shape[:-1])
    shape = (*seeds, *batch)
    count = math.prod(shape)

    def flat(values: NDArray[Any]) -> Any:  # of shape (..., modes or 1)
        return np.broadcast_to(values, (*shape, values.shape[-1])).reshape(count, values.shape[-1])

    def of_round(values: Floats) -> Floats:  # of shape ([seeds], modes)
        return flat(values.reshape(*seeds, *(1 for _ in batch), modes))

    forms = np.where(rules.ema, "ema", "sum")
    columns = [flat(values[..., None]) for values in (rules.lr, rules.momentum, rules.nesterov, forms)]
    policy = _Policy(where, restart, count)
    sigma, (lr, b, nesterov, _), w = flat(sigma), columns, flat(rules.injection[..., None])
    positions, buffers = (np.zeros((rounds + 1, count, modes)) for _ in range(2))
    gradients = np.empty((rounds, count, modes))
    restarts, not_finite = (np.zeros((rounds, count), dtype=bool) for _ in range(2))
    positions[0] = flat(initial)
    keeps_buffer = (b > 0) | restart.takes_steps
    rows_by_rule: dict[OuterRule, list[int]] = {}
    if schedule.kind != "constant":
        lr, b, w = (column.copy() for column in (lr, b, w))
        for row, values in enumerate(np.hstack(columns, dtype=object)):
            rows_by_rule.setdefault(OuterRule(*values), []).append(row)
    for t in range(rounds):
        x, old = positions[t], buffers[t].copy()
        for rule, chosen in rows_by_rule.items():
            now = schedule.at(rule, t + 1, rounds)
            lr[chosen], b[chosen], w[chosen] = now.lr, now.momentum, now.injection
        with np.errstate(all="ignore"):
            g = sigma * x + of_round(noise[t])
            answers = policy.ask(t + 1, (t + 1) / rounds, g, np.where(keeps_buffer, old, 0.0))
            for rows, decision, _ in answers:
                if isinstance(decision, Restart) and decision.before:
                    old[rows] = restarted(decision, old[rows], g[rows])
            seen = Round(lr, b, w, g, old)
            m, update = momentum_sgd(seen, nesterov)
            for rows, decision, broken in answers:
                apply_decision(decision, rows, seen, m, update)
                restarts[t, rows], not_finite[t, rows] = isinstance(decision, Restart), bool(broken)
            gradients[t], positions[t + 1], buffers[t + 1] = g, x - update, m
    with np.errstate(all="ignore"):
        loss = _loss(positions, weights)

    def shaped(values: NDArray[Any], *axes: int) -> NDArray[Any]:
        return values.reshape(len(values), *shape, *axes)

    return Rollout(
        shaped(positions, modes),
        shaped(buffers, modes),
        shaped(gradients, modes),
        shaped(restarts),
        shaped(loss),
        shaped(not_finite),
    )


@dataclass(frozen=True, slots=True)
class Round:
    """Hold what the arithmetic of a round sees, with rows for trajectories.

    Args:
        lr, momentum, injection: numbers of the rule, after the schedule, shape (rows, 1).
        g: the pseudo-gradient, shape (rows, modes).
        m: the momentum buffer.
    """

    lr: Floats
    momentum: Floats
    injection: Floats
    g: Floats
    m: Floats


def momentum_sgd(now: Round, nesterov: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the new m and the update of a rule."""
    m = now.momentum * now.m + now.injection * now.g
    return m, now.lr * np.where(nesterov, now.momentum * m + now.injection * now.g, m)


def apply_decision(decision: Decision, rows: Rows, now: Round, m: Floats, update: Floats) -> None:
    """Put a policy's step or restart into some trajectories' new buffer and update."""
    if isinstance(decision, Step):
        m[rows] = _combined(decision.momentum, now.m[rows], 1.0, now.g[rows])
        update[rows] = decision.lr * m[rows]
    elif isinstance(decision, Restart) and not decision.before:
        m[rows] = restarted(decision, m[rows], now.g[rows])


def _loss(x: Floats, weights: Floats) -> Floats:
    """Return `1/2 sum_j w_j x_j^2`; a mode without weight may diverge: 0 times inf would be nan."""
    counted = weights > 0
    return 0.5 * (weights[counted] * x[..., counted] ** 2).sum(axis=-1)


def restarted(restart: Restart, m: Floats, g: Floats) -> Floats:
    """Return the buffer after a restart; exact zeros of a hard one, also of a NaN in m."""
    return _combined(restart.retain, m, restart.inject, g)


def _combined(a: float, x: Floats, b: float, y: Floats) -> Floats:
    """Return `a x + b y` without the terms of weight 0, since 0 times inf would be nan."""
    first = a * x if a != 0 else np.zeros_like(x)
    return first + b * y if b != 0 else first


Rows = slice | list[int]


class _Policy:
    """Hold a policy and its memory: of all trajectories together if it needs nothing, otherwise of each."""

    def __init__(self, where: str, policy: RestartPolicy, count: int) -> None:
        self.policy = policy
        missing = self.policy.needs - _SUPPLIED
        if missing:
            raise ValueError(
                f"{where}: restart policy {self.policy!r} needs {', '.join(sorted(missing))}, which the model does not "
                f"have; use a policy that needs none but {', '.join(sorted(_SUPPLIED))}"
            )
        self.rows: list[Rows] = [[row] for row in range(count)] if self.policy.needs else [slice(None)]
        self.states: list[State] = [{} for _ in self.rows]
        self.ages = [0] * len(self.states)

    def ask(self, number: int, progress: float, g: Floats, m: Floats) -> list[tuple[Rows, Decision, tuple[str, ...]]]:
        """Return one round's decisions other than None and what was not finite, each with its trajectories."""
        norms = _norms(g, m) if self.policy.needs & MEASURED else None
        extra = {"inner_lr": 1.0, "progress": progress}
        answers: list[tuple[Rows, Decision, tuple[str, ...]]] = []
        for index, rows in enumerate(self.rows):
            measured = (None, None, None) if norms is None else norms[index]
            age = self.ages[index] + 1
            signal = RoundSignal(number, age, *measured, extra)
            self.states[index], decision, broken = ask(self.policy, self.states[index], signal)
            self.ages[index] = age_after(decision, age)
            if decision is not None or broken:
                answers.append((rows, decision, broken))
        return answers


def _norms(g: Floats, m: Floats) -> list[tuple[float, float, float]]:
    """Return the norms of g and m and their cosine, as an optimizer measures them."""
    # Squares of a trajectory may over- or underflow long before it does. Powers of two change no other bit.
    exponents = [np.frexp(np.abs(v).max(axis=1))[1] for v in (g, m)]
    g, m = (np.ldexp(v, -exponent[:, None]) for v, exponent in zip((g, m), exponents, strict=True))
    dots = [(g * g).sum(axis=1).tolist(), (m * m).sum(axis=1).tolist(), (g * m).sum(axis=1).tolist()]
    norms = []
    for gg, mm, gm, *sizes in zip(*dots, *exponents, strict=True):
        scale = gg**0.5 * mm**0.5
        cosine = gm / scale if scale != 0 else 0.0
        lengths = [float(np.ldexp(square**0.5, size)) for square, size in zip((gg, mm), sizes, strict=True)]
        norms.append((*lengths, math.copysign(1.0, cosine) if abs(cosine) > 1 else cosine))
    return norms
