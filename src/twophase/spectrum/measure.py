"""Measuring the blocks of a run: its newest checkpoint, its own text, one block after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from twophase.base.config import UsageError
from twophase.diloco.fragment import partition
from twophase.spectrum.blocks import PLACES, Curvature, Setting
from twophase.tasks.lm.curvature import Floats, GaussNewton, Product, density, largest_eigenpairs
from twophase.tasks.lm.restored import Restored
from twophase.training.config import TrainConfig
from twophase.training.trainer import inner_lr

BLOCKS = {
    "embeddings": "^embedding$",
    "attention": "query_key_value|output",
    "mlp": "gate_up|down",
    "norms": "norm",
    "head": "^head$",
}
"""What a model is cut into where neither the run nor the caller says so; names are the model's."""
STEPS = 32
"""Lanczos steps of a density."""
PROBES = 2
"""Random vectors of a density."""
APART = 10
"""The largest eigenvalues that a density counts one by one, or more where more are asked for."""


@dataclass(frozen=True)
class Measured:
    """The blocks of a run.

    Args:
        config: of the run.
        step: inner steps that it had taken.
        replicas: whose second moments were there.
        tokens: that the curvature is a mean over.
        setting: what the run does with the curvature.
        patterns: from a block's name to the pattern of its parameters.
        blocks: in that order.
    """

    config: TrainConfig
    step: int
    replicas: int
    tokens: int
    setting: Setting
    patterns: Mapping[str, str]
    blocks: tuple[Curvature, ...]


def measure(
    restored: Restored,
    patterns: Mapping[str, str],
    *,
    batches: int = 4,
    top: int = 5,
    show: Callable[[int, str], None] = lambda _done, _text: None,
) -> Measured:
    """Measure the blocks of a run.

    Args:
        restored: the run.
        patterns: of `patterns_of`.
        batches: of the run's training text, of its own batch size.
        top: eigenvalues of each block, besides the density.
        show: called with the number of blocks that are done and a few words.

    Raises:
        UsageError: patterns that do not fit the model.
    """
    sizes = {name: weight.numel() for name, weight in restored.model.named_parameters()}
    try:
        members = partition(sizes, patterns)
    except ValueError as error:
        reason = str(error).removeprefix("partition: ").replace("fragment", "block")
        raise UsageError(f"--blocks: {reason}") from None
    tokens = restored.batches(batches)
    blocks = []
    for name, names in members.items():

        def tell(products: int, name: str = name) -> None:
            show(len(blocks), f"{name}, {products} products")

        blocks.append(_block(restored, name, names, tokens, top=top, tell=tell))
    show(len(blocks), "done")
    count = sum(batch.numel() for batch in tokens)
    setting = setting_of(restored.config)
    return Measured(restored.config, restored.step, restored.replicas, count, setting, patterns, tuple(blocks))


def setting_of(config: TrainConfig) -> Setting:
    """The outer rule, the rounds and the inner learning rates of a run."""
    middles = {place: (2 * number + 1) * config.rounds // 6 for number, place in enumerate(PLACES)}
    lrs = {
        place: tuple(
            inner_lr(config, step)
            for step in range(middle * config.inner_steps, min((middle + 1) * config.inner_steps, config.steps))
        )
        for place, middle in middles.items()
    }
    return Setting(config.outer.rule(), config.rounds, lrs, config.inner.weight_decay)


def patterns_of(restored: Restored, asked: Mapping[str, str] | None = None) -> dict[str, str]:
    """What to cut a model into: what was asked for, or the run's own fragments if they have names, or `BLOCKS`.

    Args:
        restored: the run.
        asked: a regular expression by block name; a parameter belongs to the first that its name contains.
    """
    if asked is not None:
        return dict(asked)
    own = restored.config.sync.parts()
    if not isinstance(own, int):
        return dict(own)
    return {name: pattern for name, pattern in BLOCKS.items() if name != "head" or restored.model.head is not None}


def _block(
    restored: Restored, name: str, names: list[str], tokens: list[Tensor], *, top: int, tell: Callable[[int], None]
) -> Curvature:
    raw = GaussNewton(restored.model, tokens, names)
    scaled = GaussNewton(restored.model, tokens, names, restored.scale)

    def told(operator: GaussNewton) -> Product:
        def product(vector: Floats) -> Floats:
            tell(raw.products + scaled.products)
            return operator(vector)

        return product

    largest = largest_eigenpairs(told(raw), raw.size, top).values
    known = largest_eigenpairs(told(scaled), scaled.size, max(top, APART))
    found = density(told(scaled), scaled.size, steps=STEPS, probes=PROBES, known=known)
    return Curvature(name, raw.size, largest, known.values[:top], found.nodes, found.weights)
