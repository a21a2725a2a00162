# pyright: reportMissingImports=false
"""torchtitan 0.3.0's fault-tolerant trainer with our outer rule and restarts, selected by torchtitan's own `--module`.

    torchrun … -m torchtitan.train --module twophase.integrations.torchtitan --config llama3_debugmodel
        --outer.lr 0.7 --outer.restart 3 --fault_tolerance.group_size 2 --fault_tolerance.replica_id 0

`--config` takes the name of any function in torchtitan's registries of llama3; `configured` does the same for other
models.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Literal

import safetensors.torch
import torch.distributed as dist
import torchft
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance, FaultTolerantModelSpec
from torchtitan.experiments.torchft.diloco import fragment_llm
from torchtitan.experiments.torchft.manager import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.trainer import Trainer

from twophase.integrations.torchft import DiLoCo, check
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.policies.text import parse
from twophase.rule import OuterRule
from twophase.training import parts

_REGISTRIES = ("torchtitan.models.llama3.config_registry", "torchtitan.experiments.torchft.llama3.config_registry")


@dataclass(kw_only=True, slots=True)
class Outer:
    """Outer rule and restart policy; the options are `--outer.lr`, `--outer.restart` and so on."""

    lr: float = 0.7
    """Outer learning rate, >= 0."""

    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""

    nesterov: bool = True
    """True if the outer step looks ahead."""

    form: Literal["sum", "ema"] = "sum"
    """Form of the rule: sum, as torch.optim.SGD, or ema, as the restart paper."""

    restart: str = "never"
    """When the outer momentum restarts, in rounds of each fragment: never, 3, cycle:5,6,10, auto, and so on."""


class Optimizers(TorchFTOptimizersContainer):
    """torchtitan's inner optimizers; their saved state has the current learning rate, not that of the first step."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTOptimizersContainer.Config):
        """torchtitan's own options."""

    def state_dict(self) -> dict[str, Any]:
        """Return the current state; torchtitan's own keeps the numbers of its construction."""
        self.init_cache_state_dict()
        return super().state_dict()


class Manager(TorchFTManager):
    """torchtitan's manager without torchft's initial copy: all replicas begin alike, by the seed.

    With the copy every other replica would repeat the first replica's first round.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerance):
        """torchtitan's own options."""

    def __init__(self, config: Config) -> None:
        groups = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
        if config.process_group not in groups:
            raise ValueError(f"--fault_tolerance.process_group is {config.process_group}; it must be gloo or nccl")
        self.use_async_quorum, self.group_size, self.replica_id = False, config.group_size, config.replica_id
        self._manager = torchft.Manager(
            pg=groups[config.process_group](timeout=timedelta(milliseconds=config.process_group_timeout_ms)),
            min_replica_size=config.min_replica_size,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=False,
            init_sync=False,
            replica_id=f"torchtitan_ft_{config.replica_id}",
        )


