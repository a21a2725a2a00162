"""Find each public name, command and option that README and docs teach at e62799b0, and hold CHANGELOG.md to them.

    python tools/compare/taught.py           what the table in CHANGELOG.md lacks, or says wrongly; status 1 if anything
    python tools/compare/taught.py --list    all of them

CHANGELOG.md says of each in its section "What became of each name": kept, renamed to what, or gone. What it calls kept
has to be there: a command in `twophase --help`, an option in some command's help, a name in its module.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

OLD = "e62799b0"
ROOT = Path(__file__).parents[2]
SECTION = "### What became of each name"
NOT_OURS = """
--batches --checkpoint.load_step --count --eigenvalues --fault_tolerance.group_size --fault_tolerance.replica_id
--fault_tolerance.sync_steps --heartbeat_timeout_ms --host --inputs --join_timeout_ms --kills --list --master-addr
--megabytes --model_args --module --no-deps --only --parts --port --tiny --wheels --nproc-per-node --nnodes --standalone
--rdzv-backend --rdzv-endpoint --max-restarts --extra-index-url --index-url --min_replicas --bind --array --requeue
--wrap --master-port --node-rank --no-compile --junitxml --cov --model --tasks --processes --seconds --record
""".split()
"""Options of other programs and of this repository's scripts."""


def git(*words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def code_of(page: str) -> list[str]:
    """Return the code blocks and the inline code of a Markdown page."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`\n]+)`", rest)]


def public_names() -> dict[str, str]:
    """Return each public class and function at the old commit, and its module."""
    names: dict[str, str] = {}
    for path in git("ls-tree", "-r", "--name-only", OLD, "src/twophase").split():
        module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not path.endswith(".py") or any(part.startswith("_") for part in module.split(".")):
            continue
        for node in ast.parse(git("show", f"{OLD}:{path}")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names.setdefault(node.name, module)
    return names


def taught() -> tuple[set[str], set[str], set[str]]:
    """Return the commands, options and Python names (with their modules) of README and docs at the old commit."""
    pages = ["README.md", *git("ls-tree", "-r", "--name-only", OLD, "docs").split()]
    pages = [page for page in pages if page.endswith(".md") and not page.startswith(("docs/log", "docs/verdicts"))]
    known = public_names()
    commands, options, names = set(), set(), set()
    for page in pages:
        text = git("show", f"{OLD}:{page}")
        names |= set(re.findall(r"^::: (twophase[\w.]+)", text, re.MULTILINE))
        for code in code_of(text):
            commands |= set(re.findall(r"(?:^|[\s/])twophase ([a-z][a-z-]+)\b", code))
            options |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_.-]*[a-z0-9]", code))
            for module, imported in re.findall(r"from (twophase[\w.]*) import ([\w, ]+)", code):
                names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
            names |= set(re.findall(r"\btwophase(?:\.\w+)+", code))
            # A bare word of lower case may be any word: a call of it, or one with an underscore, is surely the name.
            words = re.findall(r"^(?:[A-Z]\w*(?=\(|$)|[a-z]\w*(?=\()|[a-z]+_\w+$)", code)
            names |= {f"{known[word]}.{word}" for word in words if word in known}
    names = {name for name in names if not re.search(r"\.(json|csv|md|py|out|html|safetensors|__name__)$", name)}
    return commands - {"does", "import"}, options - {*NOT_OURS}, names


def exists(kind: str, name: str, help_text: str) -> bool:
    """Return whether a taught name is there today."""
    if kind == "command":
        return bool(re.search(rf"^  {name} ", help_text.partition("COMMAND --help")[0], re.MULTILINE))
    if kind == "option":
        return bool(re.search(rf"(?<![\w-]){re.escape(name.replace('.no-', '.'))}(?![\w.-])", help_text))
    return source_of(name) is not None or defines(*name.rpartition(".")[::2])


def source_of(module: str) -> Path | None:
    """Return the file of a module of the package, which importing might need other packages for."""
    path = ROOT / "src" / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def defines(module: str, name: str) -> bool:
    """Return whether a module of the package defines or imports a name."""
    file = source_of(module)
    text = file.read_text(encoding="utf-8") if file else ""
    return bool(
        re.search(rf"^(class |def )?{name}\b|^ *(from|import) .*\b{name}\b|^    \"?{name}\b", text, re.MULTILINE)
    )


def help_of_all() -> str:
    """Return the help of the program and of each of its commands."""
    run = [sys.executable, "-m", "twophase"]

    def text(*words: str) -> str:
        return subprocess.run([*run, *words], capture_output=True, text=True, check=True).stdout

    overview = text("--help")
    commands = re.findall(r"^  ([a-z-]+) ", overview, re.MULTILINE)
    tasks = (str(ROOT / "examples" / "rings.py:Rings"), "hf:MODEL")
    pages = [("train", "--task", task, "--help", "all") for task in tasks] + [("data", "prepare", "--help")]
    pages += [(command, "--help", "all") for command in commands]
    return overview + "".join(text(*page) for page in pages)


def main() -> int:
    """Print what the table lacks or says wrongly; return the exit status."""
    kinds = dict(zip(("command", "option", "name"), taught(), strict=True))
    if "--list" in sys.argv:
        print("\n".join(f"{kind:8} {name}" for kind, names in kinds.items() for name in sorted(names)))
        return 0
    section = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition(SECTION)[2].partition("\n### ")[0]
    entries = set(re.findall(r"`([^`]+)`", section))
    kept = {c for text in section.split("\n\n") if text.startswith("Kept") for c in re.findall(r"`([^`]+)`", text)}
    help_text, faults = help_of_all(), 0
    for kind, names in kinds.items():
        for name in sorted(names):
            shown = f"twophase {name}" if kind == "command" else name
            here = exists(kind, name, help_text)
            fault = "" if shown in entries else "is not in the table"
            if shown in kept and not here:
                fault = "is called kept and is not there"
            elif shown in entries and shown not in kept and here:
                fault = "is called gone or renamed and is there"
            if fault:
                faults += 1
                print(f"{kind:8} {shown} {fault}{' (exists)' if here else ''}")
    print(f"{sum(map(len, kinds.values()))} taught, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
