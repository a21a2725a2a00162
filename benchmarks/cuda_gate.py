"""Hold the training step's CUDA code to its bounds on a machine without a GPU.

    make gate        or        python benchmarks/cuda_gate.py

Inductor emits its code for one micro-batch of `paper_150m` (12 layers, 64 sequences of 2048 tokens) as for an H100, and
the code runs on tensors without values: `fake_cuda` says how. Times need a GPU: benchmarks/gpu.py. The last line is
JSON:

* live_logits_pieces: most pieces of logits, or of their gradient, that exist at a time;
* forward_peak_gb: memory of the forward pass beside weights, gradients and optimizer;
* traffic_gb: bytes that kernels read and write in forward and backward pass, beside matrix products and attention;
* activation_ratio: the memory estimate that chooses the micro-batch, over the measured peak;
* launches: of kernels and library functions in forward and backward pass;
* graphs, evaluation_graphs: that three rounds with evaluations between them compile, and all breaks of a graph;
* host_syncs_per_step: reads of a device's value by the host in an inner step, and copies that it waits for, either way;
* host_syncs_per_round, outer_passes: of the outer step, from outer_round_gate.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import fake_cuda
from bounds import finish

if TYPE_CHECKING:
    from twophase.tasks.lm.config import TrainConfig

VOCABULARY = 32000
ROUNDS, STEPS = 3, 2
OUTER = Path(__file__).with_name("outer_round_gate.py")


def model_on_gpu(config: TrainConfig) -> Any:
    """Make a model on the pretended GPU; `Module.to` cannot move tensors without values."""
    import torch

    from twophase.tasks.lm.model import Llama
    from twophase.tasks.lm.step import drawn

    with torch.device("cuda"), mock.patch.object(Llama, "to", lambda self, _: self):
        return drawn(config, VOCABULARY, config.seed).to("cuda")


def step_figures(config: TrainConfig) -> dict[str, float]:
    """Run one micro-batch forward and backward."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from twophase.tasks.lm.step import Step, activation_bytes

    data, emitted = config.data, fake_cuda.Emitted()

    def is_logits(tensor: torch.Tensor) -> bool:  # and not the head's weight, transposed
        return tensor.dim() == 2 and tensor.shape[1] == VOCABULARY and tensor.shape[0] != config.model.hidden_size

    memory = fake_cuda.tracker(is_logits)
    with FakeTensorMode(), emitted.recording():
        model = model_on_gpu(config)
        tokens = torch.zeros(data.batch_size, data.sequence_length, dtype=torch.int64, device="cuda")
        step = Step(config, VOCABULARY, torch.device("cuda"), 1)
        loss = step._loss
        loss(model, tokens, tokens, "cudnn").backward()  # compiles
        model.zero_grad()
        emitted.launches = 0
        with memory:
            value = loss(model, tokens, tokens, "cudnn")
            forward_peak, memory.peak = memory.peak, 0
            value.backward()
    kernels = [kernel for graph in emitted.kernels for kernel in graph]
    beside = [kernel for kernel in kernels if "mm" not in kernel.kind and "attention" not in kernel.kind]
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    peak = max(forward_peak, memory.peak - gradients)
    return {
        "live_logits_pieces": memory.watched_peak,
        "forward_peak_gb": forward_peak / 1e9,
        "traffic_gb": sum(kernel.bytes for kernel in beside) / 1e9,
        "activation_ratio": activation_bytes(config, VOCABULARY, data.batch_size) / peak,
        "launches": emitted.launches + sum(kernel.kind != "fused" for kernel in kernels),
    }


class Text:
    """A corpus of one token, as far as a replica asks for one."""

    def __init__(self, config: TrainConfig) -> None:
        from twophase.text.verification import Verification

        self.shape = (config.data.batch_size, config.data.sequence_length)
        self.vocabulary_size, self.token_bytes, self.verification = VOCABULARY, None, Verification({})

    def batch(self, *_: int) -> tuple[Any, Any]:
        """The tokens and targets of an inner step."""
        return np.zeros(self.shape, np.int64), np.zeros(self.shape, np.int64)

    def validation(self) -> tuple[Any, Any]:
        """Held-out windows: two batches and a half."""
        return tuple(np.zeros((5 * self.shape[0] // 2, self.shape[1]), np.int64) for _ in range(2))  # pyright: ignore


def run_figures(config: TrainConfig) -> dict[str, float]:
    """Take the inner steps of some rounds, with evaluations between them, of a small model."""
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    from twophase.diloco.communicator import SingleProcess
    from twophase.tasks.lm import task as language
    from twophase.tasks.lm.model import Llama
    from twophase.tasks.lm.step import compiled_loss
    from twophase.training.inner import Replica

    torch._dynamo.reset()
    compiled_loss.cache_clear()
    counters.clear()
    memory, graphs = fake_cuda.tracker(), {"step": 0, "evaluation": 0}

    def counted(kind: str, call: Any) -> None:
        before = counters["stats"]["unique_graphs"]
        call()
        graphs[kind] += counters["stats"]["unique_graphs"] - before

    with FakeTensorMode(allow_non_fake_inputs=True), fake_cuda.Emitted().recording():
        with mock.patch.object(language, "corpus_of", return_value=Text(config)):
            task = language.LanguageTask(config)
            assert task.corpus  # read here, and kept
        compute = task.step(torch.device("cuda"), 1, SingleProcess())
        compute.chosen = {"micro_batch": config.data.batch_size, "attention": "cudnn"}
        drawn = mock.patch.object(language, "drawn", return_value=model_on_gpu(config))
        with drawn, mock.patch.object(Llama, "to", lambda self, _: self):
            replica = Replica(config, 0, task, compute)
        syncs = 0
        for number in range(ROUNDS * STEPS):
            with memory:
                memory.syncs = 0
                counted("step", lambda number=number: replica.step(number, 1e-3))
                syncs = max(syncs, memory.syncs)
                if number % STEPS:
                    counted("evaluation", replica.evaluate)
    return {
        "graphs": graphs["step"] + sum(counters["graph_break"].values()),
        "evaluation_graphs": graphs["evaluation"],
        "host_syncs_per_step": syncs,
    }


def outer_figures() -> dict[str, float]:
    """Measure the outer step, in a process that has not been told of a GPU."""
    if not OUTER.exists():
        return {}
    code = "import json, outer_round_gate; print(json.dumps(outer_round_gate.figures()))"
    words = [sys.executable, "-c", code]
    out = subprocess.run(words, cwd=OUTER.parent, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def figures() -> dict[str, float]:
    """Measure everything; torch must not have been imported before."""
    fake_cuda.install()
    from twophase.recipes.pretraining import paper_150m

    config = paper_150m()
    small = replace(config.model, layers=1, hidden_size=128, intermediate_size=256, heads=2)
    data = replace(config.data, batch_size=4, sequence_length=256)
    return step_figures(config) | run_figures(replace(config, model=small, data=data)) | outer_figures()


if __name__ == "__main__":
    if reason := fake_cuda.missing():
        sys.exit(f"cuda_gate: {reason}")
    sys.exit(finish("cuda_gate", figures()))
