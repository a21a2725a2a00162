"""The types of matplotlib that annotations name; the modules that have them must load without matplotlib."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
else:
    Axes = ScalarMappable = Figure = Any

__all__ = ["Axes", "Figure", "ScalarMappable"]
