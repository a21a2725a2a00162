"""Configuration trees: dotted paths, YAML, fingerprints, command-line words and what happens to mistakes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from twophase.base.config import (
    LATER,
    UsageError,
    differences,
    dump_yaml,
    fingerprint,
    flatten,
    from_tree,
    get,
    hints_of,
    load_yaml,
    overlaid,
    to_tree,
    values_of,
    with_values,
)
from twophase.base.options import Parser, add_values, values_given
from twophase.training.config import InnerConfig


@dataclass(frozen=True)
class Deep:
    """Two levels down."""

    decay: float = 0.1
    periods: tuple[int, ...] = (5, 6)


@dataclass(frozen=True)
class Outer:
    """One level down."""

    lr: float = 0.7
    nesterov: bool = True
    form: Literal["sum", "ema"] = "sum"
    restart: str = "never"
    deep: Deep = field(default_factory=Deep)


@dataclass(frozen=True)
class Config:
    """A small configuration with every kind of value."""

    outer: Outer = field(default_factory=Outer)
    betas: tuple[float, float] = (0.9, 0.999)
    seed: int = 0
    corpus: str = "python"


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1).filter(
    lambda s: not s.startswith("-")
)
CONFIGS = st.builds(
    Config,
    outer=st.builds(
        Outer,
        lr=NUMBERS,
        nesterov=st.booleans(),
        form=st.sampled_from(["sum", "ema"]),
        restart=st.sampled_from(["never", "3", "cycle:5,6,10", "at:4,9", "soft:3:0.2:-0.1"]),
        deep=st.builds(Deep, decay=NUMBERS, periods=st.lists(st.integers(1, 9), max_size=3).map(tuple)),
    ),
    betas=st.tuples(NUMBERS, NUMBERS),
    seed=st.integers(-(2**63), 2**63),
    corpus=WORDS,
)
VALUES: dict[str, tuple[Any, Any]] = {
    "outer.lr": (0.7, 0.9),
    "outer.nesterov": (True, False),
    "outer.form": ("sum", "ema"),
    "outer.restart": ("never", "3"),
    "outer.deep.decay": (0.1, 0.2),
    "outer.deep.periods": ([5, 6], (5, 6, 10)),
    "betas": ([0.9, 0.999], (0.9, 0.99)),
    "seed": (0, 1),
    "corpus": ("python", "file:a.txt"),
}
"""The default of each value, as in a tree, and another value."""


def parsed(config: Any, *words: str) -> Any:
    """The configuration with the values that the options of a command line give."""
    parser = Parser("x")
    add_values(parser, config, "values")
    return with_values(config, values_given(parser.parse_args(words), config))


def test_flatten_gives_every_leaf_its_dotted_path():
    """`flatten(to_tree(config))` is one entry a value, in the order of the fields, tuples as lists."""
    defaults = [(path, default) for path, (default, _) in VALUES.items()]
    assert list(flatten(to_tree(Config())).items()) == defaults
    assert list(hints_of(Config)) == list(VALUES)


def test_with_values_changes_one_value_only():
    """A value set by its path is there and changes the fingerprint; all others and the original stay as they were."""
    original, others = Config(), {path: value for path, (_, value) in VALUES.items()}
    fingerprints = {fingerprint(original)}
    for path, value in others.items():
        changed = with_values(original, {path: value})
        assert get(changed, path) == value
        assert {p for p in VALUES if get(changed, p) != get(original, p)} == {path}
        fingerprints.add(fingerprint(changed))
    assert original == Config() == with_values(original, {})
    assert len(fingerprints) == len(VALUES) + 1
    assert {path: get(with_values(original, others), path) for path in VALUES} == others
    assert with_values(original, {"outer": Outer(lr=1.0)}).outer.lr == 1.0


@pytest.mark.parametrize("path", ["lr", "outer.lrr", "outer.lr.x", "outer.deep.x", "", "outer.", "outer..lr", "seed.x"])
def test_with_values_names_an_unknown_path(path: str):
    """A path that the configuration does not have is a UsageError with that path."""
    with pytest.raises(UsageError, match="there is no configuration value") as caught:
        with_values(Config(), {path: 1})
    assert repr(path) in str(caught.value)


# --- fingerprints and differences ---------------------------------------------------------------------------------


def test_fingerprint_is_the_hash_of_canonical_json():
    """Twelve digits of the SHA-256 of the JSON text written out here: keys sorted, no spaces."""
    text = (
        '{"betas":[0.9,0.999],"corpus":"python","outer":{"deep":{"decay":0.1,"periods":[5,6]},"form":"sum","lr":0.7,'
        '"nesterov":true,"restart":"never"},"seed":0}'
    )
    assert fingerprint(Config()) == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert fingerprint(Config(outer=Outer(lr=1))) == fingerprint(Config(outer=Outer(lr=1.0)))


@dataclass(frozen=True)
class Newer(Config):
    """The configuration of a later version, with two more values."""

    schedule: str = field(default="cosine", metadata=LATER)
    fast: bool = field(default=False, metadata=LATER)


def test_later_values_at_their_default_change_nothing(tmp_path: Path):
    """Same tree, same fingerprint, and what the earlier version wrote is read; set, they are written and count."""
    assert to_tree(Newer()) == to_tree(Config())
    assert fingerprint(Newer()) == fingerprint(Config())
    assert from_tree(Newer, to_tree(Config(seed=3))) == Newer(seed=3)
    assert values_of(Newer()) == flatten(to_tree(Config())) | {"schedule": "cosine", "fast": False}
    linear = Newer(schedule="linear")
    assert to_tree(linear) == to_tree(Config()) | {"schedule": "linear"}
    assert fingerprint(linear) != fingerprint(Newer())
    assert from_tree(Newer, to_tree(linear)) == linear
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(linear))
    assert overlaid(Newer(), load_yaml(path), "--config") == linear
    assert yaml.safe_load(dump_yaml(Newer(), whole=True)) == to_tree(Newer()) | {"schedule": "cosine", "fast": False}
    assert parsed(Newer(), "--fast", "true") == Newer(fast=True)
    with pytest.raises(UsageError, match=r"unknown or absent values schedule$"):
        from_tree(Config, to_tree(linear))


def test_differences_are_phrases_with_both_values():
    """One phrase a value that differs, sorted by path; a value that one side lacks is called not set."""
    changed = to_tree(with_values(Config(), {"outer.lr": 0.9, "seed": 1}))
    assert differences(changed, to_tree(Config())) == ["outer.lr is 0.7 there, 0.9 here", "seed is 0 there, 1 here"]
    assert differences({"a": {"b": 1}}, {"c": 2}) == ["a.b is not set there, 1 here", "c is 2 there, not set here"]


@pytest.mark.slow
@settings(max_examples=6)
@given(CONFIGS, CONFIGS)
def test_differences_are_empty_exactly_for_equal_trees(first: Config, second: Config):
    """No differences if and only if the trees are equal; and as many phrases as there are unequal values."""
    values, others = flatten(to_tree(first)), flatten(to_tree(second))
    assert len(differences(to_tree(first), to_tree(second))) == sum(values[path] != others[path] for path in VALUES)


# --- YAML ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=15)
@given(CONFIGS)
def test_there_and_back(config: Config):
    """A tree as YAML, in the order of the fields, read whole or laid over the default, makes the configuration."""
    tree = yaml.safe_load(dump_yaml(config))
    assert tree == to_tree(config)
    assert list(flatten(tree)) == list(VALUES)
    assert from_tree(Config, tree) == config
    assert overlaid(Config(), tree, "--config") == config


def test_load_yaml_reads_utf8(tmp_path: Path):
    """A YAML file with accents is read as UTF-8 whatever the locale."""
    path = tmp_path / "a.yaml"
    path.write_bytes("corpus: file:é.txt\nouter: {lr: 0.9}\n".encode())
    assert load_yaml(path) == {"corpus": "file:é.txt", "outer": {"lr": 0.9}}


def test_from_tree_names_odd_values():
    """Unknown and absent names at any depth are a UsageError that lists them with their paths."""
    unknown, absent = to_tree(Config()), to_tree(Config())
    unknown["outer"]["deep"]["x"] = 1
    del absent["seed"]
    for tree, path in ((unknown, r"outer\.deep\.x"), (absent, "seed")):
        with pytest.raises(UsageError, match=f"unknown or absent values {path}$"):
            from_tree(Config, tree)


def test_from_tree_names_values_of_another_kind():
    """The message has the path, the value, one that would do, and the remedy."""
    tree = to_tree(Config())
    tree["outer"]["deep"]["decay"] = "much"
    with pytest.raises(UsageError, match=r"outer\.deep\.decay is 'much', .* kind of 0\.1; put the file back"):
        from_tree(Config, tree)


# --- command line -------------------------------------------------------------------------------------------------


def test_layers():
    """A layer changes only what it names, with numbers as text or not, and the command line beats it."""
    layer = overlaid(Config(seed=5), {"outer": {"lr": "9e-1", "nesterov": False}, "betas": [0, "0.5"]}, "a.yaml")
    assert layer == with_values(Config(seed=5), {"outer.lr": 0.9, "outer.nesterov": False, "betas": (0.0, 0.5)})
    assert parsed(layer, "--outer.lr", "7e-1", "--outer.lr", "0.6").outer == Outer(lr=0.6, nesterov=False)
    assert parsed(layer) == overlaid(layer, {"outer": {}}, "a.yaml") == layer


def test_options_say_what_they_are():
    """Each value is an option in the group of its part; its help is the text of its field on one line, and its default.

    A field without a text has the default alone; a percent sign and a line break in a text do no harm.
    """
    parser = Parser("x")
    add_values(parser, InnerConfig(), "values")
    text = " ".join(parser.format_help().split())
    assert text.startswith("usage: x [OPTIONS] ")
    assert "--schedule cosine|linear|constant|wsd Schedule after the warmup: cosine or linear decay to zero" in text
    assert "constant, then linear decay (wsd)" in text
    assert "in the gradient's point (0.9 0.999)" in text
    parser = Parser("x")
    add_values(parser, Percent(), "values")
    assert "--share X Half, 50 % of it (0.5)" in " ".join(parser.format_help().split())
    add_values(parser, Config(), "values")
    assert "outer: One level down. --outer.lr X (0.7) --outer.nesterov" in " ".join(parser.format_help().split())


@dataclass(frozen=True)
class Percent:
    """A value with a percent sign, and what an option may also be."""

    share: float = 0.5
    """Half,
    50 % of it."""
    most: float | None = None
    places: tuple[float, ...] | None = None
    path: Path | None = None


def test_values_that_may_be_absent():
    """An option of a value that may be None takes the other type; without words a list is empty and not absent."""
    assert parsed(Percent(), "--most=-1e-5", "--places", "--path", "a_b") == Percent(0.5, -1e-5, (), Path("a_b"))
    assert parsed(Percent()) == Percent()
