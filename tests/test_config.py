"""Configuration trees: dotted paths, YAML, fingerprints, options, axes, and what a mistake is answered with."""

from __future__ import annotations

import hashlib
import json
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from twophase.cli.train import RunOptions, parse_run
from twophase.config import dump_yaml, fingerprint, flatten, get, hints_of, load_yaml, parse, to_tree, update
from twophase.errors import UsageError
from twophase.recipes.pretraining import nano
from twophase.runs.config import InnerConfig
from twophase.sweeps.grid import Axis, fitted
from twophase.tasks.lm.config import TrainConfig

TEXTS = {
    "outer.method": "heavy-ball", "outer.restart": "cycle:5,6,10", "outer.filter": "clip:1",
    "outer.schedule": "linear:2", "inner.betas": "0.5 0.25", "sync.fragments": "ends=embed|head blocks=blocks",
    "sync.restart": "0=cycle:5,6", "device": "cuda", "data.corpus": "file:a_b.txt", "data.tokenizer": "mistral",
}  # fmt: skip
"""Words of options that are text or several."""


def other(path: str, hint: Any) -> str:
    """Return what an option may have that is not its default."""
    default = get(TrainConfig(), path)
    if typing.get_origin(hint) is typing.Literal:
        return next(choice for choice in typing.get_args(hint) if choice != default)
    if hint is bool:
        return str(not default).lower()
    return TEXTS.get(path) or (str(2 * default or 2) if hint is int else "0.25")


@pytest.mark.parametrize(("path", "hint"), hints_of(TrainConfig).items())
def test_a_value_is_the_same_as_an_option_in_a_file_and_on_an_axis(tmp_path: Path, path: str, hint: Any) -> None:
    """Every value of a run, tuples included: by words, by YAML, and by the text of an axis; and it is one change."""
    words = other(path, hint).split()
    _, by_option = parse(RunOptions, [f"--{path.replace('_', '-')}", *words], "x", TrainConfig())
    assert {name for name in hints_of(TrainConfig) if get(by_option, name) != get(TrainConfig(), name)} == {path}
    (tmp_path / "a.yaml").write_text(dump_yaml(by_option))
    assert update(TrainConfig(), load_yaml(tmp_path / "a.yaml")) == by_option
    (value,) = fitted(TrainConfig(), Axis(path, (",".join(words),)))
    assert (value, type(value)) == (get(by_option, path), type(get(by_option, path)))
    if type(None) in typing.get_args(hint):
        for word in ("none", "None"):
            assert get(parse(RunOptions, [f"--{path}", word], "x", by_option)[1], path) is None
    default = update(by_option, {path: get(TrainConfig(), path)})
    assert fingerprint(default) == fingerprint(TrainConfig()) != fingerprint(by_option)


@pytest.mark.parametrize("path", ["sync.stagger", "repeat", "model.tie_embeddings"])
def test_booleans(path: str) -> None:
    """A bare flag, `--no-`, and true or false, with a space or `=`; from either default."""
    group, dot, name = path.replace("_", "-").rpartition(".")
    for default in (True, False):
        base = update(TrainConfig(), {path: default})
        for words, value in (
            (f"--{path}", True), (f"--{path} true", True), (f"--{path}=True", True),
            (f"--{group}{dot}no-{name}", False), (f"--{path} false", False), (f"--{path}=false", False), ("", default),
        ):  # fmt: skip
            assert get(parse(RunOptions, words.split(), "x", base)[1], path) is value, words


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("outer: {momentun: 0.3}", "outer.momentun: no such value; did you mean outer.momentum?"),
        ("lr: 0.3", "inner.lr or outer.lr"),
        ("inner: {lr: much}", "inner.lr: must be a number, got 'much'"),
        ("steps: 1.5", "steps"),
        ("sync: {compression: int4}", "float32, bfloat16, int8, got 'int4'"),
        ("inner: {lr: -1}", "--inner.lr: must be above 0"),
        ("- 1", "--config"),
        ("a: [", "--config"),
    ],
)
def test_a_mistake_in_a_file_names_its_place(tmp_path: Path, text: str, part: str) -> None:
    """The value's path, and what it must be."""
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        parse_run(RunOptions, ["--config", str(tmp_path / "odd.yaml")], "train")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers(tmp_path: Path) -> None:
    """Recipe, then files from left to right, also one that comes twice; options win; only what is said changes."""
    for name, text in (("a", "steps: 100\nouter: {lr: 1e-1}"), ("b", "steps: 200\nouter: {restart: 3}")):
        (tmp_path / name).write_text(text)
    a, b = ["--config", str(tmp_path / "a")], ["--config", str(tmp_path / "b")]
    for words, steps in ((a + b, 200), (a + b + a, 100), ([*a, *b, "--steps", "7", *a], 7)):
        _, config, given = parse_run(RunOptions, words, "train")
        expected = update(TrainConfig(), {"steps": steps, "outer.lr": 0.1, "outer.restart": "3"})
        assert config == expected
        assert given == {"steps", "outer.lr", "outer.restart"}
    _, config, _ = parse_run(RunOptions, ["--recipe", "nano", *a, "--inner-steps", "2048"], "train")
    assert (config.steps, config.outer.lr, config.outer.momentum, config.model.layers) == (100, 0.1, 0.7, 4)
    assert (config.checkpoint_every, config.evaluate_every) == (1, 1)  # the recipe's pace, counted in steps
    words = ["--recipe", "nano", "--inner-steps", "2048", "--evaluate-every", str(nano().evaluate_every)]
    assert parse_run(RunOptions, words, "train")[1].evaluate_every == nano().evaluate_every  # said, though the same


@dataclass(frozen=True)
class Small:
    """A configuration of three values."""

    inner: InnerConfig = field(default_factory=InnerConfig)
    places: tuple[str, ...] = ()
    rate: float = 1.0


def test_trees_and_fingerprints() -> None:
    """The fingerprint is of canonical JSON; a rate of 1 and one of 1.0 are one, also where Python gives integers."""
    config = Small(places=("a",), rate=2)
    assert list(flatten(to_tree(config)))[-2:] == ["places", "rate"]
    assert update(Small(), to_tree(config)) == config
    text = json.dumps(to_tree(config), sort_keys=True)
    assert '"places": ["a"], "rate": 2.0' in text
    assert fingerprint(config) == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert fingerprint(replace(config, rate=2.0)) == fingerprint(config) != fingerprint(Small())
    whole, floats = InnerConfig(betas=(0, 1 / 2)), InnerConfig(betas=(0.0, 0.5))  # type: ignore[arg-type]
    assert (whole.betas, fingerprint(whole)) == ((0.0, 0.5), fingerprint(floats))
    assert [type(beta) for beta in whole.betas] == [float, float]
