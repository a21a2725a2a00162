"""Everything that wants a GPU, in four parts of at most 8 minutes each on one H100.

The first GPU hour, from a source tree, with torch, numpy, safetensors, PyYAML and xxhash installed and nothing else:

    python benchmarks/gpu.py --out DIR --parts probe
    python benchmarks/gpu.py --out DIR --parts engine
    python benchmarks/gpu.py --out DIR --parts run
    python benchmarks/gpu.py --out DIR --parts nano         and once more for the second seed

    --wheels FOLDER   packages from a folder of wheels; with transformers there are eager_ratio and compiled_ratio, with
                      matplotlib a drawn curve, with pytest, pytest-timeout and hypothesis the tests that need a GPU
    --tiny            all four parts with a toy model on a CPU, to try them

* `probe`: matrix product and copy at full speed, products and attention kernels at the model's shapes, our step against
  transformers' (lm_throughput.py), its kernels by class, and the sum that closes: these classes against the step.
* `engine`: what the engine costs at S = 1 and 16 (engine_overhead.py), how long a checkpoint stops training, a run that
  is killed and resumed bit for bit, the tests that need a GPU.
* `run`: `paper_150m`, shortened: 300 steps of two replicas, S = 25, a restart every 3 rounds, on the documentation of
  the running Python as bytes (prepared tokens with `--corpus tokens:FOLDER`). A text of three million bytes is soon
  known by heart: the curve shows that training works, not how well the model would do on C4.
* `nano`: `nano` at outer momentum 0.9, S = 16, 320 steps: heavy ball and Nesterov, never and K = 3 at three outer
  learning rates, K = 2, 5, 7 at one of them; `auto`, which takes nothing from a rule, and averaging; one seed a call.

A part is made of units, each in a process of its own. OUT/PART.json keeps what is done, so a call that was cut off, on
this machine or another, is repeated and goes on from there; csv files and PART.log lie beside it, 16 MiB at most in
all. Checkpoints are kept in `--work`: without them, on another machine, an unfinished `run` begins anew. Units that
failed are tried again. Last line: one JSON object of all figures; `units_left` counts what another call would do.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
PARTS = ("probe", "engine", "run", "nano")
NEEDED = {"torch": "torch", "numpy": "numpy", "safetensors": "safetensors", "yaml": "PyYAML", "xxhash": "xxhash"}
"""From the name that is imported to that of the package."""


def unpack(wheels: Path, place: Path) -> None:
    """Unpack the wheels of a folder that fit this Python; a wheel is a zip file that can be imported from.

    Raises:
        ValueError: no such folder, no wheel in it, or one that is damaged.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        what = "holds no wheel" if wheels.is_dir() else "is no folder"
        raise ValueError(
            f"--wheels {wheels}: {what}; fill it with: pip download --only-binary :all: -d {wheels} PACKAGE, and go on "
            "without it until then: the parts take what is installed"
        )
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for file in files:
        *_, tags, abi, machine = file.stem.split("-")
        fits = "py3" in tags.split(".") or python in tags.split(".") or (abi == "abi3" and tags.startswith("cp3"))
        if not fits or not (machine == "any" or platform.machine() in machine):
            print(f"--wheels: {file.name} is for another Python or machine and left out", flush=True)
            continue
        try:
            with zipfile.ZipFile(file) as archive:
                archive.extractall(place)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"--wheels {wheels}: {file.name} is damaged ({error}); fetch it again, or remove it"
            ) from None


def arguments() -> argparse.ArgumentParser:
    """The command line; what is not shown is for the processes of units."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a toy model on a CPU")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that are not installed")
    parser.add_argument("--minutes", type=float, default=8.0, help="for each part (8)")
    parser.add_argument("--corpus", default="python", help="python, file:PATH or tokens:FOLDER (python)")
    parser.add_argument("--attention", default="auto", help="kernel of our step: auto, flash, cudnn, efficient, math")
    parser.add_argument("--seed", type=int, choices=(0, 1), help="of nano (the first of 0 and 1 that is not finished)")
    parser.add_argument(
        "--work", type=Path, help="folder of checkpoints (a temporary one, the same for the same --out)"
    )
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts, or one unit in a process of its own."""
    parser = arguments()
    options = parser.parse_args(words)
    if not 0 < options.minutes < 1e6:
        parser.error(f"--minutes is {options.minutes}; it must be above 0, for example 8")
    if options.unit:  # the first process has seen to the packages
        return import_module("gpu_parts.driver").perform(options)
    with tempfile.TemporaryDirectory() as packages:
        status = 0
        try:
            status = int(not add_packages(options.wheels, Path(packages)))
        except MissingError as error:
            print(error)
            return 2
        return max(status, import_module("gpu_parts.driver").run(options))


class MissingError(Exception):
    """Packages that nothing can be measured without are not here."""


def add_packages(wheels: Path | None, place: Path) -> bool:
    """Let this process and its children import the source tree's package and those of some wheels.

    Args:
        wheels: the folder, if there is one.
        place: an empty folder, for what they hold.

    Returns:
        False where the folder cannot be used, which is said, and everything that is needed is installed all the same.

    Raises:
        MissingError: naming what is not.
    """
    usable = True
    if wheels is not None:
        try:
            unpack(wheels, place)
        except ValueError as error:
            print(error, flush=True)
            usable = False
    folders = [str(folder) for folder in (HERE, SOURCE, place) if folder.is_dir()]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    importlib.invalidate_caches()
    absent = [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingError(
            f"gpu.py needs packages that are not installed here: {', '.join(absent)}; "
            f"pip install {' '.join(absent)}, or, elsewhere, pip download -d FOLDER {' '.join(absent)}, and then "
            "--wheels FOLDER"
        )
    return usable


if __name__ == "__main__":
    sys.exit(main())
