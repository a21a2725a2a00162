"""Checkpoints whose manifest agrees and whose content is odd: refused by name, or without effect on the result."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import outcome
from trained import run
from twophase.base.config import RunError, UsageError
from twophase.tasks.lm.config import TrainConfig
from twophase.training import parts

ODD = [None, True, -1, 10**20, 10**400, float("nan"), float("-inf"), "x", "", [], {}, [[[[1]]]], {"a": {"b": 1}}]


def resign(checkpoint: Path) -> None:
    """Make the manifest agree with what the files hold now."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def changed(tree: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of a tree with one place changed; None takes a dictionary's or list's place away."""
    if not path:
        return change(tree)
    key, *rest = path
    if isinstance(tree, dict):
        value = changed(tree[key], tuple(rest), change)
        return {name: value if name == key else old for name, old in tree.items() if name != key or value is not GONE}
    value = changed(tree[key], tuple(rest), change)
    return type(tree)(value if n == key else old for n, old in enumerate(tree) if n != key or value is not GONE)


GONE = object()


def odd(value: Any, place: tuple[Any, ...], draw: Callable[[Any], Any]) -> Any:
    """Something else in the place of a value; of a tensor, another form, since other numbers might be right."""
    if isinstance(value, torch.Tensor) and draw(st.booleans()):
        ways = [value.double(), value.reshape(-1)[:-1], value[None], torch.zeros(3)]
        ways += [-value - 1] if place[-1:] in (("exp_avg_sq",), ("step",)) else []
        return draw(st.sampled_from(ways))
    return draw(st.sampled_from([GONE, *ODD]))


@pytest.fixture(scope="session")
def stopped(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after its second round: it has one checkpoint."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    steps = sorted((folder / "checkpoint").glob("step-*"))
    for path in steps[1:]:
        shutil.rmtree(path)
    return folder


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.slow
def test_odd_content(data: Any, stopped: Path, whole: Path, config: TrainConfig, tmp_path_factory: Any) -> None:
    """One change anywhere in a checkpoint ends in one sentence that names it, or in the uninterrupted result."""
    folder = tmp_path_factory.mktemp("odd") / "run"
    shutil.copytree(stopped, folder)
    (checkpoint,) = (folder / "checkpoint").iterdir()
    name = data.draw(st.sampled_from(["progress.json", "engine.safetensors", "replica-000.safetensors"]))
    path = checkpoint / name
    tree = json.loads(path.read_text()) if name.endswith("json") else parts.read(path)
    place = data.draw(st.sampled_from(places(tree)))
    tree = changed(tree, place, lambda value: odd(value, place, data.draw))
    try:
        if name.endswith("json"):
            path.write_text(json.dumps(None if tree is GONE else tree))
        else:
            parts.write(path, parts.take_apart(None if tree is GONE else tree))
    except ValueError:  # no tree that a file can hold
        return
    resign(checkpoint)
    refusal = None
    try:
        run(config, folder)
    except (UsageError, RunError) as error:
        refusal = str(error)
    if refusal is not None:
        assert "checkpoint" in refusal
        return
    here, there = outcome(folder), outcome(whole)
    assert here["weights"] == there["weights"], (name, place)
    assert here["summary"] == there["summary"], (name, place)
    assert here["rounds"] == there["rounds"], (name, place)
