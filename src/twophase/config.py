"""Configurations: trees of frozen dataclasses, read from YAML files and options by tyro.

A value has one name everywhere, its dotted path (`outer.lr`): the option `--outer.lr`, the place in YAML, the axis of a
sweep. Each dataclass checks its own values when it is made (`require`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import json
import operator
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from twophase.errors import UsageError

C = TypeVar("C")
Tree = dict[str, Any]


def require(holds: bool, option: str, value: object, range_: str) -> None:
    """Refuse a value that is out of its range, with a UsageError of one line."""
    if not holds:
        raise UsageError(f"--{option.replace('_', '-')}: must be {range_}, got {value}")


def to_tree(config: Any, hint: str = "") -> Any:
    """Return a configuration as nested dictionaries of plain values (tuples become lists)."""
    if dataclasses.is_dataclass(config):
        return {
            field.name: to_tree(getattr(config, field.name), str(field.type)) for field in dataclasses.fields(config)
        }
    if isinstance(config, tuple):
        return [to_tree(item, hint) for item in config]
    # A rate of 1 and one of 1.0 are the same.
    return float(config) if type(config) is int and "float" in hint else config


def fingerprint(config: Any) -> str:
    """Return twelve hexadecimal digits of a configuration, or of its tree."""
    return hashlib.sha256(json.dumps(config, default=to_tree, sort_keys=True).encode()).hexdigest()[:12]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Return nested dictionaries as one from dotted path to value.

    >>> flatten({"outer": {"lr": 0.7}, "seed": 0})
    {'outer.lr': 0.7, 'seed': 0}
    """
    flat: Tree = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def get(config: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    return operator.attrgetter(path)(config)


def update(config: C, values: Mapping[str, Any], where: str = "--") -> C:
    """Return a copy with some values replaced, which are nested dictionaries, or by dotted path.

    They are converted to their fields' types; text means what it means as an option. `where` stands before a path in
    messages, such as `--config FILE: `.

    Raises:
        UsageError: a path that the configuration does not have, or a value of another type or out of its range.
    """
    hints = hints_of(type(config))
    tree: Tree = {}
    for path, value in flatten(values).items():
        if path not in hints:
            raise UsageError(f"{where}{path}: no such value{meant(path, hints)}")
        *groups, name = path.split(".")
        part = tree
        for group in groups:
            part = part.setdefault(group, {})
        try:
            part[name] = coerce(hints[path], value)
        except ValueError:
            raise UsageError(f"{where}{path}: must be {_range_of(hints[path])}, got {value!r}") from None
    return _replaced(config, tree)


def _replaced(config: Any, tree: Tree) -> Any:
    groups = {name: _replaced(getattr(config, name), part) for name, part in tree.items() if isinstance(part, dict)}
    return dataclasses.replace(config, **(tree | groups))


def hints_of(cls: Any) -> dict[str, Any]:
    """Return the declared type of each value by its dotted path."""
    hints: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        inner = hints_of(hint) if dataclasses.is_dataclass(hint) else {"": hint}
        hints |= {f"{name}.{path}".rstrip("."): kind for path, kind in inner.items()}
    return hints


def coerce(hint: Any, value: Any) -> Any:
    """Return a value, or the text that an option has for it, as a declared type has it; else raise a ValueError.

    The text of a tuple has commas.

    >>> coerce(float, "1e-3"), coerce(float | None, "none"), coerce(tuple[float, float], "0.9,0.99")
    (0.001, None, (0.9, 0.99))
    """
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        return None if value is None or str(value).lower() == "none" else coerce(kinds[0], value)
    if typing.get_origin(hint) is tuple:
        # A comma inside a word, as in `a=cycle:5,6,b=3`, ends none.
        comma = r",\s*(?=[^,=\s][^,=]*=)" if kinds[0] is str else ","
        items = [item for item in re.split(comma, value) if item != "none"] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or (Ellipsis not in kinds and len(items) != len(kinds)):
            raise ValueError
        return tuple(coerce(kinds[0], item) for item in items)
    if typing.get_origin(hint) is typing.Literal or hint is bool:
        choices = {str(kind).lower(): kind for kind in kinds or (True, False)}
        if str(value).lower() not in choices:
            raise ValueError
        return choices[str(value).lower()]
    if isinstance(value, bool | Mapping | list) or (
        hint is int and isinstance(value, float) and not value.is_integer()
    ):
        raise ValueError
    return hint(value)


def _range_of(hint: Any) -> str:
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(str, kinds))}"
    if typing.get_origin(hint) is tuple:
        return f"{'several' if Ellipsis in kinds else len(kinds)} values, each {_range_of(kinds[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return " or ".join(names.get(kind, str(kind)) for kind in kinds or (hint,))


