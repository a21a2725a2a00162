"""Grids: typed axes, products, arms, and the identity of a sweep."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError, fingerprint
from twophase.restart import Periodic
from twophase.sweeps.grid import Axis, Cell, Sweep, parse_axes, product, spec_differences, text_of, words_of


@dataclass(frozen=True)
class Outer:
    """A group of values."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    form: Literal["ema", "sum"] = "sum"
    restart: str = "never"


@dataclass(frozen=True)
class Sync:
    """Values of several words."""

    fragments: tuple[str, ...] = ("1",)
    restart: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    """A small configuration."""

    outer: Outer = field(default_factory=Outer)
    sync: Sync = field(default_factory=Sync)
    corpus: str = "python"
    betas: tuple[float, float] = (0.9, 0.999)
    inner_steps: int = 16
    seed: int = 0


BASE = Config()


def test_product_covers_every_combination_once() -> None:
    """Every combination appears once, the last axis fastest, with the fixed values in all of them."""
    cells = product(BASE, [Axis("seed", (0, 1)), Axis("outer.lr", (0.3, 0.7))], "arm", {"outer.nesterov": False})
    assert [(cell.values["seed"], cell.values["outer.lr"]) for cell in cells] == [
        (0, 0.3),
        (0, 0.7),
        (1, 0.3),
        (1, 0.7),
    ]
    for cell in cells:
        assert cell.arm == "arm"
        assert cell.config == Config(outer=Outer(lr=cell.values["outer.lr"], nesterov=False), seed=cell.values["seed"])
        assert cell.values["outer.nesterov"] is False
        assert cell.run_id == fingerprint(cell.config)
    assert len({cell.run_id for cell in cells}) == 4


def test_product_of_no_axes_is_one_cell() -> None:
    """Without axes there is one cell, the base with its fixed values."""
    (cell,) = product(BASE, [], fixed={"seed": 3})
    assert cell.config == Config(seed=3)


def test_equal_settings_have_equal_run_ids() -> None:
    """1 and 1.0, and 3, '3', '03' and Periodic(3), are one setting each."""
    ids = {product(BASE, [], fixed={"outer.lr": lr})[0].run_id for lr in (1, 1.0)}
    assert len(ids) == 1
    cells = [product(BASE, [], fixed={"outer.restart": restart})[0] for restart in (3, "3", "03", Periodic(3))]
    assert {cell.config.outer.restart for cell in cells} == {"3"}
    assert len({cell.run_id for cell in cells}) == 1


def test_parse_axes_types_values_by_the_base() -> None:
    """Words become values of the type that the base has there; restart policies get their canonical text."""
    axes = parse_axes(
        [
            ["outer.lr", "0.3", "1", "1e-3"],
            ["outer.nesterov", "true", "False"],
            ["inner-steps", "8", "16"],
            ["corpus", "python", "file:a b.txt"],
            ["outer.form", "ema"],
            ["outer.restart", "never", "03", "cycle:2,3", "soft:3:0.5:0"],
        ],
        BASE,
    )
    assert axes == [
        Axis("outer.lr", (0.3, 1.0, 0.001)),
        Axis("outer.nesterov", (True, False)),
        Axis("inner_steps", (8, 16)),
        Axis("corpus", ("python", "file:a b.txt")),
        Axis("outer.form", ("ema",)),
        Axis("outer.restart", ("never", "3", "cycle:2,3", "soft:3:0.5:0")),
    ]
    assert [type(value) for axis in axes[:3] for value in axis.values] == [float] * 3 + [bool] * 2 + [int] * 2


def test_parse_axes_takes_sets_of_words() -> None:
    """Of a setting of several words each value is a set: NAME= behind a comma begins a word, other commas do not."""
    axes = parse_axes(
        [
            ["sync.restart", "none", "a=soft:3:.5:0", "a=03, b=cycle:1,2", "a=cycle:5,6,b=at:4,9,c=never"],
            ["sync.fragments", "2", "a=embedding|head,b=.", "a=x{1,2},b=."],
        ],
        BASE,
    )
    assert axes == [
        Axis(
            "sync.restart",
            (
                (),
                ("a=soft:3:0.5:0",),
                ("a=3", "b=cycle:1,2"),
                ("a=cycle:5,6", "b=at:4,9", "c=never"),
            ),
        ),
        Axis("sync.fragments", (("2",), ("a=embedding|head", "b=."), ("a=x{1,2}", "b=."))),
    ]
    cells = product(BASE, axes)
    assert [cell.config.sync.restart for cell in cells[::3]] == list(axes[0].values)
    spec = Sweep("s", BASE, cells).spec()
    assert json.loads(json.dumps(spec)) == spec
    assert spec["axes"]["sync.restart"][:2] == [[], ["a=soft:3:0.5:0"]]


NAMES = st.text(st.characters(codec="ascii", exclude_characters=",=", exclude_categories=["Z", "C"]), min_size=1)
VALUES = st.text(st.characters(codec="ascii", exclude_characters="=", exclude_categories=["Z", "C"]), min_size=1)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4))
def test_sets_of_words_and_back(pairs: list[tuple[str, str]]) -> None:
    """Whatever the names and values are, commas in values included, the text of a set gives the set."""
    words = tuple(f"{name}={value}" for name, value in pairs)
    assert words_of(text_of(words)) == words


