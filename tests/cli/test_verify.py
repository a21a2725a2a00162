"""What the commands say of token shards and weights that were damaged behind an unchanged size and time of change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardmaker
import textmaker
from commands import SMALL
from twophase.cli.main import main
from twophase.tasks.lm.task import corpus_of
from twophase.text.shards import open_shards

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Token shards that were opened before."""
    ids = [np.arange(size, dtype=np.uint16) * 7 % 90 for size in (4000, 600)]
    folder = shardmaker.prepared(tmp_path / "shards", ids[:1], ids[1:], 90)
    open_shards(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "status"),
    [("train --verify", 2), ("train", 1), ("sweep --verify --axis outer.lr 0.3", 2), ("data info --verify", 2)],
)
def test_damaged_shards(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, status: int
) -> None:
    """`--verify` refuses them before a folder is made; without it, training ends with status 1 and no summary."""
    shardmaker.flip(shards / "train-00000.bin")
    corpus_of.cache_clear()
    out, (name, *more) = tmp_path / "out", words.split()
    options = [*SMALL, "--data.corpus", f"tokens:{shards}", "--out", str(out), "--quiet"]
    assert main([name, *([*more, str(shards)] if name == "data" else options + more)]) == status
    said = capsys.readouterr().err
    assert "train-00000.bin" in said
    assert "copy it again, or prepare the folder again" in said
    assert said.count("\n") == 1
    assert out.exists() == (status == 1)
    assert not (out / "summary.json").exists()


def test_shards_of_a_finished_run(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--verify` reads them although there is nothing to train; without it the result is the run's, moved or not."""
    assert main(["data", "info", str(shards), "--verify"]) == 0
    assert "every shard has the SHA-256" in capsys.readouterr().out
    words = ["train", *SMALL, "--data.corpus", f"tokens:{shards}", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*words, "--verify"]) == 0
    result = capsys.readouterr().out
    shardmaker.flip(shards / "train-00000.bin")
    assert main([*words, "--verify"]) == 2
    assert "train-00000.bin" in capsys.readouterr().err
    shards.rename(tmp_path / "moved")
    assert main(words) == 0
    assert capsys.readouterr().out == result


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train", "--data.corpus file:{}: its file or data has changed since the run"),
        ("sweep --axis seed 1 2 --workers 1", "the text is not the one that this sweep was begun with"),
    ],
)
@pytest.mark.slow
def test_what_is_finished_answers_for_its_own_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    """Where its text file is another one now, the same command is refused; one that is gone cannot be compared."""
    monkeypatch.setattr("twophase.figures.overview.draw", lambda *_: [])  # takes longer than the runs
    text = textmaker.write(tmp_path / "text.txt")
    words = [*command.split(), *SMALL, "--data.corpus", f"file:{text}", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(words) == 0
    result = capsys.readouterr().out
    textmaker.write(text, seed=1)
    corpus_of.cache_clear()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message.format(text) in said
    assert "choose another --out" in said
    textmaker.write(text)
    corpus_of.cache_clear()
    assert main(words) == 0
    text.unlink()
    assert main(words) == 0
    assert capsys.readouterr().out == 2 * result or command != "train"


def test_damaged_weights(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` on a finished run and `report` name damaged weights; deleted, they come back from the last checkpoint."""
    words = ["train", *SMALL, "--data.corpus", f"tokens:{shards}", "--out", str(tmp_path / "run"), "--quiet"]
    weights = tmp_path / "run" / "weights.safetensors"
    assert main(words) == 0
    sound = weights.read_bytes()
    shardmaker.flip(weights)
    capsys.readouterr()
    assert main(words) == 1
    assert f"{weights} is damaged: its SHA-256 differs" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run")]) == 0
    assert f"{weights} is damaged: its SHA-256 differs" in " ".join(capsys.readouterr().out.split())
    assert "its SHA-256 differs" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    weights.unlink()
    (tmp_path / "run" / "summary.json").unlink()
    assert main(words) == 0
    assert weights.read_bytes() == sound
