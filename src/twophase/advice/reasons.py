"""Give the reasons of a verdict in sentences: the cosine, sigma or why there is none, the model's motion there."""

from __future__ import annotations

import math

import numpy as np

from twophase.advice.evidence import Evidence
from twophase.rule import OuterRule
from twophase.theory.modes import effective_step, phase, regime


def step_alone(rule: OuterRule, sigma: float) -> float:
    """Return the share of the way to the minimum that a round's own pseudo-gradient covers, momentum left out."""
    return float(effective_step(rule, sigma)) * (1 + rule.momentum if rule.nesterov else 1.0)


def half_turn(rule: OuterRule, sigma: float) -> float:
    """Return rounds in which an oscillating mode goes from one side to the other, pi / phi."""
    angle = float(np.asarray(phase(rule, sigma)))
    return math.pi / angle if angle > 0 else math.nan


def cosine_words(latest: Evidence) -> str:
    """Return the buffer's cosine and gain."""
    return (
        f"Rounds {latest.first} to {latest.last}: the mean cosine between pseudo-gradient and buffer is "
        f"{latest.cosine:.2f} (standard error {latest.cosine_error:.2f}), and negative in "
        f"{100 * latest.against:.0f} % of {latest.cosines} rounds; the median gain is {latest.gain:.3g}."
    )


def sigma_words(rule: OuterRule, latest: Evidence, sigma: tuple[float, float, float]) -> str:
    """Return the estimate of sigma, and what its modes do."""
    names = list(dict.fromkeys(_REGIMES[str(regime(rule, value))] for value in sigma))
    clipped = ", cut at 1, beyond which a linear mode cannot lie" if latest.observed.interval[1] > 1 else ""
    return (
        f"Estimated sigma along the buffer: {sigma[1]:.3g} (95 %: {sigma[0]:.3g} to {sigma[2]:.3g}{clipped}), where "
        f"the eigenvalues are {' or '.join(names)}."
    )


_REGIMES = {
    "oscillatory": "complex (it oscillates)",
    "critical": "at the border of oscillation",
    "real_below": "real and positive (it creeps)",
    "real_above": "real and negative (it jumps to and fro)",
    "negative_determinant": "real, of both signs",
    "nilpotent": "zero (it is gone in two rounds)",
}


def sigma_missing(latest: Evidence) -> str:
    """Return why there is no sigma."""
    seen = latest.observed
    if not latest.rates_known:
        return (
            "Sigma is not determined: the inner learning rate of these rounds is unknown (metrics.jsonl), and "
            "pseudo-gradients that shrink with it look like progress."
        )
    if math.isnan(seen.sigma):
        bound = "" if math.isnan(seen.ceiling) else f"; if nothing were noise it would be {seen.ceiling:.3g}"
        return f"Sigma is not determined by the {seen.pairs} pairs of rounds that can be used{bound}."
    return (
        f"Sigma is not determined: {seen.why_not}. The estimate is {seen.sigma:.3g}, with about "
        f"{100 * seen.noise_share:.0f} % of the pseudo-gradient's square being noise; without the correction for "
        f"noise it would seem to be {seen.ceiling:.3g}."
    )


def swing_words(rule: OuterRule, latest: Evidence, sigma: tuple[float, float, float]) -> str:
    """Return how long a swing takes, as measured and in the model."""
    turns = [half_turn(rule, value) for value in sigma]
    model = f"a mode of this sigma goes from side to side in {min(turns):.1f} to {max(turns):.1f} rounds"
    if math.isnan(latest.swing):
        return f"In the model {model}."
    return f"The cosine swings every {latest.swing:.1f} rounds; in the model {model}."
