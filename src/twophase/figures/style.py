"""What every figure shares: size, style, the looks of curves, titles, and files.

matplotlib (extra `plot`) is loaded when a figure is drawn. Only its object interface is used, with the Agg canvas, so
that drawing needs no display and leaves no global state behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.config import meant
from twophase.errors import UsageError
from twophase.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 6.75
"""The text width of a two-column journal page."""
_DPI = 200
INK, PAPER, MUTED = "#000000", "#ffffff", "#555555"
DIVERGED, HATCH = "#f2f2f2", "#8c8c8c"
"""Ground and strokes of what has diverged."""
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType, so that the text stays text
}
# The colours of Okabe and Ito, which all kinds of colour vision tell apart; stroke and marker tell them apart in grey.
_LOOKS: tuple[tuple[str, Any, str], ...] = (
    ("#000000", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#d55e00", "-", "^"),
    ("#009e73", "-.", "D"),
    ("#cc79a7", (0, (3, 1, 1, 1, 1, 1)), "v"),
    ("#e69f00", (0, (6, 1.5)), "P"),
    ("#56b4e9", ":", "X"),
    ("#7f7f7f", (0, (1, 1)), "*"),
)


def check_drawing() -> None:
    """Check that figures can be drawn, without loading what draws them.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("drawing needs matplotlib, which is not installed; pip install 'twophase[plot]'")


@contextmanager
def styled() -> Iterator[None]:
    """Draw figures in the project's style within this context, for any matplotlib settings of the user.

    Raises:
        UsageError: matplotlib is not installed.
    """
    check_drawing()
    import matplotlib as mpl  # noqa: PLC0415 - an extra, and half a second that `import twophase` should not cost

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Make a figure as wide as the page, `height` inches high, with automatic layout, and its axes.

    Those are an array (rows, columns); `options` are those of `subplots`.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained", dpi=_DPI)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def look(number: int, *, every: int | tuple[int, int] | None = None) -> dict[str, Any]:
    """Colour, stroke and (on every so many points, or (first, step)) marker of a curve, as arguments of `Axes.plot`.

    The number counts from 0; after the eighth the looks repeat.
    """
    colour, stroke, marker = _LOOKS[number % len(_LOOKS)]
    marks = {} if every is None else {"marker": marker, "markevery": every}
    return {"color": colour, "linestyle": stroke, **marks}


def headline(figure: Figure, title: str, reading: str = "") -> None:
    """Put a title on a figure, and below it in small how it is read: what is drawn, and which direction is better."""
    from matplotlib.text import Annotation  # noqa: PLC0415 - as above

    # The layout leaves room for the title alone, so it ends with empty lines for the words below it.
    top = figure.suptitle(title + "\n " * (reading.count("\n") + bool(reading)), fontsize=9.5, fontweight="bold")
    place: dict[str, Any] = {"xycoords": top, "ha": "center", "va": "bottom"}
    figure.add_artist(Annotation(reading, (0.5, 0), fontsize=7.5, color=MUTED, **place))


def relabelled(figure: Figure, labels: Mapping[str, str]) -> Figure:
    """Write other words for some titles, labels and names of curves, which it must have, into a figure; return it."""
    from matplotlib.text import Text  # noqa: PLC0415 - as above

    texts: list[Any] = figure.findobj(Text)
    check_names("labels", labels, [text.get_text() for text in texts])
    for text in texts:
        text.set_text(labels.get(text.get_text(), text.get_text()))
    return figure


def check_names(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that are none of a figure's, `known`; a UsageError has the one that may be meant."""
    for name in given:
        if name not in known:
            raise UsageError(f"{option}: the figure has no {name!r}{meant(str(name), filter(None, known))}")


def share_legend(figure: Figure, panels: Sequence[Axes], spare: Sequence[Axes] = (), columns: int = 3) -> None:
    """Draw the legend of several panels once: in the first place that has no panel, else below all of them."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    for axes in spare:
        axes.set_axis_off()
    if len(spare):
        spare[0].legend(entries.values(), entries.keys(), loc="center")
    else:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def save(path: Path, figure: Figure) -> None:
    """Write a figure to a file that ends with .png or .pdf, in one step; within `styled`."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=_DPI)
