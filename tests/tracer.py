"""Which functions of the package a call runs through; lambdas and closures count, comprehensions do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import twophase

_PACKAGE = str(Path(twophase.__file__).parent)
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def functions_of(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return file and qualified name of each function of the package that a call enters, in this thread."""
    found = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name not in _COMPREHENSIONS:
            found.add((code.co_filename.removeprefix(_PACKAGE).lstrip("/"), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
