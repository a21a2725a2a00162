"""The Triton kernels of an outer round against the engine's other ways, and as machine code for a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interpreted
from twophase.diloco import device_sweep
from twophase.rule import OuterRule

pytest.importorskip("triton", reason="Triton is not installed: make gate, or pip install 'twophase[gate]'")


def assert_alike(case: tuple[Any, ...], result: dict[str, Any]) -> None:
    """A case's rounds by the kernels against those of torch's operations on a CPU."""
    expected = interpreted.rounds(*case)
    for actual, desired in zip(result["reports"], expected["reports"], strict=True):
        assert actual[0] == desired[0]
        assert actual[1:] == pytest.approx(desired[1:], rel=1e-4, abs=1e-5)
    report, engine = result["checksums"]
    assert report == engine  # the kernel's own, and that of torch's operations on the same bits
    coarse = torch.float16 in case  # there a last bit of the anchor can turn over a replica's rounding
    for actual, desired in zip(result["tensors"], expected["tensors"], strict=True):
        torch.testing.assert_close(actual.cpu(), desired, rtol=2e-3 if coarse else 1e-5, atol=2e-3 if coarse else 1e-5)


def test_kernels_take_the_round_of_the_engine(tmp_path: Path):
    """Anchor, buffers, replicas, norms and decisions are those of torch's operations to rounding; digests exactly.

    The same program grows a sweep whose runs share rounds: those of one run must have the bits of the other's.
    """
    command = [sys.executable, interpreted.__file__, str(tmp_path / "results")]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results", weights_only=True)
    tried = 1  # by a small round, the first time
    for case, result in zip(interpreted.CASES, results, strict=True):
        names, launches = result["launched"], 4 * 2 + tried  # what 16 bytes divide, and the rest
        assert names.count("pseudo_gradient") == names.count("outer_round") == launches, done.stderr
        assert names.count("inner_products") == (4 if case[1] in ("auto", "norm:0.5") else 0)
        assert_alike(case, result)
        tried = 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", interpreted.CASES, ids=str)
def test_kernels_take_the_round_on_a_gpu(case: tuple[Any, ...]):
    """As machine code, too."""
    assert device_sweep.kernels(torch.device("cuda", torch.cuda.current_device())) is not None
    assert_alike(case, interpreted.rounds(*case, device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_sweep_shares_rounds_on_a_gpu(nesterov: bool, tmp_path: Path):
    """The kernels take the outer step of every run that shares a round, with the same bits."""
    assert interpreted.shared(OuterRule(0.7, 0.9, nesterov), tmp_path, "cuda") == 2


@pytest.mark.parametrize(
    ("kernel", "restart"), [("pseudo_gradient", 0), ("inner_products", 0), ("outer_round", 1), ("outer_round", 2)]
)
@pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's own, from Python 3.13 on
def test_kernels_compile_for_a_gpu(kernel: str, restart: int):
    """Triton makes machine code of every kernel for an H100, on a machine without one, and rounds each product."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    function = getattr(importlib.import_module("twophase.diloco.kernels"), kernel)
    constants = {"MOMENTUM": True, "FRESH": False, "RESTART": restart, "DROPS": restart == 2}
    constants |= {"ALONG_G": True, "ALONG_M": True, "ALONG_NEW": True, "KEEPS": True}
    constants |= {"REPLICAS": 2, "DIVIDE": True, "PROVE": True, "BLOCK": 2048}
    constants |= {"ALIGNED": True, "TYPE": importlib.import_module("triton.language").bfloat16}
    types = dict.fromkeys(["anchor", "gradient", "momentum"], "*fp32")
    types |= {"products": "*fp64", "anchor_sums": "*i64", "momentum_sums": "*i64", "of_program": "*i32"}
    types |= {"slots": "*i64", "numel": "i64"}
    constexprs = {name: constants[name] for name in function.arg_names if name in constants}
    signature = {name: "constexpr" if name in constexprs else types.get(name, "fp32") for name in function.arg_names}
    source = compiler.ASTSource(fn=function, signature=signature, constexprs=constexprs)
    binary = compiler.compile(source, target=target, options={"enable_fp_fusion": False})
    assert binary.asm["cubin"]
    assert kernel == "inner_products" or "global.v4" in binary.asm["ptx"]  # of the replicas, 16 bytes at a time
    assert "fma.rn.f32" not in binary.asm["ptx"].replace("div.rn", "")
