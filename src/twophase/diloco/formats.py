"""Name the wires; without torch, for configurations."""

from __future__ import annotations

WIRES = ("float32", "bfloat16", "int8")


def check_wire(name: str) -> str:
    """Return `name` if it names a wire.

    Raises:
        ValueError: an unknown wire.
    """
    if name not in WIRES:
        raise ValueError(f"DiLoCo: wire is {name!r}; it must be one of {', '.join(WIRES)}")
    return name
