"""The state of every method of the shelf with every readout and schedule, and what is refused.

Values are those of the registry, so that a new one is covered by itself.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import give, parameters, randoms, run
from replicas import Run, same_bits, start, through_file, unlike
from twophase.optim.methods import first_moment_key, from_torch
from twophase.optim.optimizer import OuterOptimizer
from twophase.optim.outer import OuterSGD
from twophase.restart import parse as parse_policy
from twophase.rule import OuterRule
from twophase.shelf.base import register
from twophase.shelf.filters import Clip
from twophase.shelf.methods import AdamW, Method
from twophase.shelf.outer import Outer, outer
from twophase.shelf.text import parse, registered

OTHERS = [f"torch:optimizer={name}:options=lr=0.1" for name in ("Adagrad", "NAdam")]
METHODS = [*registered("method"), *OTHERS]
SHAPES = [(3, 5), (4, 4), (6,)]
each_method = pytest.mark.parametrize("method", METHODS)


def restart_of(method: str) -> str:
    """A policy that the method can serve."""
    value = parse("method", method)
    return "soft:3:0.4:0.2" if first_moment_key(value) and value.restarts else "never"


def _rises(value: Method) -> bool:
    return value.first_moment and not (value.name == "torch" and value.rule().momentum == 0)


def values(method: str) -> Iterator[Outer]:
    """The method with each readout and schedule that goes with it, and with a filter."""
    value: Method = parse("method", method)
    for readout in ["last"] if value.reads_out else registered("readout"):
        for name in registered("schedule"):
            if {"transient": value.plain or value.grows, "momentum": _rises(value)}.get(name, True):
                schedule = parse("schedule", name).over(12)
                made = outer(value, schedule=schedule, readout=readout, filter="clip:norm=3")
                assert isinstance(made, Outer)
                yield made


def optimizer_of(value: Any, restart: str, dtype: torch.dtype = torch.float32) -> OuterOptimizer:
    return OuterOptimizer(parameters(0, SHAPES, dtype), value, restart=restart)


def tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and all that is remembered of them, by name."""
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for number, p in enumerate(group["params"]):
            entries = {"x": p, **optimizer.state.get(p, {})}
            named |= {f"{number} {key}": value for key, value in entries.items() if isinstance(value, Tensor)}
    return named


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return [{key: value for key, value in g.items() if key != "differentiable"} for g in groups]  # of unpickled ones


@each_method
def test_resumes_in_the_middle_of_a_cycle(method: str):
    """Saved after any round and loaded, with any readout and schedule, a run ends with the same bits and numbers."""
    restart = restart_of(method)
    for value in values(method):
        straight, first, resumed = (optimizer_of(value, restart) for _ in range(3))
        run(straight, range(8))
        run(first, range(4))
        resumed.load_state_dict(through_file(first.state_dict()))
        with torch.no_grad():
            for p, q in zip(resumed.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
                p.copy_(q)
        assert unlike(tensors(resumed), tensors(first)) == []
        run(resumed, range(4, 8))
        assert unlike(tensors(resumed), tensors(straight)) == [], str(value.describe())
        assert numbers(resumed) == numbers(straight)


@each_method
def test_buffers_of_16_bit_parameters_are_float32(method: str):
    """They are so from the first round on and stay so through a state, whose digits 16 bits could not hold."""
    value = outer(method, schedule="warmup", readout="last")
    first, resumed = (optimizer_of(value, restart_of(method), torch.bfloat16) for _ in range(2))
    run(first, range(4))
    resumed.load_state_dict(through_file(first.state_dict()))
    before = {key: t for key, t in tensors(first).items() if not key.endswith((" x", " step", " mu_product"))}
    after = tensors(resumed)
    for key, buffer in before.items():
        assert buffer.dtype == torch.float32
        assert same_bits(buffer, after[key])
    assert not before or not all(torch.equal(t, t.bfloat16().float()) for t in before.values())


@pytest.mark.parametrize("method", [*METHODS, OuterSGD])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])  # noqa: S301
def test_copies_go_on_alike(method: Any, clone: Callable[[Any], Any]):
    """A deep copy or pickle of parameters and optimizer continues with the same bits, and takes new groups."""
    if method is OuterSGD:
        optimizer: OuterSGD = sgd(restart=3)
    else:
        optimizer = optimizer_of(outer(method, filter="clip:norm=2"), restart_of(method))
    run(optimizer, range(4), measure=True)
    _, twin = clone((optimizer.param_groups[0]["params"], optimizer))
    assert twin.last_round == []
    for each in (optimizer, twin):
        each.add_param_group({"params": parameters(7, SHAPES, torch.float32)})
        run(each, range(4, 8))
    assert unlike(tensors(twin), tensors(optimizer)) == []
    assert numbers(twin) == numbers(optimizer)


