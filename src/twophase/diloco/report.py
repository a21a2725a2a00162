"""The report of a round, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from twophase.optim.outer_sgd import GroupRound


@dataclass(frozen=True, slots=True)
class FragmentRound:
    """A fragment's part in a round, in the terms of `RoundReport`; `round` is the number of its own."""

    name: str
    round: int
    inner_steps: int
    restarted: bool
    checksum: str


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round; `print(report)` shows it in a line, `as_dict()` has every number for a log.

    Equal on all ranks but for `bytes_sent` and `seconds`. A model in several fragments has a report for each sync.

    Args:
        round: number of the round, from 1.
        inner_steps: inner steps of each replica in the pseudo-gradient (of several fragments, the most). Those of a
            delay without mixing are discarded and do not count.
        partial: True if they are fewer than in a whole round: `finish()`, or a staggered fragment's first round.
        complete: True if all fragments have ended the round now.
        restarted: True if the momentum of any param group restarted.
        fragments: report of each fragment.
        groups: norms, cosine, gain and restart of each param group; empty for other outer optimizers than `OuterSGD`.
        pseudo_gradient_norm: Euclidean norm of g over all parameters that were synchronised.
        signals: means over the replicas of the values passed to `step(signals=...)`.
        bytes_sent: bytes that this rank sent for the reduction; 0 in a single process.
        seconds: wall time of each phase. On a GPU it may only launch work; one that reads a number waits for it.
        checksum: digest of the new anchor (of the fragments that were synchronised).
    """

    round: int
    inner_steps: int
    partial: bool
    complete: bool
    replicas: int
    restarted: bool
    fragments: tuple[FragmentRound, ...]
    groups: tuple[GroupRound, ...]
    pseudo_gradient_norm: float
    signals: Mapping[str, float]
    bytes_sent: int
    seconds: Mapping[str, float]
    checksum: str

    @property
    def buffer_norm(self) -> float:
        """Euclidean norm of the momentum buffer before g was mixed in, over all groups."""
        return sum(group.buffer_norm**2 for group in self.groups) ** 0.5

    @property
    def cosine(self) -> float:
        """Cosine between g and that buffer, over all groups; 0 when either is zero."""
        scale = self.pseudo_gradient_norm * self.buffer_norm
        inner = sum(group.cosine * group.pseudo_gradient_norm * group.buffer_norm for group in self.groups)
        return inner / scale if scale != 0 else 0.0

    @property
    def gain(self) -> float:
        """Effective outer gain `<update, g> / <g, g>` over all groups; 1 would be plain averaging."""
        square = sum(group.pseudo_gradient_norm**2 for group in self.groups)
        along = sum(group.gain * group.pseudo_gradient_norm**2 for group in self.groups if group.pseudo_gradient_norm)
        return along / square if square != 0 else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return a line of `rounds.jsonl`: all fields, and `buffer_norm`, `cosine` and `gain`."""
        return asdict(self) | {"buffer_norm": self.buffer_norm, "cosine": self.cosine, "gain": self.gain}

    def __str__(self) -> str:
        restarts = [f"{f.name}: " * (len(self.fragments) > 1) + "restarted" for f in self.fragments if f.restarted]
        parts = [
            f"{self.inner_steps} inner steps",
            f"{self.replicas} replica{'s' * (self.replicas != 1)}",
            *restarts,
            *([f"gain {self.gain:.3g}, cosine {self.cosine:.3g}"] if self.groups else []),
            f"pseudo-gradient norm {self.pseudo_gradient_norm:.3g}",
            f"{self.bytes_sent:,} bytes sent",
            f"{sum(self.seconds.values()):.3g} s",
        ]
        return f"round {self.round}: {', '.join(parts)}"


def merged(reports: Sequence[RoundReport]) -> RoundReport:
    """Merge the reports of fragments that ended a round together, or a run, into one with the number of the last."""
    if len(reports) == 1:
        return reports[0]
    checksum = 0  # depends on all fragments and their order
    for report in reports:
        checksum = (checksum * 0x100000001B3 + int(report.checksum, 16)) % (1 << 64)
    phases = dict.fromkeys(phase for report in reports for phase in report.seconds)
    return replace(
        reports[-1],
        inner_steps=max(report.inner_steps for report in reports),
        partial=any(report.partial for report in reports),
        restarted=any(report.restarted for report in reports),
        fragments=tuple(fragment for report in reports for fragment in report.fragments),
        groups=tuple(group for report in reports for group in report.groups),
        pseudo_gradient_norm=sum(report.pseudo_gradient_norm**2 for report in reports) ** 0.5,
        bytes_sent=sum(report.bytes_sent for report in reports),
        seconds={phase: sum(report.seconds.get(phase, 0.0) for report in reports) for phase in phases},
        checksum=f"{checksum:016x}",
    )
