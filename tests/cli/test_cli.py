"""The command line end to end: start-up, messages, exit statuses, killing and resuming."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import textmaker
from commands import SMALL, snapshot
from forked import Forked, call
from twophase.base.config import fingerprint, flatten, values_of, with_values
from twophase.base.options import Parser
from twophase.cli import main as cli
from twophase.cli.commands import COMMANDS
from twophase.cli.train import default_folder
from twophase.experiments import _configuration
from twophase.runs.folder import RUN_ID
from twophase.tasks.lm.config import TrainConfig


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A `file:` corpus."""
    return f"file:{textmaker.write(tmp_path / 'text.txt')}"


@pytest.mark.slow
def test_help_without_torch() -> None:
    """`--help`, of the program and of each command, loads no torch."""
    code = (
        "import sys, contextlib, json; from twophase.cli.main import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(SystemExit): main(words)\n"
        "    assert not {'torch', 'matplotlib', 'transformers', 'pandas', 'sklearn'} & set(sys.modules), words"
    )
    commands = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_has_one_usage_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Help says once how a command is used; it is short, and names the groups that it shows on demand."""
    texts = {}
    helps = (
        "train --help, train -h all, train --help model, sweep --help, sweep --help all, tune -h, period -h, explore -h"
    )
    for words in helps.split(", "):
        with pytest.raises(SystemExit) as end:
            cli.main(words.split())
        assert end.value.code == 0
        texts[words] = capsys.readouterr().out
        assert texts[words].count("usage:") == 1
        assert "None" not in texts[words]
        assert max(map(len, texts[words].splitlines())) <= 80
    for group in ("processes", "model", "data", "inner", "outer", "sync", "compute"):
        assert f"\n{group}:\n" in texts["train -h all"]
        assert f"\n{group}:\n" not in texts["train --help"]
        assert (f"\n{group}:\n" in texts["train --help model"]) == (group == "model")
        assert (f"\n{group}:\n" in texts["sweep --help all"]) == (group != "processes")
        assert group in texts["train --help"].rpartition("more options")[2]
    assert "\nrun:\n" in texts["train --help"]
    assert "\nrun:\n" not in texts["sweep --help"]
    assert max(len(texts[words].splitlines()) for words in ("train --help", "sweep --help", "tune -h")) <= 60
    assert "--outer.momentum X" in texts["period -h"]


@pytest.mark.slow
def test_a_mistake_from_outside(tmp_path: Path) -> None:
    """The process itself ends with status 2 and the message, without a traceback."""
    done = call(*"train --outer.method nesterov --outer.momentum 1".split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("twophase train: error: --outer.momentum ")
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A device too small for weights and optimizers ends with status 1 and one message; other errors stay errors."""

    def full(_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("twophase.cli.train.main", full)
    assert cli.main(["train"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "Tried to allocate 9 GiB). Give a smaller model" in message

    def broken(_: object) -> int:
        raise RuntimeError("shapes")

    monkeypatch.setattr("twophase.cli.train.main", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main(["train"])


def output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command in this process; return what it printed."""
    assert cli.main(list(map(str, words))) == 0
    return capsys.readouterr().out


def test_config_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML files are laid over each other from left to right and options win; `--print-config` reads back the same."""
    (tmp_path / "a.yaml").write_text(
        "outer: {lr: 0.3, method: heavy-ball, restart: 3}\ninner: {schedule: wsd}\nseed: 5\n"
    )
    (tmp_path / "b.yaml").write_text("outer: {lr: 1e-1}\n")
    files = ["--config", tmp_path / "a.yaml", "--config", tmp_path / "b.yaml"]
    text = output(capsys, "train", *files, "--seed", "7", "--print-config")
    assert all(line in text for line in ("lr: 0.1", "method: heavy-ball", "restart: '3'", "schedule: wsd", "seed: 7"))
    (tmp_path / "c.yaml").write_text(text)
    assert output(capsys, "train", "--config", tmp_path / "c.yaml", "--print-config") == text
    assert output(capsys, "sweep", "--config", tmp_path / "c.yaml", "--axis", "seed", "1", "--print-config") == text


def test_a_command_that_is_cut_short(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C says how to go on; a reader such as `head` that has gone is no failure, and nothing more is printed."""

    def interrupt(_: list[str]) -> int:
        raise KeyboardInterrupt

    def break_pipe(_: list[str]) -> int:
        print("the rest")
        raise BrokenPipeError

    monkeypatch.setattr("twophase.cli.period.main", interrupt)
    assert cli.main(["period"]) == 130
    assert re.fullmatch(r"stopped; resume with: .* period\n", capfd.readouterr().err)
    monkeypatch.setattr("twophase.cli.period.main", break_pipe)
    assert cli.main(["period"]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("", ["a"]),
        ("--arms b c", ["b", "c"]),
        ("--arms b --arms c d", ["b", "c", "d"]),
        ("--arms=b --arms=a", ["b", "a"]),
    ],
)
def test_a_list_grows_where_its_option_is_repeated(words: str, values: list[str]) -> None:
    """The default is no part of it, and no option that was given is dropped."""
    parser = Parser("twophase tune")
    parser.add_argument_group("the comparison").add_argument("--arms", nargs="+", default=["a"])
    assert parser.parse_args(words.split()).arms == values


def test_booleans_may_be_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    """`--sync.stagger false` means `--sync.no-stagger`."""
    for words in (["--sync.stagger", "false"], ["--sync.no-stagger"]):
        assert "stagger: false" in output(capsys, "train", *words, "--print-config")
    assert "stagger: true" in output(capsys, "train", "--sync.stagger", "True", "--print-config")


NESTEROV = "Nesterov-lr-0.7-momentum-0.9-sum-form-restart"
DEFAULT_FOLDERS = [
    # changes, and what the name of the folder begins with
    ({}, "averaging-lr-1-restart-never-S-16-seed-0-"),
    ({"outer.method": "heavy-ball", "outer.form": "ema"}, "heavy-ball-lr-0.7-momentum-0.9-EMA-form-restart-never"),
    (
        {"outer.method": "adamw", "outer.restart": "cycle:5,6"},
        "adamw-lr-0.02-momentum-0.9-restart-cycle-5-6-",
    ),
    ({"outer.method": "nesterov", "sync.fragments": ("2",), "sync.restart": ("0=3", "1=at:4,9")}, f"{NESTEROV}-0-3-1"),
    ({"outer.method": "nesterov", "steps": 320, "seed": 3}, f"{NESTEROV}-never-S-16-seed-3-steps-320-"),
    ({"sync.fragments": ("60",), "sync.restart": tuple(f"{i}=3" for i in range(60))}, "averaging"),
]


@pytest.mark.parametrize(("changes", "name"), DEFAULT_FOLDERS)
def test_a_run_without_a_folder_has_its_setting_as_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str
) -> None:
    """The folder says the day and what the run is; that of another day, or of an earlier version, is found again."""
    monkeypatch.chdir(tmp_path)
    config = with_values(TrainConfig(), changes)
    folder = default_folder(config)
    assert folder.parent == Path("runs")
    assert folder.name.startswith(f"{date.today()}-{name}")
    assert RUN_ID.fullmatch(folder.name)
    assert folder == default_folder(config) != default_folder(with_values(config, {"steps": 32}))
    for day in ("", "2026-01-02-another-name-"):  # an earlier version's, and one of another day
        earlier = Path("runs") / f"{day}{fingerprint(config)}"
        earlier.mkdir(parents=True)
        assert default_folder(config) == earlier
        earlier.rmdir()


@pytest.mark.slow
def test_repeating_a_finished_run(tmp_path: Path, corpus: str) -> None:
    """A repeated command prints the same and changes no file; a folder of another run or of other files is refused."""
    words = ["train", *SMALL, "--outer.lr", "0.7", "--data.corpus", corpus, "--out", tmp_path / "run"]
    first = call(*words)
    assert first.returncode == 0, first.stderr
    before = snapshot(tmp_path)
    again = call(*words)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    files = {f"run/{name}" for name in ("config.yaml", "env.json", "metrics.jsonl", "rounds.jsonl", "summary.json")}
    assert files <= set(before)
    other = call(*words, "--outer.lr", "0.3")
    assert other.returncode == 2
    assert "outer.lr is 0.7 there, 0.3 here" in other.stderr
    assert "--out" in other.stderr
    assert call(*words[:-1], tmp_path).returncode == 2
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_divergence_ends_with_status_1(tmp_path: Path, corpus: str) -> None:
    """A single run that diverges says so with status 1, keeps its summary, and says it again when repeated."""
    words = ["train", *SMALL, "--data.corpus", corpus, "--out", tmp_path / "run", "--outer.lr", "300"]
    for _ in range(2):
        done = call(*words)
        assert done.returncode == 1
        assert "diverged at step" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["diverged"] is True


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The words of a run that is never stopped, and its folder."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    corpus = f"file:{textmaker.write(folder / 'text.txt')}"
    words = ["train", *SMALL, "--steps", "150", "--data.corpus", corpus, "--outer.restart", "3"]
    assert call(*words, "--out", folder / "run").returncode == 0
    return words, folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(
    tmp_path: Path, uninterrupted: tuple[list[str], Path], number: signal.Signals, status: int
) -> None:
    """Ctrl-C and SIGTERM save, print the command that resumes, and that command ends as if nothing had happened."""
    words, whole = [*uninterrupted[0], "--out", str(tmp_path / "run")], uninterrupted[1]
    process = Forked(*words)
    while process.poll() is None and not any((tmp_path / "run" / "checkpoint").glob("step-*")):
        time.sleep(0.0005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    hint = errors.splitlines()[-1].removeprefix("stopped; resume with: ")
    assert shlex.split(hint) == ["python", "-m", "twophase", *words]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert call(*shlex.split(hint)[3:]).returncode == 0
    weights = [(folder / "weights.safetensors").read_bytes() for folder in (tmp_path / "run", whole)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_rank_0_reports_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], under_torchrun: bool
) -> None:
    """A refusal of another rank names it, and waits only under torchrun, which ends all ranks with the first one."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cli.main(["trian"]) == 2
    assert "(process 1): error: " in capsys.readouterr().err
    assert bool(waits) == under_torchrun


def test_one_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Averaging and wsd where nothing is said, in `train`, `sweep`, `tune`, Python; an option changes itself alone."""

    def resolved(*words: str) -> dict[str, Any]:
        assert cli.main([*words, "--print-config"]) == 0
        return flatten(yaml.safe_load(capsys.readouterr().out))

    default = resolved("train")
    assert (default["outer.method"], default["outer.lr"], default["inner.schedule"]) == ("averaging", None, "wsd")
    assert (
        resolved("sweep", "--axis", "seed", "0") == resolved("tune") == default == values_of(_configuration("lm", {}))
    )
    digits = values_of(_configuration("digits", {}))
    assert {path: digits[path] for path in default.keys() & digits.keys()} == {
        path: value for path, value in default.items() if path in digits
    }
    assert resolved("train", "--task", "digits") == digits | {"task.name": "digits"}
    changes = {
        "outer.method": "nesterov", "outer.lr": 0.5, "outer.form": "ema", "outer.restart": "3",
        "outer.filter": "clip:1.0", "outer.schedule": "linear:2", "inner.schedule": "cosine", "inner.lr": 0.01,
        "steps": 320, "sync.delay": 2, "replicas": 4,
    }  # fmt: skip
    for path, value in changes.items():
        now = resolved("train", f"--{path}", str(value))
        assert {name: now[name] for name in now if now[name] != default[name]} == {path: value}
        assert values_of(_configuration("lm", {path: value})) == now
    assert resolved("train", "--recipe", "nano")["outer.method"] == "nesterov"
