"""`twophase doctor` answers on any machine, whatever is missing or broken."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from twophase.cli import doctor
from twophase.cli.main import main

TORCH = json.dumps({"version": "2.13.0", "threads": 2, "devices": [], "notes": [], "cuda": None})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own process, which takes seconds, answered for."""
    monkeypatch.setattr(subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, 0, f"{TORCH}\n", ""))


def check_of(checks: list[doctor.Check], name: str) -> doctor.Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.slow
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Here, where the tests run, everything needed is there: status 0, torch asked for real, all groups answered."""
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usable"] is True
    groups = {check["group"] for check in answer["checks"]}
    assert groups == {"Python", "Machine", "twophase", "torch", "Packages", "Extras", "Commands and places"}
    version = next(c for c in answer["checks"] if (c["group"], c["name"]) == ("torch", "version"))
    assert version["found"].startswith(importlib.metadata.version("torch"))


@pytest.mark.usefixtures("quick")
def test_every_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each extra has a line with its purpose; what is missing has the exact command that installs it; status 0."""
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "optuna" else real(name))
    checks = doctor.examine()
    extras = importlib.metadata.metadata("twophase").get_all("Provides-Extra") or []
    assert [check.name for check in checks if check.group == "Extras"] == extras
    sweep = check_of(checks, "sweep")
    assert (sweep.state, sweep.remedy) == ("missing", "pip install 'twophase[sweep]'")
    assert check_of(checks, "slurm").state == "missing"  # it takes the packages of sweep
    assert set(doctor._PURPOSES) >= set(extras)
    assert main(["doctor"]) == 0
    assert "> pip install 'twophase[sweep]'" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_needed_package_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a package that every command needs, or with one too old, the status is 1 and the remedy is said."""
    real = doctor._version
    for name, version in (("numpy", ""), ("scipy", "1.2")):
        monkeypatch.setattr(doctor, "_version", lambda asked, n=name, v=version: v if asked == n else real(asked))
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert f"Broken and needed: {name}" in out
        assert f"pip install '{name}>=" in out


BROKEN = {
    "not installed": (1, "", "ModuleNotFoundError: No module named 'torch'"),
    "killed": (-11, "", ""),
    "silent": (0, "", ""),
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_torch_is_broken(monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str]) -> None:
    """A torch that is missing, dies or says nothing is told as broken, with what to do; the rest is still answered."""
    monkeypatch.setattr(subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, *answer))
    checks = doctor.examine()
    torch = next(check for check in checks if check.group == "torch")
    assert torch.state == "broken"
    assert "pip install torch" in torch.remedy
    assert check_of(checks, "temporary files").state == "ok"


@pytest.mark.usefixtures("quick")
def test_a_look_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be examined becomes a line, never an error: no metadata, no memory, no place to write."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importlib.metadata, "requires", refuse)
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    checks = doctor.examine()
    assert "could not be examined" in check_of(checks, "extras").text
    check = check_of(checks, "temporary files")
    assert check.state == "broken"
    assert "No space left" in check.text
    assert main(["doctor"]) == 1


def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and nothing is broken: runs may take the CPU."""
    answer = json.dumps(json.loads(TORCH) | {"notes": ["cuda:0 cannot be used: no kernel image"]})
    monkeypatch.setattr(subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, 0, answer, ""))
    device = check_of(doctor.examine(), "device")
    assert (device.state, device.text) == ("missing", "cuda:0 cannot be used: no kernel image")


def test_versions() -> None:
    """Versions are compared number by number; a range of another kind is not judged."""
    assert doctor._fits("2.13.0+cpu", ">=2.6")
    assert doctor._fits("3.9", ">=3.9.0")
    assert not doctor._fits("3.8.10", ">=3.9")
    assert not doctor._fits("0.3.0", "==0.2.0")
    assert doctor._fits("1.0", "<2")


def test_no_torch_in_this_process() -> None:
    """The doctor itself imports no torch, so that a broken one cannot end it."""
    code = "import sys, twophase.cli.doctor as d; list(d._install()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home())
    assert done.stdout.strip() == "False"
