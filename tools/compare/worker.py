"""Run cases on one side and write a line of JSON for each: `worker.py SIDE FILE NAME...`."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

import cases
import twophase
from suite import CASES, LONGEST, GoneError, last_line


def modules_of_cases() -> dict[str, str]:
    """Import the cases; return the module of each."""
    modules: dict[str, str] = {}
    for module in cases.MODULES:
        importlib.import_module(f"cases.{module}")
        modules |= {name: module for name in CASES if name not in modules}
    return modules


def _seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def main(side: str, file: Path, names: list[str]) -> None:
    """Run the cases; one that begins has a line as well, which stays the last if the process dies."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    source = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    assert twophase.__file__.startswith(source), f"{twophase.__file__} is not in {source}"
    api = importlib.import_module(f"api_{side}")
    modules_of_cases()
    with file.open("a", encoding="utf-8", buffering=1) as out:
        for name in names:
            out.write(json.dumps({"name": name}) + "\n")
            signal.alarm(0 if name.endswith(", whole") else LONGEST)
            began, line = _seconds(), {}
            try:
                line["result"] = CASES[name](api)
            except GoneError as error:
                line["gone"] = str(error)
            except Exception as error:  # the others go on
                line["error"] = last_line(error)
            out.write(json.dumps({"name": name, "seconds": _seconds() - began, **line}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(json.dumps(modules_of_cases()))
    else:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
