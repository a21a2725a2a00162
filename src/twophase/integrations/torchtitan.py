# pyright: reportMissingImports=false
"""torchtitan 0.3.0's fault-tolerant trainer with our outer rule and restarts, selected by torchtitan's own `--module`.

    torchrun … -m torchtitan.train --module twophase.integrations.torchtitan --config llama3_debugmodel
        --outer.lr 0.7 --outer.restart 3 --fault_tolerance.group_size 2 --fault_tolerance.replica_id 0

`--config` takes the name of any function in torchtitan's registries of llama3; `configured` does the same for other
models. What torchft does not promise, such as safety in a network that is not trusted, holds here too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance, FaultTolerantModelSpec
from torchtitan.experiments.torchft.diloco import fragment_llm
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from twophase.integrations.torchft import DiLoCo, diloco
from twophase.restart import parse
from twophase.rule import OuterRule


@dataclass(frozen=True, slots=True)
class Outer(OuterRule):
    """Options `--outer.lr` and so on: the rule, and the restart policy, in rounds of a fragment."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    restart: str = "never"


class Rounds(Stateful):
    """Entry of torchtitan's checkpoint with what it lacks: anchors, outer states, counters of this process."""

    def __init__(self, rounds: DiLoCo) -> None:
        self.rounds = rounds
        self.key = f"rank {dist.get_rank()}"  # a shared key would keep one rank's shard for all

    def state_dict(self) -> dict[str, Any]:
        """Return the state as bytes: the template that loads has no tensors of later rounds."""
        file = io.BytesIO()
        torch.save(self.rounds.state_dict(), file)
        return {self.key: file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same number of ranks."""
        self.rounds.load_state_dict(torch.load(io.BytesIO(state_dict[self.key]), weights_only=True))


class DiLoCoTrainer(FaultTolerantTrainer):
    """torchtitan's `FaultTolerantTrainer`, whose rounds are torchft's with an `OuterSGD` for each fragment.

    Every replica keeps a whole checkpoint in a separate folder, `replica-0` and so on, for torchtitan's own has one
    replica's inner optimizer and no outer state. A resumed training then equals an uninterrupted one bit for bit.
    A ValueError refuses settings with which replicas would differ without an error.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerantTrainer.Config):
        """torchtitan's configuration, and `outer`."""

        outer: Outer = field(default_factory=Outer)

    def __init__(self, config: Config) -> None:
        _check(config)
        tolerance = config.fault_tolerance
        policy = parse(config.outer.restart)  # refused before torchft waits for a lighthouse
        folder = f"{config.checkpoint.folder}/replica-{tolerance.replica_id}"
        # the data's place is in the whole checkpoint; the other kind, of every step, would run ahead of it
        checkpoint: Any = replace(config.checkpoint, folder=folder, enable_ft_dataloader_checkpoints=False)  # type: ignore[call-arg]
        debug = replace(config.debug, seed=config.debug.seed or 0)  # replicas begin with the same weights
        super().__init__(replace(config, checkpoint=checkpoint, debug=debug))
        # torchtitan's own method returns what it has cached: the numbers, as of the learning rate, of the beginning
        self.optimizers.state_dict = partial(OptimizersContainer.state_dict, self.optimizers)
        self.ft_manager.manager._init_sync = False  # else all would repeat the first replica's first round
        model, layers = self.model_parts[0], getattr(self.model_config, "layers", ())
        split = getattr(config.model_spec, "fragment_fn", None)
        self.rounds = diloco(
            self.ft_manager.manager,
            model,
            self.optimizers,
            config.outer,
            inner_steps=tolerance.sync_steps,
            restart=policy,
            fragments=split(model, tolerance, len(layers)) if split else None,
        )
        self.checkpointer.states["twophase"] = Rounds(self.rounds)
        # torchtitan's train() would add torchtitan's rounds to these
        self.config = replace(self.config, fault_tolerance=replace(tolerance, semi_sync_method=None))

    def train(self) -> None:
        """Train as torchtitan does; at the end the model holds the agreed weights."""
        with self.rounds:
            super().train()


def configured(config: Trainer.Config, outer: Outer | None = None) -> DiLoCoTrainer.Config:
    """Return a configuration of torchtitan with our rounds, for a function that `--config` names.

    `config` may be of any torchtitan model without pipeline stages; without `outer`, DiLoCo's published rule steps.
    """
    values = _values(config)
    tolerance = values.get("fault_tolerance") or FaultTolerance(sync_steps=100)
    values["fault_tolerance"] = replace(tolerance, enable=True, semi_sync_method="diloco")
    values["optimizer"] = TorchFTOptimizersContainer.Config(**_values(config.optimizer))
    values["checkpoint"] = TorchFTCheckpointManager.Config(**_values(config.checkpoint) | {"enable": True})
    if not isinstance(config.model_spec, FaultTolerantModelSpec):
        values["model_spec"] = FaultTolerantModelSpec(**_values(config.model_spec), fragment_fn=fragment_llm)
    return DiLoCoTrainer.Config(**values, outer=outer or Outer())


def __getattr__(name: str) -> Callable[[], DiLoCoTrainer.Config]:
    """Return a function of torchtitan's registry of llama3, `configured`."""
    made = getattr(config_registry, name)
    return lambda: configured(made())


def _values(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, not their fields' fields."""
    return {item.name: getattr(config, item.name) for item in fields(config) if item.init}


def _check(config: DiLoCoTrainer.Config) -> None:
    """Refuse settings under which torchft 0.2.0 or torchtitan errs silently."""
    tolerance = config.fault_tolerance
    allowed = {
        "fault_tolerance.semi_sync_method": (tolerance.semi_sync_method, ["diloco"]),
        "fault_tolerance.should_quantize": (tolerance.should_quantize, [False]),
        "fault_tolerance.fragment_sync_delay": (tolerance.fragment_sync_delay, [0]),
        "fault_tolerance.fragment_update_alpha": (tolerance.fragment_update_alpha, [0.0]),
        "fault_tolerance.replica_id": (tolerance.replica_id, range(tolerance.group_size)),
        "parallelism.pipeline_parallel_degree": (config.parallelism.pipeline_parallel_degree, [1]),
    }
    for option, (value, choices) in allowed.items():
        if value not in choices:
            raise ValueError(f"--{option} must be in {choices} with twophase, is {value}")
