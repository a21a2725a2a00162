"""Small commands whose outputs are known byte for byte: a run, a sweep, token shards, a figure, a page."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import textmaker
from faults.children import Ended, call
from twophase.cli.main import main

TINY = (
    "--model.layers 1 --model.hidden-size 8 --model.intermediate-size 8 --data.sequence-length 8 --data.batch-size 2 "
    "--data.validation-windows 4 --steps 12 --inner-steps 2 --checkpoint-every 1 --log-every 5 --quiet"
).split()
KINDS = {
    "plain": ["--outer.restart", "2"],
    "streaming": "--sync.fragments 2 --sync.delay 1 --sync.mixing 0.5 --sync.wire int8 --inner-steps 4".split(),
    "auto": ["--outer.restart", "auto", "--checkpoint-every", "2"],
}
_TASK = "--task.width 2 --task.batch-size 4 --steps 8 --inner-steps 2 --checkpoint-every 1 --quiet".split()
TIMES = re.compile(r".*seconds?|engine_share|flops_per_second_palm|mfu|peak_memory_bytes|logs|summary_sha256")
"""Keys of JSON that differ between equal runs: durations, speeds, and what is known of logs that hold such."""
_UNLIKE = re.compile(
    r"\.lock|forest|verdict\..*|env\.json|.*\.log|\.verified\.json|jobs\.jsonl|report\.html|manifest\.json"
)
_TEMPORARY = re.compile(r"\.(tmp|writing)-.*|.*\.(tmp|part\.\w+|lock\d.*)|\.preparing\.json")


@dataclass(frozen=True)
class Scene:
    """A command that writes a folder.

    Args:
        name: of the test.
        words: from the folder to the command.
        steps: the same in one process, for faults at a call: commands that are run one after the other.
    """

    name: str
    words: Callable[[Path], list[str]]
    steps: Callable[[Path], list[list[str]]] | None = None
    first: Callable[[], Any] = field(default=lambda: None)

    def whole(self, out: Path) -> int:
        """Call the command or its steps in this process, until one fails."""
        self.first()
        for words in self.steps(out) if self.steps else [self.words(out)]:
            status = main(words)
            if status:
                return status
        return 0

    def run(self, out: Path, log: Path) -> Ended:
        """Run the command in a child."""
        return call(self.words(out), log, self.first)


def contents(out: Path) -> dict[str, bytes]:
    """Every output of a folder without its times, and its newest checkpoint, for a comparison byte for byte."""
    result = {}
    paths = [path for path in out.rglob("*") if path.is_file()] if out.exists() else []
    newest = max((path.parent for path in paths if path.parent.name.startswith("step-")), default=None)
    for path in sorted(paths):
        is_old = path.parent.name.startswith("step-") and path.parent != newest
        if is_old or any(_UNLIKE.fullmatch(part) or _TEMPORARY.fullmatch(part) for part in path.parts):
            continue
        data = path.read_bytes()
        if path.suffix in (".json", ".jsonl") and "tokenizer" not in path.parts:
            lines = data.splitlines() if path.suffix == ".jsonl" else [data]
            data = json.dumps([_timeless(json.loads(line)) for line in lines]).encode()
        elif path.suffix == ".safetensors" and path.name not in ("weights.safetensors", "model.safetensors"):
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            tree = _timeless(json.loads(header.pop("__metadata__")["tree"]))
            data = json.dumps([header, tree], sort_keys=True).encode() + data[8 + size :]
        elif path.suffix == ".html":
            data = re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?( \w+)?", b"", data)
        elif path.name == "cells.csv":
            data = re.sub(rb"(finished|diverged),[0-9.e+-]+", rb"\1", data)
        result[str(path.relative_to(out))] = data
    return result


def _timeless(value: Any) -> Any:
    """Return JSON without times, and with the pairs of a checkpoint's tree in a fixed order."""
    if isinstance(value, dict):
        if value.keys() == {"dict"}:
            return {"dict": sorted((_timeless(pair) for pair in value["dict"]), key=str)}
        return {key: _timeless(item) for key, item in value.items() if not TIMES.fullmatch(key)}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def temporary(out: Path) -> list[str]:
    """What a killed process has left and the next command has not removed."""
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if _TEMPORARY.fullmatch(path.name))


def differences(out: Path, wanted: dict[str, bytes]) -> str:
    """Name the first files that are not as wanted; empty where all are."""
    try:
        now = contents(out)
    except (ValueError, OSError) as error:
        return f"an output cannot be read: {error}"
    names = [name for name in sorted(now.keys() | wanted.keys()) if now.get(name) != wanted.get(name)]
    return ", ".join(names[:4])