def meant(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean …?` with the name that may have been meant, or an empty text."""
    names = list(names)
    same_leaf = [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same_leaf or difflib.get_close_matches(name, names, 1)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


# ----------------------------------------------------------------------------------------------------------- files


def load_yaml(path: Path) -> Tree:
    """Return the values of a YAML file.

    Raises:
        UsageError: it is missing, unreadable or no mapping.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, Mapping | None):
        raise UsageError(f"--config {path}: must hold values by name, got {tree!r:.60}")
    return dict(tree or {})


def dump_yaml(config: Any) -> str:
    """Return a configuration, or its tree, as YAML."""
    return yaml.dump(to_tree(config), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where PyYAML was built with it
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


# -------------------------------------------------------------------------------------------------------- options


def parse(options: type[C], argv: Sequence[str], program: str, config: Any = None) -> tuple[C, Any]:
    """Return a command's own options, and a configuration (None where it has none) with the values given as options.

    Booleans are `--flag`, `--no-flag`, `--flag true` or `--flag false`; `--help` prints all and exits. `program` is the
    command, for the usage.

    Raises:
        UsageError: an option that does not exist, or a value of another type or out of its range, in one line.
    """
    import tyro  # noqa: PLC0415 - not where nothing is parsed

    defaults = {"own": options()} | ({} if config is None else {"config": config})
    unnamed = tyro.conf.arg(name="")
    parts = [(name, Annotated[type(value), unnamed], value) for name, value in defaults.items()]
    command = dataclasses.make_dataclass("Command", parts)
    hints = {path: hint for value in defaults.values() for path, hint in hints_of(type(value)).items()}
    hints = {f"--{path.replace('_', '-')}": hint for path, hint in hints.items()}
    box, words = io.StringIO(), _words(argv, hints)
    try:
        with contextlib.redirect_stderr(box):
            found = tyro.cli(command, args=words, prog=program, description=options.__doc__)
    except SystemExit as error:
        if not error.code:
            raise
        raise UsageError(_reason(error, box.getvalue(), words, hints)) from None
    return found.own, getattr(found, "config", None)


def _words(argv: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """Return options as tyro has them: flags without a value, and None for none."""
    words: list[str] = []
    for word in (part for given in argv for part in (given.split("=", 1) if given.startswith("--") else [given])):
        hint = hints.get(words[-1].replace("_", "-")) if words else None
        if hint is bool and word.lower() in ("true", "false"):
            if word.lower() == "false":
                group, dot, leaf = words[-1].removeprefix("--").rpartition(".")
                words[-1] = f"--{group}{dot}no-{leaf}"
        elif word == "none" and type(None) in typing.get_args(hint):
            words.append("None")
        else:
            words.append(word)
    return words


def _reason(error: BaseException | None, box: str, words: Sequence[str], hints: Mapping[str, Any]) -> str:
    """Return tyro's message in one line: option, range, value; `hints` are the types by option."""
    while error is not None:
        if isinstance(error, UsageError):  # of `require`
            return str(error)
        error = error.__context__
    text = " ".join(re.sub(r"[^\x20-\x7e]|-{9,}", " ", box).split())
    if missing := re.search(r"Missing from .*?: (\S+) (.*?) \(required\)", text):
        return f"{missing[1]}: must be given; {missing[2]}"
    if missing := re.search(r"Missing value for argument 'own\.(\w+)'", text):  # before an option
        return f"{missing[1].upper()}: must be given"
    unknown = re.search(r"Unrecognized options: ([^, ]+)", text)
    name = unknown[1] if unknown else next(iter(re.findall(r"--[a-zA-Z][\w.-]*", text)), "").rstrip(".")
    if unknown and name in words[1:] and hints.get(words[words.index(name) - 1].replace("_", "-")) is bool:
        name = words[words.index(name) - 1]
    if (option := name.replace("_", "-")) not in hints:
        return f"{name}: no such option{meant(option[2:], [each[2:] for each in hints])}"
    place = max((place for place, word in enumerate(words) if word.replace("_", "-") == option), default=len(words))
    got = itertools.takewhile(lambda word: not word.startswith("--"), words[place + 1 :])
    return f"{name}: must be {_range_of(hints[option])}, got {' '.join(got) or 'nothing'}"
