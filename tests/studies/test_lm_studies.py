"""The language-model studies: what they conclude from made-up runs, what they show, and that they really train."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import textmaker
from madeup import Value, line_of, pages, rows, staged_rows
from twophase.base.config import UsageError, with_values
from twophase.figures.style import rendered, styled
from twophase.recipes.paper import QUICK, SCALES, Scale, robustness_heatmaps
from twophase.restart import mean_outer_gain
from twophase.studies import _lm, _training, study
from twophase.studies import retuning as retuning_study
from twophase.studies import robustness_heatmaps as heatmaps_study
from twophase.studies import soft_restart as soft_study
from twophase.studies import wires as wires_study
from twophase.sweeps import run as launch
from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.table import Row, write_rows

DOCS = Path(__file__).parents[2] / "docs"
MODULES: dict[str, Any] = {
    "retuning": retuning_study,
    "robustness_heatmaps": heatmaps_study,
    "soft_restart": soft_study,
}
SEEDS = replace(QUICK, seeds=(0, 1, 2))
"""12 rounds at S = 4, 6 at S = 8, 4 at S = 12; learning rates 0.3 and 1.1, momenta 0.5 and 0.9, periods 2, 3 and 5."""
each_study = pytest.mark.parametrize("name", MODULES)


def gain_only(cell: Cell) -> float:
    """A world in which only the mean outer gain matters: 8 at gain 1, worse on both sides, a little by seed."""
    outer = cell.config.outer
    gain = mean_outer_gain(outer.rule(), outer.policy(), cell.config.rounds)
    return 8 + 2 * abs(gain - 1) / (1 + abs(gain - 1)) + 0.1 * cell.config.seed


def restarts_help(cell: Cell) -> float:
    """A world in which every restart that a run feels takes a third off the perplexity, whatever else there is."""
    felt = _lm.restarts_that_count(cell.config.outer.policy(), cell.config.rounds) > 0
    return gain_only(cell) * (2 / 3 if felt else 1)


def results(name: str, scale: Scale, value: Value) -> tuple[Any, list[Row]]:
    """A study's result on made-up runs, and the runs."""
    every_run = staged_rows(MODULES[name], scale, value)
    return MODULES[name].table(every_run, scale), every_run


# ----------------------------------------------------------------------------------------------------------- analysis


@pytest.mark.slow
@each_study
def test_where_only_gain_matters_restarts_gain_nothing_over_their_control(name: str) -> None:
    """In a world of gain alone every comparison with the gain-matched controls is even, and the answer says so."""
    result, _ = results(name, SEEDS, gain_only)
    for facts in result.numbers["places"].values():
        for part in (facts["k_sweep"], facts["own_k_sweep"]) if name == "retuning" else (facts,):
            contrast = part["over_gain_matched"]
            assert contrast["ratio"]["mean"] == pytest.approx(1, abs=1e-5)
            assert contrast["better"] == contrast["worse"] == 0
            assert contrast["compared"] == contrast["pairs"] > 0
            assert contrast["seeds"] == 3
    claims = [line for line in MODULES[name].answer(result).splitlines() if "gain-matched control" in line]
    claims = [line for line in claims if "better than" in line]
    assert claims
    assert all(line.startswith("Does not hold: '") for line in claims)


@pytest.mark.slow
@each_study
def test_where_restarts_help_the_answers_say_so(name: str) -> None:
    """In a world where every restart that fires helps, the claims against each control hold, with the numbers."""
    text = MODULES[name].answer(results(name, SEEDS, restarts_help)[0])
    best = {"retuning": "tuned at each S, K*", "robustness_heatmaps": "at its best", "soft_restart": "the best soft"}
    claims = [line for line in text.splitlines() if best[name] in line and "lower perplexity" in line]
    claims = [line for line in claims if "the hard restart" not in line]
    assert len(claims) >= 4
    assert all(line.startswith("Holds: '") for line in claims), text


