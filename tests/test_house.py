"""The import law of the house: which room may import which, where torch may not be, and the public names.

The law is read off the source text, so it also covers imports inside functions. A new room must be given a place in
`MAY_IMPORT`: that is the deliberate step in which a wall is moved.
"""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import measure_house
import twophase

ROOT = Path(twophase.__file__).parent
NAME = "twophase"

LEVELS: tuple[frozenset[str], ...] = tuple(
    frozenset(words.split())
    for words in (
        "rule",
        "base policies",
        "theory optim",
        "diloco",
        "elastic runs text",
        "training",
        "tasks",
        "sweep",
        "judge advice figures recipes",
        "spectrum",
        "studies report explorer",
        "cli",
        "__main__",
    )
)
"""The rooms from the cellar up: each may import those below its own level, and no neighbour."""
NEVER = {("optim", "theory"), ("diloco", "theory"), ("training", "theory"), ("tasks", "theory"), ("runs", "diloco")}
"""Rooms that may not import one below them: theory and torch meet in tests and studies alone."""
DOWN = "imports go down only: " + " > ".join(", ".join(sorted(level)) for level in reversed(LEVELS))
TORCH_FREE = {
    "rule",
    "policies",
    "base",
    "theory",
    "runs",
    "text",
    "judge",
    "advice",
    "figures",
    "recipes",
    "explorer",
    "report",
}
TORCH_FREE_MODULES = {
    f"{NAME}.{name}"
    for name in (
        "training.config sweep.grid sweep.plan sweep.queue sweep.trials sweep.run sweep.work sweep.slurm sweep.crew "
        "sweep.table sweep.history cli.doctor cli.report cli.explore cli.data"
    ).split()
}
TORCH = {"torch", "torchft", "transformers"}


# --- reading the source -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported module, as a statement in `module` names it."""

    module: str
    line: int
    target: str
    names: tuple[str, ...]
    """What is taken from it; empty for `import target`."""
    runs: bool
    """Whether it is executed at all (false under `if TYPE_CHECKING:`)."""
    at_import: bool
    """Whether it is executed when the module is imported (false inside functions)."""


