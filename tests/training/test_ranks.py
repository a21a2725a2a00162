"""Two ranks as whole commands, in the environment that torchrun makes: what they leave, and what ends them."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from commands import outcome
from forked import Program, places
from trained import end_group, run, start_group, weightless_bytes
from twophase.config import update
from twophase.tasks.registry import config_class
from twophase.training import checkpoint

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

TASK = '''
import os, time
from dataclasses import dataclass
from pathlib import Path
from toytask import Toy

@dataclass(frozen=True)
class Faulty(Toy):
    """A task that sends its process a signal in an inner step, if a file of the rank's name holds both numbers."""

    def batch(self, seed, step, replica):
        fault = Path(__file__).with_name(f"fault-{os.environ.get('RANK')}")
        if fault.exists() and [step] == [int(word) for word in fault.read_text().split()][1:]:
            os.kill(os.getpid(), int(fault.read_text().split()[0]))
            time.sleep(0.2)  # another thread may take the signal, somewhat later
        return super().batch(seed, step, replica)
'''


class Scene:
    """A folder with the task, a run of one process, and the words of the command that trains the same."""

    def __init__(self, folder: Path) -> None:
        (folder / "faulty.py").write_text(TASK)
        self.folder, self.out = folder, folder / "run"
        name = f"{folder}/faulty.py:Faulty"
        self.words = ["train", "--task", name, "--steps", "42", "--inner-steps", "4", "--checkpoint-every", "2"]
        self.words += ["--outer.method", "nesterov", "--quiet", "--out", str(self.out)]
        values = {"steps": 42, "inner_steps": 4, "checkpoint_every": 2, "outer.method": "nesterov"}
        run(update(config_class(name)(), values), folder / "alone")
        self.alone = outcome(folder / "alone")

    def train(self, *options: str, fault: str = "", rank: int = 1) -> list[tuple[int, str]]:
        """Train on two ranks; returns the status and standard error of each."""
        path = self.folder / f"fault-{rank}"
        path.write_text(fault)
        words = [*self.words, *options]
        processes = start_group(self.folder, words, words)
        if fault.startswith(f"{signal.SIGSTOP:d} "):
            processes[1 - rank].wait(60)
            processes[rank].kill()
        ended = end_group(processes, self.folder)
        path.unlink()
        for number in (0, 1):
            (self.folder / f"errors-{number}").unlink()
        return ended

    def is_whole(self) -> bool:
        return weightless_bytes(outcome(self.out)) == weightless_bytes(self.alone)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal_to_one_rank_stops_both(scene: Scene, rank: int, number: int) -> None:
    """Both write a checkpoint at the end of the round; repeated, even twice, the run has the results of one."""
    (first, errors), (second, silence) = scene.train(fault=f"{number:d} 13", rank=rank)
    assert {first, second} <= {128 + number, 130}
    assert (errors.startswith("stopped; resume with: "), silence) == (True, "")
    assert checkpoint.complete(scene.out / "checkpoint")[-1].step == 16
    for _ in range(2):
        assert scene.train() == [(0, ""), (0, "")]
        assert scene.is_whole()


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_is_lost(scene: Scene, rank: int, number: int) -> None:
    """Dead or stuck, the other ends within the timeout with one message and status 1; then the run goes on."""
    began = time.monotonic()
    ended = scene.train("--timeout", "3", fault=f"{number:d} 21", rank=rank)
    status, errors = ended[1 - rank]
    assert status == 1, errors
    assert len(re.findall("^twophase train.*: ", errors, re.MULTILINE)) == 1
    assert "Traceback" not in errors
    assert ended[rank][0] == -signal.SIGKILL
    assert time.monotonic() - began < 60
    assert not (scene.out / "summary.json").exists()
    assert scene.train() == [(0, ""), (0, "")]
    assert scene.is_whole()


def test_ranks_that_were_started_unlike(scene: Scene) -> None:
    """Both end with status 2 and the option's name before any training; what may differ may."""
    other = [*scene.words, "--outer.lr", "0.25"]
    for status, errors in end_group(start_group(scene.folder, scene.words, other), scene.folder):
        assert status == 2, errors
        assert "--outer.lr" in errors
    assert not (scene.out / "rounds.jsonl").exists()
    may_differ = start_group(scene.folder, scene.words, [*scene.words, "--threads", "2"])
    assert [status for status, _ in end_group(may_differ, scene.folder)] == [0, 0]


def test_a_folder_that_one_rank_does_not_see(scene: Scene) -> None:
    """Where rank 1 does not see rank 0's checkpoints, both end with status 2 and `--out`."""
    scene.train(fault=f"{signal.SIGTERM:d} 13")
    elsewhere = [*scene.words[:-1], str(scene.folder / "elsewhere")]
    for status, errors in end_group(start_group(scene.folder, scene.words, elsewhere), scene.folder):
        assert status == 2, errors
        assert "--out" in errors


def test_a_rank_alone(scene: Scene) -> None:
    """Where the others do not come it ends with one message and status 1, and has written nothing."""
    out, errors = scene.folder / "out", scene.folder / "errors"
    words = ["-m", "twophase", *scene.words, "--timeout", "1"]
    process = Program(words, out, errors, places(2)[0])
    assert process.wait(60) == 1
    assert "twophase train: the ranks cannot meet" in errors.read_text().splitlines()[-1]
    assert not scene.out.exists()
