"""The pretraining recipes: the paper's tables 1 and 2, value by value, and the siblings' sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainings import PAPER
from twophase.recipes.pretraining import RECIPES, at_pace, nano, paper_150m, recipe, small
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig
from twophase.tasks.lm.config import TrainConfig, flops_per_token


def test_tables_1_and_2():
    """Every value of the paper's tables."""
    run = paper_150m()
    model, data, inner = run.model, run.data, run.inner
    assert (model.hidden_size, model.intermediate_size, model.layers, model.heads) == (1024, 2688, 12, 16)
    assert (model.norm_eps, model.vocabulary_size) == (1e-5, 32000)
    assert (data.sequence_length, data.tokenizer) == (2048, "mistral")
    assert (data.batch_size, run.replicas, data.batch_size * run.replicas) == (64, 2, 128)
    assert (inner.lr, inner.weight_decay, inner.betas) == (1e-3, 0.1, (0.9, 0.999))
    assert (inner.schedule, inner.warmup * run.steps) == ("cosine", 1200)
    assert (run.steps, run.compute.precision) == (12500, "bf16-mixed")
    assert run.replicas * run.steps * run.step_tokens == pytest.approx(3.3e9, rel=0.01)


def parameters(run: TrainConfig) -> float:
    """Weights of the matrices: 6 operations a token each, but for an embedding that is not the head too."""
    embedding = 0 if run.model.tie_embeddings else 32000 * run.model.hidden_size
    return flops_per_token(run.model, 32000, 0) / 6 + embedding


@pytest.mark.parametrize(("build", "millions", "within"), [(nano, 10, 0.2), (small, 40, 0.1)])
def test_siblings(build, millions: int, within: float):
    """The siblings have about the size that they are named for and differ from the paper's run in shape and length."""
    run = build()
    assert parameters(run) == pytest.approx(millions * 1e6, rel=within)
    tokens = run.replicas * run.steps * run.step_tokens
    assert tokens == pytest.approx(20 * millions * 1e6, rel=0.1)  # Chinchilla's 20 a parameter
    assert run.compute == paper_150m().compute


def test_the_paper_model_itself():
    """149 million in the blocks and 215 million in all, as in `PrimeIntellect/llama-150m-fresh` with 32,000 tokens."""
    assert parameters(paper_150m()) == 214_983_680 - 25 * 1024  # the norms


@pytest.mark.parametrize("inner_steps", PAPER.inner_steps)
def test_pace(inner_steps: int):
    """Whatever the round's length, there is a checkpoint at least every 1,024 steps or every round; given ones stay."""
    run, rule = at_pace(replace(paper_150m(), inner_steps=inner_steps)), OuterRule(0.7, 0.9, nesterov=True)
    assert run == paper_150m(inner_steps)
    assert paper_150m(inner_steps, rule, 3).outer == OuterConfig("nesterov", 0.7, 0.9, restart="3")
    assert run.checkpoint_every * inner_steps <= max(1024, inner_steps)
    assert run.evaluate_every * inner_steps <= max(2048, inner_steps)
    changed = replace(paper_150m(), inner_steps=inner_steps, checkpoint_every=3)
    assert at_pace(changed, keep={"checkpoint_every"}).checkpoint_every == 3


def test_by_name():
    """Recipes go by their names, with underscores or dashes."""
    assert recipe("paper-150m") == paper_150m() == RECIPES["paper_150m"]()
