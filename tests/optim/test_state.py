"""The state of an `OuterSGD`: resumed runs, states of torch.optim.SGD, what is refused, plain numbers."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import policies  # noqa: F401 - they register
from outers import buffers, counters, parameters, run, scalar
from replicas import same_bits, through_file
from twophase.optim.functional import buffer_dtype
from twophase.optim.outer import OuterSGD
from twophase.restart import Periodic, Soft


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("saved_after", [1, 6, 7])
def test_resumes_in_the_middle_of_a_cycle(dtype: torch.dtype, saved_after: int):
    """Saved after any round and loaded into a new optimizer, the run ends with the same bits, buffers and counters."""
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "restart": "cycle:3,4"}
    straight, outer = (OuterSGD(parameters(0, dtype=dtype), **settings) for _ in range(2))
    run(straight, range(16))
    run(outer, range(saved_after))
    resumed = OuterSGD([nn.Parameter(p.detach().clone()) for p in outer.param_groups[0]["params"]], **settings)
    resumed.load_state_dict(through_file(outer.state_dict()))
    assert all(map(same_bits, buffers(outer), buffers(resumed)))
    widest = buffers(resumed)[-1]  # of 16-bit parameters float32, which the base class would cast
    assert widest.dtype == buffer_dtype(widest.to(dtype)) == (torch.float32 if dtype.itemsize < 4 else dtype)
    assert torch.equal(widest, widest.to(dtype).to(widest.dtype)) == (dtype.itemsize >= 4 or saved_after != 6)
    run(resumed, range(saved_after, 16))
    assert all(map(same_bits, straight.param_groups[0]["params"], resumed.param_groups[0]["params"]))
    assert all(map(same_bits, buffers(straight), buffers(resumed)))
    assert counters(resumed) == counters(straight)
    assert straight.param_groups[0]["restarts"] == 4  # after rounds 3, 7, 10, 14


def test_loading_copies():
    """After a load neither side sees what happens on the other, in buffers, counters and policy memory."""
    outer, other = (OuterSGD(parameters(seed), 0.1, 0.9, restart=3) for seed in (0, 1))
    run(outer, range(4))
    state = outer.state_dict()
    frozen = copy.deepcopy(state)
    other.load_state_dict(state)
    run(other, range(4, 9))
    for index, entry in frozen["state"].items():
        assert same_bits(entry["momentum_buffer"], state["state"][index]["momentum_buffer"])
    assert outer.param_groups[0]["rounds"] == 4
    sgd_params = [buffer.clone() for buffer in buffers(other)]
    run(outer, range(4, 6))
    assert all(map(same_bits, sgd_params, buffers(other)))
    assert other.param_groups[0]["rounds"] == 9


def test_loading_replaces_everything():
    """Loading an early state into an optimizer that went further drops its buffers, counters and memory."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=3)
    start = copy.deepcopy(outer.state_dict())
    weights = [p.detach().clone() for p in params]
    run(outer, range(5))
    first = [p.detach().clone() for p in params]
    outer.load_state_dict(start)
    assert not any("momentum_buffer" in outer.state[p] for p in params)
    with torch.no_grad():
        for p, x in zip(params, weights, strict=True):
            p.copy_(x)
    run(outer, range(5))
    assert all(same_bits(p, x) for p, x in zip(params, first, strict=True))
    assert outer.param_groups[0]["rounds"] == 5


# --- states of torch.optim.SGD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("restart", ["never", "2", "soft:2:0.2:0.1", "gradient"])
def test_state_of_torch_sgd_loads(restart: str, nesterov: bool):
    """A checkpoint of torch.optim.SGD continues with its bits, lr and momentum; policy and counts are one's own."""
    sgd_params = parameters(0, dtype=torch.float32)
    sgd = torch.optim.SGD(sgd_params, 0.7, 0.9, nesterov=nesterov)
    run(sgd, range(3))
    outer_params, twin = ([nn.Parameter(p.detach().clone()) for p in sgd_params] for _ in range(2))
    outer = OuterSGD(outer_params, 0.1, 0.5, form="ema", restart=restart)
    outer.load_state_dict(through_file(sgd.state_dict()))
    (group,) = outer.param_groups
    assert (group["restart"], group["form"]) == (restart, "sum")
    assert (group["lr"], group["momentum"], group["rounds"]) == (0.7, 0.9, 0)
    other = OuterSGD(twin, 0.7, 0.9, nesterov=nesterov, restart=restart)  # built as it ought to be, with SGD's buffers
    for p, q in zip(twin, sgd_params, strict=True):
        other.state[p]["momentum_buffer"] = sgd.state[q]["momentum_buffer"].clone()
    for optimizer in (outer, other, sgd):
        run(optimizer, range(3, 8))
    assert all(map(same_bits, outer_params, twin))
    assert all(map(same_bits, outer_params, sgd_params)) == (restart == "never")
    assert restart in ("never", "gradient") or group["restarts"] == 2


