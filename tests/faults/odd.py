"""Odd inputs: options, YAML files, policy texts, corpora and Python's own values, from a generator with a seed.

A command either does what it was asked for or ends with one clear message. An accepted policy text must be plain ASCII
without underscores and spaces, and its own text form must give the same policy.
"""

from __future__ import annotations

import os
import random
import resource
import string
from pathlib import Path
from typing import Any

from faults.children import call
from faults.scenes import Cases, Stage
from twophase.base.config import values_of
from twophase.policies.text import parse
from twophase.tasks.lm.config import TrainConfig

NUMBERS = (
    "0 -1 1 2 3 -0 1e400 -1e400 nan inf -inf 1e-400 1_0 0x10 0o7 1e3 1.5 .5 5. +3 00007 4294967296 9223372036854775808 "
    "1e18 1e30 1e31 1000000000000 100000000000000000000 ٣ ３ ² ½ −1 1,5 1:2 3/4 true True null None ~ [] {} () ' \" \\ "
    "$(id) `id` %s {} ; | & * ? ../.. / /dev/null /dev/full /proc/self/mem never loss"
).split()
TEXTS = [*NUMBERS, "", " ", "\t", "\n", "é", "🙂", "\u202e", "\udcff", "a" * 5000, "9" * 5000, "-", "--", "=", "x=y"]
POLICIES = ("never auto gradient at:4,9 cycle:5,6,10 soft:3:0.2:0.1 3 cosine norm gain adaptive stall").split()
_LIMIT = 6 << 30
"""Bytes of address space that a command may take beside what this process has."""
FAMILIES = {"option": 5, "yaml": 4, "policy": 8, "corpus": 1, "words": 2}
"""Shares of the cases."""


