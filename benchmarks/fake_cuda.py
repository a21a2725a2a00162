"""Pretend a GPU: CUDA tensors without values, and Inductor's CUDA code run for its launches and its memory.

Tensors are torch's fake ones (shapes and devices, no values), so a full-size step takes seconds and no memory. A build
of torch without CUDA aborts where autograd asks for a device's streams; a few lines of C++ answer there. Triton's
driver and the properties of `torch.cuda` are those of an H100; no kernel is compiled and none runs.

Import this module before torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

_GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device gpu() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, gpu()); }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu(); }
  c10::Device getDevice() const override { return gpu(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard);

namespace at {
struct CUDAHooks : CUDAHooksInterface { // torch finds it by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=85_000_000_000,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    gcnArchName="",
)


def missing() -> str:
    """What keeps this machine from pretending a GPU, in words; empty if nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: make gate, or pip install 'twophase[gate]'"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built for CUDA, and only one built without it can be told that there is a GPU"
    if shutil.which("g++") is None:
        return "there is no C++ compiler: install g++"
    return ""


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def install() -> None:
    """Let torch see a GPU from now on, for the rest of the process; before its first import.

    Raises:
        RuntimeError: torch is imported already, or something that is needed is missing.
    """
    if "torch" in sys.modules:
        raise RuntimeError("fake_cuda.install: torch is imported already; call this first")
    if reason := missing():
        raise RuntimeError(f"fake_cuda.install: {reason}")
    root = _torch()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD)
        words = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        words += [str(source), "-o", str(library), "-lc10", "-ltorch_cpu"]
        try:
            subprocess.run(words, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise RuntimeError(f"fake_cuda.install: g++ failed ({said.splitlines()[0]}); install g++") from error
        # Torch takes its CUDA hooks when it is first imported, and only once.
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(root / "lib" / name), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    import torch

    # Not by name: where Triton is missing a type checker could not follow.
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    answers = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": H100,
        "get_device_capability": (9, 0),
        "get_device_name": H100.name,
        "set_device": None,
        "set_rng_state": None,
        "empty_cache": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    setattr(torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext())  # noqa: B010 - emitted code enters it
    # Which kernel it is matters little for bytes; the real one asks the device for its choice.
    torch.nn.functional.scaled_dot_product_attention = _attention
    setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)  # noqa: B010 - emitted code imports it

    class Driver:
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda *_: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)

    importlib.import_module("triton.runtime").driver.set_active(Driver())


def _attention(query: Any, key: Any, value: Any, *, is_causal: bool, enable_gqa: bool) -> Any:
    import torch

    assert not enable_gqa, "the backward pass of this stand-in knows no groups"
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)[0]


class Kernel(NamedTuple):
    """What a part of the emitted code does.

    Args:
        kind: `fused` for a kernel that Inductor writes, otherwise the name of the function that it calls.
        bytes: that it reads and writes, as Inductor's scheduler counts them.
    """

    kind: str
    bytes: int


class Emitted:
    """What Inductor emitted, graph after graph: source, kernels, and how often its code launched something."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.kernels: list[list[Kernel]] = []
        self.launches = 0

    @property
    def graphs(self) -> int:
        """Graphs that were lowered; a training step has two, forward and backward."""
        return len(self.sources)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within, what is compiled is recorded here, and its code runs with kernels that only count their launches."""
        import torch
        import torch._inductor.config as inductor
        from torch._C._dynamo import guards
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.fx_passes import fuse_attention
        from torch._inductor.graph import GraphLowering

        to_module = GraphLowering.compile_to_module

        def compile_to_module(graph: Any) -> Any:
            module = to_module(graph)
            _, counts, _ = graph.count_bytes()
            self.kernels.append([Kernel(_kind(node), 4 * words) for node, words in counts])
            return module

        def launch(*_: Any, **__: Any) -> None:
            self.launches += 1

        def triton(*_: Any, **__: Any) -> Any:
            return types.SimpleNamespace(run=launch)

        def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

        def ignore(*_: Any) -> None:
            """Do nothing; a mock would remember the tensors that it is called with, and keep them alive."""

        patches = [
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
            mock.patch.object(GraphLowering, "save_output_code", self.sources.append),
            mock.patch.object(AsyncCompile, "triton", triton),
            mock.patch.object(guards, "_empty_strided_cuda", empty, create=True),
            mock.patch.object(guards, "_reinterpret_tensor", torch.as_strided),
            # Both read addresses or strides in C++, past the fake tensors.
            mock.patch.object(guards, "assert_size_stride", ignore),
            mock.patch.object(guards, "assert_alignment", ignore, create=True),
            # It makes small tensors on the GPU to trace patterns of attention with; the model's is one operation.
            mock.patch.object(fuse_attention, "_sfdp_init"),
            # Folding would compute constants on the GPU. Caches would hand out code from before the kernels counted.
            inductor.patch(joint_graph_constant_folding=False, force_disable_caches=True, compile_threads=1),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield


def _kind(node: Any) -> str:
    inner = getattr(node, "node", None)
    name = getattr(inner, "python_kernel_name", None) or getattr(inner, "op_overload", None)
    return str(name) if name else "fused"


def tracker(watched: Callable[[Any], bool] = lambda _: False) -> Any:
    """Make a dispatch mode that counts the bytes of the CUDA tensors that are made while it is entered.

    It sees the result of every operation, and by a weak reference the end of each storage.

    Args:
        watched: tensors whose storages are counted, too.

    Returns:
        The mode, with `now`, the bytes at this moment; `peak`, the most so far (set it to 0 to begin anew);
        `watched_peak`, the most storages of watched tensors at any moment; and `syncs`, how often the host read a value
        (it is given 1) or waited for a copy.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):
        now = peak = watched_peak = syncs = 0

        @classmethod
        def is_infra_mode(cls) -> bool:  # else torch.compile refuses to run beside it
            return True

        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, Any] = {}
            self.seen: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, func.overloadpacket.__name__
            if name == "_local_scalar_dense":
                self.syncs += 1
                return 1.0
            if name == "_pin_memory":
                return args[0]
            out = func(*args, **kwargs)
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            if name in ("_to_copy", "copy_") and not (kwargs.get("non_blocking") or True in args[2:]):
                places = {leaf.device.type for leaf in (*made, *args) if isinstance(leaf, torch.Tensor)}
                self.syncs += {"cpu", "cuda"} <= places
            for tensor in made:
                if tensor.device.type == "cuda":
                    self._see(tensor)
            return out

        def _see(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.alive:

                def gone(_: Any) -> None:
                    self.now -= size
                    self.seen.discard(key)
                    del self.alive[key]

                self.alive[key] = weakref.ref(storage, gone)
                self.now += size
                self.peak = max(self.peak, self.now)
            if watched(tensor):
                self.seen.add(key)
                self.watched_peak = max(self.watched_peak, len(self.seen))

    return Mode()
