"""Put the page together from this module's folder: an HTML file that needs nothing from elsewhere.

The frame is `page.html`, its looks `style.css` (colours, letters, controls) and `panels.css`. Scripts, in the order of
their needs:

* `kernel.js` (numbers), `state.js` (the shown state and its address), `simulation.js` (policies, schedules and noise);
* `draw.js` (plots), `model.js` (from a state to numbers), `trajectories.js`, `rates.js` and `map.js` (figures);
* `app.js` (shared parts), `controls.js`, `choices.js`, `cross.js` and `forms.js` (controls next to the figures);
* `stage.js` (numbers and panels), `guide.js` (guided steps) and `main.js` (start, address, theme).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, Literal

from twophase.errors import UsageError
from twophase.restart import AtRounds, Auto, Cycle, RestartPolicy, Soft, parse
from twophase.rule import Form

STYLES = ("style.css", "panels.css")
_SCRIPT_NAMES = (
    "kernel state simulation draw model trajectories rates map app controls choices cross forms stage guide main"
)
SCRIPTS = tuple(f"{name}.js" for name in _SCRIPT_NAMES.split())

LIMITS: dict[str, tuple[float, float]] = {
    "lr": (1e-6, 1e6),
    "momentum": (0, 0.999999),
    "restart": (0, 10_000),
    "rounds": (1, 10_000),
    "sigma": (0, 1),
    "count": (2, 64),
    "curvature": (0, 1e12),
    "inner_lr": (0, 1e6),
    "inner_steps": (1, 1_000_000),
    "mode": (-1, 63),
    "noise": (0, 1000),
    "seed": (0, 1_000_000),
}
"""Lowest and highest value of every field. `count` limits every list of modes; `mode` -1 is the mean of all."""
SLIDERS: dict[str, tuple[float, float]] = {
    "lr": (0.01, 10),
    "momentum": (0, 0.999),
    "restart": (0, 60),
    "rounds": (2, 1000),
    "sigma": (0.001, 1),
    "low": (0.001, 1),
    "high": (0.001, 1),
    "count": (2, 64),
    "inner_lr": (1e-4, 1),
    "inner_steps": (1, 2048),
    "noise": (0, 0.5),
    "seed": (0, 100),
}
"""Ends of the sliders; a field next to each takes all of `LIMITS`."""


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
    spectrum: Literal["one", "list", "range", "curvature", "run"] = "list"
    sigma: float = 0.95
    sigmas: tuple[float, ...] = (0.95, 0.85, 0.75, 0.6, 0.45, 0.3)
    low: float = 0.05
    high: float = 0.95
    count: int = 16
    curvatures: tuple[float, ...] = (10.0, 3.0, 1.0, 0.3, 0.1)
    inner_lr: float = 0.02
    inner_steps: int = 50
    mode: int = 5
    """The mode that is drawn in bold, the largest sigma first; -1 is the mean of all."""
    view: Literal["linear", "log"] = "linear"
    policy: str = ""
    """The text form of a restart policy, one of `POLICIES`, in the place of `restart`; empty for a period."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Factor on the outer learning rate in round t of T: 1, `1 - (t-1)/T`, or `(1 + cos(pi (t-1)/T)) / 2`."""
    noise: float = 0.0
    """Standard deviation of the white Gaussian noise in the pseudo-gradient, as in `theory.rollout`; a single draw."""
    seed: int = 0
    """Of the draw."""


@dataclass(frozen=True)
class RunSpectrum:
    """Hold the effective progress that was estimated from a run.

    Args:
        name: name of the run's folder; any text.
        sigma: one value a block of parameters, in (0, 1].
        note: source and reliability, in a sentence or two.
    """

    name: str
    sigma: tuple[float, ...]
    note: str


POLICIES = (Cycle, AtRounds, Soft, Auto)
"""The policies that the page simulates besides a period."""

POLICIES_WORDS = (
    "the page shows never, a period such as 3, cycle, at, soft and auto. A policy has at most 64 "
    "numbers and rounds up to 10^9; write one of these"
)

