"""What docs/restarts*.md say in sentences, and their tables, is in the csv files beside them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from twophase.judge.bootstrap import t_interval
from twophase.studies import bench, regimes

DOCS = Path(__file__).parent.parent / "docs"
Setting = tuple[str, bool, float, float, str]
"""Form, Nesterov or not, momentum, learning rate, restart policy."""
AVERAGING: Setting = ("sum", False, 0.0, 1.0, "never")
LRS = (0.3, 0.7, 1.1)
PLACES = {
    "96 rounds of S = 5": ("heatmaps", "5"),
    "24 rounds of S = 20": ("heatmaps", "20"),
    "60 rounds of S = 16 (the demo)": ("demo",),
}


@cache
def runs() -> dict[Any, dict[Setting, dict[str, float]]]:
    """Perplexities by place, setting and seed; where a csv has means over the seeds, these."""
    by_place: dict[Any, dict[Setting, dict[str, float]]] = {}
    for place, setting, seed, perplexity in _rows():
        by_place.setdefault(place, {}).setdefault(setting, {})[seed] = perplexity
    return by_place


def _rows() -> Iterator[tuple[Any, Setting, str, float]]:
    for row in _csv("robustness_heatmaps.csv"):
        if row["of_restart"] in ("", "3"):  # a gain-matched run goes under the learning rate that it stands beside
            form, momentum, lr = row["form"] or "sum", float(row["momentum"]), float(row["of_lr"] or row["lr"])
            restart = "gain of K=3" if row["of_lr"] else row["restart"]
            setting = (form, row["rule"] == "Nesterov", momentum, lr, restart)
            yield ("heatmaps", row["inner_steps"]), setting, f"{row['seeds']} seeds", float(row["perplexity"])
    for row in _csv("demo-cells.csv"):
        if "gain" not in row["arm"]:
            momentum, lr = float(row["outer.momentum"]), float(row["outer.lr"])
            setting = ("sum", momentum > 0 and row["outer.nesterov"] == "true", momentum, lr, row["outer.restart"])
            yield ("demo",), setting, row["seed"], float(row["perplexity"])


def _csv(name: str) -> Iterator[dict[str, str]]:
    with (DOCS / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def ratio(place: Any, setting: Setting, control: Setting) -> float:
    """Geometric mean over the seeds of one setting's perplexity over the other's."""
    treated, untreated = (runs()[place][each] for each in (setting, control))
    assert set(treated) == set(untreated)
    return geometric_mean([treated[seed] / untreated[seed] for seed in treated])


def rule(restart: str, *, form: str = "sum", nesterov: bool = True, lr: float = 0.7) -> Setting:
    return form, nesterov, 0.9, lr, restart


def span(values: Iterator[float] | list[float]) -> tuple[float, float]:
    items = list(values)
    return min(items), max(items)


def percent(values: tuple[float, float]) -> str:
    return " to ".join(f"{100 * value - 100:.0f}" for value in values) + " %"


def times(values: tuple[float, float]) -> str:
    return " to ".join(f"{value:.2f}" for value in values)


@cache
def page() -> str:
    """The pages on one line, without the blocks that are quoted from others."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("restarts*.md")))
    return " ".join(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split())


@cache
def tuned() -> dict[str, dict[str, float]]:
    """Averaging's result over that of each change by place, each at its own best inner learning rate."""
    by_place = regimes.table().numbers["at_best"]
    return {place: {name: each["ratio"] for name, each in facts.items()} for place, facts in by_place.items()}


