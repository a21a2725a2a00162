"""The patches of docs/trainers.md, tried on loops of the same shape: our rounds, in one process and in two, resumed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import trainers
from forked import finish, places

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")

TRAIN = """\
import os, sys
import torch, trainers
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from model import GPTConfig, GPT
out_dir, device, init_from, max_iters = '.', 'cpu', sys.argv[1], int(sys.argv[2])
ddp = 'RANK' in os.environ
if ddp:
    init_process_group('gloo')
ddp_rank = ddp_local_rank = int(os.environ.get('RANK', 0))
model, iter_num = GPT(GPTConfig()), 0
optimizer = trainers.optimizer(model)
if init_from == 'resume':
    checkpoint = torch.load(os.path.join(out_dir, 'ckpt.pt'))
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    iter_num = checkpoint['iter_num']
# wrap model into DDP container
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module if ddp else model # unwrap DDP container if needed
while True:
    if iter_num % 200 == 0 and ddp_rank == 0:
        if True:
            if iter_num > 0:
                checkpoint = {'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict()}
                checkpoint['iter_num'] = iter_num
                torch.save(checkpoint, os.path.join(out_dir, 'ckpt.pt'))
    trainers.loss(model, *trainers.batch(iter_num, ddp_rank)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num >= max_iters:
        break
torch.save(raw_model.state_dict(), f'end {ddp_rank}.pt')
os._exit(0) # a process that ends with gloo's threads alive may abort, in plain torch too
"""
BASE_TRAIN = """\
import os, sys
from types import SimpleNamespace
import torch, trainers
import torch.distributed as dist
from nanochat.gpt import GPT, GPTConfig, Linear
args = SimpleNamespace(resume_from_step=200 if sys.argv[1] == 'resume' else -1, save_every=200)
device, checkpoint_dir, num_iterations = 'cpu', '.', int(sys.argv[2])
dist.init_process_group('gloo')
ddp_rank = int(os.environ['RANK'])
master_process = ddp_rank == 0
def save_checkpoint(folder, step, model, optimizer, rank):
    torch.save({'model': model, 'optimizer': optimizer}, f'{folder}/{step} {rank}.pt')
orig_model = GPT(*trainers.build())
resuming, step = args.resume_from_step != -1, 0
if resuming:
    model_data, optimizer_data = torch.load(f'{checkpoint_dir}/{args.resume_from_step} {ddp_rank}.pt').values()
    orig_model.load_state_dict(model_data)
    step = args.resume_from_step
model = orig_model
optimizer = model.setup_optimizer()
if resuming:
    optimizer.load_state_dict(optimizer_data)
    del optimizer_data
engine = None
while True:
    last_step = step == num_iterations # loop runs num_iterations+1 times so that we can eval/save at the end
    if last_step or (step > 0 and step != args.resume_from_step and step % args.save_every == 0):
        save_checkpoint(
            checkpoint_dir,
            step,
            orig_model.state_dict(),
            optimizer.state_dict(),
            rank=ddp_rank,
        )
    if last_step:
        break
    trainers.loss(model, *trainers.batch(step, ddp_rank)).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    step += 1
torch.save(orig_model.state_dict(), f'end {ddp_rank}.pt')
os._exit(0) # a process that ends with gloo's threads alive may abort, in plain torch too
"""
GPT = """\
import torch, trainers
from torch.nn import Linear
GPTConfig = dict
MuonAdamW = trainers.optimizer
def DistMuonAdamW(model):
    raise AssertionError('it would average every gradient')
class GPT(torch.nn.Sequential):
    def setup_optimizer(self, ddp=True):
        Factory = DistMuonAdamW if ddp else MuonAdamW
        return Factory(self)
"""


def patch(source: str, text: str) -> str:
    """Apply a patch as the page prints it: each part between two lines `…` has its place once."""
    assert sum(line.startswith(("+", "-")) for line in text.splitlines()) <= 20
    for part in text.split("…\n"):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        assert source.count(before) == 1, before
        source = source.replace(before, "".join(line[1:] for line in lines if not line.startswith("-")))
    return source


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The patched loop of that name, with what it imports."""
    # a rule with a memory: averaging would not show a momentum that is lost
    scripts = PAGE[PAGE.index("## Scripts") :].replace('"averaging"', '"nesterov", restart=3')
    nano_gpt, base_train, gpt = re.findall(r"^```text\n(.*?)^```", scripts, re.MULTILINE | re.DOTALL)
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").write_text(patch(GPT, gpt))
    (tmp_path / "model.py").write_text("import trainers\nGPTConfig = dict\ndef GPT(_): return trainers.build()\n")
    path = tmp_path / "train.py"
    path.write_text(patch(TRAIN, nano_gpt) if request.param == "nanoGPT" else patch(BASE_TRAIN, base_train))
    return path


@pytest.mark.dist
@pytest.mark.parametrize(
    ("script", "replicas", "parts"),
    [
        ("nanoGPT", 2, {"scratch": 300}),
        ("nanoGPT", 1, {"scratch": 250, "resume": 300}),
        ("nanochat", 2, {"scratch": 250, "resume": 350}),
    ],
    indirect=["script"],
)
def test_patched_loops(script: Path, replicas: int, parts: dict[str, int]):
    """In two processes and resumed from step 200 they end with the bits of a hand-written loop, and a shorter round."""
    for start, steps in parts.items():
        finish(
            script.parent, [[str(script), start, str(steps)]] * replicas, places(2) if replicas > 1 else [os.environ]
        )
    _, models, _ = trainers.by_hand([*parts.values()][-1], replicas, inner_steps=100)
    for number, model in enumerate(models):
        end = trainers.build()
        end.load_state_dict(torch.load(script.with_name(f"end {number}.pt")))
        assert trainers.same_weights(end, model)