_OPTIONS = {
    "lr": "--outer.lr",
    "momentum": "--outer.momentum",
    "restart": "--outer.restart",
    "count": "--sigma-range",
    "curvature": "--eigenvalues",
}


def build(state: State, run: RunSpectrum | None = None, *, guided: bool = False) -> str:
    """Return the page that opens with this state.

    Args:
        state: the values of its fields, within `LIMITS`.
        run: the spectrum that `state.spectrum` "run" shows.
        guided: True to open with the guided steps, which have their initial state; else they are folded. An address
            that holds a state opens it without them.

    Returns:
        HTML of one self-contained file: scripts and looks are in it, and its policy (Content-Security-Policy) lets it
        run nothing else, load nothing and send nothing.

    Raises:
        UsageError: a value outside its limits.
    """
    check(state, run)
    from twophase import __version__  # noqa: PLC0415 - the package root is no module that modules import from

    # Indentation is a tenth of the page; no text in these files spans lines.
    style, script = (
        re.sub(r"^ +", "", "\n".join(map(_read, names)), flags=re.MULTILINE) for names in (STYLES, SCRIPTS)
    )
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert "</" not in script.replace("</g", ""), "a script that ends its element"
    parts = {
        "policy": html.escape(policy, quote=False),
        "style": style,
        "script": script,
        "given": _as_data(
            {
                "state": asdict(state),
                "run": asdict(run) if run else None,
                "limits": LIMITS,
                "sliders": SLIDERS,
                "guided": guided,
            }
        ),
        "version": html.escape(__version__),
    }
    page = _read("page.html")
    for name, text in parts.items():  # one place each, so that what is filled in is never searched for places
        before, after = page.split("{{" + name + "}}")
        page = before + text + after
    return page


def shows(policy: RestartPolicy | None) -> bool:
    """Return whether the page's simulation can read a policy (simulation.js, `read`)."""
    arguments = str(policy).replace(":", ",").split(",")[1:]
    counts = [int(word) for word in arguments if word.isdecimal()]
    return isinstance(policy, POLICIES) and len(arguments) <= 64 and max(counts, default=0) <= 10**9


def check(state: State, run: RunSpectrum | None = None) -> None:
    """Raise a UsageError, with the option's name, for a value that the page's fields would not take."""
    most = int(LIMITS["count"][1])
    for option, values in {"--sigma": state.sigmas, "--eigenvalues": state.curvatures}.items():
        if not 1 <= len(values) <= most:
            raise UsageError(f"{option} has {len(values)} modes; the page shows 1 to {most}")
    sigmas = (state.sigma, *state.sigmas, state.low, state.high)
    for name, (low, high) in LIMITS.items():
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if name == "sigma" and state.spectrum == "range":  # whose ends are low and high
            option = "--sigma-range"
        for value in {"sigma": sigmas, "curvature": state.curvatures}.get(name) or [getattr(state, name)]:
            if not low <= value <= high:  # nan, too
                upper = f"{high:,.6f}".rstrip("0").rstrip(".")
                raise UsageError(f"{option} is {value:.9g}; the page shows values from {low:g} to {upper}")
    if state.policy and not shows(parse(state.policy)):
        raise UsageError(f"--outer.restart {state.policy}: {POLICIES_WORDS}")
    if (state.spectrum == "run") != (run is not None):
        raise UsageError("the spectrum of a run needs the run, and a run is shown by its spectrum")
    steepest = max(state.curvatures)
    if state.spectrum == "curvature" and state.inner_lr * steepest > 1:
        limit = 1 / steepest
        limit = math.nextafter(limit, 0) if limit * steepest > 1 else limit  # so that the remedy works
        raise UsageError(
            f"--inner-lr {state.inner_lr:g} times the largest eigenvalue {steepest:g} exceeds 1, where "
            f"gradient descent overshoots; lower --inner-lr to {limit!r} or less"
        )


def _read(name: str) -> str:
    return files("twophase.explorer").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _as_data(tree: Any) -> str:
    """Return JSON that cannot end its HTML element, for any text in a name."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
