"""What no model, batch or run can have is refused by its option."""

from __future__ import annotations

from typing import Any

import pytest

from twophase.config import update
from twophase.errors import UsageError
from twophase.tasks.lm.config import TrainConfig


@pytest.mark.parametrize(
    "values",
    [
        {"model.layers": 0},
        {"model.hidden_size": 34, "model.heads": 4},
        {"model.kv_heads": 4, "model.heads": 2},
        {"model.kv_heads": -1},
        {"model.norm_eps": float("nan")},
        {"model.vocabulary_size": -1},
        {"data.sequence_length": 0},
        {"data.held_out": 1.0},
        {"data.split": "non-iid", "data.corpus": "tokens:shards"},
        {"compute.micro_batch": 3, "data.batch_size": 8},
        {"compute.micro_batch": -2},
        {"compute.attention": "cudnn", "deterministic": True},
    ],
    ids=str,
)
def test_values_that_cannot_be(values: dict[str, Any]) -> None:
    """One line with option, range and value; each alone, as a cross-check of two fields too."""
    option = next(iter(values)).replace("_", "-")
    with pytest.raises(UsageError, match=rf"^--{option}: [^\n]*{next(iter(values.values()))}$"):
        update(TrainConfig(), values)


@pytest.mark.parametrize(
    "values",
    [
        {"model.hidden_size": 48, "model.heads": 6, "model.kv_heads": 3},
        {"data.split": "non-iid"},
        {"compute.micro_batch": 12, "data.batch_size": 24},
        {"compute.attention": "cudnn"},
        {"compute.attention": "auto", "deterministic": True},
    ],
    ids=str,
)
def test_values_that_go_together(values: dict[str, Any]) -> None:
    """They are taken, whatever their order."""
    config = update(TrainConfig(), values)
    assert update(TrainConfig(), dict(reversed(values.items()))) == config
    assert config.step_tokens == config.data.batch_size * 64
