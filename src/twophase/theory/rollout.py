"""Simulate the outer iteration on quadratic modes, round by round: any rule, any policy, with noise, with blocks.

In a mode with residual x the inner phase of a round makes the pseudo-gradient `g = sigma x`, with every replica of the
same curvature. Replicas r of curvatures H_r still make `g = P x` with the mean progress operator
`P = mean_r (I - (I - inner_lr H_r)^S)`: pass its eigenvalues as sigma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.optim.schedules import Schedule
from twophase.restart import MEASURED, Never, Restart, RestartPolicy, RoundSignal, State, Step, age_after, ask, parse
from twophase.theory.checks import Floats, count, counts, numbers, progress_of, shares
from twophase.theory.rules import AnyRule, Rules

_SUPPLIED = MEASURED | {"inner_lr", "progress"}
"""Signals that the model can supply to a policy."""
_LARGEST = 1e300


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Hold the record of every trajectory: rounds first, modes last, the axes of trajectories between.

    Args:
        residual: x before the first round and after each, shape (rounds + 1, ..., modes).
        buffer: m of the rule's own form at the same times, after any restart, the same shape.
        pseudo_gradient: g that the outer rule saw, averaged over replicas, shape (rounds, ..., modes).
        restarts: True where the buffer restarted in a round, shape (rounds, ...).
        loss: `1/2 sum_j w_j x_j^2` with weights of sum 1, at the times of `residual`, shape (rounds + 1, ...).
    """

    residual: Floats
    buffer: Floats
    pseudo_gradient: Floats
    restarts: NDArray[np.bool_]
    loss: Floats


