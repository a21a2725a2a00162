"""Schedule-free AdamW as an inner optimizer; the only place that imports the package schedulefree."""

from __future__ import annotations

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor


class ScheduleFreeAdamW(AdamWScheduleFree):
    """Schedule-free AdamW: replicas exchange its average x, and its base iterate z moves along with x.

        y = (1 - beta1) z + beta1 x          the gradient is taken here, in train mode
        z <- z - lr g / (sqrt(v) + eps)
        x <- (1 - c) x + c z                 in eval mode the parameters are x

    Between `eval()` and `train()` the state named `z` holds the difference z - x. When the outer step replaces x by the
    anchor, z becomes anchor + (z - x). So z moves by x's vector, and the inner momentum x - z stays. With z left in
    place, each replica's old drift would pull the anchor back. With z = anchor, the momentum would be lost. One
    replica with outer learning rate 1 and no momentum leaves x in place, and is plain schedule-free AdamW up to
    rounding.

    Args, state and param groups are those of `schedulefree.AdamWScheduleFree`.

    Source: Defazio et al., "The road less scheduled" (2024).
    """

    @torch.no_grad()
    def eval(self) -> None:
        """Set the parameters to the average x, and `z` to z - x."""
        if self.param_groups[0]["train_mode"]:
            super().eval()
            for parameter, z in self._iterates():
                z.sub_(parameter)

    @torch.no_grad()
    def train(self) -> None:
        """Set `z` to the base iterate that belongs to the parameters, and these to y."""
        if not self.param_groups[0]["train_mode"]:
            for parameter, z in self._iterates():
                z.add_(parameter)
            super().train()

    def _iterates(self) -> list[tuple[Tensor, Tensor]]:
        return [(parameter, memory["z"]) for parameter, memory in self.state.items() if "z" in memory]
