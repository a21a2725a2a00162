"""Reading a run's rounds: duplicates, gaps, wrong types and odd numbers are named, and change no count."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runmaker import EMA, config_of, write_lines, write_run
from twophase.advice.text import describe
from twophase.advice.verdict import diagnose
from twophase.base.config import dump_yaml
from twophase.runs.record import RunRecord, read_record

Lines = list[dict[str, Any]]


def changed(folder: Path, change: Callable[[Lines], Lines]) -> RunRecord:
    """The record of a run of 20 rounds whose lines were changed."""
    write_run(folder, EMA, [0.3] * 3, 20)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    write_lines(folder / "rounds.jsonl", change(lines))
    return read_record(folder)


def put(lines: Lines, **values: Any) -> Lines:
    """The lines with the sixth changed."""
    lines[5] |= values
    return lines


def again(lines: Lines) -> Lines:
    """Rounds 11 and 12 come twice, as after a resumption from round 10, the second time with another norm."""
    later = copy.deepcopy(lines[10:])
    for line in later:
        line["groups"][0]["pseudo_gradient_norm"] = 7.0
    return lines[:12] + later


ODD = {
    "rounds that come twice": (again, 20, "2 lines whose step comes again"),
    "a gap": (lambda lines: lines[:5] + lines[8:], 17, "missing: 3, the first of them before round 9"),
    "a list for a round": (lambda lines: put(lines, round=[1]), 20, "1 lines of rounds.jsonl hold"),
    "a vast step": (lambda lines: put(lines, step=1e26), 20, "of a wrong kind"),
    "a vast whole step": (lambda lines: put(lines, step=10**26), 20, "of a wrong kind"),
    "null for a group": (lambda lines: put(lines, groups=[None]), 20, "of a wrong kind"),
    "a number for a group": (lambda lines: put(lines, groups=[3]), 20, "of a wrong kind"),
    "a round again": (lambda lines: put(lines, fragments=[lines[4]["fragments"][0]]), 20, "do not increase"),
    "more than was planned": (lambda lines: [*lines[:-1], lines[-1] | {"step": 999}], 20, "beyond the plan"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "rounds", "said"), ODD.values(), ids=ODD)
def test_oddities_are_named(tmp_path: Path, change: Callable[[Lines], Lines], rounds: int, said: str) -> None:
    """Each is a sentence in the record's problems, and no round counts twice."""
    record = changed(tmp_path, change)
    assert any(said in problem for problem in record.problems), record.problems
    assert record.recorded == rounds
    assert diagnose(record).rounds == rounds


def test_the_last_of_duplicates_counts(tmp_path: Path) -> None:
    """Of rounds that come twice the later ones are used, in order; a run that is in order has no problem."""
    block = changed(tmp_path / "a", again).blocks[0]
    assert block.number.tolist() == list(range(1, 21))
    assert block.index.tolist() == list(range(20))
    assert block.pseudo_gradient_norm[10:].tolist() == [7.0] * 10
    assert changed(tmp_path / "b", lambda lines: lines).problems == []


def test_a_step_that_goes_back_is_left_out(tmp_path: Path) -> None:
    """A line of its own step that comes too late is left out and named."""
    record = changed(tmp_path, lambda lines: [*lines[:5], *lines[6:12], lines[5], *lines[12:]])
    assert any("does not fit between those around (the first is step 6)" in problem for problem in record.problems)
    assert record.rounds["step"].tolist() == [step for step in range(1, 21) if step != 6]


def test_fragments_are_no_further_rounds(tmp_path: Path) -> None:
    """Two fragments that sync apart have two lines a round, and half as many rounds."""
    write_run(tmp_path, EMA, [], 20, blocks={"a": [0.3], "b": [0.5]}, config=config_of(EMA, rounds=40, inner_steps=2))
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    apart = [
        line | {"step": 2 * line["round"] - 1 + place, "fragments": [line["fragments"][place]]}
        | {"groups": [line["groups"][place]]}
        for line in lines
        for place in (0, 1)
    ]  # fmt: skip
    write_lines(tmp_path / "rounds.jsonl", apart)
    (tmp_path / "config.yaml").write_text(dump_yaml(config_of(EMA, rounds=40, inner_steps=2)))
    record = read_record(tmp_path)
    assert [block.name for block in record.blocks] == ["a", "b"]
    assert len(record.rounds["step"]) == 40
    assert "20 of 20 rounds recorded" in describe(diagnose(record), "run")
    assert not any("missing" in problem or "increase" in problem for problem in record.problems)


def test_lines_may_be_read_in_any_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many lines are taken together changes nothing, whatever appears, ends or is odd in between."""
    write_run(tmp_path, EMA, [], 20, blocks={"a": [0.3], "b": [0.5]})
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    for line in lines[7:11]:
        line["seconds"]["late"] = 1.0
        line["fragments"] = line["fragments"][:1]
    lines[12] |= {"restarted": None, "step": "x", "bytes_sent": 10**400, "seconds": None}
    write_lines(tmp_path / "rounds.jsonl", again(lines))
    portions = []
    for together in (1, 3, 100):
        monkeypatch.setattr("twophase.runs.jsonl._TOGETHER", together)
        portions.append(read_record(tmp_path))
    assert len(portions[0].phases["late"]) == len(portions[0].rounds["step"])
    for other in portions[1:]:
        assert repr(other) == repr(portions[0])


@pytest.mark.parametrize("step", [21_000, 2, 0, 19])
def test_a_damaged_step_costs_its_own_line(tmp_path: Path, step: int) -> None:
    """Whether a step is damaged to a larger or a smaller number or to another line's, all other lines are kept."""
    record = changed(tmp_path, lambda lines: put(lines, step=step))
    assert record.rounds["step"].tolist() == [number for number in range(1, 21) if number != 6]
    assert record.recorded == 19
    assert any("line" in problem and "step" in problem for problem in record.problems)


@pytest.mark.parametrize("blocks", [{"0": [0.3]}, {"a": [0.3], "b": [0.5]}], ids=["one", "two"])
def test_a_damaged_name_is_no_fragment(tmp_path: Path, blocks: dict[str, list[float]]) -> None:
    """One wrong name among the rounds is said, and makes neither another block nor a run of one round."""
    write_run(tmp_path, EMA, [], 20, blocks=blocks)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    names = [block.name for block in read_record(tmp_path).blocks]
    lines[5]["fragments"][0]["name"] = "zz"
    write_lines(tmp_path / "rounds.jsonl", lines)
    record = read_record(tmp_path)
    assert record.recorded == 19
    assert [block.name for block in record.blocks] == names
    assert any("'fragment zz' in 1; not counted" in problem for problem in record.problems), record.problems
    for line in lines[:10]:
        line["fragments"][0]["name"] = "zz"  # half of the rounds are no damage: another layout was in force
    write_lines(tmp_path / "rounds.jsonl", lines)
    assert "zz" in [block.name for block in read_record(tmp_path).blocks]


@pytest.mark.parametrize("name", ["pseudo_gradient_norm", "buffer_norm", "gain"])
def test_the_largest_numbers_warn_of_nothing(tmp_path: Path, name: str) -> None:
    """Numbers whose square, or sum, is no float any more give words and no warning."""

    def change(lines: Lines) -> Lines:
        for line in lines[3:12]:
            line["groups"][0][name] = 1e308
        return lines

    assert describe(diagnose(changed(tmp_path, change)), "run")
