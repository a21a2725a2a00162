"""The package: public names that load what they need, and limits of length; `lint-imports` holds the import law."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path

import pytest

import twophase
from extras import need

ROOT = Path(twophase.__file__).parent


def test_lengths():
    """No file of the source has over 450 lines, no function over 80."""
    long = []
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        long += [path.name] * (len(text.splitlines()) > 450)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 80:
                long.append(f"{path.name}: {node.name}")
    assert long == []


def test_public_names_are_listed_alike():
    """`__all__`, the table of homes and the imports for type checkers hold the same names, sorted."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == twophase._HOMES
    assert twophase.__all__ == sorted(twophase._HOMES)
    assert not hasattr(twophase, "Periodical")


@pytest.mark.parametrize("name", twophase.__all__)
def test_public_name_is_its_home_modules(name: str):
    """Each public name is the object of its home module; `dir` shows it."""
    assert getattr(twophase, name) is getattr(import_module(twophase._HOMES[name]), name)
    assert name in dir(twophase)


def test_lazy_names_load_what_they_need():
    """Importing the package loads no torch, nor does a policy or a rule; the optimizer asks for it."""
    code = "import sys, twophase; twophase.Periodic, twophase.OuterRule; print('torch' in sys.modules)"
    code += "; sys.modules['torch'] = None; twophase.OuterSGD"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"
    assert "ModuleNotFoundError: import of torch halted" in done.stderr


WITHOUT = """
import contextlib, copy, sys
from pathlib import Path
sys.modules["fcntl"] = sys.modules["resource"] = None
import torch, twophase, twophase.files
from runmaker import SUM, make_sweep, write_run
from twophase.cli.main import main
twophase.files._ON_WINDOWS = True
model = torch.nn.Linear(2, 2)
twophase.DiLoCo([model, copy.deepcopy(model)], twophase.OuterRule(0.7, 0.9), inner_steps=1).step()
write_run(Path("run"), SUM, [0.3])
make_sweep(Path("sweep"))
print(twophase.load("run"), main(["report", "run"]), main(["report", "sweep"]), main(["explore", "--out", "page.html"]))
with contextlib.suppress(ValueError):
    twophase.record("new", twophase.DiLoCo(model, "averaging", inner_steps=1))
for command in ("train", "sweep --axis seed 0 1", "tune", "demo"):
    print(main([*command.split(), "--out", "new"]), file=sys.stderr)
"""


def test_without_locks_as_on_windows(tmp_path: Path):
    """The engine, results and pages do without; what writes runs says in a sentence why it cannot."""
    code = [sys.executable, "-c", WITHOUT]
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(code, capture_output=True, text=True, check=False, cwd=tmp_path, env=here)
    assert done.stdout.splitlines()[-1].endswith("perplexity 8) 0 0 0"), done.stderr
    lines = done.stderr.splitlines()[-8:]
    assert lines[1::2] == ["2"] * 4
    assert all("locks" in line and "WSL" in line for line in lines[::2]), lines
    assert not (tmp_path / "new").exists()


def test_version_is_the_distributions():
    """The version in the source is the installed distribution's, and the package says that it is typed."""
    assert metadata.version("twophase") == twophase.__version__
    assert (ROOT / "py.typed").exists()


@pytest.mark.slow
def test_what_is_published(tmp_path: Path):
    """A wheel holds the package without documents; its metadata has no extra for developers."""
    need("hatchling", "hatchling is not installed; the group dev brings it")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT.parents[1], check=True
    )
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = wheel.read(about).decode()
    assert {name.split("/")[0] for name in names} == {"twophase", about.split("/")[0]}
    assert {"twophase/py.typed", "twophase/explorer/page.html", "twophase/report/uplot/LICENSE"} <= {*names}
    assert not [name for name in names if name.endswith((".md", ".png"))]
    assert "Provides-Extra: all" in text
    assert not re.search("Provides-Extra: (dev|docs)", text)