@dataclass(frozen=True)
class House:
    """The modules of a package and their imports."""

    trees: dict[str, ast.Module]
    packages: set[str]

    @classmethod
    def read(cls, root: Path) -> House:
        """Parse every module under `root`, whatever exists."""
        trees, packages = {}, set()
        for path in sorted(root.rglob("*.py")):
            parts = [NAME, *path.relative_to(root).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
                packages.add(".".join(parts))
            trees[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
        return cls(trees, packages)

    def imports(self) -> Iterator[Import]:
        """Every import of every module, wherever it stands."""
        for module, tree in self.trees.items():
            yield from self._walk(module, tree, runs=True, at_import=True)

    def _walk(self, module: str, node: ast.AST, *, runs: bool, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part in child.body:
                    yield from self._walk(module, SimpleBlock(part), runs=False, at_import=False)
                for part in child.orelse:
                    yield from self._walk(module, SimpleBlock(part), runs=runs, at_import=at_import)
                continue
            for target, names in self._targets(module, child):
                yield Import(module, getattr(child, "lineno", 0), target, names, runs, at_import)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from self._walk(module, child, runs=runs, at_import=at_import and not inside)

    def _targets(self, module: str, node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if module in self.packages else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            names = tuple(alias.name for alias in node.names)
            modules = [name for name in names if f"{base}.{name}" in self.trees]
            for name in modules:  # `from package import module` is an import of the module
                yield f"{base}.{name}", ()
            rest = tuple(name for name in names if name not in modules)
            if rest:
                yield base, rest
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for word in node.args[:1]:
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    yield word.value, ()

    def room(self, module: str) -> str:
        """The room of a module: its first name below the package; `restart` is the door to the policies."""
        parts = module.split(".")[1:]
        return "policies" if parts[:1] == ["restart"] else parts[0] if parts else "__init__"

    def is_torch_free(self, module: str) -> bool:
        """Whether a module may not reach torch."""
        return self.room(module) in TORCH_FREE or module in TORCH_FREE_MODULES

    def is_inside(self, target: str) -> bool:
        """Whether a name is this package or inside it."""
        return target == NAME or target.startswith(f"{NAME}.")


def SimpleBlock(statement: ast.stmt) -> ast.Module:  # noqa: N802 - a node in all but name
    """A statement as a node whose only child it is."""
    return ast.Module(body=[statement], type_ignores=[])


# --- the law ------------------------------------------------------------------------------------------------------


def breaches_of_direction(house: House) -> Iterator[str]:
    """Imports that go up or sideways, also those for type checkers."""
    for imported in house.imports():
        here = house.room(imported.module)
        if not house.is_inside(imported.target) or here == "__init__":
            continue
        there = house.room(imported.target)
        if here not in RANKS:
            yield f"{imported.module}: the room {here!r} has no place in the law; give it one in LEVELS of {__file__}"
        elif there not in {here, "__init__"} and not may_import(here, there):
            yield f"{imported.module}:{imported.line} imports {imported.target}, but {DOWN}"


RANKS = {room: rank for rank, level in enumerate(LEVELS) for room in level}


def may_import(here: str, there: str) -> bool:
    """Whether a room may import another one."""
    return RANKS.get(there, len(LEVELS)) < RANKS[here] and (here, there) not in NEVER


def breaches_of_modules(house: House) -> Iterator[str]:
    """Imports from package roots; only the version may come from there."""
    for imported in house.imports():
        if imported.target not in house.packages or not house.is_inside(imported.target) or imported.module == NAME:
            continue
        if imported.target == NAME and imported.names == ("__version__",):
            continue
        if imported.target == NAME and not imported.names and uses_only_version(house.trees[imported.module]):
            continue
        what = f"{', '.join(imported.names)} from {imported.target}" if imported.names else imported.target
        yield f"{imported.module}:{imported.line} imports {what}, but modules import from modules, not package roots"


def uses_only_version(tree: ast.Module) -> bool:
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == NAME]
    return bool(used) and all(node.attr == "__version__" for node in used)


def breaches_of_torch_freedom(house: House) -> Iterator[str]:
    """Paths by which a torch-free room reaches torch, through imports in functions too."""
    edges = runtime_edges(house, at_import_only=False)
    for module in sorted(house.trees):
        if house.is_torch_free(module) and module != f"{NAME}.runs.trackers":  # TensorBoard's writer is torch's
            path = path_to_torch(house, module, edges)
            if path:
                yield f"{' > '.join(path)}: {module} imports no torch, directly or through others"


def breaches_of_quick_help(house: House) -> Iterator[str]:
    """Paths by which importing the command line, or the package, imports torch."""
    edges = runtime_edges(house, at_import_only=True)
    for module in (NAME, f"{NAME}.cli.main", f"{NAME}.__main__"):
        path = path_to_torch(house, module, edges) if module in house.trees else []
        if path:
            yield f"{' > '.join(path)}: the command line answers --help without torch; import it inside the function"


def breaches_of_distributed(house: House) -> Iterator[str]:
    """Uses of torch.distributed outside diloco, except that the program joins the group that torchrun started."""
    for module, tree in house.trees.items():
        if house.room(module) in {"diloco", "elastic"} or module == f"{NAME}.training.session":
            continue
        lines = {
            imported.line
            for imported in house._walk(module, tree, runs=True, at_import=True)
            if imported.target.startswith("torch.distributed")
            or (imported.target == "torch" and "distributed" in imported.names)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                lines.add(node.lineno)
        for line in sorted(lines):
            yield f"{module}:{line} uses torch.distributed, which lives in diloco and elastic only"


def breaches_of_order(house: House) -> Iterator[str]:
    """Cycles of imports, those inside functions and for type checkers included."""
    edges: dict[str, set[str]] = {module: set() for module in house.trees}
    for imported in house.imports():
        if imported.module not in house.packages and imported.target not in house.packages:
            edges[imported.module].add(imported.target)
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> Iterator[str]:
        if module in trail:
            yield f"{' > '.join([*trail[trail.index(module) :], module])}: no import cycle"
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                yield from visit(target, [*trail, module])
            done.add(module)

    for module in sorted(house.trees):
        yield from visit(module, [])


def runtime_edges(house: House, *, at_import_only: bool) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {module: set() for module in house.trees}
    for imported in house.imports():
        if imported.runs and (imported.at_import or not at_import_only) and imported.target != NAME:
            edges[imported.module].add(imported.target)
    return edges


def path_to_torch(house: House, start: str, edges: dict[str, set[str]]) -> list[str]:
    """The shortest chain of imports from a module to torch; importing a module also runs its packages."""
    trails = [[start]]
    seen = {start}
    for trail in trails:  # grows while we walk: breadth first
        here = trail[-1]
        targets = set(edges.get(here, ()))
        if house.is_inside(here):
            parts = here.split(".")
            targets |= {".".join(parts[:n]) for n in range(2, len(parts))}
        for target in sorted(targets):
            if target.split(".")[0] in TORCH:
                return [*trail, target]
            if target in house.trees and target not in seen:
                seen.add(target)
                trails.append([*trail, target])
    return []


LAWS = [
    breaches_of_direction,
    breaches_of_modules,
    breaches_of_torch_freedom,
    breaches_of_quick_help,
    breaches_of_distributed,
    breaches_of_order,
]


@pytest.fixture(scope="module")
def house() -> House:
    return House.read(ROOT)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("breaches_of_"))
def test_law(house: House, law: Callable[[House], Iterator[str]]):
    """The source as it is breaks no sentence of the law; the message says which import broke which."""
    assert not list(law(house)), "\n".join(["", *law(house)])


def test_the_whole_house_is_read(house: House):
    """The law is about this package as it is installed here: known modules and known imports are imported."""
    assert {"twophase.rule", "twophase.optim.outer", "twophase.diloco.engine", "twophase.training.config"} <= set(
        house.trees
    )
    targets = {(imported.module, imported.target) for imported in house.imports()}
    assert ("twophase.diloco.engine", "twophase.optim.outer") in targets
    assert ("twophase.base.config", "tyro") in targets


# --- the law can be broken ----------------------------------------------------------------------------------------

BREACHES = [
    ("theory/modes.py", "import twophase.optim.outer", breaches_of_direction, "imports go down only"),
    ("optim/outer.py", "from twophase.theory.modes import regime", breaches_of_direction, "imports go down only"),
    ("diloco/flat.py", "from twophase.theory.modes import regime", breaches_of_direction, "imports go down only"),
    ("optim/outer.py", "from ..diloco import engine", breaches_of_direction, "imports twophase.diloco.engine"),
    ("diloco/flat.py", "def f():\n    from twophase.tasks.lm.model import Llama", breaches_of_direction, ":2 imports"),
    ("runs/folder.py", "from twophase.training.config import TrainConfig", breaches_of_direction, "imports go down"),
    ("runs/folder.py", "from twophase.diloco.flat import f", breaches_of_direction, "imports go down only"),
    ("recipes/demo.py", "from twophase.judge.pairs import f", breaches_of_direction, "imports go down only"),
    ("rule.py", "from twophase.restart import Never", breaches_of_direction, "imports go down only"),
    (
        "rule.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from twophase.restart import Never",
        breaches_of_direction,
        ":3 imports twophase.restart",
    ),
    ("attic.py", "import twophase.rule", breaches_of_direction, "'attic' has no place in the law"),
    ("optim/outer.py", "from twophase import Periodic", breaches_of_modules, "not package roots"),
    ("optim/outer.py", "import twophase\nx = twophase.Periodic", breaches_of_modules, "not package roots"),
    ("training/train.py", "from twophase.diloco import DiLoCo", breaches_of_modules, "DiLoCo from twophase.diloco"),
    ("rule.py", "import torch", breaches_of_torch_freedom, "twophase.rule > torch"),
    ("base/config.py", "def f():\n    import torch.nn", breaches_of_torch_freedom, "twophase.base.config > torch.nn"),
    (
        "base/config.py",
        "from importlib import import_module\nimport_module('torch')",
        breaches_of_torch_freedom,
        "> torch",
    ),
    (
        "training/__init__.py",
        "import torch",
        breaches_of_torch_freedom,
        "twophase.training.config > twophase.training > torch",
    ),
    (
        "recipes/demo.py",
        "from twophase.optim import functional",
        breaches_of_torch_freedom,
        "twophase.recipes.demo > twophase.optim.functional > torch",
    ),
    ("cli/main.py", "from twophase.optim import functional", breaches_of_quick_help, "--help without torch"),
    ("__init__.py", "from twophase.optim.functional import f", breaches_of_quick_help, "twophase > twophase.optim"),
    (
        "training/train.py",
        "import torch.distributed as dist",
        breaches_of_distributed,
        "twophase.training.train:1 uses",
    ),
    ("training/train.py", "from torch import distributed", breaches_of_distributed, "training.train:1 uses"),
    ("optim/outer.py", "import torch\nx = torch.distributed.is_initialized()", breaches_of_distributed, "outer:2 uses"),
    (
        "theory/modes.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from twophase.theory import rates",
        breaches_of_order,
        "twophase.theory.modes > twophase.theory.rates > twophase.theory.modes",
    ),
    (
        "restart.py",
        "def f():\n    from twophase.cli.main import main",
        breaches_of_order,
        "twophase.cli.main > twophase.restart > twophase.cli.main",
    ),
]


@pytest.mark.parametrize(
    ("file", "text", "law", "message"), BREACHES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_breach_is_named(tmp_path: Path, file: str, text: str, law: Callable[[House], Iterator[str]], message: str):
    """In a small house that keeps the law, each of these lines breaks the sentence that is about it, and is named."""
    empty = (
        "__init__ rule restart base/__init__ base/config theory/__init__ optim/__init__ optim/outer diloco/__init__ "
        "diloco/flat training/__init__ training/train tasks/__init__ tasks/lm/__init__ recipes/__init__ recipes/demo "
        "runs/__init__ runs/folder judge/__init__ judge/pairs theory/modes cli/__init__"
    )
    sound = {
        **dict.fromkeys([f"{name}.py" for name in empty.split()], ""),
        "theory/rates.py": "import twophase.theory.modes",
        "optim/functional.py": "import torch",
        "diloco/engine.py": "import torch.distributed",
        "tasks/lm/model.py": "import torch",
        "training/config.py": "from twophase.rule import Form",
        "cli/main.py": "import twophase.restart\ndef f(): import twophase.tasks.lm.model",
    }
    for name, content in sound.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    before = House.read(tmp_path)
    assert [breach for each in LAWS for breach in each(before)] == []
    (tmp_path / file).write_text(text, encoding="utf-8")
    after = list(law(House.read(tmp_path)))
    assert any(message in breach for breach in after), after


# --- what really happens ------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


QUICK = {NAME, f"{NAME}.cli.main", f"{NAME}.__main__"}


def test_torch_free_rooms_load_no_torch(house: House):
    """A fresh interpreter that imports every module of the torch-free rooms, and the command line, has no torch."""
    modules = [module for module in house.trees if house.is_torch_free(module) or module in QUICK]
    code = f"""
import sys
from importlib import import_module
for name in {modules!r}:
    import_module(name)
    imported = sorted({TORCH!r} & set(sys.modules))
    if imported:
        print(name, "loads", *imported)
        break
"""
    assert len(modules) >= 5
    assert python(code) == ""


def test_lazy_names_load_what_they_need():
    """Importing the package loads no torch, nor does a policy or a rule; the optimizer does."""
    code = "import sys, twophase; print('torch' in sys.modules); {}; print('torch' in sys.modules)"
    assert python(code.format("twophase.Periodic, twophase.OuterRule")).split() == ["False", "False"]
    assert python(code.format("twophase.OuterSGD")).split() == ["False", "True"]


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
    """The values, optimizer and engine that house.md promises are at the top level."""
    promised = {"OuterRule", "Never", "Periodic", "Cycle", "AtRounds", "Soft", "OuterSGD", "DiLoCo", "RoundReport"}
    assert promised <= set(twophase.__all__)
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

GUIDE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def guide_rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table below a heading of the guide."""
    lines = GUIDE.partition(heading)[2].partition("|---|---|\n")[2].splitlines()
    return [line.strip("|").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]


def test_the_guide_has_every_room(house: House):
    """CONTRIBUTING.md's table of rooms names every room of the source once, and no other."""
    named = [word for first, _ in guide_rows("| room | holds |") for word in re.findall(r"`(\w+)(?:/|\.py)`", first)]
    assert sorted(named) == sorted({house.room(module) for module in house.trees} - {"__init__", "__main__"})


def test_the_guide_names_files_that_exist():
    """Each of its ten common changes needs at most three files, and those that are named exist."""
    rows = guide_rows("| change | files |")
    assert len(rows) == 10
    for change, files in rows:
        places = re.findall(r"`(\w+/[\w./]*)`", files)
        assert 1 <= len(places) <= 3, change
        for place in places:
            assert (ROOT / place).exists(), f"{change.strip()}: {place}"


STILL_UNCLEAR = {"recipes", "studies"}
"""Rooms with names that are still to be replaced."""


def test_names_and_words(house: House):
    """No name is on the list of those that say nothing, and no text has a subject that hides its noun."""
    for module, tree in house.trees.items():
        if house.room(module) in STILL_UNCLEAR:
            continue
        file = ROOT.joinpath(*module.split(".")[1:])
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        assert measure_house.empty_names(tree) == [], module
        assert measure_house.empty_words(file.read_text(encoding="utf-8")) == [], module


def test_an_empty_name_is_seen():
    """Variables, arguments, attributes and functions are looked at, underscores or not; words in any text."""
    code = "def _told(given):\n    found, self.kept = given, 1\n    return [one for one in found]"
    names = sorted(name for name, _ in measure_house.empty_names(ast.parse(code)))
    assert names == ["_told", "found", "given", "kept", "one"]
    assert measure_house.empty_words('"""Whoever\ncomes."""  # nobody') == [("whoever", 1), ("nobody", 2)]