def test_region_and_bests_of_the_heatmaps() -> None:
    """Counts within 25 % of the best of the same S, bests and worsts are those of the made-up runs."""

    def value(cell: Cell) -> float:
        outer = cell.config.outer
        bad = outer.restart == "never" and outer.momentum == 0.9 and outer.form == "sum" and not cell.control_of
        return (11.2 if bad else 8.0 + outer.lr) * cell.config.inner_steps

    result, _ = results("robustness_heatmaps", SEEDS, value)
    for inner_steps, facts in result.numbers["controls"].items():
        assert facts["momentum_free"]["perplexity"] == pytest.approx(8.3 * int(inner_steps))
        assert facts["averaging"]["perplexity"] == pytest.approx(9.0 * int(inner_steps))
    for name, facts in result.numbers["places"].items():
        lost = 2 if name.startswith("sum") else 0
        assert (facts["never"]["within"], facts["restarted"]["within"]) == (4 - lost, 4)
        assert facts["never"]["worst"] == pytest.approx((11.2 if lost else 9.1) * facts["inner_steps"])
        assert facts["best_minus"]["averaging"]["mean"] == pytest.approx(-0.7 * facts["inner_steps"])
        ratio = facts["over_never_at_largest_momentum"]["ratio"]
        assert (ratio["mean"] > 1.25) == bool(lost)
    claim = line_of(heatmaps_study.answer(result), "enlarges the region")
    assert claim.startswith("Holds in 4 of 8: ")
    assert "sum HB S=4 yes 2 to 4 of 4" in claim
    assert "ema HB S=4 no 4 to 4 of 4" in claim


def test_retuning_finds_flatness_and_the_price_of_not_retuning() -> None:
    """Spread, kept value and its price follow from a known optimum that moves with S over beta and not over K."""

    def value(cell: Cell) -> float:
        outer = cell.config.outer
        away = 8.0 + abs(outer.lr - 0.3)
        if outer.restart != "never" and cell.config.rounds > int(outer.restart):
            return away + (0.0 if outer.restart == "3" else 0.08) + abs(outer.momentum - 0.5)
        return away + 4 * abs(outer.momentum - (0.5 if cell.config.inner_steps == SEEDS.short else 0.9))

    result, _ = results("retuning", SEEDS, value)
    for tuned in result.numbers["tuned"].values():
        assert tuned == {"never": {"lr": 0.3, "momentum": 0.5}, "K=3": {"lr": 0.3, "momentum": 0.5}}
    for facts in result.numbers["places"].values():
        is_moved = facts["inner_steps"] != SEEDS.short
        assert facts["k_sweep"]["worst_over_best"] == pytest.approx(8.08 / 8)
        assert facts["k_sweep"]["best"]["restart"] == facts["k_sweep"]["kept"]["restart"] == "3"
        assert facts["k_sweep"]["kept_over_best"] == 1
        assert facts["beta_sweep"]["worst_over_best"] == pytest.approx(9.6 / 8)
        assert facts["beta_sweep"]["kept_over_best"] == pytest.approx(9.6 / 8 if is_moved else 1)
        assert facts["k_sweep"]["kept_minus_kept_momentum"]["mean"] == pytest.approx(-1.6 if is_moved else 0)
        assert facts["k_sweep"]["settings"] + len(facts["k_sweep"]["never_fires"]) == len(SEEDS.periods)
    text = retuning_study.answer(result)
    assert line_of(text, "varies less over K").startswith("Holds: ")
    assert line_of(text, "keeping K costs less").startswith("Holds: ")
    assert "S=12 has 4 rounds: K = 5 never fires there" in text


