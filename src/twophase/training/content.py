"""Check what a checkpoint holds against the run that goes on from it.

Its manifest says that the files are as they were written, and not that what was written is whole: an odd state would
otherwise end in an error from inside of torch, or change the result in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.number import shortened
from twophase.policies.checks import MOST
from twophase.training.config import ComputeConfig, RunConfig

_COUNTED = {"k", "round", "rounds", "rounds_since_restart", "restarts", "steps", "inner_step", "taken", "syncs", "run"}
_FREE = {"policy_state", "at_once", "launching", "borrowed", "present", "under_way", "round_losses", "state"}
"""Names of counts, and of what else a run changes; optimizers and the engine check the latter when they load."""
_LATER = {"taken", "at_once", "borrowed", "run", "present", "round_losses"}
"""Names that states of earlier versions lack."""
_SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "momentum"}
_NONE = "constant"
"""The outer schedule that sets nothing."""
_SUMS = {"k", "weight_sum", "lr_max"}
"""What decides an inner step, and what schedule-free AdamW counts; other versions of torch have further settings."""
_MEMORIES = {"amsgrad": {"step", "exp_avg", "exp_avg_sq"}, "weight_lr_power": {"z", "exp_avg_sq"}}
"""What an inner optimizer remembers of a parameter, by a setting that it alone has: AdamW, schedule-free AdamW."""
_KERNELS = {"default", *get_args(get_type_hints(ComputeConfig)["attention"])}
_REASONS = ("running", "stopped", "finished", "diverged")


def is_standard(inner: Optimizer) -> bool:
    """Tell whether an inner optimizer is torch's or this package's; another one may change and remember anything."""
    return type(inner).__module__.startswith(("torch.optim.", "twophase.training."))


def check_tree(saved: Any, fresh: Any, path: str = "", *, settings: bool = True) -> None:
    """Refuse a tree of another form than a fresh run's, or with other settings.

    Args:
        saved: a state that a checkpoint holds.
        fresh: the same state of the run, of the same configuration, before it loads it.
        path: of the two, for the message.
        settings: whether an inner optimizer's settings, but for its learning rate, must be the fresh run's.

    Raises:
        ValueError: naming the place.
    """
    name = path.rpartition(".")[2]
    fits = type(saved) is type(fresh)
    if isinstance(fresh, Tensor):
        fits = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (fresh.shape, fresh.dtype)
    elif name in _COUNTED:
        fits = _is_count(saved)
    elif name in _FREE:
        fits = fits or (isinstance(fresh, str | Mapping) and isinstance(saved, str | Mapping))  # an older memory
    elif isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        is_inner = path.startswith("inner.param_groups.")
        if is_inner and not settings:
            saved, fresh = ({"params": group.get("params")} for group in (saved, fresh))
        fits, keys = True, (_SETTINGS | _SUMS) & fresh.keys() if is_inner else fresh.keys() | saved.keys()
        if odd := {str(key) for key in keys if key not in fresh or key not in saved} - _LATER:
            raise ValueError(f"{path or 'it'} lacks, or has besides, {shortened(', '.join(sorted(odd)))}")
        for key in fresh.keys() & saved.keys():
            pair = saved[key], fresh[key]
            is_set = key in _SETTINGS and not (".outer.param_groups." in path and fresh.get("schedule", _NONE) != _NONE)
            is_sum = not is_set and all(isinstance(value, float) and math.isfinite(value) for value in pair)
            # A schedule sets it, or the optimizer itself.
            if (is_inner and (key == "lr" or is_sum)) or (".outer.param_groups." in path and is_sum):
                continue
            check_tree(*pair, f"{path}.{key}" if path else str(key), settings=settings)
    elif isinstance(fresh, list | tuple) and fits:
        fits = len(saved) == len(fresh)
        for number, pair in enumerate(zip(saved, fresh, strict=False)):
            check_tree(*pair, f"{path}.{number}", settings=settings)
    else:
        fits = fits and saved == fresh
    if not fits:
        shown = f"shape {tuple(saved.shape)}, {saved.dtype}" if isinstance(saved, Tensor) else shortened(repr(saved))
        raise ValueError(f"{path or 'it'} is {shown}, which this run does not have")


def check_position(state: Mapping[str, Any], config: RunConfig, step: int) -> None:
    """Refuse an engine's counters that are not those of a step, where the whole model is synchronized at once.

    Args:
        state: an engine's state that `check_tree` has passed.
        config: of the run, whose replicas do not come and go.
        step: inner steps that the run has taken.

    Raises:
        ValueError: naming the counter.
    """
    rounds, rest = divmod(step, config.inner_steps)
    if step == config.steps and rest:
        rounds, rest = rounds + 1, 0  # the last round may be a shorter one
    (fragment,) = state["fragments"]
    groups = fragment["outer"]["param_groups"]
    counts = {"round": state["round"], "fragments.0.round": fragment["round"], "syncs": state["syncs"]}
    counts |= {f"param group {number}'s rounds": group["rounds"] for number, group in enumerate(groups)}
    wanted = dict.fromkeys(counts, rounds) | {"inner_step": rest, "fragments.0.steps": rest}
    counts |= {"inner_step": state["inner_step"], "fragments.0.steps": fragment["steps"]}
    for name, count in counts.items():
        if count != wanted[name]:
            raise ValueError(f"{name} is {count}; at step {step} it is {wanted[name]}")
    for group in groups:
        if max(group["restarts"], group["rounds_since_restart"]) > rounds:
            raise ValueError(f"a param group has {group['restarts']} restarts in {rounds} rounds")
        if rounds and group["momentum"] and not set(group["params"]) <= set(fragment["outer"]["state"]):
            raise ValueError(f"a param group has no momentum buffer after {rounds} rounds")


def check_moments(state: Any, inner: Optimizer, step: int) -> list[nn.Parameter]:
    """Refuse an inner optimizer's memory that does not fit; return the parameters that should have one and do not.

    Of an optimizer that is not standard, sizes of moments and counts of steps are checked.

    Args:
        state: the saved `state` of its parameters, by number.
        inner: the optimizer that will load it.
        step: inner steps that the run has taken.

    Raises:
        ValueError: moments of another shape, or a count of steps that the run has not taken.
    """
    pairs = [(parameter, group) for group in inner.param_groups for parameter in group["params"]]
    places, standard = dict(enumerate(pairs)), is_standard(inner)
    # Another optimizer may remember something of its own under a name.
    if not isinstance(state, Mapping) or any(key not in places for key in state if standard or isinstance(key, int)):
        raise ValueError("inner.state is not that of the model's parameters")
    without = []
    for number, (parameter, group) in places.items():
        memory, path = state.get(number, {}), f"inner.state.{number}"
        needed = next((names for setting, names in _MEMORIES.items() if setting in group), set())
        needed = (needed | ({"momentum_buffer"} if group.get("momentum") else set())) if standard else set()
        if memory == {}:
            without += [parameter] if needed else []
            continue
        if lacking := needed - memory.keys():
            raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}")
        taken = float(memory.get("step", 0))
        is_scalar = "step" not in needed or not memory["step"].dim()
        if not is_scalar or taken != int(taken) or not 0 <= taken <= step:
            raise ValueError(f"{path}.step is {taken:g}, and the run has taken {step} steps")
        for name in {"exp_avg", "exp_avg_sq", "momentum_buffer", "z"} & memory.keys():
            if memory[name].shape != parameter.shape or not memory[name].is_floating_point():
                raise ValueError(f"{path}.{name} has another shape or type than its parameter")
        if "exp_avg_sq" in needed and (memory["exp_avg_sq"] < 0).any():
            raise ValueError(f"{path}.exp_avg_sq, a mean of squares, is negative")
    return without


def check_progress(numbers: Mapping[str, Any], step: int, logs: Iterable[str]) -> None:
    """Refuse plain numbers of a checkpoint that no run has.

    Args:
        numbers: what `progress.json` holds.
        step: of the manifest.
        logs: the names of the run's logs.

    Raises:
        ValueError: naming the number.
    """
    counts = {name: numbers.get(name, 0) for name in ("round_steps", "recent_losses")}
    fits = {
        "step": numbers.get("step") == step,
        "processes": _is_count(numbers.get("processes")) and numbers["processes"] > 0,
        "exit_reason": numbers.get("exit_reason") in _REASONS,
        "text": isinstance(numbers.get("text"), str),
        "logs": _are_marks(numbers.get("logs"), logs),
        "execution": _are_choices(numbers.get("execution")),
        "begun": isinstance(begun := numbers.get("begun", {}), dict)
        and all(_is_count(value) and value <= step for value in begun.values()),
        "history": isinstance(history := numbers.get("history", []), list)
        and all(isinstance(row, list) and len(row) == 2 and _is_count(row[0]) for row in history),
        "recent_loss": isinstance(numbers.get("recent_loss", 0.0), float | int),
        **{name: _is_count(value) and value <= MOST for name, value in counts.items()},
    }
    for name in ("seconds", "engine_seconds"):
        value = numbers.get(name)
        fits[name] = isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= MOST
    for name, is_sound in fits.items():
        if not is_sound:
            raise ValueError(f"its {name} is {shortened(repr(numbers.get(name)))}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _are_marks(marks: Any, names: Iterable[str]) -> bool:
    """Tell whether each log has a mark, which may be a bare length: without one it would be cut to nothing."""
    if not isinstance(marks, dict) or set(marks) != set(names):
        return False
    whole = [mark if isinstance(mark, dict) else {"bytes": mark, "sha256": 64 * "0"} for mark in marks.values()]
    return all(_is_count(mark.get("bytes")) and re.fullmatch("[0-9a-f]{64}", str(mark.get("sha256"))) for mark in whole)


def _are_choices(execution: Any) -> bool:
    """Tell whether each process has its decisions about how to compute."""
    if not isinstance(execution, list) or not execution or not all(isinstance(chosen, dict) for chosen in execution):
        return False
    numbers = [chosen.get("micro_batch", 1) for chosen in execution]
    kernels = {str(chosen.get("attention", "default")) for chosen in execution}
    return all(_is_count(number) and number > 0 for number in numbers) and kernels <= _KERNELS
