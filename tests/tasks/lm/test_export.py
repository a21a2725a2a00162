"""Exported runs: the same loss and the same ids in transformers, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import shardmaker
import textmaker
import trained as trainings
from commands import snapshot
from twophase.base.config import UsageError, with_values
from twophase.base.files import file_sha256
from twophase.cli.export import main
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import RunFolder
from twophase.tasks.lm import export as module
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.export import RECORD, describe
from twophase.tasks.lm.export import export as export_record
from twophase.tasks.lm.export_tokenizer import text_tokenizer
from twophase.tasks.lm.task import LanguageTask
from twophase.tasks.lm.tokens import CHARACTERS, encode
from twophase.tasks.named import config_class
from twophase.text.meta import read_meta, write_meta
from twophase.training import checkpoint
from twophase.training.trainer import Trainer

pytest.importorskip("transformers", reason="the extra hf is not installed")


def make_config(corpus: Path, **values: Any) -> TrainConfig:
    return textmaker.small_run(
        corpus, **{"model.layers": 2, "data.batch_size": 2, "steps": 4, "inner_steps": 2} | values
    )


def trained(config: TrainConfig, path: Path, **options: Any) -> Path:
    trainings.run(config, path, **options)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return textmaker.write(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests that change it take a copy."""
    return trained(make_config(corpus), tmp_path_factory.mktemp("runs") / "run")


def export(run: Path, out: Path, **options: Any) -> Path:
    export_record(run, out, **options)
    return out


def load(out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out, local_files_only=True).eval()


# --- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_same_loss(corpus: Path, tmp_path: Path) -> None:
    """The loss of random windows is that of the run's model, to float32 rounding, in transformers' own code."""
    values = {"model.tie_embeddings": True, "model.kv_heads": 2, "data.vocabulary": "bytes"}
    config = make_config(corpus, **values)
    run = trained(config, tmp_path / "run")
    out = export(run, tmp_path / "hf")
    model = LanguageTask(config).model(config.seed)
    model.load_state_dict(load_file(run / "weights.safetensors"))
    windows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 17)))
    tokens, targets = windows[:, :-1], windows[:, 1:]
    with torch.no_grad():
        logits = load(out)(tokens).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    # Two programmes that sum in other orders: a few units in the last place of numbers near 5.
    assert loss == pytest.approx(model.loss(tokens, targets).item(), rel=3e-6)


@pytest.mark.slow
def test_bfloat16(run: Path, tmp_path: Path) -> None:
    """--dtype bfloat16 halves the file; every weight is the float32 one, rounded, and opens in that type."""
    whole, half = export(run, tmp_path / "32"), export(run, tmp_path / "16", dtype="bfloat16")
    a, b = (load_file(out / "model.safetensors") for out in (whole, half))
    assert all(torch.equal(b[name], value.bfloat16()) for name, value in a.items())
    assert a.keys() == b.keys()
    assert load(half).dtype == torch.bfloat16


