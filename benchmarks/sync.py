"""One sync of 30M and of 100M float32 parameters between two processes: time and memory, as ratios of one run.

A sync is pseudo-gradient, all-reduce, outer Nesterov step and restored parameters, over gloo and loopback, one thread a
process. Engines take turns in the same two processes on the same progress, must end with the same bits, and a sync
takes as long as the slower process; medians.

`torchft_time_ratio_*`: all of `DiLoCo.step()`, with report and digests, over `torchft.local_sgd.DiLoCo` with
`torch.optim.SGD`, without its quorum and vote. `torchft_memory_ratio_*`: peak resident memory of a process, each engine
in a pair of processes of its own. `flat_time_ratio_*`: over a loop of a few lines on one flat buffer with fused SGD,
without norms, digests and reports.

The program moves into a network namespace with a loopback interface only (Linux, `unshare`, `ip`): torchft's servers
listen on all interfaces. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bounds import finish
from twophase.diloco.engine import DiLoCo

SIZES = {"30m": 30_000_000, "100m": 100_000_000}
LAYERS = 16
WARM_UP = 2  # rounds: the first ones allocate, connect, and agree on a quorum
PORT = 29510  # of the lighthouse; the namespace has no other program
RULE: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def build(parameters: int) -> nn.Module:
    """A transformer's mix in 195 tensors, the same in every process: 16 layers of 12, an embedding, a final norm."""
    width = max(16, round(832 * (parameters / 150e6) ** 0.5) // 16 * 16)
    linear = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    layer: list[tuple[int, ...]] = [*linear, (width, 4 * width), (width,), *[(width,)] * 4]
    rest = parameters - LAYERS * sum(torch.Size(shape).numel() for shape in layer)
    generator, module = torch.Generator().manual_seed(0), nn.Module()
    for number, shape in enumerate([(rest // width, width), *layer * LAYERS, (width,), (width,)]):
        module.register_parameter(f"p{number}", nn.Parameter(torch.empty(shape).normal_(generator=generator)))
    return module


@torch.no_grad()
def progress(module: nn.Module, rank: int) -> None:
    """Stand in for the inner steps, which are not timed."""
    torch._foreach_mul_(list(module.parameters()), 1 - 1e-3 * (rank + 1))


class Torchft:
    """torchft's DiLoCo: the whole module one fragment, no buckets, synchronous quorum."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        import torchft  # noqa: PLC0415 - an extra, and its modules are no memory of ours
        from torchft.local_sgd import DiLoCo as TheirDiLoCo  # noqa: PLC0415

        limit = timedelta(seconds=120)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place: Any = {"rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": self.store.port}
        place |= {"hostname": "127.0.0.1", "lighthouse_addr": f"http://127.0.0.1:{PORT}"}
        times: Any = {"timeout": limit, "quorum_timeout": limit, "quorum_retries": 10}
        state: Any = {"load_state_dict": lambda _: None, "state_dict": dict}
        fixed: Any = {"min_replica_size": 2, "use_async_quorum": False, "init_sync": False}
        group = torchft.ProcessGroupGloo(timeout=limit)
        self.manager = torchft.Manager(pg=group, replica_id=f"replica{rank}", **place, **times, **state, **fixed)
        self.agreement = 0.0  # seconds of the last sync's quorum and vote
        for name in ("start_quorum", "should_commit"):
            setattr(self.manager, name, self._timed(getattr(self.manager, name)))
        self.inner = torch.optim.SGD(module.parameters(), lr=0.0)  # no gradients: its step does nothing but sync
        outer = torch.optim.SGD(module.parameters(), **RULE)
        self.engine = TheirDiLoCo(self.manager, [module], self.inner, [outer], sync_every=1, use_bucketization=False)
        self.engine.__enter__()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.agreement += time.perf_counter() - begin

        return timed

    def step(self) -> None:
        """Take a sync, which both processes must commit."""
        self.agreement, before = 0.0, self.manager.current_step()
        self.inner.step()
        if self.manager.current_step() != before + 1 or self.manager.num_participants() != 2:
            raise RuntimeError("torchft: a sync was not committed by both processes")


class Flat:
    """The strongest peer: parameters as views of one flat buffer, one all-reduce, fused SGD, nothing checked."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        for p, view in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            p.data = view.view(p.shape)
        self.anchor = self.flat.clone()
        self.anchor.grad = torch.empty_like(self.flat)
        self.outer = torch.optim.SGD([self.anchor], fused=True, **RULE)

    @torch.no_grad()
    def step(self) -> None:
        """Take a sync."""
        gradient = self.anchor.grad
        assert gradient is not None
        torch.sub(self.anchor, self.flat, out=gradient)
        dist.all_reduce(gradient)
        gradient.div_(2)
        self.outer.step()
        self.flat.copy_(self.anchor)


def compare(names: list[str], parameters: int, rounds: int, rank: int) -> dict[str, Any]:
    """Return each engine's seconds of each sync, whether all end with the same bits, and the process's peak memory."""
    modules = {name: build(parameters) for name in names}
    builders = {
        "ours": lambda m: DiLoCo(m, "nesterov", inner_steps=1),
        "torchft": lambda m: Torchft(m, rank),
        "flat": Flat,
    }
    engines: dict[str, Any] = {name: builders[name](module) for name, module in modules.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP + rounds):
        for name in names if number % 2 else reversed(names):
            progress(modules[name], rank)
            dist.barrier()
            begin = time.perf_counter()
            engines[name].step()
            seconds[name].append(time.perf_counter() - begin - getattr(engines[name], "agreement", 0.0))
    first, *others = [list(module.parameters()) for module in modules.values()]
    equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    # Peak resident bytes; `ru_maxrss` would begin at the parent's.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    return {"seconds": {name: times[WARM_UP:] for name, times in seconds.items()}, "equal": equal, "peak": peak}


def run(names: list[str], parameters: int, rounds: int) -> dict[str, Any]:
    """Return what two processes with these engines measure: median seconds of the slower one, and the larger peak."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w", encoding="utf-8") as log:
        words = [sys.executable, __file__, "--worker", json.dumps([names, parameters, rounds, f"{folder}/store"])]
        started = []
        if "torchft" in names:
            options = ["--bind", f"127.0.0.1:{PORT}", "--min_replicas", "2", "--join_timeout_ms", "10000"]
            started.append(subprocess.Popen([str(program), *options], stdout=log, stderr=log))
        pipes: Any = {"env": environment, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        workers = [subprocess.Popen([*words, "--rank", str(rank)], **pipes) for rank in range(2)]
        try:
            results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in workers]
        finally:
            for process in [*started, *workers]:
                process.kill()
                process.wait()
    if not all(result["equal"] for result in results):
        raise SystemExit(f"sync: {' and '.join(names)} ended with different parameters, so not the same work was done")
    columns = {name: zip(*(result["seconds"][name] for result in results), strict=True) for name in names}
    medians = {name: statistics.median(map(max, column)) for name, column in columns.items()}
    return medians | {"peak": max(result["peak"] for result in results)}


def worker(task: str, rank: int) -> None:
    """Take one process's part, and print its result."""
    names, parameters, rounds, store = json.loads(task)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    print(json.dumps(compare(names, parameters, rounds, rank)), flush=True)
    os._exit(0)  # torchft's threads would keep the process


def enter_namespace() -> None:
    """Start this program again in a network namespace of its own, where that is allowed; else return."""
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    for command in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        tools = shutil.which("unshare") and shutil.which("ip")
        if tools and subprocess.run([*command, *inside, "true"], check=False, capture_output=True).returncode == 0:
            program = [sys.executable, *sys.argv, "--inside"]
            os.execvp(command[0], [*command, *inside, *program])  # noqa: S606 - this program again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed syncs of each engine (default 9)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="parameters (default both)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.rank)
    if not options.inside:
        enter_namespace()
    peers = ["flat", "torchft"] if options.inside and find_spec("torchft") else ["flat"]
    figures: dict[str, float | None] = {}
    for size in options.sizes:
        for peer in peers:
            ours, other, _ = run(["ours", peer], SIZES[size], options.rounds).values()
            figures[f"{peer}_time_ratio_{size}"] = round(ours / other, 4)
            print(f"{size} parameters: ours {ours:.3f} s, {peer} {other:.3f} s, {ours / other:.2f}; same bits")
        if "torchft" in peers:
            ours, other = (run([name], SIZES[size], 1)["peak"] for name in ("ours", "torchft"))
            figures[f"torchft_memory_ratio_{size}"] = round(ours / other, 4)
            print(f"{size} parameters: ours {ours / 1e6:.0f} MB, torchft {other / 1e6:.0f} MB, {ours / other:.2f}")
    return finish("sync", figures)


if __name__ == "__main__":
    sys.exit(main())