def test_the_usual_rule_beside_averaging() -> None:
    """Every row of both tables is in the csv files, and the last one on the log."""
    text = (DOCS / "restarts-when.md").read_text(encoding="utf-8")
    assert len(tuned()) == 8
    for place, ratios in tuned().items():
        cells = [1 / ratios[name] for name in ("DiLoCo's momentum", "a restart of it")]
        assert re.search(rf"^\| {place}: [^|]*\| {cells[0]:.2f} \| {cells[1]:.2f} \|$", text, re.MULTILINE), place
    for name, place in PLACES.items():
        cells = [ratio(place, setting, AVERAGING) for setting in (rule("never"), rule("3"), rule("3", lr=0.3))]
        assert "| {} | {:.2f} | {:.2f} | {:.2f} |".format(name, *cells) in text, name
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    ends = {
        name.strip(): geometric_mean(map(float, values.split()))
        for name, values in re.findall(r"^(long-[a-z-]+(?: 0\.9 \w+)?) +[\d. ]+ end ([\d. ]+)$", log, re.MULTILINE)
    }
    never, three = (ends[f"long-nesterov 0.9 {restart}"] / ends["long-averaging"] for restart in ("never", "3"))
    assert f"| 300 rounds of S = 16 | {never:.2f} | {three:.2f} | |" in text


def test_advice_for_each_at_its_best_inner_learning_rate() -> None:
    """Averaging against DiLoCo's momentum, a small momentum, the filter and a rising rate; a restart against none."""
    language = [ratios for place, ratios in tuned().items() if place != "digits"]
    worst = 1 / tuned()["digits"]["DiLoCo's momentum"]
    behind = [1 / ratios["DiLoCo's momentum"] for ratios in language]
    assert f"at 8 of 8 places, by {percent(span(behind))} (at digits {worst:.1f} times)" in page()
    assert all(ratios["momentum"] < 1 and ratios["orthogonal"] > 1 for ratios in tuned().values())
    assert f"places, by {percent(span([ratios['orthogonal'] for ratios in tuned().values()]))}. **Bench**" in page()
    assert f"better at {sum(ratios['a rising rate'] > 1 for ratios in tuned().values())} of 8 places" in page()
    gains = {place: each["a restart of it"] / each["DiLoCo's momentum"] for place, each in tuned().items()}
    most = gains.pop("digits")
    assert min(gains.values()) > 1
    assert (
        f"{times(span([*gains.values()]))} times lower perplexity than without restarts (digits {most:.1f})" in page()
    )
    restarted = [1 / ratios["a restart of it"] for ratios in tuned().values()]
    assert f"still {percent(span(restarted))} above averaging" in page()


def test_momentum_of_nine_tenths_setting_by_setting() -> None:
    """What is said of single settings at momentum 0.9, in sum and in EMA form."""
    heavy = [
        ratio(place, rule("never", nesterov=False, lr=lr), rule("3", nesterov=False, lr=lr))
        for place in PLACES.values()
        for lr in LRS
    ]
    assert f"{times(span(heavy))} times lower perplexity than without" in page()
    costs = {
        lr: span(
            [
                ratio(place, *(rule(restart, form="ema", nesterov=kind, lr=lr) for restart in ("3", "never")))
                for place in PLACES.values()
                if place != ("demo",)
                for kind in (False, True)
            ]
        )
        for lr in LRS
    }
    assert f"{times(costs[0.3])} times higher perplexity at lr 0.3" in page()
    assert "at 1.1 between {:.2f} and {:.2f} times".format(*costs[1.1]) in page()


def best_setting(place: Any, form: str, nesterov: bool, restart: str) -> Setting:
    """The setting of an arm with momentum that has the lowest mean perplexity."""
    settings = [s for s in runs()[place] if (s[0], s[1], s[4]) == (form, nesterov, restart) and s[2] > 0]
    assert len(settings) in (12, 15)
    return min(settings, key=lambda setting: geometric_mean(runs()[place][setting].values()))


def test_best_settings_with_and_without_restarts() -> None:
    """They are as good as each other, either way; in the demo both are ahead of plain averaging."""
    pairs = {
        (place, form, kind): ratio(place, *(best_setting(place, form, kind, restart) for restart in ("3", "never")))
        for place in PLACES.values()
        for form in (("sum",) if place == ("demo",) else ("sum", "ema"))
        for kind in (False, True)
    }
    assert min(pairs.values()) < 1 < max(pairs.values())
    largest = max(max(value, 1 / value) for value in pairs.values())
    assert f"the best settings with and without differ by at most {100 * largest - 100:.0f} %" in page()
    overall = {setting: geometric_mean(list(seeds.values())) for setting, seeds in runs()["demo",].items()}
    first = min(overall, key=lambda setting: overall[setting])
    behind = 100 * (1 - ratio(("demo",), first, AVERAGING))
    assert f"{behind:.0f} % below it in the mean, and below it for every seed" in page()
    assert all(runs()["demo",][first][seed] < value for seed, value in runs()["demo",][AVERAGING].items())