@pytest.mark.slow
def test_periods_that_never_fire_are_in_no_number() -> None:
    """A period that the run is too short for is listed and drawn hollow, and left out of best and comparisons."""

    def value(cell: Cell) -> float:
        idle = cell.config.outer.restart != "never" and int(cell.config.outer.restart) >= cell.config.rounds
        return 1.0 if idle else 8.0  # so good that it would be the best of everything

    result, _ = results("retuning", SEEDS, value)
    for facts in result.numbers["places"].values():
        assert facts["k_sweep"]["best"]["perplexity"] == 8.0
        idle = ["5"] if facts["inner_steps"] == 12 else []
        assert facts["k_sweep"]["never_fires"] == facts["own_k_sweep"]["never_fires"] == idle
        assert facts["k_sweep"]["over_gain_matched"]["pairs"] == 3 - len(idle)
    marked = [row for row in result.rows if row["restart"] != "never" and row["restarts"] == 0]
    assert [(row["inner_steps"], row["restart"], row["perplexity"]) for row in marked] == [(12, "5", 1.0)] * 8


@pytest.mark.slow
def test_hollow_markers_are_the_periods_that_never_fire() -> None:
    """In the retuning page exactly the points of periods that never fire are hollow."""
    from matplotlib.colors import to_hex

    result, _ = results("retuning", QUICK, gain_only)
    with styled():
        panels = [axes for figure in pages(retuning_study, result)[1:] for axes in figure.axes]
    points = [
        line for axes in panels for line in axes.lines if line.get_linestyle() == "None" and len(line.get_xdata())
    ]
    hollow = [line for line in points if to_hex(line.get_markerfacecolor()) == "#ffffff"]
    assert [line.get_xdata() for line in hollow] == [(2.0,)] * 8
    assert all(0 < len(line.get_xdata()) <= 3 for line in points)


@pytest.mark.slow
def test_soft_optimum_and_whether_it_moves() -> None:
    """The best soft setting, its gain over the hard one, and whether it is elsewhere at the other S."""

    def value(cell: Cell) -> float:
        policy = cell.config.outer.policy()
        is_near = cell.config.inner_steps == SEEDS.short or cell.config.outer.form == "sum"
        inject = 0.5 if is_near else 0.0
        return 9 + abs(getattr(policy, "retain", 0.0) - 0.5) + abs(getattr(policy, "inject", 0.0) - inject)

    result, _ = results("soft_restart", SEEDS, value)
    for facts in result.numbers["places"].values():
        is_far = facts["form"] == "ema" and facts["inner_steps"] == SEEDS.long
        assert (facts["soft"]["retain"], facts["soft"]["inject"]) == (0.5, 0.0 if is_far else 0.5)
        assert facts["controls"]["hard"]["restart"] == str(facts["period"])
        assert facts["soft_minus"]["hard"]["mean"] == pytest.approx(-0.5 if is_far else -1.0)
    text = soft_study.answer(result)
    assert line_of(text, "another one at the other").startswith("Holds in 1 of 2: ")
    assert line_of(text, "is small, at most 1%").startswith("Does not hold: ")


def test_differences_are_paired_by_seed() -> None:
    """A constant gap under a large spread of seeds is found exactly; a seed that lacks one side is left out."""

    def value(cell: Cell) -> float | None:
        gap = 0.5 if cell.arm == "momentum-free" else 0.0
        is_unknown = cell.arm == "momentum-free" and cell.config.outer.lr == 0.3 and cell.config.seed == 1
        return None if is_unknown else 8 + gap + 10 * cell.config.seed

    lines = _lm.lines_of(rows(robustness_heatmaps(SEEDS), value), SEEDS)
    mine = _lm.first(lines, arm="sum, heavy ball, K=3", inner_steps=4, lr=0.3, momentum=0.5)
    whole, partial = (_lm.first(lines, arm="momentum-free", inner_steps=4, lr=lr) for lr in (1.1, 0.3))
    assert _lm.difference(mine, whole) == {"mean": -0.5, "min": -0.5, "max": -0.5, "seeds": 3}
    assert (partial["state"], partial["perplexity"], partial["missing"]) == ("missing", None, 1)
    assert (_lm.difference(mine, partial) or {})["seeds"] == 2
    assert _lm.difference(mine, None) is None
    assert (mine["min"], mine["perplexity"], mine["max"]) == (8.0, 18.0, 28.0)


