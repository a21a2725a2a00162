"""How many sequences a policy that probes is shown, and which: the losses, the run, its end after a stop, mistakes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from twophase.base.config import dump_yaml, with_values
from twophase.cli import main as cli
from twophase.runs.folder import RunFolder, read_lines
from twophase.tasks.build import build_task
from twophase.tasks.lm.config import TrainConfig, check
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.task import corpus_of as build
from twophase.training.train import train
from twophase.training.trainer import Trainer

GAINS = "probe:0.5,0.6,0.7,0.8,0.9,1,1.1,1.2,1.3"
"""Candidates so close to one another that, at a large inner learning rate, other sequences choose other ones."""


@pytest.fixture
def config(short_run: TrainConfig) -> TrainConfig:
    """A short run whose policy probes."""
    return with_values(short_run, {"outer.restart": GAINS, "inner.lr": 0.05})


def run(config: TrainConfig, path: Path, **options: Any) -> dict[str, Any]:
    with RunFolder.claim(path, config) as folder:
        return train(build_task(config), config, folder, **options)


def left(path: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A run's lines and weights, less its times and its name."""
    logs = [line for log in ("rounds.jsonl", "metrics.jsonl") for line in read_lines(path / log)]
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in logs]
    return lines, load_file(path / "weights.safetensors")


def same(one: Path, other: Path) -> bool:
    """Whether two runs have left the same bits."""
    (lines, weights), (others, more) = left(one), left(other)
    return lines == others and all(torch.equal(weights[name], more[name]) for name in weights | more)


def test_as_many_as_there_are_is_the_default(config: TrainConfig, tmp_path: Path) -> None:
    """All sequences of a batch, given as a number, are the whole batch bit for bit; fewer make another run."""
    for sequences in (0, 4, 3):
        run(with_values(config, {"outer.probe_sequences": sequences}), tmp_path / str(sequences))
    assert same(tmp_path / "0", tmp_path / "4")
    assert not same(tmp_path / "0", tmp_path / "3")


class Told(NamedTuple):
    """A candidate's loss as the engine was told it."""

    model: nn.Module
    replica: int
    step: int
    loss: float


SYNCS: list[dict[str, Any]] = [
    {},
    {"sync.fragments": ("2",), "sync.restart": (f"0={GAINS}", "1=never"), "outer.restart": "never", "sync.delay": 1},
]


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("sync", SYNCS, ids=["whole", "fragments"])
def test_candidates_are_weighed_on_the_first_sequences(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: dict[str, Any], micro_batch: int
) -> None:
    """Each loss is the mean over the first 3 sequences that the replica trains on next, evaluated one by one."""
    seen: list[Told] = []
    probe = Trainer._probe

    def noted(self: Trainer, model: nn.Module, number: int, round_: int) -> float:
        seen.append(Told(deepcopy(model), number, self.done.step, probe(self, model, number, round_)))
        return seen[-1].loss

    monkeypatch.setattr(Trainer, "_probe", noted)
    run(
        with_values(config, {"outer.probe_sequences": 3, "compute.micro_batch": micro_batch} | sync),
        tmp_path / "run",
    )
    assert len(seen) == 4 * 9 * 2  # rounds, candidates, replicas
    corpus = build(config.data, config.replicas, 0)
    for one in seen:
        tokens, targets = map(torch.from_numpy, corpus.batch(config.seed, one.step, one.replica))
        model = Llama(config.model, corpus.vocabulary.size, seed=0).double()
        model.load_state_dict(one.model.state_dict())
        with torch.no_grad():
            scores = [torch.log_softmax(model(sequence[None])[0], -1) for sequence in tokens]
        losses = [-row[range(len(wanted)), wanted].mean().item() for row, wanted in zip(scores, targets, strict=True)]
        assert one.loss == pytest.approx(sum(losses[:3]) / 3, rel=1e-5)
        assert one.loss != pytest.approx(sum(losses) / 4, rel=1e-5)


def test_resumed_equals_uninterrupted(config: TrainConfig, tmp_path: Path) -> None:
    """Stopped inside rounds and at their ends, a run with a small probe ends with the same bits."""
    config = with_values(config, {"outer.probe_sequences": 1})
    run(config, tmp_path / "whole")
    for stop in (8, 5, 3):
        calls = iter(range(1, 1000))
        part = run(config, tmp_path / "parts", should_stop=lambda s=stop, c=calls: next(c) >= s)
        assert part["exit_reason"] == "stopped"
    run(config, tmp_path / "parts")
    assert same(tmp_path / "parts", tmp_path / "whole")


def test_what_no_policy_looks_at_changes_nothing(config: TrainConfig, tmp_path: Path) -> None:
    """Under a policy that does not probe, any number gives the same bits; it is not refused, for sweeps have both."""
    for sequences in (0, 1):
        values = {"outer.restart": "2", "outer.probe_sequences": sequences}
        run(check(with_values(config, values)), tmp_path / str(sequences))
    assert same(tmp_path / "0", tmp_path / "1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("5", "--outer.probe-sequences is 5; it must be a whole number from 1 to --data.batch-size 4, or 0 (all of"),
        ("-2", "--outer.probe-sequences is -2; it must be a whole number from 1 to --data.batch-size 4, or 0 (all of"),
        ("1.5", "--outer.probe-sequences"),
    ],
)
def test_mistakes_on_the_command_line(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    """What is no number of sequences of a step ends with status 2 and the option's name, and makes no folder."""
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run")]
    try:
        status = cli.main([*words, "--outer.probe-sequences", given])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_size_is_not_taken_up(config: TrainConfig, tmp_path: Path) -> None:
    """A folder of a run with one number is refused to a run with another, and both are named."""
    run(config, tmp_path / "run")
    assert "probe_sequences" not in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"outer\.probe_sequences is not set there, 2 here"):
        run(with_values(config, {"outer.probe_sequences": 2}), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "finished"
