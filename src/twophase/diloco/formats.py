"""Name the wires, and define the sparse one's packets; without torch, for configurations and studies."""

from __future__ import annotations

import re
from dataclasses import dataclass

DENSE = ("float32", "bfloat16", "int8")
"""The wires that send every element."""
WIRES = (*DENSE, "topk:128:2bit")
"""The last stands for all of `TopK`."""
LONGEST_CHUNK = 4096
"""Elements of a chunk at most: 12 bits write a place in it."""
_PLACE_BITS = 12
_BITS = (2, 4, 8)
_TOPK = re.compile(r"topk:([0-9]{1,9}):([0-9]{1,9})bit")


@dataclass(frozen=True, slots=True)
class TopK:
    """Describe a sparse wire, in text `topk:RATIO:BITS`, such as `topk:128:2bit`.

    A vector is cut into chunks of equal length, at most `LONGEST_CHUNK`. Each chunk sends its largest elements, one of
    `ratio`, as place and code, and the least and the largest magnitude among them in float32.

    Args:
        ratio: elements for each one that is sent, 2 to 4096.
        bits: bits of a code, 2, 4 or 8: sign, and magnitude in equal steps from the least one sent to the largest.

    Raises:
        ValueError: an argument outside its range.

    >>> TopK(128, 2).packet_bytes(10**6), 4 * 10**6
    (15680, 4000000)
    """

    ratio: int
    bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.ratio <= LONGEST_CHUNK or self.bits not in _BITS:
            raise ValueError(
                f"DiLoCo: wire is {self}. RATIO must be a whole number from 2 to {LONGEST_CHUNK}, of which one element "
                "is kept, and BITS 2bit, 4bit or 8bit, such as topk:128:2bit"
            )

    def __str__(self) -> str:
        return f"topk:{self.ratio}:{self.bits}bit"

    @classmethod
    def of(cls, name: str) -> TopK | None:
        """Return the sparse wire of a name; None for another wire."""
        match = _TOPK.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None

    @property
    def word_bits(self) -> int:
        """Bits of an element that is sent: its place and its code."""
        return _PLACE_BITS + self.bits

    def chunks(self, numel: int) -> tuple[int, int]:
        """Return the number of chunks of `numel` elements, and the length of each; the last may be padded."""
        count = -(-numel // (LONGEST_CHUNK // self.ratio * self.ratio))
        return count, -(-numel // (count * self.ratio)) * self.ratio

    def packet_bytes(self, numel: int) -> int:
        """Return the bytes that encode `numel` elements: places, codes and both magnitudes of each chunk."""
        count, length = self.chunks(numel)
        kept_bits = length // self.ratio * self.word_bits
        return count * (8 + -(-kept_bits // 8))


def check_wire(name: str, numel: int | None = None) -> str:
    """Return `name` if it names a wire.

    Args:
        name: name of a wire: float32, bfloat16, int8, or topk:RATIO:BITS.
        numel: elements of the smallest fragment, once they are known.

    Raises:
        ValueError: an unknown wire, or one that sends less than one element of the smallest fragment.
    """
    sparse = TopK.of(name) if isinstance(name, str) else None
    if sparse is None and name not in DENSE:
        raise ValueError(
            f"DiLoCo: wire is {name!r}; it must be one of {', '.join(DENSE)} and topk:RATIO:BITS, such as "
            f"{WIRES[-1]}, which keeps one of 128 elements"
        )
    if sparse is not None and numel is not None and numel < sparse.ratio:
        raise ValueError(
            f"DiLoCo: wire is {name}, which keeps one of {sparse.ratio} elements, and the smallest fragment has "
            f"{numel}. Take a RATIO of at most {numel}, or fewer fragments"
        )
    return name