@pytest.mark.parametrize(
    ("mine", "others", "lower", "words"),
    [
        ((8.0, "diverged", 8.0), (9.0, 9.0, 9.0), False, "-1.00 [-1.00, -1.00], 1 div."),
        ((8.0, 8.0, 8.0), (9.0, "diverged", 9.0), True, "-1.00 [-1.00, -1.00], 1 div. of the other"),
        ((8.0, 8.0, 8.0), ("diverged",) * 3, True, "3 div. of the other"),
        (("diverged",) * 3, (9.0, "diverged", "diverged"), False, "1 div."),
        (("diverged",) * 3, ("diverged",) * 3, None, "not known"),
    ],
)
def test_a_seed_that_diverges_on_one_side_decides_its_difference(
    mine: tuple[float | str, ...], others: tuple[float | str, ...], lower: bool | None, words: str
) -> None:
    """It is in no mean, and yet no setting that diverges is lower than one that does not."""

    def value(cell: Cell) -> float | str:
        return (others if cell.arm == "momentum-free" else mine)[cell.config.seed]

    lines = _lm.lines_of(rows(robustness_heatmaps(SEEDS), value), SEEDS)
    pair = (_lm.first(lines, arm=arm, lr=1.1) for arm in ("sum, heavy ball, K=3", "momentum-free"))
    facts = _lm.difference(*pair)
    assert (_lm.lower(facts), _lm.difference_words(facts, "+.2f")) == (lower, words)


def test_divergence_counts_for_the_side_that_did_not() -> None:
    """In a contrast, divergence on one side alone makes the pair better or worse and is in no ratio."""
    sweep = robustness_heatmaps(QUICK)

    def value(cell: Cell) -> float | str | None:
        lost = {"sum, heavy ball, never": (0.5, 0.3), "sum, heavy ball, K=3": (0.9, 0.3)}.get(cell.arm)
        if cell.arm.startswith("sum, heavy ball") and (cell.config.outer.momentum, cell.config.outer.lr) == (0.9, 1.1):
            return None if cell.arm.endswith("never") else 8.0
        at = (cell.config.outer.momentum, cell.config.outer.lr)
        return "diverged" if at == lost else 16.0 if cell.arm.endswith("never") else 8.0

    facts = heatmaps_study.table(rows(sweep, value), QUICK).numbers["places"]["sum HB S=4"]
    contrast = facts["over_never"]
    counts = {name: contrast[name] for name in ("pairs", "compared", "better", "worse", "missing")}
    assert counts == {"pairs": 4, "compared": 1, "better": 2, "worse": 1, "missing": 1}
    assert (contrast["diverged_without"], contrast["diverged_with"], contrast["diverged_both"]) == (1, 1, 0)
    assert contrast["ratio"]["mean"] == pytest.approx(2)
    assert _lm.ratio_words(contrast) == "2.00, 1 div. without, 1 div. with, 1 missing"
    assert _lm.ratio_above(contrast) is False  # a restarted run that diverges alone refutes


@pytest.mark.parametrize(
    ("answers", "head"),
    [
        ({"a": True, "b": True}, "Holds: "),
        ({"a": False, "b": False}, "Does not hold: "),
        ({"a": True, "b": False}, "Holds in 1 of 2: "),
        ({"a": None, "b": None}, "Not known: "),
        ({"a": False, "b": None}, "Does not hold (1 not known): "),
        ({"a": True, "b": None}, "Holds in the one place that is known (1 not known): "),
    ],
)
def test_a_claim_says_where_it_holds(answers: dict[str, bool | None], head: str) -> None:
    """The beginning of a claim is computed from where it holds, and what is not known is never counted as either."""
    assert _lm.tally("it is", answers, dict.fromkeys(answers, "")).startswith(f"{head}'it is'")


