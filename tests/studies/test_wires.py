"""The study of wires: what it concludes from made-up runs, the bytes that it reports, and that it really trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from madeup import Value, line_of, rows
from twophase.base.config import to_tree
from twophase.diloco.comm import ProcessGroup
from twophase.diloco.formats import WIRES
from twophase.diloco.setting import open_channel
from twophase.figures.style import rendered, styled
from twophase.recipes.paper import LAPTOP, PAPER, QUICK, Scale
from twophase.studies import wires
from twophase.sweeps.grid import Cell
from twophase.sweeps.plan import plan
from twophase.tasks.lm.model import Llama

SEED_FACTOR = {0: 0.97, 1: 1.04, 2: 1.0}
SEED_SPREAD = statistics.stdev(map(math.log, SEED_FACTOR.values()))


def result_of(value: Value, scale: Scale = LAPTOP) -> Any:
    return wires.table(rows(wires.sweep(scale), value), scale)


def seeds_only(cell: Cell) -> float:
    """A world in which the wire does nothing: seed, momentum and restart alone count."""
    outer = cell.config.outer
    return SEED_FACTOR[cell.config.seed] * (10 + 8 * (outer.momentum == 0.9) * (1 if outer.restart == "never" else 0.5))


def with_int8(factor: float, value: Value = seeds_only) -> Value:
    def changed(cell: Cell) -> float:
        perplexity = value(cell)
        assert isinstance(perplexity, float)
        return perplexity * (factor if cell.config.sync.wire == "int8" else 1)

    return changed


CLAIM = "sent as {}, the model reaches"
GAIN = "sent as {}, K=3 gains"


@pytest.mark.parametrize("scale", [QUICK, LAPTOP, PAPER], ids=["quick", "laptop", "paper"])
def test_each_run_is_there_on_every_wire(scale: Scale) -> None:
    """Runs on a lossy wire differ from a float32 run in the wire alone, and no run stands for one on another wire."""
    sweep = wires.sweep(scale)
    by_wire: dict[str, list[Any]] = {wire: [] for wire in WIRES}
    for config in sweep.runs.values():
        tree = to_tree(config)
        by_wire[tree["sync"].pop("wire")].append(tree)
    assert all(runs == by_wire["float32"] for runs in by_wire.values())
    momenta = {cell.config.outer.momentum for cell in sweep.cells}
    assert len(sweep.runs) == len(WIRES) * 2 * 2 * len(momenta) * len(scale.seeds) == len(sweep.cells)
    made = plan(sweep)
    assert not made.stands_for
    assert all(len({made.runs[run].sync.wire for run in node.runs}) == 1 for node in made.forest.nodes.values())


def test_where_the_wire_does_nothing_the_answer_says_so() -> None:
    """In a world of seeds alone every change is 0 within noise, and every claim of no change holds."""
    result = result_of(seeds_only)
    assert len(result.numbers["places"]) == 8
    for facts in [*result.numbers["places"].values(), result.numbers["all_places"]]:
        for change in facts["change"].values():
            assert (change["ratio"], change["error"], change["verdict"]) == (1, 0, wires.NOISE)
        assert facts["spread"] == pytest.approx(SEED_SPREAD)
    text = wires.answer(result)
    for wire in wires.LOSSY:
        assert line_of(text, CLAIM.format(wire)).startswith("Holds: ")
        assert line_of(text, GAIN.format(wire)).startswith("Holds: ")
    assert "HB 0.9 1.29 / 1.29 / 1.29" in line_of(text, "Perplexity without restarts over")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.2, "higher"), (1.01, "higher, by less than a seed"), (0.9, "lower")]
)
def test_a_wire_that_matters_is_found_and_measured_against_the_seeds(factor: float, verdict: str) -> None:
    """A constant factor is found exactly under a larger spread of seeds, because seeds are paired."""
    result = result_of(with_int8(factor))
    for facts in [*result.numbers["places"].values(), result.numbers["all_places"]]:
        assert facts["change"]["int8"]["ratio"] == pytest.approx(factor)
        assert facts["change"]["int8"]["verdict"] == verdict
        assert facts["change"]["bfloat16"]["verdict"] == wires.NOISE
    assert result.numbers["typical"]["bfloat16"] == 0
    assert result.numbers["typical"]["another seed"] == pytest.approx(2**0.5 * SEED_SPREAD)
    text = wires.answer(result)
    assert line_of(text, CLAIM.format("int8")).startswith("Does not hold: ")
    for facts in result.numbers["restart_gain"].values():  # a factor on everything takes no gain away
        assert facts["shift"]["int8"]["ratio"] == pytest.approx(1)


@pytest.mark.slow
def test_a_restart_that_gains_less_on_a_wire_is_told() -> None:
    """A wire that takes a fifth off what restarts gain is named, in the one place where it does."""

    def value(cell: Cell) -> float:
        outer = cell.config.outer
        there = (outer.nesterov, outer.momentum, outer.restart, cell.config.sync.wire) == (True, 0.9, "3", "int8")
        return seeds_only(cell) * (1.2 if there else 1)

    result = result_of(value)
    shift = result.numbers["restart_gain"]["NAG 0.9"]["shift"]
    assert shift["int8"]["ratio"] == pytest.approx(1 / 1.2)
    assert shift["bfloat16"]["ratio"] == pytest.approx(1)
    claim = line_of(wires.answer(result), GAIN.format("int8"))
    assert claim.startswith("Holds in 3 of 4: ")
    assert "NAG 0.9 no -16.7% ± 0.0% lower" in claim


@pytest.mark.parametrize(
    ("log", "error", "spread", "verdict"),
    [
        (0.01, 0.01, 0.05, "within seed noise"),
        (-0.01, 0.01, 0.05, "within seed noise"),
        (0.03, 0.01, 0.05, "higher, by less than a seed"),
        (-0.03, 0.01, 0.05, "lower, by less than a seed"),
        (0.06, 0.01, 0.05, "higher"),
        (-0.06, 0.01, 0.05, "lower"),
        (0.06, 0.04, 0.05, "open"),
        (0.06, None, None, "one seed: not judged"),
    ],
)
def test_the_rule_of_the_verdicts(log: float, error: float | None, spread: float | None, verdict: str) -> None:
    """Clear is beyond two standard errors, large is beyond the seeds' own standard deviation."""
    low, high = (None, None) if error is None else (log - 2 * error, log + 2 * error)
    assert wires.verdict({"log": log, "low": low, "high": high, "without": {}}, spread) == verdict


