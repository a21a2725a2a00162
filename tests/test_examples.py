"""The examples run as their docstrings say, and each equals the loop that it stands for."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import wait_until
from forked import Program, bring, finish, in_processes, places
from modules import load
from processes import PATIENCE, lighthouse
from replicas import same_bits
from twophase.diloco.engine import DiLoCo

FOLDER = Path(__file__).parents[1] / "examples"


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]


def twins(rank: int) -> dict[str, Any]:
    """Return the weights at which the example and the engine end, on the same batches."""
    example = load(FOLDER / "outer_loop.py")
    torch.manual_seed(rank)  # both take the weights of rank 0
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    twin = copy.deepcopy(model)
    example.train(model, rounds=7, inner_steps=8)
    inner = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    engine = DiLoCo(twin, "nesterov", restart=3, inner_steps=8)
    for number in range(1, 8):
        for step in range(8):
            example.loss_of(twin, example.batch(rank, number, step)).backward()
            inner.step()
            inner.zero_grad()
            engine.step()
    return {"example": list(model.parameters()), "engine": list(twin.parameters())}


@pytest.mark.dist
def test_outer_loop_is_the_engine(tmp_path: Path):
    """Two processes, seven rounds, a restart every three: both end with the engine's weights, bit for bit."""
    first, second = in_processes(__file__, tmp_path, 2)
    for weights in (first["engine"], second["example"], second["engine"]):
        assert all(map(same_bits, first["example"], weights))


@pytest.mark.dist
@pytest.mark.parametrize(("name", "words"), [("outer_loop.py", []), ("plain_loop.py", ["--steps", "150"])])
def test_loops_in_two_processes(name: str, words: list[str], tmp_path: Path):
    """As of torchrun: the loss goes down, and both end with the same weights; the outer loop has at most 60 lines."""
    finish(tmp_path, [[str(FOLDER / name), *words]] * 2, places(2))
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    for printed in logs[: 2 if words else 1]:
        values = losses(printed)
        assert values[-1] < 0.5 * values[0]
        assert "2 replica(s)" in printed or not words
    assert len({checksum for log in logs for checksum in re.findall(r"checksum (\w{16})", log)}) == len(words[:1])
    assert len((FOLDER / "outer_loop.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("restart", ["never", "3", "soft:2:0.3:0.1"])
def test_single_worker_by_hand_is_the_engine(restart: str):
    """Rounds written out around a bare `OuterSGD` have the bits of the engine's, the shorter last round included."""
    example = load(FOLDER / "single_worker.py")
    engine, hand = example.with_engine(77, restart), example.by_hand(77, restart)
    assert all(map(same_bits, engine.parameters(), hand.parameters()))


def test_single_worker_restarts_and_prints(capsys: pytest.CaptureFixture[str]):
    """Restarts change the weights; every line has a loss, and the two ways of writing it the same."""
    example = load(FOLDER / "single_worker.py")
    example.main(["--steps", "80"])
    printed = [float(number) for number in re.findall(r"^ +(\d\.\d+)  ", capsys.readouterr().out, re.M)]
    assert len(printed) == 5
    assert printed[1] == printed[2]
    assert printed[3] == printed[4]
    assert len(set(printed)) == 3
    assert max(printed) < example.loss(example.build()[0])


def test_plain_loop_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """One process: the loss goes down, and rounds end."""
    monkeypatch.delenv("RANK", raising=False)
    load(FOLDER / "plain_loop.py").main(["--steps", "150"])
    printed = capsys.readouterr().out
    values = losses(printed)
    assert values[-1] < 0.5 * values[0]
    assert "1 replica(s)" in printed
    assert re.findall(r"round (\d+):", printed) == ["3", "6", "9"]


@pytest.mark.dist
def test_torchft_diloco_over_a_kill(tmp_path: Path):
    """Two replicas train over loopback; one is killed and started again, and both end with the same weights."""
    pytest.importorskip("torchft", reason="the extra ft is not installed")
    logs = {name: tmp_path / name for name in ("0", "1", "1 again")}
    with lighthouse(2) as url, ExitStack() as stack:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHFT_LIGHTHOUSE": url}

        def start(name: str) -> Program:
            words = [str(FOLDER / "torchft_diloco.py"), name[0], "--rounds", "21"]
            process = Program(words, logs[name], tmp_path / f"{name}.err", env)
            stack.callback(process.kill)
            return process

        first, second = start("0"), start("1")
        wait_until(lambda: "sync 20:" in logs["1"].read_text())
        second.kill()
        assert second.wait(PATIENCE) == -signal.SIGKILL
        for process, name in ((start("1 again"), "1 again"), (first, "0")):
            assert process.wait(PATIENCE) == 0, (tmp_path / f"{name}.err").read_text()[-3000:]
    printed = [logs[name].read_text() for name in ("0", "1 again")]
    assert "sync 40: 2 replica(s), 6 restarts" in printed[0]
    ends = [re.findall(r"agreed weights (\S+)", text) for text in printed]
    assert [len({*ends[0], *ends[1]}), *map(len, ends)] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Every code cell of a notebook runs, one after the other, in a folder of its own."""
    pytest.importorskip("matplotlib")
    shutil.copytree(FOLDER, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    for _ in range(2):  # a notebook that is run again finds its folders there
        names: dict[str, Any] = {"__name__": "__main__"}
        for cell in cells:
            source = "".join(cell["source"]).replace('"steps": 96', '"steps": 32')  # as well, and sooner
            exec(compile(source, name, "exec"), names)  # noqa: S102 - a file of this project
        assert names["figure"].axes
    assert "nan" not in capsys.readouterr().out


if __name__ == "__main__":
    bring(twins, 2)