# ------------------------------------------------------------------------------------------- what is shown and written


def title(figure: Any) -> str:
    lines = figure.get_suptitle().rstrip().splitlines()
    assert len(lines) <= 2
    return " ".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("robustness_heatmaps", lambda c: 8 + 8 * (c.config.outer.restart == "never"), "widens the good region"),
        ("robustness_heatmaps", lambda c: 8 + 8 * (c.config.outer.restart == "3"), "narrows the good region"),
        ("robustness_heatmaps", lambda _: 8.0, "leaves the good region as wide"),
        ("soft_restart", lambda c: 8 + (c.arm != "momentum-free"), "is worse than plain averaging"),
        ("soft_restart", lambda c: 8 + (c.arm == "momentum-free"), "is better than plain averaging"),
        ("retuning", lambda c: 8 + 8 * (c.config.outer.momentum == 0.9), "by up to 0% over K and by up to 100% over"),
        ("retuning", lambda c: 8 + 4 * (c.config.outer.restart == "5"), "by up to 50% over K and by up to 0% over"),
    ],
)
def test_titles_follow_the_numbers(name: str, value: Value, words: str) -> None:
    """A made-up world and its contrary get contrary titles."""
    result, _ = results(name, QUICK, value)
    with styled():
        assert words in title(MODULES[name].draw(result))


def draw(figures: Sequence[Any]) -> None:
    """Draw a study's figure and the first of its details, which are drawn alike, as they were made: not laid out."""
    for figure in figures[:2]:
        figure.set_layout_engine(None)
        figure.draw_without_rendering()


def holes(cell: Cell) -> float | str | None:
    """About a tenth of the runs diverged, another tenth missing; the tuning is complete."""
    number = int(cell.run_id[:4], 16) % 10
    first = cell.config.inner_steps == QUICK.short and cell.config.outer.restart in {"never", "3"}
    return "diverged" if number == 3 else None if number == 7 and not first else gain_only(cell)


@pytest.mark.slow
@each_study
def test_diverged_and_missing_settings_stay(name: str) -> None:
    """Every setting is a row; diverged and missing ones say so and have no perplexity; each page has its title."""
    result, every_run = results(name, QUICK, holes)
    states = Counter(row["state"] for row in result.rows)  # one seed: a row a cell
    assert states == Counter(row.state for row in every_run)
    assert {"finished", "diverged", "missing"} <= set(states)
    assert all((row["perplexity"] is None) == (row["state"] != "finished") for row in result.rows)
    MODULES[name].answer(result)
    with styled():
        figures = pages(MODULES[name], result)
        draw(figures)
    assert all(map(title, figures))
    texts = Counter(text.get_text() for figure in figures for axes in figure.axes for text in axes.texts)
    assert texts["div."] > 0
    assert texts["missing"] + texts["miss."] > 0


@pytest.mark.slow
@pytest.mark.parametrize("module", [*MODULES.values(), wires_study], ids=[*MODULES, "wires"])
def test_nothing_known_yet(module: Any) -> None:
    """Before any run has ended, table, answer and page say so instead of failing."""
    result = module.table(rows(module.sweep(QUICK), lambda _: None), QUICK)
    assert {row["state"] for row in result.rows} == {"missing"}
    text = module.answer(result)
    assert "Not known" in text
    assert "Holds" not in text
    with styled():
        draw(pages(module, result))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), [("robustness_heatmaps", 8 * 3 * 4), ("soft_restart", 4 * 2 * 4)])
