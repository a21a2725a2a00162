"""`twophase methods`: the shelf as it is, and the page made from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twophase.cli.main import main
from twophase.shelf.base import SLOTS
from twophase.shelf.text import registered

PAGE = Path(__file__).parents[2] / "docs" / "shelf.md"


def test_page_is_the_registry_s(tmp_path: Path) -> None:
    """docs/shelf.md holds the tables that `twophase methods --into docs/shelf.md` writes."""
    copy = tmp_path / "shelf.md"
    shutil.copy(PAGE, copy)
    assert main(["methods", "--into", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_value_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a value, and a value by itself with the option that takes it."""
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out
    for slot in SLOTS:
        for name, cls in registered(slot).items():
            assert f"  {name} " in lines
            assert cls.equation
            assert main(["methods", name, "--slot", slot]) == 0
            assert f"--outer.{slot} {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["adamx"], ["--slot", "rule"], ["adamw", "--slot", "filter"]])
def test_unknown_names(words: list[str]) -> None:
    """A name that no slot has, or not this one, is a mistake."""
    assert main(["methods", *words]) == 2


def test_values_of_the_user_s_modules_are_listed(tmp_path: Path) -> None:
    """A module that TWOPHASE_SHELF names adds its values to the list; one that is not there is named, with status 2."""
    text = "@register('cubic')\n@dataclass(frozen=True)\nclass Cubic(Method):\n    equation = 'x <- x - g^3'\n"
    head = "from dataclasses import dataclass\n\nfrom twophase.shelf.base import Method, register\n\n\n"
    (tmp_path / "cubes.py").write_text(head + text, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *sys.path])

    def listed(module: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TWOPHASE_SHELF": module, "PYTHONPATH": path}
        command = [sys.executable, "-m", "twophase", "methods"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert "  cubic " in listed("cubes").stdout
    missing = listed("spheres")
    assert missing.returncode == 2
    assert "spheres" in missing.stderr
    assert "Traceback" not in missing.stderr
