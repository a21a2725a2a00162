"""torchft's DiLoCo with restarts: python examples/torchft_diloco.py REPLICA REPLICAS http://LIGHTHOUSE:PORT."""

import sys

import torch

from twophase import OuterRule
from twophase.integrations.torchft import diloco, manager

replica, replicas, lighthouse = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)  # all replicas begin alike
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
rule = OuterRule(0.7, 0.9, nesterov=True)
with (
    manager(lighthouse, replica=replica, replicas=replicas) as group,
    diloco(group, model, inner, rule, inner_steps=8, restart=3, fragments=[model[0], model[2]]),
):
    generator = torch.Generator().manual_seed(1 + replica)
    while group.current_step() < 14:  # rounds of both fragments
        x = torch.randn(64, 8, generator=generator)
        (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean().backward()
        inner.step()  # torchft's rounds hang on it
        inner.zero_grad()
print(f"replica {replica}: agreed weights {torch.nn.utils.parameters_to_vector(model.parameters()).norm():.9f}")
