"""twophase: DiLoCo for PyTorch, the theory of its outer momentum, and commands that compare outer optimizers.

Importing this package imports no torch; the public names below load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.api import sweep as sweep
    from twophase.api import train as train
    from twophase.api import tune as tune
    from twophase.diloco.engine import DiLoCo as DiLoCo
    from twophase.diloco.report import RoundReport as RoundReport
    from twophase.optim.outer_sgd import OuterSGD as OuterSGD
    from twophase.optim.restarting import Restarting as Restarting
    from twophase.report.results import load as load
    from twophase.restart import AtRounds as AtRounds
    from twophase.restart import Auto as Auto
    from twophase.restart import Cycle as Cycle
    from twophase.restart import Never as Never
    from twophase.restart import Periodic as Periodic
    from twophase.restart import Soft as Soft
    from twophase.rule import OuterRule as OuterRule
    from twophase.training.recording import record as record

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("AtRounds", "Auto", "Cycle", "Never", "Periodic", "Soft"), "twophase.restart"),
    "DiLoCo": "twophase.diloco.engine",
    "OuterRule": "twophase.rule",
    "OuterSGD": "twophase.optim.outer_sgd",
    "Restarting": "twophase.optim.restarting",
    "RoundReport": "twophase.diloco.report",
    "load": "twophase.report.results",
    "record": "twophase.training.recording",
    **dict.fromkeys(("sweep", "train", "tune"), "twophase.api"),
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - a list


def __getattr__(name: str) -> Any:
    """Load a public name from its module on its first use."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'twophase' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
