"""Values out of their range are refused by option; values that a method ignores are ignored; schedules by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trained import trainer_of
from twophase.api import train_run
from twophase.config import fingerprint, update
from twophase.errors import UsageError
from twophase.optim.names import NAMES, RULES
from twophase.recipes.controls import grid_of
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig, inner_lr, options_of, outer_line
from twophase.sweeps.grid import Axis, Sweep
from twophase.tasks.lm.config import TrainConfig

WRONG: dict[str, list[Any]] = {
    "inner.lr": [0.0, -1.0, math.nan, math.inf, 1e31],
    "inner.weight_decay": [-1.0, math.nan],
    "inner.betas": [(0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9)],
    "inner.momentum": [1.0, -0.1, math.nan],
    "inner.warmup": [1.5, -0.1, math.nan],
    "inner.clip_norm": [-1.0, math.nan],
    "inner.decay": [1.5, -0.1],
    "outer.method": ["adam", ""],
    "outer.lr": [-0.1, 1e200, math.nan],
    "outer.momentum": [1.0, -0.1, math.nan],
    "outer.restart": ["0", "often", "cycle:", "soft:3:x", "-1"],
    "outer.filter": ["clip", "clip:0", "clip:-1", "soft"],
    "outer.schedule": ["cosine", "linear:-1", "momentum:1", "constant:1"],
    "sync.fragments": [("0",), (), ("a", "b"), ("a=x", "a=y"), ("=x",)],
    "sync.restart": [("1=3",), ("0=3", "0=4"), ("0=often",), ("0",)],
    "sync.delay": [-1],
    "sync.mixing": [1.0, -0.1, math.nan],
    "sync.compression": ["int4"],
    "model.layers": [0],
    "model.kv_heads": [-1],
    "model.norm_eps": [math.nan],
    "model.vocabulary_size": [-1],
    "data.sequence_length": [0],
    "data.held_out": [1.0],
    "compute.micro_batch": [-2, 3],
    "seed": [-1, 2**63],
    **{name: [0, -1] for name in ("steps", "inner_steps", "replicas", "threads")},
    **{name: [0, -1] for name in ("checkpoint_every", "keep_checkpoints")},
    **{name: [-1] for name in ("log_every", "evaluate_every", "divergence_loss")},
}  # fmt: skip


@pytest.mark.parametrize("path", WRONG)
def test_out_of_range(path: str) -> None:
    """Each is refused when the configuration is made, by its option."""
    for value in WRONG[path]:
        with pytest.raises(UsageError) as caught:
            update(TrainConfig(), {path: value})
        assert str(caught.value).startswith((f"--{path.replace('_', '-')}", f"--{path}")), value


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model.hidden_size": 34, "model.heads": 4}, "--model.hidden-size"),
        ({"model.kv_heads": 4, "model.heads": 2}, "--model.kv-heads"),
        ({"data.split": "non-iid", "data.corpus": "tokens:shards"}, "--data.split"),
        ({"compute.attention": "cudnn", "deterministic": True}, "--compute.attention"),
        ({"device": "meta"}, "--device meta"),
        ({"device": "abacus"}, "--device abacus"),
        ({"sync.fragments": ("a=(",)}, "fragments"),
        ({"sync.fragments": ("a=embed",)}, "fragments"),
        ({"outer.method": "adamw", "outer.restart": "auto"}, "restart"),
        ({"outer.method": "adamw", "outer.schedule": "momentum:0"}, "schedule"),
        ({"outer.method": "absent.py:make"}, "--outer.method"),
        ({"inner.method": "schedule-free", "inner.betas": (0.0, 0.9)}, "--inner.betas"),
    ],
)
def test_values_that_do_not_fit_each_other(
    short_run: TrainConfig, tmp_path: Path, values: dict[str, Any], word: str
) -> None:
    """They are refused before a folder is made."""
    with pytest.raises(UsageError, match=word):
        train_run(update(short_run, values), tmp_path / "run", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"outer.method": "averaging", "outer.form": "ema", "outer.restart": "3"}, ["form ema", "restart 3"]),
        ({"outer.method": "adamw", "outer.form": "ema"}, ["form ema"]),
        ({"outer.method": "nesterov", "outer.momentum": 0.0, "outer.restart": "2"}, ["restart 2"]),
        ({"inner.method": "sgd", "inner.betas": (0.5, 0.5)}, ["inner.betas"]),
        ({"inner.momentum": 0.5}, ["inner.momentum"]),
        ({"inner.schedule": "cosine", "inner.decay": 0.5}, ["inner.decay"]),
        ({"inner.method": "schedule-free"}, []),
    ],
)
def test_what_a_method_ignores_is_ignored_and_named(values: dict[str, Any], named: list[str]) -> None:
    """In the first line of the run; a sweep's cells with other such values are one run."""
    config = update(TrainConfig(), values)
    line = outer_line(config)
    assert all(name in line for name in named)
    assert ("changes nothing" in line) == bool(named)
    assert fingerprint(config.plain()) == fingerprint(config.plain().plain())
    ignored = {path: value for path, value in values.items() if any(path.split(".")[1] in name for name in named)}
    without = {path: value for path, value in values.items() if path not in ignored}
    assert fingerprint(update(TrainConfig(), without).plain()) == fingerprint(config.plain())


