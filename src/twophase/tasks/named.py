"""Tasks by name, and the configuration of a run of each. This module imports no torch; the tasks' own do.

| name                            | trains                                                          |
|---------------------------------|-----------------------------------------------------------------|
| `lm`                            | the built-in Llama (`twophase.tasks.lm`)                        |
| `hf:NAME_OR_PATH`               | any causal language model of transformers (`twophase.tasks.hf`) |
| `digits`                        | a small classifier of scikit-learn's digits                     |
| `FILE.py:CLASS`, `MODULE:CLASS` | your task                                                       |

A task other than `lm` is a class. The fields of a dataclass are configuration values below `task.`: options of the
command line (`--task.width 32`) and axes of a sweep (`--axis task.width 32 64`). A field `replicas` is no such value:
it receives the run's number of replicas, for a task that shares its data out among them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from twophase.base.config import FIXED, UsageError, from_tree
from twophase.number import did_you_mean
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.config import check as check_language
from twophase.training.config import RunConfig
from twophase.training.config import check as check_run

LM, HF, TASK, REPLICAS = "lm", "hf:", "task", "replicas"
_SHIPPED = {"digits": ("twophase.tasks.digits", "Digits")}
_HF_HOME = ("twophase.tasks.hf", "HuggingFace")
_KINDS = (bool, int, float, str)
"""Types of values that an option, a file and an axis can hold."""


_under_import: list[str] = []
"""Tasks whose file is being imported."""


def check_is_called_by_a_program() -> None:
    """Refuse a call that a task's file makes while it is imported, as by a worker process."""
    if _under_import:
        raise UsageError(
            f"--task {_under_import[-1]}: its file trains when it is imported, and every worker process imports it; "
            'put its calls of twophase below `if __name__ == "__main__":`'
        )


def task_class(name: str) -> type:
    """Return the class of a task.

    Raises:
        UsageError: a name of another form, a file or module that is missing or fails, or a class that it lacks.
    """
    if name.startswith(HF) and name != HF:
        return _attribute(name, *_HF_HOME)
    if name in _SHIPPED:
        return _attribute(name, *_SHIPPED[name])
    module, colon, kind = name.rpartition(":")
    if not (colon and module and kind.isidentifier()):
        forms = [LM, *_SHIPPED, "hf:NAME_OR_PATH", "FILE.py:CLASS", "MODULE:CLASS"]
        raise UsageError(f"--task {name}: there is no such task; {did_you_mean(name, forms)}")
    return _attribute(name, module, kind)


def _attribute(name: str, module: str, kind: str) -> type:
    member = getattr(_module(name, module), kind, None)
    if not inspect.isclass(member):
        classes = [key for key, value in vars(_module(name, module)).items() if inspect.isclass(value)]
        raise UsageError(f"--task {name}: {module} has no class {kind}; {did_you_mean(kind, classes, 'name one')}")
    return member


@cache
def _module(name: str, module: str) -> ModuleType:
    """Import a module by its name, or a file; a name also means a file or package in the working directory."""
    file = Path(module if module.endswith(".py") else f"{module}.py")
    _under_import.append(name)
    try:
        if not (module.endswith(".py") or file.is_file()):
            # A package of the working directory, which a worker process does not search; last, as below.
            if Path(module.partition(".")[0]).is_dir() and (folder := str(Path.cwd())) not in sys.path:
                sys.path.append(folder)
            return importlib.import_module(module)
        if not file.is_file():
            raise UsageError(f"--task {name}: there is no file {file.absolute()}; give its path")
        for loaded in (sys.modules.get(file.stem), sys.modules["__main__"]):
            if (path := getattr(loaded, "__file__", None)) and Path(path).exists() and file.samefile(path):
                assert loaded is not None
                return loaded
        # A file may have the name of a module that is there already.
        unique = file.stem if file.stem not in sys.modules else f"{file.stem} ({file.absolute()})"
        spec = importlib.util.spec_from_file_location(unique, file.absolute())
        assert spec is not None
        assert spec.loader is not None
        # Files next to it can be imported, as in `python FILE`; last, so that it hides no installed module.
        if (folder := str(file.absolute().parent)) not in sys.path:
            sys.path.append(folder)
        loaded = sys.modules[unique] = importlib.util.module_from_spec(spec)  # dataclasses look their types up there
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[unique]
            raise
    except UsageError:
        raise
    except Exception as error:  # of the file's own code
        raise UsageError(
            f"--task {name}: {module} cannot be imported ({type(error).__name__}: {error}); correct it, or install "
            "what it needs"
        ) from error
    finally:
        _under_import.pop()
    return loaded


