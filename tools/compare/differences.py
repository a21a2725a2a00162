"""Compare two results: nested dicts and lists of numbers and texts, bit for bit or within a tolerance."""

from __future__ import annotations

import json
import math
from typing import Any


def near(values: Any, tolerance: float, scale: Any = None) -> dict[str, Any]:
    """Return numbers that may differ by `tolerance` times `scale` (by default their own size); 0 means no bit."""
    return {"near": _plain(values), "tolerance": tolerance, "scale": _plain(scale)}


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return a line for each place in which two results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        if "near" in old and "near" in new:
            return [] if _is_near(old["near"], new["near"], old["tolerance"], old["scale"]) else [_line(path, old, new)]
        return [
            line
            for key in dict.fromkeys([*old, *new])
            for line in differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{path} {key}".strip())
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for index, pair in enumerate(zip(old, new, strict=True))
            for line in differences(*pair, f"{path} [{index}]")
        ]
    return [] if _same(old, new) else [_line(path, old, new)]


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return old == new or (math.isnan(old) and math.isnan(new))
    return type(old) is type(new) and old == new


def _is_near(old: Any, new: Any, tolerance: float, scale: Any) -> bool:
    if isinstance(old, list):
        scales = scale if isinstance(scale, list) else [scale] * len(old)
        return len(old) == len(new) and all(map(_is_near, old, new, [tolerance] * len(old), scales))
    size = max(abs(old), abs(new)) if scale is None else scale
    return _same(old, new) or abs(old - new) <= tolerance * size


def _line(path: str, old: Any, new: Any) -> str:
    texts = [json.dumps(value.get("near", value) if isinstance(value, dict) else value) for value in (old, new)]
    first, second = (text if len(text) < 60 else f"{text[:57]}..." for text in texts)
    return f"{path}: {first} became {second}"
