"""`OuterSGD` by itself, and inside torchft's own DiLoCo with a manager that averages over gloo."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cases.engine import Training, batch, model, train
from suite import Outer, case, digest, digests, grid, in_group

ROUNDS = 14
NESTEROV = Outer("nesterov", 0.3)


def parameters(dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    """Return a matrix, a vector and a number."""
    made = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in ((5, 7), (9,), ())]


def set_gradients(params: list[torch.nn.Parameter], number: int, left_out: int = -1) -> None:
    """Set the pseudo-gradients of a round; the one of the parameter `left_out` is missing in every third round."""
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(100 * number + index)
        missing = index == left_out and number % 3 == 2
        p.grad = None if missing else (p.detach() + torch.randn(p.shape, generator=generator).to(p.dtype)) / 4


def alone(
    api: Any,
    build: Callable[[Any, list[torch.nn.Parameter]], Any],
    dtype: torch.dtype = torch.float32,
    left_out: int = -1,
    decay: float = 1.0,
) -> dict[str, Any]:
    """Take rounds, straight on and through a file in the middle; both must end alike."""
    results = []
    for resume in (0, 6):
        params = parameters(dtype)
        optimizer = build(api, params)
        for number in range(1, ROUNDS + 1):
            set_gradients(params, number, left_out)
            optimizer.step()
            for group in optimizer.param_groups:  # as a scheduler would
                group["lr"] *= decay
            if number == resume:
                file = io.BytesIO()
                torch.save([[p.data for p in params], optimizer.state_dict()], file)
                file.seek(0)
                weights, state = torch.load(file, weights_only=True)
                params = parameters(dtype, seed=9)
                optimizer = build(api, params)
                for p, saved in zip(params, weights, strict=True):
                    p.data.copy_(saved)
                optimizer.load_state_dict(state)
        buffers = api.momentum_buffers(optimizer)
        results.append(
            {
                "weights": [digest(p) for p in params],
                "momentum": [digest(m) for m in buffers],
                "counters": api.counters(optimizer),
            }
        )
    return {"straight": results[0], "resumed is the same": results[0] == results[1]}


def _whole(outer: Outer, restart: str) -> Callable[..., Any]:
    return lambda api, params: api.outer_sgd(params, outer, restart)


def _groups(api: Any, params: list[torch.nn.Parameter]) -> Any:
    """Override every argument in a group."""
    groups = [
        {"params": params[:1], "restart": "2"},
        {"params": params[1:2], "lr": 0.9, "momentum": 0.5, "nesterov": False, "restart": "soft:3:0.2:0.1"},
        {"params": params[2:], "form": "ema", "restart": "cycle:1,3"},
    ]
    return api.outer_sgd(groups, NESTEROV, "5")


for values in grid(method=("averaging", "heavy-ball", "nesterov"), form=("sum", "ema")):
    rule = Outer(values["method"], 0.6, 0.8, values["form"])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        case(f"OuterSGD {rule.method}, {rule.form}, {dtype}", partial(alone, build=_whole(rule, "never"), dtype=dtype))
    for restart in ("3", "at:2,9", "soft:3:0.2:0.1"):
        if rule.method != "averaging":
            case(f"OuterSGD {rule.method}, {rule.form}, {restart}", partial(alone, build=_whole(rule, restart)))
case("OuterSGD auto", partial(alone, build=_whole(Outer("heavy-ball", 1.0, 0.5), "auto")))
case("OuterSGD param groups", partial(alone, build=_groups))
case("OuterSGD param groups, bfloat16", partial(alone, build=_groups, dtype=torch.bfloat16))
case("OuterSGD missing gradients", partial(alone, build=_whole(NESTEROV, "3"), left_out=1))
case("OuterSGD scheduler", partial(alone, build=_whole(NESTEROV, "4"), decay=0.9))


def equals_torch(api: Any) -> dict[str, bool]:
    """Hold the sum form without restarts against `torch.optim.SGD`, also after loading its state."""
    same = {}
    for values in grid(momentum=(0.0, 0.9), nesterov=(False, True), dtype=(torch.float32, torch.float64)):
        outer = Outer("nesterov" if values["nesterov"] else "heavy-ball", 0.3, values["momentum"])
        ours, theirs, loaded = (parameters(values["dtype"]) for _ in range(3))
        nesterov = values["nesterov"] and values["momentum"] > 0
        reference = torch.optim.SGD(theirs, lr=0.3, momentum=values["momentum"], nesterov=nesterov)
        optimizers = [(ours, api.outer_sgd(ours, outer)), (theirs, reference), (loaded, api.outer_sgd(loaded, outer))]
        for number in range(1, ROUNDS + 1):
            for params, optimizer in optimizers:
                set_gradients(params, number)
                optimizer.step()
            if number == 5:
                optimizers[2][1].load_state_dict(reference.state_dict())
        bits = [[digest(p) for p in params] for params, _ in optimizers]
        same[f"{values}"] = bits[0] == bits[1] == bits[2]
    return same


case("OuterSGD equals torch.optim.SGD", equals_torch)

# -------------------------------------------------------------------------------------------------------- torchft


class Manager:
    """What torchft's DiLoCo asks of its `Manager`, over gloo, where nobody joins or leaves."""

    _use_async_quorum = _init_sync = False
    _checkpoint_transport, _user_state_dicts = None, {"default": dict}

    def __init__(self) -> None:
        self.step, self.state = 0, {}

    def allreduce(self, tensor: Tensor, *, should_quantize: bool = False) -> Any:
        """Average over the ranks."""
        assert not should_quantize
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        """Count the round."""
        self.step += 1
        return True

    def current_step(self) -> int:
        """Return the number of rounds."""
        return self.step

    def register_state_dict_fn(self, name: str, load: Any, save: Any) -> None:
        """Remember what a replica that joins would get."""
        self.state[name] = load, save

    def start_quorum(self) -> None:
        """All are there."""

    allow_state_dict_read = disallow_state_dict_read = start_quorum


