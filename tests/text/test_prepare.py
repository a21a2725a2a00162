"""Preparing token shards: what is in them, that interruptions leave no trace, bounded memory, and what goes wrong."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import resource
import shutil
import signal
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands import snapshot
from textmaker import write_lines
from twophase.base.config import UsageError
from twophase.text import prepare as module
from twophase.text import sources
from twophase.text.meta import TOKENIZER, TRAIN, VALIDATION, Meta, read_meta
from twophase.text.prepare import STATE, Request, _planned, is_held_out, prepare
from twophase.text.tokenizer import load_tokenizer

pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")

WORDS = "the outer loop keeps a buffer of what inner steps have done and forgets after some rounds".split()


def texts(count: int, seed: int = 0, words: int = 40) -> list[str]:
    source = random.Random(seed)
    return [" ".join([*source.choices(WORDS, k=source.randint(1, words)), f"{seed}-{i}"]) for i in range(count)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of C4's schema with 400 documents, and a hidden one of other documents."""
    every, folder = texts(400), tmp_path_factory.mktemp("original")
    for number, part in enumerate((every[:150], every[150:160], every[160:])):
        write_lines(folder / f"c4-train.{number:05d}-of-01024.json.gz", part)
    write_lines(folder / ".other.jsonl", texts(60, seed=1))
    return folder


@pytest.fixture
def corpus(original: Path, tmp_path: Path) -> Path:
    """A copy of the original, which may be changed."""
    return shutil.copytree(original, tmp_path / "c4")


@pytest.fixture(scope="module")
def whole(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders that the original is prepared into without an interruption, each once."""

    @functools.cache
    def made(**values: object) -> Path:
        return prepared(request(original, tmp_path_factory.mktemp("whole") / "out", **values))

    return made


def prepared(asked: Request) -> Path:
    prepare(asked)
    return asked.out


def request(corpus: Path, out: Path, **values: object) -> Request:
    usual = {"tokenizer": "bytes", "held_out": 0.1, "shard_tokens": 5000}
    return Request(sources=(str(corpus),), out=out, **(usual | values))  # type: ignore[arg-type]


def ids_of(folder: Path, meta: Meta, split: str) -> np.ndarray:
    """All ids of a split, read without this package's reader."""
    parts = [np.fromfile(folder / shard.file, np.dtype(meta.dtype).newbyteorder("<")) for shard in meta.splits[split]]
    return np.concatenate(parts)


def decoded(folder: Path, meta: Meta, split: str) -> list[str]:
    """The documents of a split of bytes."""
    data = ids_of(folder, meta, split)
    ends = np.flatnonzero(data == 256)
    assert ends[-1] == len(data) - 1
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in np.split(data, ends + 1)[:-1]]


# What is in them


def test_what_is_in_a_folder(corpus: Path, tmp_path: Path):
    """Documents are in the split that their hash names, in order; `meta.json` is what a recount finds.

    Every shard but the last closes at the end of the document with which it has the asked number of ids.
    """
    write_lines(corpus / "c4-train.00003-of-01024.json.gz", texts(100))  # equal documents are on one side
    out, every = tmp_path / "out", texts(400) + texts(100)
    meta = prepare(request(corpus, out))
    assert meta == read_meta(out)
    assert decoded(out, meta, TRAIN) == [text for text in every if not is_held_out(text, 0.1)]
    assert decoded(out, meta, VALIDATION) == [text for text in every if is_held_out(text, 0.1)]
    assert 10 < sum(shard.documents for shard in meta.splits[VALIDATION]) < 110
    tokenizer = load_tokenizer(str(out / TOKENIZER))
    assert (meta.tokenizer, meta.dtype) == ("bytes", "uint16")
    assert meta.tokenizer_sha256 == tokenizer.sha256
    assert (meta.vocabulary_size, meta.end_of_text) == (tokenizer.vocabulary_size, tokenizer.end_of_text)
    sizes = np.load(out / "token_bytes.npy")
    assert sizes.tolist() == tokenizer.token_bytes.tolist()
    assert meta.token_bytes_sha256 == hashlib.sha256((out / "token_bytes.npy").read_bytes()).hexdigest()
    for split in (TRAIN, VALIDATION):
        for number, shard in enumerate(meta.splits[split]):
            ids = np.fromfile(out / shard.file, "<u2")
            ends = np.flatnonzero(ids == meta.end_of_text)
            assert shard.file == f"{split}-{number:05d}.bin"
            assert (shard.tokens, shard.largest, shard.documents) == (len(ids), ids.max(), len(ends))
            assert shard.text_bytes == sizes[ids].sum()
            assert shard.sha256 == hashlib.sha256((out / shard.file).read_bytes()).hexdigest()
            assert ends[-1] == len(ids) - 1
            if shard is not meta.splits[split][-1]:
                assert shard.tokens >= 5000 > ends[-2] + 1
    assert len(meta.splits[TRAIN]) > 5
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".bin") == ["meta.json", "token_bytes.npy", "tokenizer"]