@each_method
def test_distributed_checkpoints_take_no_round(method: str):
    """What torch's `get_optimizer_state_dict` sets up on the way is no round, and holds all that a state holds."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build() -> tuple[nn.Module, OuterOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        readout = "last" if parse("method", method).reads_out else "ema"
        return model, OuterOptimizer(model.parameters(), outer(method, readout=readout), restart=restart_of(method))

    def go(model: nn.Module, optimizer: OuterOptimizer, rounds: range) -> None:
        for number in rounds:
            params = list(model.parameters())
            give(params, randoms(number, [tuple(p.shape) for p in params], torch.float32))
            optimizer.step()

    (model, first), (asked, second), (other, third) = build(), build(), build()
    weights = {name: value.clone() for name, value in asked.state_dict().items()}
    for p in asked.parameters():
        p.data.zero_()
    shown: Any = get_optimizer_state_dict(asked, second)
    asked.load_state_dict(weights)
    assert [group["rounds"] for group in shown["param_groups"]] == [0]
    for each in ((model, first), (asked, second)):
        go(*each, range(5))
    assert unlike(tensors(first), tensors(second)) == []
    saved: Any = get_optimizer_state_dict(model, first)
    assert {name: set(entry) for name, entry in shown["state"].items()} == {
        name: set(entry) for name, entry in saved["state"].items()
    }
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, third, copy.deepcopy(saved))
    for each in ((model, first), (other, third)):
        go(*each, range(5, 10))
    assert unlike(tensors(first), tensors(third)) == []
    assert numbers(first) == numbers(third)


@pytest.mark.parametrize("method", ["gpa", "schedule-free", "torch"])
def test_a_parameter_that_begins_after_round_1_forgets_the_rehearsal(method: str):
    """Weights loaded after a state was asked for stay, in a parameter whose first gradient comes later, too."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    ends = []
    for asks in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.full((2,), 5.0)) for _ in range(2)])
        optimizer = OuterOptimizer(model.parameters(), method)
        if asks:
            get_optimizer_state_dict(model, optimizer)
        with torch.no_grad():
            for x in model:
                x.fill_(1.0)
        for number in range(3):
            model[0].grad, model[1].grad = torch.full((2,), 0.1), torch.full((2,), 0.1) if number else None
            optimizer.step()
        ends.append([x.tolist() for x in model])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_resumes_inside_a_cycle(method: str):
    """Set down inside a round and inside a cycle of restarts, an engine goes on to the same bits and reports."""
    readout = "last" if parse("method", method).reads_out else "tail:rounds=2"
    options = {"restart": restart_of(method), "fragments": 2, "delay": 1, "mixing": 0.5}
    value = outer(method, schedule="warmup:warmup=3", readout=readout)
    straight, first = (start(value, **options) for _ in range(2))
    reports = [straight.go(range(20)), straight.go(range(20, 40))]
    first.go(range(20))
    resumed = start(value, seed=40, **options)
    resumed.load(through_file(first.state()))
    again = resumed.go(range(20, 40))
    assert [r.checksum for r in again] == [r.checksum for r in reports[1]]
    assert [(r.gain, r.cosine, r.restarted) for r in again] == [(r.gain, r.cosine, r.restarted) for r in reports[1]]
    assert unlike(all_tensors(resumed), all_tensors(straight)) == []
    assert any(r.restarted for r in again) == (restart_of(method) != "never")


