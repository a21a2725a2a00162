"""`twophase doctor`: the machine, the versions, the devices, what is missing and how to get it. No torch in here.

torch is imported in a separate process: if torch is broken, that process dies and this one says so.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal

from twophase.cli.commands import plain_parser

State = Literal["ok", "missing", "broken"]
_MARKS: dict[State, str] = {"ok": "  ", "missing": "- ", "broken": "! "}
_NAME = "twophase"
_ROOM_BYTES = 1 << 30  # below it a checkpoint of a small model may not fit
_TORCH_SECONDS = 180
_PURPOSES = {
    "plot": "figures of sweeps, studies and `twophase period --plot`",
    "data": "`twophase data prepare`: token shards from text, Parquet or C4",
    "sweep": "`twophase sweep` and `demo`: runs as trials, and the comparison of arms",
    "slurm": "`--launcher slurm`",
    "studies": "all of `twophase study`",
    "hf": "`twophase export`",
    "tensorboard": "`--track tensorboard`",
    "trackio": "`--track trackio`",
    "wandb": "`--track wandb`",
    "trainer": "`twophase.integrations.transformers` and `.accelerate`",
    "lightning": "`twophase.integrations.lightning`",
    "ft": "`--lighthouse`: replicas that die and come back",
    "schedulefree": "`--inner.method schedule-free`",
    "docs": "`make docs`: the documentation site",
    "dev": "tests and checks",
}
_TORCH = """
import json, torch
assert float((torch.ones(2, 2) @ torch.ones(2, 2)).sum()) == 8
answer = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
answer |= {"devices": [], "notes": []}
for number in range(torch.cuda.device_count()):
    about = torch.cuda.get_device_properties(number)
    answer["devices"].append(f"cuda:{number}: {about.name}, {about.total_memory / 2**30:.0f} GiB")
    try:
        torch.ones(1, device=f"cuda:{number}").item()
    except RuntimeError as error:
        answer["notes"].append(f"cuda:{number} cannot be used: {str(error).splitlines()[0]}")
if torch.backends.mps.is_available():
    answer["devices"].append("mps: Apple GPU")
print(json.dumps(answer))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A line of the answer, under the heading `group`: a thing, its state in words, and what to do about it.

    `missing` is what only some commands need, `broken` what all of them need.
    """

    group: str
    name: str
    text: str
    state: State = "ok"
    remedy: str = ""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 1 if something that every command needs is broken."""
    parser = plain_parser("doctor")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    options = parser.parse_args(arguments)
    checks = examine()
    broken = [check.name for check in checks if check.state == "broken"]
    if options.json:
        keys = ("group", "name", "found", "state", "remedy")
        rows = [dict(zip(keys, dataclasses.astuple(check), strict=True)) for check in checks]
        print(json.dumps({"usable": not broken, "checks": rows}, indent=2))
        return 1 if broken else 0
    width = max(len(check.name) for check in checks)
    for group, members in groupby(checks, key=lambda check: check.group):
        print(group)
        for check in members:
            print(f"  {_MARKS[check.state]}{check.name:{width}}  {check.text}")
            if check.remedy:
                print(f"    {'':{width}}  > {check.remedy}")
        print()
    missing = sum(check.state == "missing" for check in checks)
    verb = "things are" if missing > 1 else "thing is"
    end = f"Broken and needed: {', '.join(broken)}." if broken else "Nothing that is needed is broken."
    print(end + (f" {missing} optional {verb} missing, marked with -." if missing else ""))
    return 1 if broken else 0


def examine() -> list[Check]:
    """Run all checks; report a failing check as a line."""
    checks: list[Check] = []
    for look in (_install, _machine, _torch, _packages, _extras, _commands):
        name = look.__name__.strip("_")
        try:
            checks += look()
        except Exception as error:
            checks.append(Check(name, name, f"could not be examined ({type(error).__name__}: {error})", "missing"))
    return checks


