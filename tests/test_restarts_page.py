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

DOCS = Path(__file__).parent.parent / "docs"
Setting = tuple[str, bool, float, float, str]
"""Form, Nesterov or not, momentum, learning rate, restart policy."""
AVERAGING: Setting = ("sum", False, 0.0, 1.0, "never")
LRS = (0.3, 0.7, 1.1)
PLACES = {
    "96 rounds of S = 5": ("heatmaps", "5"),
    "24 rounds of S = 20": ("heatmaps", "20"),
    "60 rounds of S = 8": ("confirmation", "8", "32", "python"),
    "30 rounds of S = 16": ("confirmation", "16", "32", "python"),
    "8 rounds of S = 64": ("confirmation", "64", "32", "python"),
    "30 rounds of S = 16, a wider model": ("confirmation", "16", "48", "python"),
    "30 rounds of S = 16, another text": ("confirmation", "16", "32", "python-code"),
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
    for row in _csv("adaptive_confirmation-cells.csv"):
        momentum, lr = float(row["outer.momentum"]), float(row["outer.lr"])
        nesterov = momentum > 0 and row["outer.nesterov"] == "true"
        place = ("confirmation", row["inner_steps"], row["model.hidden_size"], row["data.corpus"])
        setting = (row["outer.form"], nesterov, momentum, lr, row["outer.restart"])
        yield place, setting, row["seed"], float(row["perplexity"])


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


def short() -> list[Any]:
    """The places of 480 inner steps."""
    return [place for place in PLACES.values() if place != ("demo",)]


def test_the_usual_rule_beside_averaging() -> None:
    """Every row of the table is in the csv files, and the last one on the log; so is what other lines make of it."""
    text = (DOCS / "restarts-when.md").read_text(encoding="utf-8")
    for name, place in PLACES.items():
        seeds = runs()[place][AVERAGING]
        count = int(next(iter(seeds)).split()[0]) if len(seeds) == 1 else len(seeds)
        cells = [ratio(place, setting, AVERAGING) for setting in (rule("never"), rule("3"), rule("3", lr=0.3))]
        assert "| {} | {} | {:.2f} | {:.2f} | {:.2f} |".format(name, count, *cells) in text, name
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    ends = {
        name.strip(): geometric_mean(map(float, values.split()))
        for name, values in re.findall(r"^(long-[a-z-]+(?: 0\.9 \w+)?) +[\d. ]+ end ([\d. ]+)$", log, re.MULTILINE)
    }
    never, three = (ends[f"long-nesterov 0.9 {restart}"] / ends["long-averaging"] for restart in ("never", "3"))
    assert f"| 300 rounds of S = 16 | 3 | {never:.2f} | {three:.2f} | |" in text
    restarted = span([ratio(place, rule("3"), AVERAGING) for place in short()])
    demo = 100 - 100 * ratio(("demo",), rule("3"), AVERAGING)
    assert f"at 480 steps still {percent(restarted)} above averaging, in the demo {demo:.0f} % below it" in page()
    helped = sum(ratio(place, rule("3", lr=0.3), rule("3")) < 1 for place in short())
    assert len(short()) / 2 < helped < len(short())
    assert ratio(("demo",), rule("3", lr=0.3), rule("3")) > 1
    gains = span([ratio(place, rule("never"), rule("3")) for place in PLACES.values()])
    assert f"{times(gains)} times lower perplexity than without restarts" in page()


def test_momentum_of_nine_tenths_setting_by_setting() -> None:
    """What is said of single settings at momentum 0.9, in sum and in EMA form."""
    text = page()

    def gains(form: str, kinds: tuple[bool, ...], lrs: tuple[float, ...] = LRS) -> list[float]:
        """No restart over K = 3."""
        pairs = [
            (place, *(rule(restart, form=form, nesterov=nesterov, lr=lr) for restart in ("never", "3")))
            for place in PLACES.values()
            for nesterov in kinds
            for lr in lrs
            if form == "sum" or place != ("demo",)
        ]
        return [ratio(*pair) for pair in pairs]

    assert len(gains("ema", (False, True))) == 7 * 2 * 3
    assert f"{times(span(gains('sum', (False, True))))} times as high, in single settings of eight places" in text
    assert f"{times(span(gains('sum', (False,))))} times lower perplexity than without" in text
    costs = {lr: span([1 / gain for gain in gains("ema", (False, True), (lr,))]) for lr in LRS}
    assert f"{times(costs[0.3])} times higher perplexity at lr 0.3" in text
    assert "at 1.1 between {:.2f} and {:.2f} times".format(*costs[1.1]) in text
    means = [
        math.prod(ratio(place, *(rule(r, form="ema", nesterov=kind, lr=lr) for r in ("3", "never"))) for lr in LRS)
        ** (1 / 3)
        for place in short()
        for kind in (False, True)
    ]
    assert f"it makes runs worse, by {percent(span(means))} in the mean over lr 0.3 to 1.1" in text
    longer = [
        [
            ratio(place, *(rule(restart, nesterov=kind, lr=lr) for restart in ("7", "3")))
            for place in short()
            if place[0] == "confirmation"
            for lr in LRS
        ]
        for kind in (False, True)
    ]
    assert max(longer[0]) > max(longer[1])
    assert f"where 3 against 7 is up to {100 * max(longer[0]) - 100:.0f} %" in text
    assert f"every 7 rounds is up to {100 * max(longer[0]) - 100:.0f} % worse than every 3" in text


def best_setting(place: Any, form: str, nesterov: bool, restart: str) -> Setting:
    """The setting of an arm with momentum that has the lowest mean perplexity."""
    settings = [s for s in runs()[place] if (s[0], s[1], s[4]) == (form, nesterov, restart) and s[2] > 0]
    assert len(settings) in (12, 15)
    return min(settings, key=lambda setting: geometric_mean(runs()[place][setting].values()))


def best(place: Any, form: str, nesterov: bool, restart: str) -> float:
    """The lowest mean perplexity of an arm with momentum."""
    return geometric_mean(runs()[place][best_setting(place, form, nesterov, restart)].values())


def test_best_settings_with_and_without_restarts() -> None:
    """They are as good as each other, either way; in the demo both are ahead of plain averaging."""
    pairs = {
        (place, form, kind): best(place, form, kind, "3") / best(place, form, kind, "never")
        for place in PLACES.values()
        for form in (("sum",) if place == ("demo",) else ("sum", "ema"))
        for kind in (False, True)
    }
    assert min(pairs.values()) < 1 < max(pairs.values())
    largest = max(max(value, 1 / value) for value in pairs.values())
    assert f"the best settings with and without differ by at most {100 * largest - 100:.0f} %" in page()
    averaging = geometric_mean(list(runs()["demo",][AVERAGING].values()))
    gaps = []
    for place in short():
        arms = {(form, kind, restart) for form, kind, momentum, _, restart in runs()[place] if momentum > 0}
        bests = [best(place, *arm) for arm in arms if arm[2] in ("never", "2", "3", "5", "7")]
        gaps.append(geometric_mean(list(runs()[place][AVERAGING].values())) / min(bests))
    assert f"over 480 inner steps at most {100 * max(gaps) - 100:.1f} % behind the best setting" in page()
    ahead = {
        restart: span([100 * (1 - best(("demo",), "sum", kind, restart) / averaging) for kind in (False, True)])
        for restart in ("3", "never")
    }
    assert "by {:.0f} to {:.0f} %, but so does the same momentum".format(*ahead["3"]) in page()
    assert ahead["never"][0] > ahead["3"][0] - 0.5
    overall = {setting: geometric_mean(list(seeds.values())) for setting, seeds in runs()["demo",].items()}
    first = min(overall, key=lambda setting: overall[setting])
    behind = 100 * (1 - ratio(("demo",), first, AVERAGING))
    assert f"{behind:.0f} % behind the best one, a momentum of {first[2]}" in page()
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


def test_level_needs_an_interval_inside_the_margin() -> None:
    """Bests with and without restarts, and averaging beside the best: how many are level, by Student's interval."""
    seeded = [place for place in PLACES.values() if place[0] != "heatmaps"]
    bests = {}
    for place in seeded:
        for form in ("sum",) if place == ("demo",) else ("sum", "ema"):
            for kind in (False, True):
                pair = [best_setting(place, form, kind, restart) for restart in ("3", "never")]
                bests[place, kind] = [*bests.get((place, kind), []), between(place, *pair)]
    every = [ends for each in bests.values() for ends in each]
    costs = [ends for ends in every if ends[1] > 1]
    assert f"there are {len(every)} such pairs. {sum(map(level, every))} of {len(every)} are level" in page()
    assert not any(ends[2] < 1 for ends in every)
    assert f"In {len(costs)} of {len(every)} the interval lies above 1" in page()
    assert max(ends[2] for ends in costs) < 1.012
    heavy, nesterov = (bests[("demo",), kind][0] for kind in (False, True))
    words = "K = 3 is {:.3f} times that without, with a 95 % interval of {:.3f} to {:.3f}"
    assert words.format(*heavy) in page()
    assert "Nesterov's is {:.3f} times, {:.3f} to {:.3f}.".format(*nesterov) in page()
    averaging = []
    for place in seeded[:-1]:
        settings = [s for s in runs()[place] if s[2] > 0 and s[4] in ("never", "2", "3", "5", "7")]
        averaging.append(
            between(place, AVERAGING, min(settings, key=lambda s: geometric_mean(runs()[place][s].values())))
        )
    assert len(averaging) == 5
    assert sum(map(level, averaging)) == 1
    assert "averaging is level with it in one of the five places" in page()


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
        "`auto` over averaging, constant": ("flat-auto constant", "flat-averaging constant"),
        "averaging with wsd over `auto` with a cosine": ("flat-averaging wsd", "long-auto"),
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


def test_auto_beside_averaging_run_by_run() -> None:
    """It is below averaging in every run that had no part in choosing it."""
    gains: dict[int, list[float]] = {}
    for place in PLACES.values():
        if place[0] == "confirmation":
            auto = next(seeds for setting, seeds in runs()[place].items() if setting[4] == "auto")
            for seed, averaging in runs()[place][AVERAGING].items():
                gains.setdefault(int(place[1]), []).append(100 - 100 * auto[seed] / averaging)
    every = [gain for its in gains.values() for gain in its]
    assert len(every) == 21
    assert "in 21 runs of 21, by {:.1f} to {:.1f} %".format(*span(every)) in page()
    small, large = span(gains[8] + gains[16]), span(gains[64])
    words = "by {:.0f} to {:.0f} % at S = 8 and 16, {:.0f} to {:.0f} % at S = 64"
    assert words.format(*small, *large) in page()
