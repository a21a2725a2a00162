"""What every trainer must do with our rounds; a subclass says how one of them trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainers
from twophase.files import read_jsonl
from twophase.runs.folder import METRICS
from twophase.runs.record import read_record, read_rounds

STEPS, SAVE = 30, 10
"""Inner steps, and those between two checkpoints: the first lies in the middle of a round, the second at its end."""
SETTING: dict[str, Any] = {"inner_steps": trainers.INNER_STEPS, "restart": trainers.RESTART, "compression": "int8"}


class Interrupted(Exception):  # noqa: N818 - as KeyboardInterrupt
    """Ends a training like a Ctrl-C."""


class Contract:
    """Three properties; `epoch` is the number of batches after which the data begins anew."""

    epoch, logged = 1000, "inner_lr"

    def train(
        self, folder: Path, *, parts: int = 1, replica: int = 0, stop: int = -1, record: Path | None = None
    ) -> tuple[Any, Any]:
        """Train, from the folder's newest checkpoint if there is one; return the module and what has the `reports`.

        `parts` batches of this replica make an inner step. Before step `stop`, raise and catch `Interrupted`.
        """
        raise NotImplementedError

    def by_hand(self, replicas: int = 1, parts: int = 1) -> tuple[list[Any], list[Any]]:
        """The modules and the facts of the rounds of a hand-written loop."""
        _, models, reports = trainers.by_hand(STEPS, replicas, parts=parts, epoch=self.epoch, **SETTING)
        return models, trainers.facts(reports)

    @pytest.mark.parametrize("parts", [1, 2])
    def test_rounds_are_those_of_a_hand_written_loop(self, tmp_path: Path, parts: int):
        """Weights and rounds have the bits of the loop in docs/own-loop.md; accumulated batches are no inner steps."""
        model, rounds = self.train(tmp_path, parts=parts)
        (expected,), facts = self.by_hand(parts=parts)
        assert len(rounds.reports) >= STEPS // trainers.INNER_STEPS
        assert trainers.facts(rounds.reports) == facts[: len(rounds.reports)]
        assert trainers.same_weights(model, expected)

    @pytest.mark.parametrize("stop", [SAVE + 3, 2 * SAVE + 1, -1])
    def test_a_resumed_training_is_the_uninterrupted_one(self, tmp_path: Path, stop: int):
        """Resumed in the middle of a round, at its end, or after all steps, a training ends with the same bits."""
        self.train(tmp_path, stop=stop)
        model, rounds = self.train(tmp_path)
        (expected,), facts = self.by_hand()
        assert trainers.same_weights(model, expected)
        if found := trainers.facts(rounds.reports):
            first = facts.index(found[0])
            assert first >= SAVE // trainers.INNER_STEPS
            assert found == facts[first : first + len(found)]

    def test_a_record_is_a_run(self, tmp_path: Path):
        """An interrupted training goes on in its run folder, also while the first one is alive, as in a notebook."""
        folder = tmp_path / "run"
        _, alive = self.train(tmp_path, record=folder, stop=SAVE + 3)
        assert alive
        assert not (folder / "summary.json").exists()
        self.train(tmp_path, record=folder)
        run = read_record(folder)
        assert (run.summary or {})["steps"] == STEPS
        assert [line["checksum"] for line in read_rounds(folder)] == [fact[-1] for fact in self.by_hand()[1]]
        assert any(self.logged in line for line in read_jsonl(folder / METRICS))
