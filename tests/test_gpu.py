"""The benchmarks that want a GPU: what they do without one, and with damaged or missing things."""

from __future__ import annotations

import csv
import functools
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import pytest
import torch
from torch.autograd import DeviceType

import engine_overhead
import gpu
import lm_throughput
import textmaker
from gpu_parts import driver, engine, kernels, run
from gpu_parts.records import Record, Settings, Unfinished, toy
from twophase.base.config import RunError, from_tree
from twophase.recipes.pretraining import RECIPES, nano, paper_150m
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.speed import flops_per_token

PROGRAM = gpu.HERE / "gpu.py"
ABSENT = "optuna alembic sqlalchemy rich scipy datasets submitit".split()
"""Packages that a bare machine with a GPU does not have."""
FILES = {
    *(f"{part}.{ending}" for part in gpu.PARTS for ending in ("json", "log")),
    *(f"probe-{name}.csv" for name in ("kernels", "products", "attention", "sum", "variants")),
    *("engine-phases.csv", "run.csv", "run.png", "nano.csv", "figures.json"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return textmaker.write(tmp_path_factory.mktemp("text") / "text.txt", documents=200)


@pytest.fixture
def words(tmp_path: Path, text: Path) -> list[str]:
    """Options of a toy's parts on a small text; a new folder."""
    return ["--out", str(tmp_path / "out"), "--tiny", "--corpus", f"file:{text}", "--work", str(tmp_path / "work")]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the program does to its process is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    yield
    torch.set_num_threads(1)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def forked_child(words: list[str], *, check: bool) -> Any:
    """In place of `subprocess.run` for a process that trains: forked, it need not import torch again."""
    assert not check
    folder, tree, kill_after = words[3:]
    if (pid := os.fork()) == 0:
        engine.child(Path(folder), from_tree(TrainConfig, json.loads(tree)), int(kill_after))
        os._exit(0)
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class ForkedContestant:
    """In place of `subprocess.Popen` for a contestant's process, for the same reason."""

    ends: ClassVar[list[IO[str]]] = []
    """Ours of the pipes to earlier ones: a process that held one of them would keep its reader waiting."""

    def __init__(self, words: list[str], **_: Any) -> None:
        requests, answers = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            for end in self.ends:
                end.close()
            os.close(requests[1])
            sys.stdin, sys.stdout = os.fdopen(requests[0]), os.fdopen(answers[1], "w")
            lm_throughput.work(words[3], from_tree(TrainConfig, json.loads(words[5])))
            os._exit(0)
        os.close(requests[0])
        os.close(answers[1])
        self.pid, self.stdin, self.stdout = pid, os.fdopen(requests[1], "w"), os.fdopen(answers[0])
        self.ends.append(self.stdin)

    def wait(self, _: float = 0.0) -> int:
        """Its exit status once it has ended."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def forked_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants are forked from this process."""
    pipes = {"Popen": ForkedContestant, "TimeoutExpired": TimeoutError, "PIPE": None}
    monkeypatch.setattr(lm_throughput, "subprocess", SimpleNamespace(**pipes))


@pytest.fixture
def units_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are done in this process."""

    def launch(part: str, unit: str, options: Any, end: float) -> int:
        return driver.perform(Namespace(**vars(options) | {"unit": f"{part}.{unit}", "deadline": end}))

    monkeypatch.setattr(driver, "launch", launch)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_contestants", "units_here")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_all_parts(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """All parts leave files and figures; a second call does nothing."""
    monkeypatch.setattr(engine, "subprocess", SimpleNamespace(run=forked_child))
    for name in ("torch._dynamo.convert_frame", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)  # once, not in each process
    monkeypatch.setattr(sys, "argv", [*sys.argv])  # a unit gives a benchmark its own
    # Graphs are made as ever, but run as they are: what makes C++ of them takes most of the time.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    out = tmp_path / "out"

    def call() -> tuple[dict[str, float], list[str]]:
        assert gpu.main([*words, "--seed", "0"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[-1]), lines[:-1]

    figures, said = call()
    assert set(contents(out)) == FILES
    for name in ("rho", "eager_ratio", "compiled_ratio", "peak_memory_gb", "tokens_ratio_s1", "nano_nesterov_best_k"):
        assert figures[name] > 0
    assert (figures["resume_same_bits"], figures["units_left"], figures["nano_cells"]) == (1, 0, 20)
    rows = table(out / "probe-sum.csv")
    step = float(rows[-1]["ms"])
    assert step == pytest.approx(sum(float(row["ms"]) for row in rows if row["part"] not in ("step", "sum of kernels")))
    assert [row["cell"] for row in table(out / "nano.csv")].count("auto-1-auto") == 1
    before = contents(out)
    again, said = call()
    assert (again, said, contents(out)) == (figures, [], before)


@pytest.mark.slow
@pytest.mark.usefixtures("units_here")
def test_killed_call(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]):
    """A call with few packages that is killed takes its unit's process with it; the next one does what is left."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    words += ["--seed", "1", "--parts", "nano"]
    environment = os.environ | {"PYTHONPATH": str(bare)}
    command = [sys.executable, str(PROGRAM), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("seed 1, nesterov-0.7-3"):
                break
        (unit,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{unit}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{unit}").exists()
    before = [row["cell"] for row in table(tmp_path / "out" / "nano.csv")]
    assert before[3:4] == ["nesterov-0.7-3"]
    assert gpu.main(words) == 0
    rows = [row["cell"] for row in table(tmp_path / "out" / "nano.csv")]
    assert rows[: len(before)] == before
    assert len(set(rows)) == len(rows) == 20
    assert capsys.readouterr().out.count("perplexity ") == 20 - len(before)


@pytest.mark.slow
def test_parent_that_is_gone(tmp_path: Path, words: list[str]):
    """A unit's process that says nothing for long also ends when its parent does."""
    (tmp_path / "out").mkdir()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.dup2(read, 0)
        os.close(write)
        os._exit(gpu.main([*words, "--unit", "engine.resume", "--watched"]))
    os.close(read)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
def test_unit_that_takes_too_long(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A unit is ended when its part's time is over, and left to the next call."""
    (tmp_path / "out").mkdir()
    (tmp_path / "program.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(driver, "PROGRAM", tmp_path / "program.py")
    options = gpu.arguments().parse_args(words)
    assert driver.launch("engine", "resume", options, time.time() + 1.0) == driver.UNFINISHED
    assert "--minutes" in capsys.readouterr().out
    assert not (tmp_path / "out" / "engine.json").exists()


def launched(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> list[str]:
    """Have units end at once, one of them badly; the list is of those that were begun."""
    begun: list[str] = []

    def launch(part: str, unit: str, options: Any, end: float) -> int:
        del options, end
        begun.append(part)
        return driver.REFUSED if unit == failing else driver.DONE

    monkeypatch.setattr(driver, "launch", launch)
    return begun


DAMAGED = (
    '{"tiny": true, "uni',
    '{"tiny": true, "units": {"a": 3}, "rows": []}',
    '{"tiny": true, "units": {"kernels": {"figures": {"step_ms": 1.0}}}, "rows": []}',  # without its classes
    '{"tiny": false, "units": {}, "rows": []}',  # not damaged, but of the whole model
)


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_record(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
):
    """A part whose record is damaged, or of another model, is left alone with one message; the others run."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.json").write_text(content)
    begun = launched(monkeypatch)
    assert gpu.main(words) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "probe.json" in line]
    assert len(said) == 1
    assert "--out" in said[0]
    assert {"engine", "run", "nano"} <= set(begun)
    assert (tmp_path / "out" / "probe.json").read_text() == content


def test_failed_unit(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """After a unit that failed the others run; the status says so, and another call is asked for."""
    begun = launched(monkeypatch, failing="overhead_s1")
    assert gpu.main(words) == 1
    assert begun == ["probe"] * 4 + ["engine"] * 4 + ["run", "nano"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["units_left"] == 2  # overhead, and the second seed


def test_the_page_has_what_was_measured():
    """Figures, tables and perplexities of docs/performance.md are those of the files that the GPUs' calls left."""
    page, folder = (gpu.HERE.parent / "docs" / name for name in ("performance.md", "gpu"))
    text = page.read_text(encoding="utf-8")
    records = [json.loads((folder / f"{part}.json").read_text()) for part in ("probe", "engine", "run")]
    figures = {k: v for record in records for unit in record["units"].values() for k, v in unit["figures"].items()}
    for name, shown in {"rho": 3, "compiled_ratio": 2, "eager_ratio": 2, "tokens_ratio_s1": 5}.items():
        assert f"| {figures[name]:.{shown}f} |" in next(
            line for line in text.splitlines() if line.startswith(f"| `{name}`")
        )
    assert f"| peak memory, GB | {figures['peak_memory_gb']:.1f} | H100 |" in text
    assert f"{figures['gpu_tests']:.0f} of {figures['gpu_tests'] + figures['gpu_tests_failed']:.0f} pass" in text
    for row in table(folder / "probe-sum.csv"):
        assert f"{row['part']:>25}  {float(row['ms']):5.4g}  {float(row['share']):8.4g}" in text
    cells: dict[tuple[str, str, str], list[str]] = {}
    for row in table(folder / "nano.csv"):
        key = row["rule"], f"{float(row['lr']):g}", row["restart"].replace("auto", "never")
        cells.setdefault(key, []).append(f"{float(row['perplexity']):.2f}")
    assert sum(map(len, cells.values())) == 40
    names = {"heavy_ball": "heavy ball", "nesterov": "Nesterov", "averaging": "averaging", "auto": "`auto`"}
    for rule, lr in {key[:2] for key in cells}:
        shown = [", ".join(cells.get((rule, lr, restart), ["–"])) for restart in ("never", "7", "5", "3", "2")]
        assert f"| {names[rule]} | {lr} | {' | '.join(shown)} |" in text
    rates = [float(row["tokens_per_second"]) for row in table(folder / "run.csv") if row["tokens_per_second"]]
    assert f"{statistics.median(rates):,.0f} tokens a second (median) in {figures['run_peak_memory_gb']:.1f} GB" in text
    assert f"validation loss of {figures['run_validation_loss']:.3f}" in text


def test_the_tests_that_need_a_gpu_are_there():
    """The unit of these tests leaves them out, with a note, in a tree without them; this one has them."""
    assert all(path.is_dir() for path in engine.TESTS)


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *named: str) -> None:
    """Nothing is begun, and one line names what is wrong and the remedy."""
    assert gpu.main(words) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert all(word in line for word in named), line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without a GPU nothing is begun, and the message names the way to try it."""
    refused(capsys, ["--out", str(tmp_path / "out")], "--tiny")
    assert not (tmp_path / "out").exists()


def test_refusals(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A file in the place of the folder, and a missing package that all parts need, are refused in one line."""
    begun = launched(monkeypatch)
    (tmp_path / "out").touch()
    refused(capsys, words, "--out")
    (tmp_path / "out").unlink()
    monkeypatch.setitem(sys.modules, "yaml", None)
    refused(capsys, words, "PyYAML", "--wheels")
    assert not begun


def test_wheels(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Wheels for this Python can be imported from, those for another are passed over.

    Without the folder, or with a damaged wheel, there is one message, and the parts run with what is installed.
    """
    python, wheels = f"cp{sys.version_info.major}{sys.version_info.minor}", tmp_path / "wheels"
    begun = launched(monkeypatch)
    assert gpu.main([*words, "--wheels", str(wheels)]) == 1
    wheels.mkdir()
    tags = ("pure-1-py3-none-any", f"fitting-1-{python}-{python}-any", "foreign-1-cp27-cp27m-any", "os2-1-py3-none-os2")
    for name in tags:
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}.py", "VALUE = 3\n")
    gpu.unpack(wheels, tmp_path / "place")
    assert {path.name for path in (tmp_path / "place").iterdir()} == {"pure.py", "fitting.py"}
    for name in tags:
        (wheels / f"{name}.whl").unlink()
    (wheels / "broken-1-py3-none-any.whl").write_bytes(b"no zip file")
    capsys.readouterr()
    assert gpu.main([*words, "--wheels", str(wheels)]) == 1
    assert sum("--wheels" in line for line in capsys.readouterr().out.splitlines()) == 1
    assert begun == 2 * begun[: len(begun) // 2]
    assert set(begun) == set(gpu.PARTS)


def unit_says(capsys: pytest.CaptureFixture[str], words: list[str], unit: str, *options: str) -> tuple[int, list[str]]:
    """The status of a unit in this process, and its lines."""
    Path(words[words.index("--out") + 1]).mkdir(exist_ok=True)
    status = gpu.main([*words, "--unit", unit, *options])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("unit", ["run.curve", "probe.kernels"])
def test_too_little_memory(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unit: str
):
    """A device on which not even one sequence fits ends a unit with one message and the remedy; nothing is recorded."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("twophase.tasks.lm.step.loss", full)
    status, (line,) = unit_says(capsys, words, unit, "--deadline", str(time.time() + 60))
    assert status == driver.REFUSED
    assert "out of memory at --compute.micro-batch 1" in line
    assert not (tmp_path / "out" / f"{unit.partition('.')[0]}.json").exists()


@pytest.mark.parametrize(("unit", "kernel"), [("probe.device", "cudnn"), ("run.curve", "flash")])
def test_attention_that_is_not_there(words: list[str], capsys: pytest.CaptureFixture[str], unit: str, kernel: str):
    """A kernel that was asked for and does not work here ends a unit with one message that names the remedy."""
    status, lines = unit_says(capsys, words, unit, "--attention", kernel)
    assert status == driver.REFUSED
    (line,) = [line for line in lines if line.startswith(unit.replace(".", " "))]
    assert kernel in line
    assert "auto" in line


def test_unexpected_error(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An error that nothing foresaw is one line, and its traceback is in the log."""

    def fail(*_: Any) -> None:
        raise AssertionError("a kernel\nwithout a name")

    monkeypatch.setitem(run.UNITS, "curve", fail)
    status, lines = unit_says(capsys, words, "run.curve")
    assert (status, len(lines)) == (driver.FAILED, 1)
    assert "Traceback" in (tmp_path / "out" / "run.log").read_text()


@pytest.mark.slow
def test_run_stops_and_goes_on(tmp_path: Path, words: list[str]):
    """A run that stops near its deadline keeps its curve, and goes on to the same losses as one that does not stop."""
    corpus = words[words.index("--corpus") + 1]

    def losses(out: str, *deadlines: float) -> list[str]:
        folder = tmp_path / out
        folder.mkdir()
        for seconds in deadlines:
            settings = Settings(folder, tmp_path / f"{out}-work", time.time() + seconds, tiny=True, corpus=corpus)
            settings.work.mkdir(exist_ok=True)
            try:
                run.curve(settings, Record(folder, "run", tiny=True))
            except Unfinished:
                assert not (folder / "run.json").exists()
                assert (folder / "run.csv").exists()
        assert "curve" in Record(folder, "run", tiny=True).units
        return [row["validation_loss"] for row in table(folder / "run.csv")]

    assert losses("parts", -1.0, 1000.0) == losses("whole", 1000.0)


KINDS = {
    "matrix products": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "triton_tem_fused_mm_3",
        "aten::mm",
    ),
    "attention": (
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
        "fmha_cutlassB_bf16_aligned_64x64_k64_seqaligned_sm80(...)",
    ),
    "elementwise": (
        "triton_poi_fused__scaled_dot_product_flash_attention__to_copy_mm_t_4",
        "triton_red_fused__to_copy_logsumexp_2",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
    ),
    "optimizer": ("void at::native::multi_tensor_apply_kernel<..., at::native::FusedAdamMathFunctor<float>>",),
    "other": ("Memcpy DtoD (Device -> Device)", "Memset (Device)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_class_of_a_kernel(kind: str):
    """Kernels by names seen in traces; what Inductor has fused near attention is not attention."""
    assert {kernel: kernels.class_of(kernel) for kernel in KINDS[kind]} == dict.fromkeys(KINDS[kind], kind)


def test_kernels_alone_make_a_step(monkeypatch: pytest.MonkeyPatch):
    """Products and attention, timed alone, hold the operations that are counted for a step."""

    def at_once(call: Any, *_: Any) -> float:
        call()  # shapes and types fit
        return 1e-3

    monkeypatch.setattr(kernels, "seconds_of", at_once)
    config, meta = paper_150m(), torch.device("meta")
    products = kernels.products(config, meta, 65536, 1.0)
    attention = [line for line in kernels.attentions(config, meta, 32, 1.0) if line["kernel"] == "flash"]
    counted = flops_per_token(config.model, 32000, 2048)
    step = {name: count * config.step_tokens for name, count in counted._asdict().items()}
    done = sum(1e12 * line["tflops"] * 1e-3 * line["step_ms"] for line in products)
    square = step["palm"] - step["causal"]
    assert done == pytest.approx(step["causal"] - square)
    # Forward and backward of attention by kernels that compute scores again: 7 products where 6 are counted.
    assert 1e12 * attention[0]["tflops"] * 1e-3 * attention[0]["step_ms"] == pytest.approx(square * 7 / 6)


TRACE = (
    ("nvjet_tst_128x256", DeviceType.CUDA, 8000.0, 20),
    ("triton_poi_fused_mul_0", DeviceType.CUDA, 2000.0, 4),
    ("aten::mm", DeviceType.CPU, 8000.0, 20),  # launched the first line
    ("Optimizer.step#AdamW.step", DeviceType.CUDA, 500.0, 2),  # a stretch with kernels of its own
    ("Memset (Device)", DeviceType.CUDA, 400.0, 2),
)
"""The profiler's averages of two steps on a GPU."""


def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Each kernel counts once; classes and remainder add up to the step; a trace without kernels has no sum."""
    names = ("key", "device_type", "self_device_time_total", "count")
    rows = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in TRACE]
    monkeypatch.setattr(kernels, "profile", lambda **_: nullcontext(SimpleNamespace(key_averages=lambda: rows)))
    monkeypatch.setattr(kernels, "wait_for", lambda _: 0.0)
    top, classes, _ = kernels.profiled(lambda: None, torch.device("cuda"), 2)
    assert [(line["kernel"], line["ms"], line["calls"]) for line in top] == [
        ("nvjet_tst_128x256", 4.0, 10),
        ("triton_poi_fused_mul_0", 1.0, 2),
        ("Memset (Device)", 0.2, 1),
    ]
    assert classes == {"matrix products": 4.0, "elementwise": 1.0, "other": 0.2, "attention": 0.0, "optimizer": 0.0}
    sums = {row["part"]: row["ms"] for row in kernels.closing_sum(6.0, classes, {})}
    assert sums["remainder: no kernel runs"] == pytest.approx(0.8)
    rows[:] = rows[2:3]
    with pytest.raises(RunError, match="trace"):
        kernels.profiled(lambda: None, torch.device("cuda"), 2)


def test_recipe_of_another_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`engine_overhead.py --recipe` runs a recipe that names a tokenizer, which its text has no use for."""
    config = toy(nano())
    config = replace(config, data=replace(config.data, tokenizer="mistral"))
    monkeypatch.setitem(RECIPES, "toy", lambda *_, **__: config)
    words = "--recipe toy --inner-steps 1 2 --seconds 0 --block 2 --device cpu".split()
    monkeypatch.setattr(sys, "argv", ["engine_overhead.py", *words])
    assert engine_overhead.main() == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() == {f"{name}_s{s}" for name in ("tokens_ratio", "engine_share") for s in (1, 2)}
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_contestants")
def test_contestant_that_fails():
    """A contestant that cannot be built is left out with its reason; the other's bursts are measured."""
    config = toy(nano())
    contestants = {
        "product": lm_throughput.Contestant("product", config),
        "ours": lm_throughput.Contestant("ours", replace(config, device="nowhere")),
    }
    outcomes = lm_throughput.contest(contestants, 0.0, 0.01)
    assert len(outcomes["product"].seconds) == 3
    assert outcomes["ours"].error
    assert not outcomes["ours"].seconds