def rollout(
    rule: AnyRule,
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

    The policy is asked once a round and sees the signals of `OuterSGD`: the counters and, if it `needs` them, norms
    and cosine over all modes of its trajectory, before g is mixed in (at momentum 0 the buffer counts as 0); of a run's
    further signals `inner_lr`, which is 1, and `progress`, the share of the rounds that are done, this one included.

    Numbers are doubles: what falls below 1e-308 becomes 0, and `log_final_loss` still has its logarithm.

    Args:
        rule: an outer rule, or an array of rules of any shape B.
        sigma: effective progress in [0, 1], shape (modes,), or with leading axes that broadcast with B. Trajectories
            have the shape ([seeds], broadcast of B and these axes).
        rounds: T >= 1.
        restart: a policy, its text form, or a period.
        schedule: schedule of the outer learning rate and momentum over the rounds, or its text form.
        weights: w_j >= 0 of the modes in the loss, shape (modes,), normalised to sum 1; None means equal.
        initial: x before the first round: a number, or an array that broadcasts as `sigma` does.
        noise: standard deviation >= 0 of the white Gaussian noise in every replica's pseudo-gradient, mode and round;
            or the disturbances themselves, shape (rounds, replicas, modes). All rules see the same noise.
        replicas: number of replicas, with independent noise, in the mean, >= 1; explicit noise has its own number.
        seeds: a count N (seeds 0 to N - 1) or a list of whole numbers >= 0, the leading axis of all trajectories, each
            with a draw of the noise that is its own. None is seed 0 without the axis.

    Raises:
        ValueError: values out of range, or a mode of a trajectory that grows beyond 1e300.

    Source: paper section 2; theory notes R1 to R4, loss R20.

    >>> run = rollout(OuterRule(1.0, 0.9, form="ema"), [0.95], 80, "5")
    >>> run.residual.shape, round(float(np.log10(run.loss[-1])), 2)
    ((81, 1), -64.54)
    """
    return _rollouts([Block(sigma, rule, restart, weights, schedule)], rounds, initial, noise, replicas, seeds)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Hold modes with their outer rule and restart policy, as a param group of `OuterSGD` has.

    Fields are the arguments of `rollout`. The policy sees the norms of this block only; the weights are not normalised
    here but over all blocks, and None means 1 each.
    """

    sigma: ArrayLike
    rule: AnyRule
    restart: RestartPolicy | str | int = Never()  # noqa: RUF009 - a frozen value
    weights: ArrayLike | None = None
    schedule: Schedule | str = "constant"


@dataclass(frozen=True, slots=True, eq=False)
class BlockRollout:
    """Hold a `Rollout` of each block, and the loss over the modes of all blocks, shape (rounds + 1, ...)."""

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

    Arguments are those of `rollout`; the last axes of `initial` and `noise` run over the modes of all blocks in order.

    Source: blockwise periods of the paper's section 4; theory notes R20 and A3.

    >>> rule = OuterRule(1.0, 0.9, form="ema")
    >>> run = rollout_blocks([Block([0.95], rule, "5"), Block([0.6, 0.5], rule, "7")], 35)
    >>> [block.residual.shape for block in run.blocks], run.loss.shape
    ([(36, 1), (36, 2)], (36,))
    """
    if not np.iterable(blocks) or not len(blocks) or not all(isinstance(block, Block) for block in blocks):
        raise ValueError(f"blocks must be one or more, as [Block(sigma, rule, 3)], got {blocks!r:.100}")
    runs = _rollouts(blocks, rounds, initial, noise, replicas, seeds)
    modes = [run.residual.shape[-1] for run in runs]
    each = [np.ones(n) if b.weights is None else np.atleast_1d(b.weights) for b, n in zip(blocks, modes, strict=True)]
    joint = np.split(shares(np.concatenate(each), sum(modes)), np.cumsum(modes)[:-1])
    loss = sum(share.sum() * run.loss for share, run in zip(joint, runs, strict=True))
    return BlockRollout(tuple(runs), np.asarray(loss))


def _rollouts(  # noqa: PLR0917 - the arguments of both public functions
    blocks: Sequence[Block],
    rounds: int,
    initial: ArrayLike,
    noise: ArrayLike,
    replicas: int,
    seeds: int | Sequence[int] | None,
) -> list[Rollout]:
    """Simulate each block by itself, with its part of the initial values and of the noise."""
    horizon = count("rounds", rounds)
    sigmas = [progress_of(block.sigma) for block in blocks]
    *ends, total = np.cumsum([sigma.shape[-1] for sigma in sigmas]).tolist()
    start = np.atleast_1d(numbers("initial", initial))
    starts = np.split(np.broadcast_to(start, (*start.shape[:-1], total)), ends, axis=-1)
    noises = np.split(_disturbance(noise, replicas, seeds, (horizon, total)), ends, axis=-1)
    return [_trajectories(*each) for each in zip(blocks, sigmas, starts, noises, strict=True)]


def _disturbance(noise: ArrayLike, replicas: int, seeds: int | Sequence[int] | None, size: tuple[int, int]) -> Floats:
    """Return the replicas' mean disturbance, (rounds, [seeds], modes): from its standard deviation, or as given."""
    values, number = numbers("noise", noise), count("replicas", replicas)
    if values.ndim:
        if values.ndim != 3 or values.shape[::2] != size or not values.shape[1]:
            shape = f"(rounds, replicas, modes) = ({size[0]}, replicas, {size[1]})"
            raise ValueError(f"noise must be a standard deviation or have shape {shape}, got shape {values.shape}")
        if number not in (1, values.shape[1]) or seeds is not None:
            raise ValueError(f"replicas and seeds must be left out with explicit noise, got {replicas} and {seeds}")
        return values.mean(axis=1)
    deviation = float(numbers("noise", noise, 0))
    if seeds is None:
        return deviation * _draws(0, number, size) if deviation else np.zeros(size)
    chosen = counts("seeds", seeds, least=0 if np.ndim(seeds) else 1)
    each = chosen.ravel().tolist() if chosen.ndim else range(int(chosen))
    return deviation * np.stack([_draws(seed, number, size) for seed in each], axis=1)


def _draws(seed: int, replicas: int, size: tuple[int, int]) -> Floats:
    """Draw standard normals; return their mean over the replicas, (rounds, modes), a stream for each replica."""
    streams = [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(each,))) for each in range(replicas)]
    return sum((stream.standard_normal(size) for stream in streams), np.zeros(size)) / replicas