class Rounds(Stateful):
    """Entry of torchtitan's checkpoint with what it lacks: anchors, outer states, counters of this process."""

    def __init__(self, rounds: DiLoCo) -> None:
        self.rounds = rounds
        self.key = f"rank {dist.get_rank()}"  # a shared key would keep one rank's shard for all

    def state_dict(self) -> dict[str, Any]:
        """Return the state as text and bytes: the template that loads has no tensors of later rounds."""
        part = parts.take_apart(self.rounds.state_dict())
        local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in part.tensors.items()}
        tensors = {name: tensor.contiguous() for name, tensor in local.items()}
        return {f"{self.key} tree": part.tree, f"{self.key} tensors": safetensors.torch.save(tensors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same number of ranks."""
        tensors = safetensors.torch.load(state_dict[f"{self.key} tensors"])
        state = parts.put_together(parts.Part(state_dict[f"{self.key} tree"], tensors))
        for outer, saved in zip(self.rounds.outers, state["outers"], strict=True):
            params = [p for group in outer.param_groups for p in group["params"]]
            for index, values in saved["state"].items():
                p = params[index]
                if isinstance(p, DTensor):  # llama3 always has shards, of the whole where a replica has one process
                    buffer, like = values[BUFFER].to(p.device), {"shape": p.shape, "stride": p.stride()}
                    values[BUFFER] = DTensor.from_local(buffer, p.device_mesh, p.placements, run_check=False, **like)
        self.rounds.load_state_dict(state)


class DiLoCoTrainer(FaultTolerantTrainer):
    """torchtitan's `FaultTolerantTrainer`, whose rounds are torchft's with an `OuterSGD` for each fragment.

    Every replica keeps a whole checkpoint in a separate folder, `replica-0` and so on. A resumed training then equals
    an uninterrupted one bit for bit. torchtitan's own checkpoint keeps one replica's inner optimizer for all, and no
    outer state. A late joiner receives weights and both optimizers from torchft.

    Args:
        config: torchtitan's, with `outer`; made by `configured`.

    Raises:
        ValueError: settings with which replicas differ without an error, or an unknown rule or policy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerantTrainer.Config):
        """torchtitan's configuration, and `outer`."""

        outer: Outer = field(default_factory=Outer)

    def __init__(self, config: Config) -> None:
        _check(config)
        outer, tolerance = config.outer, config.fault_tolerance
        rule = OuterRule(outer.lr, outer.momentum, nesterov=outer.nesterov, form=outer.form)
        policy = parse(outer.restart)  # refused before torchft waits for a lighthouse
        folder = f"{config.checkpoint.folder}/replica-{tolerance.replica_id}"
        # the data's place is in the whole checkpoint; the other kind, of every step, would run ahead of it
        checkpoint: Any = replace(config.checkpoint, folder=folder, enable_ft_dataloader_checkpoints=False)  # type: ignore[call-arg]
        super().__init__(replace(config, checkpoint=checkpoint))
        manager, model = self.ft_manager.manager, self.model_parts[0]
        split, layers = getattr(config.model_spec, "fragment_fn", None), getattr(self.model_config, "layers", ())
        fragments = split(model, tolerance, len(layers)) if split else [model]
        check(manager, model, fragments, tolerance.sync_steps)
        outers: list[Optimizer] = [OuterSGD.from_rule(module.named_parameters(), rule, policy) for module in fragments]
        self.rounds = DiLoCo(manager, fragments, self.optimizers, outers, tolerance.sync_steps)
        self.checkpointer.states["twophase"] = Rounds(self.rounds)
        # torchtitan's train() would add torchtitan's rounds to these
        self.config = replace(self.config, fault_tolerance=replace(tolerance, semi_sync_method=None))

    def train(self) -> None:
        """Train as torchtitan does; at the end the model holds the agreed weights."""
        with self.rounds:
            super().train()


def configured(config: Trainer.Config, outer: Outer | None = None) -> DiLoCoTrainer.Config:
    """Return a configuration of torchtitan with our rounds, for a function that `--config` names.

    Args:
        config: configuration of any torchtitan model without pipeline stages.
        outer: outer rule and policy; None is the DiLoCo paper's rule without restarts.
    """
    values = _values(config)
    values["fault_tolerance"] = Manager.Config(
        **_values(values.get("fault_tolerance") or FaultTolerance(sync_steps=100))
    )
    values["fault_tolerance"].enable, values["fault_tolerance"].semi_sync_method = True, "diloco"
    values["optimizer"] = Optimizers.Config(**_values(config.optimizer))
    values["checkpoint"] = TorchFTCheckpointManager.Config(**_values(config.checkpoint) | {"enable": True})
    if config.debug.seed is None:
        values["debug"] = replace(config.debug, seed=0)  # replicas begin with the same weights
    if not isinstance(config.model_spec, FaultTolerantModelSpec):
        values["model_spec"] = FaultTolerantModelSpec(**_values(config.model_spec), fragment_fn=fragment_llm)
    return DiLoCoTrainer.Config(**values, outer=outer or Outer())


def __getattr__(name: str) -> Callable[[], DiLoCoTrainer.Config]:
    """Return a function of torchtitan's registries of llama3, `configured`."""
    for registry in () if name.startswith("_") else _REGISTRIES:
        made = getattr(importlib.import_module(registry), name, None)
        if callable(made):
            return lambda: configured(made())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _values(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, not their fields' fields."""
    return {item.name: getattr(config, item.name) for item in fields(config) if item.init}


def _check(config: DiLoCoTrainer.Config) -> None:
    """Refuse settings under which torchft 0.2.0 or torchtitan errs silently."""
    tolerance = config.fault_tolerance
    faults = {
        "fault_tolerance.enable": (tolerance.enable, True),
        "fault_tolerance.semi_sync_method": (tolerance.semi_sync_method, "diloco"),
        "fault_tolerance.should_quantize": (tolerance.should_quantize, False),
        "fault_tolerance.fragment_sync_delay": (tolerance.fragment_sync_delay, 0),
        "fault_tolerance.fragment_update_alpha": (tolerance.fragment_update_alpha, 0.0),
        "checkpoint.enable": (config.checkpoint.enable, True),  # else torchtitan gives a late joiner no weights
        "parallelism.pipeline_parallel_degree": (config.parallelism.pipeline_parallel_degree, 1),
    }
    for option, (value, needed) in faults.items():
        if value != needed:
            raise ValueError(f"--{option} is {value}; with twophase it must be {needed}, or replicas may differ")
    if not 0 <= tolerance.replica_id < tolerance.group_size:
        raise ValueError(
            f"--fault_tolerance.replica_id is {tolerance.replica_id}; it must be in [0, {tolerance.group_size}), for "
            "--fault_tolerance.group_size is the number of replicas"
        )
    if config.debug.seed is None:
        raise ValueError(
            "--debug.seed is None; give all replicas the same number, for they begin with the same weights"
        )
