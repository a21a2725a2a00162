"""The paper's pretraining run, with every value of its tables 1 and 2, and two smaller siblings of the same kind.

    twophase data prepare c4 --tokenizer mistral --tokens 3.3e9 --out data/c4
    twophase train --recipe paper_150m --outer.restart 3

The model is `PrimeIntellect/llama-150m-fresh`'s: 149 million parameters in its blocks, 215 million with embedding and
head. The paper names neither the seed nor the initial weights' scale; those are our choice (`lm.model.Llama`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from twophase.config import meant, update
from twophase.errors import UsageError
from twophase.restart import RestartPolicy, parse
from twophase.rule import OuterRule
from twophase.runs.config import ComputeConfig, InnerConfig, OuterConfig, options_of
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig

C4 = "tokens:data/c4"
"""Where the recipes look for their tokens unless `data.corpus` says otherwise."""
_PACE = {"evaluate_every": 2048, "checkpoint_every": 1024}
"""Inner steps between two evaluations, and two checkpoints, at most unless a round is longer."""
TUNED = OuterRule(0.9, 0.7, nesterov=True)
"""What the paper found best at S = 128 without restarts, read in sum form (see docs/reproduce.md on the forms)."""


def paper_150m(
    inner_steps: int = 128, rule: OuterRule = TUNED, restart: RestartPolicy | str | int = "never"
) -> TrainConfig:
    """Return the paper's Llama-150M: 12,500 inner steps, 3.3 billion tokens of C4 over two replicas, on one GPU or two.

    Weights and optimizers of both replicas take 40 bytes a parameter, 8.6 GB; the batch is cut to what is left. The
    paper's `inner_steps` are 64, 128, 512, 1024 and 2048; its grid of rules is in `experiments/trainings.py`.

    >>> paper_150m(restart=3).outer.restart, paper_150m().rounds
    ('3', 98)
    """
    return TrainConfig(
        model=ModelConfig(
            layers=12, hidden_size=1024, intermediate_size=2688, heads=16, norm_eps=1e-5, vocabulary_size=32000
        ),
        data=DataConfig(corpus=C4, tokenizer="mistral", sequence_length=2048, batch_size=64, validation_windows=512),
        inner=InnerConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999), warmup=1200 / 12500, schedule="cosine"),
        outer=OuterConfig(**options_of(rule), restart=str(parse(restart))),
        compute=ComputeConfig(precision="bf16-mixed", compile=True),
        replicas=2,
        steps=12500,
        inner_steps=inner_steps,
        device="cuda",
        log_every=50,
        **_pace(inner_steps),
    )


def small() -> TrainConfig:
    """Return a smaller `paper_150m`: 25 million parameters in its blocks, 42 in all; 0.8 billion tokens.

    The embedding is the head too, and the share of the steps that is warmup stays the paper's, as in `nano`.
    """
    values = {
        "model.layers": 8, "model.hidden_size": 512, "model.intermediate_size": 1376, "model.heads": 8,
        "data.sequence_length": 1024, "steps": 6000,
    }  # fmt: skip
    return update(paper_150m(), _OF_SIBLINGS | values)


def nano() -> TrainConfig:
    """Return a tiny `paper_150m`: 3 million parameters in its blocks, 11 in all; 0.2 billion tokens."""
    values = {
        "model.layers": 4, "model.hidden_size": 256, "model.intermediate_size": 688, "model.heads": 4,
        "data.sequence_length": 512, "steps": 3000,
    }  # fmt: skip
    return update(paper_150m(inner_steps=64), _OF_SIBLINGS | values)


_OF_SIBLINGS = {"model.tie_embeddings": True, "inner.lr": 2e-3}
RECIPES = {"paper_150m": paper_150m, "small": small, "nano": nano}
"""The recipes by name, as `--recipe` takes them."""


def recipe(name: str) -> TrainConfig:
    """Return a recipe with its defaults, by name; raise a UsageError where there is none."""
    made = RECIPES.get(name.replace("-", "_"))
    if made is None:
        raise UsageError(f"--recipe {name}: must be one of {', '.join(RECIPES)}{meant(name, RECIPES)}")
    return made()


def at_pace(config: TrainConfig, keep: Collection[str] = ()) -> TrainConfig:
    """Restore a recipe's pace of evaluations and checkpoints after a change of `inner_steps`; those in `keep` stay.

    >>> at_pace(replace(paper_150m(), inner_steps=2048)).checkpoint_every
    1
    """
    return replace(config, **{name: pace for name, pace in _pace(config.inner_steps).items() if name not in keep})


def _pace(inner_steps: int) -> dict[str, Any]:
    return {name: max(1, steps // inner_steps) for name, steps in _PACE.items()}  # in rounds