def all_tensors(go: Run) -> dict[str, Tensor]:
    return {key: t for key, t in go.tensors().items() if isinstance(t, Tensor)}


def test_groups_have_methods_of_their_own():
    """Muon for matrices and AdamW for the rest, with their own restarts, are two optimizers in one."""
    matrices, others = [(3, 5), (4, 4)], [(6,), ()]
    params = parameters(0, [*matrices, *others])
    twins = [p.detach().clone().requires_grad_() for p in params]
    groups = [
        {"params": params[:2], "restart": 2},
        {"params": params[2:], "method": "adamw:lr=0.1", "readout": "ema", "schedule": "warmup", "restart": "never"},
    ]
    together = OuterOptimizer(groups, "muon:rest=0", restart=4)
    muon = OuterOptimizer(twins[:2], "muon:rest=0", restart=2)
    adamw = OuterOptimizer(twins[2:], outer("adamw", lr=0.1, readout="ema", schedule="warmup"))
    for number in range(7):
        for each in (together, muon, adamw):
            run(each, range(number, number + 1), measure=True)
        assert together.last_round == [*muon.last_round, *adamw.last_round]
    assert all(map(same_bits, params, twins))
    assert same_bits(together.readout(params[2]), adamw.readout(twins[2]))
    assert together.reads_out
    resumed = OuterOptimizer(copy.deepcopy(groups), "sgd")
    resumed.load_state_dict(through_file(together.state_dict()))
    assert numbers(resumed) == numbers(together)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=1.0),
    lambda p: OuterSGD(p, lr=1.0),
    lambda p: OuterOptimizer(p, outer("sgd", momentum=0.0, filter="clip")),
])  # fmt: skip
def test_a_flattened_state_of_sgd_without_momentum_loads(make: Callable[[Any], Any]):
    """No buffer is made up on the way that no round makes: torch would look for it in the saved state."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, twin = make(model.parameters()), make(other.parameters())
    give([*model.parameters()], randoms(0, [(2, 3), (2,)], torch.float32))
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, twin, copy.deepcopy(state), options=options)
    assert [g["lr"] for g in twin.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9, "dampening": 0.9}), ("RMSprop", {"momentum": 0.5}), ("SGD", {"momentum": 0.9})],
)
def test_a_first_gradient_after_round_1_is_torchs_own(name: str, options: dict[str, float]):
    """A torch optimizer makes its own buffers, whenever a parameter's first gradient comes."""
    cls = getattr(torch.optim, name)
    actual, expected = parameters(0, [(3,), (3,)]), parameters(0, [(3,), (3,)])
    optimizer, peer = OuterOptimizer(actual, from_torch(cls, lr=0.1, **options)), cls(expected, lr=0.1, **options)
    for number in range(4):
        for params in (actual, expected):
            give(params, randoms(number, [(3,), (3,)], params[0].dtype))
            params[1].grad = params[1].grad if number else None
        optimizer.step()
        peer.step()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------- states of other kinds


def test_a_state_of_momentum_sgd_goes_on_beside_other_slots():
    """An OuterSGD's state, or torch's, loads into momentum SGD with a readout; the buffer and the rounds go on."""
    first = OuterSGD(parameters(0, SHAPES), 0.7, 0.9, nesterov=True, restart=4)
    run(first, range(3))
    other = OuterOptimizer(first.param_groups[0]["params"], outer("nesterov", readout="tail"), restart=4)
    other.load_state_dict(first.state_dict())
    (group,) = other.param_groups
    assert (group["rounds"], group["readout"]) == (3, "tail:rounds=10")
    run(other, range(3, 5))
    assert (group["restarts"], other.reads_out) == (1, True)


