"""Every mistake in what is asked of the command line: status 2, one line that names the argument, nothing on disk."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from commands import snapshot
from twophase.cli import main as cli

OPTIONS = {  # of each command, values that it refuses; the message names the option
    "train": "outer.momentum=1 outer.restart=0 outer.lr=-1 outer.lr=1e400 outer.lr=0_7 outer.form=mean "
    "outer.nesterov=yes outer.zeta=1 outer.method=adamx outer.schedule=cosin inner-steps=1000 inner- "
    "steps=few inner.lr=1e31 steps=1_0 config=absent.yaml data.tokenizer=mistral device=cuda:77 "
    "recipe=nanno track=wnadb start-timeout=nan sync-timeout=-1 compute.micro-batch=3 "
    "compute.precision=fp8 compute.attention=flash sync.compression=int4 sync.fragments=x model.vocabulary- "
    "size=50",
    "train --task digits": "compute.compile recipe=nano task.width=0 repeat",
    "train --sync.fragments 2": "sync.restart=0=0_3",
    "data prepare absent.txt --out tokens": "threads=0 tokenizer=bpe:x",
    "period --sigma 0.5": "sigma=0_5 plot=figure.svg",
    "report .": "watch=0 within=-1",
    "sweep": "axis",
    "sweep --axis outer.lr 1": "in-memory=-1 workers=-1",
    "sweep --axis outer.lr 0.3 0.7": "outer.lr=0.5",
    "tune --budget 2h": "points=3",
    "tune": "points=0 budget=2 arms=nesterov@0 arms=averaging fresh=1 outer.lr=1 seed=3",
    "explore": "outer.momentum=1 outer.lr=nan outer.restart=cycle:2,x sigma=1.5 rounds=0 eigenvalues=3 out=.",
}
SIZES = "model.layers data.batch-size steps inner-steps replicas threads sync.delay sync.fragments"
OPTIONS["train --replicas 1"] = " ".join(f"{size}=1{400 * '0'}" for size in SIZES.split())
MISTAKES = [(f"{words} --{row.replace('=', ' ', 1)}", f"--{row.partition('=')[0]}")
            for words, rows in OPTIONS.items() for row in rows.split()]  # fmt: skip
MISTAKES += [  # words, and what the message names
    ("trian", "train"),
    ("train 3", "'3'"),
    ("train --help modle", "model"),
    ("train --outer.method adamw --outer.restart auto", "--outer.restart"),
    ("train --data.corpus file:absent.txt", "absent.txt"),
    ("train --data.corpus tokens:absent", "absent"),
    ("data prepare absent.txt --out tokens", "absent.txt"),
    ("data info .", "meta.json"),
    ("export absent there", "absent"),
    ("diagnose absent", "absent"),
    ("sweep", "--axis"),
    ("sweep --axis outer.lrr 1 2", "outer.lr"),
    ("sweep --axis outer.lr 1 -1", "--outer.lr"),
    ("sweep --axis outer.lr 1 1.0", "outer.lr"),
    ("sweep --sync.fragments 2 --axis sync.restart 0=3 1=5", "--sync.restart"),
    (f"sweep --axis seed {' '.join(map(str, range(400)))} --axis steps {' '.join(map(str, range(1, 400)))}", "cells"),
    ("tune digts", "--task digts"),
    ("sweep-worker --out absent", "plan.json"),
    ("demo --seeds -1", "seed"),
    ("explore --sigma-range 0.9 0.1", "--sigma-range"),
    ("explore --run absent", "absent"),
]
CONFIGURATIONS = ["outer: {momentun: 0.3}", "outer: {nesterov: 1}", "", "- 1", "inner: {betas: 0.9}", "[" * 100_000,
                  "{a: " * 11, "a: &a [x, x]\nb: [*a, *a]", "seed: !!int '1'", "seed: 1\nseed: 2", "été: 1",
                  "outer: {lr: 1}\nouter.lr: 2", "seed: 1:30", 'corpus: "a\\0b"', "#" * 300_000]  # fmt: skip
FILES = [("train --config odd", "error", text) for text in CONFIGURATIONS]
FILES += [("train --data.corpus file:odd", "odd", text) for text in ("", "été. " * 500)]
FILES += [(words, "odd", "mine") for words in ("explore --out odd", "sweep --axis outer.lr 1 --out odd")]


def check(words: str, thing: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Run a command that must be refused, and leave the folder as it was."""
    before = snapshot(Path.cwd())
    status = cli.main(words.split())
    message = capfd.readouterr().err
    assert (status, message.count("\n")) == (2, 1), message
    assert thing in message
    assert snapshot(Path.cwd()) == before


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "thing", "text"), [*((*row, None) for row in MISTAKES), *FILES])
def test_mistakes(capfd: pytest.CaptureFixture[str], words: str, thing: str, text: str | None) -> None:
    """A mistake in the words, or in a file that they name."""
    if text is not None:
        Path("odd").write_bytes(text.encode("latin-1"))
    check(words, thing, capfd)


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "/dev/zero"])
@pytest.mark.parametrize("words", ["train --config", "train --data.corpus file:", "period --spectrum", "explore --out"])
def test_what_is_no_file(capfd: pytest.CaptureFixture[str], kind: str, words: str) -> None:
    """A pipe would block, a device might never end: neither is opened."""
    match kind:
        case "pipe":
            os.mkfifo("odd")
        case "folder":
            Path("odd").mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind("odd")
        case _:
            Path("odd").symlink_to(kind)
    check(f"{words}{'' if words.endswith(':') else ' '}odd", "odd", capfd)


def test_a_page_replaces_no_file_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """`--out` of a report is a page's name: a file of a run, or of a user, stays as it is."""
    assert cli.main("train --task digits --steps 4 --inner-steps 2 --quiet --out run".split()) == 0
    check("report run --out run/rounds.jsonl", "run/rounds.jsonl", capfd)
    shutil.copytree("run", "other")
    Path("compare.html").write_text("mine")
    check("report run other", "compare.html", capfd)
    for _ in range(2):
        assert cli.main("report run --out page.html".split()) == 0
