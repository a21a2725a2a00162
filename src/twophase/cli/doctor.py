"""`twophase doctor`: the machine, the versions, the devices, what is missing and how to get it. No torch in here.

torch is asked in a process of its own: where it is broken, that process dies and this one says so.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "missing", "broken"]
_NAME = "twophase"
_ROOM_BYTES = 1 << 30  # below it a checkpoint of a small model may not fit
_TORCH_SECONDS = 180
_PURPOSES = {
    "plot": "figures of sweeps, studies and `twophase period --plot`",
    "data": "`twophase data prepare`: token shards from text, Parquet or C4",
    "sweep": "`twophase sweep` and `demo`: the queue that workers share",
    "slurm": "`--launcher slurm`",
    "studies": "all of `twophase study`",
    "hf": "`twophase export`",
    "tensorboard": "`--track tensorboard`",
    "trackio": "`--track trackio`",
    "wandb": "`--track wandb`",
    "trainer": "examples/transformers_callback.py",
    "ft": "`--lighthouse`: replicas that die and come back",
    "gate": "`make gate`: the CUDA code of a step, without a GPU",
    "docs": "`make docs`: the documentation site",
    "dev": "tests and checks",
}
_TORCH = """
import json, torch
found = {"version": str(torch.__version__), "threads": torch.get_num_threads(), "devices": [], "notes": []}
assert float((torch.ones(2, 2) @ torch.ones(2, 2)).sum()) == 8
found["cuda"] = torch.version.cuda
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found["devices"].append(f"cuda:{number}: {about.name}, {about.total_memory / 2**30:.0f} GiB")
        try:
            torch.ones(1, device=f"cuda:{number}").item()
        except RuntimeError as error:
            found["notes"].append(f"cuda:{number} cannot be used: {str(error).splitlines()[0]}")
if getattr(torch.backends, "mps", None) and torch.backends.mps.is_available():
    found["devices"].append("mps: Apple GPU")
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer.

    Args:
        group: heading that it stands under.
        name: what was looked at.
        found: what was found, in words.
        state: `ok`; `missing` for what only some commands need; `broken` for what all of them need.
        remedy: what to do, where something is to be done.
    """

    group: str
    name: str
    found: str
    state: State = "ok"
    remedy: str = ""


def examine() -> list[Check]:
    """Look at everything; a look that fails becomes a line of its own, never an error."""
    looks: tuple[Callable[[], Iterator[Check]], ...] = (_python, _machine, _package, _torch, _needed, _extras, _places)
    found: list[Check] = []
    for look in looks:
        try:
            found += look()
        except Exception as error:
            name = look.__name__.removeprefix("_")
            found.append(Check(name, name, f"could not be examined ({type(error).__name__}: {error})", "missing"))
    return found


def usable(checks: list[Check]) -> bool:
    """Whether nothing that every command needs is broken."""
    return all(check.state != "broken" for check in checks)


def describe(checks: list[Check]) -> str:
    """The answer as text: a heading a group, what is missing marked, and a last line that sums up."""
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for number, check in enumerate(checks):
        if number == 0 or check.group != checks[number - 1].group:
            lines += ["", check.group] if lines else [check.group]
        mark = {"ok": "  ", "missing": "- ", "broken": "! "}[check.state]
        lines.append(f"  {mark}{check.name:{width}}  {check.found}")
        if check.remedy:
            lines.append(f"    {'':{width}}  > {check.remedy}")
    broken = [check.name for check in checks if check.state == "broken"]
    missing = sum(check.state == "missing" for check in checks)
    end = "Nothing that is needed is broken." if not broken else f"Broken and needed: {', '.join(broken)}."
    if missing:
        end += f" {missing} optional thing{'s are' if missing > 1 else ' is'} missing, marked with -."
    return "\n".join([*lines, "", end])


def as_json(checks: list[Check]) -> str:
    """The answer as one JSON object: `usable` and the list of checks."""
    rows = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"usable": usable(checks), "checks": rows}, indent=2)


# ------------------------------------------------------------------------------------------------------------ looking


def _python() -> Iterator[Check]:
    old = sys.version_info < (3, 11)
    yield Check(
        "Python",
        "version",
        f"{platform.python_version()} ({platform.python_implementation()})",
        "broken" if old else "ok",
        "install Python 3.11 or newer" if old else "",
    )
    inside = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    yield Check("Python", "program", f"{sys.executable or 'unknown'}, {inside}")


def _machine() -> Iterator[Check]:
    yield Check("Machine", "platform", platform.platform())
    cpus = os.cpu_count() or 0
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus
    yield Check("Machine", "processors", f"{cpus}" + (f", {mine} of them for this process" if mine != cpus else ""))
    memory = _memory()
    yield Check("Machine", "memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB")


def _memory() -> int | None:
    """Bytes of the machine, or of the container where that has fewer."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        return min(total, int(limit)) if limit.isdecimal() else total
    except (OSError, ValueError):
        return total


def _package() -> Iterator[Check]:
    from twophase import __version__  # noqa: PLC0415 - a broken package is for `examine` to tell

    home = Path(__file__).resolve().parents[1]
    yield Check("twophase", "version", __version__)
    yield Check("twophase", "place", str(home))
    revision = _revision(home)
    if revision:
        yield Check("twophase", "revision", revision)