def test_heatmaps_show_every_cell_of_the_table(name: str, cells: int) -> None:
    """Each number of the page is that of its row: distinct made-up values are the texts of the page."""
    numbers = {run: 100.0 + place for place, run in enumerate(MODULES[name].sweep(QUICK).runs)}
    result, _ = results(name, QUICK, lambda cell: numbers[cell.run_id])
    with styled():
        figures = pages(MODULES[name], result)
        drawn = [text.get_text() for figure in figures for axes in figure.axes for text in axes.texts]
    shown = [row for row in result.rows if row["arm"] != "momentum-free" and row.get("retain", 0.0) is not None]
    assert len(drawn) == cells
    assert {text for text in drawn if text != "\N{EN DASH}"} == {f"{row['perplexity']:.0f}" for row in shown}


# ---------------------------------------------------------------------------------------------------------- machinery


def small(tmp_path: Path) -> Scale:
    """The quick scale on a small text, so that nothing depends on the Python that runs the tests."""
    text = textmaker.write(tmp_path / "text.txt")
    values = {"data.corpus": f"file:{text}", "steps": 24, "inner_steps": 2, "data.validation_windows": 8}
    return replace(QUICK, base=with_values(QUICK.base, values), short=2, long=4, retuning=(2, 6), momenta=(0.5, 0.9))


class Launcher:
    """Stands for `run_sweep`: takes every run's perplexity from a function, and may break off or fail."""

    def __init__(self, value: Value, fail: Sequence[str] = ()) -> None:
        self.value, self.fail = value, fail
        self.sweeps: list[Sweep] = []

    def __call__(self, sweep: Sweep, folder: Path, **options: Any) -> launch.Outcome:
        """Write the table as if the runs had ended."""
        self.sweeps.append(sweep)
        self.options = options
        folder.mkdir(exist_ok=True)
        write_rows(folder / "cells.csv", rows(sweep, self.value))
        return launch.Outcome(len(sweep.runs), 0, len(self.fail), 0, 1.0, dict.fromkeys(self.fail, "it broke"))


