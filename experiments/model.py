"""Spectra, rules and losses that several theory studies share. Losses are log10; "dex" is a difference of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from common import select
from twophase.figures.matplotlib_types import Axes
from twophase.figures.style import look
from twophase.restart import Periodic, RestartPolicy, mean_outer_gain
from twophase.rule import OuterRule
from twophase.theory import Block, log_final_loss, restart_table, rollout, rollout_blocks, rule_grid
from twophase.theory.rules import AnyRule

Curve: TypeAlias = tuple[str, OuterRule, "RestartPolicy | str | int | tuple[int, ...]"]
"""A curve's name, rule, and restarts: one policy for all modes, or a period for each block."""
LOG_10 = float(np.log(10))
SIX = (0.95, 0.85, 0.75, 0.60, 0.45, 0.30)
"""The paper's six modes (its figure 1b)."""
BLOCK_INTERVALS = ((0.92, 1.00), (0.55, 0.65), (0.18, 0.26))
"""The paper's three blocks (its figure 1c); it does not say how many modes each has."""
WIDE = tuple(float(s) for s in np.geomspace(0.01, 1, 12))
"""A wide spectrum of our own: 12 modes, log-spaced over two decades."""
HEAVY_BALL = OuterRule(1.0, 0.9, form="ema")
NESTEROV = OuterRule(1.0, 0.9, nesterov=True, form="ema")
"""The rule of the paper's figure 1, with and without look-ahead."""
KINDS = {"HB": False, "NAG": True}
"""Whether a kind of rule looks ahead."""
PLAIN = OuterRule(1.0, 0.0, form="ema")
"""The same learning rate without momentum: outer SGD."""
USUAL = OuterRule(0.7, 0.9, nesterov=True)
"""DiLoCo's usual rule."""
AVERAGING = OuterRule(1.0, 0.0)
"""No momentum: the anchor becomes the mean of the replicas."""


def blocks(modes: int = 9) -> list[np.ndarray]:
    """Return sigma of the modes of each of the three blocks, equispaced."""
    return [np.linspace(*ends, modes) for ends in BLOCK_INTERVALS]


def log10_loss(rule: AnyRule, sigma: ArrayLike, rounds: int, period: ArrayLike | None = None) -> Any:
    """Return the exact log10 of the final loss (`theory.log_final_loss`); no period is no restart. Initial loss 1/2."""
    return log_final_loss(rule, sigma, rounds, rounds if period is None else period) / LOG_10


def log10_joint(rule: OuterRule, parts: Sequence[ArrayLike], rounds: int, periods: Iterable[int]) -> float:
    """Return log10 of the final loss over blocks of modes that have a period each; every mode weighs the same."""
    sizes = [np.size(part) for part in parts]
    losses = [
        np.log(size) + log_final_loss(rule, part, rounds, period)
        for part, size, period in zip(parts, sizes, periods, strict=True)
    ]
    return float((np.logaddexp.reduce(losses) - np.log(sum(sizes))) / LOG_10)


def same_gain(rule: OuterRule, period: int, rounds: int) -> OuterRule:
    """Return the gain-matched control: outer SGD at the rule's mean outer gain with restarts (theory note R31)."""
    return OuterRule(mean_outer_gain(rule, Periodic(period), rounds), 0.0, form="ema")


def tuned_momentum(sigma: ArrayLike, rounds: int, momenta: np.ndarray, *, nesterov: bool) -> dict[str, Any]:
    """Return the momentum whose final loss without restarts is least on a grid, at learning rate 1 (EMA form)."""
    losses = log10_loss(rule_grid(1.0, momenta, nesterov, "ema"), sigma, rounds)
    best = int(np.argmin(losses))
    return {"points": len(momenta), "momentum": float(momenta[best]), "log10_loss": float(losses[best])}


def curve_rows(
    parts: Sequence[ArrayLike], rounds: int, curves: Mapping[str, Curve], columns: tuple[str, str], **values: Any
) -> list[dict[str, Any]]:
    """Return a row for each curve and round with its log10 loss, None where the loss is 0 or not finite.

    `parts` are sigma of each block's modes; `columns` name the curve's kind and text, and `values` come before them.
    """
    rows = []
    for kind, (name, rule, restart) in curves.items():
        if isinstance(restart, tuple):
            each = [Block(part, rule, period) for part, period in zip(parts, restart, strict=True)]
            loss = rollout_blocks(each, rounds).loss
        else:
            loss = rollout(rule, np.concatenate(parts), rounds, restart).loss
        with np.errstate(divide="ignore"):
            logs = np.log10(loss)
        place = values | dict(zip(columns, (kind, name), strict=True))
        rows += [place | {"round": t, "log10_loss": v if np.isfinite(v) else None} for t, v in enumerate(logs.tolist())]
    return rows


def log_residuals(rules: np.ndarray, sigma: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Log |chi_K| and log |x_T / x_0| with a restart every K rounds, both (T, rules, modes); no restart is the last."""
    logs = restart_table(rules[:, None], sigma, rounds)[1]
    periods = np.arange(1, rounds + 1)
    rest = np.concatenate([np.zeros((1, *logs.shape[1:])), logs])[rounds % periods]
    return logs, (rounds // periods)[:, None, None] * logs + rest


def draw_losses(
    axes: Axes, rows: list[Any], columns: tuple[str, str], looks: Mapping[str, int], every: int = 0
) -> None:
    """Draw the curves of `curve_rows`, each with its last loss; without `every` their markers stand apart."""
    kind, name = columns
    for number, each in enumerate(dict.fromkeys(row[kind] for row in rows)):
        some = select(rows, **{kind: each})
        x, y = series(some, "round", "log10_loss")
        marks = every or (3 + 2 * number, x[-1] // 5)
        axes.plot(x, y, label=f"{some[0][name]} ({signed(y[-1])})", **look(looks[each], every=marks))
    axes.set(xlabel="outer round", ylabel="log₁₀ loss", xlim=(0, rows[-1]["round"]))


def signed(value: float, digits: int = 1) -> str:
    """Write a number with a true minus sign, for text in figures."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def listed(values: Iterable[Any]) -> str:
    """Write numbers in brackets, without spaces."""
    return "[" + ",".join(map(str, values)) + "]"


def series(rows: Iterable[Mapping[str, Any]], x: str, y: str) -> tuple[list[Any], list[Any]]:
    """Return the values of two columns, without the rows where the second has none."""
    some = [row for row in rows if row[y] is not None]
    return [row[x] for row in some], [row[y] for row in some]


def dot_chart(axes: Axes, labels: Sequence[str], **settings: Any) -> None:
    """Name the lines of a chart of points, one line a label, from the top down."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set(ylim=(len(labels) - 0.5, -0.5), **settings)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
