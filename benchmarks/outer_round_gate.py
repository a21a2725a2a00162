"""Count what an outer round of `paper_150m` moves and waits for on a GPU, without one; a part of cuda_gate.py.

Two replicas live on a pretended GPU (`fake_cuda`), and the engine ends a round of theirs. A pass is one reading or one
writing of all parameters in float32: of every operation's tensors, and of what each kernel says it reads and writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_cuda

WRITTEN_ONLY = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}


def counting_mode() -> Any:
    """Make a dispatch mode with `bytes` that operations on the GPU move and `syncs` that the host waits for."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def on_gpu(value: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"]

    class Mode(TorchDispatchMode):
        bytes = syncs = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, func.overloadpacket.__name__
            if name == "_local_scalar_dense":
                self.syncs += 1
                return 1.0
            out = func(*args, **kwargs)
            if name in ("_to_copy", "copy_"):
                places = {leaf.device.type for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)}
                self.syncs += {"cpu", "cuda"} <= places
            results, schema = func._schema.returns, func._schema
            is_view = any(result.alias_info and not result.alias_info.is_write for result in results)
            if is_view or "empty" in name or func.namespace == "prim":
                return out  # no element is read or written
            values = list(zip(schema.arguments, args, strict=False))
            values += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
            for argument, value in values:
                size = sum(leaf.nbytes for leaf in on_gpu(value))
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                is_out = argument.name == "out"
                self.bytes += size * (is_written + (not is_out and not (is_written and name in WRITTEN_ONLY)))
            self.bytes += sum(leaf.nbytes for leaf in on_gpu(out)) * all(not result.alias_info for result in results)
            return out

    return Mode()


def figures() -> dict[str, float]:
    """The round's passes over the parameters, waits of the host, and launches of kernels.

    Call it in a process that has not imported torch.
    """
    fake_cuda.install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from twophase.diloco import device_sweep
    from twophase.diloco.check import Watch
    from twophase.diloco.engine import DiLoCo
    from twophase.recipes.pretraining import paper_150m
    from twophase.restart import Periodic
    from twophase.tasks.lm.model import Llama
    from twophase.training.trainer import Progress, Trainer

    counts = counting_mode()
    launches = 0

    def launch(kernel: str, programs: int, arguments: Any, **sizes: Any) -> None:
        nonlocal launches
        del kernel, programs, arguments
        launches += 1
        moved: Sequence[torch.Tensor] = [*sizes["reads"], *sizes["writes"]]
        counts.bytes += sum(tensor.nbytes for tensor in moved)

    def to_host(tensor: torch.Tensor) -> list[int]:  # FakeTensor's own asks for one number after the other
        counts.syncs += 1
        return [0] * tensor.numel()

    def one_table(device: torch.device, dtypes: Sequence[torch.dtype], rows: Any) -> list[device_sweep.Table]:
        assert set(dtypes) == {torch.float32}, "all parameters of the recipe are taken together"
        programs = sum(-(-end // device_sweep._BLOCK) - start // device_sweep._BLOCK for start, end, *_ in rows)
        nowhere = torch.empty(0, device=device)
        return [device_sweep.Table(tuple(range(len(rows))), torch.float32, True, programs, nowhere, nowhere)]

    names = SimpleNamespace(pseudo_gradient="", outer_round="", inner_products="", TYPES={torch.float32: ""})
    patches = [
        mock.patch.object(device_sweep, "_launch", launch),
        mock.patch.object(FakeTensor, "tolist", to_host),
        mock.patch.object(device_sweep, "kernels", return_value=names),
        # These tensors lie nowhere, and hold no table.
        mock.patch.object(device_sweep, "_addresses", lambda params: [*map(id, params)]),
        mock.patch.object(device_sweep, "tables", one_table),
        # The first round's watch compares values, which these tensors have not; later rounds have no watch.
        mock.patch.object(Watch, "begin"),
    ]
    config = paper_150m()
    with FakeTensorMode(), torch.device("cuda"):
        models = [Llama(config.model, config.model.vocabulary_size, seed=0) for _ in range(config.replicas)]
        for patch in patches:
            patch.start()
        engine = DiLoCo(models, config.outer.rule(), restart=Periodic(3), inner_steps=1)
        for _ in range(3):  # the last one restarts, and none makes a buffer any more
            with counts:
                counts.bytes = counts.syncs = launches = 0
                replicas = [SimpleNamespace(round_losses=[]) for _ in models]
                losses = [torch.zeros(()) for _ in models]
                trainer: Any = SimpleNamespace(_losses=losses, replicas=replicas, done=Progress())
                Trainer.settle(trainer)  # the losses of the round's steps, as the trainer reads them
                report = engine.step()
            assert report is not None, "a round of one inner step ends with it"
        for patch in patches:
            patch.stop()
    numel = sum(parameter.numel() for parameter in models[0].parameters())
    return {
        "host_syncs_per_round": counts.syncs,
        "outer_passes": round(counts.bytes / (4 * numel), 3),
        "outer_launches": launches,
    }


if __name__ == "__main__":
    if reason := fake_cuda.missing():
        sys.exit(f"outer_round_gate: {reason}")
    print(json.dumps(figures()))
