# pyright: reportMissingImports=false
"""Replicas of a torchtitan training on a CPU, or both in one process with our engine; run by test_torchtitan.py.

torchtitan's own code: trainer, loop, inner optimizer, schedule, clipping, checkpoints, manager, and torchft below.
Ours: a tiny model and data. The program is given lists of jobs; those of a list run side by side, each in a fork of the
process that has imported torchtitan, for seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# torchtitan takes "cuda" where there is no accelerator
torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
for name, value in {  # its log of memory asks for these
    "current_device": 0,
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)
# torchtitan 0.3.0 expects a later torch than 2.13 for this; it shortens the timeouts after the first step
torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw  # noqa: E402
from torchtitan.config import ConfigManager, TrainingConfig  # noqa: E402
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager as Checkpoints  # noqa: E402
from torchtitan.experiments.torchft.config.job_config import FaultTolerance, FaultTolerantModelSpec  # noqa: E402
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer  # noqa: E402
from torchtitan.models.common import Embedding, Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402

VOCABULARY, WIDTH, STEPS, INNER_STEPS = 16, 8, 96, 4


class Bigram(BaseModel):
    """The next token from the last."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Nothing to set."""

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Take nothing from it."""

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:  # noqa: ARG002
            return sum(p.numel() for p in model.parameters()), 1

    def __init__(self, config: Config) -> None:  # noqa: ARG002
        super().__init__()
        normal = {"weight": nn.init.normal_}
        self.embedding = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=normal).build()
        self.head = Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=normal).build()

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


class Batches(BaseDataLoader):
    """Random tokens, a pure function of replica and step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The replica, where torchtitan does not say it, and the step whose batch kills the process."""

        replica: int = -1
        fatal: int = -1

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.replica, self.fatal, self.step = max(config.replica, dp_rank), config.fatal, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            if self.step == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            generator = torch.Generator().manual_seed(1000 * self.replica + self.step)
            tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)
            self.step += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def shard(model: nn.Module, **_: Any) -> Any:
    """Make the parameters DTensors, as torchtitan's llama3 does in one process too."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def stock(parallelize: Callable[..., Any]) -> FaultTolerantTrainer.Config:
    """Return torchtitan's configuration of this training, without rounds."""
    unused = dict.fromkeys(("pipelining_fn", "post_optimizer_build_fn", "state_dict_adapter"))
    both = {"parallelize_fn": parallelize, "fragment_fn": lambda model, *_: [model.embedding, model.head]}
    spec = FaultTolerantModelSpec(name="bigram", flavor="tiny", model=Bigram.Config(), **both, **unused)
    return FaultTolerantTrainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=None,
        dataloader=Batches.Config(),
        optimizer=OptimizersContainer.Config(
            param_groups=default_adamw(lr=0.05).param_groups, implementation="for-loop"
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.8),
        training=TrainingConfig(local_batch_size=4, seq_len=8, steps=STEPS, disable_cuda_graphs=True),
        checkpoint=Checkpoints.Config(enable=True, interval=10, last_save_model_only=False),
        fault_tolerance=FaultTolerance(sync_steps=INNER_STEPS, process_group_timeout_ms=60000),
    )


def tiny() -> Any:
    """What `--config tiny` names."""
    from twophase.integrations.torchtitan import configured

    return configured(stock(shard))


def reference(folder: str) -> None:
    """Train both replicas in this process with our engine and torchtitan's own steps."""
    from twophase import DiLoCo, OuterRule

    base = stock(lambda model, **_: model)
    base = replace(base, dump_folder=folder, checkpoint=Checkpoints.Config(), debug=replace(base.debug, seed=0))
    trainers = [FaultTolerantTrainer(replace(base, dataloader=Batches.Config(replica=number))) for number in range(2)]
    for trainer in trainers:
        trainer.optimizers.state_dict()  # as torchtitan with torchft does: makes AdamW's state by a step of size 0
    models, fragments = [trainer.model_parts[0] for trainer in trainers], {"first": "embedding.", "second": "head."}
    rule = OuterRule(0.6, 0.9, nesterov=True)
    engine = DiLoCo(models, rule, restart=3, inner_steps=INNER_STEPS, fragments=fragments)
    data = [trainer.batch_generator(trainer.dataloader) for trainer in trainers]
    for _ in range(STEPS):
        for trainer, batches in zip(trainers, data, strict=True):
            trainer.step += 1
            trainer.train_step(batches)
        engine.step()
    inner = [trainer.optimizers.state_dict() for trainer in trainers]
    torch.save({"agreed": dict(engine.anchor), "inner": inner}, f"{folder}/reference.pt")


def replica(name: str, folder: str, words: list[str]) -> None:
    """Train one replica as `torchtitan.train` does, and save what it ends with."""
    trainer = ConfigManager().parse_args(words).build()
    trainer.train()
    agreed = {key: p.to_local().detach() for key, p in trainer.model_parts[0].named_parameters()}
    inner = {key: x.to_local() if hasattr(x, "to_local") else x for key, x in trainer.optimizers.state_dict().items()}
    groups = [outer.state_dict()["param_groups"] for outer in trainer.rounds.outers]
    trainer.close()
    state = {"agreed": agreed, "inner": inner, "groups": groups}
    torch.save(state, f"{folder}/{name} {trainer.ft_manager.replica_id}.pt")
    trainer.ft_manager.manager.shutdown(wait=False)
    torch.distributed.destroy_process_group()


def settings(folder: str, cases: list[list[str]]) -> None:
    """Write the error that each of some settings ends with, or model and policy of what is not built here."""
    said = []
    for words in cases:
        config = ConfigManager().parse_args(words)
        if config.model_spec.name != "bigram":
            said.append(f"{config.model_spec.name} {config.outer.restart}")
            continue
        try:
            config.build()
        except ValueError as error:
            said.append(str(error))
    Path(folder, "settings.json").write_text(json.dumps(said))


def start(function: str, arguments: list[Any], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    {"settings": settings, "reference": reference, "replica": replica}[function](*arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules["titan_replica"] = sys.modules["__main__"]
    ends = []
    for jobs in json.loads(sys.argv[1]):
        forks = [multiprocessing.get_context("fork").Process(target=start, args=job) for job in jobs]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join(200)
        ends.append([fork.exitcode for fork in forks])
    print(json.dumps(ends))
