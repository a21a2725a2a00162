"""Every mistake in what is asked of the command line: one line that names the argument, and nothing on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import snapshot
from twophase.cli import main as cli

MISTAKES = [  # words, and what the message names
    ("trian", "train"),
    ("train lost", "lost"),
    ("train --outer.lrr 1", "--outer.lrr"),
    ("train --outer.method averaging --outer.momentum 0.9", "--outer.momentum"),
    ("train --steps 1e9", "--steps"),
    ("train --steps", "--steps"),
    ("train --inner.lr few", "--inner.lr"),
    ("train --inner.lr -1", "--inner.lr"),
    ("train --outer.restart often", "--outer.restart"),
    ("train --sync.stagger maybe", "--sync.stagger"),
    ("train --weight-decay 1", "inner.weight-decay"),
    ("train --inner.method adam", "--inner.method"),
    ("train --sync.delay 40 --data.corpus file:text.txt", "--sync.delay: "),
    ("train --sync.fragments 9999 --data.corpus file:text.txt", "--sync.fragments: "),
    ("train --compute.micro-batch 3", "--compute.micro-batch"),
    ("train --config absent.yaml", "absent.yaml"),
    ("train --config odd.yaml", "outer.momentum"),
    ("train --recipe nanno", "nano"),
    ("train --recipe nano --task digits", "--recipe"),
    ("train --task digts", "--task"),
    ("train --task digits --device cuda:77", "--device"),
    ("train --task digits --replicas 2 --out .", "--out"),
    ("train --task digits --track wnadb", "--track"),
    ("train --task digits --timeout nan", "--timeout"),
    ("train --data.corpus tokens:absent", "absent"),
    ("sweep", "--axis"),
    ("sweep --axis outer.lr 1 -1", "--outer.lr"),
    ("sweep --axis outer.lr 1 --outer.lr 2", "--outer.lr"),
    ("sweep --axis outer.lr 1 --axis outer.lr 2", "--outer.lr"),
    ("sweep --axis outer.lr 1 --task digits --out .", "--out"),
    ("sweep --task digits --axis steps 0", "steps"),
    ("tune --outer.lr 1", "--outer.lr"),
    ("tune --sync.restart 0=3", "--sync.restart"),
    ("tune --seed 3", "--seed"),
    ("tune digits --points 3 --out .", "--out"),
    ("demo --seeds -1", "seed"),
    ("diagnose", "must be given"),
    ("report", "folder"),
    ("export own x", "loop of your own"),
    ("train --config own/config.yaml", "loop of your own"),
    ("export absent there", "absent"),
    ("export own --bogus 3", "OUT"),
    ("data prepare", "SOURCE"),
    ("data prepare absent.txt --out tokens", "absent.txt"),
    ("data verify absent", "absent"),
    ("data info", "info"),
]
FAILURES = [  # of the machine
    ("train --data.corpus file:absent.txt", "absent.txt"),
    ("train --task digits --out odd.yaml/run", "odd.yaml"),
    ("train --task digits --out /proc/run", "/proc/run"),
    ("sweep --task digits --axis seed 1 2 --out /proc/sweep", "/proc/sweep"),
    ("explore --out /proc/page.html", "/proc"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.yaml").write_text("outer: {momentun: 0.3}\n")
    Path("own").mkdir()
    Path("own/config.yaml").write_text("recorded: true\n")
    Path("text.txt").write_text("\n\n".join(f"{number} words of a document." * 9 for number in range(20)))


@pytest.mark.parametrize(
    ("words", "thing", "status"), [(*case, 2) for case in MISTAKES] + [(*case, 1) for case in FAILURES]
)
def test_refused(capfd: pytest.CaptureFixture[str], words: str, thing: str, status: int) -> None:
    """Status 2 for what is asked, 1 for a file or folder that cannot be used; the folder is left as it was."""
    before = snapshot(Path.cwd())
    assert cli.main(words.split()) == status
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"twophase {words.split(maxsplit=1)[0]}: ")
    assert thing in line
    assert snapshot(Path.cwd()) == before
