"""Exported runs: the same loss and the same ids in transformers, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import textmaker
from twophase.cli.export import main
from twophase.config import fingerprint
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import SingleProcess
from twophase.errors import RunError, UsageError
from twophase.runs.folder import CHECKPOINTS, RunFolder
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.export import RECORD, export
from twophase.tasks.lm.task import LanguageTask
from twophase.tasks.registry import config_class
from twophase.text.prepare import Request, prepare
from twophase.text.shards import read_meta, write_meta
from twophase.text.tokenizers import CHARACTERS, encode_text
from twophase.training.checkpoint import Checkpointer

pytest.importorskip("transformers", reason="the extra hf is not installed")

WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file:{textmaker.write(tmp_path_factory.mktemp('text') / 'text.txt')}"


def make_config(corpus: str, **values: Any) -> TrainConfig:
    return textmaker.small_run(Path(), **{"data.corpus": corpus} | values)


def made(config: TrainConfig, path: Path, *, finished: bool = True, checkpoint: int = 0, **weights: Any) -> Path:
    """A run's folder as training leaves it: with final weights, or a checkpoint of a round, or both."""
    task = LanguageTask(config)
    model = task.model(7)
    model.load_state_dict(model.state_dict() | weights)
    with RunFolder.claim(path, config) as folder:
        folder.write_env({"corpus": task.describe()})
        if checkpoint:
            checkpointer = Checkpointer(folder.path / CHECKPOINTS, SingleProcess(), keep=1)
            progress = {"done": {"step": checkpoint}}
            checkpointer.save(
                checkpoint, {"engine": DiLoCo([model], "averaging", inner_steps=2).state_dict()}, progress
            )
            checkpointer.close()
        if finished:
            folder.finish({"steps": 4}, safetensors.torch.save(model.state_dict()))
    return path


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests that change it take a copy."""
    return made(make_config(corpus), tmp_path_factory.mktemp("runs") / "run")


def load(out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out, local_files_only=True).eval()


# --- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [{}, {"model.tie_embeddings": True, "model.kv_heads": 1, "data.vocabulary": "bytes"}]
)
def test_same_loss(corpus: str, tmp_path: Path, values: dict[str, Any]) -> None:
    """The held-out loss is that of the run's model, to float32 rounding, in transformers' own code."""
    config = make_config(corpus, **values)
    export(made(config, tmp_path / "run"), tmp_path / "hf")
    task = LanguageTask(config)
    tokens, targets = map(torch.from_numpy, task.data.validation())
    with torch.no_grad():
        logits = load(tmp_path / "hf")(tokens).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    # Two programmes that sum in other orders: a few units in the last place of numbers near 5.
    assert loss == pytest.approx(task.evaluate(task.model(7))["loss"], rel=3e-6)


@pytest.mark.slow
def test_bfloat16(run: Path, tmp_path: Path) -> None:
    """--dtype bfloat16 halves the file; every weight is the float32 one, rounded, and opens in that type."""
    export(run, tmp_path / "32")
    export(run, tmp_path / "16", dtype="bfloat16")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("32", "16"))
    assert a.keys() == b.keys()
    assert all(torch.equal(b[name], value.bfloat16()) for name, value in a.items())
    assert load(tmp_path / "16").dtype == torch.bfloat16


def test_config_and_record(run: Path, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No ids begin or end texts that have none, the window is the longest length; the record names the run."""
    assert main([str(run), str(tmp_path / "hf")]) == 0
    model = load(tmp_path / "hf")
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, None, None)
    assert (model.config.max_position_embeddings, model.config.vocab_size) == (16, 96)
    assert model.generate(torch.tensor([[40, 73]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    record = json.loads((tmp_path / "hf" / RECORD).read_text())
    assert record["run"] == fingerprint(make_config(corpus))
    assert (record["steps"], record["tokenizer"], record["tokenizer_ids"]) == (4, "char", 96)
    assert record["parameters"] == sum(weight.numel() for weight in load_file(run / WEIGHTS).values())
    assert f"{record['parameters']:,}" in capsys.readouterr().out


def test_an_unfinished_run_gives_its_newest_checkpoint(corpus: str, run: Path, tmp_path: Path) -> None:
    """The anchor, under the weights' own names; so does a run that has lost its weights or its summary."""
    part = made(make_config(corpus), tmp_path / "part", finished=False, checkpoint=2)
    record = export(part, tmp_path / "hf")
    assert record["source"] == "checkpoint step-00000002"
    assert record["steps"] == 2
    export(run, tmp_path / "whole")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    for lost in (WEIGHTS, "summary.json"):
        other = made(make_config(corpus), tmp_path / f"no-{lost}", checkpoint=2)
        (other / lost).unlink()
        assert export(other, tmp_path / f"hf-{lost}")["steps"] == 2


# --- the tokenizer ------------------------------------------------------------------------------------------------

ODD = "a\tb\r\n\r\rnaïve 😀 </s><s>  e\u0301 \x00\x7f\x85\u2028 [UNK] Ġ \n\n "
TEXTS = st.one_of(st.text(), st.text(st.sampled_from("a \t\r\n~?é\U0001f600<>|/s"), max_size=60), st.just(ODD))


@pytest.fixture(scope="module", params=["char", "bytes"])
def reloaded(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    export(made(make_config(corpus, **{"data.vocabulary": request.param}), folder / "run"), folder / "hf")
    return request.param, AutoTokenizer.from_pretrained(folder / "hf", local_files_only=True)


@given(text=TEXTS)
def test_same_ids(reloaded: tuple[str, Any], text: str) -> None:
    """A saved and reloaded tokenizer gives the vocabulary's ids for every text, and decodes them as it does."""
    name, tokenizer = reloaded
    ids = encode_text(name, text).tolist()
    assert tokenizer(text, verbose=False)["input_ids"] == ids
    text_of_ids = bytes(ids).decode(errors="replace") if name == "bytes" else "".join(CHARACTERS[i] for i in ids)
    assert tokenizer.decode(ids) == text_of_ids


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A prepared folder: byte ids and an end of text, with a tokenizer that says so."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {i} " * 20}) + "\n" for i in range(50)))
    prepare(Request((str(text),), str(tmp_path / "shards"), tokenizer="bytes", held_out=0.2, quiet=True))
    return tmp_path / "shards"


