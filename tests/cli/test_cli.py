"""The command line as a person meets it: start-up, messages, exit statuses, killing and resuming."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import textmaker
from amount import amount
from commands import SMALL, snapshot
from forked import Forked, call
from twophase.cli import main as cli
from twophase.cli.commands import COMMANDS


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A `file:` corpus."""
    return f"file:{textmaker.write(tmp_path / 'text.txt')}"


def test_help_without_torch() -> None:
    """`--help`, of the program and of each command, loads no torch."""
    code = (
        "import sys, contextlib; from twophase.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules), 'heavy imports'"
    )
    for words in (["--help"], ["--version"], ["study", "--list"], *([command, "--help"] for command in COMMANDS)):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "twophase: error: 'trian' is no command; choose from demo, train, data, export, sweep"),
        ("train --outer.momentum 1", "--outer.momentum is 1.0; it must lie in [0, 1)"),
        ("train --outer.restart 0", "--outer.restart: Periodic: period is 0; it must be a whole number >= 1"),
        ("train --outer.lr -1", "--outer.lr is -1.0; it must be a finite number >= 0"),
        ("train --inner-steps 1000", "--inner-steps is 1000; it must be at most steps (960)"),
        ("train --outer.lrr 1", "Perhaps you meant"),
        ("train --inner-steps few", "--inner-steps"),
        ("train --config absent.yaml", "--config absent.yaml: cannot be read (No such file or directory)"),
        ("train --data.corpus file:absent.txt", "absent.txt"),
        ("train --data.corpus library", "library"),
        ("train --device cuda:77", "--device cuda:77 cannot be used here"),
        ("train --recipe large", "--recipe is 'large'; it must be one of paper_150m, small, nano"),
        ("train --recipe paper_150m --device cpu", "tokens:data/c4: there is no such file or folder"),
        ("train --data.corpus tokens:absent", "absent"),
        ("train --data.tokenizer mistral", "--data.tokenizer is 'mistral', but --data.corpus python is text"),
        ("train --model.vocabulary-size 50", "--model.vocabulary-size is 50; --data.vocabulary char has 96 tokens"),
        ("train --compute.micro-batch 3", "--compute.micro-batch is 3; it must be 0 (as many as the memory holds)"),
        ("train --compute.precision fp8", "fp8"),
        ("train --compute.attention flash", "--compute.attention is flash; --device cpu has no choice of kernels"),
        ("train --track mlflow", "mlflow"),
        ("train --replica 1", "--replica is for replicas that come and go, and --lighthouse is missing; give the URL"),
        ("train --min-replicas 1", "--min-replicas is for replicas that come and go, and --lighthouse is missing"),
        ("train --lighthouse http://127.0.0.1:1", "--replica is missing; with --lighthouse each replica has a number"),
        ("train --lighthouse http://127.0.0.1:1 --replica 2", "--replica is 2; it must be at least 0 and below"),
        ("data prepare absent.txt --out tokens", "absent.txt"),
        ("data count", "count"),
        ("export absent there", "absent"),
        ("sweep", "no --axis; name at least one"),
        ("sweep --axis outer.lrr 1 2", "outer.lr"),
        ("sweep --axis outer.momentum 0.5 1", "momentum"),
        ("sweep --axis inner.betas 0.9 0.99", "an axis varies a single number, word or true/false, or words"),
        ("sweep --axis sync.restart 3 loss", "--axis sync.restart: '3' is not NAME=VALUE; write one for each name"),
        (
            "sweep --sync.fragments 2 --axis sync.restart 0=3 1=5",
            "--sync.restart names 0, and the fragments are 0, 1; give each fragment its policy, on an axis of a sweep "
            "with commas between them",
        ),
        ("sweep --axis sync.fragments none 2", "--sync.fragments is empty; it must be a whole number >= 1"),
        ("sweep --axis outer.lr 1 --in-memory -1", "--in-memory is -1; it must be a whole number >= 0"),
        ("demo --in-memory -1 --dry-run", "--in-memory is -1; it must be a whole number >= 0"),
        ("sweep --axis outer.lr 1 --workers -1", "--workers is -1; it must be a whole number >= 1, or 0"),
        ("sweep --axis outer.lr 1 --slurm-time 60", "--slurm-time is given without --launcher slurm"),
        ("sweep --axis outer.lr 1 --launcher pbs", "--launcher: invalid choice: 'pbs'"),
        ("sweep-worker", "the following arguments are required: --out"),
        ("sweep-worker --out absent", "holds no plan.json; start the sweep there first"),
        ("sweep-worker --out absent --in-memory -1", "--in-memory is -1; it must be a whole number >= 0"),
        ("demo --seeds -1", "seed"),
        ("study", "twophase study: error: name a study: "),
        ("study figure_1", "twophase study: error: 'figure_1' is no study; choose from "),
        ("study robustness_toy --fast", "unrecognized arguments: --fast"),
    ],
)
def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    """A mistake ends with status 2 and one message that names the thing; nothing is made on disk."""
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(words.split())
    except SystemExit as end:
        status = end.code
    told = capfd.readouterr().err
    assert status == 2, told
    assert message in " ".join(told.replace("│", " ").split())
    assert snapshot(tmp_path) == {}


