"""torchtitan's own trainer with our rounds, in an environment of its own: the engine's rounds, SIGKILL, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

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


@pytest.mark.timeout(600)
def test_a_training_over_a_kill_and_settings(tmp_path: Path):
    """Killed in mid-round and resumed, 24 rounds of two fragments end with the bits of our engine in one process.

    Settings with which replicas would differ are refused by name; torchtitan's own names are known.
    """
    of_titan = ["--module", "twophase.integrations.torchtitan", "--config", "llama3_debugmodel", "--outer.restart", "3"]
    cases = {
        "replica_id": [*SETTING, "--fault_tolerance.replica_id", "2"],
        "should_quantize": [*SETTING, "--fault_tolerance.should_quantize"],
        "restart": [*SETTING, "--outer.restart", "sometimes"],
        "llama3 3": of_titan,
    }
    folder = str(tmp_path)

    def pair(name: str, url: str, *words: str) -> list[Any]:
        more = [*SETTING, *words, "--dump_folder", folder, "--hf_assets_path", folder, "--fault_tolerance.replica_id"]
        variables = [place | {"TORCHFT_LIGHTHOUSE": url} for place in (*places(1), *places(1))]
        return [["replica", [name, folder, [*more, str(n)]], env] for n, env in enumerate(variables)]

    with lighthouse(2) as first, lighthouse(2) as second:
        alone = [["reference", [folder], places(1)[0]], ["settings", [folder, [*cases.values()]], places(1)[0]]]
        jobs = [pair("killed", first, "--dataloader.fatal", "53"), pair("resumed", second), alone]
        command = [str(PYTHON), str(Path(__file__).with_name("titan_replica.py")), json.dumps(jobs)]
        environment = places(1)[0] | {"PYTHONPATH": FOLDERS}
        end = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert end.returncode == 0, end.stderr[-3000:]
    assert json.loads(end.stdout.splitlines()[-1]) == [[-signal.SIGKILL] * 2, [0, 0], [0, 0]], end.stderr[-3000:]
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
    for word, said in zip(cases, json.loads((tmp_path / "settings.json").read_text()), strict=True):
        assert word in said
