"""The shelf's methods against independent optimizers: golden trajectories, restarts, and what a round reports.

Golden ones are of 24 rounds in float64. Pseudo-gradients depend on the parameters, so that what goes wrong once grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outers import flat, give, noises, parameters, randoms
from replicas import same_bits
from twins import REFERENCES
from twophase.diloco.engine import DiLoCo
from twophase.optim.methods import from_torch
from twophase.optim.optimizer import OuterOptimizer
from twophase.restart import Restart, RestartPolicy, RoundSignal, State
from twophase.shelf.base import SLOTS, Method
from twophase.shelf.methods import DelayedNesterov
from twophase.shelf.outer import outer
from twophase.shelf.text import parse, registered

ROUNDS = 24
PERIOD = 3
METHODS = [
    *registered("method"),
    "torch:optimizer=Adagrad:options=lr=0.1",
    "torch:optimizer=Adam:options=lr=0.1,betas=0.8/0.95",
]


def can_restart(text: str) -> bool:
    """Averages have no first moment, nor has Adagrad; FedAdagrad's is g itself at its default momentum 0."""
    method: Method = parse("method", text)
    return method.restarts and "Adagrad" not in text


def give_round(number: int, params: Sequence[Any]) -> None:
    """Set the pseudo-gradients of a round: a pull to 0 and noise."""
    noise = noises(1000 + number, tuple(p.shape for p in params), params[0].dtype)
    give(params, [0.3 * p.detach() + n for p, n in zip(params, noise, strict=True)])


def assert_alike(actual: Any, optimizer: Any, expected: Any, oracle: Any, rounds: range = range(ROUNDS)) -> None:
    """An optimizer and its oracle go the same way, each with its own parameters."""
    for number in rounds:
        for params, each in ((actual, optimizer), (expected, oracle)):
            give_round(number, params)
            each.step()
        torch.testing.assert_close(flat(actual), flat(expected), rtol=1e-12, atol=1e-12)


def assert_golden(text: str) -> None:
    reference = REFERENCES[text]
    actual, expected = (parameters(0, reference.shapes) for _ in range(2))
    assert_alike(actual, OuterOptimizer(actual, text), expected, reference.build(expected))


def golden(*names: str) -> Any:
    return pytest.mark.parametrize("text", [text for text in REFERENCES if text.partition(":")[0] in names])


# --------------------------------------------------------------------------------------------- golden trajectories


@golden("sgd")
def test_sgd(text: str):
    """Momentum SGD is torch's, and in EMA form the restart paper's."""
    assert_golden(text)


@golden("heavy-ball", "nesterov", "memoryless", "averaging", "lookahead", "snoo", "muloco-1", "slowmo")
def test_presets(text: str):
    """Presets are torch's SGD with their numbers; SlowMo is its own equation with an inner learning rate."""
    assert_golden(text)


@golden("adamw")
def test_adamw(text: str):
    """AdamW is torch's Adam and AdamW."""
    assert_golden(text)


@golden("fedadam", "fedyogi", "fedadagrad")
def test_fedopt(text: str):
    """FedOpt is the paper's Algorithm 2; FedAdagrad without momentum is torch's Adagrad from `tau^2` on."""
    assert_golden(text)


@golden("sign")
def test_sign(text: str):
    """The sign of the momentum is pytorch-optimizer's SignSGD."""
    assert_golden(text)


@golden("lion")
def test_lion(text: str):
    """Lion is pytorch-optimizer's."""
    assert_golden(text)


@golden("muon")
def test_muon(text: str):
    """Muon is torch's, on matrices; vectors beside them take Nesterov's step in sum form."""
    assert_golden(text)


@golden("delayed-nesterov")
def test_delayed_nesterov(text: str):
    """Delayed Nesterov is the paper's Algorithm 3, and of a delay of 1 Nesterov momentum."""
    assert_golden(text)