def test_state_with_empty_buffers_loads():
    """A buffer saved as None, as some versions of torch.optim.SGD write before the first step, is no buffer."""
    params = parameters(0)
    state = torch.optim.SGD(params, 0.7, 0.9).state_dict()
    state["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    outer = OuterSGD(params, 0.1)
    outer.load_state_dict(state)
    run(outer, range(3), measure=True)
    twin = parameters(0)
    run(OuterSGD(twin, 0.7, 0.9), range(3))
    assert all(map(same_bits, params, twin))


def sgd_state(**options: Any) -> dict[str, Any]:
    return torch.optim.SGD([scalar(0.0)], 0.7, 0.9, **options).state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (sgd_state(dampening=0.9), "a param group has dampening=0.9"),
        (sgd_state(weight_decay=0.1), "a param group has weight_decay=0.1"),
        (sgd_state(maximize=True), "a param group has maximize=True"),
        ({"state": {}, "param_groups": [{"momentum": 0.9, "together": True}]}, "a param group has together=True"),
        ({}, r"no state of an OuterSGD or a torch.optim.SGD.*state_dict\(\) of one"),
        ({"state": {}}, "no state of an OuterSGD or a torch.optim.SGD"),
        (torch.optim.Adam([scalar(0.0)]).state_dict(), "no state of an OuterSGD or a torch.optim.SGD"),
    ],
)
def test_state_that_cannot_be_honoured_is_refused(state: dict[str, Any], message: str):
    """A state of SGD with what an outer step has not, and of other optimizers, is refused; nothing is loaded."""
    outer = OuterSGD([scalar(0.0)], 0.1, 0.5)
    with pytest.raises(ValueError, match=rf"OuterSGD: .*{message}"):
        outer.load_state_dict(state)
    assert outer.param_groups[0]["lr"] == 0.1


def test_a_loaded_policy_that_needs_what_is_not_promised_is_refused():
    """As at construction, and nothing is loaded; with the promise it is."""
    state = OuterSGD(parameters(0), 0.7, 0.9, restart="test-rising:0", signals=["loss"]).state_dict()
    outer = OuterSGD(parameters(0), 0.1, 0.5, restart=3)
    with pytest.raises(ValueError, match=r"loaded state's restart policy test-rising:0 needs loss; .*construction"):
        outer.load_state_dict(state)
    assert (outer.param_groups[0]["lr"], outer.param_groups[0]["restart"]) == (0.1, "3")
    promised = OuterSGD(parameters(0), 0.1, 0.5, restart=3, signals=["loss"])
    promised.load_state_dict(state)
    assert promised.param_groups[0]["restart"] == "test-rising:0"


@pytest.mark.parametrize("memory", ["{", "[" * 100_000, "[]", "3", '{"end": NaN}', '{"end": [1]}', '{"end": null}'])
def test_a_loaded_memory_that_holds_no_numbers_is_refused(memory: str):
    """A policy would compare with it in a later round; nothing is loaded."""
    outer = OuterSGD([scalar(0.0)], 0.1, 0.9, restart="auto")
    state = outer.state_dict()
    state["param_groups"][0] |= {"lr": 0.5, "policy_state": memory}
    with pytest.raises(ValueError, match=r"OuterSGD: the loaded policy's"):
        outer.load_state_dict(state)
    assert outer.param_groups[0]["lr"] == 0.1


# --- plain numbers ----------------------------------------------------------------------------------------------------


def test_states_hold_plain_numbers():
    """Numbers of NumPy's, and a policy that has not begun yet, come through the disk as plain numbers and text."""
    x = scalar(1.0)
    numbers: dict[str, Any] = {"lr": np.logspace(-1, 0, 3)[1], "momentum": np.float32(0.5), "nesterov": np.bool_(True)}
    outer = OuterSGD([x], **numbers, restart=Soft(3, 0.2, 0.1))
    torch.optim.lr_scheduler.LambdaLR(outer, lambda t: np.cos(t / 10))
    run(outer, range(4))
    saved = through_file(outer.state_dict())["param_groups"][0]
    assert {type(value) for value in saved.values()} <= {int, float, bool, str, list, type(None)}
    assert (saved["nesterov"], saved["restart"]) == (True, "soft:3:0.2:0.1")
    assert [saved[key] for key in ("rounds", "rounds_since_restart", "restarts", "policy_state")] == [4, 1, 1, "{}"]
    outer.param_groups[0]["restart"] = Periodic(5)
    saved = through_file(outer.state_dict())["param_groups"][0]
    assert (saved["restart"], json.loads(saved["policy_state"])) == ("5", Periodic(5).initial_state())
    assert outer.param_groups[0]["restart"] == Periodic(5)  # asking for the state has begun nothing


def test_signals_are_kept_as_plain_numbers():
    """A tensor that the caller goes on using does not change a policy's memory, and NumPy's numbers can be loaded."""
    x, loss = scalar(1.0), torch.tensor(1.0, requires_grad=True)
    outer = OuterSGD([x], lr=0.5, momentum=0.9, restart="test-rising:0", signals=["loss"])
    x.grad = torch.ones(1)
    outer.step(signals={"loss": loss})  # type: ignore[dict-item]  # without torch's warning of a gradient
    with torch.no_grad():
        loss += 9
    outer.step(signals={"loss": np.float64(1.5)})
    assert outer.param_groups[0]["restarts"] == 1  # 1.5 after 1
    saved = through_file(outer.state_dict())["param_groups"][0]["policy_state"]
    assert json.loads(saved) == {"last": 1.5}


