"""torchtitan's own trainer with our rounds, in an environment of its own: the engine's rounds, SIGKILL, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from forked import places
from processes import lighthouse
from replicas import same_bits

ROOT = Path(__file__).parents[2]
FOLDERS = os.pathsep.join([str(ROOT / "src"), str(ROOT / "experiments")])  # the tests' policies are there
PYTHON = ROOT / ".venv-torchtitan" / "bin" / "python"
SETTING = "--module titan_replica --config tiny --fault_tolerance.group_size 2 --outer.lr 0.6 --outer.restart 3".split()

pytest.importorskip("torchft", reason="the extra ft is not installed")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not PYTHON.exists(), reason="make setup-torchtitan makes .venv-torchtitan"),
]


def program(*words: str, url: str = "", ends: tuple[int, ...] = (0,)) -> tuple[int, str]:
    """Run the program as torchrun would for one process; its exit code and output."""
    environment = places(1)[0] | {"TORCHFT_LIGHTHOUSE": url, "PYTHONPATH": FOLDERS}
    command = [str(PYTHON), str(Path(__file__).with_name("titan_replica.py")), *words]
    end = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert end.returncode in ends, end.stderr[-3000:]
    return end.returncode, end.stdout


def replicas(folder: Path, name: str, *words: str) -> list[int]:
    """Run two replicas side by side below a lighthouse of their own; their exit codes."""

    def one_of_them(number: int) -> int:
        more = ["--fault_tolerance.replica_id", str(number), "--dump_folder", str(folder), *SETTING, *words]
        return program(name, str(folder), *more, "--hf_assets_path", str(folder), url=url, ends=(0, -signal.SIGKILL))[0]

    with lighthouse(2) as url, ThreadPoolExecutor(2) as pool:
        return list(pool.map(one_of_them, range(2)))


@pytest.mark.timeout(600)
def test_rounds_are_those_of_our_engine_over_a_kill(tmp_path: Path):
    """Killed in mid-round and resumed, 24 rounds of two fragments end with the bits of our engine in one process."""
    assert replicas(tmp_path, "killed", "--dataloader.fatal", "53") == [-signal.SIGKILL] * 2
    assert replicas(tmp_path, "resumed") == [0, 0]
    program("reference", str(tmp_path))
    whole = torch.load(tmp_path / "reference.pt", weights_only=True)
    for number in range(2):
        state = torch.load(tmp_path / f"resumed {number}.pt", weights_only=True)
        assert state["agreed"].keys() == whole["agreed"].keys()
        assert all(same_bits(p, whole["agreed"][name]) for name, p in state["agreed"].items())
        tensors = {name: value for name, value in whole["inner"][number].items() if isinstance(value, torch.Tensor)}
        assert len(tensors) >= 4
        assert all(same_bits(state["inner"][name], value) for name, value in tensors.items())
        groups = [group for groups in state["groups"] for group in groups]
        assert [(group["rounds"], group["restarts"], group["lr"]) for group in groups] == [(24, 8, 0.6)] * 2


def test_settings(tmp_path: Path):
    """Settings with which replicas would differ are refused by name; torchtitan's own names are known."""
    of_titan = ["--module", "twophase.integrations.torchtitan", "--config", "llama3_debugmodel", "--outer.restart", "3"]
    cases = {
        "replica_id": [*SETTING, "--fault_tolerance.replica_id", "2"],
        "should_quantize": [*SETTING, "--fault_tolerance.should_quantize"],
        "checkpoint.enable": [*SETTING, "--checkpoint.no-enable"],
        "restart": [*SETTING, "--outer.restart", "sometimes"],
        "llama3 3": of_titan,
    }
    _, printed = program("settings", str(tmp_path), json.dumps([*cases.values()]))
    for word, line in zip(cases, printed.splitlines()[-len(cases) :], strict=True):
        assert word in line
