"""The part `probe`: how fast the device is, how fast our step is beside transformers', and where its time goes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import lm_throughput
from gpu_parts import kernels
from gpu_parts.records import Figures, Record, Settings, table, write_csv
from lm_throughput import BURST, PRODUCT_SIZE, Contestant, Outcome
from twophase.base.config import RunError, UsageError, values_of, with_values
from twophase.tasks.lm.config import TrainConfig

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "micro_batch_32": {"compute.micro_batch": 32},
    "micro_batch_64": {"compute.micro_batch": 64},
    "autotune": {"compute.autotune": True},
}
"""Changes of our step that are measured beside it; one that this version does not offer, or has made by itself, is left
out. (One gate_up product or two: see probe-products.csv.)"""

COMPARED = ("rho", "tokens_per_second", "peak_memory_gb")
"""Figures of a variant."""


def contest(settings: Settings, record: Record) -> None:
    """Our step, the matrix product and transformers' step: rho, both ratios, peak memories."""
    config = settings.config("paper_150m")
    contestants = {"product": Contestant("product", config), "ours": Contestant("ours", config)}
    note = ""
    if importlib.util.find_spec("transformers") is None:
        note = "transformers is not installed (--wheels): eager_ratio and compiled_ratio are left out"
        print(note, flush=True)
    else:
        contestants |= {kind: Contestant(kind, config) for kind in ("eager", "compiled")}
    outcomes = measured(contestants, settings, 30.0)
    figures = lm_throughput.figures_of(config, outcomes, device_name(config))
    failures = {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
    for name in ("product", "ours"):  # without both there is nothing to compare
        if name in failures:
            raise RunError(f"{name}: {failures[name]}")
    for name, error in failures.items():
        print(f"probe contest: {name} is left out: {error}", flush=True)
    facts = {name: outcome.facts for name, outcome in outcomes.items()}
    record.done("contest", figures, facts=facts, failures=failures, note=note)


def measured(contestants: Mapping[str, Contestant], settings: Settings, seconds: float) -> dict[str, Outcome]:
    """What was measured of contestants; of a toy's with little patience."""
    if settings.tiny:
        return lm_throughput.contest(contestants, 0.0, 0.02)
    return lm_throughput.contest(contestants, seconds, BURST["cuda"])


def device_name(config: TrainConfig) -> str:
    """Name of the device, by which its datasheet is found."""
    return torch.cuda.get_device_name() if config.device.startswith("cuda") else "CPU"


def step_kernels(settings: Settings, record: Record) -> None:
    """Our step's kernels by class, and the twenty that take most."""
    config = settings.config("paper_150m")
    device = torch.device(config.device)
    facts: dict[str, Any] = {}
    torch.set_num_threads(1)
    call = lm_throughput.twophase_step(config, device, facts)
    step_ms = 1e3 * kernels.seconds_of(call, 0.05 if settings.tiny else 5.0, device)
    top, classes, profiled_ms = kernels.profiled(call, device, 3)
    write_csv(settings.out / "probe-kernels.csv", top)
    print(table(top), flush=True)
    figures = {"step_ms": step_ms, "profiled_step_ms": profiled_ms}
    record.done("kernels", figures, classes=classes, facts=facts)


def device_alone(settings: Settings, record: Record) -> None:
    """The device by itself: product and copy at full speed, the model's products, attention kernels, AdamW."""
    config = settings.config("paper_150m")
    device = torch.device(config.device)
    torch.set_num_threads(1)
    long, short = (0.02, 0.005) if settings.tiny else (1.5, 0.2)
    batch = min(config.data.batch_size, 32)
    product = lm_throughput.product(config, device, {})
    rate = 2 * PRODUCT_SIZE[device.type] ** 3 / kernels.seconds_of(product, long, device)
    bytes_a_second = kernels.copying(device, long)
    products = kernels.products(config, device, batch * config.data.sequence_length, short)
    attentions = kernels.attentions(config, device, batch, short)
    optimizer = kernels.optimizer_seconds(config, device, short)
    write_csv(settings.out / "probe-products.csv", products)
    write_csv(settings.out / "probe-attention.csv", attentions)
    print(table(products), table(attentions), sep="\n", flush=True)
    figures = {
        "device_product_tflops": rate / 1e12,
        "device_copy_gb_per_second": bytes_a_second / 1e9,
        "products_alone_ms": sum(line["step_ms"] for line in products),
        "optimizer_alone_ms": 1e3 * optimizer,
    }
    working = [line["step_ms"] for line in attentions if "step_ms" in line]
    figures |= {"attention_alone_ms": min(working)} if working else {}
    wanted = [line for line in attentions if line["kernel"] == settings.attention and "reason" in line]
    if wanted:
        raise UsageError(
            f"--attention {settings.attention}: this kernel does not work here ({wanted[0]['reason']}); use --attention"
            f" auto, or one of {', '.join(line['kernel'] for line in attentions if 'tflops' in line)}"
        )
    record.done("device", figures)


def variant(settings: Settings, record: Record, *, name: str) -> None:
    """Our step with one change, against the matrix product as the step itself was."""
    changes = dict(VARIANTS[name])
    config = settings.config("paper_150m")
    if settings.tiny and "compute.micro_batch" in changes:
        changes["compute.micro_batch"] //= 16
    unknown = [path for path in changes if path not in values_of(config)]
    facts = record.units.get("contest", {}).get("facts", {}).get("ours", {})
    chosen = {"compute.micro_batch": facts.get("micro_batch")}
    note = f"this version has no {', '.join(unknown)}" if unknown else ""
    note = "what the step has chosen by itself" if changes == chosen else note
    if note:
        print(f"{name} is left out: {note}", flush=True)
        record.done(name, {}, note=note)
        return
    changed = with_values(config, changes)
    contestants = {"product": Contestant("product", changed), "ours": Contestant("ours", changed)}
    outcomes = measured(contestants, settings, 15.0)
    failures = [outcome.error for outcome in outcomes.values() if outcome.error]
    if failures:  # a variant that does not run here is a result, too
        print(f"{name}: {failures[0]}", flush=True)
        record.done(name, {}, note=failures[0])
    else:
        figures = lm_throughput.figures_of(changed, outcomes, device_name(changed))
        record.done(name, {f"{name}_{key}": figures[key] for key in COMPARED}, facts=outcomes["ours"].facts)
    rows = [{"variant": "none", **_row(record, "contest", "")}]
    rows += [{"variant": name, **_row(record, name, f"{name}_")} for name in VARIANTS if name in record.units]
    write_csv(settings.out / "probe-variants.csv", rows)
    print(table(rows), flush=True)


def _row(record: Record, unit: str, prefix: str) -> dict[str, Any]:
    entry = record.units.get(unit, {"figures": {}})
    values = {name: entry["figures"].get(prefix + name) for name in COMPARED}
    return values | {"note": entry.get("note", "")}


def with_sum(function: Callable[[Settings, Record], None]) -> Callable[[Settings, Record], None]:
    """Write and print the sum that closes after a unit that adds to it."""

    def unit(settings: Settings, record: Record) -> None:
        function(settings, record)
        values = record.figures
        if "kernels" not in record.units:
            return
        names = {"matrix products": "products", "attention": "attention", "optimizer": "optimizer"}
        alone = {name: values[f"{key}_alone_ms"] for name, key in names.items() if f"{key}_alone_ms" in values}
        rows = kernels.closing_sum(values["step_ms"], record.units["kernels"]["classes"], alone)
        write_csv(settings.out / "probe-sum.csv", rows)
        print("the sum that closes", table(rows), sep="\n", flush=True)

    return unit


NEED_A_GPU = {"micro_batch_64", "autotune"}
"""Units that a toy has nothing to try with."""
UNITS: dict[str, Callable[[Settings, Record], None]] = {
    "contest": contest,
    "kernels": with_sum(step_kernels),
    "device": with_sum(device_alone),
} | {name: partial(variant, name=name) for name in VARIANTS}


def figures(record: Record) -> Figures:
    """Those of the last line: all units', and the remainder of the sum that closes."""
    values = record.figures
    if "kernels" in record.units:
        classes = record.units["kernels"]["classes"]
        values["sum_remainder_share"] = round(1 - sum(classes.values()) / values["step_ms"], 4)
    return values
