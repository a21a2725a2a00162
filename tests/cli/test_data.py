"""`twophase data`: its words, what it prints, and its messages."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import pytest

from extras import need
from twophase.base.config import UsageError
from twophase.cli import data as command
from twophase.cli.data import main
from twophase.text.meta import TRAIN, VALIDATION, read_meta

need("pyarrow", "the extra 'data' is not installed")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    """What the command sets in the environment is forgotten."""
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"content": f"document {i} " * 9}) + "\n" for i in range(200)))
    return path


def words(source: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--column", "content", "--tokenizer", "bytes", "--held-out", "0.1", "--quiet"]
    return ["prepare", str(source), "--out", str(out), *fixed, *more]


def test_prepare_makes_a_folder_and_says_so(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The command prepares, prints what is there, and says when there was nothing to do; `info` prints the same."""
    out = tmp_path / "out"
    assert main(words(source, out, "--shard-tokens", "2k", "--tokens", "1e4")) == 0
    printed = capsys.readouterr().out
    meta = read_meta(out)
    assert 10_000 <= meta.tokens(TRAIN) < 10_300
    for text in ("bytes, 257 ids", "a.jsonl", f"{meta.tokens(TRAIN):,} tokens in 5 shards", meta.fingerprint[:12]):
        assert text in printed
    assert f"{meta.tokens(VALIDATION):,} tokens in 1 shards" in printed
    assert main(words(source, out, "--shard-tokens", "2k", "--tokens", "1e4")) == 0
    assert capsys.readouterr().out == printed + "it was finished before: nothing to do\n"
    assert main(["info", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_every_option_reaches_the_request(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each option's value is in the request that is made of it."""
    asked = []
    monkeypatch.setattr(
        command, "prepare", lambda request, quiet: asked.append((request, quiet)) or read_meta(tmp_path)
    )
    more = "--kind c4 --end-of-text X --validation-tokens 2M --train-bytes 3k --threads 1 --tokens 5".split()
    with pytest.raises(UsageError, match=r"holds no meta\.json"):
        main(words(source, tmp_path, *more, "--validation", "v1", "v2"))
    ((request, quiet),) = asked
    assert quiet
    assert (request.sources, request.out, request.kind, request.end_of_text) == ((str(source),), tmp_path, "json", "X")
    assert (request.validation, request.validation_tokens, request.train_bytes) == (("v1", "v2"), 2_000_000, 3000)
    assert (request.tokens, request.held_out, request.column, request.tokenizer) == (5, 0.1, "content", "bytes")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_progress_counts_up_to_the_end(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without --quiet, stderr tells tokens, speed and the end; stdout holds the results alone."""
    assert main([word for word in words(source, tmp_path / "out") if word != "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "prepare 1/1" in shown.err
    assert "MB/s of text" in shown.err
    assert "prepare" not in shown.out


@pytest.mark.parametrize(
    ("word", "value"),
    [("3.3e9", 3_300_000_000), ("10M", 10_000_000), ("500k", 500_000), ("1_000", 1000), ("2b", 2 * 10**9), ("7", 7)],
)
def test_counts_read_as_people_write_them(word: str, value: int):
    """Suffixes, exponents and underscores."""
    assert command._count(word) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["", "many", "-3", "1.5.2", "10X", "nan"], "write for example"),
        (["1e400", "9e999b", "10000000000t"], "is too large"),
    ],
)
def test_other_counts_are_refused(words: list[str], message: str):
    """What is no number is told with examples; one that no file can hold is no overflow."""
    for word in words:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            command._count(word)


def test_mistakes_are_told(source: Path, capsys: pytest.CaptureFixture[str]):
    """A file in the place of a folder is named; without a word there is the help."""
    with pytest.raises(UsageError, match=r"a\.jsonl.* cannot be read .*; name the folder"):
        main(["info", str(source)])
    assert main([]) == 0
    assert "prepare" in capsys.readouterr().out


def test_sigterm_ends_it_like_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while preparing is a KeyboardInterrupt, which the command line answers with how to resume."""
    before = signal.getsignal(signal.SIGTERM)

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("twophase.cli.data.prepare", killed)
    with pytest.raises(KeyboardInterrupt):
        main(["prepare", "text.txt", "--out", str(tmp_path / "out")])
    assert signal.getsignal(signal.SIGTERM) is before
