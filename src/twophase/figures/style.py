"""What every figure shares: style, line palette, and files that come out the same every time.

matplotlib (extra `plot`) is loaded when a figure is drawn. Only its object interface is used, with the Agg canvas, so
that drawing needs no display and leaves no global state behind.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.base.config import UsageError
from twophase.base.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 6.75
"""The text width of a two-column journal page."""
INK, PAPER, MUTED = "#000000", "#ffffff", "#555555"
DIVERGED, HATCH = "#f2f2f2", "#8c8c8c"
"""Ground and strokes of what has diverged."""
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.borderaxespad": 0.3,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType, so that the text stays text
    "axes.unicode_minus": True,
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


@contextmanager
def styled() -> Iterator[None]:
    """Within it, figures are drawn in the house's style, whatever the user's own matplotlib settings are.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and half a second that `import twophase` should not cost
    except ModuleNotFoundError:
        raise UsageError("drawing needs matplotlib, which is not installed; pip install 'twophase[plot]'") from None
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_page(height: float) -> Figure:
    """An empty figure as wide as the page, `height` inches high, whose parts find their places by themselves."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    return Figure(figsize=(WIDTH_INCHES, height), layout="constrained")


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure as wide as the page, with a grid of axes.

    Args:
        height: in inches.
        rows: of axes.
        columns: of axes.
        options: further ones of matplotlib's `Figure.subplots`, such as `sharey=True`.

    Returns:
        (figure, axes), the axes as an array of shape (rows, columns).
    """
    figure = new_page(height)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def signed(value: float, digits: int = 1) -> str:
    """A number with a true minus sign, for text in figures."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers for a logarithmic scale, from four to about ten; on a very short one its rounded thirds."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    finest = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]
    for mantissas in ([1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], finest):
        ticks = [float(f"{m * 10.0**k:.3g}") for k in decades for m in mantissas]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= (3 if mantissas is finest else 4):
            return inside
    return sorted({float(f"{low * (high / low) ** (k / 3):.3g}") for k in range(4)})


def look(number: int, *, every: int | tuple[int, int] | None = None) -> dict[str, Any]:
    """Colour, stroke and (with `every`) marker of the curve of that number, as arguments of `Axes.plot`.

    Args:
        number: from 0; after the eighth the looks repeat.
        every: marker on every so many points, or (first, step); None for no markers.
    """
    colour, stroke, marker = _LOOKS[number % len(_LOOKS)]
    marks = {} if every is None else {"marker": marker, "markevery": every}
    return {"color": colour, "linestyle": stroke, **marks}


def name_panels(axes: Sequence[Axes], titles: Sequence[str]) -> None:
    """Title panels from the left, with (a), (b), ... in bold before."""
    for letter, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        panel.set_title(f"$\\mathbf{{({chr(ord('a') + letter)})}}$ {title}", loc="left")


def _settle(figure: Figure) -> None:
    """Lay out the figure once and round the places of its parts: the solver's last digits differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for part in figure.subfigs:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(5))
    for axes in figure.axes:
        for which in ("original", "active"):
            box = axes.get_position(original=which == "original")
            x, y, width, height = (round(value, 5) for value in box.bounds)
            axes.set_position((x, y, width, height), which=which)


def rendered(figure: Figure, *, palette: bool = False) -> dict[str, bytes]:
    """The figure as `.png` and `.pdf`, byte for byte the same for the same figure; within `styled`.

    Args:
        figure: any.
        palette: the PNG gets 256 colours, which the eye does not miss, and a third of the size.
    """
    _settle(figure)
    png, pdf = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    figure.savefig(pdf, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    if palette:
        from PIL import Image  # noqa: PLC0415 - matplotlib brings it

        # Not the default method, which mixes rare colours, such as a marker's, with others.
        way = {"method": Image.Quantize.MAXCOVERAGE, "dither": Image.Dither.NONE}
        picture = Image.open(png).convert("RGB").quantize(256, **way)
        png = io.BytesIO()
        picture.save(png, format="PNG", optimize=True)
    return {".png": png.getvalue(), ".pdf": pdf.getvalue()}


def write_files(path_stem: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    """Write the files of one figure, each in one step: `contents` by ending, such as `.png`.

    Args:
        path_stem: the files' path without their endings; its folder must exist.
        contents: text or bytes of each file.

    Returns:
        The paths, in the order of `contents`.

    Raises:
        UsageError: a file cannot be written.
    """
    paths = [path_stem.with_name(path_stem.name + ending) for ending in contents]
    try:
        for path, content in zip(paths, contents.values(), strict=True):
            write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"{path_stem}: the figure cannot be written ({error.strerror}); check the folder") from None
    return paths
