"""Tasks by name, and the configuration of a run of each: `lm`, `digits`, `hf:MODEL`, `FILE.py:CLASS`, `module:CLASS`.

A task other than `lm` is a class. The fields of a dataclass are configuration values below `task.`: options of the
command line (`--task.width 32`) and axes of a sweep (`--axis task.width 32 64`). A field `replicas` is no such value:
it receives the run's number of replicas, for a task that shares its data out among them.

This module imports no torch; the tasks' own do.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
import typing
from collections.abc import Mapping
from functools import cache, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

from twophase.config import coerce, flatten, meant, update
from twophase.errors import UsageError
from twophase.runs.config import RunConfig
from twophase.tasks.lm.config import TrainConfig

LM, HF = "lm", "hf:"
_SHIPPED = {"digits": "twophase.tasks.digits:Digits"}
_FORMS = (LM, *_SHIPPED, "hf:MODEL", "FILE.py:CLASS", "module:CLASS")
_importing: list[str] = []
"""Modules of tasks that are being imported."""


def task_of(config: RunConfig) -> Any:
    """Return the task of a configuration, a `twophase.training.task.Task`."""
    if isinstance(config, TrainConfig):
        from twophase.tasks.lm.task import LanguageTask  # noqa: PLC0415 - torch

        return LanguageTask(config)
    from twophase.training.task import own_task  # noqa: PLC0415 - torch

    options = config.task  # type: ignore[attr-defined]
    return own_task(task_class(options.name), options, config.replicas)


def users_task(config: RunConfig) -> Any:
    """Return the task of a configuration, an `OwnTask`; None where it is a shipped one, without loading torch."""
    name = LM if isinstance(config, TrainConfig) else config.task.name  # type: ignore[attr-defined]
    return None if name in (LM, *_SHIPPED) or name.startswith(HF) else task_of(config)


def config_of(tree: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that a tree of values holds, nested or by dotted path, of whichever task."""
    values = flatten(tree)
    return update(config_class(values.get("task.name", LM))(), values)


@cache
def config_class(name: str) -> type[RunConfig]:
    """Return the class of a configuration of a task's runs: `RunConfig` with the task's values below `task`."""
    if name == LM:
        return TrainConfig
    kind = task_class(name)
    hidden = {"replicas", "source"} if name.startswith(HF) else {"replicas"}
    # The name is in config.yaml, and the only value of its type, so that no option and no axis changes it.
    options: list[tuple[str, Any, Any]] = [("name", typing.Literal[name], name)]
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if not field.init or field.name in hidden:
            continue
        hint = typing.get_type_hints(kind)[field.name]
        try:
            if field.default is dataclasses.MISSING or field.name == "name":
                raise ValueError
            json.dumps(coerce(hint, field.default))
        except (TypeError, ValueError):
            raise UsageError(
                f"--task {name}: the field {field.name} must have a default, another name than `name`, and the type "
                f"int, float, bool, str, a Literal, or a tuple of one of them, got {hint}"
            ) from None
        options.append((field.name, hint, field.default))
    made = dataclasses.make_dataclass(kind.__name__, options, frozen=True)
    # --help finds the docstrings of the fields in its source, by the line since Python 3.13
    update_wrapper(made, kind, ("__module__", "__doc__", "__firstlineno__"), ())
    part = dataclasses.make_dataclass("TaskPart", [("task", made, made())], frozen=True)
    # Fields come in reverse order of the bases: the task first, as config.yaml files have it.
    return dataclasses.make_dataclass("TaskRunConfig", [], bases=(RunConfig, part), frozen=True)


def task_class(name: str) -> type:
    """Return the class of a task, or raise a UsageError where there is none; what its file raises comes through."""
    place = "twophase.tasks.hf:HuggingFace" if name.startswith(HF) and name != HF else _SHIPPED.get(name, name)
    module, _, kind = place.rpartition(":")
    if not module:
        raise UsageError(f"--task: must be one of {', '.join(_FORMS)}, got {name}{meant(name, _FORMS)}")
    found = _module(module)
    if not inspect.isclass(getattr(found, kind, None)):
        raise UsageError(f"--task {name}: {module} has no class {kind}{meant(kind, vars(found))}")
    return getattr(found, kind)


@cache
def _module(name: str) -> ModuleType:
    """Import a module by its name, or a file; a name also means a module in the working directory."""
    file, is_file = Path(name).absolute(), name.endswith(".py")
    if is_file and not file.is_file():
        raise UsageError(f"--task {name}: must be a file, there is no {file}")
    # What lies beside it can be imported, as in `python FILE`; last, so that it hides no installed module.
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    _importing.append(name)
    try:
        return _load(file) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):  # and not one that its file imports
            raise UsageError(f"--task {name}: must be a module, there is no {error.name}") from None
        raise
    finally:
        _importing.pop()


def _load(file: Path) -> ModuleType:
    for loaded in (sys.modules.get(file.stem), sys.modules["__main__"]):  # else there would be two of each class
        if loaded and Path(getattr(loaded, "__file__", None) or "").resolve() == file.resolve():
            return loaded
    unique = file.stem if file.stem not in sys.modules else f"{file.stem} ({file})"
    spec = importlib.util.spec_from_file_location(unique, file)
    assert spec and spec.loader  # noqa: PT018
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)  # dataclasses look their types up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def forbid_import_time_calls() -> None:
    """Refuse a call that a task's file makes while it is imported: each worker of a sweep would begin it anew."""
    if _importing:
        remedy = 'put its calls of twophase below `if __name__ == "__main__":`'
        raise UsageError(f"--task {_importing[-1]}: its file trains when it is imported; {remedy}")


def name_of(kind: type) -> str:
    """Return the name by which another process finds a task's class; a UsageError for one in a function or notebook."""
    file = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "").absolute()
    if "." in kind.__qualname__ or not file.is_file():
        raise UsageError(f"task: {kind.__qualname__} must be a class at the top of a file, for workers to import it")
    if "." in kind.__module__:
        return f"{kind.__module__}:{kind.__name__}"
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{kind.__name__}"