def test_a_mistake_from_outside(tmp_path: Path) -> None:
    """The process itself ends with status 2 and the message, and shows nobody a traceback."""
    done = call(*"train --outer.momentum 1".split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("twophase train: error: --outer.momentum is 1.0; it must lie in [0, 1)")
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A device too small for weights and optimizers ends with status 1 and one message; other errors stay errors."""

    def full(_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("twophase.cli.train.main", full)
    assert cli.main(["train"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Tried to allocate 9 GiB); give a smaller model" in told

    def broken(_: object) -> int:
        raise RuntimeError("shapes")

    monkeypatch.setattr("twophase.cli.train.main", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main(["train"])


def test_list_of_studies() -> None:
    """`study --list` is one line a study: its name and its question."""
    lines = call("study", "--list").stdout.splitlines()
    assert len(lines) >= 4
    assert all(line.split()[0].isidentifier() and line.endswith("?") for line in lines)
    assert call("study", "figure_1").stderr.endswith(", ".join(line.split()[0] for line in lines) + "\n")


def test_study(tmp_path: Path) -> None:
    """A study prints its question, its answer and its four files, which lie in runs/studies."""
    pytest.importorskip("matplotlib")
    done = call("study", "period_criteria", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "How much does each criterion for the restart period lose against the best period?"
    assert "oes not hold: '" in done.stdout or "Holds: '" in done.stdout
    files = [f"runs/studies/period_criteria{ending}" for ending in (".png", ".pdf", ".csv", ".json")]
    assert lines[-4:] == files
    assert sorted(snapshot(tmp_path)) == sorted(files)


BAD_TEXTS = {
    "empty": (b"", "empty"),
    "blank": (b" \n\n \n", "no text"),
    "latin": ("été. ".encode("latin-1") * 500, "UTF-8"),
    "single": (b"A line.\n\nAnother line.\n" * 2, "is a single document"),
    "short": (b"Some words in a line.\n\n" * 200, "--data.sequence-length"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_texts(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """A text that is missing, empty, not UTF-8 or too small is refused by name; no run folder is made."""
    content, message = BAD_TEXTS[name]
    path = tmp_path / f"{name}.txt"
    path.write_bytes(content)
    words = ["--data.corpus", f"file:{path}", "--data.sequence-length", "4000", "--out", str(tmp_path / "run")]
    assert cli.main(["train", *words]) == 2
    told = capfd.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_config_layers(tmp_path: Path) -> None:
    """YAML files are laid over each other from left to right and options win; `--print-config` reads back the same."""
    (tmp_path / "a.yaml").write_text("outer: {lr: 0.3, nesterov: false, restart: 3}\ninner: {schedule: wsd}\nseed: 5\n")
    (tmp_path / "b.yaml").write_text("outer: {lr: 1e-1}\n")
    files = ["--config", tmp_path / "a.yaml", "--config", tmp_path / "b.yaml"]
    done = call("train", *files, "--seed", "7", "--print-config")
    assert done.returncode == 0, done.stderr
    assert all(
        line in done.stdout for line in ("lr: 0.1", "nesterov: false", "restart: '3'", "schedule: wsd", "seed: 7")
    )
    (tmp_path / "c.yaml").write_text(done.stdout)
    assert call("train", "--config", tmp_path / "c.yaml", "--print-config").stdout == done.stdout


def test_misspelt_yaml(tmp_path: Path) -> None:
    """A key that does not exist is refused with the nearest one, and the file's name."""
    (tmp_path / "a.yaml").write_text("outer: {momentun: 0.3}\n")
    done = call("train", "--config", tmp_path / "a.yaml")
    assert done.returncode == 2
    assert "outer.momentun is no value of the configuration; did you mean outer.momentum?" in done.stderr
    assert "a.yaml" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("outer: {nesterov: 'true'}", "outer.nesterov is 'true'; write true or false"),
        ("outer: {nesterov: 1}", "outer.nesterov is 1; write true or false"),
        ("outer: null", "outer is no value"),
        ("seed: false", "seed is False; write one value"),
        ("model: {layers: [2]}", "model.layers is [2]; write one value"),
        ("inner: {betas: 0.9}", "inner.betas is 0.9; write a list"),
        ("help: 1", "help is no value"),
    ],
)
def test_yaml_of_the_wrong_kind(tmp_path: Path, text: str, message: str) -> None:
    """A YAML value of the wrong kind is refused by file, name, value and remedy."""
    (tmp_path / "a.yaml").write_text(text)
    done = call("train", "--config", tmp_path / "a.yaml")
    assert done.returncode == 2
    assert f"--config {tmp_path / 'a.yaml'}: {message}" in done.stderr


