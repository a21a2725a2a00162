"""What several tests of training start from."""

from __future__ import annotations

from pathlib import Path

import pytest

import textmaker
from twophase.lm.config import DataConfig, ModelConfig, TrainConfig


@pytest.fixture
def short_run(tmp_path: Path) -> TrainConfig:
    """A run of a second: 3 full rounds and a shorter one, with a checkpoint every 2 rounds."""
    corpus = textmaker.write(tmp_path / "text.txt")
    return TrainConfig(
        model=ModelConfig(layers=1, hidden_size=16, intermediate_size=24),
        data=DataConfig(corpus=f"file:{corpus}", sequence_length=16, batch_size=4, validation_windows=8),
        steps=22,
        inner_steps=6,
        checkpoint_every=2,
    )
