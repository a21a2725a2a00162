"""One thread, Hypothesis without a deadline, and an adaptive policy that nothing in `src` knows."""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, and for torch below
# tests ask every policy, also in the processes that they start
os.environ.setdefault("TWOPHASE_POLICIES", "policies")
os.environ["PYTHONPATH"] = f"{Path(__file__).parents[1] / 'experiments'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import forked
from twophase.restart import REGISTRY
from twophase.restart import register as register_
from twophase.sweeps import runner as launch

gc.set_threshold(50_000, 10, 10)  # half a million objects of the libraries stay: to look at them takes half a second
torch.set_num_threads(1)  # sums are then made in one order, so that equal means equal bits

# Derandomized, so that a newcomer's `make test` never meets a new example. To look for such examples:
# HYPOTHESIS_PROFILE=explore pytest ... (see amount.py)
settings.register_profile("twophase", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "twophase"))

pytest_plugins = ["browser"]  # the session fixture of one headless Chromium

QUICK_CASES = 3
"""At most so many cases of a test are in the quick set, `-m "not slow"`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call slow what starts processes or a browser, and most cases of a test that has many: a few are left."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        if {"dist", "browser"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker("slow")
        if item.get_closest_marker("slow") is None:
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in alike.values():
        for number, item in enumerate(cases):
            if number % -(-len(cases) // QUICK_CASES):
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what tests and libraries are made of out of the collections that a library or a test asks for."""
    gc.freeze()


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of sweeps that this process runs need not import torch again."""
    monkeypatch.setattr(launch, "subprocess", forked.FORKING)


@pytest.fixture
def register_policy() -> Iterator[Callable[[str], Any]]:
    """`twophase.restart.register` for one test: what it registered is forgotten afterwards."""
    names: list[str] = []

    def register(name: str):
        names.append(name)
        return register_(name)

    yield register
    for name in names:
        REGISTRY.pop(name, None)