def test_booleans_may_be_spelt_out() -> None:
    """`--outer.nesterov false` means `--outer.no-nesterov`."""
    for words in (["--outer.nesterov", "false"], ["--outer.no-nesterov"]):
        assert "nesterov: false" in call("train", *words, "--print-config").stdout
    assert "nesterov: true" in call("train", "--outer.nesterov", "True", "--print-config").stdout


def test_repeating_a_finished_run(tmp_path: Path, corpus: str) -> None:
    """A repeated command prints the same result, trains nothing and changes no file."""
    words = ["train", *SMALL, "--data.corpus", corpus, "--out", tmp_path / "run"]
    first = call(*words)
    assert first.returncode == 0, first.stderr
    before = snapshot(tmp_path / "run")
    again = call(*words)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert snapshot(tmp_path / "run") == before
    assert {"config.yaml", "env.json", "metrics.jsonl", "rounds.jsonl", "summary.json"} <= set(before)


def test_folder_of_another_run(tmp_path: Path, corpus: str) -> None:
    """Another run's folder is refused with what differs, and left as it was; so is a folder of other files."""
    words = ["train", *SMALL, "--data.corpus", corpus, "--out", tmp_path / "run"]
    assert call(*words).returncode == 0
    before = snapshot(tmp_path)
    done = call(*words, "--outer.lr", "0.3")
    assert done.returncode == 2
    assert "outer.lr is 0.7 there, 0.3 here" in done.stderr
    assert "--out" in done.stderr
    done = call("train", *SMALL, "--data.corpus", corpus, "--out", tmp_path)
    assert done.returncode == 2
    assert snapshot(tmp_path) == before


def test_truncated_checkpoint(tmp_path: Path, corpus: str) -> None:
    """A cut checkpoint is refused by name with the remedy; the remedy works and gives the uninterrupted result."""
    words = ["train", *SMALL, "--data.corpus", corpus, "--out", tmp_path / "run"]
    assert call(*words).returncode == 0
    whole = (tmp_path / "run" / "weights.safetensors").read_bytes()
    (tmp_path / "run" / "summary.json").unlink()
    newest = tmp_path / "run" / "checkpoint" / "step-00000022"
    part = newest / "replica-001.safetensors"
    part.write_bytes(part.read_bytes()[:1000])
    before = snapshot(tmp_path)
    done = call(*words)
    assert done.returncode == 2
    assert f"checkpoint {newest} is damaged: replica-001.safetensors has changed" in done.stderr
    assert "rename that folder" in done.stderr
    assert snapshot(tmp_path) == before
    newest.rename(newest.with_name(f"{newest.name}.bad"))
    assert call(*words).returncode == 0
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == whole