@golden("gpa")
def test_gpa(text: str):
    """GPA is the paper's three sequences, and with equal coefficients Nesterov momentum of `lr (1 - mu)`."""
    assert_golden(text)


@golden("schedule-free")
def test_schedule_free(text: str):
    """Schedule-free averaging is the reference SGD of its authors' package."""
    assert_golden(text)


@golden("torch")
def test_torch(text: str):
    """A torch optimizer by its text form is that optimizer."""
    assert_golden(text)


def test_every_value_names_its_test():
    """The file and the function that a registered value names exist."""
    root = Path(__file__).parents[2]
    for slot in SLOTS:
        shelf = {name: cls for name, cls in registered(slot).items() if cls.__module__.startswith("twophase.shelf.")}
        for name, cls in shelf.items():
            file, _, function = cls.test.partition("::")
            assert (root / file).is_file(), name
            assert not function or f"def {function}(" in (root / file).read_text(encoding="utf-8"), name


@golden("gpa", "schedule-free")
def test_averages_are_read_out(text: str):
    """What is evaluated is the mean that their papers evaluate: of all z, or with geometric weights."""
    x = parameters(0, [(5,)])
    optimizer, z = OuterOptimizer(x, text), x[0].detach().numpy().copy()
    start, lr, iterates = z.copy(), optimizer.param_groups[0]["lr"], []
    for number in range(ROUNDS):
        give_round(number, x)
        z = z - lr * x[0].grad.numpy()
        iterates.append(z)
        optimizer.step()
    if text.startswith("gpa"):
        mu = 0.7 if "0.7" in text else 0.6
        ages = np.arange(ROUNDS)[::-1]
        mean = mu**ROUNDS * start + (1 - mu) * (mu ** ages[:, None] * iterates).sum(axis=0)
    else:
        mean = np.mean(iterates, axis=0)
    np.testing.assert_allclose(optimizer.readout(x[0]).numpy(), mean, rtol=1e-12, atol=1e-12)


def test_from_torch_is_the_class():
    """`from_torch` takes a class of torch.optim or of another module, and its arguments."""
    assert str(from_torch(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9))) == (
        "torch:optimizer=Adam:options=lr=0.1,betas=0.8/0.9"
    )
    assert str(from_torch(torch.optim.Muon, lr=0.1)) == "torch:optimizer=Muon:options=lr=0.1"  # takes matrices alone
    for wrong in ("Adam", torch.optim.Adam([torch.zeros(1)])):
        with pytest.raises(ValueError, match="is no class of optimizers"):
            from_torch(wrong)  # type: ignore[arg-type]
    package = pytest.importorskip("pytorch_optimizer", reason="the package pytorch-optimizer is not installed")
    method = from_torch(package.Lion, lr=0.02, betas=(0.8, 0.99))
    actual, expected = (parameters(0) for _ in range(2))
    assert_alike(actual, OuterOptimizer(actual, method), expected, package.Lion(expected, 0.02, (0.8, 0.99)))


def test_values_take_numpys_numbers():
    """Numbers of a NumPy array, as of a grid, have the text form of plain ones, in a pair too."""
    method = from_torch(torch.optim.Adam, lr=np.float64(0.1), betas=tuple(np.array([0.8, 0.9])))
    assert method == from_torch(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9))
    assert str(DelayedNesterov(every=np.int64(2))) == str(DelayedNesterov(every=2))


def test_muon_takes_tensors_as_matrices():
    """A kernel of a convolution is the matrix of its first dimension; `none` leaves the learning rate as it is."""
    kernel, matrix = (parameters(0, [shape]) for shape in ((4, 3, 2), (4, 6)))
    for params, text in ((kernel, "muon"), (matrix, "muon:scale=none")):  # wide: `original` does not scale either
        optimizer = OuterOptimizer(params, text)
        for number in range(3):
            give(params, [randoms(1000 + number, [(24,)])[0].view(params[0].shape)])
            optimizer.step()
    assert same_bits(kernel[0].view(4, 6), matrix[0])


