"""Every mistake in what is asked of the command line: status 2, one message that names the thing, nothing on disk."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from commands import snapshot
from shardmaker import prepared
from twophase.cli import main as cli

MISTAKES = [
    # words, and the command, option or value that the message names
    ("trian", "'trian' is no command; did you mean train?"),
    ("train --outer.momentum 1", "--outer.momentum"),
    ("train --outer.restart 0", "--outer.restart"),
    ("train --outer.lr -1", "--outer.lr"),
    ("train --inner-steps 1000", "--inner-steps"),
    ("train --inner-steps few", "--inner-steps"),
    ("train --outer.method adamx", "--outer.method: method 'adamx' is not known; did you mean adamw?"),
    ("train --outer.method adamw:beta3=1", "--outer.method: method 'adamw:beta3=1': 'beta3=1' is no field of adamw"),
    ("train --outer.method lion:lr=-1", "--outer.method"),
    ("train --outer.method gpa --outer.restart 3", "--outer.restart"),
    ("train --outer.method adamw --outer.lr 1", "such as --outer.method adamw:lr=VALUE"),
    ("train --outer.method sgd:lr=0.3 --outer.lr 0.2", "--outer.lr is in --outer.method sgd:lr=0.3 too"),
    ("sweep --axis outer.method sgd:lr=0.3 --axis outer.lr 0.1 1", "--outer.lr is in --outer.method sgd:lr=0.3 too"),
    ("train --outer.method averaging --outer.lr 1", "averaging has no lr, take sgd, or leave it out"),
    ("sweep --axis outer.lr 0.3 0.7 --outer.lr 0.5", "--outer.lr is an axis of the grid, too"),
    ("data prepare ~nosuchuser/x.txt --out tokens", "~nosuchuser/x.txt"),
    ("train --outer.method adamw --outer.restart auto", "--outer.restart"),
    ("train --outer.schedule cosine --outer.restart auto", "--outer.restart: restart policy auto"),
    ("train --outer.method gpa --outer.readout ema", "--outer.method: readout ema"),
    ("train --outer.method adamw --outer.schedule transient", "--outer.method: schedule transient"),
    ("train --outer.schedule cosin", "--outer.schedule: schedule 'cosin' is not known; did you mean cosine?"),
    ("train --outer.readout ema:decay=1", "--outer.readout"),
    ("train --outer.method muon:rest=0", "--outer.method muon:rest=0"),
    ("train --outer.method torch:optimizer=Adamm", "Adamm"),
    ("train --outer.method torch:optimizer=Adagrad:options=lr=0.1 --outer.restart 3", "--outer.method torch"),
    ("train --outer.method torch:optimizer=Muon:options=lr=0.1", "Muon only supports 2D parameters"),
    ("sweep --axis outer.method adamw adamx", "adamx"),
    ("sweep --axis outer.method torch:optimizer=Adamm --controls", "Adamm"),
    ("train --outer.lrr 1", "'--outer.lrr' is no option; did you mean --outer.lr?"),
    ("train --outer.learning_rate 1", "'--outer.learning_rate' is no option; did you mean --outer.lr?"),
    ("train --inner.wd 1", "did you mean --inner.weight-decay?"),
    ("train --lighthuose http://127.0.0.1:1", "did you mean --lighthouse?"),
    ("train --outer.restart periodc:3", "--outer.restart: restart 'periodc:3' is not known; did you mean periodic?"),
    ("train 3", "'3' is no option; twophase train --help"),
    ("train --help modle", "--help modle: there is no such group; did you mean model"),
    ("train --config absent.yaml", "--config absent.yaml: cannot be read (No such file or directory); check the path"),
    ("train --data.corpus file:absent.txt", "absent.txt"),
    ("train --data.corpus library", "library"),
    ("train --data.corpus tokens:absent", "absent"),
    ("train --data.tokenizer mistral", "--data.tokenizer"),
    ("train --device cuda:77", "--device cuda:77"),
    ("train --recipe large", "--recipe large: there is no such recipe; choose from paper_150m, small, nano"),
    ("train --recipe nanno", "did you mean nano?"),
    ("train --recipe nano --task digits", "--recipe nano is for --task lm; with --task digits leave it out"),
    ("train --recipe=", "--recipe : there is no such recipe"),
    ("train --recipe paper_150m --device cpu", "tokens:data/c4"),
    ("train --model.vocabulary-size 50", "--model.vocabulary-size"),
    ("train --compute.micro-batch 3", "--compute.micro-batch"),
    ("train --compute.precision fp8", "fp8"),
    ("train --compute.attention flash", "--compute.attention"),
    ("train --task digits --compute.compile", "--compute.compile is for --task lm alone"),
    ("train --task digits --compute.micro-batch 4", "--compute.micro-batch"),
    ("train --task digits --repeat", "--repeat"),
    ("train --task digits --task.width 0", "--task.width is 0"),
    ("train --track mlflow", "mlflow"),
    ("train --track wnadb", "did you mean wandb?"),
    ("train --start-timeout 0", "--start-timeout"),
    ("train --start-timeout nan", "--start-timeout"),
    ("train --sync-timeout -1", "--sync-timeout"),
    ("train --sync.wire int4", "--sync.wire is 'int4'"),
    ("sweep --axis sync.wire int8 int4", "sync.wire"),
    ("train --sync-timeout 1e8", "--sync-timeout"),
    ("train --quorum-timeout inf", "--quorum-timeout"),
    ("train --quorum-timeout soon", "--quorum-timeout"),
    ("train --replica 1", "--lighthouse"),
    ("train --min-replicas 1", "--lighthouse"),
    ("train --lighthouse http://127.0.0.1:1 --replica 0 --run-record missing/run.json", "--run-record"),
    ("train --lighthouse http://127.0.0.1:1", "--replica"),
    ("data prepare absent.txt --out tokens", "absent.txt"),
    ("data prepare absent.txt --out tokens --threads 0", "--threads: is 0"),
    ("data prepare absent.txt --out tokens --tokens many", "--tokens: 'many' is no number"),
    ("data count", "'count'"),
    ("data prepare a.txt --out b --tokenzier bytes", "'--tokenzier' is no option; did you mean --tokenizer?"),
    ("data info .", "holds no meta.json"),
    ("export absent there", "absent"),
    ("period --sigma 0.5 --plot figure.svg", "--plot figure.svg"),
    ("period --sigma 0.5 --max-period inf", "--max-period"),
    ("train --outer.zeta 1", "'--outer.zeta' is no option"),
    ("train --outer.lr", "--outer.lr: expected one argument"),
    ("train --outer.form emma", "--outer.form: 'emma' is not known; did you mean ema?"),
    ("train --outer.form mean", "--outer.form: 'mean' is not known; choose from ema, sum"),
    ("train --outer.nesterov yes", "--outer.nesterov: 'yes' is not true or false"),
    ("train --inner.betas 0.9", "--inner.betas: expected 2 arguments"),
    ("period --sigma 0_5", "--sigma"),
    ("report . --watch 0", "--watch: is 0"),
    ("report . --within -1", "--within: is -1"),
    ("train --outer.lr 0_7", "--outer.lr: '0_7' is not a number such as 3, 0.25"),
    ("train --outer.lr ٣", "--outer.lr"),
    ("train --outer.lr 1e400", "--outer.lr"),
    ("train --steps 1_000", "--steps: '1_000' is not a whole number"),
    ("train --outer.restart soft:3:0_2:0.1", "'0_2' is not a number"),
    ("train --sync.fragments ٣", "--sync.fragments"),
    ("train --sync.fragments 2 --sync.restart 0=3 1=0_3", "--sync.restart"),
    ("train --inner.lr 1e31", "--inner.lr"),
    ("train --sync-timeout 1e300", "--sync-timeout: is 1e+300"),
    ("data prepare absent.txt --out tokens --tokenizer bpe:٣٠٠", "write bpe:SIZE"),
    ("data prepare absent.txt --out tokens --held-out 0_1", "--held-out"),
    ("spectrum absent", "absent"),
    ("spectrum absent --batches 0", "--batches: is 0; it must be from 1 to 10,000"),
    ("spectrum absent --blocks a=x a=y", "--blocks is a=y"),
    ("sweep", "--axis"),
    ("sweep --axis outer.lrr 1 2", "did you mean outer.lr?"),
    ("sweep --axis learning_rate 1 2", "did you mean inner.lr or outer.lr?"),
    ("sweep --axis outer.momentum 0.5 1", "momentum"),
    ("sweep --axis inner.betas 0.9 0.99", "inner.betas"),
    ("sweep --axis sync.restart 3 loss", "--axis sync.restart"),
    ("sweep --sync.fragments 2 --axis sync.restart 0=3 1=5", "--sync.restart"),
    ("sweep --sync.fragments 2 --sync.restart 0=2 1=2 --axis outer.restart never 3", "--axis outer.restart"),
    ("sweep --axis outer.filter orthogonal none orthogonal:steps=5", "orthogonal:steps=5 is given twice"),
    ("sweep --axis outer.method adamw:lr=1 adamw:lr=1.0", "adamw:lr=1.0 is given twice"),
    ("sweep --axis sync.fragments none 2", "--sync.fragments"),
    ("sweep --axis sync.fragments 1 a=embedding|head,b=tail", "is found in the parameter name 'norm'"),
    ("sweep --axis outer.lr 1 --in-memory -1", "--in-memory"),
    ("sweep --axis outer.lr 0_1 1", "'0_1'"),
    (f"sweep --axis seed {' '.join(map(str, range(400)))} --axis steps {' '.join(map(str, range(1, 400)))}", "cells"),
    ("demo --in-memory -1 --dry-run", "--in-memory"),
    ("sweep --axis outer.lr 1 --workers -1", "--workers"),
    ("sweep --axis outer.lr 1 --slurm-time 60", "--slurm-time is given without --launcher slurm"),
    ("sweep --axis outer.lr 1 --launcher slurm", "--launcher slurm needs --workers"),
    ("sweep --axis outer.lr 1 --launcher slurm --workers 2", "--slurm-time is missing"),
    ("sweep --axis outer.lr 1 -1", "--outer.lr is -1"),
    ("sweep --axis outer.lr 1 --launcher pbs", "--launcher"),
    ("tune --points 3 --budget 2h", "--points 3 and --budget 7200 s"),
    ("tune --points 0", "--points"),
    ("tune --budget 2", "--budget: '2' is no time"),
    ("tune --budget 0h", "--budget: '0h' is no time"),
    ("tune --arms nesterov@0", "--arms nesterov@0"),
    ("tune --arms nesterv", "did you mean nesterov?"),
    ("tune --arms averaging", "--arms averaging"),
    ("tune --fresh 1 2", "--fresh 1 2"),
    ("tune --outer.lr 1", "--outer.lr"),
    ("tune --seed 3", "--seed"),
    ("tune --task digits --workers 0", "--workers is 0"),
    ("tune digts", "--task digts: there is no such task; did you mean digits?"),
    ("bench nesterov --workers 0", "--workers is 0"),
    ("sweep-worker", "--out"),
    ("sweep-worker --out absent", "plan.json"),
    ("sweep-worker --out absent --in-memory -1", "--in-memory"),
    ("demo --seeds -1", "seed"),
    ("study", "name a study"),
    ("study figure_1", "'figure_1' is no study; choose from bench"),
    ("study robustnes_toy", "did you mean robustness_toy?"),
    ("study wires --scale labtop", "did you mean laptop?"),
    ("study soft_restart --quick --scale paper", "--quick is a separate scale; leave out either it or --scale paper"),
    ("study robustness_toy --scale laptop", "--scale: the study robustness_toy trains nothing"),
    ("study robustness_heatmaps --task digits --outer.lr 0.3", "--outer.lr"),
    ("study robustness_heatmaps --task digits --seed 3", "--seed"),
    ("study robustness_heatmaps --task digits --sync.restart 0=3", "--sync.restart"),
    ("study robustness_heatmaps --task digits --sync.wire int8", "--sync.wire"),
    ("study robustness_heatmaps --task absent.py:Pull", "absent.py"),
    ("study robustness_heatmaps --task digits --task.widht 8", "--task.width"),
    ("study robustness_heatmaps --task digits --steps 1", "--inner-steps is 5"),
    ("study robustness_heatmaps --task digits --steps 10", "--inner-steps is 20"),
    ("study robustness_heatmaps --task digits --scale labtop", "did you mean laptop?"),
    ("study robustness_toy --fast", "--fast"),
    ("study robustness_toy --redraw", "needs no runs"),
    ("study wires --redraw --out none", "name their folder by --out"),
    ("explore --outer.momentum 1", "error: --outer.momentum is 1.0"),
    ("explore --outer.momentum 0.9999999", "--outer.momentum"),
    ("explore --outer.lr nan", "--outer.lr: 'nan'"),
    ("explore --outer.lr 0", "--outer.lr"),
    ("explore --outer.restart cycle:2,x", "--outer.restart"),
    ("explore --outer.restart 0", "--outer.restart"),
    ("explore --outer.restart at:" + ",".join(map(str, range(1, 66))), "at most 64 numbers"),
    ("explore --outer.restart cycle:2000000000", "rounds up to 10^9"),
    ("methods nesterov --into page.md", "--into"),
    ("methods --into absent.md", "--into absent.md"),
    ("explore --sigma 0.5 1.5", "--sigma is 1.5"),
    ("explore --sigma 0.5 --eigenvalues 3", "--sigma and --eigenvalues"),
    ("explore --sigma-range 0.9 0.1", "--sigma-range 0.9 0.1"),
    ("explore --sigma-range 0.1 1.5", "--sigma-range is 1.5"),
    ("explore --eigenvalues 1e13 --inner-lr 1e-14 --inner-steps 4", "--eigenvalues is 1e+13"),
    ("explore --sigma-range 0.1 0.9 100", "--sigma-range is 100"),
    ("explore --sigma-range 0.1 0.9 2.5", "--sigma-range 0.1 0.9 2.5"),
    ("explore --inner-steps 4", "--eigenvalues"),
    ("explore --eigenvalues 3", "--inner-lr and --inner-steps"),
    ("explore --eigenvalues 3 --inner-lr 0.5 --inner-steps 4", "--inner-lr 0.5"),
    ("explore --rounds 0", "--rounds"),
    ("explore --rounds 2.5", "2.5"),
    ("explore --sigma " + "0.5 " * 65, "--sigma has 65 modes"),
    ("explore --run absent", "absent"),
    ("explore --out .", "--out ."),
]


def check(words: str, thing: str, capfd: pytest.CaptureFixture[str], cache: str = "") -> None:
    """Run a command that must be refused, and leave the folder as it was; it may make one file as a cache."""
    before = snapshot(Path.cwd())
    status = cli.main(words.split())
    message = capfd.readouterr().err
    assert status == 2, message
    assert message.count("\n") == 1
    assert thing in message
    assert "Traceback" not in message
    assert {name: digest for name, digest in snapshot(Path.cwd()).items() if name != cache} == before


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("USE_TORCH", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # a command's own must not reach others
        monkeypatch.setenv(name, "1")


SIZES = [
    *("model.layers", "model.hidden-size", "model.intermediate-size", "model.heads", "model.vocabulary-size"),
    *("data.sequence-length", "data.batch-size", "data.validation-windows", "outer.probe-sequences"),
    *("steps", "inner-steps", "replicas", "threads", "log-every", "evaluate-every", "checkpoint-every"),
    *("keep-checkpoints", "compute.micro-batch", "sync.delay", "sync.fragments"),
]


@pytest.mark.parametrize("option", SIZES)
def test_absurd_sizes(capfd: pytest.CaptureFixture[str], option: str) -> None:
    """No size is so large that it fills memory, ends in an overflow, or makes a plan that never ends."""
    for number in ("1000000000", "1" + 20 * "0", "1" + 400 * "0", "1" + 5000 * "0"):
        check(f"train --{option} {number}", f"--{option}", capfd)
        if option != "sync.fragments":  # its values are texts
            Path("a.yaml").write_text(f"{option.replace('-', '_')}: {number}")
            check("train --config a.yaml", f"--{option}" if len(number) < 99 else "a.yaml", capfd)
            Path("a.yaml").unlink()


@pytest.mark.parametrize(("words", "thing"), MISTAKES)
def test_mistakes(capfd: pytest.CaptureFixture[str], words: str, thing: str) -> None:
    """A mistake in the words alone."""
    check(words, thing, capfd)


FILES = {
    "a.yaml": [
        ("outer: {momentun: 0.3}", "did you mean outer.momentum"),
        ("outer: {learning_rate: 0.3}", "outer.learning_rate is no value of the configuration; did you mean outer.lr?"),
        ("outer: {nesterov: 'yes'}", "outer.nesterov"),
        ("outer: {nesterov: 1}", "--config a.yaml: --outer.nesterov: 1 is not true or false"),
        ("outer: null", "outer"),
        ("seed: false", "--seed: False is not one number or text"),
        ("model: {layers: [2]}", "--model.layers: [2] is not one number or text"),
        ("inner: {betas: 0.9}", "--inner.betas: 0.9 is not a list of 2 values"),
        ("inner: {betas: [0.9]}", "--inner.betas: [0.9] is not a list of 2 values"),
        ("outer: {form: mean}", "--outer.form: 'mean' is not known; choose from ema, sum"),
        ("sync: {restart: a=3}", "--sync.restart: 'a=3' is not a list; write [a=3]"),
        ("", "--config a.yaml: holds nothing, not a mapping"),
        ("help: 1", "help"),
        ("- 1", "--config a.yaml: holds list, not a mapping"),
        ("[" * 100_000, "--config a.yaml: is not YAML (line 1: write plain values"),
        ("{a: " * 11, "more than 10 levels"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "without references"),
        ("seed: !!int '0x10'", "tags"),
        ("seed: 1\nseed: 2", "the key seed is given twice"),
        ("outer: {lr: 1}\nouter.lr: 2", "outer.lr is given twice"),
        ("1: 2", "1 is no value"),
        ("? [1]\n: 2", "--config a.yaml"),
        ("null: 2", "None is no value"),
        ("seed: 1:30", "--seed"),
        ("seed: 0x1F", "--seed"),
        ("seed: 2001-01-01", "--seed"),
        ("outer: {lr: .inf}", "--outer.lr"),
        ("outer: {lr: 1.0e+999}", "--outer.lr"),
        ("outer: {lr: 0_7}", "--outer.lr"),
        ('data: {corpus: "file:a\\0b"}', "a zero byte"),
        ('data: {corpus: "file:\\ud800"}', "--config a.yaml"),
        ("été: 1", "--config a.yaml: is not YAML"),
        ("#" * 300_000, "250,000 bytes"),
    ],
    "text.txt": [
        ("", "text.txt"),
        (" \n\n \n", "text.txt"),
        ("été. " * 500, "text.txt"),
        ("A line.\n\nAnother line.\n" * 2, "text.txt"),
        ("Some words in a line.\n\n" * 200, "--data.sequence-length"),
    ],
    "page.html": [("mine", "--out page.html")],
    "page.md": [("# A page\n", "has no line <!-- methods -->")],
    "mine": [("mine", "mine: is a file, not a folder; choose another --out")],
}
WORDS = {
    "a.yaml": "train --config a.yaml",
    "text.txt": "train --data.corpus file:text.txt --data.sequence-length 4000 --out run",
    "page.html": "explore --out page.html",
    "page.md": "methods --into page.md",
    "mine": "sweep --axis outer.lr 1 --out mine",
}


@pytest.mark.parametrize(("name", "text", "thing"), [(name, *row) for name, rows in FILES.items() for row in rows])
def test_files(capfd: pytest.CaptureFixture[str], name: str, text: str, thing: str) -> None:
    """A configuration, a text or a file in the page's place that cannot be used."""
    Path(name).write_bytes(text.encode("latin-1"))
    check(WORDS[name], thing, capfd)


