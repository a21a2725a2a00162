"""The options of a command line: those of a command, and one for each value of a configuration.

A value's option is its dotted path (`--outer.lr`); its help is the text below its field.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

from twophase.base.config import FIXED, fit, values_of
from twophase.base.errors import UsageError
from twophase.number import did_you_mean

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}


class Parser(argparse.ArgumentParser):
    """Parse the words of a command; a mistake is a UsageError of one line, with the name that may have been meant.

    Attributes:
        on_demand: titles of groups that `--help` leaves out; `--help TITLE` shows one, `--help all` everything.
    """

    def __init__(self, prog: str, *, on_demand: Collection[str] = (), **options: Any) -> None:
        formatter = partial(argparse.HelpFormatter, max_help_position=30)
        super().__init__(prog, allow_abbrev=False, formatter_class=formatter, add_help=not on_demand, **options)
        self.register("action", None, _Store)
        self.on_demand = set(on_demand)
        if on_demand:
            text = "show this help, that of a group that it leaves out, or all, and stop"
            self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="GROUP", help=text)
        # Any word of one dash is a value, such as -1e-5: argparse itself takes it for an option.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]|-(inf|nan)")

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all words; refuse what is no option."""
        args = list(args or ())
        words_by_option = {_with_hyphens(word): word for word in args}
        options, rest = super().parse_known_args(list(map(_with_hyphens, args)), namespace)
        if rest:
            odd = words_by_option[next((word for word in rest if word.startswith("-")), rest[0])].split("=")[0]
            hint = f"{self.prog} --help lists the options"
            raise UsageError(f"{odd!r} is no option; {did_you_mean(odd, self._option_string_actions, hint)}")
        return options, rest

    def help_of(self, name: str | None) -> str:
        """Return the help without the groups on demand, of one group, or of `all`; refuse another name."""
        groups = list(self._action_groups)
        named = [group for group in groups if name in ("all", group.title)]
        if name and not named:
            titles = [*sorted(self.on_demand), "all"]
            raise UsageError(f"--help {name}: there is no such group; {did_you_mean(name, titles)}")
        self._action_groups = named or [group for group in groups if group.title not in self.on_demand]
        text, self._action_groups = self.format_help(), groups
        hidden = [str(group.title) for group in groups if group.title in self.on_demand]
        more = f"more options: --help all, or --help with one of {', '.join(hidden)}"
        return text if name else f"{text}\n{textwrap.fill(more, 78)}\n"

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UsageError that begins with the option."""
        remedy = "" if message.endswith("?") else f"; {self.prog} --help lists the options"
        raise UsageError(message.removeprefix("argument ") + remedy)


class _Store(argparse.Action):
    """Keep an option's value; a list grows where its option is repeated."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        del parser
        earlier = getattr(namespace, self.dest, self.default)
        grows = option_string and self.nargs == "+" and earlier is not self.default
        setattr(namespace, self.dest, [*earlier, *values] if grows else values)


class _Help(argparse.Action):
    """Print help and end the program."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        del namespace, option_string
        print(parser.help_of(values), end="")
        parser.exit()


def _with_hyphens(word: str) -> str:
    """Spell an option with hyphens; underscores, as in a configuration's file, are the same option."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def add_values(parser: argparse.ArgumentParser, config: Any, title: str) -> None:
    """Add an option for each value of a configuration, a group for each of its parts.

    Args:
        parser: the parser.
        config: the configuration, a tree of frozen dataclasses; help shows its values as defaults.
        title: of the group of the values that belong to no part.
    """
    parser.usage = parser.usage or f"{parser.prog} [OPTIONS]"  # more than a hundred of them say nothing in a row
    defaults = values_of(config)
    groups: dict[str, Any] = {"": parser.add_argument_group(title)}
    for path, kind, text, part in _values(type(config)):
        name = path.rpartition(".")[0]
        if name not in groups:
            groups[name] = parser.add_argument_group(name, (inspect.getdoc(part) or "").replace("%", "%%"))
        _add_value(groups[name], path, kind, text, defaults[path])


def _values(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield path, kind, text and class of each value, those of the configuration itself before those of its parts."""
    kinds, texts = typing.get_type_hints(cls), _texts(cls)
    for field in sorted(fields(cls), key=lambda field: is_dataclass(kinds[field.name])):
        kind = kinds[field.name]
        if is_dataclass(kind):
            yield from _values(kind, f"{prefix}{field.name}.")
        elif field.metadata != FIXED:
            yield f"{prefix}{field.name}", kind, texts.get(field.name, ""), cls


def _texts(cls: Any) -> Mapping[str, str]:
    """Return the text below each field of a class and of those that it derives from."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        texts |= _texts_of_module(base.__module__).get(base.__name__, {})
    return texts


@cache
def _texts_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the text below each field, by class; of a module without a file, such as a notebook, nothing."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):
        return {}
    texts: dict[str, dict[str, str]] = {}
    for node in tree.body:
        body = node.body if isinstance(node, ast.ClassDef) else []
        fields_of_class = texts.setdefault(getattr(node, "name", ""), {})
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=path)), ast.Expr(value=ast.Constant(value=str() as words)):
                    fields_of_class[path] = " ".join(words.split())
    return texts


def _add_value(group: Any, path: str, kind: Any, text: str, default: Any) -> None:
    option, leaf = f"--{path.replace('_', '-')}", path.rpartition(".")[2].replace("_", "-")
    numbers = default if isinstance(default, list) else [] if default is None else [default]
    default_text = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in numbers)
    default_text = default_text.lower() if isinstance(default, bool) else default_text
    settings: dict[str, Any] = {
        "dest": path,
        "default": argparse.SUPPRESS,
        "help": (text.rstrip(".") + (f" ({default_text})" if default_text else "")).replace("%", "%%"),
    }
    reader = _reader(kind)
    if typing.get_origin(kind) in (typing.Union, UnionType):  # X | None
        (kind,) = (choice for choice in typing.get_args(kind) if choice is not type(None))
    if kind is bool:
        group.add_argument(option, nargs="?", const=True, type=_reader(bool), metavar="true|false", **settings)
        opposite = option.removesuffix(leaf) + f"no-{leaf}"
        group.add_argument(opposite, action="store_false", dest=path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return
    if typing.get_origin(kind) is tuple:
        kind, *others = typing.get_args(kind)
        reader = _reader(kind)
        settings["nargs"] = "*" if Ellipsis in others else 1 + len(others)
    if typing.get_origin(kind) is typing.Literal:
        settings["metavar"] = "|".join(typing.get_args(kind))
    group.add_argument(option, **{"type": reader, "metavar": _METAVARS.get(kind, "TEXT")} | settings)


def _reader(kind: Any) -> Callable[[str], Any]:
    """Return an option's type: words that fit a declared type."""

    def parsed(word: str) -> Any:
        try:
            return fit(kind, word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def values_given(options: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Return the values of a configuration that were given as options, from dotted path to value."""
    paths = values_of(config)
    values = {path: value for path, value in vars(options).items() if path in paths}
    return {path: tuple(value) if isinstance(value, list) else value for path, value in values.items()}
