"""The demo: momentum restarts over a grid of outer learning rates and momenta, with the controls that keep it honest.

The question is whether restarting the outer momentum enlarges the region of hyperparameters that works. The main grid
answers it: both kinds of rule, 5 momenta, 3 learning rates, without restarts and with one every 3 rounds. It cannot
tell a better use of momentum from a smaller step. In sum form, momentum 0.9 moves the anchor by 10 times the learning
rate a round in the long run. With a restart every 3 rounds it is 1.87 times. The controls of `recipes.controls` can.
Added is `auto`, the policy that needs neither learning rate nor momentum nor period.
"""

from __future__ import annotations

from collections.abc import Sequence

from twophase.config import update
from twophase.recipes.controls import LR, METHOD, MOMENTUM, RESTART, gain_matched, momentum_free
from twophase.runs.config import InnerConfig
from twophase.sweeps.grid import Axis, Cell, Sweep, product
from twophase.sweeps.table import SEED
from twophase.tasks.lm.config import TrainConfig

RULES = {"heavy ball": "heavy-ball", "Nesterov": "nesterov"}
"""The two kinds of rule, and the method of each."""
PERIOD = 3
"""Rounds from restart to restart."""
NEVER, RESTARTED = "never", f"K={PERIOD}"
MATCHED = f"{NEVER}, gain of {RESTARTED}"
"""What the demo's methods are called behind their kind of rule, as in `Nesterov, K=3`."""
_LRS, _MOMENTA = (0.3, 0.7, 1.1), (0.1, 0.3, 0.5, 0.7, 0.9)
_QUICK_LRS, _QUICK_MOMENTA = (0.3, 1.1), (0.1, 0.5, 0.9)
_MATCHED_FROM, _QUICK_MATCHED_FROM = 0.5, 0.9
"""Gain-matched controls begin at this momentum: below 0.5 a restart changes the mean gain by less than a sixth."""
_QUICK = {"steps": 480, "inner.lr": 4e-3}
"""Half the steps at twice the inner learning rate: half the price, the same picture, its optimum at less momentum."""

AUTO = "auto"
"""The method of the policy of that name."""


def demo(
    quick: bool = False, seeds: Sequence[int] = (0,), controls: bool = True, base: TrainConfig | None = None
) -> Sweep:
    """Return the demo's runs: 60 a seed for the main grid, 22 a seed for the controls, and `auto`.

    Args:
        quick: a smaller grid of shorter runs: 24 a seed, and 8 for the controls, each at half the price.
        seeds: each seed repeats every run; tables and figures then show means over the seeds.
        controls: add the momentum-free and the gain-matched runs, and `auto`.
        base: values that all runs share (`TrainConfig()` with a cosine when None). Outer method, learning rate,
            momentum, restart and seed are replaced, and with `quick` its steps and inner learning rate too.

    The methods are `heavy ball, never`, `heavy ball, K=3`, `Nesterov, never`, `Nesterov, K=3`, `momentum-free`, the two
    restart-free ones with `, gain of K=3` behind, and `auto`. The first two runs are those that the story shows round
    by round: heavy ball at the largest momentum, without restarts and with them.
    """
    base = base or TrainConfig(inner=InnerConfig(schedule="cosine"))
    lrs, momenta = (_QUICK_LRS, _QUICK_MOMENTA) if quick else (_LRS, _MOMENTA)
    base = update(base, _QUICK) if quick else base
    seed_axis, cells = Axis(SEED, tuple(seeds)), list[Cell]()
    axes = [seed_axis, Axis(MOMENTUM, momenta), Axis(LR, lrs)]
    for kind, method in RULES.items():
        for part, restart in ((NEVER, "never"), (RESTARTED, str(PERIOD))):
            cells += product(base, axes, f"{kind}, {part}", {METHOD: method, RESTART: restart})
    # Workers take the runs in this order, so the story has its pair within half a minute.
    first = {SEED: seeds[0] if seeds else 0, METHOD: "heavy-ball", MOMENTUM: momenta[-1], LR: lrs[len(lrs) // 2]}
    cells.sort(key=lambda cell: any(cell.values[path] != value for path, value in first.items()))
    if controls:
        restarted = [cell for cell in cells if cell.values[RESTART] != "never"]
        least = _QUICK_MATCHED_FROM if quick else _MATCHED_FROM
        cells += momentum_free(base, [seed_axis], _LRS)
        for kind, method in RULES.items():
            matched = [c for c in restarted if c.values[METHOD] == method and c.values[MOMENTUM] >= least]
            cells += gain_matched(matched, f"{kind}, {MATCHED}")
        fixed = {METHOD: "averaging", MOMENTUM: None, LR: None, RESTART: AUTO}  # of the rule nothing enters
        cells += product(base, [seed_axis], AUTO, fixed)
    return Sweep(base, cells)