def test_grids_of_values_that_some_methods_ignore() -> None:
    """Such a value may be an axis, or the option beside one; each cell alone is checked, and not the base."""
    for values, axes, runs in (
        ({"inner.betas": (0.9, 0.95)}, [Axis("inner.method", ("adamw", "sgd"))], 2),
        ({"inner.decay": 0.3}, [Axis("inner.schedule", ("cosine", "wsd"))], 2),
        ({"steps": 8}, [Axis("inner_steps", ("4", "8"))], 2),
    ):
        base = update(TrainConfig(), values)
        assert len(Sweep(base, grid_of(base, axes, controls=False)).runs) == runs


def test_replicas_are_shared_evenly(short_run: TrainConfig) -> None:
    """Two replicas on three ranks are refused."""
    from threads import Member

    group = Member.__new__(Member)
    group.size = 3
    with pytest.raises(UsageError, match=r"--replicas.* 3 ranks, got 2"):
        trainer_of(short_run, group=group)


def test_outer_optimizers_by_name() -> None:
    """Names with their own numbers; given ones replace them; a rule's options are its own."""
    table = {"averaging": (1, 0), "heavy-ball": (0.7, 0.9), "nesterov": (0.7, 0.9)}
    table |= {"adamw": (0.02, 0.9), "muon": (0.1, 0.9)}
    assert {name: tuple(OuterConfig(name).numbers().values()) for name in NAMES} == table
    assert OuterConfig("adamw", lr=3).numbers() == {"lr": 3.0, "momentum": 0.9}
    assert OuterConfig("own.py:make", lr=3).numbers() == {}
    assert OuterConfig("nesterov", 0.5, 0.8, "ema").rule() == OuterRule(0.5, 0.8, nesterov=True, form="ema")
    assert OuterConfig("adamw").rule() is OuterConfig("own.py:make").rule() is None
    for rule in (*RULES.values(), OuterRule(0.3, 0.5, form="ema"), OuterRule(1.3, 0.0)):
        assert OuterConfig(**options_of(rule)).rule() == rule


SHARES = [1 / 2, 69 / 90, 80 / 90]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inner.schedule": "cosine"}, [2.0, *(1 + math.cos(math.pi * share) for share in SHARES)]),
        ({"inner.schedule": "constant"}, [2.0, 2.0, 2.0, 2.0]),
        ({"inner.schedule": "linear"}, [2.0, 1.0, 2 * 21 / 90, 2 * 10 / 90]),
        ({}, [2.0, 2.0, 2.0, 1.0]),
        ({"inner.decay": 0.5}, [2.0, 1.8, 2 * 21 / 50, 0.4]),
        ({"inner.decay": 0.0}, [2.0, 2.0, 2.0, 2.0]),
        ({"inner.decay": 0.95}, [2.0, 1.0, 2 * 21 / 90, 2 * 10 / 90]),
    ],
)
def test_inner_schedules(values: dict[str, Any], expected: list[float]) -> None:
    """Linear warmup to the peak, and each schedule after it, against the formulas by hand."""
    config = update(TrainConfig(steps=100, inner_steps=10), {"inner.lr": 2.0, "inner.warmup": 0.1} | values)
    assert [inner_lr(config, step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert [inner_lr(config, step) for step in (10, 55, 79, 90)] == pytest.approx(expected)
    none, all_of_it = (update(config, {"inner.warmup": share}) for share in (0.0, 1.0))
    assert inner_lr(none, 0) == inner_lr(all_of_it, 99) == 2.0
