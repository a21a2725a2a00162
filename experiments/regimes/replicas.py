"""Does outer momentum pay with more replicas? A second question, of `replicas.md`.

python experiments/regimes/replicas.py --out runs/replicas    an hour of one core; a repeat resumes; answers.py prints
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch

from common import DILOCO
from run import NESTEROV, Plan, main  # pyright: ignore[reportAttributeAccessIssue] - the bench has one, too
from small_tasks import Workload

TASKS = ("rings", "spirals", "teacher", "linear", "modular", "digits", "deep")
PLAN = Plan(seeds=range(10, 13), held_out=range(200, 215), groups={"usual": [DILOCO], "nesterov": NESTEROV})
ARMS = {2: (16, 64), 8: (16,)}
"""Batches of a replica by number of replicas: two, two with as many points as eight, and eight."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {
        f"{task}-{replicas}": [("adamw", Workload(task, 64, 1280, batch, replicas)) for batch in batches]
        for task in TASKS
        for replicas, batches in ARMS.items()
    }
    main(__doc__, parts, lambda _: PLAN)  # pyright: ignore[reportCallIssue] - not the bench's
