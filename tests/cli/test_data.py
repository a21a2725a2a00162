"""`twophase data`: its words, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardmaker
from extras import need
from textmaker import write_lines
from twophase.cli.data import main
from twophase.errors import RunError
from twophase.text.shards import TRAIN, VALIDATION, read_meta

need("tokenizers", "the extra 'data' is not installed")


def test_prepare_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Both print what is there; progress is on stderr; a damaged shard is named, and made again when deleted."""
    path = write_lines(tmp_path / "a.jsonl", [f"document {i} " * 9 for i in range(200)], "content")
    options = "--column content --tokenizer bytes --held-out 0.1 --tokens 1e4 --validation-tokens 5e2".split()
    words = ["prepare", str(path), "--out", str(tmp_path / "out"), *options]
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
    assert not capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out")]) == 0
