"""Configurations as trees of frozen dataclasses: YAML layers, the command line, resolved copies, fingerprints.

A value is addressed by its dotted path (`outer.lr`), which is also its command-line option (`--outer.lr`) and its
place in YAML. This module knows no particular configuration.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from twophase.base.errors import RunError, UsageError  # noqa: F401 - callers import both from here, too

C = TypeVar("C")
Tree = dict[str, Any]

LATER = {"twophase": "later"}
"""Metadata of a field that came after others had been used: while it has its default it is left out of the tree, so a
configuration from before has the same fingerprint, and its runs are found and resumed."""


def to_tree(config: Any) -> Tree:
    """The configuration as nested dictionaries of plain values (tuples become lists); see `LATER`."""
    values = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return {
        field.name: _plain(value, field.default)
        for field, value in values
        if not (field.metadata == LATER and value == field.default)
    }


def _plain(value: Any, default: Any) -> Any:
    if isinstance(default, float) and type(value) is int:
        return float(value)  # a learning rate of 1 and one of 1.0 are one configuration
    if dataclasses.is_dataclass(value):
        return to_tree(value)
    return list(value) if isinstance(value, tuple) else value


def values_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted path, also those that `to_tree` leaves out."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        values |= (
            values_of(value, f"{path}.") if dataclasses.is_dataclass(value) else {path: _plain(value, field.default)}
        )
    return values


def from_tree(cls: type[C], tree: Mapping[str, Any]) -> C:
    """The configuration that `to_tree` wrote, checked for names.

    Raises:
        UsageError: names that `cls` does not have, or lacks.
    """
    return _from_tree(cls, tree, "")


def _from_tree(cls: Any, tree: Mapping[str, Any], prefix: str) -> Any:
    default = cls()
    names = {field.name for field in dataclasses.fields(cls)}
    later = {field.name for field in dataclasses.fields(cls) if field.metadata == LATER}
    if not names - later <= set(tree) <= names:
        odd = ", ".join(prefix + name for name in sorted((names ^ set(tree)) - later))
        raise UsageError(f"this configuration was written by another version: unknown or absent values {odd}")
    values = {}
    for name in tree:
        value, model = tree[name], getattr(default, name)
        if dataclasses.is_dataclass(model):
            value = _from_tree(type(model), value, f"{prefix}{name}.")
        elif isinstance(model, tuple):
            value = tuple(value)
        elif isinstance(model, float):
            value = float(value)
        values[name] = value
    return cls(**values)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one dictionary from dotted path to value.

    >>> flatten({"outer": {"lr": 0.7}, "seed": 0})
    {'outer.lr': 0.7, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def get(config: Any, path: str) -> Any:
    """The value at a dotted path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """A copy of the configuration with the values at some dotted paths replaced.

    Raises:
        UsageError: a path that the configuration does not have.
    """
    for path, value in values.items():
        config = _with_value(config, path.split("."), value, path)
    return config


def _with_value(config: Any, names: list[str], value: Any, path: str) -> Any:
    head, *rest = names
    if not dataclasses.is_dataclass(config) or head not in {field.name for field in dataclasses.fields(config)}:
        raise UsageError(f"there is no configuration value {path!r}")
    inner = _with_value(getattr(config, head), rest, value, path) if rest else value
    return dataclasses.replace(config, **{head: inner})  # type: ignore[type-var]


def fingerprint(config: Any) -> str:
    """Twelve hexadecimal digits that identify a configuration, or its tree: SHA-256 of the tree's canonical JSON."""
    tree = to_tree(config) if dataclasses.is_dataclass(config) else config
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """What differs between two trees, one phrase a value: `outer.lr is 0.7 there, 0.9 here`."""
    here, there = flatten(values), flatten(others)
    return [
        f"{path} is {there.get(path, 'not set')} there, {here.get(path, 'not set')} here"
        for path in sorted(here.keys() | there.keys())
        if here.get(path) != there.get(path)
    ]


def dump_yaml(config: Any, *, every: bool = False) -> str:
    """The configuration as YAML, in the order of its fields.

    Args:
        config: the configuration.
        every: write also what `to_tree` leaves out, for people; a file that is compared must not have it.
    """
    tree = to_tree(config)
    for path, value in values_of(config).items() if every else ():
        *scope, leaf = path.split(".")
        place = tree
        for name in scope:
            place = place[name]
        place[leaf] = value
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=120)


def load_yaml(path: Path) -> Tree:
    """The mapping that a YAML file holds.

    Raises:
        UsageError: a file that is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror}); check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else type(tree).__name__
        raise UsageError(f"--config {path}: holds {kind}, not a mapping such as 'outer: {{lr: 0.7}}'")
    return tree


def check_tree(tree: Mapping[str, Any], default: Any, where: str) -> None:
    """Raise a UsageError that begins with `where` unless a YAML tree holds values of `default`'s names and kinds.

    Text that reads as a number is left to the command line's parser, which also knows ranges.
    """
    defaults = values_of(default)
    for path, value in flatten(tree).items():
        if path not in defaults:
            near = difflib.get_close_matches(path, defaults, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(defaults)}"
            raise UsageError(f"{where}: {path} is no value of the configuration; {hint}")
        like = defaults[path]
        kind = "true or false" if isinstance(like, bool) else "a list" if isinstance(like, list) else "one value"
        fits = {"true or false": isinstance(value, bool), "a list": isinstance(value, list)}.get(
            kind, isinstance(value, (int, float, str)) and not isinstance(value, bool)
        )
        if not fits:
            raise UsageError(f"{where}: {path} is {value!r}; write {kind}, for example {json.dumps(like)}")


def to_arguments(tree: Mapping[str, Any]) -> list[str]:
    """A YAML tree as the command-line words that set the same values.

    >>> to_arguments({"outer": {"lr": 0.7, "nesterov": True}})
    ['--outer.lr', '0.7', '--outer.nesterov']
    """
    words: list[str] = []
    for path, value in flatten(tree).items():
        *scope, leaf = path.split(".")
        if isinstance(value, bool):
            words.append("--" + ".".join([*scope, leaf if value else f"no-{leaf}"]))
        else:
            words += [f"--{path}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return words


def _spelt_out(words: list[str], default: Any) -> list[str]:
    """Turn `--outer.nesterov true` into `--outer.nesterov`, and `false` into `--outer.no-nesterov`."""
    flags = {path.replace("_", "-") for path, value in values_of(default).items() if isinstance(value, bool)}
    spelt: list[str] = []
    for word in words:
        last = spelt[-1] if spelt else ""
        if word.lower() in ("true", "false") and last.removeprefix("--").replace("_", "-") in flags:
            spelt[-1:] = to_arguments({last.removeprefix("--"): word.lower() == "true"})
        else:
            spelt.append(word)
    return spelt


def parse_arguments(default: C, words: Sequence[str], *, prog: str, description: str = "") -> C:
    """Command-line words on top of a default configuration, by tyro.

    Ends the process with status 2 and tyro's message (which names the option, the value and, for a misspelt name, the
    nearest ones) when the words do not fit.
    """
    import tyro  # noqa: PLC0415 - a fifth of a second that `import twophase` should not cost

    return tyro.cli(
        type(default), args=_spelt_out(list(words), default), default=default, prog=prog, description=description
    )