def test_config(run: Path, tmp_path: Path) -> None:
    """No ids begin or end texts that have none, the window is the longest length, and generation works."""
    out = export(run, tmp_path / "hf")
    model = load(out)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, None, None)
    assert (model.config.max_position_embeddings, model.config.vocab_size) == (16, 96)
    assert json.loads((out / RECORD).read_text())["tokenizer_ids"] == 96
    assert model.generate(torch.tensor([[40, 73]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_unfinished(corpus: Path, tmp_path: Path) -> None:
    """A stopped run gives the anchor of its newest checkpoint, which is a whole round's result."""
    config = make_config(corpus, checkpoint_every=1)
    calls = iter(range(100))
    run = trained(config, tmp_path / "run", should_stop=lambda: next(calls) >= 1)
    assert not (run / "weights.safetensors").exists()
    out = export(run, tmp_path / "hf")
    trainer = Trainer(LanguageTask(config), config, SingleProcess())
    for _ in range(2):
        trainer.inner_step()
        trainer.synchronize()
    assert torch.equal(load(out).model.norm.weight, trainer.engine.anchor["norm"])
    assert torch.equal(load(out).model.embed_tokens.weight, trainer.engine.anchor["embedding"])
    assert "checkpoint step-00000002 of a run that is not finished" in describe(
        out, json.loads((out / RECORD).read_text())
    )


def test_a_run_that_goes_on_meanwhile(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that the run removes while it is read is not damaged: the newer one is read; a damaged one is."""
    run = trained(make_config(corpus, checkpoint_every=1), tmp_path / "run")
    for name in ("summary.json", "weights.safetensors"):
        (run / name).unlink()
    older, newer = sorted((run / "checkpoint").iterdir())
    newer.rename(tmp_path / "newer")

    def read_too_late(path: Path) -> str:
        if older.exists():
            shutil.rmtree(older)
            (tmp_path / "newer").rename(newer)
        return file_sha256(path)

    monkeypatch.setattr(checkpoint, "file_sha256", read_too_late)
    assert export_record(run, run / "hf")["steps"] == 4
    shutil.rmtree(run / "hf", ignore_errors=True)
    (newer / "progress.json").unlink()
    with pytest.raises(UsageError, match=r"step-00000004 is damaged: progress\.json is missing"):
        export_record(run, run / "hf")


def test_finished_without_its_weights(run: Path, tmp_path: Path) -> None:
    """Where only the weights are gone, the last checkpoint gives the same ones; the run is not called unfinished."""
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "weights.safetensors").unlink()
    out = export(copy, tmp_path / "hf")
    source = json.loads((out / RECORD).read_text())["source"]
    assert source == "checkpoint step-00000004 of a run that has ended and has no weights.safetensors any more"
    whole = export(run, tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    shutil.rmtree(copy / "checkpoint")
    with pytest.raises(UsageError, match=r"has ended, but .*weights\.safetensors nor a checkpoint\. Put that file"):
        export(copy, tmp_path / "none")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text(path.read_text().replace(": 4", ": 5"))])
def test_weights_without_a_summary(run: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """A run that was killed between its weights and its summary, or whose summary was edited, gives a checkpoint."""
    copy = shutil.copytree(run, tmp_path / "run")
    damage(copy / "summary.json")
    record = export_record(copy, tmp_path / "hf")
    assert (record["steps"], record["source"]) == (4, "checkpoint step-00000004 of a run that is not finished")


# --- the tokenizer ------------------------------------------------------------------------------------------------

ODD = "a\tb\r\n\r\rnaïve 😀 </s><s>  e\u0301 \x00\x7f\x85\u2028 [UNK] Ġ \n\n "
TEXTS = st.one_of(st.text(), st.text(st.sampled_from("a \t\r\n~?é\U0001f600<>|/s"), max_size=60), st.just(ODD))


@pytest.fixture(scope="module", params=["char", "bytes"])
def reloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    text_tokenizer(request.param, 64).save_pretrained(folder)
    return request.param, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@given(text=TEXTS)
def test_same_ids(reloaded: tuple[str, Any], text: str) -> None:
    """A saved and reloaded tokenizer gives the vocabulary's ids for every text, and decodes them as it does."""
    name, tokenizer = reloaded
    ids = encode(name, text).tolist()
    assert tokenizer(text, verbose=False)["input_ids"] == ids
    text_of_ids = bytes(ids).decode(errors="replace") if name == "bytes" else "".join(CHARACTERS[i] for i in ids)
    assert tokenizer.decode(ids) == text_of_ids


# --- runs on token shards -----------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A prepared folder: byte ids and an end of text, with a tokenizer that says so."""
    from transformers import AddedToken

    ids = np.random.default_rng(1).integers(0, 257, 2000).astype(np.uint16)
    folder = shardmaker.prepared(tmp_path / "shards", [ids], [ids], 257, end_of_text=256)
    tokenizer = text_tokenizer("bytes", 64)
    tokenizer.add_special_tokens({"eos_token": AddedToken("<|end|>", special=True)})
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def shard_run(shards: Path, path: Path, **values: Any) -> Path:
    config = make_config(shards, **values)
    config = with_values(config, {"data.corpus": f"tokens:{shards}", "data.validation_windows": 4})
    return trained(config, path)


def test_shards_have_moved(shards: Path, tmp_path: Path) -> None:
    """Without the shards one message names --data; with them, or without a tokenizer, it works; others are refused."""
    run = shard_run(shards, tmp_path / "run")
    moved = shards.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="--data DIR"):
        export(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert (export(run, tmp_path / "hf", data=moved) / "tokenizer.json").is_file()
    assert not (export(run, tmp_path / "bare", tokenizer=False) / "tokenizer.json").exists()
    meta = read_meta(moved)
    for values, words in (
        ({"vocabulary_size": 10**6}, "its tokenizer has 1,000,000 ids"),
        ({"tokenizer_sha256": "cd" * 32}, r"cdcdcdcd.*01234567"),
    ):
        write_meta(moved, dataclasses.replace(meta, **values))
        with pytest.raises(UsageError, match=words):
            export(run, tmp_path / "other", data=moved)
    write_meta(moved, meta)
    (moved / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="tokenizer cannot be read"):
        export(run, tmp_path / "other", data=moved)
    (moved / "tokenizer").rename(moved / "elsewhere")
    with pytest.raises(UsageError, match="its tokenizer/ is missing"):
        export(run, tmp_path / "other", data=moved)


def test_bin_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NanoGPT's files do not name a tokenizer: the model is exported alone, which is said."""
    folder = tmp_path / "bins"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(np.random.default_rng(2).integers(0, 60, 2000).astype(np.uint16).tobytes())
    run = shard_run(folder, tmp_path / "run", **{"model.vocabulary_size": 64})
    assert main([str(run), str(tmp_path / "hf")]) == 0
    assert "no tokenizer" in capsys.readouterr().out
    assert load(tmp_path / "hf").config.vocab_size == 64


# --- the folder ---------------------------------------------------------------------------------------------------


def test_where_something_is(run: Path, tmp_path: Path) -> None:
    """An empty folder is taken, and nothing is left beside it; a file and a folder that holds something are refused."""
    (tmp_path / "hf").mkdir()
    out = export(run, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    before = snapshot(out)
    for place in (out, out / RECORD):
        with pytest.raises(UsageError, match="is there already and not an empty folder; remove it"):
            export(run, place)
    assert snapshot(out) == before == snapshot(export(run, tmp_path / "other"))


def test_what_cannot_be_read_is_no_full_disk(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a file of the run names it, and one without a file the folder to write."""
    for path, words in ((run / "env.json", "env.json cannot be read (I/O"), (None, "hf cannot be written (I/O")):

        def broken(*_: Any, path: Any = path, **__: Any) -> None:
            raise OSError(5, "I/O", path and str(path))

        monkeypatch.setattr(module, "export", broken)
        with pytest.raises(OSError, match=re.escape(words)):
            main([str(run), str(tmp_path / "hf")])


@pytest.mark.parametrize("step", ["_write_model", "write_tokenizer", "write_atomic", "sync_folder"])
def test_failures_leave_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whatever fails while writing (a full disk), nothing is there afterwards."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, step, full)
    with pytest.raises(OSError, match="No space"):
        export(run, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


# --- what cannot be exported --------------------------------------------------------------------------------------


def test_no_run(corpus: Path, tmp_path: Path) -> None:
    """A folder that is no run, is not there, or of a run that has not begun, is named with what to do instead."""
    with RunFolder.claim(tmp_path / "claimed", make_config(corpus)):
        pass
    with RunFolder.claim(tmp_path / "digits", config_class("digits")()):
        pass
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text("lr: 3\n")
    for name, message in {
        "empty": r"no config\.yaml.*--out of",
        "nowhere": "no such folder",
        "odd": "another version",
        "claimed": "no checkpoint yet.*twophase train",
        "digits": "its task is digits, and export is for --task lm alone",
    }.items():
        with pytest.raises(UsageError, match=message):
            export(tmp_path / name, tmp_path / "hf")


def changed_weights(run: Path, cut: int = 0, **weights: torch.Tensor) -> None:
    """Put other weights in, as a run of an earlier version, which recorded no SHA-256, might have had them."""
    save_file(load_file(run / WEIGHTS) | weights, run / WEIGHTS)
    os.truncate(run / WEIGHTS, (run / WEIGHTS).stat().st_size - cut)
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in summary.items() if not name.endswith("sha256")}))


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


WEIGHTS = "weights.safetensors"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (replaced(WEIGHTS, lambda data: data[:-10]), "is damaged: its SHA-256"),
    "flipped": (replaced(WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "is damaged: its SHA-256"),
    "old and truncated": (lambda run: changed_weights(run, cut=10), r"is damaged: .*; delete it and summary\.json"),
    "other shape": (lambda run: changed_weights(run, norm=torch.ones(3)), "do not fit the run's config"),
    "diverged": (lambda run: changed_weights(run, norm=torch.full((16,), float("nan"))), "has diverged"),
}


@pytest.mark.parametrize(
    "values",
    [
        {"outer.method": "adamw"},
        {"sync.fragments": ["ends=embedding|head", "blocks=."]},
    ],
    ids=str,
)
def test_what_is_evaluated_is_exported(corpus: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """The anchor, in the order of fragments; from the last checkpoint the same."""
    run = trained(with_values(make_config(corpus), values), tmp_path / "run")
    weights = load_file(run / WEIGHTS)
    for source in ("the end of the run", "checkpoint"):
        out = tmp_path / source.replace(" ", "-")
        assert export_record(run, out)["source"].startswith(source)
        embedding = load(out).get_input_embeddings().weight
        assert torch.equal(embedding, weights["embedding"])
        assert "the anchor after 4 inner steps" in describe(out, json.loads((out / RECORD).read_text()))
        (run / WEIGHTS).unlink(missing_ok=True)


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_runs(run: Path, tmp_path: Path, case: str) -> None:
    """Files that are cut, changed, foreign or of no use are refused by name, and nothing is written."""
    copy = shutil.copytree(run, tmp_path / "run")
    damage, message = DAMAGED[case]
    damage(copy)
    with pytest.raises(UsageError, match=message):
        export(copy, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_weights_that_may_not_be_read_are_not_called_damaged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy of weights without a right to read them is not their removal alone."""

    def denied(path: Path, **_: Any) -> None:
        if path.name == WEIGHTS:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("twophase.runs.folder.file_sha256", denied)
    with pytest.raises(
        UsageError, match=r"weights\.safetensors cannot be read \(Permission denied\); make it readable"
    ):
        export(run, tmp_path / "hf")


def test_bad_options(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown type, token shards for a run on text, and the extra that is missing, are refused by name."""
    with pytest.raises(UsageError, match=r"--dtype is 'int8'.*bfloat16"):
        export(run, tmp_path / "hf", dtype="int8")
    with pytest.raises(UsageError, match=r"--data .*leave --data out"):
        export(run, tmp_path / "hf", data=tmp_path)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'twophase\[hf\]'"):
        export(run, tmp_path / "hf")