class Stage:
    """Where scenes are played: texts, shards and finished outputs that no case changes.

    Args:
        folder: on a tmpfs, so that a power cut can be replayed and nothing waits for a disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.text = textmaker.write(folder / "text.txt", documents=20)
        self.records = folder / "records.jsonl"
        texts = [textmaker.text(documents=1, words=30 + n % 7, seed=n) for n in range(80)]
        self.records.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.known_outputs: dict[str, dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        """Durations of undisturbed commands."""

    def scene(self, name: str) -> Scene:
        """Return a scene by name, such as `train plain`."""
        command, _, kind = name.partition(" ")
        return getattr(self, f"_{command}")(name, kind)

    def wanted(self, scene: Scene) -> dict[str, bytes]:
        """Return the outputs of an undisturbed command."""
        if scene.name not in self.known_outputs:
            self.known_outputs[scene.name] = contents(self.finished(scene))
        return self.known_outputs[scene.name]

    def finished(self, scene: Scene) -> Path:
        """Return the folder of an undisturbed command, which is made once."""
        out = self.folder / "whole" / scene.name.replace(" ", "-")
        if scene.name not in self.seconds:
            began = time.monotonic()
            end = scene.run(emptied(out), self.folder / "whole")
            assert end.status == 0, (scene.name, end)
            self.seconds[scene.name] = time.monotonic() - began
        return out

    def train_words(self, *options: str, corpus: str = "") -> Callable[[Path], list[str]]:
        """Return the words of a tiny run, from its folder."""
        words = ["train", *TINY, *options, "--data.corpus", corpus or f"file:{self.text}"]
        return lambda out: [*words, "--out", str(out)]

    def _train(self, name: str, kind: str) -> Scene:
        return Scene(name, self.train_words(*KINDS[kind]))

    def _tokens(self, name: str, kind: str) -> Scene:  # noqa: ARG002 - one kind
        corpus = f"tokens:{self.finished(self.scene('data bytes'))}"
        return Scene(name, self.train_words("--model.hidden-size", "4", corpus=corpus))

    def _sweep(self, name: str, kind: str) -> Scene:
        axes = "--axis outer.lr 0.3 0.7 --axis outer.restart never 2 4".split()
        words = ["sweep", *TINY, "--data.corpus", f"file:{self.text}", *axes, "--workers"]

        def steps(out: Path) -> list[list[str]]:
            planned = [*words, "0", "--out", str(out)]
            return [planned, ["sweep-worker", "--out", str(out), "--in-memory", "1"], planned]

        return Scene(name, lambda out: [*words, kind, "--out", str(out)], steps, _draw_nothing)

    def _task(self, name: str, kind: str) -> Scene:
        return Scene(name, lambda out: ["train", "--task", kind, *_TASK, "--replicas", "2", "--out", str(out)])

    def _tune(self, name: str, kind: str) -> Scene:
        words = ["tune", kind, *_TASK, *"--arms nesterov@2 --points 3 --seeds 0 --fresh 5 6 --workers 1".split()]
        return Scene(name, lambda out: [*words, "--out", str(out)])

    def _data(self, name: str, kind: str) -> Scene:
        words = ["data", "prepare", str(self.records), "--tokenizer", kind, "--held-out", "0.1", "--shard-tokens", "3k"]
        return Scene(name, lambda out: [*words, "--train-bytes", "5k", "--quiet", "--out", str(out)])

    def _study(self, name: str, kind: str) -> Scene:
        words = ["study", kind, "--quick", "--quiet", "--out"]
        return Scene(name, lambda out: [*words, str(out)], first=lambda: _compute_nothing(kind))

    def _page(self, name: str, kind: str) -> Scene:
        run = self.finished(self.scene("train plain"))
        words = {"explore": ["explore", "--run", str(run), "--sigma", "0.5"], "report": ["report", str(run)]}[kind]
        return Scene(name, lambda out: [*words, "--out", str(out / "page.html")])


_PICTURES: dict[str, Any] = {}


def prepare_pictures(study: str) -> None:
    """Compute and draw a study once, so that children which fork later need only write it."""
    from twophase.figures.style import rendered, styled
    from twophase.studies.study import load

    if study not in _PICTURES:
        result = load(study).table(quick=True)
        with styled():
            _PICTURES[study] = result, rendered(load(study).draw(result), palette=True)


def _compute_nothing(study: str) -> None:
    """Let a study write what was computed before."""
    from twophase.studies import study as house

    result, pictures = _PICTURES[study]
    house.load(study).table = lambda **_: result
    house.load(study).draw = lambda _: None
    house.rendered = lambda *_, **__: pictures


def _draw_nothing() -> None:
    """Let a sweep's figure be written without being drawn, which takes a second, and keep tracebacks off its log."""
    from twophase.figures import heatmaps
    from twophase.sweeps import queue, work

    queue.STALE_SECONDS, queue.BEAT_SECONDS = 10.0, 4.0  # a claim that a power cut has torn
    work.traceback = SimpleNamespace(print_exc=lambda: None)  # type: ignore[assignment]

    heatmaps.rendered = lambda *_, **__: {".png": b"PNG", ".pdf": b"PDF"}


def emptied(place: Path) -> Path:
    """Make a folder without anything in it, whatever is there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


class Cases:
    """Plays the cases of a test in one process.

    Args:
        stage: the texts and finished outputs.
        place: a folder of its own.
    """

    def __init__(self, stage: Stage, place: Path) -> None:
        self.stage, self.place = stage, place