def _revision(home: Path) -> str:
    """The git revision of the checkout that the package runs from, or an empty text."""
    if not any((folder / ".git").exists() for folder in home.parents[:3]):
        return ""
    git = shutil.which("git")
    if git is None:
        return "a checkout; git is not installed, so the revision is not known"
    words = [git, "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603 - git itself
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _torch() -> Iterator[Check]:
    remedy = "pip install torch (on a machine without a GPU, from PyTorch's index of CPU wheels)"
    try:
        words = [sys.executable, "-c", _TORCH]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_TORCH_SECONDS)  # noqa: S603
        answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError) as error:
        yield Check("torch", "version", f"could not be asked ({error})", "broken", remedy)
        return
    except subprocess.TimeoutExpired:
        yield Check("torch", "version", f"did not answer within {_TORCH_SECONDS} s", "broken", remedy)
        return
    if answer is None:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Check("torch", "version", f"cannot be used: {last[:200]}", "broken", remedy)
        return
    yield Check("torch", "version", str(answer["version"]) + (f", CUDA {answer['cuda']}" if answer["cuda"] else ""))
    yield Check("torch", "devices", "; ".join(["cpu", *answer["devices"]]))
    yield Check("torch", "threads", f"{answer['threads']} by default (a run takes --threads)")
    for note in answer["notes"]:
        yield Check("torch", "device", note, "missing", "check the driver, or use --device cpu")


_Requirement = tuple[str, str, str, str]
"""Name, extras in brackets, version range, and the extra that asks for it ("" for none)."""


def _requirements() -> list[_Requirement]:
    found = []
    for text in importlib.metadata.requires(_NAME) or []:
        wanted, _, marker = text.partition(";")
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?\s*(.*)", wanted)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        system = re.search(r"platform_system\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if match and not (system and system[1] != platform.system()):
            name, inside, spec = match.groups()
            found.append((name, inside or "", spec.strip().strip("()"), extra[1] if extra else ""))
    return found


def _needed() -> Iterator[Check]:
    for name, _, spec, extra in _requirements():
        if extra or name == "torch":
            continue
        version = _version(name)
        fits = version is not None and _fits(version, spec)
        found = version or "not installed"
        remedy = "" if fits else f"pip install '{name}{spec}'"
        yield Check(
            "Packages", name, found if fits else f"{found}; {spec} is needed", "ok" if fits else "broken", remedy
        )


def _extras() -> Iterator[Check]:
    wanted = _requirements()
    declared = importlib.metadata.metadata(_NAME).get_all("Provides-Extra") or []
    for extra in declared:
        parts = list(dict.fromkeys(_unfolded(extra, wanted, set())))
        versions = [(name, spec, _version(name)) for name, spec in parts]
        lacking = [name for name, spec, version in versions if version is None or not _fits(version, spec)]
        words = ", ".join(
            f"{name} {version}" for name, _, version in versions if version is not None and name not in lacking
        )
        here = f"lacks {', '.join(lacking)}" if lacking else words or "nothing to install"
        purpose = _PURPOSES.get(extra, "")
        yield Check(
            "Extras",
            extra,
            f"{here}{f'; for {purpose}' if purpose else ''}",
            "missing" if lacking else "ok",
            f"pip install '{_NAME}[{extra}]'" if lacking else "",
        )


def _unfolded(extra: str, wanted: list[_Requirement], seen: set[str]) -> Iterator[tuple[str, str]]:
    """Packages of an extra, those of extras that it names included."""
    if extra in seen:
        return
    seen.add(extra)
    for name, inside, spec, asked in wanted:
        if asked != extra:
            continue
        if name == _NAME:
            for other in inside.split(","):
                yield from _unfolded(other.strip(), wanted, seen)
        else:
            yield name, spec


def _places() -> Iterator[Check]:
    lighthouse = shutil.which("torchft_lighthouse")
    beside = Path(sys.executable).parent / "torchft_lighthouse"
    found = lighthouse or (str(beside) if beside.exists() else None)
    yield Check(
        "Commands and places",
        "torchft_lighthouse",
        found or "not found; needed by one machine of a run with --lighthouse",
        "ok" if found else "missing",
        "" if found else f"pip install '{_NAME}[ft]'",
    )
    for name, folder in (("temporary files", Path(tempfile.gettempdir())), ("this folder", Path.cwd())):
        yield _place(name, folder, needed=name == "temporary files")


def _place(name: str, folder: Path, *, needed: bool) -> Check:
    group = "Commands and places"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-twophase-doctor-") as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        state: State = "broken" if needed else "missing"
        return Check(group, name, f"{folder} cannot be written ({error.strerror})", state, "free it, or set TMPDIR")
    low = free < _ROOM_BYTES
    remedy = "free some space: checkpoints may not fit" if low else ""
    return Check(group, name, f"{folder}, {free / 2**30:.1f} GiB free", "missing" if low else "ok", remedy)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fits(version: str, spec: str) -> bool:
    """Whether a version is in a range of `>=` and `==`, by its leading numbers; other ranges are not judged."""
    ours = _digits(version)
    for word in filter(None, (part.strip() for part in spec.split(","))):
        if word.startswith(">=") and ours < _digits(word[2:]):
            return False
        if word.startswith("==") and ours != _digits(word[2:]):
            return False
    return True


def _digits(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version.strip())
    numbers = [int(word) for word in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def answer(*, as_object: bool) -> tuple[str, int]:
    """What the command prints and its exit status.

    Args:
        as_object: JSON instead of text.
    """
    checks = examine()
    return (as_json(checks) if as_object else describe(checks)), 0 if usable(checks) else 1
