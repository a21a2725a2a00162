"""What a person sees while something runs: a rich display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
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
    return str(timedelta(seconds=int(seconds))).removeprefix("0:").lstrip("0")


@contextmanager
def meter(
    title: str,
    total: int,
    *,
    quiet: bool = False,
    plain_seconds: float = 10.0,
    picture: Callable[[], RenderableType] | None = None,
) -> Iterator[Callable[[int, str], None]]:
    """Show progress on stderr, of `total` things; yields `show(done, text)`.

    On a terminal a bar, the text below it, and above it what `picture` returns a few times a second; elsewhere lines,
    `plain_seconds` apart at least, and one at the end. Both say how much time is left, from the first call's count on.
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
        first: int | None = None

        def show(done: int, text: str) -> None:
            nonlocal first, last
            first, now = done if first is None else first, time.monotonic()
            if done >= total or now - last >= plain_seconds:
                left = (now - began) * (total - done) / (done - first) if first < done < total else 0
                times = duration(now - began) + (f", about {duration(left)} left" if left else "")
                print(f"{title} {done}/{total}  {text}  ({times})", file=sys.stderr, flush=True)
                last = now

        yield show


def line_text(line: Mapping[str, Any]) -> str:
    """A line of a run's metrics or steps in a few words.

    >>> line_text({"train_loss": 2.5, "batches_per_second": 1234.5})
    'loss 2.500  1,234 batches/s'
    """
    words = {"round": "round {}", "train_loss": "loss {:.3f}", "perplexity": "perplexity {:.2f}"}
    words |= {"batches_per_second": "{:,.0f} batches/s", "tokens_per_second": "{:,.0f} tok/s"}
    words |= {"flops_per_second": "{:.3g} FLOP/s", "peak_memory_bytes": "{:.3g} bytes"}
    parts = [text.format(line[name]) for name, text in words.items() if line.get(name)]
    return "  ".join([*parts, *["restart"] * bool(line.get("restarted"))])
