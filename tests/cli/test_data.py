"""`twophase data`: its words, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardmaker
from extras import need
from textmaker import write_lines
from twophase.cli.data import main
from twophase.errors import RunError, UsageError
from twophase.text.shards import TRAIN, VALIDATION, read_meta

need("tokenizers", "the extra 'data' is not installed")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = write_lines(tmp_path / "a.jsonl", [f"document {i} " * 9 for i in range(200)], "content")
    options = "--column content --tokenizer bytes --held-out 0.1 --tokens 1e4 --validation-tokens 5e2".split()
    return ["prepare", str(path), "--out", str(tmp_path / "out"), *options]


def test_prepare_and_verify(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Both print what is there; progress is on stderr; a damaged shard is named, and made again when deleted."""
    assert main(words) == 0
    shown = capsys.readouterr()
    meta = read_meta(tmp_path / "out")
    assert 10_000 <= meta.tokens(TRAIN) < 10_300
    assert 500 <= meta.tokens(VALIDATION) < 700
    assert "prepare" in shown.err
    assert f"{meta.tokens(TRAIN):,} tokens in 1 shards" in shown.out
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert shown.out.strip() in capsys.readouterr().out
    shardmaker.flip(tmp_path / "out" / "validation-00000.bin")
    with pytest.raises(RunError, match=r"validation-00000\.bin"):
        main(["verify", str(tmp_path / "out")])
    (tmp_path / "out" / "validation-00000.bin").unlink()
    assert main([*words, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert main(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["prepare"], "SOURCE"),
        (["prepare", "absent.txt", "--out", "x"], "absent.txt"),
        (["prepare", "a.txt", "--out", "x", "--tokens", "many"], "--tokens"),
        (["prepare", "a.txt", "--ouf", "x"], "--ouf"),
        (["verify", "absent"], "absent"),
        (["info"], "info"),
    ],
)
def test_mistakes_are_named(words: list[str], name: str):
    """Each is one line with the word in question."""
    with pytest.raises(UsageError, match=name) as error:
        main(words)
    assert "\n" not in str(error.value)