class Odd(Cases):
    """Plays commands with odd inputs."""

    def __init__(self, stage: Stage, place: Path) -> None:
        super().__init__(stage, place)
        self.values = values_of(TrainConfig())

    def play(self, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what was done (`how`), and `failed` where it did not end well."""
        how, failed = getattr(self, f"_{name}")(random.Random(seed))
        return {"how": how.encode("utf-8", "backslashreplace").decode()[:600], "failed": failed}

    def _option(self, rng: random.Random) -> tuple[str, str]:
        """One to three odd values of options, of any command; runs that are short enough are trained."""
        paths = rng.sample(sorted(self.values), rng.choice((1, 1, 2, 3)))
        words = [word for path in paths for word in (f"--{path.replace('_', '-')}", self._value(rng, path))]
        command = rng.choice(("train", "train", "train", "sweep", "period", "explore"))
        if command in ("period", "explore"):
            names = ("outer.lr", "outer.momentum", "outer.restart", "rounds", "sigma", "sigma-range", "eigenvalues")
            words = [w for name in rng.sample(names, 2) for w in (f"--{name}", self._value(rng, "outer.lr"))]
            words += ["--out", str(self.place / "page.html")] if command == "explore" else []
            return self._command([command, *words])
        if command == "sweep":
            words += ["--axis", rng.choice(paths), *(self._value(rng, paths[0]) for _ in range(2)), "--workers", "0"]
        return self._command([*self.stage.train_words()(self.place / "odd"), *words], command)

    def _value(self, rng: random.Random, path: str) -> str:
        usual = str(self.values.get(path, 1))
        return rng.choice([rng.choice(TEXTS), rng.choice(NUMBERS), _mutated(rng, usual), usual])

    def _yaml(self, rng: random.Random) -> tuple[str, str]:
        """A configuration file with odd values, keys, nesting, tags, anchors and bytes."""
        lines = ["steps: 2", "inner_steps: 1", "outer:", "  lr: 0.7", "model:", "  layers: 1", "data: {batch_size: 2}"]
        odd = [
            "x: " + "[" * 50_000,
            "{a: " * 3000,
            "- " * 5000 + "1",
            "a: &a [1, *a]",
            "\n".join([f"a{n}: &a{n} [" + f"*a{n - 1}, " * 9 + "]" if n else "a0: &a0 [1]" for n in range(12)]),
            "outer: !!python/object/apply:os.getcwd []",
            "outer: !!binary aGk=",
            "steps: 1\nsteps: 2",
            "\tsteps: 3",
            "outer:\n  restart: [never]",
            "outer: 3",
            "model: null",
            "? [a, b]\n: c",
            "2: 3",
            "<<: {steps: 3}",
            "steps: 1:30",
            "steps: 0o17",
            "outer: {lr: 2001-01-01}",
            "%YAML 9.9\n---",
            "--- a\n--- b",
            "\x00",
            "\ufeffsteps: 3",
            "steps: " + "9" * 6000,
            "outer: {lr: " + rng.choice(TEXTS[:60]) + "}",
            "model: {layers: " + rng.choice(TEXTS[:60]) + "}",
            "data: {vocabulary: " + rng.choice(TEXTS[:60]) + "}",
            "sync: {fragments: " + rng.choice(TEXTS[:60]) + "}",
            rng.choice(sorted(self.values)).replace(".", ": {") + ": " + rng.choice(TEXTS[:60]) + "}",
        ]
        text = "\n".join(rng.sample(lines, rng.randint(0, 4)) + rng.sample(odd, rng.choice((1, 1, 2))))
        data = text.encode("utf-8", "surrogateescape")
        if rng.random() < 0.2:
            data = bytes(byte ^ (rng.random() < 0.02) << rng.randrange(8) for byte in data[:3000])
        path = self.place / "odd.yaml"
        path.write_bytes(data)
        end = self._command([*self.stage.train_words()(self.place / "odd"), "--config", str(path)], "train")
        return f"{data[:400]!r}: {end[0][:80]}", end[1]

    def _policy(self, rng: random.Random) -> tuple[str, str]:
        """A policy's text, in this process."""
        text = _mutated(rng, rng.choice(POLICIES)) if rng.random() < 0.8 else rng.choice(TEXTS)
        try:
            policy = parse(text)
        except ValueError as error:
            return repr(text), "" if str(error).strip() else "no clear message: empty"
        except BaseException as error:
            return repr(text), f"traceback: {type(error).__name__}: {error}"
        if not text.isascii() or "_" in text:  # spaces and ends of lines around a text are no part of it
            return repr(text), f"silent: taken as {policy!r}"
        try:
            again = parse(str(policy))
        except ValueError as error:
            return repr(text), f"silent: {policy!r} has the text {str(policy)!r}, which is refused: {error}"
        return repr(text), "" if again == policy else f"silent: {policy!r} has the text {str(policy)!r}"

    def _corpus(self, rng: random.Random) -> tuple[str, str]:
        """A file, folder, pipe or device that is no text."""
        path = self.place / "corpus"
        path.unlink(missing_ok=True)
        kind = rng.choice(("fifo", "bytes", "empty", "zeros", "newlines", "device", "long", "missing"))
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path = Path(rng.choice(("/dev/full", "/dev/null", "/dev/tty", "/proc/self/mem", "/sys", "/dev/stdin")))
        elif kind != "missing":
            data = {"bytes": rng.randbytes(5000), "empty": b"", "zeros": bytes(5000), "newlines": b"\n" * 5000}
            path.write_bytes(data.get(kind, b"a" * 100_000))
        if rng.random() < 0.4:
            words = ["data", "prepare", str(path), "--tokenizer", "bytes", "--quiet", "--out", str(self.place / "odd")]
            return self._command([*words, "--kind", rng.choice(("auto", "json", "text", "parquet"))])
        corpus = f"{rng.choice(('file', 'tokens'))}:{path}"
        return self._command(self.stage.train_words(corpus=corpus)(self.place / "odd"))

    def _words(self, rng: random.Random) -> tuple[str, str]:
        """Odd words of the other commands: folders, names, numbers."""
        run = str(self.stage.finished(self.stage.scene("train plain")))
        commands = [
            ["report", rng.choice([run, *TEXTS])],
            ["diagnose", rng.choice([run, *TEXTS])],
            ["report", run, "--watch", "nan"],
            ["data", "info", rng.choice([run, *TEXTS])],
            ["data", "prepare", str(self.stage.records), "--out", str(self.place / "odd"), "--quiet", "--tokenizer",
             rng.choice(("bytes", "bpe:0", "bpe:９９９", rng.choice(NUMBERS))), "--shard-tokens", rng.choice(NUMBERS)],
            ["study", rng.choice(TEXTS)],
            ["export", rng.choice(TEXTS), "--out", str(self.place / "odd")],
            ["sweep-worker", "--out", rng.choice(TEXTS)],
            ["explore", "--run", rng.choice([run, *TEXTS]), "--out", str(self.place / "page.html")],
            [rng.choice(TEXTS), rng.choice(TEXTS)],
        ]  # fmt: skip
        return self._command(rng.choice(commands))

    def _command(self, words: list[str], command: str = "") -> tuple[str, str]:
        """Run a command without the means to harm this machine: little memory, no network, a folder of its own."""
        words, usual = [word.replace("\x00", "") for word in words], len(self.stage.train_words()(self.place))
        if command and "--steps" in words[usual:]:
            words.append("--print-config")  # a run of so many steps as were asked for may take as long as it likes
        words = [command, *words[1:]] if command else words

        def limited() -> None:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + _LIMIT, size + _LIMIT))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 27, 1 << 27))
            os.environ.update(HF_HUB_OFFLINE="1", BROWSER="true", http_proxy="http://127.0.0.1:9")
            place.mkdir(exist_ok=True)
            os.chdir(place)

        place = self.place / "cwd"
        os.system(f"rm -rf {place} {self.place / 'odd'} {self.place / 'page.html'}")  # noqa: S605 - paths of ours
        end = call(words, self.place / "log", limited, patience=30.0)
        said = end.fault and f"{end.fault}: {end.err[-900:]}"
        return " ".join(map(repr, words[usual:] if command else words)), said


def _mutated(rng: random.Random, text: str) -> str:
    """Change, add, take and double some characters of a text."""
    characters = list(text)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        place = rng.randrange(len(characters) + 1)
        piece = rng.choice([*NUMBERS, *"0123456789_.:,-+e ", rng.choice(string.printable)])
        characters[place : place + rng.choice((0, 0, 1, 2))] = list(piece)
    return "".join(characters)
