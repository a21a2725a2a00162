"""Tests of optional packages: skipped where they are missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(package: str, reason: str) -> None:
    """Skip the module that calls it where a package is missing, and else do not import the package yet.

    All workers collect all modules, and an import of Lightning or scikit-learn takes two seconds of each.
    """
    if find_spec(package) is None:
        pytest.skip(reason, allow_module_level=True)
