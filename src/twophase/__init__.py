"""twophase: outer optimizers whose momentum knows when to forget, and an engine that trains with them.

Importing this package imports no torch; the public names below load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo
    from twophase.diloco.report import RoundReport
    from twophase.experiments import sweep, train, tune
    from twophase.optim.outer import OuterSGD
    from twophase.optim.restarting import Restarting
    from twophase.policies.adaptive import Auto
    from twophase.policies.base import Never
    from twophase.policies.scheduled import AtRounds, Cycle, Periodic, Soft
    from twophase.report.results import load
    from twophase.rule import OuterRule
    from twophase.training.recording import record

__version__ = "0.1.0"

_HOMES = {
    "AtRounds": "twophase.policies.scheduled",
    "Auto": "twophase.policies.adaptive",
    "Cycle": "twophase.policies.scheduled",
    "DiLoCo": "twophase.diloco.engine",
    "Never": "twophase.policies.base",
    "OuterRule": "twophase.rule",
    "OuterSGD": "twophase.optim.outer",
    "Periodic": "twophase.policies.scheduled",
    "Restarting": "twophase.optim.restarting",
    "RoundReport": "twophase.diloco.report",
    "Soft": "twophase.policies.scheduled",
    "load": "twophase.report.results",
    "record": "twophase.training.recording",
    "sweep": "twophase.experiments",
    "train": "twophase.experiments",
    "tune": "twophase.experiments",
}

__all__ = [
    "AtRounds",
    "Auto",
    "Cycle",
    "DiLoCo",
    "Never",
    "OuterRule",
    "OuterSGD",
    "Periodic",
    "Restarting",
    "RoundReport",
    "Soft",
    "load",
    "record",
    "sweep",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on its first use."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'twophase' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