def test_tokens_stop_at_the_end_of_a_document(corpus: Path, tmp_path: Path):
    """`tokens` ends the training split with the document that reaches it; `validation_tokens` ends the other."""
    meta = prepare(request(corpus, tmp_path / "out", tokens=12_000, validation_tokens=500))
    whole = prepare(request(corpus, tmp_path / "whole"))
    for split, limit in ((TRAIN, 12_000), (VALIDATION, 500)):
        data, every = ids_of(tmp_path / "out", meta, split), ids_of(tmp_path / "whole", whole, split)
        assert data.tolist() == every[: len(data)].tolist()
        assert len(data) >= limit > len(data) - 400
    ends = [texts(400).index(decoded(tmp_path / "out", meta, split)[-1]) for split in (VALIDATION, TRAIN)]
    assert ends[0] < ends[1]


def test_validation_of_its_own(corpus: Path, tmp_path: Path):
    """Validation files, or C4's own in the folder, are the validation split; then nothing is held out."""
    other = write_lines(tmp_path / "other.jsonl", texts(30, seed=1))
    meta = prepare(request(corpus, tmp_path / "out", validation=(str(other),)))
    assert decoded(tmp_path / "out", meta, VALIDATION) == texts(30, seed=1)
    assert decoded(tmp_path / "out", meta, TRAIN) == texts(400)
    other.rename(corpus / "c4-validation.00000-of-00008.json")
    again = prepare(request(corpus, tmp_path / "own"))
    assert again.fingerprint == meta.fingerprint
    link = tmp_path / "link.json.gz"
    link.symlink_to(corpus / "c4-train.00000-of-01024.json.gz")  # two names of one file are one file
    with pytest.raises(UsageError, match=r"--validation .*link.json.gz: is also trained on"):
        prepare(request(corpus, tmp_path / "no", validation=(str(link),)))


def test_c4_as_validation_is_its_validation_split(corpus: Path, tmp_path: Path):
    """The word c4 names both splits on the hub; beside training files of one's own its training split is not read."""
    planned = _planned(request(corpus, tmp_path / "out", validation=("c4",))).validation
    names = [file.path.rpartition("/")[2] for file in planned]
    assert names == [f"c4-validation.{number:05d}-of-00008.json.gz" for number in range(8)]