def name_of(kind: type) -> str:
    """Return the name by which another process finds a task's class.

    Raises:
        UsageError: a class that is defined in a notebook or inside of a function.
    """
    for name, home in _SHIPPED.items():
        if (kind.__module__, kind.__name__) == home:
            return name
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    file = file if file and Path(file).exists() else None  # of a program from a pipe it is <stdin>
    if "." in kind.__qualname__ or module is None or (kind.__module__ == "__main__" and file is None):
        raise UsageError(
            f"the task {kind.__qualname__} cannot be found by another process; define its class at the top of a file"
        )
    if file is None or "." in kind.__module__:
        return f"{kind.__module__}:{kind.__name__}"
    path = Path(file).absolute()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{kind.__name__}"


@cache
def config_class(name: str) -> type[RunConfig]:
    """Return the class of a configuration of a task's runs: `RunConfig` with the task's values below `task`.

    Raises:
        UsageError: as `task_class`, or a field without a default, or of a type that no option can hold or that
            cannot be read.
    """
    if name == LM:
        return TrainConfig
    kind = task_class(name)
    options = dataclasses.make_dataclass(
        kind.__name__,
        [("name", str, dataclasses.field(default=name, metadata=FIXED)), *_fields(name, kind)],
        namespace={"__doc__": inspect.getdoc(kind) or "", "__module__": kind.__module__},
        frozen=True,
    )
    part = dataclasses.make_dataclass(
        "TaskPart", [(TASK, options, dataclasses.field(default_factory=options))], frozen=True
    )
    # Fields come in reverse order of the bases: the task first, as config.yaml files have it.
    return dataclasses.make_dataclass("TaskRunConfig", [], bases=(RunConfig, part), frozen=True)


def _fields(name: str, kind: type) -> list[tuple[str, Any, Any]]:
    """Return a task's fields as those of its values."""
    if not dataclasses.is_dataclass(kind):
        return []
    try:
        hints = typing.get_type_hints(kind)
    except Exception as error:  # of the class's own annotations
        raise UsageError(
            f"--task {name}: an annotation of {kind.__name__} cannot be read ({type(error).__name__}: {error}); import "
            "what it names outside of `if TYPE_CHECKING:`"
        ) from error
    fields = []
    for field in dataclasses.fields(kind):
        if not field.init or field.name == REPLICAS or (name.startswith(HF) and field.name == "source"):
            continue
        hint, default = hints[field.name], field.default
        parts = [part for part in typing.get_args(hint) if part is not Ellipsis]
        literal = typing.get_origin(hint) is typing.Literal
        is_list = typing.get_origin(hint) is tuple and len(set(parts)) == 1 and parts[0] in _KINDS
        fits = hint in _KINDS or literal or is_list
        if default is dataclasses.MISSING or not fits or field.name == "name":
            raise UsageError(
                f"--task {name}: its field {field.name} must have a default, another name than `name`, and a type. "
                "Types are int, float, bool, str, a Literal, or a tuple of one of these"
            )
        fields.append((field.name, hint, dataclasses.field(default=default, metadata=field.metadata)))
    return fields


def config_of(tree: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that a tree holds, of whichever task.

    Raises:
        UsageError: as `config_class`, or values that the task does not have.
    """
    part = tree.get(TASK)
    name = part.get("name") if isinstance(part, Mapping) else LM
    return from_tree(config_class(str(name)), tree)


def check(config: RunConfig) -> RunConfig:
    """Return a configuration if it can be run.

    Raises:
        UsageError: naming the option, its value, the range and the remedy.
    """
    if isinstance(config, TrainConfig):
        return check_language(config)
    check_run(config)
    options: Any = config.task  # type: ignore[attr-defined]
    for field in dataclasses.fields(config.compute):
        if getattr(config.compute, field.name) != field.default:
            option = f"--compute.{field.name.replace('_', '-')}"
            raise UsageError(f"{option} is for --task {LM} alone; with --task {options.name} leave it out")
    if config.repeat and not takes_repeat(config):
        raise UsageError(f"--repeat is for texts and tokens; with --task {options.name} leave it out")
    if type(config) is not config_class(options.name):
        raise UsageError(f"--task.name {options.name}: the task is named by --task, once for all runs of a sweep")
    instance_of(options, config.replicas)
    return config


def takes_repeat(config: Any) -> bool:
    """Return whether a configuration's task has data that may be read more than once where that is allowed."""
    return isinstance(config, TrainConfig) or hasattr(task_class(config.task.name), "check_data")


def instance_of(options: Any, replicas: int) -> Any:
    """Return a task as its class makes it.

    Args:
        options: the `task` of a configuration that is not a `TrainConfig`.
        replicas: number of replicas of the run.

    Raises:
        UsageError: values that the class refuses.
    """
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    name = values.pop("name")
    if name.startswith(HF):
        values["source"] = name.removeprefix(HF)
    kind = task_class(name)
    if dataclasses.is_dataclass(kind) and any(field.name == REPLICAS for field in dataclasses.fields(kind)):
        values[REPLICAS] = replicas
    try:
        return kind(**values)
    except UsageError:
        raise
    except Exception as error:  # of the class's own code
        raise UsageError(
            f"--task {name}: {kind.__name__} cannot be made ({type(error).__name__}: {error}); give it other values "
            "(--task.…), or correct the class"
        ) from error
