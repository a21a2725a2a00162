"""Corpora: where documents come from, what is held out, and which windows each replica reads."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError
from twophase.tasks.lm import corpus
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.corpus import Corpus, build_text, fingerprint, load_documents
from twophase.tasks.lm.tokens import vocabulary


def paragraph(number: int, words: int = 200) -> str:
    """A paragraph that names its number in every word."""
    return " ".join(f"word{number}" for _ in range(words))


def write_lines(path: Path, texts: list[str]) -> Path:
    """JSON lines, as C4 has them."""
    path.write_text("".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts), encoding="utf-8")
    return path


def data(path: Path, **options: object) -> DataConfig:
    """A configuration for a file and small windows."""
    return DataConfig(corpus=f"file:{path}", **({"sequence_length": 16, "batch_size": 4} | options))  # type: ignore[arg-type]


def ready(training: np.ndarray, held_out: np.ndarray, length: int = 16, batch: int = 4, windows: int = 8) -> Corpus:
    """A corpus of given tokens."""
    return Corpus(vocabulary("bytes"), training, held_out, length, batch, windows, {})


# Files


def test_json_lines_give_a_document_each(tmp_path: Path):
    """Each line's text is a document, in order; blank lines and blank texts are none; equal texts count once."""
    path = write_lines(tmp_path / "c4.jsonl", ["one\u2028still one", "two", "  \n", "two", "three"])
    path.write_text(path.read_text() + "\n")
    documents = load_documents(f"file:{path}")
    assert documents.texts == ("one\u2028still one", "two", "three")
    assert documents.description == "text of c4.jsonl: 3 documents, 21 characters"


