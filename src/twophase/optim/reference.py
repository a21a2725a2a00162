"""Slow twins in the paper's letters: every tensor is copied, every equation stands as printed.

For readers and tests. The fast optimizer must agree with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twophase.policies.base import Answer, Decision, Never, Restart, RestartPolicy, RoundSignal, answered, ask
from twophase.rule import OuterRule


class ReferenceOuter:
    """The outer iteration (x_t, m_t) -> (x_{t+1}, m_{t+1}) of the paper, with any restart policy.

    Letters: x parameters, m momentum buffer, g pseudo-gradient, nu outer learning rate, beta outer momentum.

    Args:
        x: initial parameters, one tensor a block; copied.
        rule: its form decides which equations are used.
        policy: restart policy; one instance sees all blocks together.
    """

    def __init__(self, x: Sequence[Tensor], rule: OuterRule, policy: RestartPolicy | None = None) -> None:
        self.x = [block.detach().clone() for block in x]
        self.m = [torch.zeros_like(block) for block in x]
        self.rule = rule
        self.policy = policy or Never()
        self.policy_state = self.policy.initial_state()
        self.t = 0
        self.age = 0
        self.extra: dict[str, float] = {}
        """What else the policy is shown."""
        self.loss: Callable[[Sequence[Tensor]], float] | None = None
        """Of parameters, for a policy that weighs candidates."""

    def round(self, g: Sequence[Tensor]) -> None:
        """One outer round with pseudo-gradient g (one tensor a block)."""
        self.t += 1
        self.age += 1
        self._update(g, self._decide(g))

    def _update(self, g: Sequence[Tensor], answer: Answer) -> None:
        nu, beta = self.rule.lr, self.rule.momentum
        restart = answer.restart
        if restart is not None and restart.before:
            self.m = [_restarted(m, gi, restart) for m, gi in zip(self.m, g, strict=True)]
        for i, gi in enumerate(g):
            x, m = self.x[i], self.m[i]
            if self.rule.form == "ema":
                m_new = beta * m + (1 - beta) * gi
                step = (1 + beta) * m_new - beta * m if self.rule.nesterov else m_new
            else:
                m_new = beta * m + gi
                step = gi + beta * m_new if self.rule.nesterov else m_new
            if answer.step is None:
                self.x[i] = x - nu * step
            else:
                self.x[i] = x - answer.step.along_g * gi - answer.step.along_m * m
                if answer.step.mix is not None:
                    c, d = answer.step.mix
                    m_new = c * m + d * gi
            self.m[i] = m_new
        if restart is not None and not restart.before:
            self.m = [_restarted(m, gi, restart) for m, gi in zip(self.m, g, strict=True)]
        self.age = answer.age(self.age)

    def _decide(self, g: Sequence[Tensor]) -> Answer:
        gg = sum(float((gi.double() ** 2).sum()) for gi in g)
        buffers = self.m if self.rule.momentum else [0 * m for m in self.m]  # there is nothing to remember
        mm = sum(float((m.double() ** 2).sum()) for m in buffers)
        gm = sum(float((gi.double() * m.double()).sum()) for gi, m in zip(g, buffers, strict=True))
        cosine = gm / (gg * mm) ** 0.5 if gg * mm > 0 else 0.0
        probes = (
            None
            if self.loss is None
            else tuple(self._tried(g, candidate) for candidate in self.policy.candidates(self.rule))
        )
        signal = RoundSignal(self.t, self.age, gg**0.5, mm**0.5, cosine, self.extra, self.rule, probes)
        answer = ask(self.policy, self.policy_state, signal)
        self.policy_state = answer.state
        return answer

    def _tried(self, g: Sequence[Tensor], candidate: Decision) -> float:
        """The loss after a round with a candidate, which a twin takes."""
        assert self.loss is not None
        twin = ReferenceOuter(self.x, self.rule)
        twin.m = [m.clone() for m in self.m]
        twin._update(g, answered({}, candidate))
        return self.loss(twin.x)


def _restarted(m: Tensor, g: Tensor, restart: Restart) -> Tensor:
    new = restart.retain * m + restart.inject * g
    return torch.where(m.sign() * g.sign() < 0, new, m) if restart.opposed else new
