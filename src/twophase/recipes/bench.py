"""The bench: places, arms and budget of a comparison of outer optimizers that is fixed before its runs.

A place is a task with a size, a length, a communication period, a number of replicas and an inner schedule. At every
place each arm has the same number of settings for its search, on tuning seeds; what it found is judged on held-out
seeds. All of it is the protocol; a change of anything raises `PROTOCOL`, and numbers of different protocols are never
compared. `docs/bench/registration-1.md` says what is asked of it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, fingerprint, to_tree, with_values
from twophase.base.reading import read_json_object
from twophase.recipes.arms import CONTROL, Arm
from twophase.sweeps.grid import Cell
from twophase.tasks.named import LM, TASK, config_class

PROTOCOL = 1
REFERENCE, FACTS = "reference.csv", "reference.json"
"""Stored rows of the arms, and how they were made."""
_FROM_WHEEL = Path(__file__).parent / "bench_tables"
HEAVY_BALL, NESTEROV = "heavy-ball:momentum=~0.6", "nesterov:momentum=~0.6"
"""Rules whose momentum is tuned, and where its search begins."""
CANDIDATES = ("auto", "averaging+filter=orthogonal", "auto+filter=orthogonal")
"""Arms without an outer number to tune."""
SCHEDULES = (
    "memoryless+schedule=linear:final=2",
    f"{HEAVY_BALL}+schedule=momentum:warmup=0",
    "ramp:~0.5",
    "along:~0.5",
    "gain:~1",
)
"""Controls of `auto`: what depends on the round alone, or is one part of it."""
MOMENTUM = tuple(f"{rule}{restart}" for rule in (HEAVY_BALL, NESTEROV) for restart in ("", "@3", "@K"))
_DILOCO = "nesterov:lr=0.7:momentum=0.9"
SHELF = ("adamw", "adamw@3", "muon", "muon@3", "slowmo", "slowmo@3", "averaging+readout=tail:rounds=3")
ONE_REPLICA = ("gpa", "schedule-free")
"""Arms for a single replica alone. There Nesterov is SNOO, and memoryless is Lookahead."""
ARMS = ("memoryless", *CANDIDATES, *SCHEDULES, *MOMENTUM, f"{NESTEROV}+filter=orthogonal", *SHELF)
"""Beside averaging, at every place of the full list."""
FEW = ("memoryless", *CANDIDATES, "ramp:~0.5", NESTEROV, f"{NESTEROV}@3")
"""At the places that are there for a trend."""


@dataclass(frozen=True)
class Place:
    """Where arms are compared; `values` of the configuration are by dotted path."""

    name: str
    title: str
    values: Mapping[str, Any]
    task: str = LM
    few: bool = False
    """Whether only `FEW` are compared, with five eighths of the settings, on five held-out seeds."""

    def base(self) -> Any:
        """Return the configuration of its runs, of which the inner learning rate is where searches begin."""
        named = {f"{TASK}.name": self.task} if self.task != LM else {}
        return with_values(config_class(self.task)(), {**named, "inner.lr": 8e-3, **self.values})

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms that are compared with averaging."""
        single = ONE_REPLICA if self.values["replicas"] == 1 else ()
        return FEW if self.few else (*ARMS, *single)


def _place(name: str, title: str, replicas: int, inner_steps: int, steps: int, **values: Any) -> Place:
    task, few = values.pop("task", LM), values.pop("few", False)
    dotted = {path.replace("__", "."): value for path, value in values.items()}
    return Place(name, title, {"replicas": replicas, "inner_steps": inner_steps, "steps": steps} | dotted, task, few)


PLACES = (
    _place("short", "2 replicas, S = 16, 30 rounds, cosine, width 32", 2, 16, 480),
    _place("non-iid", "4 replicas, each with its own kind of document, S = 16, 30 rounds", 4, 16, 480,
           data__split="non-iid", data__batch_size=4),
    _place("one-replica", "1 replica, S = 16, 60 rounds", 1, 16, 960),
    _place("code", "2 replicas, a second text, S = 16, 30 rounds, wsd", 2, 16, 480,
           data__corpus="python-code", inner__schedule="wsd"),
    _place("digits", "4 replicas, a small image classifier, S = 8, 20 rounds", 4, 8, 160,
           task="digits", inner__lr=32e-3),
    _place("sparse", "2 replicas, S = 64, 12 rounds, wsd", 2, 64, 768, inner__schedule="wsd", inner__lr=4e-3),
    _place("eight", "8 replicas, S = 8, 30 rounds", 8, 8, 240, data__batch_size=4),
    _place("long", "2 replicas, S = 16, 60 rounds", 2, 16, 960),
    _place("width-64", "as short, 15 rounds, width 64", 2, 16, 240, few=True,
           model__hidden_size=64, model__intermediate_size=176),
    _place("width-128", "as short, 15 rounds, width 128", 2, 16, 240, few=True,
           model__hidden_size=128, model__intermediate_size=352, model__heads=4, inner__lr=4e-3),
    _place("width-256", "as short, 10 rounds, width 256", 2, 16, 160, few=True,
           model__hidden_size=256, model__intermediate_size=704, model__heads=8, inner__lr=2e-3),
    _place("inner-muon", "as short, inner Muon in the place of AdamW", 2, 16, 480, few=True,
           inner__method="muon", inner__lr=16e-3),
)  # fmt: skip
"""All places; the first eight have all arms."""