def test_a_memory_of_arrays_of_one_number_is_saved_as_numbers():
    """Numbers of NumPy's and torch's keep their kind."""
    outer = OuterSGD([scalar(1.0)], lr=0.5, momentum=0.9, restart="auto")
    outer.param_groups[0]["policy_state"] = {"count": np.int64(3), "norm": np.float32(0.5), "end": torch.tensor(2.0)}
    text = outer.state_dict()["param_groups"][0]["policy_state"]
    assert text == '{"count": 3, "norm": 0.5, "end": 2.0}'


def test_a_loaded_state_saves_as_it_was():
    """Without momentum there is no buffer, before a state is loaded and after: both save alike."""
    outer = OuterSGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    state = outer.state_dict()
    outer.load_state_dict(state)
    assert outer.state_dict() == state
    assert state["state"] == {}


def test_a_loaded_buffer_of_a_scalar_is_float32():
    """A 16-bit buffer of a scalar parameter becomes float32 as every other one does."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((), (1,))]
    theirs = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    theirs.step()
    outer = OuterSGD(params, lr=0.1, momentum=0.9)
    outer.load_state_dict(theirs.state_dict())
    assert [outer.state[p]["momentum_buffer"].dtype for p in params] == [torch.float32] * 2


def momentum_sgd(p: nn.Parameter) -> OuterSGD:
    return OuterSGD([p], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("build", "shape", "dtype", "devices"),
    [
        (momentum_sgd, (), torch.float32, {"momentum_buffer": "meta"}),
        (momentum_sgd, (3,), torch.float32, {"momentum_buffer": "meta"}),
        (momentum_sgd, (3,), torch.complex64, {"momentum_buffer": "meta"}),
    ],
)
def test_loaded_buffers_lie_on_their_parameters_device(build: Any, shape: Any, dtype: torch.dtype, devices: Any):
    """Whatever device the state was saved from, shown with torch's device without data; counts stay where they are."""
    on_cpu, on_meta = (nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for device in ("cpu", "meta"))
    saved, outer = build(on_cpu), build(on_meta)
    on_cpu.grad = torch.ones_like(on_cpu)
    saved.step()
    outer.load_state_dict(saved.state_dict())
    assert {key: value.device.type for key, value in outer.state[on_meta].items() if key in devices} == devices


def test_hooks_around_loading_have_the_last_word():
    """Torch's hooks work: one that matches by name, from fewer parameters, and one that changes what was loaded."""

    def by_name(optimizer: OuterSGD, state: dict[str, Any]) -> dict[str, Any]:
        (group,), (current,) = state["param_groups"], optimizer.param_groups
        order = {name: number for number, name in enumerate(current["param_names"])}
        indices = dict(zip(group["param_names"], group["params"], strict=True))
        numbers = {order[name]: state["state"][index] for name, index in indices.items()}
        whole = {"params": list(order.values()), "param_names": list(order)}
        return {"state": numbers, "param_groups": [group | whole]}

    def doubled(optimizer: OuterSGD) -> None:
        for entries in optimizer.state.values():
            entries["momentum_buffer"] = 2 * entries["momentum_buffer"]

    saved, loaded = (
        [(name, nn.Parameter(torch.full((2,), float(len(name))))) for name in names]
        for names in (("a", "bb"), ("new", "bb", "a"))
    )
    outer, other = OuterSGD(saved, 0.1, 0.9), OuterSGD(loaded, 0.1, 0.9)
    for _, x in saved:
        x.grad = x.detach().clone()
    outer.step()
    other.register_load_state_dict_pre_hook(by_name)  # type: ignore[arg-type]
    other.register_load_state_dict_post_hook(doubled)  # type: ignore[arg-type]
    other.load_state_dict(outer.state_dict())
    expected = {name: 2 * outer.state[x]["momentum_buffer"] for name, x in saved}
    actual = {name: other.state[x]["momentum_buffer"] for name, x in loaded if x in other.state}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert [copy.deepcopy(optimizer).begun for optimizer in (outer, other)] == [False, False]


@pytest.mark.parametrize("option", [{"weight_decay": 0.1}, {"dampening": 0.5}, {"maximize": True}])
def test_a_group_with_what_no_outer_step_has_is_refused(option: dict[str, Any]):
    """What a group asks for in vain is refused at construction and in a step: its own state would not load either."""
    with pytest.raises(ValueError, match=r"a param group has .*leave it out"):
        OuterSGD([{"params": [scalar(0.0)], **option}], 0.1, 0.9)
    x = scalar(0.0)
    outer = OuterSGD([{"params": [x], **dict.fromkeys(option, 0)}], 0.1, 0.9)
    outer.param_groups[0] |= option
    x.grad = torch.ones_like(x)
    with pytest.raises(ValueError, match=r"a param group has .*leave it out"):
        outer.step()
    assert x == 0
