"""Put the page together from this package's folder: an HTML file that needs nothing from elsewhere.

The frame is `page.html`, its looks `style.css` beside uPlot's. The scripts, in the order of their needs: `model.js`
(the numbers), `state.js` (the shown state and its address), `charts.js` and `map.js` (the figures), `guide.js` (the
three steps) and `ui.js` (controls and start).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import asdict, dataclass
from importlib.resources import files

from twophase.config import require
from twophase.rule import Form

SCRIPTS = ("model.js", "state.js", "charts.js", "map.js", "guide.js", "ui.js")
MARK = '<meta name="generator" content="twophase explore">'
"""Stands in every page of this package and tells it from other files."""
LIMITS: dict[str, tuple[float, float]] = {
    "lr": (1e-6, 1e6),
    "momentum": (0, 0.999999),
    "restart": (0, 10_000),
    "retain": (-10, 10),
    "inject": (-10, 10),
    "rounds": (1, 10_000),
    "sigma": (0, 1),
    "count": (1, 64),
    "mode": (0, 63),
}
"""Lowest and highest value of each field; `sigma` is that of each mode, and `count` limits their number."""


@dataclass(frozen=True)
class State:
    """Initial values of the page; changed ones go into the URL."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    form: Form = "sum"
    restart: int = 3
    """Rounds between restarts, 0 for never."""
    rounds: int = 60
    sigmas: tuple[float, ...] = (0.95, 0.85, 0.75, 0.6, 0.45, 0.3)
    """Effective progress of each mode."""
    mode: int = 0
    """Index of the mode that is drawn in bold."""
    retain: float = 0.0
    inject: float = 0.0
    """Coefficients of a soft restart (`restart.Soft`); both 0 for a hard one."""

    def __post_init__(self) -> None:
        require(1 <= len(self.sigmas) <= LIMITS["count"][1], "sigma", len(self.sigmas), "1 to 64 modes")
        for name in ("lr", "momentum", "restart", "retain", "inject", "rounds", "sigma"):
            low, high = LIMITS[name]
            for value in self.sigmas if name == "sigma" else [getattr(self, name)]:
                option = name if name in ("rounds", "sigma") else f"outer.{name}"
                require(low <= value <= high, option, value, f"in [{low:g}, {high:g}]")


def build(state: State, *, guided: bool = False) -> str:
    """Return the page that opens with this state.

    Args:
        state: the values of its fields.
        guided: True to open with the guided steps, which have their own initial state; else they are folded. An address
            that holds a state opens it without them.

    Returns:
        HTML of one self-contained file: its policy (Content-Security-Policy) lets it run only the script that is in it,
        load nothing and send nothing.
    """
    from twophase import __version__  # noqa: PLC0415 - the package root is no module that modules import from

    # uPlot is the copy that reports carry: data, no import. Indentation is a tenth of the page; no text spans lines.
    own = [re.sub(r"^ +", "", _read(name), flags=re.MULTILINE) for name in ("style.css", *SCRIPTS)]
    style = _read("uplot/uPlot.min.css", "twophase.report") + own[0]
    script = "\n".join([_read("uplot/uPlot.iife.min.js", "twophase.report"), *own[1:]])
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    given = json.dumps({"state": asdict(state), "limits": LIMITS, "guided": guided}, separators=(",", ":"))
    parts = {"mark": MARK, "policy": policy, "style": style, "given": given, "script": script}
    page = _read("page.html").replace("{{version}}", html.escape(__version__))
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def _read(name: str, package: str = "twophase.explorer") -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