@pytest.mark.parametrize("nesterov", ["true", "false"])
def test_muons_rest_follows_a_momentum_schedule(nesterov: str):
    """In the first round of a momentum that rises from 0 a bias moves by rest times g, as momentum SGD would."""
    matrix, bias = parameters(0, [(3, 2), (2,)])
    optimizer = OuterOptimizer([matrix, bias], outer(f"muon:rest=0.4:nesterov={nesterov}", schedule="momentum"))
    give_round(0, [matrix, bias])
    expected = bias.detach() - 0.4 * bias.grad
    optimizer.step()
    torch.testing.assert_close(bias.detach(), expected, rtol=1e-12, atol=1e-12)


def test_lookahead_and_slow_momentum_in_the_engine():
    """One replica with a preset is the optimizer that wraps the inner one: pytorch-optimizer's Lookahead over SGD."""
    package = pytest.importorskip("pytorch_optimizer", reason="the package pytorch-optimizer is not installed")
    models = [nn.Linear(3, 2).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    engine = DiLoCo(models[0], outer("lookahead", lr=0.6), inner_steps=5)
    wrapped = package.Lookahead(second, k=5, alpha=0.6)
    for number in range(5 * ROUNDS):
        for model in models:
            give_round(number, list(model.parameters()))
        first.step()
        engine.step()
        wrapped.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- restarts


@dataclass(frozen=True, slots=True)
class Before(RestartPolicy):
    """A restart before the mixing in every third round."""

    retain: float
    inject: float

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Look at the round's number."""
        return state, None if signal.round % PERIOD else Restart(self.retain, self.inject, before=True)


@dataclass(frozen=True)
class Event:
    """What a restart does to m; W, the weight that m holds, goes the same way."""

    retain: float = 0.0
    inject: float = 0.0
    before: bool = False

    def act(self, memory: Any, key: str | None, g: Tensor, *, second: bool) -> None:
        """Change a reference's memory."""
        m = memory[key]
        memory[key] = self.retain * m + self.inject * (g if isinstance(m, Tensor) else g.numpy())
        if "W" in memory:
            memory["W"] = abs(self.retain) * memory["W"] + abs(self.inject)
        for name in ("v", "W2") if second else ():
            memory.pop(name, None)


EVENTS = {
    "3": Event(),
    "soft:3:0.4:0.2": Event(0.4, 0.2),
    "soft:3:-0.1:0.3": Event(-0.1, 0.3),
    "test-before:0.4:0.2": Event(0.4, 0.2, before=True),
    "test-before:0.0:0.0": Event(before=True),
}
RESTARTABLE = [text for text, reference in REFERENCES.items() if reference.key is not None]


@pytest.mark.parametrize("policy", EVENTS)
@pytest.mark.parametrize("text", RESTARTABLE)
def test_restarts(register_policy: Callable[[str], Any], text: str, policy: str):
    """Restarted, a method is the reference with its first-moment buffer, and its bias correction, changed by hand."""
    register_policy("test-before")(Before)
    reference, event = REFERENCES[text], EVENTS[policy]
    actual, expected = (parameters(0, reference.shapes) for _ in range(2))
    optimizer, oracle = OuterOptimizer(actual, text, restart=policy), reference.build(expected)
    for number in range(1, 3 * PERIOD + 2):
        give_round(number, actual)
        optimizer.step()
        give_round(number, expected)
        for moment in ("before", "step", "after"):
            if moment == "step":
                oracle.step()
            elif number % PERIOD == 0 and event.before == (moment == "before"):
                for p in expected:
                    event.act(oracle.state[p], reference.key, p.grad * reference.unit, second="second=restart" in text)
        torch.testing.assert_close(flat(actual), flat(expected), rtol=1e-12, atol=1e-12)
    assert optimizer.param_groups[0]["restarts"] == 3


def test_adamw_restarts_as_a_new_one():
    """With its second moment restarted, each cycle is that of a new torch.optim.AdamW."""
    actual, expected = (parameters(0) for _ in range(2))
    optimizer = OuterOptimizer(actual, "adamw:lr=0.1:second=restart", restart=PERIOD)
    for start in range(0, ROUNDS, PERIOD):
        new = torch.optim.Adam(expected, 0.1, (0.9, 0.99))
        assert_alike(actual, optimizer, expected, new, range(start, start + PERIOD))


@pytest.mark.parametrize("text", [f"adamw:second={second}" for second in ("keep", "restart")])
def test_a_parameter_without_gradient_restarts(text: str):
    """A parameter without a gradient in the round of a restart has its moments restarted with the others'."""
    x, rest = parameters(0, [(3,), (4,)])
    optimizer = OuterOptimizer([x, rest], text, restart=2)
    give_round(0, [x, rest])
    optimizer.step()
    give_round(1, [x])
    rest.grad = None
    optimizer.step()
    for p in (x, rest):
        assert not optimizer.state[p]["momentum_buffer"].any()
        assert optimizer.state[p]["second_moment"].any() == text.endswith("keep")


@pytest.mark.parametrize("text", list(filter(can_restart, METHODS)))
def test_a_period_beyond_the_run_is_no_restart(text: str):
    """A period of at least the number of rounds leaves every bit as it is; the shortest one does not."""
    runs = []
    for restart in ("never", 8, 1):
        params = parameters(0, [(3, 5), (4, 4)])
        optimizer = OuterOptimizer(params, text, restart=restart)
        for number in range(8):
            give_round(number, params)
            optimizer.step()
        runs.append(flat(params))
    assert same_bits(runs[0], runs[1])
    assert not same_bits(runs[0], runs[2])


# --------------------------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (text, schedule)
        for text in METHODS
        for schedule in ("constant", "warmup:warmup=5:start=0.1", "momentum:warmup=4")
        if "momentum" not in schedule or parse("method", text).rule().momentum != 0
    ],
)
def test_reports(text: str, schedule: str):
    """Norms, cosine and gain of each round are those of the pseudo-gradient, the buffer before it, and the step."""
    restarts = can_restart(text)
    params = parameters(0, [(3, 5), (4,)])
    restart = "soft:3:0.4:0.2" if restarts else "never"
    optimizer = OuterOptimizer(params, outer(text, schedule=schedule), restart=restart)
    for number in range(8):
        give_round(number, params)
        states = [optimizer.state.get(p, {}) for p in params]
        before, g = flat(params), flat([p.grad for p in params])
        m = flat([s.get("momentum_buffer", torch.zeros_like(p)) for s, p in zip(states, params, strict=True)])
        optimizer.step(measure=True)
        (report,) = optimizer.last_round
        along = float((before - flat(params)) @ g)
        assert report.gain == pytest.approx(along / float(g @ g), rel=1e-9)
        assert report.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
        assert report.buffer_norm == pytest.approx(float(m.norm()), rel=1e-12)
        assert report.cosine == pytest.approx(float(m @ g / (m.norm() * g.norm())) if m.any() else 0.0, abs=1e-12)
        assert report.restarted == (restarts and number % 3 == 2)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4)])
@pytest.mark.parametrize("options", [{"method": "muon"}, {"method": "nesterov", "filter": "orthogonal"}], ids=str)
def test_an_empty_matrix_stays_empty(shape: tuple[int, int], options: dict[str, str]):
    """A layer without inputs has no singular values, and nothing to step."""
    params = [torch.nn.Parameter(torch.zeros(shape)), torch.nn.Parameter(torch.ones(2, 3))]
    optimizer = OuterOptimizer(params, outer(**options))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert params[0].shape == shape
    assert not torch.equal(params[1], torch.ones(2, 3))
