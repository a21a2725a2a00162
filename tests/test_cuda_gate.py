"""The CUDA code of a training step, emitted without a GPU, within its bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fake_cuda

GATE = Path(fake_cuda.__file__).with_name("cuda_gate.py")


@pytest.mark.slow
@pytest.mark.skipif(bool(fake_cuda.missing()), reason=fake_cuda.missing())
def test_the_steps_cuda_code_keeps_its_bounds() -> None:
    """Memory, traffic, graphs and host synchronizations are what benchmarks/bounds.json allows: status 0."""
    words = [sys.executable, "-W", "ignore", GATE]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    bound = (
        "live_logits_pieces forward_peak_gb traffic_gb activation_ratio graphs evaluation_graphs host_syncs_per_step "
        "host_syncs_per_round outer_passes"
    )
    assert figures.keys() >= set(bound.split())