def test_the_tokenizer_of_token_shards(shards: Path, tmp_path: Path) -> None:
    """It is copied, from where the shards are now; another one is refused, and so are shards that are gone."""
    run = made(make_config(f"tokens:{shards}"), tmp_path / "run")
    assert export(run, tmp_path / "hf")["tokenizer"] == "bytes"
    assert load(tmp_path / "hf").config.eos_token_id == 256
    moved = shards.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="--data"):
        export(run, tmp_path / "other")
    assert export(run, tmp_path / "again", data=moved)["tokenizer_ids"] == 257
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    export(run, tmp_path / "bare", tokenizer=False)
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    write_meta(moved, dataclasses.replace(read_meta(moved), tokenizer_sha256="cd" * 32))
    with pytest.raises(UsageError, match=r"--data.*cdcdcdcd"):
        export(run, tmp_path / "other", data=moved)
    assert not (tmp_path / "other").exists()


def test_bin_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NanoGPT's files do not name a tokenizer: the model is exported alone, which is said."""
    folder = tmp_path / "bins"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(np.random.default_rng(2).integers(0, 60, 2000).astype(np.uint16).tobytes())
    run = made(make_config(f"tokens:{folder}", **{"model.vocabulary_size": 64}), tmp_path / "run")
    assert main([str(run), str(tmp_path / "hf")]) == 0
    assert "no tokenizer" in capsys.readouterr().out
    assert load(tmp_path / "hf").config.vocab_size == 64


# --- the folder ---------------------------------------------------------------------------------------------------


def test_where_something_is(run: Path, tmp_path: Path) -> None:
    """An empty folder is taken, and nothing is left beside it; a file and a folder that holds something are refused."""
    out = tmp_path / "hf"
    out.mkdir()
    killed = tmp_path / ".hf.12345678.tmp"  # of an export that was killed, a while ago
    killed.mkdir()
    (killed / "half").touch()
    os.utime(killed, (0, 0))
    export(run, out)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "half" not in before
    for place in (out, out / RECORD):
        with pytest.raises(UsageError, match="empty"):
            export(run, place)
    export(run, tmp_path / "other")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()} == before


# --- what cannot be exported --------------------------------------------------------------------------------------


def test_no_run(corpus: str, tmp_path: Path) -> None:
    """A folder that is no run, is not there, of another task or a run that has not begun, and a type, are named."""
    with RunFolder.claim(tmp_path / "claimed", make_config(corpus)):
        pass
    with RunFolder.claim(tmp_path / "digits", config_class("digits")()):
        pass
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"--dtype.*int8"):
        export(tmp_path / "claimed", tmp_path / "hf", dtype="int8")
    for name, part in (("empty", "no run"), ("nowhere", "no run"), ("claimed", "checkpoint"), ("digits", "--task lm")):
        with pytest.raises(UsageError, match=rf"{name}.*{part}"):
            export(tmp_path / name, tmp_path / "hf")


def test_damaged_or_diverged(run: Path, corpus: str, tmp_path: Path) -> None:
    """Weights whose SHA-256 is not the summary's, and weights that are not finite, are refused by the file's name."""
    copy = shutil.copytree(run, tmp_path / "run")
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS).write_bytes(data)
    with pytest.raises(RunError, match=WEIGHTS):
        export(copy, tmp_path / "hf")
    diverged = made(make_config(corpus), tmp_path / "diverged", norm=torch.full((16,), torch.nan))
    with pytest.raises(RunError, match="diverged"):
        export(diverged, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
