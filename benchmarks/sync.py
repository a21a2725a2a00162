"""One sync of 150M float32 parameters: time, memory, memory traffic and bytes sent, each as a ratio taken in one run.

Two processes, one thread each, gloo over loopback. A sync is pseudo-gradient, all-reduce, outer Nesterov step and
restored parameters.

`torchft_time_ratio`: `DiLoCo.step()` (all of it: report and checksum too) over the sync of `torchft.local_sgd.DiLoCo`
with `torch.optim.SGD`, without its inner optimizer and without its quorum and vote. Both engines live in the same two
processes and take turns; a sync takes as long as the slower process; medians. Both begin alike and see the same
progress, so both must end with the same bits, which is checked.
`torchft_memory_ratio`: peak resident memory of a process, each engine in a pair of processes of its own.
`flat_time_ratio_30m`, `flat_time_ratio_100m`: the same over the sync of a loop of a few lines on one flat buffer, with
torch's fused SGD and without norms, checksums and agreement; it, too, must end with the same bits.
`copy_bandwidth_ratio`: bytes that a step in one process has to move (without a reduction), over its time, over the rate
of a plain copy of as many parameters (bytes read and written), taken in turn; medians.
`int8_bytes_ratio`, `bfloat16_bytes_ratio`: bytes sent in a round as the engine reports them, over
float32's; `..._loopback` the same as the network interface counts them, TCP's headers and answers included;
`int8_cpu_ratio`, …: CPU time of such a sync over float32's, of all threads of the process that took more, medians. It
is what encoding costs; what a network costs follows from the bytes.

The program moves into a network namespace that has a loopback interface only (Linux, `unshare`, `ip`): so torchft's
servers, which listen on all interfaces, cannot be reached, and the interface's counter sees nothing else. Last line:
one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bounds import finish
from twophase.diloco.comm import ProcessGroup
from twophase.diloco.communicator import SingleProcess
from twophase.diloco.engine import DiLoCo
from twophase.diloco.formats import WIRES
from twophase.rule import OuterRule

RULE = OuterRule(0.7, 0.9, nesterov=True)
LAYERS = 16
WARM_UP = 2  # rounds: the first ones allocate, connect, and agree on a quorum
PASSES = {"read theta, a; write g": 3, "read g, a, m; write a, m, theta": 6}
FLAT = {"30m": 30_000_000, "100m": 100_000_000}
TIMED = 3  # rounds of each wire
LIGHTHOUSE_PORT = 29510  # of the namespace, so it is free


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """A transformer's mix in 195 tensors: 16 layers of 12, an embedding, a final norm."""
    width = max(16, round(832 * (parameters / 150e6) ** 0.5) // 16 * 16)
    linear = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    layer: list[tuple[int, ...]] = [*linear, (width, 4 * width), (width,), *[(width,)] * 4]
    rest = parameters - LAYERS * sum(torch.Size(shape).numel() for shape in layer)
    return [(max(1, rest // width), width), *layer * LAYERS, (width,), (width,)]


def build(parameters: int) -> nn.Module:
    """The parameters, the same in every process, without a gradient."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for number, shape in enumerate(shapes(parameters)):
        tensor = torch.empty(shape).normal_(generator=generator)
        module.register_parameter(f"p{number}", nn.Parameter(tensor))
    return module


@torch.no_grad()
def progress(module: nn.Module, rank: int) -> None:
    """Stand in for the inner steps, which are not timed."""
    torch._foreach_mul_(list(module.parameters()), 1 - 1e-3 * (rank + 1))


def peak_resident() -> int:
    """Peak resident bytes of this process (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def available() -> int:
    """Bytes of memory that programs may still take (Linux)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def loopback_bytes() -> int:
    """Bytes that the namespace's loopback interface has sent."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line.split(":")[1].split()[8] for line in lines if line.strip().startswith("lo:")))


class Torchft:
    """torchft's DiLoCo: the whole module one fragment, one outer optimizer, no buckets, synchronous quorum."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        import torchft  # noqa: PLC0415 - an extra, and only some of the workers may pay for it
        from torchft.local_sgd import DiLoCo as TheirDiLoCo  # noqa: PLC0415

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=120)),
            load_state_dict=_ignore,
            state_dict=dict,
            min_replica_size=2,
            use_async_quorum=False,
            init_sync=False,
            timeout=timedelta(seconds=120),
            quorum_timeout=timedelta(seconds=120),
            quorum_retries=10,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=f"http://127.0.0.1:{LIGHTHOUSE_PORT}",
            replica_id=f"replica{rank}",
            hostname="127.0.0.1",
        )
        self.agreement = 0.0  # seconds that the last sync spent on quorum and vote
        for name in ("start_quorum", "should_commit"):
            setattr(self.manager, name, self._timed(getattr(self.manager, name)))
        self.inner = torch.optim.SGD(module.parameters(), lr=0.0)  # no gradients: its step does nothing but sync
        outer = torch.optim.SGD(module.parameters(), lr=RULE.lr, momentum=RULE.momentum, nesterov=RULE.nesterov)
        self.engine = TheirDiLoCo(
            self.manager, [module], self.inner, [outer], sync_every=1, use_bucketization=False
        ).__enter__()
        self.syncs = 0

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.agreement += time.perf_counter() - begin

        return timed

    def step(self) -> None:
        """One sync."""
        self.agreement = 0.0
        self.inner.step()
        self.syncs += 1
        if self.manager.current_step() != self.syncs or self.manager.num_participants() != 2:
            raise RuntimeError(f"torchft: sync {self.syncs} was not committed by both processes")

    def close(self) -> None:
        """Leave the lighthouse."""
        self.manager.shutdown(wait=False)


class Flat:
    """The strongest peer: parameters as views of one flat buffer, one all-reduce, torch's fused SGD, no proofs."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        for p, view in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            p.data = view.view(p.shape)
        self.anchor = self.flat.clone()
        self.anchor.grad = torch.empty_like(self.flat)
        self.outer = torch.optim.SGD(
            [self.anchor], lr=RULE.lr, momentum=RULE.momentum, nesterov=RULE.nesterov, fused=True
        )

    @torch.no_grad()
    def step(self) -> None:
        """One sync."""
        gradient = self.anchor.grad
        assert gradient is not None
        torch.sub(self.anchor, self.flat, out=gradient)
        dist.all_reduce(gradient)
        gradient.div_(2)
        self.outer.step()
        self.flat.copy_(self.anchor)


def compare_flat(rank: int, parameters: int, rounds: int) -> dict[str, Any]:
    """Seconds of each sync of ours and of the flat loop in turn, and whether both end with the same bits."""
    modules = {"ours": build(parameters), "flat": build(parameters)}
    engines = {
        "ours": DiLoCo(modules["ours"], RULE, inner_steps=1, communicator=ProcessGroup()),
        "flat": Flat(modules["flat"]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(WARM_UP + rounds):
        for name in sorted(engines, reverse=bool(number % 2)):
            progress(modules[name], rank)
            dist.barrier()
            begin = time.perf_counter()
            engines[name].step()
            seconds[name].append(time.perf_counter() - begin)
    pairs = zip(modules["ours"].parameters(), modules["flat"].parameters(), strict=True)
    return {
        "seconds": {name: values[WARM_UP:] for name, values in seconds.items()},
        "equal": all(torch.equal(a, b) for a, b in pairs),
    }


def compare_times(rank: int, parameters: int, rounds: int) -> dict[str, Any]:
    """Seconds of each sync of both engines in turn, the phases of ours, and whether both end with the same bits."""
    model, other = build(parameters), build(parameters)
    engine = DiLoCo(model, RULE, inner_steps=1, communicator=ProcessGroup())
    torchft = Torchft(other, rank)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": [], "agreement": []}
    phases: list[dict[str, float]] = []
    for number in range(WARM_UP + rounds):
        for name in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            progress(model if name == "ours" else other, rank)
            dist.barrier()
            begin = time.perf_counter()
            if name == "ours":
                report = engine.step()
                seconds[name].append(time.perf_counter() - begin)
                assert report is not None
                phases.append(dict(report.seconds))
            else:
                torchft.step()
                seconds[name].append(time.perf_counter() - begin - torchft.agreement)
                seconds["agreement"].append(torchft.agreement)
    torchft.close()
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    timed = {name: values[WARM_UP:] for name, values in seconds.items()}
    medians = {name: statistics.median(phase[name] for phase in phases[WARM_UP:]) for name in phases[0]}
    return {"seconds": timed, "phases": medians, "equal": equal}


def peak(rank: int, parameters: int, kind: str) -> dict[str, Any]:
    """Peak resident bytes of a process with one engine after a few rounds, and before the model was built."""
    if kind == "theirs":
        import torchft  # noqa: F401, PLC0415 - its modules are no memory of the sync
    before = peak_resident()
    module = build(parameters)
    engine: Any = (
        Torchft(module, rank) if kind == "theirs" else DiLoCo(module, RULE, inner_steps=1, communicator=ProcessGroup())
    )
    for _ in range(WARM_UP + 1):
        progress(module, rank)
        engine.step()
    if kind == "theirs":
        engine.close()
    return {"peak": peak_resident(), "before": before}


def traffic(rank: int, parameters: int, wires: list[str]) -> dict[str, Any]:
    """For every wire: CPU seconds of a sync; bytes sent, of this process as reported, of both as counted outside."""
    module = build(parameters)
    result: dict[str, Any] = {}
    for wire in wires:
        options: Any = {} if wire == "float32" else {"wire": wire}
        engine = DiLoCo(module, RULE, inner_steps=1, communicator=ProcessGroup(), **options)
        progress(module, rank)
        report = engine.step()
        seconds, sent = [], 0
        for _ in range(TIMED):
            progress(module, rank)
            dist.barrier()
            before, begin = loopback_bytes(), time.process_time()
            dist.barrier()
            report = engine.step()
            seconds.append(time.process_time() - begin)
            dist.barrier()
            sent = loopback_bytes() - before
            dist.barrier()
        assert report is not None
        result[wire] = {"reported": report.bytes_sent, "loopback": sent, "cpu": statistics.median(seconds)}
        del engine
    return result


def copy_bandwidth(parameters: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step of an engine alone in its process, and of a copy; in turn.

    CPU time of one thread, so that other programs do not enter.
    """
    module = build(parameters)
    engine = DiLoCo(module, RULE, inner_steps=1, communicator=SingleProcess())
    source, target = torch.ones(parameters), torch.zeros(parameters)
    seconds: dict[str, list[float]] = {"step": [], "copy": []}
    for _ in range(WARM_UP + rounds):
        progress(module, 0)
        begin = time.process_time()
        engine.step()
        end = time.process_time()
        target.copy_(source)
        seconds["copy"].append(time.process_time() - end)
        seconds["step"].append(end - begin)
    return {name: statistics.median(values[WARM_UP:]) for name, values in seconds.items()}


def worker(options: argparse.Namespace) -> None:
    """One process's part, and its result as a line of JSON."""
    task, rank = options.worker, options.rank
    torch.set_num_threads(1)
    if options.store:
        dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=rank, world_size=2)
    if task == "times":
        result = compare_times(rank, options.parameters, options.rounds)
    elif task == "copy":
        result = copy_bandwidth(options.parameters, options.rounds)
    elif task == "flat":
        result = compare_flat(rank, options.parameters, options.rounds)
    elif task == "traffic":
        result = traffic(rank, options.parameters, options.wires)
    else:
        result = peak(rank, options.parameters, task)
    print(json.dumps(result), flush=True)
    os._exit(0)  # torchft's threads would keep the process


def run(options: argparse.Namespace, task: str, processes: int = 2) -> list[dict[str, Any]]:
    """The results of the processes of a task, in order of rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("TORCHFT_USE_BUCKETIZATION", None)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", task, "--parameters", str(options.parameters)]
        command += ["--rounds", str(options.rounds), "--wires", *options.wires]
        command += ["--store", f"{folder}/store"] if processes > 1 else []
        logs = [Path(folder, f"{rank}.log") for rank in range(processes)]
        started: list[subprocess.Popen[str]] = []
        lighthouse = start_lighthouse(Path(folder, "lighthouse.log")) if task in ("times", "theirs") else None
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as file:
                    part = [*command, "--rank", str(rank)]
                    started.append(
                        subprocess.Popen(part, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
                    )
            results = [process.communicate()[0] for process in started]
        finally:
            for process in [*started, *([lighthouse] if lighthouse else [])]:
                process.kill()
                process.wait()
        for process, log in zip(started, logs, strict=True):
            if process.returncode:
                raise SystemExit(f"{task}: a process ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        return [json.loads(text.splitlines()[-1]) for text in results]


def start_lighthouse(log: Path) -> subprocess.Popen[Any]:
    """The server of torchft's quorums, for two replicas, on loopback."""
    program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program is not None
    command = [program, "--bind", f"127.0.0.1:{LIGHTHOUSE_PORT}", "--min_replicas", "2", "--join_timeout_ms", "10000"]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def torchft_version() -> str | None:
    """The installed release of torchft."""
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return None


def enter_namespace() -> None:
    """Start this program again in a network namespace of its own, where that is allowed; else return."""
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    for command in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        tools = shutil.which("unshare") and shutil.which("ip")
        if tools and subprocess.run([*command, *inside, "true"], check=False, capture_output=True).returncode == 0:
            program = [sys.executable, *sys.argv, "--inside"]
            os.execvp(command[0], [*command, *inside, *program])  # noqa: S606 - this program again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=150_000_000, help="default 150e6")
    parser.add_argument("--rounds", type=int, default=9, help="timed syncs of each engine (default 9)")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="what may travel (default all)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
    if not options.inside:
        enter_namespace()
    signal.signal(signal.SIGTERM, _stop)  # so that the processes started are stopped too
    count = sum(torch.Size(shape).numel() for shape in shapes(options.parameters))
    options.parameters = count
    print(f"{count / 1e6:.1f}M float32 parameters in {len(shapes(count))} tensors; 2 processes, one thread each")
    figures: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for part in (flat_times, times_and_memory, bandwidth, bytes_sent):
        ratio, rest = part(options)
        ratios |= ratio
        figures |= rest
    rounded = {name: value if value is None else round(value, 4) for name, value in (ratios | figures).items()}
    sys.exit(finish("sync", rounded))


Figures = tuple[dict[str, float | None], dict[str, float | None]]
"""Ratios, and what they were made of."""


def times_and_memory(options: argparse.Namespace) -> Figures:
    """Both engines' syncs, side by side."""
    version = torchft_version()
    if version is None or not options.inside:
        why = "it is not installed" if version is None else "its servers listen on all interfaces; needs a namespace"
        print(f"\ntorchft: not compared, {why}")
        return {"torchft_time_ratio": None, "torchft_memory_ratio": None}, {}
    needed, free = 100 * options.parameters, available()
    if free < needed:
        raise SystemExit(
            f"sync: both engines in two processes take about {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free; "
            f"pass --parameters {free // 125:.1e} or less"
        )
    results = run(options, "times")
    if not all(result["equal"] for result in results):
        raise SystemExit("sync: the two engines ended with different parameters, so they did not do the same work")
    syncs = {
        name: statistics.median(map(max, zip(*(result["seconds"][name] for result in results), strict=True)))
        for name in results[0]["seconds"]
    }
    memory = {name: run(options, name) for name in ("ours", "theirs")}
    peaks = {name: max(result["peak"] for result in results) for name, results in memory.items()}
    before = {name: max(result["before"] for result in results) for name, results in memory.items()}
    time_ratio, memory_ratio = syncs["ours"] / syncs["theirs"], peaks["ours"] / peaks["theirs"]
    print(f"\n{'':22}{'ours':>10}{'torchft ' + version:>16}{'ratio':>8}   after {options.rounds} rounds: same bits")
    print(f"{'sync, s':22}{syncs['ours']:10.3f}{syncs['theirs']:16.3f}{time_ratio:8.2f}")
    print(f"{'quorum and vote, s':22}{'':10}{syncs['agreement']:16.3f}   (not in the line above)")
    print(f"{'peak memory, MB':22}{peaks['ours'] / 1e6:10.0f}{peaks['theirs'] / 1e6:16.0f}{memory_ratio:8.2f}")
    print(f"{'before the model, MB':22}{before['ours'] / 1e6:10.0f}{before['theirs'] / 1e6:16.0f}")
    phases = results[0]["phases"]
    print("our phases, s: " + ", ".join(f"{name} {value:.3f}" for name, value in phases.items()))
    ratios: dict[str, float | None] = {"torchft_time_ratio": time_ratio, "torchft_memory_ratio": memory_ratio}
    details: dict[str, float | None] = {"sync_seconds": syncs["ours"], "torchft_sync_seconds": syncs["theirs"]}
    details |= {"peak_bytes": peaks["ours"], "torchft_peak_bytes": peaks["theirs"]}
    return ratios, details | {f"{name}_seconds": value for name, value in phases.items()}


def flat_times(options: argparse.Namespace) -> Figures:
    """Our syncs beside those of a loop on one flat buffer that proves nothing, at two sizes."""
    print(f"\n{'a flat loop':22}{'ours s':>10}{'flat s':>10}{'ratio':>8}   same bits")
    ratios: dict[str, float | None] = {}
    details: dict[str, float | None] = {}
    for name, parameters in FLAT.items():
        results = run(argparse.Namespace(**vars(options) | {"parameters": parameters}), "flat")
        if not all(result["equal"] for result in results):
            raise SystemExit("sync: ours and the flat loop ended with different parameters: not the same work")
        syncs = {
            kind: statistics.median(map(max, zip(*(result["seconds"][kind] for result in results), strict=True)))
            for kind in ("ours", "flat")
        }
        ratio = syncs["ours"] / syncs["flat"]
        print(f"{parameters / 1e6:.0f}M parameters{'':8}{syncs['ours']:10.3f}{syncs['flat']:10.3f}{ratio:8.2f}")
        ratios[f"flat_time_ratio_{name}"] = ratio
        details |= {f"{kind}_seconds_{name}": value for kind, value in syncs.items()}
    return ratios, details


def bandwidth(options: argparse.Namespace) -> Figures:
    """One process's outer step against a plain copy."""
    seconds = run(options, "copy", processes=1)[0]
    gigabytes = 4e-9 * options.parameters
    copy = 2 * gigabytes / seconds["copy"]
    passes = sum(PASSES.values())
    step = passes * gigabytes / seconds["step"]
    print("\none process: " + " | ".join(f"{what} ({count})" for what, count in PASSES.items()))
    print(f"{passes} passes; the norms and the checksum are taken of what these read")
    print(f"{'':22}{'s':>10}{'GB/s':>10}{'ratio':>8}")
    print(f"{'copy':22}{seconds['copy']:10.3f}{copy:10.2f}{1:8.2f}")
    print(f"{'a step':22}{seconds['step']:10.3f}{step:10.2f}{step / copy:8.2f}")
    return {"copy_bandwidth_ratio": step / copy}, {"copy_gb_s": copy}


def bytes_sent(options: argparse.Namespace) -> Figures:
    """What a round sends on each wire, and what that takes."""
    if "wire" not in inspect.signature(DiLoCo).parameters:
        print("\nwires: this engine knows float32 only")
        options.wires = ["float32"]
    results = run(options, "traffic")
    dense = results[0].get("float32")
    cpu = {wire: max(result[wire]["cpu"] for result in results) for wire in results[0]}
    print(f"\n{'bytes a round':22}{'reported':>14}{'ratio':>8}{'CPU s':>8}{'ratio':>8}{'interface':>14}{'ratio':>8}")
    ratios: dict[str, float | None] = {}
    details: dict[str, float | None] = {}
    for wire, sent in results[0].items():
        counted = sent["loopback"] / 2 if options.inside else None  # both processes send through the one interface
        ratio = sent["reported"] / dense["reported"] if dense else None
        slowdown = cpu[wire] / cpu["float32"] if dense else None
        real = counted / (dense["loopback"] / 2) if dense and counted else None
        print(
            f"{wire:22}{sent['reported']:14}{ratio or 0:8.4f}{cpu[wire]:8.3f}{slowdown or 0:8.2f}"
            + (f"{counted:14.0f}{real or 0:8.4f}" if counted else f"{'(no namespace)':>14}")
        )
        name = wire.partition(":")[0]
        details |= {f"{name}_bytes": sent["reported"], f"{name}_cpu_seconds": cpu[wire]}
        if wire != "float32":
            ratios |= {f"{name}_bytes_ratio": ratio, f"{name}_cpu_ratio": slowdown}
            details[f"{name}_bytes_ratio_loopback"] = real
    return ratios, details


def _ignore(state: object) -> None:
    del state  # no replica joins late here, so nothing is ever loaded


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit(1)


if __name__ == "__main__":
    main()
