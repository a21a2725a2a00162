"""`twophase period`: spectra from five places, words, JSON and figures that say what the theory says, and mistakes."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twophase.advice.period import Question, Rule, answer, describe, read_spectrum, to_json
from twophase.cli.main import main
from twophase.figures import period as period_figure
from twophase.figures.period import draw
from twophase.rule import OuterRule
from twophase.theory.advice import advise
from twophase.theory.contraction import restart_rate
from twophase.theory.modes import asymptotic_rate, effective_progress, envelope
from twophase.theory.periods import best_period, cancellation_periods, log_final_loss
from twophase.theory.rollout import rollout

PAPER = "--outer.lr 1 --outer.momentum 0.9 --outer.method heavy-ball --outer.form ema".split()
HB = OuterRule(1.0, 0.9, False, "ema")
SIX = [0.95, 0.85, 0.75, 0.60, 0.45, 0.30]
Capture = pytest.CaptureFixture[str]


def asked(capsys: Capture, *words: Any) -> dict[str, Any]:
    """The JSON answer to a question on the command line; nothing but JSON on stdout, nothing on stderr."""
    return json.loads(in_words(capsys, *words, "--json"), parse_constant=pytest.fail)


def in_words(capsys: Capture, *words: Any) -> str:
    assert main(["period", *map(str, words)]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return done.out


# --- spectra ------------------------------------------------------------------------------------------------------


def test_sigma_from_the_command_line(capsys: Capture) -> None:
    """--sigma, with --weights, --rounds and --max-period: the numbers of `advise`, from Python as well."""
    words = [*PAPER, "--sigma", *SIX, "--weights", 1, 2, 0, 1e-300, 1, 3, "--rounds", 120, "--max-period", 40]
    facts = asked(capsys, *words)
    advice = advise(HB, SIX, weights=[1, 2, 0, 1e-300, 1, 3], rounds=120, max_period=40)
    assert facts == json.loads(to_json(advice))
    assert facts["sigma"] == [0.95, 0.85, 0.60, 0.45, 0.30]
    assert facts["weights"] == pytest.approx([1 / 7, 2 / 7, 1e-300 / 7, 1 / 7, 3 / 7], rel=1e-15)
    assert (facts["rounds"], facts["max_period"]) == (120, 40)
    assert facts["rule"] == {"lr": 1.0, "momentum": 0.9, "nesterov": False, "form": "ema"}
    question = Question(outer=Rule("heavy-ball", 1.0, 0.9, "ema"), sigma=tuple(SIX), rounds=120)
    assert to_json(answer(question)) == to_json(advise(HB, SIX, rounds=120))


@pytest.mark.parametrize(
    ("words", "sigma"),
    [
        ("--sigma-range 0.3 0.95", np.linspace(0.3, 0.95, 33)),
        ("--sigma-range 0.3 0.95 5", np.linspace(0.3, 0.95, 5)),
        ("--sigma-range 0.4 0.4 2", np.array([0.4, 0.4])),
        (
            "--eigenvalues 0.1 1 10 --inner-lr 0.1 --inner-steps 50",
            effective_progress([0.1, 1, 10], 0.1, 50),
        ),
    ],
)
def test_other_spectra(words: str, sigma: Any, capsys: Capture) -> None:
    """Equally spaced modes with both ends, 33 unless told; `1 - (1 - eta lambda)^S` of each eigenvalue."""
    assert asked(capsys, *words.split())["sigma"] == sigma.tolist()


FILES = {
    "names": "sigma,weight\n0.9,1\n0.5,3\n",
    "names in another order": "weight, note ,Sigma\n1,a,0.9\n3,b,0.5\n",
    "no names": "0.9,1\n0.5,3\n",
    "blank lines": "\n\nsigma,weight\n\n0.9,1\n  \n\t\n,\n0.5,3\n\n",
    "byte order mark": "\ufeffsigma,weight\n0.9,1\n0.5,3\n",
    "byte order mark, no names": "\ufeff0.9,1\n0.5,3\n",
    "carriage returns": "sigma,weight\r\n0.9,1\r\n0.5,3\r\n",
    "quotes and spaces": '"sigma", "weight"\n "0.9" ,1\n 0.5, 3',
    "exponents": "9e-1,1E0\n+5e-1,3.0",
    "no weights": "0.9\n0.5\n",
    "a name, no weights": "sigma\n0.9\n\n0.5\n",
    "another column, no weights": "mode,sigma\na,0.9\nb,0.5\n",
}


@pytest.mark.parametrize("name", FILES)
def test_spectrum_file(name: str, tmp_path: Path, capsys: Capture) -> None:
    """--spectrum: names or none, in any order, byte order mark, blank lines, line ends; weights there or beside it."""
    path = tmp_path / "spectrum.csv"
    path.write_bytes(FILES[name].encode())
    sigma, weights = read_spectrum(path)
    assert sigma.tolist() == [0.9, 0.5]
    if "no weights" in name:
        assert weights is None
        assert asked(capsys, "--spectrum", path)["weights"] == [0.5, 0.5]
        assert asked(capsys, "--spectrum", path, "--weights", 1, 3)["weights"] == [0.25, 0.75]
    else:
        assert asked(capsys, "--spectrum", path)["weights"] == [0.25, 0.75]
        refused(capsys, ["--spectrum", path, "--weights", 1, 1], f"--weights and a weight column in {path} given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sigma,weight\n0.9,1\n\n0.5,x\n", "row 4 is '0.5,x'; write sigma, or sigma,weight, as numbers"),
        ("0.9,1\n0.5\n", "row 2 is '0.5'"),
        ("0.9\n0.5,1\n", "row 2 is '0.5,1'"),
        ("0.9,1,7\n0.5,1,7\n", "row 1 is '0.9,1,7'"),
        ("0.9,\n", "row 1 is '0.9,'"),
        ("sigma,weight\n0.9\n", "row 2 is '0.9'"),
        ("sigma\n0,9\n0x5\n", "row 3 is '0x5'"),
        ("lambda,weight\n0.9,1\n", "row 1 is 'lambda,weight'"),
        ("sigma,weights\n0.9,1\n", "columns are sigma, weights; weights must be named weight"),
        ("", "no modes in it"),
        ("\n \n", "no modes in it"),
        ("sigma,weight\n", "no modes in it"),
        ("sigma,weight\n0.9,-1\n0.5,1\n", "weights is -1.0; a weight is a finite number >= 0"),
        ("0.9,0\n0.5,0\n", "weights are all 0; at least one must be positive"),
        (b"\xff\xfe0\x00", "cannot be read"),
    ],
)
def test_bad_spectrum_files(text: str | bytes, message: str, tmp_path: Path, capsys: Capture) -> None:
    """What is no table of modes, or weighs none, is refused with the file's name and the row as an editor counts it."""
    path = tmp_path / "spectrum.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(capsys, ["--spectrum", path], f"--spectrum {path}: {message}")
    refused(capsys, ["--spectrum", tmp_path], f"--spectrum {tmp_path}: cannot be read")


