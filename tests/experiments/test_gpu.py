"""The scripts of experiments/gpu: without a GPU they end in one line, a toy tries them, and stored results agree."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from modules import load

ROOT = Path(__file__).parents[2]
STORED = ROOT / "experiments" / "results" / "gpu"
NAMES = ("engine", "regimes", "step")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(ROOT / "experiments" / "gpu")
    yield {name: load(ROOT / "experiments" / "gpu" / f"{name}.py") for name in NAMES}
    sys.modules.pop("machine", None)


def test_without_a_gpu(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and one line that names the way to try it; nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in scripts.values():
        with pytest.raises(SystemExit) as ended:
            script.main(["--out", str(tmp_path / "out")])
        (line,) = capsys.readouterr().err.splitlines()
        assert (ended.value.code, "--tiny" in line) == (2, True)
    assert not (tmp_path / "out").exists()


def test_regimes(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A toy has a row a run, no run twice; no run begins that would end too late."""
    script = scripts["regimes"]
    monkeypatch.setattr(script, "MOST_RATES", 3)
    for seconds, most in ((440.0, 13), (0.0, 0)):
        monkeypatch.setattr(script, "SECONDS", seconds)
        assert script.main(["--tiny", "--out", str(tmp_path)]) == 0
        lines = (tmp_path / "regimes.csv").read_text().split("\n")[1:-1]
        assert len({line.rsplit(",", 3)[0] for line in lines}) == len(lines) == most
    assert "cost of doubling" in capsys.readouterr().out


def test_sum_closes(scripts: dict[str, ModuleType]) -> None:
    """The stored classes of kernels and their remainder add up to the step, as `closing_sum` makes them."""
    measured = json.loads((STORED / "probe.json").read_text())["units"]["kernels"]
    with (STORED / "probe-sum.csv").open(newline="") as file:
        stored = {row["part"]: float(row["ms"]) for row in csv.DictReader(file)}
    made = scripts["step"].closing_sum(measured["figures"]["step_ms"], measured["classes"])
    assert {row["part"]: row["ms"] for row in made} == pytest.approx(stored)
