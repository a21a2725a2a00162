"""torchtitan's own trainer with our rounds, in an environment of its own: the engine's rounds, SIGKILL, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import free_port
from replicas import same_bits

ROOT = Path(__file__).parents[2]
FOLDERS = os.pathsep.join([str(ROOT / "src"), str(ROOT / "experiments")])  # the tests' policies are there
PYTHON = ROOT / ".venv-torchtitan" / "bin" / "python"
LIGHTHOUSE = ROOT / ".venv" / "bin" / "torchft_lighthouse"
PROGRAM = Path(__file__).with_name("titan_replica.py")
SETTING = "--fault_tolerance.group_size 2 --outer.lr 0.6 --outer.restart 3".split()

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        not (PYTHON.exists() and LIGHTHOUSE.exists()), reason="no .venv-torchtitan: make setup-torchtitan makes it"
    ),
]


def program(folder: Path, *words: str, lighthouse: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program as torchrun would for one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHFT_LIGHTHOUSE": lighthouse}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": FOLDERS}
    command = [str(PYTHON), str(PROGRAM), str(folder), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def replicas(folder: Path, name: str, *words: str) -> list[int]:
    """Run two replicas side by side below a lighthouse of their own; their exit codes."""
    address = f"127.0.0.1:{free_port()}"
    options = ["--min_replicas", "2", "--quorum_tick_ms", "20", "--heartbeat_timeout_ms", "1000"]
    with subprocess.Popen([str(LIGHTHOUSE), "--bind", address, *options], stderr=subprocess.DEVNULL) as lighthouse:
        try:

            def one_of_them(number: int) -> subprocess.CompletedProcess[str]:
                more = ["--fault_tolerance.replica_id", str(number), "--dump_folder", str(folder), *SETTING, *words]
                return program(folder, name, *more, "--hf_assets_path", str(folder), lighthouse=f"http://{address}")

            with ThreadPoolExecutor(2) as pool:
                ends = list(pool.map(one_of_them, range(2)))
        finally:
            lighthouse.kill()
    for end in ends:
        assert end.returncode in {0, -signal.SIGKILL}, end.stderr[-3000:]
    return [end.returncode for end in ends]


def load(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.timeout(600)
def test_rounds_are_those_of_our_engine_over_a_kill(tmp_path: Path):
    """Killed in mid-round and resumed, 24 rounds of two fragments end with the bits of our engine in one process.

    torchtitan's own trainer, loop, schedule, clipping and checkpoints run, and torchft's rounds over gloo. Resumed from
    step 50 of 96, weights, inner optimizers and counters have no bit of difference.
    """
    assert replicas(tmp_path, "killed", "--dataloader.fatal", "53") == [-signal.SIGKILL] * 2
    assert replicas(tmp_path, "resumed") == [0, 0]
    end = program(tmp_path, "reference")
    assert end.returncode == 0, end.stderr[-3000:]
    whole = load(tmp_path, "reference")
    for number in range(2):
        state = load(tmp_path, f"resumed {number}")
        assert state["agreed"].keys() == whole["agreed"].keys()
        assert all(same_bits(p, whole["agreed"][name]) for name, p in state["agreed"].items())
        tensors = {name: value for name, value in whole["inner"][number].items() if isinstance(value, torch.Tensor)}
        assert len(tensors) >= 4
        assert all(same_bits(state["inner"][name], value) for name, value in tensors.items())
        groups = [group for groups in state["groups"] for group in groups]
        assert [(group["rounds"], group["restarts"], group["lr"]) for group in groups] == [(24, 8, 0.6)] * 2


def test_refusals(tmp_path: Path):
    """Settings with which replicas would differ, and policies that are not known, are refused by name."""
    cases = {
        "fault_tolerance.replica_id is 2": ["--fault_tolerance.replica_id", "2"],
        "fault_tolerance.should_quantize is True": ["--fault_tolerance.should_quantize"],
        "checkpoint.enable is False": ["--checkpoint.no-enable"],
        "sometimes": ["--outer.restart", "sometimes"],
    }
    settings = [[*SETTING, "--dump_folder", str(tmp_path), *words] for words in cases.values()]
    end = program(tmp_path, "refusals", json.dumps(settings))
    assert end.returncode == 0, end.stderr[-3000:]
    for option, line in zip(cases, end.stdout.splitlines(), strict=True):
        assert option in line


def test_names_of_torchtitan(tmp_path: Path):
    """`--config` takes torchtitan's own names, with their settings and ours."""
    lines = (
        "from torchtitan.config import ConfigManager",
        "words = '--module twophase.integrations.torchtitan --config llama3_debugmodel --outer.restart 3'.split()",
        "config = ConfigManager().parse_args(words)",
        "print(config.outer.restart, config.model_spec.name, config.fault_tolerance.semi_sync_method)",
    )
    environment = {**os.environ, "PYTHONPATH": FOLDERS}
    command = [str(PYTHON), "-c", "\n".join(lines)]
    end = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert end.stdout.splitlines()[-1] == "3 llama3 diloco"