def in_torchft(api: Any, *, integration: bool, outer: Outer, restart: str, fragments: int) -> Any:
    """Train two replicas by torchft's rounds, with our `OuterSGD` or by our integration; compare with our engine."""

    def work(rank: int) -> dict[str, Any]:
        from torchft.local_sgd import DiLoCo  # noqa: PLC0415 - slow to import

        manager: Any = Manager()
        replica: Any = model("plain", 0, torch.float32)
        inner = torch.optim.AdamW(replica.parameters(), lr=0.02)
        parts = [replica[:3], replica[3:]] if fragments == 2 else [replica]
        if integration:
            rounds = api.torchft_diloco(
                Manager(), replica, inner, outer, inner_steps=4, restart=restart, fragments=parts
            )
            outers = rounds.outers
        else:
            outers = [api.outer_sgd(part.parameters(), outer, restart) for part in parts]
            rounds: Any = DiLoCo(manager, parts, inner, outers, sync_every=4)
        with rounds:
            for step in range(32):
                x, y = batch(step, rank, torch.float32)
                (replica(x) - y).square().mean().backward()
                inner.step()
                inner.zero_grad()
        return {
            "weights": digests(replica.state_dict()),
            "momentum": [[digest(m) for m in api.momentum_buffers(each)] for each in outers],
            "counters": [api.counters(each) for each in outers],
        }

    ranks = in_group(2, work)
    options: dict[str, Any] = {"fragments": {"first": r"^[012]\.", "rest": "."}} if fragments == 2 else {}
    ours = train(api, Training(outer, restart, steps=32, finish=False, options=options))
    # At its end the integration sets the replicas to what all agree on.
    expected = [ours["anchor"]] * 2 if integration else [ours["weights"][str(number)] for number in range(2)]
    return {"ranks": ranks, "same as our engine": [rank["weights"] for rank in ranks] == expected}


for values in grid(integration=(False, True), fragments=(1, 2)):
    name = "by the integration" if values["integration"] else "with OuterSGD"
    run = partial(in_torchft, outer=NESTEROV, restart="3", **values)
    case(f"torchft {name}, {values['fragments']} fragments", run)
