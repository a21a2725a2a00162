"""twophase: outer optimizers whose momentum knows when to forget, and an engine that trains with them.

Importing this package imports no torch; the public names below load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.diloco.comm import Communicator, ProcessGroup
    from twophase.diloco.engine import DiLoCo
    from twophase.diloco.report import RoundReport
    from twophase.diloco.torchft import TorchFT
    from twophase.optim.outer import OuterSGD
    from twophase.restart import (
        AtRounds,
        Cycle,
        Never,
        Periodic,
        Restart,
        RestartPolicy,
        RoundSignal,
        Soft,
    )
    from twophase.rule import OuterRule

__version__ = "0.1.0"

_HOMES = {
    "AtRounds": "twophase.restart",
    "Communicator": "twophase.diloco.comm",
    "Cycle": "twophase.restart",
    "DiLoCo": "twophase.diloco.engine",
    "Never": "twophase.restart",
    "OuterRule": "twophase.rule",
    "OuterSGD": "twophase.optim.outer",
    "Periodic": "twophase.restart",
    "ProcessGroup": "twophase.diloco.comm",
    "Restart": "twophase.restart",
    "RestartPolicy": "twophase.restart",
    "RoundReport": "twophase.diloco.report",
    "RoundSignal": "twophase.restart",
    "Soft": "twophase.restart",
    "TorchFT": "twophase.diloco.torchft",
}

__all__ = [
    "AtRounds",
    "Communicator",
    "Cycle",
    "DiLoCo",
    "Never",
    "OuterRule",
    "OuterSGD",
    "Periodic",
    "ProcessGroup",
    "Restart",
    "RestartPolicy",
    "RoundReport",
    "RoundSignal",
    "Soft",
    "TorchFT",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module when it is first asked for."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'twophase' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
