"""The house: the import law, the public names, the guide to the rooms, and the words.

The law itself is `.importlinter`, which import-linter checks: directions, neighbours, cycles, and where torch may not
be. ruff holds torch.distributed to its rooms (`banned-api` in pyproject.toml).
"""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import grimp
import pytest

import measure_house
import twophase

REPOSITORY = Path(__file__).parents[1]
ROOT = Path(twophase.__file__).parent
LAW = REPOSITORY / ".importlinter"
LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(config_filename={!r}, no_cache=True))"
)


def python(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with another source of the package if a folder is given."""
    start = "" if folder is None else f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)


# --- the import law -----------------------------------------------------------------------------------------------


def test_import_law():
    """The source keeps every contract of the law."""
    done = python(LINT.format(str(LAW)))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_law_can_be_broken(tmp_path: Path):
    """Every contract names the import that breaks it, also inside functions and for type checkers."""
    shutil.copytree(ROOT, tmp_path / "twophase", ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in {
        "rule.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import twophase.runs.folder",
        "optim/outer.py": "def up():\n    from twophase.theory import modes",
        "runs/folder.py": "import twophase.diloco.flat",
        "policies/base.py": "def load():\n    import torch.nn\n    import twophase.policies.adaptive",
        "attic.py": "",
    }.items():
        with (tmp_path / "twophase" / file).open("a", encoding="utf-8") as source:
            source.write(f"\n\n{line}\n")
    done = python(LINT.format(str(LAW)), tmp_path)
    assert done.returncode != 0
    assert "attic" in done.stdout
    (tmp_path / "twophase" / "attic.py").unlink()
    done = python(LINT.format(str(LAW)), tmp_path)
    assert len(re.findall(r"^.* BROKEN", done.stdout, re.MULTILINE)) == 5, done.stdout
    assert "twophase.rule -> twophase.runs.folder" in done.stdout
    assert "twophase.optim.outer -> twophase.theory.modes" in done.stdout
    assert "twophase.policies.base -> torch" in done.stdout


def test_no_string_names_a_higher_room():
    """A string of a room's code that names a room names its own or one below: import-linter sees no strings."""
    law = configparser.ConfigParser()
    law.read(LAW, encoding="utf-8")
    layers = enumerate(law["importlinter:contract:down"]["layers"].split("\n"))
    heights = {room: -number for number, layer in layers for room in layer.replace("|", " ").split()}
    higher = []
    for module, tree in measure_house.modules().items():
        room = module.partition(".")[0]
        texts = {node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        texts -= {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        rooms = re.findall(r"\btwophase\.(\w+)", "\n".join(str(text.value) for text in texts)) if room else []
        higher += [(module, name) for name in rooms if name != room and heights.get(name, -99) >= heights[room]]
    assert higher == []


def test_modules_import_from_modules():
    """Nothing but the version, or a module, is imported from a package root."""
    graph = grimp.build_graph("twophase", cache_dir=None)
    for root in ("twophase", "twophase.theory"):
        for importer in sorted(graph.find_modules_that_directly_import(root) - {"twophase"}):
            for line in graph.get_import_details(importer=importer, imported=root):
                statement = line["line_contents"].partition("  #")[0]
                assert statement in {"from twophase import __version__", "import twophase"}, importer


@pytest.mark.slow
def test_torch_free_rooms_load_no_torch():
    """A fresh interpreter that imports every module of the torch-free rooms, and the command line, has no torch."""
    law = configparser.ConfigParser()
    law.read(LAW, encoding="utf-8")
    rooms = law["importlinter:contract:torch"]["source_modules"].split()
    modules = [
        name
        for module in measure_house.paths()
        if any((name := f"twophase.{module}".rstrip(".")) == room or name.startswith(f"{room}.") for room in rooms)
    ] + ["twophase.cli.main", "twophase.__main__"]
    assert len(modules) > 80  # the list is not empty by mistake
    code = f"""
import sys
from importlib import import_module
for name in {modules!r}:
    import_module(name)
    imported = sorted({{"torch", "torchft", "transformers"}} & set(sys.modules))
    if imported:
        print(name, "loads", *imported)
        break
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_lazy_names_load_what_they_need():
    """Importing the package loads no torch, nor does a policy or a rule; the optimizer asks for it."""
    code = "import sys, twophase; twophase.Periodic, twophase.OuterRule; print('torch' in sys.modules)"
    done = python(f"{code}; sys.modules['torch'] = None; twophase.OuterSGD")
    assert (done.stdout, done.stderr.splitlines()[-1][:43]) == (
        "False\n",
        "ModuleNotFoundError: import of torch halted",
    )


# --- public names -------------------------------------------------------------------------------------------------


def test_public_names_are_listed_alike():
    """`__all__`, the table of homes and the imports for type checkers hold the same names, sorted."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for_checkers = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert twophase.__all__ == sorted(twophase._HOMES)
    assert for_checkers == twophase._HOMES


@pytest.mark.parametrize("name", twophase.__all__)
def test_public_name_is_its_home_modules(name: str):
    """Each public name loads and is the object of its home module; `dir` shows it."""
    assert getattr(twophase, name) is getattr(import_module(twophase._HOMES[name]), name)
    assert name in dir(twophase)


def test_promised_names_are_public():
    """The values, optimizer and engine that house.md promises are at the top level, with few names beside them."""
    promised = {"OuterRule", "Never", "Periodic", "Cycle", "AtRounds", "Soft", "OuterSGD", "DiLoCo", "RoundReport"}
    assert promised <= set(twophase.__all__)
    assert len(twophase.__all__) <= 20
    everything = SimpleNamespace()
    exec("from twophase import *", everything.__dict__)  # noqa: S102 - the statement under test
    assert set(twophase.__all__) <= set(vars(everything))


def test_unknown_names_are_attribute_errors():
    """A name that does not exist is an AttributeError that repeats it, so that hasattr works."""
    with pytest.raises(AttributeError, match="module 'twophase' has no attribute 'Periodical'"):
        _ = twophase.Periodical
    assert not hasattr(twophase, "Periodical")


def test_version_is_the_distributions():
    """The version in the source is the installed distribution's, and the package says that it is typed."""
    assert importlib.metadata.version("twophase") == twophase.__version__
    assert (ROOT / "py.typed").exists()


# --- the guide ----------------------------------------------------------------------------------------------------

GUIDE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")


def guide_rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table below a heading of the guide."""
    lines = GUIDE.partition(heading)[2].partition("|---|---|\n")[2].splitlines()
    return [line.strip("|").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]


def test_the_guide_has_every_room():
    """CONTRIBUTING.md's table of rooms names every room of the source once, and no other."""
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    named = [word for first, _ in guide_rows("| room | holds |") for word in re.findall(r"`(\w+)(?:/|\.py)`", first)]
    assert sorted(named) == sorted(rooms - {"__init__", "__main__", "restart"})


def test_the_guide_names_files_that_exist():
    """Each of its common changes needs at most three files, and those that are named exist."""
    rows = guide_rows("| change | files |")
    assert len(rows) == 11
    for change, files in rows:
        places = re.findall(r"`(\w+/[\w./]*)`", files)
        assert 1 <= len(places) <= 3, change
        for place in places:
            assert (ROOT / place).exists(), f"{change.strip()}: {place}"


@pytest.mark.slow
def test_names_and_words():
    """No name is on the list of those that say nothing, and no text has a subject that hides its noun."""
    for path, text in measure_house.texts():
        assert (measure_house.empty_names(text), measure_house.empty_words(text)) == ([], []), path


def test_an_empty_name_is_seen():
    """Variables, arguments, attributes and functions are looked at, underscores or not; words in any text."""
    code = "def _told(given):\n    found, self.kept = given, 1\n    return [one for one in found]"
    names = sorted(name for name, _ in measure_house.empty_names(code))
    assert names == ["_told", "found", "given", "kept", "one"]
    assert measure_house.empty_words('"""Whoever\ncomes."""  # nobody') == [("whoever", 1), ("nobody", 2)]