@pytest.mark.parametrize(
    "words",
    [
        *("outer.lr", "outer.lrr 1", "momentum 1", "outer.lr.x 1", "zzz 1", "outer 1", "betas 1", "outer.lr nan"),
        *("seed 1.5", "outer.nesterov 1", "outer.form summ", "outer.restart sometimes", "outer.lr 1 0.3 1.0"),
        *("outer.restart 3 03", "sync.restart 3", "sync.restart 3,b=5", "sync.restart a=3,5,b=never"),
        *("sync.restart a=3,b=5 a=03,b=5", "sync.restart a=3,b=5 b=5,a=3", "sync.fragments a=x,b=y=z"),
    ],
)
def test_parse_axes_refuses(words: str) -> None:
    """Every mistake in an axis is one message that names the axis."""
    path, *values = words.split()
    with pytest.raises(UsageError, match=path):
        parse_axes([[path, *values]], BASE)
    with pytest.raises(UsageError, match="--axis seed"):
        parse_axes([["seed", "1"], ["seed", "2"]], BASE)


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("seed", ()),
        ("seed", (1, 1)),
        ("outer.lr", (1, 1.0)),
        ("seed", (True,)),
        ("nothing", (1,)),
        ("outer.lr", ("one",)),
        ("sync.restart", (3,)),
        ("sync.restart", ((1, 2),)),
        ("sync.restart", (("a=3", "b=cycle:1,c=2"),)),
    ],
)
def test_product_refuses(path: str, values: tuple[Any, ...]) -> None:
    """An axis that is empty, repeats itself, does not exist or has values of the wrong type is refused."""
    with pytest.raises(UsageError, match=f"--axis {path}"):
        product(BASE, [Axis(path, values)])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, unique=True))
def test_text_and_back(values: list[float]) -> None:
    """Every finite number survives the way through the command line, and its run id with it."""
    (axis,) = parse_axes([["outer.lr", *map(repr, values)]], BASE)
    assert list(axis.values) == values
    assert [c.run_id for c in product(BASE, [axis])] == [
        c.run_id for c in product(BASE, [Axis("outer.lr", tuple(values))])
    ]


def test_sweep_spec_is_json() -> None:
    """The spec survives JSON and holds name, base, axes with their values, and every cell with what it controls."""
    first = product(BASE, [Axis("outer.lr", (0.3, 0.7))], "a", {"outer.restart": "3"})
    control = Cell("b", {"outer.lr": 0.1}, product(BASE, [], fixed={"outer.lr": 0.1})[0].config, first[0].run_id)
    sweep = Sweep("try", BASE, [*first, control])
    spec = sweep.spec()
    assert json.loads(json.dumps(spec)) == spec
    assert spec["name"] == "try"
    assert spec["base"]["outer"]["lr"] == 0.7
    assert spec["axes"] == {"outer.restart": ["3", "never"], "outer.lr": [0.3, 0.7, 0.1]}
    assert [(cell["arm"], cell["run"], cell["control_of"]) for cell in spec["cells"]] == [
        ("a", first[0].run_id, None),
        ("a", first[1].run_id, None),
        ("b", control.run_id, first[0].run_id),
    ]
    assert sweep.values(control) == {"outer.restart": "never", "outer.lr": 0.1}


def test_shared_runs_are_run_once() -> None:
    """Identical cells of two arms are two cells and one run."""
    sweep = Sweep("s", BASE, [cell for arm in "ab" for cell in product(BASE, [Axis("seed", (0, 1))], arm)])
    assert len(sweep.cells) == 4
    assert list(sweep.runs.values()) == [Config(seed=0), Config(seed=1)]


def test_sweep_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cells, colliding run ids, and a control of nothing are refused."""
    with pytest.raises(UsageError, match="no cells"):
        Sweep("s", BASE, [])
    with pytest.raises(ValueError, match="control of feedbeef"):
        Sweep("s", BASE, [Cell("a", {}, BASE, control_of="feedbeef")])
    monkeypatch.setattr("twophase.sweeps.grid.fingerprint", lambda _: "same")
    with pytest.raises(ValueError, match="share the run id same"):
        Sweep("s", BASE, product(BASE, [Axis("seed", (0, 1))]))


def test_spec_differences_name_what_differs() -> None:
    """Name, base and axes are named; when only the arms differ, that is said; equal specs have none."""

    def spec(arm: str = "a", name: str = "s", steps: int = 16, seeds: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
        base = Config(inner_steps=steps)
        return Sweep(name, base, product(base, [Axis("seed", seeds)], arm)).spec()

    assert spec_differences(spec(), spec()) == []
    assert spec_differences(spec(), spec(name="t")) == ["its name is t there, s here"]
    assert spec_differences(spec(), spec(steps=8)) == ["inner_steps is 8 there, 16 here"]
    assert spec_differences(spec(), spec(seeds=(0, 2))) == ["axis seed is [0, 2] there, [0, 1] here"]
    assert "other arms" in spec_differences(spec(), spec(arm="b"))[0]
