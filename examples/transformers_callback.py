"""A `transformers.TrainerCallback` that makes the Trainer's steps the inner steps of `twophase.DiLoCo`.

    pip install transformers accelerate
    python examples/transformers_callback.py
    python examples/transformers_callback.py --resume      # goes on from the last checkpoint in --out
    GLOO_SOCKET_IFNAME=lo torchrun --standalone --nproc-per-node 2 examples/transformers_callback.py

`DiLoCoCallback` is the part to copy. The Trainer keeps its inner optimizer, schedule, logging and checkpoints; beside
each checkpoint the callback writes the engine's state, from which a resumed run goes on exactly, mid-round or not.

Things to know:

* Under torchrun the Trainer would wrap the model in `DistributedDataParallel` and average the gradients of every inner
  step. `main` joins the process group itself and hides torchrun's variables from the Trainer, so that every process is
  a Trainer of its own, with its own data and its own folder (transformers warns of that; it is meant). On GPUs give
  each process its own through CUDA_VISIBLE_DEVICES.
* `on_train_end` takes the last, shorter round, after the Trainer's last checkpoint: call `trainer.save_model()` when
  `trainer.train()` returns.
* Evaluate and keep models at a round's end (`eval_steps` a multiple of `inner_steps`); inside a round the weights are
  one replica's alone.

The model is a tiny Llama with random weights, the data are made here: sequences of steps of a constant width.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from twophase import DiLoCo, OuterRule, Periodic, RestartPolicy, RoundReport

VOCABULARY = 32


class DiLoCoCallback(TrainerCallback):
    """Outer rounds for a `Trainer`: `Trainer(..., callbacks=[DiLoCoCallback(rule, inner_steps=500, restart=3)])`.

    Args:
        rule: the outer rule.
        inner_steps: optimizer steps of the Trainer in a round, >= 1.
        restart: when the outer momentum restarts; None is never.
    """

    def __init__(self, rule: OuterRule, *, inner_steps: int, restart: RestartPolicy | str | int | None = None) -> None:
        self.rule = rule
        self.inner_steps = inner_steps
        self.restart = restart
        self.engine: DiLoCo | None = None
        self.reports: list[RoundReport] = []

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Build the engine; the Trainer has placed the model and, when it resumes, loaded weights and optimizer."""
        if args.world_size > 1 or args.load_best_model_at_end:
            raise ValueError(
                f"DiLoCoCallback: world_size is {args.world_size} and load_best_model_at_end is "
                f"{args.load_best_model_at_end}; it needs 1 and False: a Trainer over several processes averages every "
                "gradient, and the best model is no point from which a round can end. Start one Trainer a replica (see "
                "main) and pick the model afterwards"
            )
        model: nn.Module = kwargs["model"]
        mine = [p.detach().clone() for p in model.parameters()] if state.global_step else []
        self.engine = DiLoCo(model, self.rule, restart=self.restart, inner_steps=self.inner_steps)
        self.reports = []
        check_steps(self.engine.communicator.gather(state.global_step, int))
        if state.global_step:
            path = self._path(args, state)
            if not path.exists():
                raise ValueError(
                    f"DiLoCoCallback: {path} is missing: the checkpoint was written without this callback, or its "
                    "writing was interrupted; resume from an earlier checkpoint"
                )
            saved_engine = torch.load(path)
            self.engine.load_state_dict(saved_engine["engine"])
            self.engine.load_wire_state_dict(saved_engine["wire"])
            with torch.no_grad():  # building the engine set all replicas to the first's weights
                for p, saved in zip(model.parameters(), mine, strict=True):
                    p.copy_(saved)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count an inner step; this comes before the Trainer logs, evaluates and saves."""
        assert self.engine is not None
        self._keep(self.engine.step())

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write the engine's state into the checkpoint that the Trainer has just written."""
        assert self.engine is not None
        path = self._path(args, state)
        if not any(path.parent.glob("model*.safetensors")):  # save_pretrained writes in the group's process 0 only,
            save_model(kwargs["model"], str(path.with_name("model.safetensors")))  # and each replica has its own
        whole = {"engine": self.engine.state_dict(), "wire": self.engine.wire_state_dict()}  # int8 leaves a rest
        torch.save(whole, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)  # a kill leaves the whole file or none

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the last round, if it was cut short."""
        assert self.engine is not None
        self._keep(self.engine.finish())

    def _keep(self, report: RoundReport | None) -> None:
        if report is not None:
            self.reports.append(report)

    @staticmethod
    def _path(args: TrainingArguments, state: Any) -> Path:
        return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "twophase.pt"


def check_steps(steps: list[int]) -> None:
    """Refuse to resume replicas from different steps, as a kill between two replicas' checkpoints leaves them."""
    if len(set(steps)) > 1:
        raise ValueError(
            f"DiLoCoCallback: the replicas resume from steps {steps}; give all of them the checkpoint of step "
            f"{min(steps)}, in trainer.train(resume_from_checkpoint=...)"
        )


class Sequences(torch.utils.data.Dataset):
    """Sequences that go round the vocabulary in steps of one width, which the model must find out."""

    def __init__(self, length: int, replica: int = 0) -> None:
        generator = torch.Generator().manual_seed(replica)
        begin = torch.randint(VOCABULARY, (length, 1), generator=generator)
        width = torch.randint(1, 6, (length, 1), generator=generator)
        self.ids = (begin + width * torch.arange(24)) % VOCABULARY

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A sequence, which is also its own target."""
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def tiny_llama() -> LlamaForCausalLM:
    """A Llama of two layers with random weights, the same on every process."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def make_trainer(out: Path, callbacks: list[TrainerCallback], *, steps: int = 64, replica: int = 0) -> Trainer:
    """A Trainer of the tiny model, in float32 on the CPU, with a checkpoint every 10 steps."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        save_steps=10,
        logging_steps=16,
        seed=replica,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(tiny_llama(), arguments, train_dataset=Sequences(512, replica), callbacks=callbacks)


def join_replicas() -> int:
    """Join torchrun's processes, if there are any, and hide them from the Trainer; this replica's number."""
    if "RANK" not in os.environ:
        return 0
    dist.init_process_group("gloo")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return dist.get_rank()


def main(arguments: list[str] | None = None) -> None:
    """Train the tiny model and print the loss, the rounds and a digest of the agreed weights."""
    parser = argparse.ArgumentParser(description="twophase.DiLoCo inside the Trainer of transformers.")
    parser.add_argument("--steps", type=int, default=64, help="inner steps in all")
    parser.add_argument("--out", type=Path, default=Path("runs/transformers_callback"), help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in that folder")
    options = parser.parse_args(arguments)
    replica = join_replicas()
    callback = DiLoCoCallback(OuterRule(lr=0.7, momentum=0.9, nesterov=True), inner_steps=4, restart=Periodic(3))
    trainer = make_trainer(options.out / f"replica-{replica}", [callback], steps=options.steps, replica=replica)
    result = trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()  # after the last round, which the last checkpoint may not hold
    assert callback.engine is not None
    restarts = sum(report.restarted for report in callback.reports)
    print(
        f"replica {replica} of {callback.engine.replica_count}: loss {result.training_loss:.4f}, "
        f"{len(callback.reports)} rounds, {restarts} restarts, checksum {callback.engine.checksum()}",
        flush=True,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
