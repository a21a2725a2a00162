"""Runs whose syncs are not the plain ones: fragments, delays, compression; and processes that were started unlike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import outcome
from trained import end_group, run, run_in_parts, start_group
from twophase.base.config import dump_yaml, with_values
from twophase.cli.train import describe_run
from twophase.runs.folder import read_lines
from twophase.runs.record import read_record
from twophase.tasks.lm.config import TrainConfig, check

SYNCS: dict[str, dict[str, Any]] = {
    "fragments": {"sync.fragments": ("3",), "sync.restart": ("0=1", "1=2", "2=never")},
    "delay": {"sync.delay": 4, "sync.mixing": 0.5},
    "streaming": {
        "sync.fragments": ("ends=embedding|head|norm", "rest=."),
        "sync.delay": 2,
        "sync.compression": "int8",
    },
    "bfloat16": {"sync.compression": "bfloat16", "sync.fragments": ("2",), "sync.stagger": False},
}


@pytest.fixture(scope="module")
def config(short_run: TrainConfig) -> TrainConfig:
    """The run without restarts."""
    return short_run


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCS)
def test_resumed_equals_uninterrupted(config: TrainConfig, tmp_path: Path, name: str) -> None:
    """It learns; stopped again and again, in the middle of rounds and delays, it ends with the same bytes and lines."""
    config = with_values(config, SYNCS[name])
    assert run(config, tmp_path / "whole")["perplexity"] < 60  # uniform would be 96
    run_in_parts(config, tmp_path / "parts", (1, 5, 6, 8, 14, 21))
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_rounds_of_fragments_are_logged(config: TrainConfig, tmp_path: Path) -> None:
    """A line a sync, which names the fragment and its own round; restarts follow each fragment's own period."""
    run(with_values(config, SYNCS["fragments"]), tmp_path / "run")
    rounds = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert [line["step"] for line in rounds] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    parts = [part for line in rounds for part in line["fragments"]]
    assert [part["name"] for part in parts] == [*"012012012", "0", "1", "0", "2"]  # at the end what is left
    for part in parts:
        period = {"0": 1, "1": 2}.get(part["name"])
        assert part["restarted"] == (period is not None and part["round"] % period == 0)
    assert [line["complete"] for line in rounds] == [line["step"] % 6 == 0 or line["step"] == 22 for line in rounds]


def test_validated_at_the_anchor(config: TrainConfig, tmp_path: Path) -> None:
    """A validation while replicas are ahead of the anchor is the anchor's and leaves the run as it was."""
    often, once = (
        run(with_values(config, SYNCS["delay"] | {"evaluate_every": every}), tmp_path / str(every)) for every in (1, 0)
    )
    assert often["checksum"] == once["checksum"]
    losses = [line["validation_loss"] for line in read_lines(tmp_path / "1" / "metrics.jsonl")]
    assert len(losses) == 3  # after steps 10, 16 and 22
    assert losses[-1] == often["validation_loss"]
    assert losses == sorted(losses, reverse=True)


def test_the_words_on_a_run_have_its_fragments_policies(config: TrainConfig, tmp_path: Path) -> None:
    """In the terminal and in the report: not the one of `outer.restart`, which such a run does not use."""
    values = {"sync.fragments": ("2",), "sync.restart": ("0=3", "1=never"), "outer.restart": "7"}
    config = check(with_values(config, values))
    end = {"diverged": True, "steps": 6}
    assert ", restart 0=3, 1=never, S = " in describe_run(tmp_path, config, end)
    assert ", restart 7, S = " in describe_run(tmp_path, with_values(config, {"sync.restart": ()}), end)
    run(config, tmp_path / "run")
    assert read_record(tmp_path / "run").restart == "0=3, 1=never"


@pytest.mark.dist
def test_two_processes_equal_one(config: TrainConfig, tmp_path: Path) -> None:
    """Streaming fragments with int8 compression, and `auto`: one replica a process, or two in one, same bytes."""
    config = with_values(config, SYNCS["streaming"] | {"outer.restart": "auto"})
    summary = run(config, tmp_path / "one")
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--quiet", "--out", str(tmp_path / "two")]
    assert end_group(start_group(tmp_path, words, words), tmp_path) == [(0, ""), (0, "")]
    weights = [(tmp_path / which / "weights.safetensors").read_bytes() for which in ("one", "two")]
    assert weights[0] == weights[1]
    apart, together = (read_lines(tmp_path / which / "rounds.jsonl") for which in ("two", "one"))
    assert [line["checksum"] for line in apart] == [line["checksum"] for line in together]
    assert apart[-1]["round"] == summary["rounds"]
    assert all(line["bytes_sent"] > 0 for line in apart)


@pytest.mark.dist
def test_unlike_processes_are_refused(config: TrainConfig, tmp_path: Path) -> None:
    """Another rule in one process ends both with status 2 and the option's name, before any training."""
    (tmp_path / "config.yaml").write_text(dump_yaml(replace(config, threads=1)))
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--quiet", "--out", str(tmp_path / "run")]
    ended = end_group(start_group(tmp_path, words, [*words, "--outer.lr", "0.25"]), tmp_path)
    assert [status for status, _ in ended] == [2, 2]
    for _, text in ended:
        assert "--outer.lr differs: " in text
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