@pytest.mark.slow
@each_study
def test_stages_run_until_nothing_is_added(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heatmaps and soft restarts are one sweep, the retuning two; repeated, it begins where it had arrived."""
    scale, launcher, drawn = small(tmp_path), Launcher(gain_only), []

    def pictures(_: Any, result: Any) -> dict[str, bytes]:
        cells = [{key: None if value == "" else value for key, value in row.items()} for row in result.rows]
        settings = {key: value for key, value in result.settings.items() if key not in ("quick", "scale")}
        drawn.append(study._plain([cells, result.numbers, settings], {}))
        return {".png": b"", ".pdf": b""}

    monkeypatch.setattr(_training, "run_sweep", launcher)
    monkeypatch.setattr(study, "_pictures", pictures)
    outcome = study.run(name, tmp_path / "out", scale=scale, workers=3)
    tables = [path for path in outcome.paths if path.suffix in {".csv", ".json"}]
    assert outcome.paths[-2:] == tables == [tmp_path / "out" / f"{name}.{ending}" for ending in ("csv", "json")]
    assert {path.name for path in outcome.paths} >= {f"{name}.png", f"{name}.pdf"}
    assert len(launcher.sweeps) == (2 if name == "retuning" else 1)
    assert (launcher.options["workers"], launcher.options["threads"]) == (3, 1)
    assert launcher.options["runs"] == tmp_path / "out" / "runs"
    assert set(study.redraw(name, tmp_path / "out")) == set(outcome.paths[:-2])
    assert drawn[0] == drawn[1]
    again, facts_and_rows = Launcher(gain_only), [path.read_bytes() for path in outcome.paths[-2:]]
    monkeypatch.setattr(_training, "run_sweep", again)
    repeated = study.run(name, tmp_path / "out", scale=scale).paths[-2:]
    assert [path.read_bytes() for path in repeated] == facts_and_rows
    assert [sweep.spec() for sweep in again.sweeps] == [launcher.sweeps[-1].spec()]
    facts = json.loads(outcome.paths[-1].read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert facts["settings"]["scale"] == "quick"
    with outcome.paths[-2].open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(launcher.sweeps[-1].cells)
    assert {"arm", "form", "inner_steps", "momentum", "lr", "restart", "state", "perplexity"} <= set(written[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODULES, "wires", "blockwise"])
def test_the_documentation_shows_what_is_drawn_today(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of docs/ are what the code draws from the table and numbers that are stored beside them."""
    # A PDF, which nothing here reads, a palette and compression take longer than all the rest.
    monkeypatch.setattr(study, "rendered", lambda figure, **_: {".png": rendered(figure, [".raw"])[".raw"]})
    image, chops = pytest.importorskip("PIL.Image"), import_module("PIL.ImageChops")
    for ending in (".csv", ".json"):
        shutil.copy(DOCS / f"{name}{ending}", tmp_path)
    pictures = [path.name for path in study.redraw(name, tmp_path)]
    assert sorted(pictures) == sorted(path.name for path in DOCS.glob(f"{name}*.png"))
    for picture in pictures:
        stored = image.open(DOCS / picture).convert("RGB")
        drawn = image.frombytes("RGBA", stored.size, (tmp_path / picture).read_bytes()).convert("RGB")
        most = reduce(chops.lighter, chops.difference(drawn, stored).split()).histogram()
        assert sum(most[52:]) < 1e-3 * sum(most), (
            f"{picture}: twophase study {name} --redraw --out docs"
        )  # fonts differ a little


@pytest.mark.parametrize("damage", ["pipe", "long cell", "large number"])
def test_damaged_files_are_not_drawn(tmp_path: Path, damage: str) -> None:
    """A table or numbers that cannot be read or drawn are refused by their names, with a remedy."""
    for ending in (".csv", ".json"):
        shutil.copy(DOCS / f"wires{ending}", tmp_path)
    table, facts = tmp_path / "wires.csv", tmp_path / "wires.json"
    if damage == "pipe":
        table.unlink()
        os.mkfifo(table)
    elif damage == "long cell":
        table.write_text("a\n" + "b" * 200_000)
    else:
        facts.write_text(re.sub(r'"high": [^,\s]+', '"high": 1e308', facts.read_text()))
    with pytest.raises(UsageError, match=r"--redraw: .*wires\.csv and .*wires\.json do not hold this study .*--out"):
        study.redraw("wires", tmp_path)


def test_failed_runs_are_named_and_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that could not be trained end the study with their names and reasons, before anything is written."""
    monkeypatch.setattr(_training, "run_sweep", Launcher(gain_only, fail=["abc123"]))
    with pytest.raises(
        RuntimeError, match=r"1 of the \d+ runs of soft-restart-quick could not.*\n  run abc123: it broke"
    ):
        study.run("soft_restart", tmp_path / "out", scale=small(tmp_path))
    assert not list((tmp_path / "out").glob("soft_restart.*"))


def test_scales_are_chosen_by_name() -> None:
    """Laptop by default, in NAME; quick and paper by their names, each in a folder of its own."""
    asked: list[tuple[dict[str, Any], str, str]] = [
        ({}, "soft_restart", "laptop"),
        ({"quick": True}, "soft_restart-quick", "quick"),
        ({"quick": True, "scale": "quick"}, "soft_restart-quick", "quick"),
        ({"scale": "paper"}, "soft_restart-paper", "paper"),
    ]
    for options, folder, name in asked:
        scale = study.scale_named(**options)
        assert scale is SCALES[name]
        assert study._folder("soft_restart", Path("out"), scale) == Path("out", folder)


def test_an_impossible_run_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    """A text that is not there is told at once, with the remedy's option, and no sweep folder appears."""
    scale = small(tmp_path)
    scale = replace(scale, base=with_values(scale.base, {"data.corpus": "file:/nowhere/text.txt"}))
    with pytest.raises(UsageError, match=r"--data\.corpus"):
        study.run("soft_restart", tmp_path / "out", scale=scale)
    assert not list((tmp_path / "out").iterdir())
