"""Preparing token shards: what is in them, what is written again, bounded memory, and what is refused."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import snapshot
from textmaker import write_lines
from twophase.errors import UsageError
from twophase.text import sources
from twophase.text.prepare import Request, is_held_out, prepare
from twophase.text.shards import TOKEN_BYTES, TOKENIZER, TRAIN, VALIDATION, damaged
from twophase.text.tokenizers import load_tokenizer

pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")

WORDS = "the outer loop keeps a buffer of what inner steps have done and forgets after some rounds".split()


def texts(count: int, seed: int = 0, words: int = 40) -> list[str]:
    source = random.Random(seed)
    return [" ".join([*source.choices(WORDS, k=source.randint(1, words)), f"{seed}-{i}"]) for i in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of C4's schema with 400 documents, and a hidden one."""
    every, folder = texts(400), tmp_path_factory.mktemp("corpus")
    for number, part in enumerate((every[:150], every[150:160], every[160:])):
        write_lines(folder / f"c4-train.{number:05d}-of-01024.json.gz", part)
    write_lines(folder / ".other.jsonl", texts(60, seed=1))
    return folder


def request(corpus: Path, out: Path, **values: Any) -> Request:
    usual = {"source": (str(corpus),), "tokenizer": "bytes", "held_out": 0.1, "quiet": True}
    return Request(out=str(out), **(usual | values))


def decoded(folder: Path, split: str) -> list[str]:
    """The documents of a split of bytes, read without this package's reader."""
    found = []
    for path in sorted(folder.glob(f"{split}-*.bin")):
        ids = np.fromfile(path, "<u2")
        parts = np.split(ids, np.flatnonzero(ids == 256) + 1)
        assert len(parts.pop()) == 0
        found += [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]
    return found


# What is in them


def test_what_is_in_a_folder(corpus: Path, tmp_path: Path):
    """One shard a source file; documents in order, in the split that their hash names; `meta.json` describes them."""
    meta = prepare(request(corpus, tmp_path))
    every = texts(400)
    assert [shard.file for shard in meta.splits[TRAIN]] == [f"train-{i:05d}.bin" for i in range(3)]
    assert decoded(tmp_path, TRAIN) == [text for text in every if not is_held_out(text, 0.1)]
    assert decoded(tmp_path, VALIDATION) == [text for text in every if is_held_out(text, 0.1)]
    tokenizer = load_tokenizer(str(tmp_path / TOKENIZER))
    assert (meta.tokenizer, meta.dtype, meta.tokenizer_sha256) == ("bytes", "uint16", tokenizer.sha256)
    assert (meta.vocabulary_size, meta.end_of_text) == (257, 256)
    assert np.load(tmp_path / TOKEN_BYTES).tolist() == tokenizer.token_bytes.tolist()
    assert not damaged(tmp_path)


def test_limits_cut_at_the_end_of_a_document(corpus: Path, tmp_path: Path):
    """Each split stops with the document that reaches its number of tokens; later files are not read."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    prepare(request(corpus, whole))
    meta = prepare(request(corpus, cut, tokens=12_000.0, validation_tokens=500.0))
    for split, limit in ((TRAIN, 12_000), (VALIDATION, 500)):
        found = decoded(cut, split)
        assert limit <= meta.tokens(split) < limit + len(found[-1]) + 1
        assert found == decoded(whole, split)[: len(found)]
    assert not (cut / "train-00001.bin").exists()


def test_separate_validation_text(corpus: Path, tmp_path: Path):
    """Files named so, as C4's own split is, are the whole validation; nothing is held out then."""
    for name in ("c4-validation.00000-of-00008.json.gz", "my_validation.jsonl"):
        apart, out = write_lines(tmp_path / name, texts(60, seed=1)), tmp_path / f"out-{name}"
        prepare(request(corpus, out, source=(str(apart), str(corpus))))
        assert decoded(out, VALIDATION) == texts(60, seed=1)
        assert decoded(out, TRAIN) == texts(400)


def test_c4_is_its_files_on_the_hub(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`c4` gives the shards of its files here; only those that are needed are downloaded."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'data' is not installed")
    here = shutil.copytree(corpus, tmp_path / "en")
    write_lines(here / "c4-validation.00000-of-00008.json.gz", texts(60, seed=1))
    monkeypatch.setattr(hub, "hf_hub_download", lambda _, name, **__: str(tmp_path / name))
    limits = {"tokens": 35_000.0, "validation_tokens": 1000.0}
    local = prepare(request(here, tmp_path / "local", **limits))
    found = prepare(request(here, tmp_path / "remote", source=("c4",), **limits))
    assert found.fingerprint == local.fingerprint
    assert len(found.request["files"]) == 1024 + 8
    assert [len(found.splits[split]) for split in (TRAIN, VALIDATION)] == [3, 1]


# Repeated


def test_a_finished_folder_is_left_alone(corpus: Path, tmp_path: Path):
    """The same request changes nothing in a finished folder, also inside its source; what is lost comes back alone."""
    out = shutil.copytree(corpus, tmp_path / "c4") / "out"
    asked = request(out.parent, out)
    meta = prepare(asked)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    assert prepare(asked) == meta
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.*")} == before
    (out / "train-00001.bin").unlink()
    assert prepare(asked) == meta
    assert damaged(out) == []
    after = {path: path.stat().st_mtime_ns for path in out.glob("*-*.bin")}
    assert {path.name[-9:-4] for path, when in after.items() if before[path] != when} == {"00001"}


# What is refused


def test_another_request_is_refused(corpus: Path, tmp_path: Path):
    """Other options, files or their sizes are refused by name, and the folder stays as it is."""
    source = shutil.copytree(corpus, tmp_path / "c4")
    asked = request(source, tmp_path / "out")
    prepare(asked)
    before = snapshot(tmp_path / "out")
    for name, value in {"held_out": 0.2, "tokenizer": "mistral", "tokens": 9.0, "end_of_text": "x"}.items():
        with pytest.raises(UsageError, match=f"--out.*{name}"):
            prepare(replace(asked, **{name: value}))  # type: ignore[arg-type]
    write_lines(next(source.glob("c4*00000-*")), texts(11, seed=5))
    with pytest.raises(UsageError, match=r"--out.*files"):
        prepare(asked)
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"held_out": 1.0}, "--held-out"),
        ({"held_out": 1e-9}, "--held-out"),
        ({"tokens": 0.0}, "--tokens"),
        ({"source": ()}, "SOURCE"),
        ({"source": ("c4-validation.00000-of-00008.json",)}, "SOURCE"),
        ({"out": "taken"}, "--out"),
    ],
    ids=str,
)
def test_impossible_requests(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], option: str
):
    """Values out of range, a folder of other token files, and too little text are refused by option."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "c4-validation.00000-of-00008.json", texts(3))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "train.bin").write_bytes(b"ab")
    with pytest.raises(UsageError, match=option):
        prepare(replace(request(corpus, Path("out")), **values))
    assert not Path("out/meta.json").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The peak of Python's memory for twelve times the text, in one file, is about the same."""
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 100)
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 50_000)
    for kind in ("json.gz", "txt"):
        peaks = []
        for size in (1, 1, 12):  # the first call alone imports
            source, out = tmp_path / f"{size}.{kind}", tmp_path / f"out{len(peaks)}-{kind}"
            documents = [f"{number} {text}" for number in range(size) for text in texts(800, words=150)]
            write_lines(source, documents) if kind != "txt" else source.write_text("\n\n".join(documents))
            del documents
            tracemalloc.start()
            prepare(request(source, out))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[2] < 1.5 * peaks[1]  # reading ahead is more or less ahead