def test_separators_inside_json_strings_do_not_end_a_line(tmp_path: Path):
    """A U+2028 that stands unescaped in a JSON string is text, not the end of the line."""
    path = tmp_path / "raw.json"
    path.write_text('{"text": "a\u2028b"}\r\n{"text": "c"}\n', encoding="utf-8")
    assert load_documents(f"file:{path}").texts == ("a\u2028b", "c")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_gzip_reads_as_the_file_within(tmp_path: Path, name: str):
    """The documents of `a.txt.gz` and `a.jsonl.gz` are those of `a.txt` and `a.jsonl`."""
    path = tmp_path / name
    texts = [paragraph(i) for i in range(4)]
    if name.endswith("l"):
        write_lines(path, texts)
    else:
        path.write_text("\n\n".join(texts))
    packed = tmp_path / (name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_documents(f"file:{packed}").texts == load_documents(f"file:{path}").texts == tuple(texts)


@given(st.lists(st.integers(1, 2500), min_size=1, max_size=30), st.sampled_from(["\n\n", "\n \n", "\n\n\t\n"]))
def test_paragraphs_are_gathered_to_documents(sizes: list[int], blank: str):
    """Every paragraph is in exactly one document, in order.

    Each document has at least 1,000 characters and would not without its last paragraph; the last one takes the rest.
    """
    paragraphs = [f"{i:02d}" + "x" * size for i, size in enumerate(sizes)]
    texts = corpus._plain_documents(blank.join(paragraphs))
    assert "\n\n".join(texts).split("\n\n") == paragraphs
    if len(texts) > 1:
        assert min(map(len, texts)) >= 1000
        assert all(len("".join(text.split("\n\n")[:-1])) < 1000 for text in texts[:-1])


def test_text_without_blank_lines_is_gathered_by_lines(tmp_path: Path):
    """One long paragraph, such as a sentence a line, still gives many documents."""
    path = tmp_path / "lines.txt"
    lines = [paragraph(i, words=20) for i in range(100)]
    path.write_text("\n".join(lines))
    documents = load_documents(f"file:{path}")
    assert "\n".join(documents.texts) == "\n".join(lines)
    assert len(documents.texts) > 10


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    """A BOM, as some editors write it, changes nothing."""
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    text = "\n\n".join(paragraph(i) for i in range(3))
    plain.write_text(text)
    marked.write_text(text, encoding="utf-8-sig")
    assert load_documents(f"file:{plain}").texts == load_documents(f"file:{marked}").texts


def test_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`file:~/name` is a file in the user's home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "c4.jsonl", ["one", "two"])
    assert load_documents("file:~/c4.jsonl").texts == ("one", "two")


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_fingerprints_tell_texts_and_borders_apart(a: list[str], b: list[str]):
    """Fingerprints are equal exactly for equal lists: the borders between texts count, too."""
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
    assert fingerprint(["".join(a), "x"]) != fingerprint(["".join(a) + "x"])


def broken_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Files that cannot be used, and a pattern for the one message about each."""
    lines = '{"text": "one"}\n\n'
    contents: dict[str, tuple[bytes, str]] = {
        "empty.txt": (b"", "holds no text; name a file"),
        "blank.txt": (b" \n\n \t\n", "holds no text"),
        "blank.jsonl": (b'\n{"text": " "}\n', "holds no text"),
        "single.txt": (b"only one line", "is a single document of 13 characters.*larger file"),
        "single.jsonl": (lines.encode(), "is a single document of 3 characters"),
        "latin.txt": ("na\u00efve\n\n".encode("latin-1"), r"is not UTF-8 \(byte 0xef at offset 2\).*iconv"),
        "broken.jsonl": ((lines + "{text}\n").encode(), "line 3 is not a JSON object with a string 'text'"),
        "list.json": (b'["one", "two"]', "line 1 is not a JSON object"),
        "number.jsonl": (lines.encode() + b'{"text": 5}', "line 3 is not"),
        "other.jsonl": (lines.encode() + b'{"body": "x"}', "line 3 is not"),
        "deep.jsonl": (b"[" * 100_000, "line 1 is not"),
        "nogzip.txt.gz": (b"plain", "is not a whole gzip file.*fetch it again"),
        "cut.txt.gz": (gzip.compress(os.urandom(999))[:-20], "is not a whole gzip file"),
        "flipped.txt.gz": (gzip.compress(b"a" * 999)[:12] + b"\xff" * 30, "is not a whole gzip file"),
        "trailing.txt.gz": (gzip.compress(b"a" * 999) + b"rest", "is not a whole gzip file"),
    }
    cases = {name: (folder / name, pattern) for name, (_, pattern) in contents.items()}
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    cases["folder"] = folder / "folder", "is a folder; name one file in it"
    cases["absent"] = folder / "absent.txt", "there is no such file; check the path"
    cases["below"] = folder / "empty.txt" / "x", "cannot be read.*check the path and its permissions"
    return cases


def test_unusable_files_are_refused(tmp_path: Path):
    """Each is refused with one message that names the option, the file, what is wrong and the remedy."""
    for path, pattern in broken_files(tmp_path).values():
        with pytest.raises(UsageError, match=pattern) as caught:
            load_documents(f"file:{path}")
        assert str(caught.value).startswith(f"--data.corpus file:{path}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["", "file:", "c4", "File:x", "/etc/hosts"])
def test_unknown_forms_are_refused(form: str):
    """What is neither a text of Python, `file:PATH` nor `tokens:PATH` is refused, with an example of what would do."""
    with pytest.raises(
        UsageError, match=r"--data.corpus is .*; it must be python, python-code, file:PATH or tokens:PATH"
    ):
        load_documents(form)


# The running Python's documentation


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library of our own, and an empty cache."""
    root = tmp_path / "lib"
    files = {
        "a.py": f'"""{paragraph(1, 40)}"""\n',
        "b/c.py": f'class C:\n    """{paragraph(2, 40)}"""\n    async def f(self):\n        """{paragraph(3, 40)}"""\n',
        "b/short.py": '"""Short."""\n',
        "b/twice.py": f'def g():\n    """{paragraph(2, 40)}"""\n',
        "b/escape.py": f'"""\\d {paragraph(4, 40)}"""\n',
        "b/syntax.py": f'"""{paragraph(5, 40)}"""\nprint "x"\n',
        "b/zero.py": f'"""{paragraph(5, 40)}"""\n\x00\n',
        "site-packages/d.py": f'"""{paragraph(6, 40)}"""\n',
        "b/tests/d.py": f'"""{paragraph(6, 40)}"""\n',
        "b/raises.py": f'"""{paragraph(7, 40)}"""\nraise SystemExit(3)\n',
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "nowhere.py").symlink_to(root / "missing")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(root))
    monkeypatch.setattr(corpus, "_topics", lambda: ["topic"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(_: object) -> list[str]:
        raise AssertionError("the cache was not used")

    monkeypatch.setattr(corpus, "_docstrings", parse)


def numbers(texts: tuple[str, ...]) -> list[str]:
    return [text.split()[-1] for text in texts]


def test_docstrings_are_collected_without_running_anything(library: Path):
    """Long docstrings of modules, classes and functions come by sorted path, each once; nothing is imported.

    Excluded folders, short docstrings and files that do not parse are left out.
    """
    documents = load_documents("python")
    assert numbers(documents.texts) == ["topic", "word1", "word2", "word3", "word4", "word7"]
    assert documents.fingerprint == fingerprint(documents.texts)
    assert library.exists()


def test_cache_serves_the_second_time(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second call reads one cache file and parses nothing; a changed library is read anew into the same file."""
    first = load_documents("python")
    with monkeypatch.context() as patch:
        forbid_parsing(patch)
        assert load_documents("python") == first
    (library / "e.py").write_text(f'"""{paragraph(8, 40)}"""\n')
    assert numbers(load_documents("python").texts)[-1] == "word8"
    assert len(list((tmp_path / "cache" / "twophase").iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[1, 2]", b"{}", b"[" * 50_000, b'{"key": 1}', "cut", "altered", "types"], ids=repr
)
def test_a_damaged_cache_is_rebuilt(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str
):
    """Whatever the cache file holds, the documents are right, and the cache is whole again afterwards."""
    expected = load_documents("python")
    (file,) = (tmp_path / "cache" / "twophase").iterdir()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        stored = json.loads(file.read_text())
        stored["texts"] = ["other", *stored["texts"][1:]] if content == "altered" else [1, None]
        file.write_text(json.dumps(stored))
    assert load_documents("python") == expected
    forbid_parsing(monkeypatch)
    assert load_documents("python") == expected
    assert library.exists()


def test_an_unwritable_cache_is_done_without(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where no cache can be kept (here its folder's name is taken by a file), the documents come all the same."""
    expected = load_documents("python")
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    assert load_documents("python") == expected
    assert (tmp_path / "taken").read_text() == ""
    assert library.exists()


def test_cache_is_under_home_unless_told_otherwise(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without an absolute XDG_CACHE_HOME the cache is ~/.cache/twophase; without a home there is none."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in (None, "", "relative"):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        load_documents("python")
        (file,) = (tmp_path / "home" / ".cache" / "twophase").iterdir()
        file.unlink()
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.chdir(library)
    before = sorted(library.rglob("*"))
    load_documents("python")
    assert sorted(library.rglob("*")) == before


def test_processes_may_race_for_the_cache(library: Path, tmp_path: Path):
    """Processes that start together all get the same documents and leave one whole cache file."""
    script = textwrap.dedent(f"""
        import pathlib, sysconfig
        sysconfig.get_path = lambda _: {str(library)!r}
        from twophase.tasks.lm import corpus
        for _ in range(5):
            print(corpus.load_documents("python").fingerprint)
            corpus._cache_file(pathlib.Path(sysconfig.get_path("stdlib"))).unlink(missing_ok=True)
        corpus.load_documents("python")
    """)
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in outputs] == [""] * 3
    assert len({line for output, _ in outputs for line in output.split()}) == 1
    (file,) = (tmp_path / "cache" / "twophase").iterdir()
    assert json.loads(file.read_text())["texts"]


@pytest.mark.slow
def test_the_python_corpus_is_large_and_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The running Python gives more than a million characters in thousands of documents.

    Among them are docstrings as `inspect` shows them and help topics; of installed packages there is nothing.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts = load_documents("python").texts
    assert len(texts) > 2000
    assert sum(map(len, texts)) > 1_000_000
    assert {inspect.getdoc(thing) for thing in (json.dump, textwrap.dedent, subprocess.Popen.communicate)} <= set(texts)
    assert any(text.startswith('The "assert" statement') for text in texts)
    assert inspect.getdoc(np.linspace) not in texts
    assert {"idlelib", "antigravity", "turtle"}.isdisjoint(sys.modules)


# Held-out documents, parts and windows


def numbered(path: Path, count: int) -> Path:
    return write_lines(path, [paragraph(i, words=20) for i in range(count)])


def words(ids: np.ndarray) -> set[str]:
    """The whole words of a stream of tokens."""
    return set(vocabulary("char").decode(ids).split())


@pytest.mark.parametrize(("count", "share", "held"), [(50, 0.08, 4), (50, 0.001, 1), (50, 0.999, 49), (2, 0.5, 1)])
def test_whole_documents_are_held_out(tmp_path: Path, count: int, share: float, held: int):
    """The held-out share counts documents, at least one and at most all but one; all others are trained on."""
    built = build_text(data(numbered(tmp_path / "a.jsonl", count), held_out=share), replicas=1)
    held_out, training = words(built.held_out), words(built.training[0])
    assert len(held_out) == held
    assert held_out.isdisjoint(training)
    assert held_out | training == {f"word{i}" for i in range(count)}
    assert built.description["held_out_documents"] == held


def test_held_out_documents_depend_on_the_text_only(tmp_path: Path):
    """Other replicas, window lengths and batches see the same held-out documents; the order is shuffled."""
    path = numbered(tmp_path / "a.jsonl", 50)
    streams = {build_text(data(path, **options), replicas).held_out.tobytes() for replicas, options in [
        (1, {}), (2, {}), (3, {"sequence_length": 8, "batch_size": 2, "validation_windows": 3})
    ]}  # fmt: skip
    assert len(streams) == 1
    assert words(build_text(data(path), 1).held_out) != {f"word{i}" for i in range(4)}


def test_documents_are_separated_by_a_blank_line(tmp_path: Path):
    """The training stream is the documents joined by blank lines, all of it in one replica's part."""
    built = build_text(data(numbered(tmp_path / "a.jsonl", 10)), replicas=1)
    documents = vocabulary("char").decode(built.training[0]).split("\n\n")
    held_out = vocabulary("char").decode(built.held_out).split("\n\n")
    assert sorted(documents + held_out) == sorted(paragraph(i, words=20) for i in range(10))


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_replicas_share_the_stream_equally(tmp_path: Path, replicas: int):
    """The parts are equal, contiguous, in order and disjoint, and leave out fewer tokens than there are replicas."""
    path = numbered(tmp_path / "a.jsonl", 50)
    whole = build_text(data(path), replicas=1).training[0]
    parts = build_text(data(path), replicas).training
    assert parts.shape == (replicas, len(whole) // replicas)
    assert np.array_equal(parts.ravel(), whole[: parts.size])


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Four words of Philox4x64-10, from the paper's definition."""
    mask, (k0, k1), (c0, c1, c2, c3) = 2**64 - 1, key, counter
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & mask, (p0 >> 64) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def reference_starts(seed: int, step: int, replica: int, batch: int, count: int) -> list[int]:
    """Window starts by Philox in plain Python; NumPy raises the counter before its first word."""
    blocks = [philox((seed, replica), (i + 1, step, 0, 0)) for i in range(-(-batch // 4))]
    return [word % count for block in blocks for word in block][:batch]


@given(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 3)),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 60),
)
def test_batches_are_those_of_the_counter(call: tuple[int, int, int], batch: int, length: int, extra: int):
    """Starts equal a plain Python Philox of (seed, step, replica), down to a part with room for a single window.

    Each window is contiguous and within its replica's part, its targets one place on.
    """
    size = length + 1 + extra
    training = (np.arange(size) + 100 * np.arange(4)[:, None]).astype(np.uint16)
    tokens, targets = ready(training, training[0], length, batch).batch(*call)
    assert tokens.shape == targets.shape == (batch, length)
    assert tokens.dtype == targets.dtype == np.int64
    starts = reference_starts(*call, batch, size - length)
    assert tokens.tolist() == [[100 * call[2] + start + i for i in range(length)] for start in starts]
    assert np.array_equal(targets, tokens + 1)
    assert targets.max() < 100 * call[2] + size


def test_batches_do_not_depend_on_what_was_drawn_before():
    """In any order, from any corpus object, (seed, step, replica) gives the same batch; changing one gives another."""
    training = np.random.default_rng(0).integers(0, 96, (2, 5000)).astype(np.uint8)
    calls = [(seed, step, replica) for seed in (0, 1) for step in (0, 1, 959) for replica in (0, 1)]
    first, second = ready(training, training[0]), ready(training.copy(), training[0])
    forward = {call: first.batch(*call)[0].tobytes() for call in calls}
    backward = {call: second.batch(*call)[0].tobytes() for call in reversed(calls)}
    assert forward == backward
    assert len(set(forward.values())) == len(calls)


def test_starts_cover_the_part_evenly():
    """Over many steps every start is drawn about equally often (chi-square below its 1e-6 quantile)."""
    training = np.arange(27, dtype=np.uint8)[None]
    built = ready(training, training[0], length=16, batch=8)
    starts = np.concatenate([built.batch(3, step, 0)[0][:, 0] for step in range(500)])
    counts = np.bincount(starts, minlength=11)
    assert counts.size == 11
    assert ((counts - 4000 / 11) ** 2).sum() / (4000 / 11) < 47.3


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 200))
def test_validation_windows_are_spread_evenly(windows: int, length: int, extra: int):
    """The first window starts the held-out text, the last one ends it, and the gaps differ by at most one token."""
    stream = np.arange(length + 1 + extra, dtype=np.uint16)
    tokens, targets = ready(stream[None], stream, length, windows=windows).validation()
    assert tokens.shape == (windows, length)
    starts = tokens[:, 0]
    assert np.array_equal(tokens, starts[:, None] + np.arange(length))
    assert np.array_equal(targets, tokens + 1)
    assert starts[0] == 0
    if windows > 1:
        assert targets[-1, -1] == stream[-1]
        assert np.ptp(np.diff(starts)) <= 1


def test_description_counts_what_there_is(tmp_path: Path):
    """The record holds plain values: corpus, fingerprint, counts that add up, the replaced share and the vocabulary."""
    path = write_lines(tmp_path / "a.jsonl", [paragraph(i) + "\u2014" for i in range(20)])
    description = build_text(data(path), replicas=2).description
    assert json.loads(json.dumps(description)) == description
    texts = load_documents(f"file:{path}").texts
    characters = description["training_characters"] + description["validation_characters"]
    assert characters == sum(map(len, texts)) + 2 * (20 - 2)  # separators within each of the two streams
    assert description["replaced_share"] == pytest.approx(20 / characters)
    assert description["fingerprint"] == fingerprint(texts)
    assert (description["documents"], description["vocabulary"]) == (20, "char")


def test_a_text_of_other_letters_wants_bytes(tmp_path: Path):
    """More than 1 % of unknown characters are refused under `char`, with the remedy, and kept under `bytes`."""
    texts = [f"{i} " + "\u043e\u043a\u043d\u043e " * 50 for i in range(20)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    with pytest.raises(
        UsageError, match=r"7\d\.\d% of its characters .* 'char' \(at most 1% .*--data.vocabulary bytes"
    ):
        build_text(data(path), replicas=1)
    built = build_text(data(path, vocabulary="bytes"), replicas=1)
    assert built.description["replaced_share"] == 0
    assert len(built.training[0]) > 1.5 * built.description["training_characters"]


def test_windows_that_do_not_fit_are_refused(tmp_path: Path):
    """A part or a held-out text shorter than a window is refused with numbers and remedies; the longest fits."""
    path = write_lines(tmp_path / "a.jsonl", [chr(97 + i) * 20 for i in range(10)])
    # One held-out document of 20 tokens, nine training documents of 20 with eight separators of 2: 196 tokens.
    with pytest.raises(UsageError, match=r"196 training tokens over --replicas 10 leave 19 to each.* takes 20; lower"):
        build_text(data(path, sequence_length=19), replicas=10)
    with pytest.raises(
        UsageError, match=r"1 of 10 documents are held out, which are 20 tokens.* takes 21; lower.*raise"
    ):
        build_text(data(path, sequence_length=20), replicas=1)
    built = build_text(data(path, sequence_length=19), replicas=9)
    assert built.batch(0, 0, 8)[0].shape == (4, 19)
    assert built.validation()[0].shape == (256, 19)


def test_code_without_its_docstrings(library: Path):
    """`python-code` holds functions and classes that are long enough, less their docstrings and decorators."""
    lines = [f"    value_{number} = {number}" for number in range(20)]
    told = ['    """A docstring', "    of two lines.", '    """']
    (library / "code.py").write_text(
        "\n".join(
            ["import os", "@wrapped", "def f():", *told, *lines, "class C:", '    """One."""', *lines, "def g(): 1"]
        )
    )
    documents = corpus.load_documents("python-code")
    assert documents.texts == ("\n".join(["def f():", *lines]), "\n".join(["class C:", *lines]))
    assert "functions and classes" in documents.description
    assert corpus.load_documents("python-code").fingerprint == documents.fingerprint  # from the cache
    assert corpus.load_documents("python").fingerprint != documents.fingerprint  # which is another one
