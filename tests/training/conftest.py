"""One short run for all tests of the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

import textmaker
from trained import run
from twophase.config import update
from twophase.tasks.lm.config import TrainConfig


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of a third of a second: 3 full rounds and a shorter one, with a checkpoint every 2 rounds."""
    corpus = textmaker.write(tmp_path_factory.mktemp("text") / "text.txt")
    return textmaker.small_run(corpus, steps=22, inner_steps=6, checkpoint_every=2)


@pytest.fixture(scope="session")
def config(short_run: TrainConfig) -> TrainConfig:
    """The short run with a restart after the second round, and lines about steps."""
    return update(short_run, {"outer.restart": "2", "evaluate_every": 2, "log_every": 4})


@pytest.fixture(scope="session")
def whole(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of `config`; tests read it and leave it as it is."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(config, folder)
    return folder
