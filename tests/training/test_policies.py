"""Restart policies in a run: the signals that they receive, what checkpoints hold for them, and probe batches."""

from __future__ import annotations

import itertools
import math
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from commands import outcome
from policies import Longer
from trained import run, run_in_parts, stop_after
from twophase.base.config import with_values
from twophase.runs.folder import read_lines
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.task import corpus_of
from twophase.training import checkpoint
from twophase.training.config import inner_lr
from twophase.training.trainer import Trainer

STEEP = {"inner.lr": 0.03, "outer.lr": 4.0}
"""Outer steps so long that the loss rises again and again."""
MEMORY, LOSSES, ROUNDS = "policy_state", "round_losses", "begun"
"""Keys in checkpoints: a policy's own memory, losses of a round under way, the start of each fragment's round."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "values", "stops", "fires", "remembers"),
    [
        # Each stop is inside a round; those of `loss` inside one at whose end it fires.
        ("loss", STEEP | {"inner_steps": 4}, (6, 18), True, (MEMORY,)),
        ("loss", STEEP | {"sync.fragments": ("2",)}, (8, 13), True, (MEMORY, LOSSES, ROUNDS)),
        (str(Longer(3)), {"inner_steps": 3}, (5, 14), True, (MEMORY,)),
        ("auto", {"inner_steps": 3}, (5, 14), False, (MEMORY,)),
        ("ramp:0.5", {}, (8, 13), False, ()),
        ("probe:drop,average", {}, (8, 13), True, ()),
    ],
)
def test_resumed_equals_uninterrupted(
    short_run: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    policy: str,
    values: dict[str, Any],
    stops: tuple[int, ...],
    fires: bool,
    remembers: tuple[str, ...],
) -> None:
    """A run whose policy has a memory, or needs signals, ends the same when it is stopped and resumed.

    And would not if any of what a checkpoint holds for the policy were lost.
    """
    config = with_values(short_run, {"outer.restart": policy, **values})
    summary = run(config, tmp_path / "whole")
    assert (summary["restarts"] > 0) is fires
    assert not summary["diverged"]
    run_in_parts(config, tmp_path / "parts", stops)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    for key in remembers:
        with monkeypatch.context() as patch:
            forget(patch, key)
            assert run_in_parts(config, tmp_path / key, stops)["checksum"] != summary["checksum"], key


def forget(patch: pytest.MonkeyPatch, key: str) -> None:
    """Let checkpoints be read as if nothing of that name were in them."""

    def without(tree: Any) -> Any:
        if isinstance(tree, dict):
            rest = {name: without(branch) for name, branch in tree.items() if name != key}
            return rest | ({key: "{}"} if key == MEMORY and key in tree else {})  # a state without it is refused
        return [without(branch) for branch in tree] if isinstance(tree, list) else tree

    part, progress = checkpoint.Checkpoint.part, checkpoint.Checkpoint.progress
    patch.setattr(checkpoint.Checkpoint, "part", lambda self, name: without(part(self, name)))
    patch.setattr(checkpoint.Checkpoint, "progress", lambda self: without(progress(self)))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every training loss that a trainer reads from the device."""
    read: list[float] = []
    settle = Trainer.settle

    def recorded(self: Trainer) -> None:
        read.extend(loss.item() for loss in self._losses)
        settle(self)

    monkeypatch.setattr(Trainer, "settle", recorded)
    return read


