"""A slow twin of the outer optimizer in the paper's letters: everything is copied, every equation stands as printed."""

from __future__ import annotations

import torch
from torch import Tensor

from twophase.policies.base import Answer, Never, Restart, RestartPolicy, RoundSignal, ask
from twophase.rule import OuterRule


class ReferenceOuter:
    """The outer iteration (x_t, m_t) -> (x_{t+1}, m_{t+1}) of the paper, with any restart policy.

    Letters: x parameters, m momentum buffer, g pseudo-gradient, nu outer learning rate, beta outer momentum.

    Args:
        x: initial parameters as one vector; copied.
        rule: its form decides which equations are used.
        policy: restart policy.
    """

    def __init__(self, x: Tensor, rule: OuterRule, policy: RestartPolicy | None = None) -> None:
        self.x = x.detach().clone()
        self.m = torch.zeros_like(self.x)
        self.rule, self.policy = rule, policy or Never()
        self.policy_state = self.policy.initial_state()
        self.t = self.age = 0

    def round(self, g: Tensor, extra: dict[str, float] | None = None) -> None:
        """Take an outer round with pseudo-gradient g; `extra` is what else the policy is shown."""
        self.t += 1
        m = self.m.double() if self.rule.momentum else 0 * self.m.double()  # at momentum 0 nothing is remembered
        g_norm, m_norm = float(g.double().norm()), float(m.norm())
        cosine = float(g.double() @ m) / (g_norm * m_norm) if g_norm * m_norm > 0 else 0.0
        signal = RoundSignal(self.t, self.age + 1, g_norm, m_norm, cosine, extra or {}, self.rule)
        answer = ask(self.policy, self.policy_state, signal)
        self.policy_state, self.age = answer.state, answer.age(self.age + 1)
        self._update(g, answer)

    def _update(self, g: Tensor, answer: Answer) -> None:
        nu, beta, restart = self.rule.lr, self.rule.momentum, answer.restart
        if restart is not None and restart.before:
            self.m = _restarted(self.m, g, restart)
        m = self.m
        if self.rule.form == "ema":
            m_new = beta * m + (1 - beta) * g
            step = (1 + beta) * m_new - beta * m if self.rule.nesterov else m_new
        else:
            m_new = beta * m + g
            step = g + beta * m_new if self.rule.nesterov else m_new
        if answer.step is None:
            self.x = self.x - nu * step
        else:
            self.x = self.x - answer.step.along_g * g - answer.step.along_m * m
            if answer.step.mix is not None:
                c, d = answer.step.mix
                m_new = c * m + d * g
        self.m = _restarted(m_new, g, restart) if restart is not None and not restart.before else m_new


def _restarted(m: Tensor, g: Tensor, restart: Restart) -> Tensor:
    return restart.retain * m + restart.inject * g