MARGIN = (0.98, 1.02)
"""An interval inside it makes two arms level."""


def interval(treated: list[float], untreated: list[float]) -> tuple[float, float, float]:
    """Ratio of two arms, paired by seed, with both ends of Student's 95 % interval."""
    gaps = [math.log(a / b) for a, b in zip(treated, untreated, strict=True)]
    low, high = t_interval(gaps) or (math.nan, math.nan)
    return math.exp(sum(gaps) / len(gaps)), math.exp(low), math.exp(high)


def level(ends: tuple[float, float, float]) -> bool:
    return MARGIN[0] <= ends[1] and ends[2] <= MARGIN[1]


def between(place: Any, first: Setting, second: Setting) -> tuple[float, float, float]:
    treated, untreated = (runs()[place][setting] for setting in (first, second))
    return interval([treated[seed] for seed in treated], [untreated[seed] for seed in treated])


def test_bests_of_the_demo_by_seed() -> None:
    """With and without restarts, by Student's interval: neither is level, and neither is distinguished."""
    heavy, nesterov = (
        between(("demo",), *(best_setting(("demo",), "sum", kind, restart) for restart in ("3", "never")))
        for kind in (False, True)
    )
    words = "K = 3 is {:.3f} times that without, with a 95 % interval of {:.3f} to {:.3f}"
    assert words.format(*heavy) in page()
    assert "Nesterov's is {:.3f} times, {:.3f} to {:.3f}.".format(*nesterov) in page()
    assert not level(heavy)
    assert not level(nesterov)


def test_what_counts_as_good() -> None:
    """Settings of the demo within each limit of the best of all."""
    means = {setting: sum(seeds.values()) / len(seeds) for setting, seeds in runs()["demo",].items()}
    text = (DOCS / "restarts-when.md").read_text(encoding="utf-8")
    for kind, name in ((False, "heavy ball"), (True, "Nesterov")):
        for restart, words in (("never", "no restart"), ("3", "K = 3")):
            arm = [
                mean
                for (_, its, momentum, _, policy), mean in means.items()
                if momentum and (its, policy) == (kind, restart)
            ]
            counts = [sum(mean <= min(means.values()) * (1 + x) for mean in arm) for x in (0.05, 0.1, 0.15, 0.25, 0.5)]
            assert f"| {name}, {words} | {' | '.join(map(str, counts))} |" in text


def test_intervals_of_long_runs() -> None:
    """The ratios at the end of 300 rounds are those of the log's perplexities, paired by seed."""
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    lines = re.findall(r"^((?:long|flat)-[a-z-]+(?: 0\.\d)?(?: \w+)?) +\d+\.\d\d .* end ([\d. ]+)$", log, re.MULTILINE)
    ends = {name: list(map(float, values.split())) for name, values in lines}
    rows = {
        "Nesterov 0.9, K = 3 over no restart": ("long-nesterov 0.9 3", "long-nesterov 0.9 never"),
        "Nesterov 0.9, K = 10 over no restart": ("long-ten True", "long-nesterov 0.9 never"),
        "Nesterov 0.9, no restart over averaging": ("long-nesterov 0.9 never", "long-averaging"),
        "heavy ball 0.9, no restart over K = 3": ("long-heavy-ball 0.9 never", "long-heavy-ball 0.9 3"),
        "heavy ball 0.9, K = 3 over averaging": ("long-heavy-ball 0.9 3", "long-averaging"),
        "heavy ball 0.5, K = 3 over no restart": ("long-heavy-ball 0.5 3", "long-heavy-ball 0.5 never"),
        "averaging over `auto`": ("long-averaging", "long-auto"),
        "`auto` over averaging, wsd": ("flat-auto wsd", "flat-averaging wsd"),
        "averaging, wsd over cosine": ("flat-averaging wsd", "long-averaging"),
    }
    for words, (first, second) in rows.items():
        assert "| {} | {:.3f} | {:.3f} to {:.3f} |".format(words, *interval(ends[first], ends[second])) in page()


