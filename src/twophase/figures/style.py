"""What every figure shares: style, line palette, and files that come out the same every time.

matplotlib (extra `plot`) is loaded when a figure is drawn. Only its object interface is used, with the Agg canvas, so
that drawing needs no display and leaves no global state behind.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

from twophase.errors import UsageError
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.files import write_atomic

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
# None leaves out what differs from one day or version to the next.
_METADATA = {".png": {"Software": None}, ".pdf": {"CreationDate": None, "Producer": None, "Creator": None}}
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
    """Draw figures in the house's style within this context, for any matplotlib settings of the user.

    Raises:
        UsageError: matplotlib is not installed.
    """
    check_drawing()
    import matplotlib as mpl  # noqa: PLC0415 - an extra, and half a second that `import twophase` should not cost

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_page(height: float) -> Figure:
    """Make an empty figure as wide as the page, `height` inches high, with automatic layout."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    # Of the picture's own resolution: text is wider at another, and labels would stand out of the layout's margins.
    return Figure(figsize=(WIDTH_INCHES, height), layout="constrained", dpi=_DPI)


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Make a figure of `new_page` and its axes, an array (rows, columns); `options` are those of `subplots`."""
    figure = new_page(height)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


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
    """Colour, stroke and (on every so many points, or (first, step)) marker of a curve, as arguments of `Axes.plot`.

    The number counts from 0; after the eighth the looks repeat.
    """
    colour, stroke, marker = _LOOKS[number % len(_LOOKS)]
    marks = {} if every is None else {"marker": marker, "markevery": every}
    return {"color": colour, "linestyle": stroke, **marks}


def headline(figure: Figure, finding: str, reading: str = "") -> None:
    """Put a title on a figure: the finding in bold, below it what is drawn and which direction is better.

    The finding is composed from the numbers that are drawn, so that it changes with them.
    """
    from matplotlib.text import Annotation  # noqa: PLC0415 - as above

    finding = literal(_balanced(finding, 84))
    lines = literal("\n".join(_balanced(part, 116) for part in reading.splitlines()))
    # The layout leaves room for the title alone, so it ends with empty lines for the words below it.
    title = figure.suptitle(finding + "\n " * (lines.count("\n") + 1), fontsize=9.5, fontweight="bold")
    layout: dict[str, Any] = {"xycoords": title, "ha": "center", "va": "bottom"}
    figure.add_artist(Annotation(lines, (0.5, 0), fontsize=7.5, color="#444444", **layout))


def literal(text: str) -> str:
    """Return a user's text with its dollar signs escaped: two of them, as in patterns of names, would be a formula."""
    return text.replace("$", r"\$")


def _balanced(text: str, width: int) -> str:
    """Wrap text into as few lines as the width allows, about equally long."""
    lines = wrap(text, width, break_on_hyphens=False)
    for narrower in range(width - 1, 0, -1):
        others = wrap(text, narrower, break_on_hyphens=False)
        if len(others) > len(lines):
            break
        lines = others
    return "\n".join(lines)


def in_words(pairs: Sequence[tuple[float, float]], *, more: str, fewer: str, both: str, same: str) -> str:
    """Choose the words of a finding by which numbers of some pairs, each before and after, rise or fall.

    >>> in_words([(7, 10), (8, 8)], more="widens", fewer="narrows", both="moves", same="leaves")
    'widens'
    """
    rises, falls = any(b > a for a, b in pairs), any(b < a for a, b in pairs)
    return both if rises and falls else more if rises else fewer if falls else same


def region_words(pairs: Sequence[tuple[float, float]], apart: str) -> str:
    """Say what a restart does to the good region of some grids, by their sizes before and after it."""
    return in_words(
        pairs,
        more="widens the good region",
        fewer="narrows the good region",
        both=f"widens the good region {apart}",
        same="leaves the good region as wide as it is",
    )


def share_legend(figure: Figure, panels: Sequence[Axes], spare: Sequence[Axes] = (), columns: int = 3) -> None:
    """Draw the legend of several panels once: in the first place that has no panel, else below all of them."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    for axes in spare:
        axes.set_axis_off()
    if len(spare):
        spare[0].legend(entries.values(), entries.keys(), loc="center", fontsize=7.5)
    else:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=7.5)


def name_panels(axes: Sequence[Axes], titles: Sequence[str]) -> None:
    """Put titles on panels from the left, with (a), (b), ... in bold before."""
    for letter, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        panel.set_title(f"$\\mathbf{{({chr(ord('a') + letter)})}}$ {title}", loc="left")


def _settle(figure: Figure) -> None:
    """Lay out the figure once and round the places of its parts: the solver's last digits differ from run to run."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)  # with "none" every file would be drawn twice
    for part in figure.subfigs:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(5))
    for axes in figure.axes:
        for which in ("original", "active"):
            box = axes.get_position(original=which == "original")
            x, y, width, height = (round(value, 5) for value in box.bounds)
            axes.set_position((x, y, width, height), which=which)


def rendered(figure: Figure, endings: Sequence[str] = (".png", ".pdf"), *, palette: bool = False) -> dict[str, bytes]:
    """Return a figure's files by ending (`.raw`: RGBA), byte for byte the same for the same figure; within `styled`.

    With `palette` the PNG gets 256 colours, which the eye does not miss, and a third of the size.
    """
    _settle(figure)
    files: dict[str, bytes] = {}
    for ending in endings:
        is_small, file = palette and ending == ".png", io.BytesIO()
        drawn = ".raw" if is_small else ending
        figure.savefig(file, format=drawn[1:], dpi=_DPI, metadata=_METADATA.get(drawn))
        if is_small:
            from PIL import Image  # noqa: PLC0415 - matplotlib brings it

            # Not the default method, which mixes rare colours, such as a marker's, with others. Then k-means moves the
            # palette to the pixels, or pale tiles of a heatmap would change their colour.
            way = {"method": Image.Quantize.MAXCOVERAGE, "kmeans": 3, "dither": Image.Dither.NONE}
            full = Image.frombytes("RGBA", figure.canvas.get_width_height(), file.getvalue())
            full.convert("RGB").quantize(256, **way).save(file := io.BytesIO(), format="PNG", optimize=True)
        files[ending] = file.getvalue()
    return files


def save(path: Path, figure: Figure) -> None:
    """Write a figure to a file that ends with .png or .pdf, in one step; within `styled`."""
    file = io.BytesIO()
    figure.savefig(file, format=path.suffix[1:], dpi=_DPI)
    write_atomic(path, file.getvalue())


def check_numbers(paths: Sequence[Path], start: str, option: str) -> None:
    """Refuse to replace files of numbers, unless the last of them begins with `start`; `option` names their place."""
    existing = [path for path in paths if path.exists()]
    if existing and not (paths[-1].is_file() and paths[-1].read_bytes().startswith(start.encode())):
        raise UsageError(
            f"{option}: would replace {existing[0]}, which is there and holds something else; choose another name or "
            "folder, or move it away"
        )


def write_files(path_stem: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    """Write the files of one figure, each in one step, into a folder that exists; return their paths.

    `contents` are by ending, such as `.png`, which stands behind the stem.

    Raises:
        UsageError: a file cannot be written.
    """
    paths = [path_stem.with_name(path_stem.name + ending) for ending in contents]
    try:
        # The last one first: `check_numbers` recognizes the files by it, even after a full disk.
        for path, content in reversed([*zip(paths, contents.values(), strict=True)]):
            write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"{path_stem}: the figure cannot be written ({error.strerror}); check the folder") from None
    return paths
