"""What a person sees while something runs: a rich display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def duration(seconds: float) -> str:
    """Write seconds for people.

    >>> duration(42), duration(187), duration(3723)
    ('42 s', '3:07', '1:02:03')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def meter(
    title: str,
    total: int,
    *,
    quiet: bool = False,
    plain_seconds: float = 10.0,
    picture: Callable[[], RenderableType] | None = None,
) -> Iterator[Callable[[int, str], None]]:
    """Show progress on stderr; yields `show(done, text)`.

    On a terminal a bar with the remaining time and the text below it; elsewhere plain lines, and one at the end.

    Args:
        title: a word or two.
        total: what `done` counts up to.
        quiet: show nothing.
        plain_seconds: time between two plain lines, at least.
        picture: returns what a terminal shows above the bar, a few times a second.
    """
    if quiet:
        yield lambda _done, _text: None
    elif sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 - only where it is shown
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        class Display(Progress):
            """The picture, the bar, and the text, which a bar's line has no room for."""

            def get_renderables(self) -> Iterator[RenderableType]:
                if picture is not None:
                    yield picture()
                yield self.make_tasks_table(self.tasks)
                yield from (Text(task.fields["text"]) for task in self.tasks if task.fields["text"])

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Display(*columns, console=Console(stderr=True), refresh_per_second=4) as bars:
            task = bars.add_task(title, total=total, text="")
            yield lambda done, text: bars.update(task, completed=done, text=text)
    else:
        began = last = time.monotonic()

        def show(done: int, text: str) -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last >= plain_seconds:
                print(f"{title} {done}/{total}  {text}  ({duration(now - began)})", file=sys.stderr, flush=True)
                last = now

        yield show


def round_text(line: Mapping[str, Any]) -> str:
    """A round's metrics in a few words."""
    parts = [f"round {line['round']}", f"loss {line['train_loss']:.3f}"]
    if line.get("perplexity") is not None:
        parts.append(f"perplexity {line['perplexity']:.2f}")
    if line["seconds"] > 0 and line["tokens"]:
        parts.append(f"{line['tokens'] / line['seconds']:,.0f} tok/s")
    if line.get("restarted"):
        parts.append("restart")
    return "  ".join(parts)


def step_text(line: Mapping[str, Any]) -> str:
    """A line of `steps.jsonl` in a few words.

    >>> step_text({"train_loss": 2.5, "batches_per_second": 1234.5})
    'loss 2.500  1,234 batches/s'
    """
    if "tokens_per_second" not in line:
        return f"loss {line['train_loss']:.3f}  {line['batches_per_second']:,.0f} batches/s"
    return (
        f"loss {line['train_loss']:.3f}  {line['tokens_per_second']:,.0f} tok/s  "
        f"{line['flops_per_second'] / 1e12:.3g} TFLOP/s  {line['peak_memory_bytes'] / 1e9:.1f} GB"
    )