def test_large_vocabularies_take_four_bytes(corpus: Path, tmp_path: Path):
    """With more than 65,536 ids the shards are uint32, and hold the same ids."""
    load_tokenizer("bytes").save(tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    large = json.loads(path.read_text())
    large["model"]["vocab"]["far"] = 70_000
    path.write_text(json.dumps(large))
    meta = prepare(request(corpus, tmp_path / "out", tokenizer=str(path.parent)))
    same = prepare(request(corpus, tmp_path / "small"))
    assert meta.dtype == "uint32"
    assert ids_of(tmp_path / "out", meta, TRAIN).tolist() == ids_of(tmp_path / "small", same, TRAIN).tolist()


# Interruptions


class Killed(BaseException):
    """As final as a signal: nothing catches it."""


def interrupted(asked: Request, monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """A preparation that ends at the n-th call of one of its methods, or not."""
    calls = 0
    owner = module.Splits if hasattr(module.Splits, name) else module._Preparation
    method = getattr(owner, name)

    def counted(*args: object, **kwargs: object):
        nonlocal calls
        calls += 1
        if calls == after:
            raise Killed
        return method(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counted)
        with pytest.raises(Killed):
            prepare(asked)


PLACES = "add:1 add:77 add:150 close:1 close:4 _save:1 _save:2 _save:5 _declare:1 _batch:3 flush:7 _tokenizer:1".split()


LIMITS: dict[str, dict[str, object]] = {
    "bytes": {"tokens": 18_000},
    "bpe": {"tokenizer": "bpe:300"},
    "files": {"validation": (".other.jsonl",)},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", LIMITS)
def test_interruptions_leave_no_trace(
    original: Path,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    place: str,
    kind: str,
):
    """Wherever a preparation ends, twice even, the repeated one makes a folder that is byte for byte the same.

    A tokenizer that is learnt in this thread is the one that others learn, too.
    """
    name, after = place.split(":")
    if place == PLACES[0]:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.chdir(original)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 23)
    limits = LIMITS[kind] | {"shard_tokens": 2500}
    asked = request(original, tmp_path / "out", **limits)
    with monkeypatch.context() as patch:
        patch.setattr(module, "SAVE_SECONDS", -1.0 if int(after) % 2 else 30.0)
        interrupted(asked, patch, name, int(after))
    assert not (asked.out / "meta.json").exists()
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 41)  # how documents are cut into batches means nothing
    interrupted(asked, monkeypatch, "_declare", 1)
    assert snapshot(prepared(asked)) == snapshot(whole(**limits))


def test_a_finished_folder_is_left_alone(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same request on a finished folder reads nothing and changes nothing."""
    asked = request(corpus, tmp_path / "out")
    meta = prepare(asked)
    before = {path: path.stat().st_mtime_ns for path in asked.out.rglob("*")}
    monkeypatch.setattr(module, "batches", None)
    assert prepare(asked) == meta
    assert {path: path.stat().st_mtime_ns for path in asked.out.rglob("*")} == before


# What goes wrong


def test_another_request_is_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that was begun or finished with another request is named, with what differs, and stays as it is."""
    asked = request(corpus, tmp_path / "out")
    interrupted(asked, monkeypatch, "_declare", 1)
    before = snapshot(asked.out)
    for other, message in (
        (replace(asked, held_out=0.2), "held_out is 0.1 there, 0.2 here"),
        (replace(asked, tokenizer="bpe:300"), "tokenizer is bytes there, bpe:300 here"),
        (replace(asked, sources=(str(next(corpus.glob("c4*"))),)), "not set here"),
        (replace(asked, sources=tuple(str(p) for p in sorted(corpus.glob("c4*"), reverse=True))), "order is"),
    ):
        with pytest.raises(UsageError, match=f"begun with another request .*{message}"):
            prepare(other)
    path = min(corpus.glob("c4*"))
    right = path.read_bytes()
    write_lines(path, texts(11, seed=5))
    with pytest.raises(UsageError, match=r"files\.c4-train\.00000-of-01024\.json\.gz is \d+ there, \d+ here"):
        prepare(asked)
    path.write_bytes(right)
    assert snapshot(asked.out) == before
    prepare(asked)
    with pytest.raises(UsageError, match=r"is finished, and of another request .*name another folder"):
        prepare(replace(asked, column="content"))


def test_a_slip_does_not_block_the_folder(original: Path, whole: Callable[..., Path], tmp_path: Path):
    """A tokenizer that is not there, or cannot be learnt, or a wrong column, leaves the folder to another request."""
    asked = request(original, tmp_path / "out")
    with pytest.raises(UsageError, match="--tokenizer nonsense"):
        prepare(replace(asked, tokenizer="nonsense"))
    with pytest.raises(UsageError, match="has no 'body'"):
        prepare(replace(asked, column="body", tokenizer="bpe:300", held_out=0.0, tokens=9))
    with pytest.raises(UsageError, match="has no 'body'"):
        prepare(replace(asked, column="body", held_out=0.0))
    (asked.out / "tokenizer" / "added_tokens.json").write_text("{}")  # as of a tokenizer with more files
    assert snapshot(prepared(asked)) == snapshot(whole())


def test_another_tokenizer_is_refused(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer folder that changed since the interruption is told, whatever its name."""
    load_tokenizer("bytes").save(tmp_path / "tokenizer")
    asked = request(original, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))
    interrupted(asked, monkeypatch, "add", 200)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    right = path.read_text()
    swapped = right.replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97')
    for other in (swapped, right.replace('"special": true', '"special": false')):  # other ids, or ids of other bytes
        path.write_text(other)
        with pytest.raises(UsageError, match=r"--tokenizer .* is not the one that .* was begun with.*restore it"):
            prepare(asked)


@pytest.mark.parametrize("edit", [lambda text: text.replace("a", "A"), lambda text: text.replace("\n", " ")])
def test_a_source_that_was_edited_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[str], str]
):
    """Another text of the same name and size is not mixed with what has been prepared; the first one completes it."""
    monkeypatch.setattr(module, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 5)
    source = tmp_path / "lines.jsonl"
    text = "".join(json.dumps({"text": f"a text, number {number:03}"}) + "\n" for number in range(40))
    source.write_text(text)
    asked = Request((str(source),), tmp_path / "out", tokenizer="bytes", held_out=0.0)
    interrupted(asked, monkeypatch, "_save", 4)
    source.write_text(edit(text))
    with pytest.raises(UsageError, match=r"lines\.jsonl: is not the file of which a part"):
        prepare(asked)
    source.write_text(text)
    whole = replace(asked, out=tmp_path / "whole")
    assert snapshot(prepared(asked)) == snapshot(prepared(whole))


def test_a_damaged_source_is_resumed_when_it_is_whole(corpus: Path, whole: Callable[..., Path], tmp_path: Path):
    """A cut file stops with its name; what came before stays, and the whole file, of whatever size, completes it."""
    path = sorted(corpus.glob("c4*"))[2]
    good = path.read_bytes()
    path.write_bytes(good[:-60])
    asked = request(corpus, tmp_path / "out")
    with pytest.raises(UsageError, match=f"{path.name}: is not a whole gzip file"):
        prepare(asked)
    assert (asked.out / "train-00000.bin").exists()
    path.write_bytes(good)
    assert snapshot(prepared(asked)) == snapshot(whole())


def test_a_missing_part_is_told(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An interrupted folder whose shards or state are missing, cut or changed says what to do."""
    monkeypatch.setattr(module, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 23)
    for method, count, pattern in (("_declare", 1, "train-00001.bin"), ("_save", 5, ".tmp-train-*.bin")):
        asked = request(original, tmp_path / method)
        interrupted(asked, monkeypatch, method, count)
        (part,) = asked.out.glob(pattern)
        right = part.read_bytes()
        for message, data in ("is missing", None), (r"has \S+ bytes", right[:2]), ("has changed", b"?" + right[1:]):
            part.unlink() if data is None else part.write_bytes(data)
            with pytest.raises(UsageError, match=rf"{part.name} {message}.*; delete the folder and prepare it again"):
                prepare(asked)
    state = json.loads((asked.out / STATE).read_text())
    for text, why in ("{", ""), (json.dumps(state | {"splits": {}}), "it has changed since it was written"):
        (asked.out / STATE).write_text(text)
        with pytest.raises(UsageError, match=rf"is damaged \(.*{why}.*\); delete"):
            prepare(asked)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"held_out": 1.0}, "--held-out 1.0: must be at least 0 and below 1"),
    ({"tokens": 0}, "--tokens 0: must be at least 1"),
    ({"shard_tokens": -1}, "--shard-tokens -1"),
    ({"tokenizer": "bpe:many"}, "--tokenizer bpe:many: write bpe:SIZE"),
    ({"tokenizer": "bpe:9"}, "--tokenizer bpe:9"),
    ({"sources": ()}, "no source"),
    ({"sources": ("c4-validation.00000-of-00008.json",)}, "validation files of C4 only; name its c4-train files"),
    ({"end_of_text": "<s>"}, "--end-of-text <s>: --tokenizer bytes has its own end of a text; leave"),
    ({"end_of_text": "<s>", "tokenizer": "bpe:300"}, "--end-of-text <s>: --tokenizer bpe:300 has its own"),
    ({"out": Path("thesis")}, r"holds something else \(thesis.txt\); name a new or empty folder"),
    ({"out": Path("thesis/thesis.txt")}, "is a file; name a folder"),
    ({"out": Path("thesis/thesis.txt/below")}, r"cannot be written \(Not a directory\)"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_impossible_requests_are_told(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict, message: str
):
    """Values out of range and folders of something else are refused before anything is made."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "c4-validation.00000-of-00008.json", texts(3))
    write_lines(tmp_path / "thesis" / "thesis.txt", [])
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=message):
        prepare(replace(request(original, Path("out")), **values))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("documents", "share", "message"),
    [
        ([], 0.1, r"a\.jsonl: holds no text to train on"),
        (["", "  "], 0.1, r"a\.jsonl: holds no text to train on"),
        (texts(3), 1e-6, r"--held-out 1e-06: holds out none of so few documents"),
        (texts(3), 0.0, ""),
    ],
)
def test_too_little_text_is_told(tmp_path: Path, documents: list[str], share: float, message: str):
    """A source without text, or too small for its share, is named; a share of 0 asks for no validation split."""
    asked = request(write_lines(tmp_path / "a.jsonl", documents), tmp_path / "out", held_out=share)
    if message:
        with pytest.raises(UsageError, match=message):
            prepare(asked)
    else:
        assert set(prepare(asked).splits) == {TRAIN}


def test_validation_without_text_is_told(tmp_path: Path):
    """A validation file without text is named, at the first call and when it is repeated, and nothing is declared."""
    empty, train = write_lines(tmp_path / "empty.jsonl", ["", " "]), write_lines(tmp_path / "a.jsonl", texts(3))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"--validation empty\.jsonl: holds no text; .* with another --out"):
            prepare(request(train, tmp_path / "out", validation=(str(empty),)))
    assert not (tmp_path / "out" / "meta.json").exists()


def test_two_at_once_are_refused(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second process on the same folder is sent away, and the first is not disturbed."""
    asked = request(original, tmp_path / "out")
    save = module._Preparation._save
    refusals: list[str] = []

    def second(self: module._Preparation) -> None:
        save(self)
        with pytest.raises(UsageError, match="another process is preparing it") as refused:
            prepare(asked)
        refusals.append(str(refused.value))

    monkeypatch.setattr(module._Preparation, "_save", second)
    prepare(asked)
    assert refusals


def test_a_full_disk_keeps_what_was_complete(original: Path, whole: Callable[..., Path], tmp_path: Path):
    """A full disk is told as an OSError, no mistake; with room again, the folder completes as if nothing had been."""
    asked = request(original, tmp_path / "out", shard_tokens=20_000)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written \(File too large\); make room; complete files stay"):
            prepare(asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert snapshot(prepared(asked)) == snapshot(whole(shard_tokens=20_000))


# Memory


def test_a_huge_record_is_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The parts of one record are encoded a few at a time, about `BATCH_BYTES` of text, and written in order."""
    monkeypatch.setattr(sources, "MAX_DOCUMENT", 1000)
    monkeypatch.setattr(module, "BATCH_BYTES", 5000)
    text = " ".join(f"word{i}" for i in range(10_000))
    write_lines(tmp_path / "in.jsonl", [text])
    sizes: list[int] = []
    tokenizer = load_tokenizer("bytes")

    def watched(batch: list[str]):
        sizes.append(sum(map(len, batch)))
        return tokenizer.encode(batch)

    monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: replace(tokenizer, encode=watched))
    asked = Request((str(tmp_path / "in.jsonl"),), tmp_path / "out", tokenizer="bytes", held_out=0.0)
    meta = prepare(asked)
    assert decoded(asked.out, meta, TRAIN)[0] in text
    assert "".join(decoded(asked.out, meta, TRAIN)) == text
    assert len(sizes) > 10
    assert max(sizes) <= 6000


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The peak of Python's memory for a preparation of six times the text is the same within 15 %."""
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 100)
    documents, peaks = texts(800, words=150), []
    for size in (1, 1, 6):  # the first call alone imports
        source, out = tmp_path / f"in{size}", tmp_path / f"out{len(peaks)}"
        for number in range(size):
            write_lines(source / f"{number}.json.gz", [f"{number} {text}" for text in documents])  # no two alike
        tracemalloc.start()
        prepare(request(source, out, shard_tokens=200_000))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.15 * peaks[1]