def test_a_sweep_whose_description_is_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing of it is read or written; its lock file stays."""
    Path("out/sweep.json").mkdir(parents=True)
    words = "sweep --task digits --axis outer.lr 1 --out out"
    check(words, "cannot be used (it is a folder, not a file)", capfd, "out/.lock")


def odd_file(kind: str) -> Path:
    """Make what is no regular file."""
    path = Path("odd.txt")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to(kind)
    return path


def test_a_page_replaces_no_file_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """`--out` of a report is a page's name: one that is mistaken for a folder's, or a file there, stays as it is."""
    assert cli.main("train --task digits --steps 4 --inner-steps 2 --quiet --out run".split()) == 0
    before = {path: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    for name in ("config.yaml", "summary.json", "rounds.jsonl"):
        check(f"report run --out run/{name}", "holds something else than a page", capfd)
    for name, words in {"run/report.html": "run", "compare.html": "run other"}.items():
        shutil.copytree("run", "other", dirs_exist_ok=True)
        Path(name).write_text("mine")
        check(f"report {words}", f"{name}: holds something else than a page", capfd)
        assert Path(name).read_text() == "mine"
        Path(name).unlink()
    assert {path: path.read_bytes() for path in Path("run").iterdir() if path.is_file()} == before
    for _ in range(2):
        assert cli.main("report run --out page.html".split()) == 0


@pytest.mark.slow
def test_a_figures_numbers_replace_no_other_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A spectrum beside the picture of the same name stays; the numbers of an earlier picture are written anew."""
    table = tmp_path / "modes.csv"
    table.write_text("sigma,weight\n0.9,1\n0.5,2\n")
    check(f"period --spectrum {table} --plot {table.with_suffix('.png')}", str(table), capfd)
    assert table.read_text().startswith("sigma,weight")
    for _ in range(2):
        assert cli.main(["period", "--spectrum", str(table), "--plot", str(tmp_path / "other.png")]) == 0


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "/dev/full", "/dev/zero", "/dev/null"])
@pytest.mark.parametrize(
    "words",
    [
        "train --config odd.txt",
        "train --data.corpus file:odd.txt",
        "train --data.corpus tokens:odd.txt",
        "data prepare odd.txt --out tokens --kind text --tokenizer bytes",
        "data prepare odd.txt --out tokens --kind parquet --tokenizer bytes",
        "period --spectrum odd.txt",
        "explore --out odd.txt",
        "report odd.txt",
        "sweep-worker --out odd.txt",
        "methods --into odd.txt",
    ],
)
def test_what_is_no_file(capfd: pytest.CaptureFixture[str], kind: str, words: str) -> None:
    """A pipe would block, a device might never end: neither is opened."""
    odd_file(kind)
    check(words, "odd.txt", capfd)


@pytest.mark.skipif(sys.platform != "linux", reason="token files of other systems are no pipes")
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train-00000.bin", "token_bytes.npy", "meta.json"])
def test_token_files_that_are_none(capfd: pytest.CaptureFixture[str], name: str) -> None:
    """A pipe in the place of a file of token shards is refused by its name."""
    folder = prepared(Path("tokens"), [np.arange(90, dtype="u2")], [np.arange(90, dtype="u2")], 100)
    if name in ("train.bin", "val.bin"):
        for path in folder.iterdir():
            path.unlink()
        for other in ("train.bin", "val.bin"):
            (folder / other).write_bytes(bytes(2000))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    check("train --data.corpus tokens:tokens --model.vocabulary-size 100", name, capfd, "tokens/.verified.json")
