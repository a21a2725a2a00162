"""Convert a rule together with its policy, and compute the mean outer gain of the two over a run."""

from __future__ import annotations

from twophase.policies.base import RestartPolicy, RoundSignal, Step, ask
from twophase.policies.checks import check_count
from twophase.rule import Form, OuterRule


def convert(rule: OuterRule, policy: RestartPolicy, form: Form) -> tuple[OuterRule, RestartPolicy]:
    """Return rule and policy of the same trajectory in the other form.

    `lr_sum = lr_ema (1 - momentum)` and, for a soft restart, `inject_sum = inject_ema / (1 - momentum)`.

    >>> from twophase.policies.scheduled import Soft
    >>> convert(OuterRule(7, 0.9, form="ema"), Soft(3, 0.2, 0.1), "sum")[1].inject
    1.0000000000000002
    """
    other = rule.to(form)
    return other, policy.scaled(other.injection / rule.injection)


def mean_outer_gain(rule: OuterRule, policy: RestartPolicy, rounds: int) -> float:
    """Compute the mean displacement a round that a constant unit pseudo-gradient would cause over a run.

    `(1/T) sum_t u_t` with g = 1 in every round, u_t the rule's update (or the policy's step), and m under the policy
    from m = 0. The same in both forms. A restart lowers it, so a comparison with and without restarts is also a
    comparison of two step sizes. Match this number in a control (R31 of the theory note).

    Args:
        rule: the outer rule.
        policy: the restart policy; the gain of a policy that decides from measured signals is unknown in advance.
        rounds: T >= 1, the length of the run in rounds.

    Raises:
        ValueError: rounds < 1, or an adaptive policy.

    >>> from twophase.policies.scheduled import Periodic
    >>> round(mean_outer_gain(OuterRule(1.0, 0.9), Periodic(3), 60), 2)
    1.87
    """
    check_count("mean_outer_gain", "rounds", rounds)
    if policy.needs:
        raise ValueError(f"mean_outer_gain: {policy} decides from measured signals; its gain is not known in advance")
    state, buffer, total, age, usual = policy.initial_state(), 0.0, 0.0, 0, Step.of(rule)
    for number in range(1, rounds + 1):
        answer = ask(policy, state, RoundSignal(number, age + 1, rule=rule))
        state, age, restart = answer.state, answer.age(age + 1), answer.restart
        if restart is not None and restart.before:
            buffer = restart.retain * buffer + restart.inject
        step = answer.step or usual
        total += step.along_g + step.along_m * buffer
        retained, added = answer.mixing(rule)
        buffer = retained * buffer + added
        if restart is not None and not restart.before:
            buffer = restart.retain * buffer + restart.inject
    return total / rounds
