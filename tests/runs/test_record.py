"""Reading a run's folder, finished or not, as columns and blocks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from runmaker import EMA, NESTEROV, config_of, observed, round_lines, write_lines, write_run, write_summary
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.runs.folder import CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY
from twophase.runs.record import LARGEST, WHOLE, RunRecord, is_run, read_record


def test_a_run_as_columns(tmp_path: Path) -> None:
    """Rounds, metrics and the only block are columns in the logs' order; the rule and the policy are the run's."""
    record = read_record(write_run(tmp_path, NESTEROV, [0.3, 0.1], 20, restart="3"))
    lines = read_jsonl(tmp_path / ROUNDS)
    assert record.rounds["step"].tolist() == list(range(1, 21))
    assert record.rounds["gain"].tolist() == [line["gain"] for line in lines]
    assert record.phases["outer"].tolist() == [2e-3] * 20
    (block,) = record.blocks
    assert (block.name, block.index.tolist(), block.number.tolist()) == (WHOLE, [*range(20)], [*range(1, 21)])
    assert block.restarted.tolist() == [number % 3 == 0 for number in range(1, 21)]
    assert block.cosine.tolist() == [line["groups"][0]["cosine"] for line in lines]
    assert record.curve("train_loss")[0].tolist() == list(range(1, 21))
    assert record.rounds["inner_lr"] == pytest.approx([2e-3] * 20)
    assert (record.rule, block.restart, record.restart) == (NESTEROV, "3", "3")
    assert (record.recorded, record.planned_rounds, record.numbers["inner_steps"]) == (20, 20, 1)
    assert "Nesterov" in record.outer_words


def test_the_state_of_a_run(tmp_path: Path) -> None:
    """Running until its summary is there, then finished or diverged; a summary of another run counts for nothing."""
    config = config_of(EMA, rounds=4)
    write_run(tmp_path, EMA, [0.3], 4, finished=False, config=config)
    assert read_record(tmp_path).state == "running"
    for perplexity, state in ((8.0, "finished"), (None, "diverged")):
        write_summary(tmp_path, config, perplexity)
        assert read_record(tmp_path).state == state
    write_summary(tmp_path, config_of(EMA, rounds=5))
    assert read_record(tmp_path).state == "running"


def test_missing_files_are_empty(tmp_path: Path) -> None:
    """Any file may be missing, as of a run that has just begun; a folder of something else is refused."""
    write_run(tmp_path / "run", EMA, [0.3], 4)
    for name in (ENV, METRICS, SUMMARY, ROUNDS):
        (tmp_path / "run" / name).unlink()
        record = read_record(tmp_path / "run")
    assert (record.environment, record.summary, record.metrics, record.blocks, record.recorded) == ({}, None, {}, [], 0)
    assert [len(values) for values in record.curve("train_loss")] == [0, 0]
    assert record.unit == ""
    for path in (tmp_path, tmp_path / "nowhere"):
        assert not is_run(path)
        with pytest.raises(UsageError, match="folder of a run"):
            read_record(path)


def test_a_log_with_a_torn_line_and_repeated_steps(tmp_path: Path) -> None:
    """Of a round that was written twice the last line counts; lines of a step are one row; a torn one is left out."""
    write_run(tmp_path, EMA, [0.3], 6)
    lines = read_jsonl(tmp_path / ROUNDS)
    write_lines(tmp_path / ROUNDS, [*lines[:4], lines[4] | {"gain": 7.0}, lines[4], lines[5]])
    write_lines(tmp_path / METRICS, [{"step": 1, "loss": 3.0}, {"step": 1, "accuracy": 0.5}, {"step": 2, "loss": None}])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 3, "lo')
    record = read_record(tmp_path)
    assert record.rounds["gain"].tolist() == [line["gain"] for line in lines]
    assert (record.recorded, record.blocks[0].number.tolist()) == (6, [1, 2, 3, 4, 5, 6])
    assert (record.metrics["step"].tolist(), record.metrics["accuracy"][0]) == ([1, 2], 0.5)
    assert [values.tolist() for values in record.curve("loss")] == [[1], [3.0]]


def test_what_is_no_number_is_nan(tmp_path: Path) -> None:
    """Also numbers whose squares would overflow; true and false count as 1 and 0."""
    write_run(tmp_path, EMA, [0.3], 2)
    values = [math.inf, math.nan, 2 * LARGEST, None, "text", [1.0], True]
    write_lines(tmp_path / METRICS, [{"step": step, "a": value} for step, value in enumerate(values)])
    assert read_record(tmp_path).metrics["a"] == pytest.approx([math.nan] * 6 + [1.0], nan_ok=True)


def of_fragments(path: Path, turns: bool) -> RunRecord:
    """Two fragments, which end their rounds in turn or together; the second has two param groups."""
    write_run(path, EMA, [0.3], 10)
    (path / "config.yaml").write_text("sync: {fragments: [a, b], restart: [a=3, b=never]}\nouter: {restart: '4'}\n")
    lines = round_lines({name: observed(EMA, [0.3], 10) for name in "abc"})
    for line in lines:
        del line["fragments"][2]
    if turns:
        parts = ((slice(0, 1), slice(0, 1)), (slice(1, 2), slice(1, 3)))
        lines = [
            line | {"step": 2 * line["round"] + n, "fragments": line["fragments"][part], "groups": line["groups"][own]}
            for line in lines
            for n, (part, own) in enumerate(parts)
        ]
    write_lines(path / ROUNDS, lines)
    return read_record(path)


def test_blocks_of_fragments(tmp_path: Path) -> None:
    """Fragments with one group each are blocks, where fragments take turns; else the groups are."""
    record = of_fragments(tmp_path / "turns", turns=True)
    (block,) = record.blocks
    assert block.number.tolist() == [*range(1, 11)]
    assert block.index.tolist() == [*range(0, 20, 2)]
    assert (len(record.rounds["step"]), record.recorded) == (20, 10)
    assert block.restart == "3"
    assert record.restart == "a=3, b=never"
    together = of_fragments(tmp_path / "together", turns=False)
    assert [block.name for block in together.blocks] == [f"param group {number}" for number in range(3)]
    assert [block.restart for block in together.blocks] == ["4"] * 3
    assert together.recorded == 10


@pytest.mark.parametrize(
    ("outer", "words"),
    [("{method: AdamW}", "AdamW"), ("{}", ""), ("{method: nesterov, filter: orthogonal}", "orthogonal")],
)
def test_a_run_that_no_rule_moves(tmp_path: Path, outer: str, words: str) -> None:
    """Another optimizer, an unknown one, or a rule after a filter: described as it is, and there is no rule."""
    (write_run(tmp_path, EMA, [0.3], 2) / "config.yaml").write_text(f"outer: {outer}")
    record = read_record(tmp_path)
    assert record.rule is None
    assert words in record.outer_words
    assert bool(record.outer_words) == bool(words)
    assert (record.restart, record.blocks[0].restart, record.unit) == ("unknown", None, " nats a token")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (CONFIG, "sync: {restart: 4}"),
        (ENV, "{"),
        (ENV, "[1]"),
        (ROUNDS, '{"step": 1}'),
        (ROUNDS, '{"round": 1, "fragments": [3]}'),
        (METRICS, '{"round": 1}'),
        (METRICS, '{"step": [1]}'),
        (STEPS, '{"round": 1}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    """A file that no run writes so is refused, by its name."""
    (write_run(tmp_path, EMA, [0.3], 2) / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        read_record(tmp_path)
