"""Rounds of the engine by the Triton kernels in Triton's interpreter: a program, for it must begin before Triton does.

TRITON_INTERPRET=1 python interpreted.py FILE      writes what the rounds of `CASES` lead to
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import textmaker
from twophase.diloco import device_sweep
from twophase.diloco.engine import DiLoCo
from twophase.rule import OuterRule
from twophase.sweeps.forest import Grower
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.plan import plan

CASES = [
    (OuterRule(0.7, 0.9, nesterov=True), "3", 2, torch.float32, 0.0),
    (OuterRule(3.0, 0.8, form="ema"), "soft:2:0.2:0.1", 1, torch.float32, 0.0),
    (OuterRule(3.0, 0.8, nesterov=True, form="ema"), "never", 3, torch.float16, 0.0),
    (OuterRule(1.0, 0.0), "never", 4, torch.float32, 0.25),
    (OuterRule(0.7, 0.9), "auto", 2, torch.float32, 0.0),
    (OuterRule(0.7, 0.9), "norm:0.5", 2, torch.float32, 0.5),
]
NUMBERS = ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain")
PARAMETERS = [(3, 7), (9001,), (1,), (40, 51), (96, 64)]


def model(dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """Tensors that begin and end inside of blocks, two of several blocks, the last one a multiple of 16 bytes long."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for number, shape in enumerate(PARAMETERS):
        module.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    return module.to(device)


def rounds(
    rule: OuterRule, restart: str, replicas: int, dtype: torch.dtype, mixing: float, *, device: str = "cpu"
) -> dict[str, Any]:
    """What four rounds lead to, of the same numbers on every device."""
    models = [model(dtype, device) for _ in range(replicas)]
    engine = DiLoCo(models, rule, restart=restart, mixing=mixing, inner_steps=1)
    reports, checksum = [], ""
    for number in range(4):
        for index, replica in enumerate(models):
            generator = torch.Generator().manual_seed(10 * number + index)
            with torch.no_grad():
                for p in replica.parameters():
                    p.add_(0.1 * torch.randn(p.shape, generator=generator).to(device))
        report = engine.step()
        assert report is not None
        checksum = report.checksum
        reports.append([report.restarted, *(getattr(report, name) for name in NUMBERS)])
    buffers = [engine.outer.state.get(p, {}).get("momentum_buffer", p) for p in engine.anchor.values()]
    return {
        "reports": reports,
        "checksums": (checksum, engine.checksum()),
        "tensors": [
            *engine.anchor.values(),
            *buffers,
            *(p.detach() for replica in models for p in replica.parameters()),
        ],
    }


def shared(rule: OuterRule, folder: Path, device: str = "cpu") -> int:
    """Grow a sweep whose runs share their first rounds; return how many. It refuses bits that are not equal."""
    values = {"outer.lr": rule.lr, "outer.momentum": rule.momentum, "outer.nesterov": rule.nesterov, "device": device}
    text = textmaker.write(folder / "text.txt")
    base = textmaker.small_run(text, 8, steps=10, inner_steps=2, **values | {"model.heads": 1})
    made = plan(Sweep("grid", base, product(base, [Axis("outer.restart", ("never", "2"))])))
    grower = Grower(made.forest, made.runs, folder / "runs", folder / "states")
    for root in made.forest.roots:
        grower.grow(root.id)
    return len(list((folder / "runs").iterdir()))


def main() -> None:
    launched: list[str] = []
    launch = device_sweep._launch

    def spy(kernel: Any, programs: int, arguments: Any, *, reads: Any, writes: Any, **constants: Any) -> None:
        """Launch a kernel, which may write to nothing but what it says, and to where it leaves its sums."""
        before = [t.clone() if isinstance(t, Tensor) else t for t in arguments]
        launch(kernel, programs, arguments, reads=reads, writes=writes, **constants)
        allowed = {t.untyped_storage().data_ptr() for t in writes}
        for old, t in zip(before, arguments, strict=True):
            is_sum = isinstance(t, Tensor) and t.dtype in (torch.float64, torch.int64)
            if isinstance(t, Tensor) and not is_sum and t.untyped_storage().data_ptr() not in allowed:
                assert torch.equal(old.nan_to_num(), t.nan_to_num()), kernel.__name__
        launched.append(kernel.__name__)

    device_sweep._launch = spy
    device_sweep._DEVICES = ("cpu",)
    Tensor.is_cpu = False  # pyright: ignore[reportAttributeAccessIssue] - the engine then asks for the kernels
    results = []
    for case in CASES:
        launched.clear()
        results.append(rounds(*case) | {"launched": list(launched)})
    for rule in (OuterRule(0.7, 0.9), OuterRule(0.7, 0.9, nesterov=True)):
        launched.clear()
        with TemporaryDirectory() as folder:
            assert shared(rule, Path(folder)) == 2
        assert launched.count("outer_round") > 10, launched  # five rounds, and those that a run repeats for another
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
