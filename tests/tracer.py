"""Which functions of the package a call runs through; lambdas and closures count, comprehensions do not.

Nor do the bodies of modules and classes, which an import runs, and the parts of templates.
"""

from __future__ import annotations

import inspect
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
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in _COMPREHENSIONS
        is_ours = code.co_filename.startswith(_PACKAGE) and code.co_filename.endswith(".py")
        if event == "call" and is_function and is_ours:
            found.add((code.co_filename.removeprefix(_PACKAGE).lstrip("/"), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
