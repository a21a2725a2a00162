"""The command line end to end: start-up, messages, exit statuses, stopping and resuming."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import outcome, snapshot
from forked import Forked, finish
from runmaker import NESTEROV, write_run
from tracer import functions_of
from twophase.api import run_config
from twophase.cli import main as cli
from twophase.config import flatten, to_tree

RUN = "train --task digits --steps 12 --inner-steps 4 --checkpoint-every 1 --quiet".split()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_help_without_torch() -> None:
    """`--help`, of the program and of each command, ends with status 0 and loads neither torch nor what draws."""
    code = (
        "import sys, json; from twophase.cli.main import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try: status = main(words)\n"
        "    except SystemExit as end: status = end.code\n"
        "    assert not status, words\n"
        "    assert not {'torch', 'matplotlib', 'transformers', 'pandas', 'sklearn', 'scipy'} & set(sys.modules), words"
    )
    commands = [[], ["--help"], ["--version"], *([command, "--help"] for command in cli.COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
    monkeypatch.setattr("twophase.cli.period.main", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["period"])


def resolved(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--print-config"])
    text = capsys.readouterr().out
    Path("printed.yaml").write_text(text)
    with pytest.raises(SystemExit, match="0"):
        cli.main([words[0], "--config", "printed.yaml", "--print-config"])
    assert capsys.readouterr().out == text  # it reads back as the same
    return flatten(yaml.safe_load(text))


def test_one_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Averaging and wsd where nothing is said, in `train`, `sweep` and Python; an option changes itself alone."""
    default = resolved(capsys, "train")
    assert (default["outer.method"], default["outer.lr"], default["inner.schedule"]) == ("averaging", None, "wsd")
    assert resolved(capsys, "sweep") == default == flatten(to_tree(run_config("lm", {})))
    digits = flatten(to_tree(run_config("digits", {})))
    assert {path: digits[path] for path in default.keys() & digits.keys()}.items() <= default.items()
    assert resolved(capsys, "train", "--task", "digits") == digits
    changes = {"outer.method": "nesterov", "outer.form": "ema", "outer.restart": "3", "outer.filter": "clip:1",
               "inner.schedule": "cosine", "inner.warmup": 0.8, "sync.delay": 2, "replicas": 4}  # fmt: skip
    for path, value in changes.items():
        now = resolved(capsys, "train", f"--{path}", str(value))
        assert {name: now[name] for name in now if now[name] != default[name]} == {path: value}
        assert flatten(to_tree(run_config("lm", {path: value}))) == now


def test_repeating_a_finished_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A repeated command prints the same and changes no file; another run's folder is refused, with the difference."""
    said = []
    for _ in range(2):
        assert cli.main([*RUN, "--out", "run"]) == 0
        said.append((snapshot(Path("run")), capsys.readouterr().out))
    assert said[0] == said[1]
    assert cli.main([*RUN, "--out", "run", "--outer.lr", "0.3"]) == 2
    assert "--outer.lr: must be None" in capsys.readouterr().err
    assert snapshot(Path("run")) == said[0][0]


def test_divergence_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """A single run that diverges says so with status 1, keeps its summary, and says it again when repeated."""
    for _ in range(2):
        assert cli.main([*RUN, "--out", "run", "--inner.lr", "1e30"]) == 1
        assert "diverged at step" in capsys.readouterr().out
    assert json.loads(Path("run/summary.json").read_text())["diverged"] is True


@pytest.mark.slow
def test_stopped_by_a_signal() -> None:
    """Ctrl-C and SIGTERM save, print the command that resumes, and that command ends as if nothing had happened."""
    words = [*RUN, "--steps", "240", "--inner-steps", "12"]
    saved = Path("run/checkpoint")
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        old = set(saved.glob("step-*"))
        process = Forked(*words, "--out", "run")
        while process.poll() is None and old >= set(saved.glob("step-*")):
            time.sleep(0.0005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        hint = shlex.split(errors.splitlines()[-1].removeprefix("stopped; resume with: "))
        assert hint == ["python", "-m", "twophase", *words, "--out", "run"]
        assert not Path("run/summary.json").exists()
    assert [cli.main([*hint[3:-1], out]) for out in ("run", "whole")] == [0, 0]
    assert outcome(Path("run")) == outcome(Path("whole"))


class ReachedError(Exception):
    """The first inner step is taken."""


def first_step() -> None:
    from twophase.diloco.engine import DiLoCo

    def end(*_: Any) -> None:
        raise ReachedError

    DiLoCo.step = end  # type: ignore[method-assign] - in a process of its own
    try:
        cli.main([*RUN, "--out", "run"])
    except ReachedError:
        return


def one_cell() -> None:
    assert cli.main(["sweep", *RUN[1:], "--axis", "outer.lr", "0.5", "--workers", "1", "--out", "sweep"]) == 0


def page_of_a_run() -> None:
    assert cli.main(["report", "finished"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "functions", "files"), [(first_step, 108, 27), (one_cell, 285, 40), (page_of_a_run, 60, 13)]
)
def test_the_path_can_be_followed(path: Callable[[], None], functions: int, files: int) -> None:
    """A reader meets at most so many functions, from the words to a first step, a sweep's end, or a run's page."""
    write_run(Path("finished"), NESTEROV, [0.3] * 3, restart="5", noise=0.01)
    finish(Path.cwd(), [[__file__, path.__name__]], [os.environ])
    said = Path("0.log").read_text()
    found = [line.split() for line in said.splitlines() if line.startswith("entered ")]
    assert 0 < len(found) <= functions, said
    assert len({file for _, file, _ in found}) <= files, said


if __name__ == "__main__":
    for file, name in sorted(functions_of(globals()[sys.argv[1]])):
        print("entered", file, name)