def _trajectories(block: Block, sigma: Floats, initial: Floats, noise: Floats) -> Rollout:
    """Simulate the modes of a block: all trajectories at once, or one by one where a policy sees each of them."""
    rounds, *seeds, modes = noise.shape
    # A policy object is not parsed: here it needs no text form, which `parse` would ask for.
    policy = block.restart if isinstance(block.restart, RestartPolicy) else parse(block.restart)
    if missing := policy.needs - _SUPPLIED:
        raise ValueError(f"restart must need only {', '.join(sorted(_SUPPLIED))}; {policy!r} needs {sorted(missing)}")
    rules, weight, schedule = Rules.of(block.rule), shares(block.weights, modes), Schedule.parse(block.schedule)
    batch = np.broadcast_shapes(rules.shape, sigma.shape[:-1], initial.shape[:-1])
    shape = (*seeds, *batch)
    rules = rules.column(*shape)
    sigma, initial = (np.broadcast_to(values, (*shape, modes)) for values in (sigma, initial))
    noise = np.broadcast_to(noise.reshape(rounds, *seeds, *[1] * len(batch), modes), (rounds, *shape, modes))
    x, m = (np.zeros((rounds + 1, *shape, modes)) for _ in range(2))
    g, restarts = np.zeros((rounds, *shape, modes)), np.zeros((rounds, *shape), dtype=bool)
    for each in list(np.ndindex(*shape)) if policy.needs else [(...,)]:
        part = (slice(None), *each)
        x[part][0] = initial[each]
        fired = _simulate(rules[each], schedule, policy, sigma[each], noise[part], out=(x[part], m[part], g[part]))
        restarts[part] = fired.reshape(rounds, *[1] * (restarts[part].ndim - 1))
    counted = weight > 0
    with np.errstate(over="ignore"):
        loss = 0.5 * (weight[counted] * x[..., counted] ** 2).sum(axis=-1)
    return Rollout(x, m, g, restarts, loss)


def _simulate(
    rules: Rules,
    schedule: Schedule,
    policy: RestartPolicy,
    sigma: Floats,
    noise: Floats,
    *,
    out: tuple[Floats, Floats, Floats],
) -> NDArray[np.bool_]:
    """Fill in x, m and g of trajectories with one decision a round; return the rounds with a restart."""
    (x, m, g), rounds = out, len(noise)
    keeps_buffer = (rules.momentum > 0) | policy.takes_steps
    state: State = {}
    age, fired = 0, np.zeros(rounds, dtype=bool)
    for t in range(rounds):
        now = _scheduled(rules, schedule, t + 1, rounds)
        push, old = sigma * x[t] + noise[t], m[t]
        seen = _measured(push, np.where(keeps_buffer, old, 0.0)) if policy.needs & MEASURED else (None, None, None)
        signal = RoundSignal(t + 1, age + 1, *seen, {"inner_lr": 1.0, "progress": (t + 1) / rounds})
        state, decision, _ = ask(policy, state, signal)
        age, fired[t] = age_after(decision, age + 1), isinstance(decision, Restart)
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(decision, Restart) and decision.before:
                old = decision.retain * old + decision.inject * push
            if isinstance(decision, Step):
                new = decision.momentum * old + push
                update = decision.lr * new
            else:
                new = now.momentum * old + now.injection * push
                update = now.lr * np.where(now.nesterov, now.momentum * new + now.injection * push, new)
            if isinstance(decision, Restart) and not decision.before:
                new = decision.retain * new + decision.inject * push
            g[t], m[t + 1], x[t + 1] = push, new, x[t] - update
        if not np.all(np.abs(x[t + 1]) <= _LARGEST):
            raise ValueError(f"rule must keep x below 1e300, got more in round {t + 1}; see log_final_loss")
    return fired


def _scheduled(rules: Rules, schedule: Schedule, number: int, rounds: int) -> Rules:
    """Return the rules of a round."""
    if schedule.kind == "constant":
        return rules
    now = [schedule.at(rules[index], number, rounds) for index in np.ndindex(*rules.shape)]
    return Rules.of(np.array(now, dtype=object).reshape(rules.shape))


def _measured(g: Floats, m: Floats) -> tuple[float, float, float]:
    """Return the norms of g and m and their cosine, 0 where one is 0."""
    # In units of the largest entry, so that no square over- or underflows.
    units = [float(np.abs(values).max()) or 1.0 for values in (g, m)]
    g, m = g / units[0], m / units[1]
    lengths = float(np.linalg.norm(g)), float(np.linalg.norm(m))
    cosine = float(np.sum(g * m)) / (lengths[0] * lengths[1]) if all(lengths) else 0.0
    return units[0] * lengths[0], units[1] * lengths[1], float(np.clip(cosine, -1, 1))
