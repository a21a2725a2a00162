"""Configurations as trees of frozen dataclasses: YAML layers, resolved copies, fingerprints.

A value is addressed by its dotted path (`outer.lr`), which is also its command-line option (`--outer.lr`) and its
place in YAML. This module knows no particular configuration.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
import operator
import os
import re
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from twophase.base.errors import RunError, UsageError  # noqa: F401 - callers import both from here, too
from twophase.base.reading import check_regular
from twophase.number import did_you_mean, number, whole_number

C = TypeVar("C")
Tree = dict[str, Any]

_TRUTHS = {"true": True, "false": False}
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C four times as fast, if PyYAML has it
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LARGEST_YAML = 250_000
_LEVELS = 10
LATER = {"twophase": "later"}
"""Metadata of a field that was added later: at its default it is left out of the tree. So an older configuration has
the same fingerprint, and its runs are found and resumed."""

FIXED = {"twophase": "fixed"}
"""Metadata of a field that follows from the configuration's class, and is no option."""


def to_tree(config: Any, *, whole: bool = False) -> Tree:
    """Return the configuration as nested dictionaries of plain values (tuples become lists).

    Args:
        config: the configuration.
        whole: also the values that `LATER` leaves out.
    """
    tree: Tree = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata == LATER and value == field.default and not whole:
            continue
        if dataclasses.is_dataclass(value):
            value = to_tree(value, whole=whole)
        elif "float" in str(field.type) and type(value) is int:
            value = float(value)  # a learning rate of 1 and one of 1.0 are one configuration
        tree[field.name] = list(value) if isinstance(value, tuple) else value
    return tree


def values_of(config: Any) -> dict[str, Any]:
    """Return every value by its dotted path, also those that `to_tree` leaves out."""
    return flatten(to_tree(config, whole=True))


def from_tree(cls: type[C], tree: Mapping[str, Any], prefix: str = "") -> C:
    """Return the configuration that `to_tree` wrote.

    Args:
        cls: its class; a value that the tree lacks must be one of `LATER`.
        tree: nested dictionaries.
        prefix: the path of the tree, for messages.

    Raises:
        UsageError: names that `cls` does not have, or lacks, or values of another kind.
    """
    default = cls()
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = {field.name for field in fields}
    later = {field.name for field in fields if field.metadata == LATER}
    if not names - later <= set(tree) <= names:
        odd = ", ".join(prefix + name for name in sorted((names ^ set(tree)) - later))
        raise UsageError(f"this configuration was written by another version: unknown or absent values {odd}")
    values = {}
    for name in tree:
        value, model = tree[name], getattr(default, name)
        if not _is_like(value, model):
            raise UsageError(
                f"{prefix}{name} is {value!r}, which is not of the kind of {model!r}; put the file back as it "
                "was written"
            )
        if dataclasses.is_dataclass(model):
            value = from_tree(type(model), value, f"{prefix}{name}.")
        elif model is None:
            try:
                value = fit(hints_of(cls)[name], value)
            except ValueError as error:
                raise UsageError(f"{prefix}{name}: {error}; put the file back as it was written") from None
        elif isinstance(model, tuple):
            value = tuple(value)
        elif isinstance(model, float):
            value = float(number(repr(value)))  # refuses an int that no float holds
        values[name] = value
    return cls(**values)


