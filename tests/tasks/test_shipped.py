"""The shipped tasks: digits are scikit-learn's, and models are transformers'."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twophase.errors import UsageError
from twophase.tasks.digits import Digits
from twophase.tasks.hf import HuggingFace

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def trained(task: Any, steps: int, lr: float) -> dict[str, float]:
    model = task.model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        task.loss(model, tuple(map(torch.from_numpy, task.batch(0, step, 0)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.evaluate(model.eval())


def test_digits_are_those_of_scikit_learn() -> None:
    """A batch has images and labels that scikit-learn gives, of the training part; the rest is held out; it learns."""
    pixels, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    training = {(image.tobytes(), label) for i, (image, label) in enumerate(zip(images, labels, strict=True)) if i % 5}
    batch = Digits(batch_size=400).batch(3, 5, 1)
    assert {(image.tobytes(), label) for image, label in zip(*batch, strict=True)} <= training
    assert trained(Digits(), 60, 1e-2)["accuracy"] > 0.5
    with pytest.raises(UsageError, match=r"--task\.width"):
        Digits(width=0)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a Llama of transformers for bytes, and its weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=256, intermediate_size=24, tie_word_embeddings=True, **SIZES)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def model_of(path: Path, **values: Any) -> HuggingFace:
    text = path.parent / "text.jsonl"
    text.write_text("".join(f'{{"text": "document {i}: {"round and " * 20}round"}}\n' for i in range(40)))
    sizes = {"sequence_length": 16, "batch_size": 4, "validation_windows": 8, "corpus": f"file:{text}"}
    return HuggingFace(str(path), **{**sizes, **values})


def test_models_of_transformers_learn(tiny: Path) -> None:
    """From a configuration by the seed, or from weights; with dropout on; judged on the held-out text."""
    fresh, loaded = model_of(tiny), model_of(tiny, weights=True)
    first = [next(task.model(seed).parameters()) for task in (fresh, loaded) for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert torch.equal(first[3], first[5])
    assert all(task.model(0).training for task in (fresh, loaded))
    result = trained(fresh, 30, 1e-2)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert 1 < result["perplexity"] < 128


def test_what_identifies_a_model(tiny: Path) -> None:
    """Corpus and configuration, and with `weights` their values, which a name on the hub does not say."""
    prints = [model_of(tiny, weights=weights).describe() for weights in (False, True)]
    assert prints[0]["weights"] != prints[1]["weights"]
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)  # weights of the same sizes under the same name
    config = transformers.AutoConfig.from_pretrained(tiny)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tiny)
    again = [model_of(tiny, weights=weights).describe() for weights in (False, True)]
    assert again[0]["weights"] == prints[0]["weights"]
    assert again[1]["weights"] != prints[1]["weights"]


def test_a_multimodal_configuration_has_its_language_models_sizes(tmp_path: Path) -> None:
    """Its vocabulary is that of its text part."""
    transformers = pytest.importorskip("transformers", "5.6")  # earlier ones want types of tokens to train
    sizes = SIZES | {"intermediate_size": 32}
    text = {"vocab_size": 256, "num_key_value_heads": 1, "head_dim": 8} | sizes
    vision = {"image_size": 32, "patch_size": 16} | sizes
    transformers.Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path / "gemma")
    task = model_of(tmp_path / "gemma")
    model = task.model(0)
    tokens, targets = map(torch.from_numpy, task.batch(0, 0, 0))
    assert math.isfinite(task.loss(model, (tokens, targets)).item())
    assert task.evaluate(model)["perplexity"] > 1


def test_refusals_of_a_corpus_name_the_tasks_options(tiny: Path) -> None:
    """The corpus is that of `lm`, whose options have other names."""
    refused: dict[str, Any] = {"batch_size": 0, "sequence_length": 10**6, "corpus": "nothing"}
    for name, value in refused.items():
        with pytest.raises(UsageError, match=f"--task.{name.replace('_', '-')}"):
            model_of(tiny, **{name: value}).describe()
