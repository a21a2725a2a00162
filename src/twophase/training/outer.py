"""The outer optimizer of a run's configuration, as the engine takes it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

from twophase.errors import UsageError
from twophase.optim.build import named_optimizer
from twophase.restart import mean_outer_gain
from twophase.rule import OuterRule
from twophase.runs.method import is_function
from twophase.training.config import RunConfig


def outer_of(config: RunConfig) -> OuterRule | Callable[..., Any]:
    """Return a configuration's rule, or the function from named parameters to its torch optimizers.

    Raises:
        UsageError: a user's file or function that is missing or fails.
    """
    outer = config.outer
    if (rule := outer.rule()) is not None:
        return rule
    if not is_function(outer.method):
        return partial(named_optimizer, method=outer.method, lr=outer.lr, momentum=outer.momentum)
    file, _, name = outer.method.rpartition(":")
    try:
        function = runpy.run_path(file)[name]
    except Exception as error:  # of the file's own code
        raise UsageError(f"--outer.method {outer.method}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"--outer.method {outer.method}: {name} is no function")
    return function  # type: ignore[no-any-return]


def outer_line(config: RunConfig) -> str:
    """Return the first line of a run: the outer optimizer, its mean outer gain, and the values that change nothing."""
    outer, rule = config.outer, config.outer.rule()
    line = f"outer optimizer: {outer.describe()}, restart {', '.join(config.sync.restart) or outer.restart}"
    if rule is not None and outer.is_rule and config.sync.policies is None and not outer.policy.needs:
        line += f", mean outer gain {mean_outer_gain(rule, outer.policy, min(config.rounds, 10_000)):.3g}"
    ignored = [f"--outer.{name} {getattr(outer, name)}" for name in outer.ignored()]
    ignored += [f"--inner.{name} {getattr(config.inner, name)}" for name in config.inner.ignored()]
    return line + (f"; {', '.join(ignored)} changes nothing" if ignored else "")