def test_the_standard_error_is_that_of_the_seeds() -> None:
    """Changes of 1 %, 2 % and 6 % in one place have their mean, deviation over sqrt(3), and root mean square."""
    gaps = {0: 0.01, 1: 0.02, 2: 0.06}
    error = (0.0014 / 2 / 3) ** 0.5  # squared deviations 0.02^2, 0.01^2, 0.03^2

    def value(cell: Cell) -> float:
        return seeds_only(cell) * (math.exp(gaps[cell.config.seed]) if cell.config.sync.wire == "int8" else 1)

    result = result_of(value)
    for facts in [*result.numbers["places"].values(), result.numbers["all_places"]]:
        change = facts["change"]["int8"]
        assert [change["log"], change["error"]] == pytest.approx([0.03, error])
        assert [change["low"], change["high"]] == pytest.approx([0.03 - 2 * error, 0.03 + 2 * error])
        assert change["rms"] == pytest.approx((0.0041 / 3) ** 0.5)
    row = next(row for row in result.rows if row["wire"] == "int8")
    assert [row[f"float32_log_seed{seed}"] for seed in gaps] == pytest.approx(list(gaps.values()))
    text = wires.answer(result)
    assert "3.3 of the 18 would be beyond 2 standard errors" in text  # 27 times P(|t| > 2) with 2 degrees of freedom