@dataclass(frozen=True)
class Size:
    """How much is spent on an arm at a place: settings of its search, tuning seeds, and held-out (`fresh`) seeds."""

    points: int
    seeds: tuple[int, ...]
    fresh: tuple[int, ...]
    places: tuple[str, ...] = field(default=tuple(place.name for place in PLACES))

    def at(self, place: Place) -> Size:
        """Return what is spent at a place."""
        if not place.few:
            return self
        return Size(max(self.points * 5 // 8, 1), self.seeds, self.fresh[:5], self.places)


FULL = Size(16, (0, 1), tuple(range(100, 110)))
QUICK = Size(10, (0,), tuple(range(100, 105)), tuple(place.name for place in PLACES if not place.few))
SIZES = {"quick": QUICK, "full": FULL}


@dataclass(frozen=True)
class Family:
    """Comparisons that share a chance of 5 % for any wrong word among them."""

    title: str
    pairs: tuple[tuple[str, str, str], ...]
    """Place, arm and what it is held against."""


def families() -> tuple[Family, ...]:
    """Return the comparisons of registration 1, in its order."""
    main = [place for place in PLACES if not place.few]
    simple = ("memoryless", *SCHEDULES)

    def of_all(arms: Iterable[str], controls: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
        pairs = list(product(arms, controls))
        return tuple((place.name, *pair) for place in main for pair in pairs if pair[0] in place.arms)

    others = [arm for arm in (*ARMS, *ONE_REPLICA) if arm not in CANDIDATES]
    restarted = [arm for arm in ARMS if "@" in arm]
    few = [(place.name, arm, CONTROL) for place in PLACES if place.few for arm in place.arms]
    return (
        Family("candidates against averaging", of_all(CANDIDATES, [CONTROL])),
        Family("candidates against schedule controls", of_all(CANDIDATES, simple)),
        Family("other arms against averaging", of_all(others, [CONTROL])),
        Family("with a restart against without",
               tuple(pair for arm in restarted for pair in of_all([arm], [arm.partition("@")[0]]))),
        Family("places for a trend, against averaging", tuple(few)),
    )  # fmt: skip


TREATMENTS = {
    "momentum": ("heavy-ball:lr=1:momentum=0.3", "observe"),
    "DiLoCo's momentum": (_DILOCO, "observe"),
    "a restart of it": (f"{_DILOCO}@3", _DILOCO),
    "a rising rate": ("memoryless:lr=1+schedule=linear:final=2", "observe"),
    "orthogonal": ("averaging+filter=orthogonal", "observe"),
}
"""Changes whose sign the map of regimes predicts, each with what it is held against; `observe` is averaging."""
FITTED = ("short", "one-replica", "digits", "eight")
"""Places on which its rules are chosen; they are judged on the other four."""


def regime_cells(place: Place) -> list[Cell]:
    """Return the runs of the map of regimes at a place: every treatment at four inner learning rates, two seeds."""
    base, single = place.base(), place.values["replicas"] == 1
    arms = dict.fromkeys(arm for pair in TREATMENTS.values() for arm in pair)
    return [
        # A single replica has none to agree with.
        replace(Arm("along:0" if arm == "observe" and single else arm, lr).cell(base, {"inner.lr": lr}, seed), arm=arm)
        for factor in (0.25, 0.5, 1, 2)
        for lr in [factor * base.inner.lr]
        for seed in (20, 21)
        for arm in arms
    ]


def stored(name: str) -> list[dict[str, str]]:
    """Return the rows of a stored table: `reference.csv` or `regimes.csv`.

    Raises:
        UsageError: this copy has none.
    """
    with _stored(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def stored_facts() -> dict[str, Any]:
    """Return what is known of the reference table: protocol, and by place versions, texts and time.

    Raises:
        UsageError: this copy has none.
    """
    try:
        return read_json_object(_stored(FACTS))
    except ValueError as error:
        raise UsageError(f"{FACTS} of this copy is damaged ({error}); reinstall it") from None


def _stored(name: str) -> Path:
    places = (_FROM_WHEEL, Path(__file__).parents[3] / "experiments" / "bench")
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None:
        raise UsageError(f"{name} is not in this copy; make it: twophase bench --reference, or --regimes")
    return path


def protocol_fingerprint() -> str:
    """Return what tells protocols apart: a digest of places, arms and sizes."""
    places = [{"name": place.name, "arms": place.arms, "base": to_tree(place.base())} for place in PLACES]
    return fingerprint({"places": places, "sizes": {name: asdict(size) for name, size in SIZES.items()}})


def short(arm: str) -> str:
    """Return an arm's text for a table: without where searches begin, and its parts in words."""
    return (
        re.sub(r"~[\d.]+(e[+-]?\d+)?", "C", re.sub(r":momentum=~0\.6(?![\d.e])", "", arm))
        .replace("filter=", "")
        .replace("schedule=linear:final=2", "rising rate")
        .replace("schedule=momentum:warmup=0", "momentum ramp")
        .replace("readout=tail:rounds=3", "tail average")
    )
