"""Every mistake in what is asked of the command line: status 2, one message that names the thing, nothing on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import snapshot
from twophase.cli import main as cli

MISTAKES = [
    # words, and the command, option or value that the message names
    ("trian", "'trian'"),
    ("train --outer.momentum 1", "--outer.momentum"),
    ("train --outer.restart 0", "--outer.restart"),
    ("train --outer.lr -1", "--outer.lr"),
    ("train --inner-steps 1000", "--inner-steps"),
    ("train --inner-steps few", "--inner-steps"),
    ("train --outer.lrr 1", "--outer.lr"),
    ("train --config absent.yaml", "--config absent.yaml"),
    ("train --data.corpus file:absent.txt", "absent.txt"),
    ("train --data.corpus library", "library"),
    ("train --data.corpus tokens:absent", "absent"),
    ("train --data.tokenizer mistral", "--data.tokenizer"),
    ("train --device cuda:77", "--device cuda:77"),
    ("train --recipe large", "--recipe"),
    ("train --recipe paper_150m --device cpu", "tokens:data/c4"),
    ("train --model.vocabulary-size 50", "--model.vocabulary-size"),
    ("train --compute.micro-batch 3", "--compute.micro-batch"),
    ("train --compute.precision fp8", "fp8"),
    ("train --compute.attention flash", "--compute.attention"),
    ("train --track mlflow", "mlflow"),
    ("train --replica 1", "--lighthouse"),
    ("train --min-replicas 1", "--lighthouse"),
    ("train --lighthouse http://127.0.0.1:1", "--replica"),
    pytest.param("train --lighthouse http://127.0.0.1:1 --replica 2", "--replica is 2", marks=pytest.mark.slow),
    ("data prepare absent.txt --out tokens", "absent.txt"),
    ("data prepare absent.txt --out tokens --threads 0", "--threads 0"),
    ("data prepare absent.txt --out tokens --tokens many", "--tokens"),
    ("data count", "count"),
    ("data info .", "meta.json"),
    ("export absent there", "absent"),
    ("period --sigma 0.5 --plot figure.svg", "--plot figure.svg"),
    ("spectrum absent", "absent"),
    ("spectrum absent --top 0", "--top"),
    ("spectrum absent --top 1000", "--top"),
    ("spectrum absent --batches 0", "--batches"),
    ("spectrum absent --blocks a=x a=y", "--blocks a=y"),
    ("sweep", "--axis"),
    ("sweep --axis outer.lrr 1 2", "outer.lr"),
    ("sweep --axis outer.momentum 0.5 1", "momentum"),
    ("sweep --axis inner.betas 0.9 0.99", "inner.betas"),
    ("sweep --axis sync.restart 3 loss", "--axis sync.restart"),
    ("sweep --sync.fragments 2 --axis sync.restart 0=3 1=5", "--sync.restart"),
    ("sweep --axis sync.fragments none 2", "--sync.fragments"),
    ("sweep --axis outer.lr 1 --in-memory -1", "--in-memory"),
    ("demo --in-memory -1 --dry-run", "--in-memory"),
    ("sweep --axis outer.lr 1 --workers -1", "--workers"),
    ("sweep --axis outer.lr 1 --slurm-time 60", "--slurm-time"),
    ("sweep --axis outer.lr 1 --launcher pbs", "--launcher"),
    ("sweep-worker", "--out"),
    ("sweep-worker --out absent", "plan.json"),
    ("sweep-worker --out absent --in-memory -1", "--in-memory"),
    ("demo --seeds -1", "seed"),
    ("study", "name a study"),
    ("study figure_1", "'figure_1'"),
    ("study robustness_toy --fast", "--fast"),
    ("explore --outer.momentum 1", "momentum"),
    ("explore --outer.momentum 0.9999999", "--outer.momentum"),
    ("explore --outer.lr nan", "lr is nan"),
    ("explore --outer.lr 0", "--outer.lr"),
    ("explore --outer.restart cycle:2,3", "--outer.restart"),
    ("explore --outer.restart 0", "--outer.restart"),
    ("explore --sigma 0.5 1.5", "--sigma is 1.5"),
    ("explore --sigma 0.5 --eigenvalues 3", "--sigma and --eigenvalues"),
    ("explore --sigma-range 0.9 0.1", "--sigma-range 0.9 0.1"),
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


def check(words: str, thing: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Run a command that must be refused, and leave the folder as it was."""
    before = snapshot(Path.cwd())
    try:
        status = cli.main(words.split())
    except SystemExit as end:  # argparse and tyro
        status = end.code
    message = capfd.readouterr().err
    assert status == 2, message
    assert thing in " ".join(message.replace("│", " ").split())
    assert "Traceback" not in message
    assert snapshot(Path.cwd()) == before


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("USE_TORCH", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # a command's own must not reach others
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(("words", "thing"), MISTAKES)
def test_mistakes(capfd: pytest.CaptureFixture[str], words: str, thing: str) -> None:
    """A mistake in the words alone."""
    check(words, thing, capfd)


FILES = {
    "a.yaml": [
        ("outer: {momentun: 0.3}", "did you mean outer.momentum"),
        ("outer: {nesterov: 'true'}", "outer.nesterov"),
        ("outer: {nesterov: 1}", "outer.nesterov"),
        ("outer: null", "outer"),
        ("seed: false", "seed"),
        ("model: {layers: [2]}", "model.layers"),
        ("inner: {betas: 0.9}", "inner.betas"),
        ("help: 1", "help"),
        ("- 1", "--config a.yaml"),
    ],
    "text.txt": [
        ("", "text.txt"),
        (" \n\n \n", "text.txt"),
        ("été. " * 500, "text.txt"),
        ("A line.\n\nAnother line.\n" * 2, "text.txt"),
        ("Some words in a line.\n\n" * 200, "--data.sequence-length"),
    ],
    "page.html": [("mine", "--out page.html")],
}
WORDS = {
    "a.yaml": "train --config a.yaml",
    "text.txt": "train --data.corpus file:text.txt --data.sequence-length 4000 --out run",
    "page.html": "explore --out page.html",
}


@pytest.mark.parametrize(("name", "text", "thing"), [(name, *row) for name, rows in FILES.items() for row in rows])
def test_files(capfd: pytest.CaptureFixture[str], name: str, text: str, thing: str) -> None:
    """A configuration, a text or a file in the page's place that cannot be used."""
    Path(name).write_bytes(text.encode("latin-1"))
    check(WORDS[name], thing, capfd)
