"""Impossible configurations are refused by option and value; fingerprints of earlier versions stay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from twophase.base.config import UsageError, from_tree, to_tree, with_values
from twophase.diloco.compression import COMPRESSIONS
from twophase.tasks.build import preflight_all
from twophase.tasks.lm.config import TrainConfig, check
from twophase.tasks.lm.task import LanguageTask
from twophase.training.config import RunConfig, SyncConfig, inner_lr
from twophase.training.preflight import preflight

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"inner.decay": 0.1}, r"--inner\.decay is 0\.1; .*it is for wsd"),
    ({"inner.schedule": "wsd", "inner.decay": 0.95}, r"--inner\.decay is 0\.95; .*\[0, 0\.9\]"),
    ({"outer.method": "averaging", "outer.momentum": 0.5}, r"--outer\.momentum: .*heavy-ball or nesterov"),
    ({"outer.method": "adam"}, r"--outer\.method: .*adamw"),
    ({"outer.method": "adamw", "outer.restart": "auto"}, r"--outer\.restart: .*nesterov"),
    ({"outer.method": "averaging", "outer.schedule": "momentum:0"}, r"--outer\.schedule: .*nesterov"),
    ({"outer.filter": "clip"}, r"--outer\.filter: .*clip:1"),
    ({"outer.method": "nesterov", "outer.momentum": 1.0}, r"--outer\.momentum must .*1\.0"),
    ({"outer.lr": 1e200}, r"--outer\.lr is 1e\+200; .*at most 1e\+30"),
    ({"outer.lr": -0.1}, r"--outer\.lr must .*-0\.1"),
    ({"outer.restart": "0"}, r"--outer\.restart: .*period .*0"),
    ({"outer.restart": "often"}, r"--outer\.restart: .*'often'.*never"),
    ({"inner_steps": 23}, r"--inner-steps is 23; .*at most steps \(22\); lower --inner-steps"),
    ({"inner_steps": 0}, r"--inner-steps is 0; it must be a whole number from 1 to 100,000,000"),
    ({"replicas": 0}, r"--replicas is 0; "),
    ({"inner.lr": 0.0}, r"--inner\.lr is 0\.0; "),
    ({"inner.lr": math.nan}, r"--inner\.lr is nan; "),
    ({"inner.betas": (0.9, 1.0)}, r"--inner\.betas is \(0\.9, 1\.0\); "),
    ({"inner.method": "sgd", "inner.betas": (0.9, 0.95)}, r"--inner\.betas is \(0\.9, 0\.95\); .*left alone"),
    ({"inner.momentum": 0.5}, r"--inner\.momentum is 0\.5; .*for sgd and muon"),
    ({"inner.method": "muon", "inner.momentum": 1.0}, r"--inner\.momentum is 1\.0; "),
    ({"inner.method": "schedule-free"}, r"--inner\.schedule is cosine; .*constant"),
    (
        {"inner.method": "schedule-free", "inner.schedule": "constant", "inner.betas": (0.0, 0.9)},
        r"--inner\.betas is \(0\.0, 0\.9\); .*above 0",
    ),
    ({"inner.warmup": 1.5}, r"--inner\.warmup is 1\.5; "),
    ({"inner.weight_decay": -1.0}, r"--inner\.weight-decay is -1\.0; "),
    ({"inner.clip_norm": -1.0}, r"--inner\.clip-norm is -1\.0; "),
    ({"data.held_out": 1.0}, r"--data\.held-out is 1\.0; "),
    ({"data.batch_size": 0}, r"--data\.batch-size is 0; "),
    ({"model.hidden_size": 17}, r"--model\.hidden-size is 17; .*a multiple of 2 x heads = 4"),
    ({"model.kv_heads": 3}, r"--model\.kv-heads is 3; "),
    ({"model.rope_theta": 0.0}, r"--model\.rope-theta is 0\.0; "),
    ({"model.norm_eps": 0.0}, r"--model\.norm-eps is 0\.0; "),
    ({"model.vocabulary_size": -1}, r"--model\.vocabulary-size is -1; "),
    ({"compute.micro_batch": 3}, r"--compute\.micro-batch is 3; "),
    ({"compute.autotune": True}, r"--compute\.autotune is True; "),
    ({"seed": -1}, r"--seed is -1; "),
    ({"seed": 2**63}, r"--seed is 9223372036854775808; "),
    ({"evaluate_every": -1}, r"--evaluate-every is -1; "),
    ({"log_every": -1}, r"--log-every is -1; "),
    ({"divergence_loss": -1.0}, r"--divergence-loss is -1\.0; "),
    ({"device": "meta"}, r"--device meta cannot be used here"),
    ({"device": "abacus"}, r"--device abacus cannot be used here .*; use --device cpu"),
    ({"sync.delay": 6}, r"--sync\.delay is 6; .*below inner_steps \(6\)"),
    ({"sync.mixing": 1.0}, r"--sync\.mixing is 1\.0; "),
    ({"sync.fragments": ("0",)}, r"--sync\.fragments is 0; "),
    ({"sync.fragments": ()}, r"--sync\.fragments is empty; "),
    ({"sync.fragments": ("a", "b")}, r"--sync\.fragments is a; .*NAME=VALUE"),
    ({"sync.restart": ("0=3", "0=4")}, r"--sync\.restart is 0=4; "),
    ({"sync.restart": ("0=often",)}, r"--sync\.restart: .*'often'"),
    ({"sync.restart": ("1=3",)}, r"--sync\.restart names 1, and the fragments are 0; "),
    ({"sync.fragments": ("a=(",)}, r"--sync\.fragments a=\(: .*regular expression"),
    ({"sync.fragments": ("a=embedding",)}, r"--sync\.fragments a=embedding: .*no pattern"),
    ({"sync.fragments": ("99",)}, r"--sync\.fragments 99: .*at most the 9 parameters"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS)
def test_impossible_values(short_run: TrainConfig, values: dict[str, Any], message: str) -> None:
    """Each is refused before a folder is made, alone and among other runs."""
    wrong = with_values(short_run, values)
    with pytest.raises(UsageError, match=message):
        preflight(check(wrong), LanguageTask(wrong))
    with pytest.raises(UsageError, match=message):
        preflight_all(map(check, [short_run, wrong, replace(short_run, steps=23)]))


def test_replicas_and_processes(short_run: TrainConfig) -> None:
    """Replicas that the processes cannot share evenly are refused with both numbers."""
    with pytest.raises(UsageError, match=r"--replicas is 2 and there are 3 processes.*--replicas 3"):
        preflight(short_run, LanguageTask(short_run), processes=3)


def test_defaults() -> None:
    """The default configuration can be run; model and data come first in its file, as in those of earlier versions."""
    assert check(TrainConfig()) == TrainConfig()
    assert list(to_tree(TrainConfig())) == ["model", "data", *to_tree(RunConfig())]


def test_compressions_are_the_engines() -> None:
    """A configuration, which imports no torch, offers what the engine can do."""
    assert get_args(get_type_hints(SyncConfig)["compression"]) == COMPRESSIONS


@pytest.mark.parametrize(
    ("room", "name", "value"),
    [("inner", "betas", [0.9, {}]), ("inner", "betas", ["0.9", 0.9]), ("sync", "restart", [2])],
)
def test_parts_of_another_kind_are_refused(room: str, name: str, value: list[object]) -> None:
    """A damaged file may hold a list whose parts are of another kind; the message names the list."""
    tree = to_tree(TrainConfig())
    tree[room][name] = value
    with pytest.raises(UsageError, match=f"{room}.{name} is "):
        from_tree(TrainConfig, tree)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"inner.schedule": "cosine"},
            [2.0, *(1 + math.cos(math.pi * share) for share in (1 / 2, 69 / 90, 80 / 90))],
        ),
        ({"inner.schedule": "constant"}, [2.0, 2.0, 2.0, 2.0]),
        ({"inner.schedule": "linear"}, [2.0, 1.0, 2 * 21 / 90, 2 * 10 / 90]),
        ({}, [2.0, 2.0, 2.0, 1.0]),
        ({"inner.schedule": "wsd", "inner.decay": 0.5}, [2.0, 1.8, 2 * 21 / 50, 0.4]),
        ({"inner.schedule": "wsd", "inner.decay": 0.0}, [2.0, 2.0, 2.0, 2.0]),
        ({"inner.schedule": "wsd", "inner.decay": 0.9}, [2.0, 1.0, 2 * 21 / 90, 2 * 10 / 90]),
    ],
)
def test_inner_schedules(values: dict[str, Any], expected: list[float]) -> None:
    """Linear warmup to the peak, and each schedule after it, against the formulas by hand."""
    config = check(with_values(TrainConfig(steps=100, inner_steps=10), {"inner.lr": 2.0, "inner.warmup": 0.1} | values))
    assert [inner_lr(config, step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert [inner_lr(config, step) for step in (10, 55, 79, 90)] == pytest.approx(expected)


def test_warmup_of_none_or_all_steps() -> None:
    """Without warmup the first step has the peak; with nothing else the last one."""
    config = with_values(TrainConfig(steps=100, inner_steps=10), {"inner.lr": 2.0, "inner.warmup": 0.0})
    assert inner_lr(config, 0) == inner_lr(with_values(config, {"inner.warmup": 1.0}), 99) == 2.0