def test_wires_within_the_margin() -> None:
    """How many places are level with float32, and the mean of all."""
    changes: dict[str, list[list[float]]] = {}
    momenta = set()
    for row in _csv("wires.csv"):
        if row["wire"] != "float32":
            seeds = [float(row[f"float32_log_seed{seed}"]) for seed in range(3)]
            changes.setdefault(row["wire"], []).append(seeds)
            if level(interval([math.exp(change) for change in seeds], [1.0] * 3)):
                momenta.add((row["wire"], row["rule"], row["restart"], row["momentum"]))
    assert f"in {len(momenta)} of {sum(map(len, changes.values()))} places, all at momentum 0.5" in page()
    assert {momentum for *_, momentum in momenta} == {"0.5"}
    for places in changes.values():
        means = [sum(each) / len(places) for each in zip(*places, strict=True)]
        _, low, high = interval([math.exp(mean) for mean in means], [1.0] * 3)
        assert f"({low:.3f} to {high:.3f})" in page()


def test_arms_beside_momentum_free_sgd() -> None:
    """The table of the verdicts counts the arms at their bests, by Student's interval."""
    for words, name in (
        ("heatmaps, S = 5", "robustness_heatmaps-S5"),
        ("heatmaps, S = 20", "robustness_heatmaps-S20"),
        ("soft restarts, S = 5", "soft_restart-S5"),
        ("soft restarts, S = 20", "soft_restart-S20"),
    ):
        text = (DOCS / "verdicts" / f"{name}.md").read_text(encoding="utf-8").partition("## Against momentum-free\n")[2]
        rows = re.findall(r"\| tuned best \| +([\d.]+) \|.*?\| \[[^]]*\] \| \[([\d.]+), ([\d.]+)\]", text)
        arms = [(float(ratio), float(low), float(high)) for ratio, low, high in rows]
        counts = [sum(map(level, arms)), sum(low > 1 for _, low, _ in arms), sum(high < 1 for *_, high in arms)]
        assert f"| [{words}](verdicts/{name}.md) | {len(arms)} | {' | '.join(map(str, counts))} |" in page()


def test_nesterov_beside_its_gain_matched_control() -> None:
    """At momentum 0.9: worse than a restart at small learning rates, better at the largest."""
    spans = {
        lr: span([ratio(("heatmaps", s), rule("gain of K=3", lr=lr), rule("3", lr=lr)) for s in ("5", "20")])
        for lr in LRS
    }
    said = (
        f"it is {times(spans[0.3])} times worse at lr 0.3 and {times(spans[0.7])} times at 0.7, and better "
        f"({times(spans[1.1])}) at 1.1"
    )
    assert said in page()


def test_restarts_on_the_bench() -> None:
    """How many of its comparisons with a restart against none say what, and that no restarted arm beats averaging."""
    result = bench.table()
    words = result.numbers["words"]["with a restart against without"]
    total, better, worse = sum(words.values()) - words.get("missing", 0), words["better"], words["worse"]
    for name, parts in {
        "index.md": f"of {total} comparisons on the bench {better} say that a restart is better than none, ",
        "restarts.md": f"of {total} comparisons on the bench {better} say better",
        "restarts-when.md": f"of {total} comparisons {better} say that a restart is better than none, {worse}",
    }.items():
        assert parts in plain(name), name
    lines = [line for line in result.rows if "@" in line["arm"] and line["control"] == "averaging"]
    assert not any(line["word"] == "better" for line in lines)
    of_restart = [
        line for line in result.rows if line["family"].startswith("with a restart") and line["word"] == "better"
    ]
    assert {(line["place"], line["arm"]) for line in of_restart} == {("sparse", "adamw@3"), ("eight", "slowmo@3")}


def plain(name: str) -> str:
    """A page on one line, without the targets of its links."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (DOCS / name).read_text(encoding="utf-8"))
    return " ".join(text.split())