def _install() -> Iterator[Check]:
    from twophase import __version__

    yield Check("Python", "version", f"{platform.python_version()} ({platform.python_implementation()})")
    inside = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    yield Check("Python", "program", f"{sys.executable or 'unknown'}, {inside}")
    home = Path(__file__).resolve().parents[1]
    yield Check("twophase", "version", __version__)
    yield Check("twophase", "place", str(home))
    if (git := shutil.which("git")) and any((folder / ".git").exists() for folder in home.parents[:3]):
        argv = [git, "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603 - git itself
        if done.returncode == 0:
            yield Check("twophase", "revision", done.stdout.strip())


def _machine() -> Iterator[Check]:
    yield Check("Machine", "platform", platform.platform())
    yield Check("Machine", "processors", f"{os.cpu_count()}, {len(os.sched_getaffinity(0))} of them for this process")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container may have less than the machine
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    memory = min(memory, int(text)) if text.isdecimal() else memory
    yield Check("Machine", "memory", f"{memory / 2**30:.1f} GiB")


def _torch() -> Iterator[Check]:
    argv = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TORCH_SECONDS)  # noqa: S603
        facts = json.loads(done.stdout) if done.returncode == 0 else None
        fault = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        facts, fault = None, str(error)
    if facts is None:
        remedy = "pip install torch (on a machine without a GPU, from PyTorch's index of CPU wheels)"
        yield Check("torch", "version", f"cannot be used: {fault[:200]}", "broken", remedy)
        return
    yield Check("torch", "version", facts["version"] + (f", CUDA {facts['cuda']}" if facts["cuda"] else ""))
    yield Check("torch", "devices", "; ".join(["cpu", *facts["devices"]]))
    yield Check("torch", "threads", f"{facts['threads']} by default (a run takes --threads)")
    for note in facts["notes"]:
        yield Check("torch", "device", note, "missing", "check the driver, or use --device cpu")


def _packages() -> Iterator[Check]:
    for name, spec in _requirements().items():
        version = _version(name)
        if _fits(version, spec):
            yield Check("Packages", name, version)
        elif name != "torch":  # which has a separate group
            text = f"{version or 'not installed'}; {spec} is needed"
            yield Check("Packages", name, text, "broken", f"pip install '{name}{spec}'")


def _extras() -> Iterator[Check]:
    for extra in importlib.metadata.metadata(_NAME).get_all("Provides-Extra") or []:
        ranges = _requirements(extra)
        versions = {name: _version(name) for name in ranges}
        lacking = [name for name, spec in ranges.items() if not _fits(versions[name], spec)]
        text = ", ".join(f"{name} {version}" for name, version in versions.items()) or "nothing to install"
        text = f"lacks {', '.join(lacking)}" if lacking else text
        text += f"; for {_PURPOSES[extra]}" if extra in _PURPOSES else ""
        remedy = f"pip install '{_NAME}[{extra}]'" if lacking else ""
        yield Check("Extras", extra, text, "missing" if lacking else "ok", remedy)


def _commands() -> Iterator[Check]:
    group, name = "Commands and places", "torchft_lighthouse"
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    text = path or "not found; needed by one machine of a run with --lighthouse"
    yield Check(group, name, text, "ok" if path else "missing", "" if path else f"pip install '{_NAME}[ft]'")
    states: dict[str, State] = {"temporary files": "broken", "this folder": "missing"}
    for (name, state), folder in zip(states.items(), (tempfile.gettempdir(), str(Path.cwd())), strict=True):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:  # without a name, so that a kill leaves nothing
                file.write(b"x")
                file.flush()
        except OSError as error:
            yield Check(group, name, f"{folder} cannot be written ({error.strerror})", state, "free it, or set TMPDIR")
            continue
        free = shutil.disk_usage(folder).free
        low = free < _ROOM_BYTES
        remedy = "free some space: checkpoints may not fit" if low else ""
        yield Check(group, name, f"{folder}, {free / 2**30:.1f} GiB free", "missing" if low else "ok", remedy)


def _requirements(extra: str = "") -> dict[str, str]:
    """Return name and version range of what the package needs, or of what an extra adds; the build resolves its own."""
    from packaging.requirements import Requirement

    ranges: dict[str, str] = {}
    for wanted in map(Requirement, importlib.metadata.requires(_NAME) or []):
        always, in_extra = (wanted.marker is None or wanted.marker.evaluate({"extra": name}) for name in ("", extra))
        if not in_extra or (extra and always):
            continue
        ranges[wanted.name] = str(wanted.specifier)
    return ranges


def _version(name: str) -> str:
    """Return a package's version, or an empty text if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fits(version: str, spec: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return bool(version) and SpecifierSet(spec).contains(version, prereleases=True)