@pytest.mark.slow
def test_divergence_and_missing_runs() -> None:
    """A wire that diverges where float32 does not refutes; float32's own divergence and missing runs are not known."""

    def value(cell: Cell) -> float | str | None:
        outer, wire = cell.config.outer, cell.config.sync.wire
        place = (outer.nesterov, outer.momentum, outer.restart)
        if (place, wire, cell.config.seed) == ((False, 0.9, "never"), "int8", 1):
            return "diverged"
        if place == (True, 0.9, "never") and wire != "bfloat16":
            return "diverged"
        if (place, wire) == ((True, 0.5, "3"), "bfloat16") and cell.config.seed == 2:
            return None
        return seeds_only(cell)

    result = result_of(value)
    verdicts = {
        (name, wire): change["verdict"]
        for name, facts in result.numbers["places"].items()
        for wire, change in facts["change"].items()
        if change["verdict"] != wires.NOISE
    }
    assert verdicts == {
        ("HB 0.9 never", "int8"): "diverged",
        ("NAG 0.9 never", "int8"): "both diverged",
        ("NAG 0.9 never", "bfloat16"): "the other diverged",
        ("NAG 0.5 K=3", "bfloat16"): "missing",
    }
    text = wires.answer(result)
    assert line_of(text, CLAIM.format("int8")).startswith("Holds in 7 of 8 (1 not known): ")
    assert line_of(text, CLAIM.format("bfloat16")).startswith("Holds (2 not known): ")
    assert result.numbers["all_places"]["change"]["int8"]["without"] == {"diverged": 1, "both diverged": 1}
    with styled():
        figure = wires.draw(result)
        texts = [text.get_text().strip() for axes in figure.axes for text in axes.texts]
        assert rendered(figure, [".png"])[".png"].startswith(b"\x89PNG")
    words = ["bfloat16: div.", "bfloat16: missing", "int8: div.", "int8: div."]
    assert sorted(texts[:4]) == words


def test_one_seed_is_not_judged() -> None:
    """Without a second seed there is no noise to judge by: numbers are shown and no claim is decided."""
    text = wires.answer(result_of(with_int8(1.3), QUICK))
    assert "+30.0%" in text
    assert "Holds" not in text
    assert "Does not hold" not in text


def test_the_page_shows_the_table() -> None:
    """Each mean and each seed of the page is that of the table, and the shares of bytes stand beside the bars."""
    result = result_of(with_int8(1.05))
    with styled():
        figure = wires.draw(result)
        changes, sent = figure.axes
        strokes = [line for line in changes.lines if line.get_marker() == "|"]
        means = [line for line in changes.lines if line.get_marker() == "^" and np.size(line.get_xdata()) == 1]
    assert len(strokes) == 2 * 9  # the row of all places has none to show
    assert [float(line.get_xdata()[0]) for line in means] == pytest.approx([5] * 9)  # type: ignore[index]
    assert [text.get_text() for text in sent.texts] == ["1.000", "0.502", "0.259"]
    title = " ".join(figure.get_suptitle().split())
    assert "by +0.0% ± 0.0% with bfloat16 (0.5 of the bytes)" in title
    assert "by +5.0% ± 0.0% with int8 (0.26 of the bytes)" in title


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[ProcessGroup]:
    """A process group of some processes, of which this is the only real one; its collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield ProcessGroup()
    dist.destroy_process_group()


@pytest.mark.parametrize("group", [2, 3], indirect=True)
@pytest.mark.parametrize("wire", WIRES)
def test_the_bytes_told_are_those_of_the_wire(group: ProcessGroup, wire: str) -> None:
    """What the study says a process sends is what the wire reports when it is asked to send that many elements."""
    for numel in (1, 127, 1000, 31392):
        tensor = torch.zeros(numel)
        transfer = open_channel(wire, numel, dtype=tensor.dtype, device=tensor.device, senders=1).launch(group, tensor)
        transfer.wait()
        assert wires.sent_bytes(wire, numel, group.size) == transfer.bytes_sent > 0


def test_the_elements_are_those_of_the_model() -> None:
    """The reported bytes are those of all parameters of the trained model."""
    result = result_of(seeds_only, QUICK)
    assert result.settings["parameters"] == sum(p.numel() for p in Llama(QUICK.base.model, 96, seed=0).parameters())
    assert result.numbers["bytes_a_round"]["int8"] == wires.sent_bytes("int8", result.settings["parameters"])
