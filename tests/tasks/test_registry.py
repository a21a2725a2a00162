"""Tasks by name: configurations of their fields, classes of files and modules, and names that other processes find."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from twophase.cli.train import RunOptions
from twophase.config import parse, to_tree, update
from twophase.errors import UsageError
from twophase.tasks import registry
from twophase.tasks.digits import Digits
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.tasks.registry import config_class, name_of, task_class, task_of

RINGS = (Path(__file__).parents[2] / "examples" / "rings.py").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the file of a task, whose name no other test has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / f"rings_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(RINGS)
    yield file
    sys.modules.pop(file.stem, None)


def test_the_fields_of_a_task_are_values_of_its_configuration(rings: Path) -> None:
    """Each has its default and type; the name is fixed; `replicas` and what names a model are no values."""
    name = f"{rings.name}:Rings"
    assert to_tree(config_class(name)())["task"] == {"name": name, "width": 8, "noise": 0.2}
    assert {"source", "replicas"}.isdisjoint(to_tree(config_class("hf:tiny")())["task"])
    config = update(config_class(name)(), {"task.width": "16", "inner.lr": "0.5"})
    assert (task_of(config).task.width, config.inner.lr) == (16, 0.5)
    assert update(config, {"task.name": name}) == config
    for path, value in (("task.name", "digits"), ("task.width", "wide"), ("task.depth", 1)):
        with pytest.raises(UsageError, match=path):
            update(config, {path: value})


def test_options_and_their_help(rings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fields are options, and the docstrings below them the options' help."""
    config = config_class(f"{rings.name}:Rings")()
    assert parse(RunOptions, ["--task.noise", "0.5"], "train", config)[1].task.noise == 0.5  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        parse(RunOptions, ["--help"], "train", config)
    assert "Standard deviation of the radius." in capsys.readouterr().out


def test_the_task_of_a_configuration(rings: Path) -> None:
    """`lm` is the built-in model; others are made once for equal options; a field `replicas` receives their number."""
    assert task_of(config_class("lm")()) == LanguageTask(TrainConfig())
    rings.write_text(RINGS.replace("    width: int = 8", "    replicas: int = 1\n    width: int = 8"))
    kind = config_class(f"{rings.name}:Rings")
    first, again, other = (task_of(kind(seed=seed, replicas=n)) for seed, n in ((0, 6), (1, 6), (0, 2)))
    assert first is again
    assert (first.task.replicas, other.task.replicas) == (6, 2)


def test_one_class_of_a_file_however_it_is_named(rings: Path, tmp_path: Path) -> None:
    """By file, by module, by path and after an import it is the same class; its name finds it again."""
    kind = task_class(f"{rings.name}:Rings")
    assert task_class(f"{rings.stem}:Rings") is kind
    assert task_class(f"{tmp_path}/{rings.name}:Rings") is kind
    assert importlib.import_module(rings.stem).Rings is kind
    assert name_of(kind) == f"{rings.name}:Rings"
    assert name_of(importlib.import_module("toytask").Toy).endswith("toytask.py:Toy")
    assert task_class(name_of(Digits)) is Digits


def test_names_of_the_working_directory(rings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is found with Python's -P, too; a file may be called as a module that is there already."""
    (rings.parent / "json.py").write_text(RINGS)
    assert task_class("json.py:Rings").__name__ == "Rings"
    assert importlib.import_module("json").dumps(1) == "1"
    package = rings.parent / f"beside_{rings.stem}"
    package.mkdir()
    rings.rename(package / "tasks.py")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(rings.parent))])
    kind = task_class(f"{package.name}.tasks:Rings")
    assert name_of(kind) == f"{package.name}.tasks:Rings"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nowhere:Rings", "nowhere"),
        ("nowhere.py:Rings", "nowhere.py"),
        ("examples:", "class"),
        ("twophase.tasks.digits:Digit", "Digits"),
    ],
)
def test_a_task_that_is_not_there(rings: Path, name: str, part: str) -> None:
    """One line names the option, what is missing and, if there is one, the name that may have been meant."""
    (rings.parent / "examples.py").write_text(RINGS)
    with pytest.raises(UsageError, match=rf"^--task.*{part}[^\n]*$"):
        config_class(name)


@pytest.mark.parametrize(
    "field", ["width: int", "width: dict = None", "sizes: tuple[int, float] = (3, 0.5)", "name: str = 'x'"]
)
def test_a_field_that_no_option_can_hold(rings: Path, field: str) -> None:
    """A field without a default, of a type that no text means, or called `name`, is refused."""
    rings.write_text(RINGS.replace("width: int = 8", field))
    with pytest.raises(UsageError, match=rf"--task .*{field.partition(':')[0]}"):
        config_class(f"{rings.name}:Rings")


def test_an_error_of_a_file_keeps_its_traceback(rings: Path) -> None:
    """A module that the file asks for and that is not there is not taken for the task."""
    rings.write_text(RINGS.replace("import numpy as np", "import numpy_that_is_not_there as np"))
    with pytest.raises(ModuleNotFoundError) as raised:
        config_class(f"{rings.name}:Rings")
    assert raised.traceback[-1].path == rings


def test_a_file_that_trains_when_it_is_imported(rings: Path) -> None:
    """A worker imports the file, too, and would begin the sweep anew: a call from there is refused, others are not."""
    call = "from twophase.tasks.registry import forbid_import_time_calls\nforbid_import_time_calls()\n"
    rings.write_text(RINGS + call)
    with pytest.raises(UsageError, match="__main__"):
        task_class(f"{rings.name}:Rings")
    registry.forbid_import_time_calls()


def test_a_class_that_no_other_process_can_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a notebook, or one inside of a function, has no name."""

    class Inside:
        """A class inside of a function."""

    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    for kind in (type("Rings", (), {"__module__": "__main__"}), Inside):
        with pytest.raises(UsageError, match="task"):
            name_of(kind)
