"""Report a round in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from twophase.optim.groups import GroupRound


@dataclass(frozen=True, slots=True)
class FragmentRound:
    """Report a fragment's part in a round.

    Args:
        name: name of the fragment.
        round: number of this fragment's round, from 1; its restart policy counts those in which an outer
            step was taken.
        inner_steps: inner steps of each replica in its pseudo-gradient.
        restarted: True if the momentum of any of its param groups restarted.
        checksum: digits that depend on every bit of its new anchor.
    """

    name: str
    round: int
    inner_steps: int
    restarted: bool
    checksum: str


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report a round; `print(report)` shows it in a line, and `as_dict()` has every number for a log.

    The same on every process, except `bytes_sent` and `seconds`.

    A model in several fragments has a report for each sync, of one fragment or several.

    Args:
        round: number of the round, from 1.
        inner_steps: inner steps of each replica in the pseudo-gradient (of several fragments, the most). Those of a
            delay without mixing are discarded and do not count.
        partial: True if they are fewer than in a whole round. Either `finish()` ended it early, or it is the first
            round of a fragment that is synchronised inside other fragments' rounds.
        complete: True if all fragments have ended the round now.
        replicas: number of replicas that took part.
        restarted: True if the momentum of any param group restarted.
        fragments: report of each fragment.
        groups: norms, cosine, gain and restart of each param group; empty for an outer optimizer other than `OuterSGD`.
        pseudo_gradient_norm: Euclidean norm of g over all parameters that were synchronised.
        signals: means over the replicas of the values passed to `step(signals=...)`.
        bytes_sent: bytes that this process sent to others for the reduction; 0 in a single process.
        seconds: wall time of the phases `pseudo_gradient`, `reduce`, `outer`, `restore` and `checksum`. `outer`
            contains all that its sweep does; `restore` and `checksum` only copies and digests outside a sweep. On an
            accelerator a phase may only launch work. The phase that reads a number waits for it: `outer`, or `reduce`
            for sums.
        checksum: digits that depend on every bit of the new anchor (of the fragments that were synchronised).
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
    def not_finite(self) -> tuple[str, ...]:
        """Values that restart policies need and that were not finite: the run has diverged."""
        return tuple(sorted({name for group in self.groups for name in group.not_finite}))

    @property
    def buffer_norm(self) -> float:
        """Euclidean norm of the momentum buffer before g was mixed in, over all groups."""
        return sum(group.buffer_norm**2 for group in self.groups) ** 0.5

    @property
    def cosine(self) -> float:
        """Cosine of the angle between g and that buffer, over all groups; 0 when either is zero."""
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
        """Return the report as plain values: a line of `rounds.jsonl` without its `step`.

        It has all fields except `signals`, which belong to the caller's metrics, and `buffer_norm`, `cosine` and
        `gain`. A gain may be NaN, which JSON lacks.
        """
        fields = asdict(self)
        del fields["signals"]
        return fields | {"buffer_norm": self.buffer_norm, "cosine": self.cosine, "gain": self.gain}

    def __str__(self) -> str:
        restarts = {f.name: "restarted" if f.restarted else "no restart" for f in self.fragments}
        is_whole = list(restarts) == ["0"] and self.complete  # the only fragment of a model has that name
        parts = [
            f"{self.inner_steps} inner steps",
            f"{self.replicas} {'replica' if self.replicas == 1 else 'replicas'}",
            restarts["0"] if is_whole else ", ".join(f"{name}: {restart}" for name, restart in restarts.items()),
        ]
        if self.groups:
            parts.append(f"gain {self.gain:.3g}, cosine {self.cosine:.3g}, buffer norm {self.buffer_norm:.3g}")
        parts += [
            f"pseudo-gradient norm {self.pseudo_gradient_norm:.3g}",
            f"{self.bytes_sent:,} bytes sent",
            f"{sum(self.seconds.values()):.3g} s",
            f"checksum {self.checksum}",
        ]
        return f"round {self.round}: {', '.join(parts)}"


def merged(reports: Sequence[RoundReport]) -> RoundReport:
    """Merge the reports of several syncs that end a run together."""
    if len(reports) == 1:
        return reports[0]
    fragments = tuple(fragment for report in reports for fragment in report.fragments)
    phases = {phase for report in reports for phase in report.seconds}
    checksum = 0  # depends on all fragments and their order
    for fragment in fragments:
        checksum = (checksum * 0x100000001B3 + int(fragment.checksum, 16)) % (1 << 64)
    return replace(
        reports[-1],
        inner_steps=max(report.inner_steps for report in reports),
        partial=any(report.partial for report in reports),
        restarted=any(report.restarted for report in reports),
        fragments=fragments,
        groups=tuple(group for report in reports for group in report.groups),
        pseudo_gradient_norm=sum(report.pseudo_gradient_norm**2 for report in reports) ** 0.5,
        bytes_sent=sum(report.bytes_sent for report in reports),
        seconds={phase: sum(report.seconds.get(phase, 0.0) for report in reports) for phase in sorted(phases)},
        checksum=f"{checksum:016x}",
    )
