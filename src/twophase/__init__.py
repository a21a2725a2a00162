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
    from twophase.elastic.torchft import TorchFT
    from twophase.optim.outer import OuterSGD
    from twophase.policies.auto import Auto
    from twophase.policies.measured import Cosine, Gradient, LossTest, NormRatio, Opposed, Speed, Tracked
    from twophase.policies.probe import Probe
    from twophase.policies.rivals import BufferBound, Debiased, GainCap, LookAheadGate, Reseed, SlowMo
    from twophase.restart import AtRounds, Cycle, Never, Periodic, Restart, RestartPolicy, RoundSignal, Soft, Step
    from twophase.rule import OuterRule

__version__ = "0.1.0"

_HOMES = {
    "AtRounds": "twophase.restart",
    "Auto": "twophase.policies.auto",
    "BufferBound": "twophase.policies.rivals",
    "Communicator": "twophase.diloco.comm",
    "Cosine": "twophase.policies.measured",
    "Cycle": "twophase.restart",
    "Debiased": "twophase.policies.rivals",
    "DiLoCo": "twophase.diloco.engine",
    "GainCap": "twophase.policies.rivals",
    "Gradient": "twophase.policies.measured",
    "LookAheadGate": "twophase.policies.rivals",
    "LossTest": "twophase.policies.measured",
    "Never": "twophase.restart",
    "NormRatio": "twophase.policies.measured",
    "Opposed": "twophase.policies.measured",
    "OuterRule": "twophase.rule",
    "OuterSGD": "twophase.optim.outer",
    "Periodic": "twophase.restart",
    "Probe": "twophase.policies.probe",
    "ProcessGroup": "twophase.diloco.comm",
    "Reseed": "twophase.policies.rivals",
    "Restart": "twophase.restart",
    "RestartPolicy": "twophase.restart",
    "RoundReport": "twophase.diloco.report",
    "RoundSignal": "twophase.restart",
    "SlowMo": "twophase.policies.rivals",
    "Soft": "twophase.restart",
    "Speed": "twophase.policies.measured",
    "Step": "twophase.restart",
    "TorchFT": "twophase.elastic.torchft",
    "Tracked": "twophase.policies.measured",
}

__all__ = [
    "AtRounds",
    "Auto",
    "BufferBound",
    "Communicator",
    "Cosine",
    "Cycle",
    "Debiased",
    "DiLoCo",
    "GainCap",
    "Gradient",
    "LookAheadGate",
    "LossTest",
    "Never",
    "NormRatio",
    "Opposed",
    "OuterRule",
    "OuterSGD",
    "Periodic",
    "Probe",
    "ProcessGroup",
    "Reseed",
    "Restart",
    "RestartPolicy",
    "RoundReport",
    "RoundSignal",
    "SlowMo",
    "Soft",
    "Speed",
    "Step",
    "TorchFT",
    "Tracked",
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
