"""Damaged files: every kind of file that is read back is harmed in every way, and the commands that read it are run.

Each ends as if nothing were wrong, or with one clear message. What is shown but takes part in no result (`SHOWN`) may
differ; it must not bring a traceback or hang.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import calls
from faults.calls import Fault
from faults.children import Ended, begin, call, ended
from faults.scenes import Cases, Scene, Stage, contents, differences, emptied

SHOWN = re.compile(
    r"env\.json|(config|summary)\.(yaml|json)|.*\.jsonl|.*\.log|\.lock|\.verified\.json|.*\.html|verdict\..*"
)
"""Files whose content commands show as it is, without being able to tell what it was."""
WEIGHTS = "weights.safetensors"
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])")
_VALUES = [b"1" + b"0" * 400, b"-1", b"0", b"1e999", b"NaN", b"null", b'"x"', b"true", b"[]", b"{}", b"1e-320", b"2.5"]


def harms() -> dict[str, Callable[[random.Random, bytes], bytes]]:
    """Return ways to damage the bytes of a file, by name."""

    def flip(rng: random.Random, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def block(change: Callable[[bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
        def changed(rng: random.Random, data: bytes) -> bytes:
            low = rng.randrange(len(data))
            high = low + rng.choice((1, 7, 64, 512, 4096))
            return data[:low] + change(data[low:high]) + data[high:]

        return changed

    def number(rng: random.Random, data: bytes) -> bytes:
        places = list(_NUMBER.finditer(data[:100_000]))
        if not places:
            return flip(rng, data)
        place = rng.choice(places)
        return data[: place.start()] + rng.choice(_VALUES) + data[place.end() :]

    def deep(rng: random.Random, data: bytes) -> bytes:
        nested = rng.choice((b"[", b'{"a":', b"- ", b"{a: ")) * rng.choice((1000, 100_000))
        place = rng.choice([0, len(data), rng.randrange(len(data))])
        return data[:place] + nested + data[place:]

    def line(rng: random.Random, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[first], lines[second] = lines[second], lines[first]
        return b"".join(lines if rng.random() < 0.5 else lines[:first] + lines[first + 1 :])

    return {
        "bits": flip,
        "cut": lambda rng, data: data[: rng.randrange(len(data))],
        "zeros": block(lambda piece: bytes(len(piece))),
        "twice": block(lambda piece: 2 * piece),
        "gone": block(lambda _: b""),
        "empty": lambda *_: b"",
        "number": number,
        "deep": deep,
        "line": line,
        "noise": lambda rng, data: rng.randbytes(min(len(data), 5000)),
        "glued": lambda rng, data: data + data[: rng.randint(1, len(data))],
    }


HARMS = [*harms(), "swap", "remove", "folder", "pipe"]


@dataclass(frozen=True)
class Source:
    """A folder that is damaged, and the commands that read it.

    Args:
        folder: as it is before.
        readers: from a copy of it to the words of commands, the last of which makes or repeats the result.
        result: from the copy to the folder of the result.
        must: files that this command vouches for; others may stay damaged where it does not read them.
        pattern: files that are damaged.
    """

    folder: Path
    readers: Callable[[Path], list[list[str]]]
    result: Callable[[Path], Path] = lambda place: place
    must: str = "cells.csv"
    pattern: str = "**/*"


SOURCES = {"half": 5, "run": 4, "forest": 5, "sweep": 3, "shards": 2, "corpus": 2, "half data": 2}
"""Shares of the cases."""


class Damage(Cases):
    """Plays commands that read a damaged folder."""

    def __init__(self, stage: Stage, place: Path) -> None:
        super().__init__(stage, place)
        self._sources: dict[str, Source] = {}
        self._good: dict[str, tuple[list[Ended], dict[str, bytes]]] = {}

    def source(self, name: str) -> Source:
        """Return a source, which is made once."""
        if name not in self._sources:
            self._sources[name] = getattr(self, f"_{name.replace(' ', '_')}")()
        return self._sources[name]

    def play(self, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what was done (`how`), and `failed` where it did not end well."""
        rng = random.Random(seed)
        source = self.source(name)
        if name not in self._good:
            out = self._copy(source)
            ends = [self._read(words) for words in source.readers(out)]
            assert [end.status for end in ends] == [0] * len(ends), (name, ends)
            self._good[name] = ends, contents(source.result(out))
        out = self._copy(source)
        paths = [p for p in sorted(out.glob(source.pattern)) if p.is_file() and p.suffix not in (".png", ".pdf")]
        kind = rng.choice(sorted({_kind(path) for path in paths}))
        path = rng.choice([path for path in paths if _kind(path) == kind])
        harm = rng.choice(HARMS)
        before = path.stat()
        damaged = _harm(path, harm, rng, paths)
        if damaged is not None and rng.random() < 0.5:  # as a failing disk does it, or as a copy
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        shutil.rmtree(source.result(out), ignore_errors=True) if source.result(out) != out else None
        how, goods = f"{harm} {path.relative_to(out)}", self._good[name][0]
        for number, (words, good) in enumerate(zip(source.readers(out), goods, strict=True), 1):
            end, failed = self._read(words), ""
            if end.fault:
                failed = f"{end.fault}: {end.err[-900:]}"
            elif end.status == 0 and number == len(goods):
                failed = self._silent(source, out, path, damaged, self._good[name][1])
            elif end.status == 0 and not SHOWN.fullmatch(path.name) and _words(end.out) != _words(good.out):
                is_told = end.err or "missing or wrong" in end.out
                failed = "" if is_told else f"silent: {_first_difference(good.out, end.out)}"
            if failed:
                return {"how": how, "failed": f"{words[0]}: {failed}"}
        return {"how": how, "failed": ""}

    def _silent(self, source: Source, out: Path, path: Path, damaged: bytes | None, wanted: dict[str, bytes]) -> str:
        """Say in what a result differs though the command has ended well."""
        is_untouched = path.read_bytes() == damaged if path.is_file() else damaged is None
        is_gone = damaged is None and path.name == WEIGHTS  # a finished run's may be removed
        if is_gone or (is_untouched and not re.fullmatch(source.must, path.name)):
            path.unlink(missing_ok=True) if not path.is_dir() else None  # it was not read
            wanted = {name: data for name, data in wanted.items() if out / name != path}
        different = differences(source.result(out), wanted)
        return f"silent: {different}" if different else ""

    def _copy(self, source: Source) -> Path:
        """Copy its folder, with the files' times."""
        place = emptied(self.place / "harmed")
        return Path(shutil.copytree(source.folder, place, symlinks=True, dirs_exist_ok=True))

    def _read(self, words: list[str]) -> Ended:
        first = self.stage.scene("sweep 1").first if words[0].startswith("sweep") else None
        return call(words, self.place / "log", first, patience=30.0)

    # ------------------------------------------------------------------------------------------------- the sources

    def _half(self) -> Source:
        """A run that was killed after its fourth round."""
        scene = self.stage.scene("train plain")
        out = self._killed("half", scene, lambda out: len(list(out.glob("checkpoint/step-*8"))) > 0)
        logs = r"(metrics|rounds|steps)\.jsonl|weights\.safetensors"
        return Source(out, lambda place: [["diagnose", str(place)], scene.words(place)], must=logs)

    def _run(self) -> Source:
        scene = self.stage.scene("train plain")

        def readers(place: Path) -> list[list[str]]:
            page = ["explore", "--run", str(place), "--sigma", "0.5", "--out", str(self.place / "page.html")]
            return [["diagnose", str(place)], ["report", str(place)], page, scene.words(place)]

        return Source(self.stage.finished(scene), readers, must=r"weights\.safetensors")

    def _forest(self) -> Source:
        """A sweep that was killed when it had states of branches and finished runs."""
        scene = self.stage.scene("sweep 1")

        def is_half(out: Path) -> bool:
            return len(list(out.glob("runs/*/summary.json"))) >= 3 and any((out / "forest").iterdir())

        out = self._killed("forest", scene, is_half)
        worker = ["sweep-worker", "--in-memory", "1", "--out"]
        return Source(out, lambda place: [[*worker, str(place)], scene.words(place)])

    def _sweep(self) -> Source:
        scene = self.stage.scene("sweep 1")
        out = self.stage.finished(scene)
        return Source(out, lambda place: [["report", str(place)], scene.words(place)])

    def _shards(self) -> Source:
        """Prepared shards that are prepared again."""
        scene = self.stage.scene("data bpe:300")
        out = self.stage.finished(scene)
        return Source(out, lambda place: [["data", "info", str(place)], scene.words(place)], must="")

    def _corpus(self) -> Source:
        """Prepared shards that are trained on."""
        trained = self.place / "trained"

        def readers(place: Path) -> list[list[str]]:
            words = self.stage.train_words("--model.hidden-size", "4", corpus=f"tokens:{place}")
            return [words(trained)]

        return Source(self.stage.finished(self.stage.scene("data bytes")), readers, lambda _: trained)

    def _half_data(self) -> Source:
        scene = self.stage.scene("data bpe:300")
        out = self._killed("half-data", scene, lambda out: len(list(out.glob("train-*.bin"))) >= 2)
        return Source(out, lambda place: [scene.words(place)], must=r".*\.bin")

    def _killed(self, name: str, scene: Scene, is_half: Callable[[Path], bool]) -> Path:
        """Make the folder of a command that was killed as soon as something is there."""
        out, log = emptied(self.stage.folder / "whole" / f"killed-{name}"), self.place / "log"

        class Watching(Fault):
            def reach(self, call: str, path: str) -> bool:
                if is_half(out):
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().reach(call, path)

        def run() -> int:
            calls.install(Watching(out))
            return scene.whole(out)

        end = ended(begin(run, log), log)
        assert end.status == -signal.SIGKILL, (name, end)
        return out


def _kind(path: Path) -> str:
    """Files of one kind are drawn as often as those of another."""
    return re.sub(r"[0-9a-f]{12,}|\d+", "#", path.name)


def _harm(path: Path, harm: str, rng: random.Random, others: list[Path]) -> bytes | None:
    """Damage a file; returns its new bytes, or None where it is no file any more."""
    data = path.read_bytes()
    if harm == "swap":
        alike = [o for o in others if o.suffix == path.suffix and o != path and o.read_bytes() != data]
        data = rng.choice(alike).read_bytes() if alike else data[::-1]
    elif harm in ("remove", "folder", "pipe"):
        path.unlink()
        if harm != "remove":
            path.mkdir() if harm == "folder" else os.mkfifo(path)
        return None
    else:
        data = harms()[harm](rng, data or b"\n")
    path.write_bytes(data)
    return data


def _words(text: str) -> str:
    """What a command says, without times."""
    return re.sub(r"[0-9.]+ (s|ms|min|tokens/s)\b", "", text)


def _first_difference(good: str, bad: str) -> str:
    pairs = zip(_words(good).splitlines(), _words(bad).splitlines(), strict=False)
    return next((f"{a!r} became {b!r}" for a, b in pairs if a != b), "more or fewer lines")[:300]
