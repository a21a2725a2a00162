"""Compare the working tree with commit e62799b0 on the same inputs: see README.md beside this file."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from allowed import MAY_DIFFER
from differences import differences

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOME = ROOT / ".compare"
COMMIT = "e62799b0"
OLD, PYTHON, TEXT, CACHE = HOME / "old", HOME / "venv" / "bin" / "python", HOME / "text.txt", HOME / "old.json"
COMMON = ("suite.py", "worker.py", "api_old.py", "differences.py")
"""What every stored result of the old side depends on, beside the module of its case."""
WHOLE = ", whole"
"""The end of the names of cases that take ten minutes; `--demo` adds them."""
SHOWN = 4
"""Differences of a case that are printed."""


def set_up() -> None:
    """Check out the commit, and install it with its own constraints into an environment of its own."""
    shutil.rmtree(HOME, ignore_errors=True)
    OLD.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", ROOT, "archive", COMMIT], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", OLD], input=archive, check=True)
    venv.create(PYTHON.parents[1], with_pip=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-compile"]
    environment = {**os.environ, "PIP_CONSTRAINT": str(OLD / "constraints.txt")}
    index = ["--index-url", os.environ["TORCH_INDEX"]] if "TORCH_INDEX" in os.environ else []
    subprocess.run([*pip, *index, "torch"], check=True, env=environment)
    subprocess.run([*pip, f"{OLD}[plot,sweep,studies,hf,ft]"], check=True, env=environment)
    pages = sorted(OLD.glob("docs/*.md"))
    TEXT.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")


def run_side(side: str, names: Sequence[str]) -> dict[str, Any]:
    """Run cases in a process of their own, and in another one those that are left if it dies; return their lines."""
    source, python = (OLD / "src", PYTHON) if side == "old" else (ROOT / "src", Path(sys.executable))
    paths = {"PYTHONPATH": f"{source}{os.pathsep}{HERE}"}
    settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TQDM_DISABLE"), "1")
    lines: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results"
        while rest := [name for name in names if name not in lines]:
            words = [python, HERE / "worker.py", side, file, *rest]
            done = subprocess.run(words, check=False, env={**os.environ, **paths, **settings}, cwd=folder)
            for line in map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else []):
                lines[line["name"]] = lines.get(line["name"], {}) | line
            if done.returncode:
                begun = next((name for name, line in lines.items() if "seconds" not in line), None)
                if begun is None:  # an adapter or a module of cases does not import
                    raise SystemExit(f"the {side} side ended with status {done.returncode}")
                lines[begun] |= {"error": f"the process ended with status {done.returncode}", "seconds": 0.0}
    return lines


def case_hashes(modules: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of the files that the old side's result of each case depends on."""
    common = b"".join((HERE / name).read_bytes() for name in COMMON)
    return {
        name: hashlib.sha256(common + (HERE / "cases" / f"{module}.py").read_bytes()).hexdigest()
        for name, module in modules.items()
    }


def stored_results() -> dict[str, Any]:
    """Return the old side's lines of earlier runs."""
    return json.loads(CACHE.read_text(encoding="utf-8")) if CACHE.exists() else {}


def keep(lines: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Store new lines of the old side, with what they depend on."""
    new = {name: {**line, "hash": hashes[name]} for name, line in lines.items() if "result" in line}
    partial = CACHE.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(stored_results() | new), encoding="utf-8")
    partial.replace(CACHE)


def judge(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return what to say of a case, and the differences."""
    for side, line in (("old", old), ("new", new)):
        if "error" in line:
            return "ERROR", [f"{side} side: {line['error']}"]
    if "gone" in new:
        return "not there any more", [new["gone"]]
    found = differences(old["result"], new["result"])
    reason = next((reason for pattern, reason in MAY_DIFFER.items() if fnmatch(name, pattern)), None)
    if not found or reason is None:
        return ("DIFFERS", found) if found else ("same", [])
    musts = [line["result"].get("must") if isinstance(line["result"], dict) else None for line in (old, new)]
    held = differences(musts[0], musts[1])
    return ("DIFFERS", held) if held else ("may differ", [reason])


def modules_of_cases() -> dict[str, str]:
    """Return the module of each case, in the order in which they run, from the side that surely imports them."""
    words = [PYTHON, HERE / "worker.py", "--list"]
    environment = {**os.environ, "PYTHONPATH": f"{OLD / 'src'}{os.pathsep}{HERE}"}
    return json.loads(subprocess.run(words, check=True, capture_output=True, env=environment).stdout)


def compare(patterns: Sequence[str], *, demo: bool) -> int:
    """Run the cases on both sides at the same time, print a table, and return the exit status."""
    if not PYTHON.exists():
        raise SystemExit(f"{HOME} is missing; run first: python tools/compare setup")
    modules = modules_of_cases()
    modules = {n: m for n, m in modules.items() if demo or not n.endswith(WHOLE)}
    if patterns:
        modules = {n: m for n, m in modules.items() if any(fnmatch(n, p) or n.startswith(p) for p in patterns)}
        if not modules:
            raise SystemExit(f"--only {' '.join(patterns)}: no case has such a name")
    hashes = case_hashes(modules)  # of the files as they are now, and not after the run
    stored = {name: line for name, line in stored_results().items() if line["hash"] == hashes.get(name)}
    missing, names = [name for name in modules if name not in stored], list(modules)
    # Two processes: one a side, or where the old side is known both for the new one.
    jobs = [("old", missing), ("new", names)] if missing else [("new", names[::2]), ("new", names[1::2])]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(run_side, *zip(*jobs, strict=True))
    keep(first if missing else {}, hashes)
    old, new = (stored | first, second) if missing else (stored, first | second)
    counts: dict[str, int] = {}
    for name in modules:
        verdict, found = judge(name, old[name], new[name])
        counts[verdict] = counts.get(verdict, 0) + 1
        print(f"{name:58} {old[name]['seconds']:6.1f} s {new[name]['seconds']:6.1f} s  {verdict}")
        for line in found[:SHOWN]:
            print(f"    {line}")
        if len(found) > SHOWN:
            print(f"    and {len(found) - SHOWN} more")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(bool(counts.keys() & {"DIFFERS", "ERROR"}))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python tools/compare", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "setup"), default="run", help="setup: once, a minute")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, by the beginning of their names")
    parser.add_argument("--demo", action="store_true", help="add the whole demo, against its stored cells; ten minutes")
    options = parser.parse_args()
    if options.what == "setup":
        set_up()
        return 0
    return compare(options.only, demo=options.demo)


if __name__ == "__main__":
    sys.exit(main())
