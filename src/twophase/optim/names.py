"""The outer optimizers by name, as numbers without torch: three rules of `OuterSGD`, and AdamW and Muon of torch."""

from __future__ import annotations

from twophase.rule import OuterRule

RULES = {
    "averaging": OuterRule(1.0, 0.0),
    "heavy-ball": OuterRule(0.7, 0.9),
    "nesterov": OuterRule(0.7, 0.9, nesterov=True),
}
"""Rules of momentum SGD with their own numbers; that of `nesterov` is DiLoCo's published one."""
TORCH = {"adamw": (0.02, 0.9), "muon": (0.1, 0.9)}
"""Learning rate and momentum (of AdamW beta_1) of torch's optimizers."""
NAMES = (*RULES, *TORCH)


def read_filter(text: str) -> tuple[str, float]:
    """Return the kind of a filter of the pseudo-gradient and its number: `none`, `orthogonal`, or `clip:1`, a norm.

    Raises:
        ValueError: another text, or a norm that is not above 0.
    """
    kind, colon, number = text.partition(":")
    try:
        norm = float(number) if colon else 0.0
    except ValueError:
        norm = -1.0
    if (kind in ("none", "orthogonal") and not colon) or (kind == "clip" and 0 < norm < float("inf")):
        return kind, norm
    raise ValueError(f"filter is {text!r}; write none, orthogonal, or clip:1 (a norm above 0)")
