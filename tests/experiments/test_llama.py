"""The small Llama of the study of regimes: what is watched is the run of the sweep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from modules import load
from small_tasks import Cell
from twophase.config import fingerprint
from twophase.runs.record import read_rounds

ROOT = Path(__file__).parents[2] / "experiments" / "regimes"


def test_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run by itself has the sweep's perplexity, bit for bit, and the pseudo-gradients of its record."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, "run", raising=False)
    llama, cell = load(ROOT / "llama.py"), Cell(0.01)
    monkeypatch.delitem(sys.modules, "run")
    work = llama.WORK._replace(inner_steps=1, steps=3)
    of_sweep = llama.train(work, [900], {cell, cell._replace(kind="filter")}, tmp_path)[cell][900]
    config = llama.config_of(work, cell, 900)
    alone = llama.watched(config)
    square, last, second, agreement = torch.tensor(alone.path).T
    norms = [line["pseudo_gradient_norm"] for line in read_rounds(tmp_path / fingerprint(config))]
    assert alone.excess == of_sweep.excess
    torch.testing.assert_close(square.sqrt(), torch.tensor(norms))
    assert (last[0], *second[:2]) == (0, 0, 0)
    assert (agreement.abs() <= 1).all()
    assert (last[1:] ** 2 <= square[1:] * square[:-1]).all()