def test_a_schedule_begins_at_the_numbers_of_the_loaded_state():
    """Learning rate, momentum, Nesterov's or not, and form are the state's; a group's own two count as well."""
    first = OuterSGD(parameters(0, SHAPES), 0.1, 0.5)
    run(first, range(3))
    params = parameters(0, SHAPES)
    other = OuterOptimizer(params, outer("nesterov", lr=0.7, momentum=0.9, schedule="warmup:warmup=1"))
    other.load_state_dict(first.state_dict())
    run(other, range(3, 5))
    (group,) = other.param_groups
    assert [group[name] for name in ("lr", "momentum", "nesterov", "form")] == [0.1, 0.5, False, "sum"]
    (x,), (y,) = parameters(0, [(3,)]), parameters(0, [(3,)])
    both = (
        OuterOptimizer([{"params": [x], "nesterov": False}], outer("nesterov", lr=0.7, schedule="transient")),
        OuterOptimizer([y], outer("heavy-ball", lr=0.7, schedule="transient")),
    )
    for optimizer in both:
        run(optimizer, range(3))
    assert same_bits(x, y)


def sgd(**options: Any) -> OuterSGD:
    return OuterSGD(parameters(0, SHAPES), 0.7, 0.9, **options)


def adamw() -> OuterOptimizer:
    return optimizer_of("adamw", "3")


def vector() -> OuterOptimizer:
    return OuterOptimizer(parameters(0, [(16,)]), "adamw")


REFUSED_STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "AdamW into OuterSGD": (adamw, sgd),
    "OuterSGD into AdamW": (sgd, adamw),
    "torch SGD into AdamW": (lambda: torch.optim.SGD(parameters(0, SHAPES), 0.1, 0.9), adamw),
    "torch Adam into AdamW": (lambda: torch.optim.Adam(parameters(0, SHAPES)), adamw),
    "Muon into vectors": (lambda: OuterOptimizer(parameters(0, [(4, 4)]), "muon"), vector),
    "other shapes": (lambda: OuterOptimizer(parameters(0, [(4, 4)]), "adamw"), vector),
    "other shapes of an average": (
        lambda: OuterOptimizer(parameters(0, [(3,)]), "gpa"),
        lambda: OuterOptimizer(parameters(0, [(4,)]), "gpa"),
    ),
}


@pytest.mark.parametrize("name", REFUSED_STATES)
def test_states_of_another_kind_are_refused(name: str):
    """Nothing has been loaded then: the optimizer goes on as it was."""
    first, other = (build() for build in REFUSED_STATES[name])
    for each in (first, other):
        run(each, range(2))
    before, settings = {key: t.clone() for key, t in tensors(other).items()}, numbers(other)
    with pytest.raises(ValueError, match=r"^Outer(SGD|Optimizer): "):
        other.load_state_dict(through_file(first.state_dict()))
    assert unlike(tensors(other), before) == []
    assert numbers(other) == settings


# ------------------------------------------------------------------------------------------------------- bad input


def built(method: Any, shapes: Any = tuple(SHAPES), restart: Any = "never", **slots: Any) -> Callable[[], Any]:
    return lambda: OuterOptimizer(parameters(0, shapes), outer(method, **slots), restart=restart)