def _is_like(value: Any, model: Any) -> bool:
    """Tell whether a value of a tree is of the kind of a configuration's value."""
    if dataclasses.is_dataclass(model):
        return isinstance(value, Mapping)
    if isinstance(model, tuple):
        example = model[0] if model else ""  # an empty tuple is one of texts
        return isinstance(value, list) and all(_is_like(part, example) for part in value)
    kinds: dict[type, Any] = {type(None): object, float: (float, int)}
    kind = kinds.get(type(model), type(model))
    return isinstance(value, kind) and (isinstance(model, bool | None) or not isinstance(value, bool))


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Return the declared type of each value of a configuration, by its dotted path."""
    hints: dict[str, Any] = {}
    declared = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = declared[field.name]
        parts = hints_of(hint) if dataclasses.is_dataclass(hint) else {"": hint}
        hints |= {f"{field.name}.{path}".rstrip("."): part for path, part in parts.items()}
    return hints


def fit(hint: Any, value: Any) -> Any:
    """Return a value, or the text that people write for it, as the declared type has it.

    Raises:
        ValueError: it does not fit; the message says what does.

    >>> fit(float, "1e-3"), fit(float, 3), fit(bool, "True"), fit(tuple[float, float], [0.9, "0.99"])
    (0.001, 3.0, True, (0.9, 0.99))
    >>> fit(float | None, "none"), fit(float | None, "0.7")
    (None, 0.7)
    """
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        (kind,) = (kind for kind in kinds if kind is not type(None))
        return None if value is None or value == "none" else fit(kind, value)
    if typing.get_origin(hint) is tuple:
        count = None if Ellipsis in kinds else len(kinds)
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            raise ValueError(f"{value!r} is not a list" + (f" of {count} values" if count else f"; write [{value}]"))
        return tuple(fit(kinds[0], part) for part in value)
    if hint is bool:
        if str(value).lower() not in _TRUTHS:
            raise ValueError(f"{value!r} is not true or false")
        return _TRUTHS[str(value).lower()]
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise ValueError(f"{value!r} is not one number or text")
    if hint is int:
        return whole_number(str(value))
    if hint is float:
        return float(number(str(value)))
    if kinds and value not in kinds:
        raise ValueError(f"{value!r} is not known; {did_you_mean(str(value), kinds)}")
    return value if kinds else hint(value)


def overlaid(config: C, tree: Mapping[str, Any], where: str) -> C:
    """Return a configuration with the values of a YAML tree laid over it.

    Raises:
        UsageError: a value that the configuration does not have, or of another type; it begins with `where`.
    """
    hints, values = hints_of(type(config)), {}
    for path, value in flatten(tree).items():
        if path not in hints:
            raise UsageError(f"{where}: {path} is no value of the configuration; {did_you_mean(path, hints)}")
        try:
            values[path] = fit(hints[path], value)
        except ValueError as error:
            raise UsageError(f"{where}: --{path.replace('_', '-')}: {error}") from None
    return with_values(config, values)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one dictionary from dotted path to value; refuse a path that occurs twice.

    >>> flatten({"outer": {"lr": 0.7}, "seed": 0})
    {'outer.lr': 0.7, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        if twice := flat.keys() & inner.keys():
            raise UsageError(f"{min(twice)} is given twice, once below its group and once by its path; leave one out")
        flat |= inner
    return flat


def get(config: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    return operator.attrgetter(path)(config)


def with_values(config: C, values: Mapping[str, Any], prefix: str = "") -> C:
    """Return a copy of the configuration with the values at some dotted paths replaced.

    Args:
        config: the configuration.
        values: from path to value; where a group is given as well as a value in it, the value wins.
        prefix: the path of the configuration, for messages.

    Raises:
        UsageError: a path that the configuration does not have.
    """
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    changes: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}  # by group, so that each is replaced once
    for path, value in values.items():
        head, dot, rest = path.partition(".")
        if head not in names:
            raise UsageError(f"there is no configuration value {prefix + path!r}")
        if dot:
            below.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    for head, inner in below.items():
        changes[head] = with_values(changes.get(head, getattr(config, head)), inner, f"{prefix}{head}.")
    return dataclasses.replace(config, **changes) if changes else config  # type: ignore[type-var]


def fingerprint(config: Any) -> str:
    """Return twelve hexadecimal digits of a configuration, or its tree: SHA-256 of the tree's canonical JSON."""
    tree = to_tree(config) if dataclasses.is_dataclass(config) else config
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return what differs between two trees, one phrase a value: `outer.lr is 0.7 there, 0.9 here`."""
    values, others = flatten(values), flatten(others)
    return [
        f"{path} is {others.get(path, 'not set')} there, {values.get(path, 'not set')} here"
        for path in sorted(values.keys() | others.keys())
        if values.get(path) != others.get(path)
    ]


def dump_yaml(config: Any, *, whole: bool = False) -> str:
    """Return the configuration as YAML, in the order of its fields.

    Args:
        config: the configuration, or (without `whole`) its tree.
        whole: write also what `to_tree` leaves out, for people; a file that is compared must not have it.
    """
    tree = to_tree(config, whole=whole) if dataclasses.is_dataclass(config) else config
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)


class _Loader(_BaseLoader):
    """Read YAML as configurations have it: plain values below keys that occur once, decimal numbers.

    What YAML 1.1 takes for numbers besides (`010` is 8, `1:30` is 90, `0_2` is 2), and times, stays text.
    """

    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, form) for tag, form in forms if not tag.endswith((":int", ":float", ":timestamp"))]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_scalar(self, node: Any) -> Any:
        """Refuse text that no file name and no option can hold."""
        text = super().construct_scalar(node)
        if isinstance(text, str) and b"\0" in os.fsencode(text):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a text holds a zero byte")
        return text

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that occurs twice, of which YAML would take the last."""
        keys = [str(self.construct_object(key, deep=True)) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {twice} is given twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]*)$"), list("-0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    # Less than what PyYAML quotes when it writes such a text, so that a text is read back as one.
    re.compile(r"-?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?$|-?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-.0123456789"),
)


def _check_plain(text: str) -> None:
    """Refuse references, which can make a small file huge, tags, and more levels than a configuration has."""
    levels = 0
    for event in yaml.parse(text, _BaseLoader):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        deepest = levels + isinstance(event, yaml.ScalarEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or deepest > _LEVELS:
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1}: write plain values, without references, tags, or more than "
                f"{_LEVELS} levels"
            )


def load_yaml(path: Path) -> Tree:
    """Return the mapping that a YAML file holds.

    Raises:
        UsageError: a file that is missing, unreadable, too large, not YAML of plain values, or not a mapping.
    """
    try:
        if check_regular(path) > _LARGEST_YAML:
            raise ValueError(f"more than {_LARGEST_YAML:,} bytes, which no configuration has")
        text = path.read_text(encoding="utf-8")
        _check_plain(text)
        tree = yaml.load(text, _Loader)  # noqa: S506 - a kind of SafeLoader
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror}); check the path") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--config {path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else type(tree).__name__
        raise UsageError(f"--config {path}: holds {kind}, not a mapping such as 'outer: {{lr: 0.7}}'")
    return tree
