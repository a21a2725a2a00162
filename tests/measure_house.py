"""Measure the house: lines, files, cycles of imports, and names that say nothing. Last line: one JSON object.

    python tests/measure_house.py

`lines_outer_sgd`, `lines_engine` and `lines_sweep` count a module and all that it imports from the package, directly or
not: what has to be understood to understand it.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "twophase"
SOURCE = ROOT / "src" / PACKAGE

EMPTY_NAMES = frozenset({"found", "one", "known", "own", "left", "kept", "ours", "held", "told", "given"})
"""Names that say nothing about what they hold."""
EMPTY_WORDS = frozenset({"who", "whoever", "whom", "somebody", "nobody", "everybody", "anybody"})
"""Subjects that hide the noun of the field: rank, replica, checkpoint, job."""
BY_NAME = frozenset({"cli.main", "studies.study"})
"""Modules that load another module of their room by the name that a user gives."""
ENTRIES = {
    "lines_outer_sgd": "optim.outer",
    "lines_engine": "diloco.engine",
    "lines_sweep": "sweeps.run",
}
LIMITS = {
    "source_lines": 27_000,
    "test_lines": 27_000,
    "median_file": 210,
    "largest_file": 450,
    "empty_names": 0,
    "empty_words": 0,
    "cycles": 0,
    "lines_outer_sgd": 1_300,
    "lines_engine": 3_400,
    "lines_sweep": 9_500,
}


def paths() -> dict[str, Path]:
    """Return every module of the package, by dotted name without the package's own."""
    dotted = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}
    return {name.removesuffix("__init__").removesuffix("."): path for name, path in dotted.items()}


def modules() -> dict[str, ast.Module]:
    """Parse every module of the package, by dotted name without the package's own."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in paths().items()}


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every Python file of the repository that is held to the lists, with its text; not those that hold them."""
    for room in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name not in ("measure_house.py", "test_house.py"):
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the modules that each one imports anywhere: in functions, for type checkers, by `import_module`."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        targets: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and module not in BY_NAME:
                names = [f"{PACKAGE}.{name}" for name in trees if _imports_by_name(node, f"{PACKAGE}.{name}")]
            else:
                continue
            for name in names:
                package, _, rest = name.partition(".")
                if package == PACKAGE:
                    targets.add(rest if rest in trees else rest.rpartition(".")[0])
        graph[module] = targets & set(trees) - {"", module}
    return graph


def _imports_by_name(call: ast.Call, module: str) -> bool:
    """Return whether a call is `import_module` with a module's name, or with an f-string that begins like it."""
    if not ast.unparse(call.func).endswith("import_module"):
        return False
    match call.args:
        case [ast.Constant(value=str(name))]:
            return name == module
        case [ast.JoinedStr(values=[ast.Constant(value=str(start)), *_])]:
            return module.startswith(start)
    return False


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return a module and all that it imports, directly or not."""
    seen, queue = {start}, [start]
    while queue:
        new = graph.get(queue.pop(), set()) - seen
        seen |= new
        queue += new
    return seen


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another in a circle."""
    reach = {module: reachable(graph, module) for module in graph}
    groups = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if any(module in reach[other] for other in reach[module] - {module})
    }
    return sorted(sorted(group) for group in groups)


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module gives to something, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


def empty_names(text: str) -> list[tuple[str, int]]:
    """Return the names of a module that say nothing, each with its line."""
    return [(name, line) for name, line in names(ast.parse(text)) if name.strip("_") in EMPTY_NAMES]


def empty_words(text: str) -> list[tuple[str, int]]:
    """Return the words of a text (source, comments and docstrings alike) that hide a noun, each with its line."""
    words = re.finditer(r"[^\W\d_]+", text.lower())
    return [(word[0], text.count("\n", 0, word.start()) + 1) for word in words if word[0] in EMPTY_WORDS]


def measure() -> dict[str, float]:
    """Return every figure of the house."""
    lines = {module: _length(path) for module, path in paths().items()}
    tests = sorted((ROOT / "tests").rglob("*.py"))
    graph = imports(modules())
    figures: dict[str, float] = {
        "source_lines": sum(lines.values()),
        "test_lines": sum(map(_length, tests)),
        "median_file": statistics.median(length for length in lines.values() if length > 1),
        "largest_file": max(lines.values()),
        "empty_names": sum(len(empty_names(text)) for _, text in texts()),
        "empty_words": sum(len(empty_words(text)) for _, text in texts()),
        "cycles": len(cycles(graph)),
    }
    for figure, module in ENTRIES.items():
        if module in graph:
            figures[figure] = sum(lines[name] for name in reachable(graph, module))
    return figures


def _length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def main(arguments: list[str]) -> int:
    """Print the figures; with `--list`, every empty name and word with its place."""
    if "--list" in arguments:
        for path, text in texts():
            for name, line in sorted(empty_names(text) + empty_words(text), key=lambda hit: hit[1]):
                print(f"{path}:{line}: {name}")
        for group in cycles(imports(modules())):
            print("cycle:", ", ".join(group))
    figures = measure()
    for figure, value in figures.items():
        over = "  over" if value > LIMITS[figure] else ""
        print(f"{figure:18}{value:10,.0f}  of {LIMITS[figure]:,}{over}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
