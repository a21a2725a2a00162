"""What arms, values and perplexities are called on a sweep's page, and where the names of runs lead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.report.page import minus, relative
from twophase.sweep.table import readable
from twophase.sweep.work import RUNS

REPORT = "report.html"
"""Name of a report in its run's or sweep's folder."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What names a run's folder; whatever else a table holds must not lead anywhere."""


@dataclass(frozen=True, slots=True)
class Links:
    """From run ids to the pages or folders of the runs, as seen from the page."""

    sweep: Path
    page_folder: Path

    def of(self, run: str) -> str | None:
        """Return the run's own report, or its folder; None where there is neither, or the name is no run's."""
        if not RUN_ID.fullmatch(run):
            return None
        folder = self.sweep / RUNS / run
        target = folder / REPORT if (folder / REPORT).is_file() else folder
        return relative(target, self.page_folder) if target.exists() else None


def arm_name(arm: str) -> str:
    """Return an arm's name; that of a sweep over restarts alone would be a bare "never"."""
    return re.sub(r"^never(?=,|$)", "no restart", arm)


def perplexity_text(value: float | None) -> str:
    """Return a perplexity in about three digits, written out up to a million."""
    return f"{value:,.0f}" if value is not None and 1e4 <= value < 1e6 else minus(readable(value))


def value_text(value: Any) -> str:
    """Return a value of a setting."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else minus(f"{value:g}")
        if isinstance(value, float)
        else str(value)
    )