ADAM = "torch:optimizer=Adam:options=lr"
COMPLEX = torch.zeros(3, dtype=torch.complex64)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "name": (built("adamx"), "did you mean adamw"),
    "own name": (built("fancy"), "TWOPHASE_SHELF"),
    "field": (built("adamw:beta3=1"), "did you mean beta2"),
    "field of a rule": (lambda: outer(OuterRule(0.7, 0.9), momentun=0.5), "^outer: 'momentun'.*did you mean momentum"),
    "field of a value": (lambda: outer(parse("method", "adamw"), beta3=0.5), "^outer: .beta3..*did you mean beta2"),
    "range of a value": (lambda: outer(parse("method", "adamw"), beta2=1.0), "beta2 is 1"),
    "no text": (lambda: from_torch(torch.optim.Adam, lr=0.1, betas=[0.8, 0.9]), "betas is .* has no text form"),
    "field twice": (lambda: outer("nesterov:lr=0.5", lr=0.7), "lr stands there twice"),
    "no equals": (built("adamw:0.3"), "adamw:lr=FLOAT"),
    "no number": (built("adamw:lr=fast"), "'fast'"),
    "no whole number": (built("muon:steps=2.5"), "steps"),
    "no truth": (built("muon:nesterov=yes"), "nesterov"),
    "lr below 0": (built("adamw:lr=-1"), "lr"),
    "lr of a preset": (built("lookahead:lr=-1"), "lr"),
    "momentum of a preset": (built("nesterov:momentum=1"), "momentum"),
    "form": (built("sgd:form=mean"), "form"),
    "lr not finite": (built("adamw:lr=nan"), "lr"),
    "momentum 1": (built("lion:momentum=1"), "momentum"),
    "beta2 1": (built("adamw:beta2=1"), "beta2 is 1.*from 0 to below 1,"),
    "eps 0": (built("adamw:eps=0"), "eps"),
    "tau 0": (built("fedyogi:tau=0"), "tau"),
    "word": (built("adamw:second=forget"), "keep, restart"),
    "scale": (built("muon:scale=huge"), "original"),
    "steps": (built("muon:steps=0"), "steps"),
    "many steps": (built("muon:steps=99"), "steps"),
    "mu": (built("gpa:mu_x=1"), "mu_x"),
    "share": (built("delayed-nesterov:every=4:share=0.3"), "share"),
    "every": (built("delayed-nesterov:every=0"), "every"),
    "muon on vectors": (built("muon", [(6,), (3,)]), "matrices"),
    "muon without rest": (built("muon:rest=0"), r"\(6,\)"),
    "complex": (lambda: OuterOptimizer([COMPLEX], "adamw"), "complex"),
    "complex filter": (lambda: OuterOptimizer([COMPLEX], outer("sgd", filter="clip")), "clip"),
    "restart of an average": (built("gpa", restart=3), "no|none"),
    "restart of Adagrad": (built("torch:optimizer=Adagrad:options=lr=0.1", restart=3), "none"),
    "auto": (built("adamw", restart="auto"), "auto"),
    "auto beside a method without momentum": (built("gpa", restart="auto"), "restart policy auto .*method"),
    "auto beside a momentum of 0": (built("sign:momentum=0", restart="auto"), "restart policy auto .*method"),
    "two readouts": (built("gpa", readout="ema"), "readout"),
    "momentum of averaging": (built("averaging", schedule="momentum"), "averaging has none"),
    "momentum without a name": (built(f"{ADAM}=0.1", schedule="momentum"), "names none.*betas=0.9/0.999"),
    "restart at momentum 0": (built("fedadagrad", restart=3), "fedadagrad has none that outlasts a round"),
    "an Outer": (lambda: outer(outer("adamw", filter="clip")), "already.*dataclasses.replace"),  # type: ignore[arg-type]
    "momentum of GPA": (built("gpa", schedule="momentum"), "gpa has none"),
    "transient of AdamW": (built("adamw", schedule="transient"), "transient"),
    "transient of Lion": (built("lion", schedule="transient"), "transient"),
    "decay without rounds": (built("adamw", schedule="linear"), "rounds"),
    "warmup": (built("adamw", schedule="warmup:warmup=0"), "warmup"),
    "schedule": (built("adamw", schedule="cosin"), "did you mean cosine"),
    "final": (built("adamw", schedule="cosine:rounds=3:final=-1"), "final"),
    "readout": (built("adamw", readout="ema:decay=1"), "decay"),
    "tail": (built("adamw", readout="tail:rounds=0"), "rounds"),
    "filter": (built("adamw", filter="clip:norm=0"), "norm"),
    "no class": (built("torch:optimizer=Adamm"), "Adamm"),
    "no module": (built("torch:optimizer=no_such_package.Adam"), "no_such_package"),
    "lr of a torch optimizer": (built(f"{ADAM}=fast"), "Adam"),
    "momentum of a torch optimizer": (built("torch:optimizer=SGD:options=lr=0.1,momentum=None"), "SGD"),
    "lr below 0 of a torch optimizer": (built(f"{ADAM}=-0.1"), "lr"),
    "no option": (built(ADAM), "Adam"),
    "no argument": (built("torch:optimizer=Adam:options=rate=1"), "rate"),
    "no optimizer": (built("torch:optimizer=collections.OrderedDict:options="), "OrderedDict"),
    "closure": (built("torch:optimizer=LBFGS:options=lr=1"), "closure"),
    "a shape of a torch optimizer": (built("torch:optimizer=Muon:options=lr=0.1"), r"refuses .* of shape \(6,\)"),
    "sparse": (built("torch:optimizer=SparseAdam:options=lr=1"), "dense"),
    "another slot's": (lambda: parse("method", parse("filter", "none")), "method"),
    "group's method": (lambda: OuterOptimizer([{"params": parameters(0), "method": "gpa"}], "sgd", 3), "none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    """What cannot be is refused where it is given, by one ValueError that names it and the remedy."""
    build, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize("policy", ["auto", parse_policy("auto")])
def test_a_policy_that_is_put_into_a_group_is_checked(policy: Any):
    """A step refuses what the constructor would, before anything has changed."""
    params = parameters(0)
    optimizer = OuterOptimizer(params, "adamw")
    run(optimizer, range(2))
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["restart"] = policy
    give(params, randoms(2))
    with pytest.raises(ValueError, match="takes steps of momentum SGD"):
        optimizer.step()
    assert all(map(same_bits, before, params))
    assert optimizer.param_groups[0]["rounds"] == 2


@pytest.mark.parametrize("key", ["method", "filter"])
def test_values_of_an_earlier_definition_are_named(key: Any):
    """A notebook's cell that runs again makes a new class; what the old one made says so, and a bare class, too."""

    def define() -> Any:
        base = {"method": AdamW, "filter": Clip}[key]
        return register("again")(dataclass(frozen=True)(type("Again", (base,), {"__module__": __name__})))

    try:
        old, _ = define()(), define()
        with pytest.raises(ValueError, match="earlier definition of Again; create it again"):
            parse(key, old)
        registered(key)["again"] = bare = type("Bare", (), {})  # type: ignore[index]
        with pytest.raises(ValueError, match=f"make {bare.__name__} a frozen dataclass"):
            parse(key, "again:lr=0.5")
    finally:
        del registered(key)["again"]  # type: ignore[attr-defined]


def test_step_hooks_run_once():
    """Torch puts the step of each class between its hooks; an `OuterSGD` built before must not add a second run."""
    OuterSGD(parameters(0), 0.1, 0.9)
    params = parameters(0)
    optimizer, calls = OuterOptimizer(params, "adamw"), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    give(params, randoms(1))
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("numbers", [{"lr": 0.1}, {"momentum": 0.5}, {"lr": 0.1, "momentum": 0.5}], ids=" ".join)
def test_a_groups_numbers_beside_a_schedule_are_refused(numbers: dict[str, float]):
    """A schedule begins at the method's numbers and would drop the group's; in the group's method they count."""
    value, x, y = outer("heavy-ball", lr=0.7, schedule="warmup:warmup=2"), *parameters(0, [(2,), (2,)])
    with pytest.raises(ValueError, match=f"^OuterOptimizer: a group has {' and '.join(numbers)} beside"):
        OuterOptimizer([{"params": [x], **numbers}], value)
    optimizer = OuterOptimizer(
        [{"params": [x], "method": "heavy-ball:lr=0.1"}, {"params": [y], "schedule": "constant", **numbers}], value
    )
    run(optimizer, range(1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, numbers.get("lr", 0.7)]


def test_a_groups_learning_rate_beside_its_method_counts():
    """It wins over the method's own, as it does where the group names no method."""
    x, y = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = OuterOptimizer(
        [{"params": [x], "method": "adamw", "lr": 0.5}, {"params": [y], "lr": 0.5}], "adamw:lr=0.1"
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