def test_divergence_ends_with_status_1(tmp_path: Path, corpus: str) -> None:
    """A single run that diverges says so with status 1, keeps its summary, and says it again when repeated."""
    words = ["train", *SMALL, "--data.corpus", corpus, "--out", tmp_path / "run", "--outer.lr", "300"]
    for _ in range(2):
        done = call(*words)
        assert done.returncode == 1
        assert "diverged at step" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["diverged"] is True


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[list[str], Path]]:
    """The words of a run with a seed, which nobody stops, and its folder; made once for all tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    text = textmaker.write(folder / "text.txt")

    @cache
    def train(seed: int) -> tuple[list[str], Path]:
        size = ["--steps", "150", "--data.corpus", f"file:{text}", "--outer.restart", "3", "--seed", str(seed)]
        out = folder / str(seed)
        assert call("train", *SMALL, *size, "--out", out).returncode == 0
        return ["train", *SMALL, *size], out

    return train


def wait_for(path: Path, process: Forked, pattern: str = "*") -> None:
    """Return as soon as something that matches is in the folder, or the process has ended."""
    while process.poll() is None and not any(path.glob(pattern)):
        time.sleep(0.0005)


def rounds_of(folder: Path) -> int:
    """The rounds that a run has noted."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(
    tmp_path: Path, uninterrupted: Callable[[int], tuple[list[str], Path]], number: signal.Signals, status: int
) -> None:
    """Ctrl-C and SIGTERM save, print the command that resumes, and that command ends as if nothing had happened."""
    words, whole = uninterrupted(0)
    words = [*words, "--out", str(tmp_path / "run")]
    process = Forked(*words)
    wait_for(tmp_path / "run" / "checkpoint", process, "step-*")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    hint = errors.splitlines()[-1].removeprefix("stopped; resume with: ")
    assert shlex.split(hint) == ["python", "-m", "twophase", *words]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert call(*shlex.split(hint)[3:]).returncode == 0
    weights = [(folder / "weights.safetensors").read_bytes() for folder in (tmp_path / "run", whole)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(amount(1, 10)))
def test_killed_at_random_moments(
    tmp_path: Path, uninterrupted: Callable[[int], tuple[list[str], Path]], seed: int
) -> None:
    """SIGKILL at random moments, checkpoint writes included: the end is byte for byte the uninterrupted one."""
    words, whole = uninterrupted(seed)
    run = tmp_path / "run"
    source = random.Random(seed)
    kills = writes = 0
    while True:
        ahead = max(1, rounds_of(run) + source.randrange(4))  # none ahead: while it starts
        process = Forked(*words, "--out", run)
        if kills % 2:
            wait_for(run / "checkpoint", process, ".writing-*")  # in the middle of a write
        elif kills < 6:
            while process.poll() is None and rounds_of(run) < ahead:
                time.sleep(0.0005)
            time.sleep(source.uniform(0, 0.1))
        if kills < 6:
            process.kill()
        process.communicate(timeout=120)
        writes += any((run / "checkpoint").glob(".writing-*"))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 3, "the run was over before it could be killed; make it longer"
    assert writes >= 1, "no kill hit a checkpoint write"
    assert (run / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (run, whole)]
    for end in ends:
        del end["seconds"], end["engine_share"]  # wall times
    assert ends[0] == ends[1]
    rounds = [
        [line | {"seconds": 0} for line in map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())]
        for folder in (run, whole)
    ]
    assert rounds[0] == rounds[1]


@pytest.mark.slow
def test_sweep(tmp_path: Path, corpus: str) -> None:
    """A small grid runs in two workers, writes its table and figure, and a repeated command trains nothing."""
    axes = "--axis outer.lr 0.3 0.7 --axis outer.momentum 0.1 0.9 --axis outer.restart never 2".split()
    words = ["sweep", *SMALL, "--data.corpus", corpus, *axes, "--out", tmp_path / "sweep", "--workers", "2"]
    done = call(*words)
    assert done.returncode == 0, done.stderr
    assert "8 runs finished" in done.stdout
    table = (tmp_path / "sweep" / "cells.csv").read_text().splitlines()
    assert len(table) == 9
    figures = {path.name for path in (tmp_path / "sweep" / "figures").iterdir()}
    assert figures == {"sweep.png", "sweep.pdf", "sweep.csv"}
    before = snapshot(tmp_path / "sweep" / "runs")
    again = call(*words)
    assert again.returncode == 0
    assert "8 were finished before" in again.stdout
    assert snapshot(tmp_path / "sweep" / "runs") == before
    other = call(*words, "--outer.form", "ema")
    assert other.returncode == 2
    assert "belongs to another sweep" in other.stderr