def test_signals_of_a_round(
    short_run: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    """Means of the first and last quarter of a round's losses over the replicas, its last rate, the share done."""
    seen: list[dict[str, float]] = []
    end_round = Trainer.end_round

    def recorded(self: Trainer, report: Any) -> dict[str, Any]:
        seen.append(dict(report.signals))
        return end_round(self, report)

    monkeypatch.setattr(Trainer, "end_round", recorded)
    config = with_values(short_run, {"inner_steps": 9})
    run(config, tmp_path)
    mean = [sum(losses[2 * step : 2 * step + 2]) / 2 for step in range(22)]
    for signals, (start, stop) in zip(seen, ((0, 9), (9, 18), (18, 22)), strict=True):
        quarter = (stop - start) // 4
        assert signals["loss_start"] == pytest.approx(sum(mean[start : start + quarter]) / quarter, rel=1e-6)
        assert signals["loss_end"] == pytest.approx(sum(mean[stop - quarter : stop]) / quarter, rel=1e-6)
        assert signals["train_loss"] == pytest.approx(sum(mean[start:stop]) / (stop - start), rel=1e-6)
        assert (signals["progress"], signals["inner_lr"]) == (stop / 22, inner_lr(config, stop - 1))


@pytest.mark.parametrize(
    ("cut", "begins"),
    [
        # From one outer step of a fragment to its next; S = 8, 22 steps. Without a delay each round ends at its sync.
        ((4, 0, 0.0), {"0": [0, 2, 10, 18, 22], "1": [0, 4, 12, 20, 22], "2": [0, 6, 14, 22], "3": [0, 8, 16, 22]}),
        ((2, 3, 0.0), {"0": [0, 7, 15, 22], "1": [0, 11, 19, 22]}),
        # What is left at the end of a mixed run belongs to a round of its own, in which nothing was trained.
        ((1, 7, 0.5), {"0": [0, 15, 22, 22]}),
    ],
)
def test_signals_of_a_fragments_round(
    short_run: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: list[float],
    *,
    cut: tuple[int, int, float],
    begins: dict[str, list[int]],
) -> None:
    """Each fragment receives the losses of its own round, whatever the others do meanwhile; in a resumed run, too."""
    received: dict[str, list[tuple[float, float]]] = {}
    signals_of = Trainer._signals

    def recorded(self: Trainer, stop: float, fragments: Any) -> dict[str, float]:
        signals = signals_of(self, stop, fragments)
        for name in fragments:
            received.setdefault(name, []).append((signals["loss_start"], signals["loss_end"]))
        return signals

    monkeypatch.setattr(Trainer, "_signals", recorded)
    values = {"sync.fragments": (str(cut[0]),), "sync.delay": cut[1], "sync.mixing": cut[2]}
    config = with_values(short_run, values | {"inner_steps": 8, "replicas": 1})
    run(config, tmp_path / "whole")
    assert len(losses) == 22
    for name, ends in begins.items():
        for (start, stop), pair in zip(itertools.pairwise(ends), received[name], strict=True):
            quarter = max(1, (stop - start) // 4)
            of_round = losses[start:stop] or [0.0]
            expected = (sum(of_round[:quarter]) / quarter, sum(of_round[-quarter:]) / quarter)
            assert pair == pytest.approx(expected, rel=1e-6), name
    uninterrupted = {name: list(pairs) for name, pairs in received.items()}
    received.clear()
    run(config, tmp_path / "parts", should_stop=stop_after(9))
    run(config, tmp_path / "parts")
    assert received == uninterrupted


@pytest.mark.parametrize(("policy", "name"), [("loss", "loss_start"), ("probe:keep,average", "probes")])
def test_a_policy_that_sees_nan_ends_the_run(
    short_run: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, name: str
) -> None:
    """A needed signal that is not finite ends the run as diverged, in its round, and the run stays so."""
    signals_of, probe = Trainer._signals, Trainer._probe

    def broken(self: Trainer, stop: float, fragments: Any) -> dict[str, float]:
        signals = signals_of(self, stop, fragments)
        return signals | ({name: math.nan} if name in signals and self.done.step == 12 else {})

    def broken_probe(self: Trainer, model: Any, number: int, round_: int) -> float:
        return math.nan if self.done.step == 12 else probe(self, model, number, round_)

    monkeypatch.setattr(Trainer, "_signals", broken)
    monkeypatch.setattr(Trainer, "_probe", broken_probe)
    config = with_values(short_run, {"outer.restart": policy})
    summary = run(config, tmp_path)
    assert (summary["diverged"], summary["exit_reason"], summary["steps"]) == (True, "diverged", 12)
    assert [line["groups"][0]["not_finite"] for line in read_lines(tmp_path / "rounds.jsonl")] == [[], [name]]
    assert run(config, tmp_path)["diverged"]


# --- probe batches ---------------------------------------------------------------------------------------------------

GAINS = "probe:0.5,0.7,0.9,1.1,1.3"
"""Candidates so close to one another that, at a large inner learning rate, other sequences choose other ones."""


@pytest.fixture(scope="module")
def probing(short_run: TrainConfig) -> TrainConfig:
    """A short run whose policy probes."""
    return with_values(short_run, {"outer.restart": GAINS, "inner.lr": 0.05})


@pytest.mark.slow
def test_as_many_as_there_are_is_the_default(probing: TrainConfig, tmp_path: Path) -> None:
    """All sequences of a batch, given as a number, are the whole batch bit for bit; fewer make another run.

    Under a policy that does not probe, any number gives the same bits.
    """

    def at(sequences: int, policy: str = GAINS) -> Any:
        values = {"outer.probe_sequences": sequences, "outer.restart": policy}
        path = tmp_path / f"{policy} {sequences}"
        run(with_values(probing, values), path)
        return read_lines(path / "rounds.jsonl")[-1]["checksum"], read_lines(path / "metrics.jsonl")

    assert at(0) == at(4) != at(3)
    assert at(0, "2") == at(1, "2")
    with pytest.raises(ValueError, match=r"outer\.probe_sequences is not set there, 2 here"):
        run(with_values(probing, {"outer.probe_sequences": 2}), tmp_path / f"{GAINS} 0")


class Probed(NamedTuple):
    """A candidate and its loss as the engine received it."""

    model: nn.Module
    replica: int
    step: int
    loss: float


SYNCS: list[dict[str, Any]] = [
    {},
    {"sync.fragments": ("2",), "sync.restart": (f"0={GAINS}", "1=never"), "outer.restart": "never", "sync.delay": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "micro_batch"), [(SYNCS[0], 2), (SYNCS[1], 0)], ids=["whole", "fragments"])
def test_candidates_are_weighed_on_the_first_sequences(
    probing: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: dict[str, Any], micro_batch: int
) -> None:
    """Each loss is the mean over the first 3 sequences that the replica trains on next, evaluated one by one."""
    seen: list[Probed] = []
    probe = Trainer._probe

    def recorded(self: Trainer, model: nn.Module, number: int, round_: int) -> float:
        seen.append(Probed(deepcopy(model), number, self.done.step, probe(self, model, number, round_)))
        return seen[-1].loss

    monkeypatch.setattr(Trainer, "_probe", recorded)
    config = with_values(probing, {"outer.probe_sequences": 3, "compute.micro_batch": micro_batch} | sync)
    run_in_parts(config, tmp_path / "run", [8])
    assert len(seen) == 4 * 5 * 2  # rounds, candidates, replicas
    corpus = corpus_of(config.data, config.replicas, 0)
    for probed in seen[::5]:
        tokens, targets = map(torch.from_numpy, corpus.batch(config.seed, probed.step, probed.replica))
        model = Llama(config.model, corpus.vocabulary_size, seed=0).double()
        model.load_state_dict(probed.model.state_dict())
        with torch.no_grad():
            scores = [torch.log_softmax(model(sequence[None])[0], -1) for sequence in tokens]
        values = [-row[range(len(wanted)), wanted].mean().item() for row, wanted in zip(scores, targets, strict=True)]
        assert probed.loss == pytest.approx(sum(values[:3]) / 3, rel=1e-5)
        assert probed.loss != pytest.approx(sum(values) / 4, rel=1e-5)