# --- mistakes -----------------------------------------------------------------------------------------------------


def refused(capsys: Capture, words: list[Any], message: str) -> None:
    """Status 2, one line on stderr that holds the message, nothing on stdout."""
    assert main(["period", *map(str, words)]) == 2
    done = capsys.readouterr()
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith(f"twophase period: {message}" if message.startswith("--") else "twophase period: ")
    assert message in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no spectrum given; give one of --sigma 0.95 0.6"),
        ("--sigma", "no spectrum given"),
        ("--sigma 1.5", "--sigma is 1.5; effective progress lies in [0, 1]; for curvatures write --eigenvalues"),
        ("--sigma-range 0.5 1.5", "--sigma-range is 1.0"),
        ("--sigma 0", "--sigma: no mode with a weight above 0 has a sigma above 0"),
        ("--sigma 0.5 --outer.lr 0", "--outer.lr is 0; nothing would move"),
        ("--sigma 0.5 --outer.lr -1", "--outer.lr must be a finite number >= 0"),
        ("--sigma 0.5 --outer.lr 1e200", "--outer.lr: the effective step lr * sigma reaches 5e+199"),
        ("--sigma 0.5 --outer.momentum 1", "--outer.momentum must be in [0, 1)"),
        ("--sigma 0.5 --weights 1 2", "--weights have shape (2,); give one a mode"),
        ("--sigma 0.5 --weights -1", "--weights is -1.0; a weight is a finite number"),
        ("--eigenvalues -3 --inner-lr 0.1 --inner-steps 3", "--eigenvalues is -3.0; it must be a finite number"),
        ("--eigenvalues 3 --inner-lr -1 --inner-steps 3", "--inner-lr is -1.0"),
        ("--eigenvalues 30 --inner-lr 0.1 --inner-steps 3", "--inner-lr * eigenvalue of mode 0 is 3; it must be <= 1"),
        ("--sigma 0.5 --rounds 0", "--rounds is 0; it must be a whole number >= 1"),
        ("--sigma 0.5 --rounds 2.5", "--rounds is 2.5; it must be a whole number >= 1"),
        ("--sigma 0.5 --max-period 0", "--max-period is 0; it must be a whole number >= 1"),
        ("--sigma 0.5 --weights", "--weights: no numbers given"),
        ("--sigma-range 0.5", "--sigma-range 0.5: write LOW HIGH [COUNT]"),
        ("--sigma-range 0.5 0.1", "--sigma-range 0.5 0.1: write LOW HIGH"),
        ("--sigma-range 0.1 0.5 1", "a whole COUNT from 2"),
        ("--sigma-range 0.1 0.9 10001", "a whole COUNT from 2 to 10,000, such as"),
        ("--sigma-range 0.1 0.9 1000 --max-period 1e6", "--max-period is 1000000; it must be at most 100,000"),
        ("--sigma-range 0.1 0.5 3 4", "write LOW HIGH"),
        ("--eigenvalues 1 30", "--eigenvalues needs --inner-lr and --inner-steps"),
        ("--eigenvalues 1 --inner-lr 0.1", "--eigenvalues needs --inner-lr and --inner-steps"),
        ("--sigma-range 0.1 0.5 --inner-steps 5", "--eigenvalues needs --inner-lr and --inner-steps"),
        ("--sigma 0.5 --sigma-range 0.1 0.5", "--sigma and --sigma-range given; give one of"),
        ("--sigma 0.5 --spectrum absent.csv", "--sigma and --spectrum given"),
        ("--spectrum absent.csv", "--spectrum absent.csv: cannot be read"),
    ],
)
def test_mistakes(words: str, message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends with status 2 and one line that names the thing, its value and the remedy."""
    monkeypatch.chdir(tmp_path)
    refused(capsys, words.split(), message)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure.svg", "figure", "absent/figure.png"])
def test_figures_that_cannot_be(name: str, tmp_path: Path, capsys: Capture) -> None:
    """A wrong ending or a folder that is not there: status 2, one line, no file."""
    assert main(["period", "--sigma", "0.5", "--plot", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / Path(name).with_suffix("")) in line
    assert list(tmp_path.iterdir()) == []


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [None, 24, 120])
def test_recommendation(rounds: int | None, capsys: Capture) -> None:
    """Words and JSON name the period that `best_period` chooses, and how to ask for it."""
    horizon = [] if rounds is None else ["--rounds", rounds]
    best = best_period(HB, SIX, max_period=60 if rounds is None else rounds, rounds=rounds)
    facts = asked(capsys, *PAPER, "--sigma", *SIX, *horizon)
    assert (facts["recommended"], facts["restart"]) == (best, str(best))
    text = in_words(capsys, *PAPER, "--sigma", *SIX, *horizon)
    over = "in a long run" if rounds is None else f"over {rounds} rounds"
    assert f"recommended {over}: restart every {best} rounds (--outer.restart {best})" in text
    assert "heavy ball lr 1 momentum 0.9 (EMA form), the same as lr 0.1 in sum form" in text
    slow = asked(capsys, *PAPER, "--sigma", 0.01, *horizon)
    assert (slow["recommended"], slow["restart"]) == (None, "never")
    assert f"recommended {over}: no restart" in in_words(capsys, *PAPER, "--sigma", 0.01, *horizon)


def test_both_forms_answer_alike(capsys: Capture) -> None:
    """The same rule in either form: the same periods, and rates and losses to rounding."""
    ema = asked(capsys, "--outer.lr", 7, "--outer.form", "ema", "--sigma", *SIX, "--rounds", 60)
    total = asked(capsys, "--outer.lr", 0.7, "--outer.form", "sum", "--sigma", *SIX, "--rounds", 60)
    assert asked(capsys, "--sigma", *SIX, "--rounds", 60) == total  # the default: DiLoCo's rule
    for name in ("recommended", "restart", "regimes", "hurt", "max_period", "warnings"):
        assert ema[name] == total[name]
    for row, other in zip([*ema["criteria"], ema["without"]], [*total["criteria"], total["without"]], strict=True):
        assert row["period"] == other["period"]
        assert (row["rate"], row["log_loss"]) == pytest.approx((other["rate"], other["log_loss"]), rel=1e-9)


def test_words_hold_the_numbers() -> None:
    """The table in words has a line a criterion, with period, rate and loss; without a horizon there is no loss."""
    advice = advise(HB, SIX, rounds=120)
    lines = describe(advice).splitlines()
    (row,) = [line for line in lines if line.startswith("exact final loss")]
    loss = log_final_loss(HB, SIX, 120, 7) / math.log(10)
    assert row.split()[-3:] == ["7", f"{float(restart_rate(HB, SIX, 7).min()):.4f}", f"{loss:.3f}"]
    never = log_final_loss(HB, SIX, 120, 120) / math.log(10)
    (row,) = [line for line in lines if line.startswith("no restart ")]
    assert row.split()[-3:] == ["never", f"{asymptotic_rate(HB, SIX).min():.4f}", f"{never:.3f}"]
    assert any("first cancellation after 5.04 to 10." in line for line in lines)
    assert "log10 loss" not in describe(advise(HB, SIX))
    assert "exact final loss" not in describe(advise(HB, SIX))


@pytest.mark.parametrize(
    "question",
    [
        Question(outer=Rule("nesterov", 2.0, 0.5, "ema"), sigma=(1.0,)),  # infinite rates
        Question(outer=Rule("nesterov", 2.0, 0.5, "ema"), sigma=(1.0,), rounds=20),  # and a loss of 0
        Question(outer=Rule("heavy-ball", 1.0, 0.5), sigma=(1.0, 0.3), rounds=3),
        Question(outer=Rule("nesterov", 1e90, 0.5), sigma=(1.0, 0.3), rounds=100),
        Question(outer=Rule("nesterov", 1.0, 0.9), sigma=(1e-300,), rounds=100),
        Question(outer=Rule("nesterov", 0.5, 0.0), sigma=(0.5,)),
    ],
    ids=str,
)
def test_json_and_words_of_extreme_answers(question: Question) -> None:
    """Infinite rates and losses are null in JSON and words in words; nothing warns on the way."""
    advice = answer(question)
    facts = json.loads(to_json(advice), parse_constant=pytest.fail)
    for criterion, row in zip(advice.criteria, facts["criteria"], strict=True):
        assert row["rate"] == (criterion.rate if math.isfinite(criterion.rate) else None)
        assert (row["period"], row["objective"]) == (criterion.period, criterion.objective)
    assert describe(advice).count("\n") > 12


# --- figures ------------------------------------------------------------------------------------------------------


def table(path: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The points of a figure's csv by panel and series; no x is nan."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            points.setdefault((row["panel"], row["series"]), []).append((float(row["x"] or "nan"), float(row["y"])))
    return points


@pytest.mark.slow
def test_figure_and_its_numbers(tmp_path: Path, capsys: Capture) -> None:
    """--plot writes the picture and a csv of what it shows; its numbers are the theory's, to 11 digits."""
    path = tmp_path / "figure.pdf"
    text = in_words(capsys, *PAPER, "--sigma", *SIX, "--rounds", 120, "--max-period", 30, "--plot", path)
    assert f"figure {path}, numbers {path.with_suffix('.csv')}" in text
    assert path.read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figure.csv", "figure.pdf"]
    points = table(path.with_suffix(".csv"))
    periods = np.arange(1, 31)
    rates = restart_rate(HB, SIX, periods[:, None])
    rows = {"slowest mode": rates.min(axis=1), **{f"sigma {s:.6g}": rates[:, i] for i, s in enumerate(SIX)}}
    losses = log_final_loss(HB, SIX, 120, periods) / math.log(10)
    curves = {("rate", name): values for name, values in rows.items()} | {("loss", "log10 loss"): losses}
    for key, values in curves.items():
        np.testing.assert_allclose(points[key], np.column_stack([periods, values]), rtol=1e-11)
    assert points["rate", "no restart"][0][1] == pytest.approx(float(asymptotic_rate(HB, SIX).min()), rel=1e-11)
    never = float(log_final_loss(HB, SIX, 120, 120)) / math.log(10)
    assert points["loss", "no restart"][0][1] == pytest.approx(never, rel=1e-11)

    rounds, logs = np.transpose(points["residual", "no restart"])
    count = len(rounds) - 1
    assert rounds.tolist() == list(range(count + 1))
    for name, policy in (("no restart", "never"), ("recommended", "7")):
        run = rollout(HB, [0.95], count, restart=policy)
        np.testing.assert_allclose(np.transpose(points["residual", name])[1], run.residual[:, 0], rtol=1e-9, atol=1e-15)
    times, zeros = np.transpose(points["cancellation", "sigma 0.95"])
    np.testing.assert_allclose(times, [t for t in cancellation_periods(HB, 0.95, 90) if t <= count], rtol=1e-11)
    assert not zeros.any()
    times, bound = np.transpose(points["envelope", "sigma 0.95"])
    np.testing.assert_allclose(bound, envelope(HB, 0.95, times), rtol=1e-9)
    assert times[[0, -1]].tolist() == [0, count]
    assert np.all(np.abs(logs) <= np.interp(rounds, times, bound) * 1.01)


@pytest.mark.slow
def test_figure_beside_json(tmp_path: Path, capsys: Capture) -> None:
    """With --json the figure is drawn too and stdout is JSON alone; without a horizon there is no loss panel."""
    path = tmp_path / "figure.png"
    assert asked(capsys, "--sigma-range", 0.3, 0.95, "--plot", path)["recommended"] == 1
    points = table(path.with_suffix(".csv"))
    assert {panel for panel, _ in points} == {"residual", "cancellation", "envelope", "rate"}
    assert {series for panel, series in points if panel == "rate"} == {"slowest mode", "no restart"}  # 33 are too many
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "sigma", "rounds"),
    [
        (OuterRule(1e6, 0.5), [1.0, 0.3], 100),
        (OuterRule(0.25, 0.25), [1.0], 1),
        (OuterRule(2.0, 0.5, True, "ema"), [1.0], None),
    ],
    ids=["unstable", "critical, a single round", "nilpotent"],
)
def test_figures_of_extreme_answers(
    rule: OuterRule, sigma: list[float], rounds: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Growth, no oscillation, exact zeros, infinite rates and a single round are drawn like all else."""
    figures: list[Any] = []
    monkeypatch.setattr(period_figure, "rendered", lambda figure, _endings: figures.append(figure) or {})
    (path,) = draw(advise(rule, sigma, rounds=rounds), tmp_path / "figure.png")
    figures[0].draw_without_rendering()
    assert len(figures[0].axes) == (2 if rounds is None else 3)
    assert path.stat().st_size > 0


@pytest.mark.slow
def test_what_is_exactly_zero_is_in_sight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Periods that leave nothing, the recommended one among them, are marked inside the panels of rate and loss."""
    figures: list[Any] = []
    monkeypatch.setattr(period_figure, "rendered", lambda figure, _endings: figures.append(figure) or {})
    draw(advise(OuterRule(1.0, 0.5), [1.0], rounds=9), tmp_path / "figure.png")
    figures[0].draw_without_rendering()
    for axes, gone in zip(figures[0].axes[1:], ([1], [1, 2, 4, 8]), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert lines["exactly zero"].get_xdata().tolist() == gone
        ring = lines["recommended: 1"]
        centre = ring.get_transform().transform(np.column_stack(ring.get_data()))
        assert np.isfinite(centre).all()
        assert axes.bbox.padded(1).contains(*centre[0])


# --- without torch ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_works_without_torch(tmp_path: Path) -> None:
    """Words, JSON and a figure where torch cannot be imported at all."""
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchft', 'transformers'):\n"
        "            raise ImportError(f'{name} is not here')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from twophase.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "main(['train'])\n"  # which does need torch: nothing else has taken its place
    )
    path = tmp_path / "figure.png"
    words = ["period", *PAPER, "--sigma", *map(str, SIX), "--rounds", "120", "--plot", str(path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Traceback")
    assert "is not here" in done.stderr.splitlines()[-1]
    assert "restart every 7 rounds" in done.stdout
    assert path.exists()
