"""Numbers of every scenario as they were when the engine was last compared with its first version, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diloco.scenarios import SCENARIOS, start

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Processors differ in the last bits, which momentum and rounded codes carry on."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_numbers_are_those_of_the_first_version(name: str) -> None:
    """Norms of the anchor's parameters and of the last pseudo-gradient, after the last, shorter round."""
    run = start(name)
    run.go(range(SCENARIOS[name].steps))
    report = run.finish()
    found = {key: float(view.norm()) for key, view in run.engine.anchor.items()}
    if report is not None:
        found["pseudo-gradient"] = report.pseudo_gradient_norm
    assert found == pytest.approx(GOLDEN[name], rel=TOLERANCE[SCENARIOS[name].dtype])
