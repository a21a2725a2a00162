"""How much is tried: a share in everyday tests; all of it with HYPOTHESIS_PROFILE=explore, before a release."""

from __future__ import annotations

import os


def amount(usual: int, thorough: int) -> int:
    return thorough if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else usual
