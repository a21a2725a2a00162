"""The scripts of experiments/gpu: without a GPU they end in one line; their stored results agree."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import torch

from modules import load

ROOT = Path(__file__).parents[2]
STORED = ROOT / "experiments" / "results" / "gpu"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the three scripts by name."""
    monkeypatch.syspath_prepend(ROOT / "experiments" / "gpu")
    return {name: load(ROOT / "experiments" / "gpu" / f"{name}.py") for name in ("kernels", "engine", "run")}


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


def test_sum_closes(scripts: dict[str, ModuleType]) -> None:
    """The stored classes of kernels and their remainder add up to the step, as `closing_sum` makes them."""
    measured = json.loads((STORED / "probe.json").read_text())["units"]["kernels"]
    with (STORED / "probe-sum.csv").open(newline="") as file:
        stored = {row["part"]: float(row["ms"]) for row in csv.DictReader(file)}
    made = scripts["kernels"].closing_sum(measured["figures"]["step_ms"], measured["classes"], {})
    assert {row["part"]: row["ms"] for row in made} == pytest.approx(stored)


def test_curve_is_drawn(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """The stored curve is that of the stored figures, and can be drawn."""
    with (STORED / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures = json.loads((STORED / "run.json").read_text())["units"]["curve"]["figures"]
    rates = [float(row["tokens_per_second"]) for row in rows if row["tokens_per_second"]]
    assert statistics.median(rates) == pytest.approx(figures["run_tokens_per_second"])
    assert scripts["run"].main(["--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "run.png").stat().st_size > 10_000
