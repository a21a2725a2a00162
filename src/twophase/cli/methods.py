"""`twophase methods`: what stands on the shelf, values of `TWOPHASE_SHELF` too: a line each, or one with its fields."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twophase.base.errors import UsageError
from twophase.base.files import write_atomic
from twophase.base.reading import read_bytes
from twophase.cli.commands import plain_parser
from twophase.number import did_you_mean
from twophase.policies.text import load_modules
from twophase.shelf.base import SLOTS, Method, Slot, Value
from twophase.shelf.outer import as_outer, outer
from twophase.shelf.text import SHELF_VARIABLE, registered

_TITLES: dict[Slot, str] = {
    "method": "Methods: how an update is made of a pseudo-gradient g (m: first moment, b: momentum, x: anchor)",
    "filter": "Filters: what happens to g before",
    "schedule": "Schedules: learning rate and momentum by the round t, T rounds in all",
    "readout": "Readouts: what is evaluated and exported",
}


def main(arguments: Sequence[str]) -> int:
    """Print the shelf, or a part of it."""
    parser = plain_parser("methods", epilog="Restart policies, the fifth slot, are in docs/policies.md.")
    parser.add_argument("name", nargs="?", help="of a value, to see its fields and what a round of it costs")
    parser.add_argument("--slot", choices=SLOTS, help="only one slot")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="fill in the tables of a page such as docs/shelf.md",
    )
    options = parser.parse_args(arguments)
    slots: Sequence[Slot] = [options.slot] if options.slot else SLOTS
    if options.name and options.into:
        parser.error("--into fills in whole tables; leave NAME or --into out")
    if not options.into:  # pages hold what is in the package
        try:
            load_modules(SHELF_VARIABLE)
            print(_named(slots, options.name) if options.name else "\n\n".join(map(_lines, slots)))
        except ValueError as error:  # of a user's value without arithmetic, too
            raise UsageError(str(error)) from None
    else:
        try:
            page = read_bytes(options.into).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--into {options.into}: cannot be read ({error}); name a page that is there") from None
        if not any(f"<!-- {slot}s -->\n" in page for slot in slots):
            raise UsageError(
                f"--into {options.into}: has no line <!-- {slots[0]}s -->, below which a table goes; add it"
            )
        for slot in slots:
            page = re.sub(rf"(<!-- {slot}s -->\n)(\|.*\n)*", lambda match, slot=slot: match[1] + _table(slot), page)
        write_atomic(options.into, page)
    return 0


def _lines(slot: Slot) -> str:
    width = max(map(len, registered(slot)))
    lines = [f"  {name:{width}}  {cls.equation}  [{cls.source or 'here'}]" for name, cls in registered(slot).items()]
    return "\n".join([_TITLES[slot], *lines])


def _named(slots: Sequence[Slot], name: str) -> str:
    matches: list[tuple[Slot, type[Value]]] = [
        (slot, registered(slot)[name]) for slot in slots if name in registered(slot)
    ]
    if not matches:
        names = [name for slot in slots for name in registered(slot)]
        raise UsageError(f"{name!r} is not on the shelf; {did_you_mean(name, names)}")
    return "\n\n".join(_about(slot, cls) for slot, cls in matches)


def _about(slot: Slot, cls: type[Value]) -> str:
    rows = {"option": f"--outer.{slot} {cls()}", "equation": cls.equation, "source": cls.source, "used by": cls.users}
    rows |= {"theory": "linear: in theory.rollout" if cls.linear else "outside the linear theory"}
    if slot == "method":
        rows |= {"restarts": "of its first moment" if getattr(cls, "first_moment", True) else "none: no first moment"}
    if slot != "schedule":
        rows |= {"costs": "{:.0f} passes over the parameters, {:.0f} bytes a parameter".format(*_cost(slot, cls))}
    rows |= {"test": cls.test}
    lines = [f"  {title:9} {text}" for title, text in rows.items() if text]
    return "\n".join([f"{slot} {cls.name}", *lines, "", textwrap.indent(inspect.getdoc(cls) or "", "  ")])


def _cost(slot: Slot, cls: type[Value]) -> tuple[float, float]:
    from twophase.optim.cost import cost

    value: Any = {slot: cls()}
    return cost(outer(value[slot]) if slot == "method" else replace(as_outer("nesterov"), **value))


def _table(slot: Slot) -> str:
    costs, restarts = slot != "schedule", slot == "method"
    head = [slot, *["restarts"] * restarts, "theory", *["passes", "bytes"] * costs, "fields", "source, *used by*, test"]
    lines = [_row(head), _row(["---"] * len(head))]
    for cls in registered(slot).values():
        # Each part of an equation on a separate, unbroken line.
        parts = [f"`{part}`".replace(" ", "\N{NO-BREAK SPACE}") for part in cls.equation.split(";  ")]
        cells = ["<br>".join([f"**{cls.name}**", *parts])]
        if isinstance(value := cls(), Method):
            cells.append("yes" if value.restarts else "with momentum" if value.first_moment else "no")
        cells += ["yes" if cls.linear else "no"]
        cells += [f"{number:.0f}" for number in _cost(slot, cls)] if costs else []
        cells += ["<br>".join(f"`{word}`" for word in str(cls()).split(":")[1:])]
        test = f"`{cls.test.split('/')[-1].rpartition('::')[2]}`"
        cells += ["<br>".join(filter(None, [cls.source, f"*{cls.users}*" if cls.users else "", test]))]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    # A bar would end the cell, with a backslash too where it is code.
    return f"| {' | '.join(cell.replace('|', chr(0x2223)) for cell in cells)} |"
