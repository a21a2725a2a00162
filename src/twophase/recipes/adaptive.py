"""Adaptive restart policies over a grid of rules, against fixed periods, plain averaging and their other rivals.

`choice` is where a policy may be chosen; `confirmation` is other seeds, another width and another text, which had no
part in choosing. Both have every rule in both forms at a short, a middle and a long communication period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as product_of
from typing import Any

from twophase.base.config import get
from twophase.recipes.controls import FORM, LR, MOMENTUM, NESTEROV, RESTART, momentum_free, with_averaging
from twophase.recipes.paper import BOTH_FORMS, RULES, Scale, arm_name
from twophase.rule import Form
from twophase.sweeps.grid import Axis, Cell, Sweep, product
from twophase.sweeps.table import SEED
from twophase.tasks.named import LM

FIXED = {"never": "never", "K=2": "2", "K=3": "3", "K=5": "5", "K=7": "7"}
"""Arms without decisions, from name to restart policy."""
ADAPTIVE = {
    "gradient": "gradient",
    "norm 1.5": "norm:1.5",
    "loss test": "loss",
    "probed restart": "probe:keep,drop",
    "probed gate": "probe:keep,average",
    "auto": "auto",
}
"""Arms that decide for themselves."""
RIVALS = {
    "per coordinate": "opposed",
    "tracked": "tracked",
    "gain cap 1": "cap:1",
    "buffer bound 1.5": "bound:1.5",
    "SlowMo": "slowmo",
    "reseeded K=3": "reseed:3",
    "debiased K=3": "debiased:3",
    "look-ahead gate": "lookahead:0.1:0.2",
}
"""Other rules that claim to need no restart, or a better one."""
CLOSEST = ("probed gate", "gain cap 1")
"""The rivals that came closest to the chosen arm where it was chosen: for both rules, and for Nesterov momentum."""
FEW = ("never", "K=3", "K=7")
"""The fixed arms where the full number of them would cost too much."""
MOMENTA = (0.3, 0.5, 0.7, 0.9)
MIDDLE = 16
"""Communication period, in inner steps, of what is not tried at all of them."""

WIDTH, CORPUS = "model.hidden_size", "data.corpus"


@dataclass(frozen=True)
class _Trial:
    """The arms of one model and text, by name, at some communication periods; `free` adds momentum-free SGD."""

    base: Any
    inner_steps: tuple[int, ...]
    seeds: tuple[int, ...]
    arms: Mapping[str, str]
    forms: tuple[Form, ...] = BOTH_FORMS
    free: bool = True


def choice(scale: Scale) -> Sweep:
    """Every arm on the scale's own seeds, model and text.

    Args:
        scale: its base, learning rates and seeds count.

    Returns:
        The sweep. Arms: `sum, heavy ball, never` and so on for both forms, both rules and, at the middle communication
        period, each name of `FIXED` and `ADAPTIVE`, and in sum form of `RIVALS`; at the short and the long one those of
        `FEW` and `auto`. And `momentum-free`, plain averaging among them.
    """
    short, middle, long = inner_steps_of(scale)
    trials = [
        _Trial(scale.base, (middle,), scale.seeds, FIXED | ADAPTIVE),
        _Trial(scale.base, (short, long), scale.seeds, _FEW_AND_AUTO),
        _Trial(scale.base, (middle,), scale.seeds, RIVALS, forms=("sum",), free=False),
    ]
    return Sweep(f"adaptive-choice-{scale.name}", scale.base, _cells(scale, trials))


def confirmation(scale: Scale) -> Sweep:
    """Compare what was chosen with its controls on held-out seeds, a held-out width and a held-out text.

    Args:
        scale: its base and learning rates; the seeds are the five after its own.

    Returns:
        The sweep. Arms as in `choice`: `auto`, momentum-free SGD, and the fixed periods, at the middle communication
        period with the rivals of `CLOSEST` (the second in sum form), at the short and the long one only those of `FEW`.
        The wider model and the other text have three of the seeds, the middle communication period, and `FEW`.
    """
    first = len(scale.seeds)
    short, middle, long = inner_steps_of(scale)
    seeds = tuple(range(first, first + (5 if first > 1 else 1)))
    model = scale.base.model
    wider = replace(model, hidden_size=model.hidden_size * 3 // 2, intermediate_size=model.intermediate_size * 3 // 2)
    other_text = replace(scale.base, data=replace(scale.base.data, corpus="python-code"))
    gate, cap = ({name: (ADAPTIVE | RIVALS)[name]} for name in CLOSEST)
    trials = [
        _Trial(scale.base, (middle,), seeds, FIXED | _AUTO | gate),
        _Trial(scale.base, (middle,), seeds, cap, forms=("sum",), free=False),
        _Trial(scale.base, (short, long), seeds, _FEW_AND_AUTO),
        _Trial(replace(scale.base, model=wider), (middle,), seeds[:3], _FEW_AND_AUTO),
        _Trial(other_text, (middle,), seeds[:3], _FEW_AND_AUTO),
    ]
    return Sweep(f"adaptive-confirmation-{scale.name}", scale.base, _cells(scale, trials))


_AUTO = {"auto": ADAPTIVE["auto"]}
_FEW_AND_AUTO = {name: FIXED[name] for name in FEW} | _AUTO


def inner_steps_of(scale: Scale) -> tuple[int, int, int]:
    """The short, middle and long communication period of a scale; of a task in the ratios of the built-in model's."""
    if scale.task != LM:
        return scale.short, 2 * scale.short, 8 * scale.short
    return (8, MIDDLE, 64) if scale.base.steps >= 480 else (4, 8, 24)


def momenta_of(scale: Scale) -> tuple[float, ...]:
    """Outer momenta of the grid."""
    return MOMENTA if len(scale.momenta) >= len(MOMENTA) else scale.momenta


def _cells(scale: Scale, trials: Sequence[_Trial]) -> list[Cell]:
    cells: list[Cell] = []
    for trial in trials:
        seeds, varied = Axis(SEED, trial.seeds), (WIDTH, "model.intermediate_size", CORPUS)
        place = {path: get(trial.base, path) for path in varied} if scale.task == LM else {}
        grid = [seeds, Axis(MOMENTUM, momenta_of(scale)), Axis(LR, scale.lrs)]
        for inner_steps in trial.inner_steps:
            here = place | {"inner_steps": inner_steps}
            for form, kind, name in product_of(trial.forms, RULES, trial.arms):
                fixed = here | {FORM: form, NESTEROV: RULES[kind], RESTART: trial.arms[name]}
                cells += product(scale.base, grid, arm_name(form, kind, name), fixed)
            if trial.free:
                cells += momentum_free(scale.base, [seeds], with_averaging(scale.lrs), here | {FORM: "sum"})
    return cells
