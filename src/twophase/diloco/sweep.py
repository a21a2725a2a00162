"""A fragment's round on its flat vectors, part by part: each part is in the cache for the whole round.

With replicas in several processes, a part of the pseudo-gradient travels while later ones are computed. Parts that have
arrived take their outer step while others travel. Each part is divided, measured, stepped, restarted, copied to the
replicas and digested before the next one, so the vectors are read from memory once.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from twophase.diloco.communicator import Communicator
from twophase.diloco.flat import Digest, divide_
from twophase.diloco.fragment import SMALL, Fragment, progress_of
from twophase.diloco.transfer import PartTransfer
from twophase.optim.functional import PIECE_CPU, Scratch, Update, fused_is_exact, round_
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.optim.products import Dots
from twophase.policies.base import MEASURED

_PART_ELEMENTS = 1 << 18
"""Elements of a part: few enough for a cache, enough to pay for the calls."""


# ------------------------------------------------------------------------------------------ conditions of a sweep


def goes_in_parts(fragment: Fragment) -> bool:
    """Return whether a fragment's pseudo-gradient may travel, and its outer step be taken, part by part.

    Not where a policy needs the whole pseudo-gradient before the step, and not for small fragments.
    """
    return (
        fragment.layout.numel > SMALL
        and fragment.flat.is_cpu
        and not fragment.channel.lossy
        and _is_sweepable(fragment)
        and not fragment.needs & MEASURED
        and all(theta.is_contiguous() and theta.is_cpu for params in fragment.params for theta in params)
    )


def step_of(outer: OuterSGD) -> Callable[..., Any]:
    """Return an optimizer's step, without torch's wrapper unless a hook, scheduler or profiler needs it.

    Between inner steps the wrapper takes 40 us, a small model's round 400.
    """
    hooks = outer._optimizer_step_pre_hooks, outer._optimizer_step_post_hooks
    if (
        any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
        or "step" in vars(outer)
        or torch.autograd.profiler._is_profiler_enabled
    ):
        return outer.step
    step = type(outer).step
    return partial(getattr(step, "__wrapped__", step), outer)


def _is_sweepable(fragment: Fragment) -> bool:
    """Return whether one group of an `OuterSGD` holds all parameters, in order, with buffers for all or none."""
    return _holds_all_in_order(fragment) and (_has_no_buffer(fragment) or fragment.momentum() is not None)


def _holds_all_in_order(fragment: Fragment) -> bool:
    outer = fragment.outer
    # A subclass may step differently; a hook may change gradients before a sweep, or the anchor after its copy; a
    # filter needs the whole pseudo-gradient.
    hooks = outer._optimizer_step_pre_hooks or outer._optimizer_step_post_hooks
    if type(outer) is not OuterSGD or len(outer.param_groups) != 1 or hooks or fragment.filter is not None:
        return False
    (group,) = outer.param_groups
    params, views = group["params"], fragment.anchor_views
    return len(params) == len(views) and all(map(operator.is_, params, views))


def _has_no_buffer(fragment: Fragment) -> bool:
    """Return whether no buffer is to be read: it does not exist yet, or remains from a larger momentum."""
    (group,) = fragment.outer.param_groups
    return group["momentum"] == 0 or not any(BUFFER in state for state in fragment.outer.state.values())


# ------------------------------------------------------------------------------------------------ the sweep itself


def transfer_in_parts(fragment: Fragment, communicator: Communicator) -> PartTransfer:
    """Return the sum of a fragment's pseudo-gradients; each part is written just before it is sent.

    The bits are those of `Fragment.write_pseudo_gradient`.
    """
    fragment.close_gaps()
    replicas = [[theta.view(-1) for theta in params] for params in fragment.params]

    def fill(start: int, stop: int) -> None:
        for number, first, last in fragment.layout.within(start, stop):
            offset = fragment.layout.slots[number].offset
            anchor, out = fragment.flat[first:last], fragment.gradient[first:last]
            for replica, thetas in enumerate(replicas):
                theta = thetas[number][first - offset : last - offset]
                if replica == 0:
                    progress_of(anchor, theta, out)
                else:
                    out.add_(progress_of(anchor, theta))

    return PartTransfer(communicator, fragment.gradient, fill)


class FlatSweep:
    """Take a fragment's outer step on the CPU in one sweep, with restore and digests of each part; for `OuterSGD.step`.

    Args:
        fragment: fragment with its pseudo-gradient, to be divided by its `divisor`.
        momentum: momentum buffers, flat; None at momentum 0.
        transfer: sum of a fragment that `goes_in_parts`.
        restore: True also sets the replicas to the new anchor.
        prove: True also takes the digest of the momentum buffer.
    """

    def __init__(
        self, fragment: Fragment, momentum: Tensor | None, transfer: PartTransfer | None, *, restore: bool, prove: bool
    ) -> None:
        self._fragment, self._momentum, self._transfer, self._restores = fragment, momentum, transfer, restore
        self._divisor, fragment.divisor = fragment.divisor, 1
        if fragment.channel.lossy:  # an infinity makes its whole block NaN, padding included
            fragment.close_gaps()
        self._digests = {"anchor": fragment.anchor_digest or Digest(fragment.flat)}
        if prove and momentum is not None:
            self._digests["momentum buffer"] = Digest(momentum)
        self._gaps = fragment.layout.gaps(momentum) if momentum is not None and fragment.gaps else []
        self._restored = 0
        self.buffers = fragment.momentum_views
        self.measure = fragment.layout.numel > SMALL and not fragment.needs & MEASURED

    @property
    def digests(self) -> dict[str, str]:
        """Digests of `run`, by name."""
        return {name: digest.digits() for name, digest in self._digests.items()}

    def dots(self, *, fresh: bool, angle: bool) -> Dots | None:
        """Return the inner products, where an operation on whole vectors equals `dots` of the tensors bit for bit."""
        g, m = self._fragment.gradient, self._momentum
        if self._fragment.gaps or self._fragment.layout.numel > PIECE_CPU:
            return None
        if fresh or m is None:
            return float(torch.dot(g, g)), 0.0, 0.0
        return float(torch.dot(g, g)), float(torch.dot(m, m)), float(torch.dot(g, m)) if angle else math.nan

    def run(self, update: Update) -> Dots | None:
        """Take the round; return `<g, g>`, `<m, m>` and `<g, m>` before all of it, where the sweep measures."""
        flat, gradient, momentum = self._fragment.flat, self._fragment.gradient, self._momentum
        remembers = momentum is not None and not update.fresh
        update = update.simplified(unrounded=True)
        fused = fused_is_exact(flat.dtype, update)
        scratch: Scratch = {}
        products: list[Tensor] = []
        for start, stop, x, g, *m in self._parts([flat, gradient] if momentum is None else [flat, gradient, momentum]):
            if self.measure:
                pairs = ((g, g), (m[0], m[0]), (g, m[0])) if remembers else ((g, g),)
                products += [torch.dot(*pair) for pair in pairs]
            round_([x], [g], m, update, scratch, fused=fused)
            self._follow(start, stop)
        if not self.measure:
            return None
        totals = torch.stack(products).double().view(-1, 3 if remembers else 1).sum(dim=0).tolist()
        gg, mm, gm = totals if remembers else (totals[0], 0.0, 0.0)
        return gg, mm, gm

    def _parts(self, vectors: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
        """Yield start and stop of each part, and its views of the vectors, once its g has arrived and is divided."""
        arrived = [(0, self._fragment.layout.numel)] if self._transfer is None else self._transfer.parts()
        for begin, end in arrived:
            # In a small model calls cost most, above all those that torch has in Python.
            is_one = end - begin == self._fragment.layout.numel <= _PART_ELEMENTS
            views = [vectors] if is_one else zip(*(v[begin:end].split(_PART_ELEMENTS) for v in vectors), strict=True)
            for start, parts in zip(range(begin, end, _PART_ELEMENTS), views, strict=True):
                divide_(parts[1], self._divisor)
                yield start, min(start + _PART_ELEMENTS, end), *parts

    def _follow(self, start: int, stop: int) -> None:
        """Restore and digest a part that holds the values of the next round."""
        # A negative factor leaves -0 there, which changes the digest, and which a loaded buffer lacks.
        if self._gaps and (inside := [gap for gap in self._gaps if start <= gap.storage_offset() < stop]):
            torch._foreach_zero_(inside)
        if self._restores:
            # Whole tensors, many in a call: most are still in a cache that the parts share.
            first = self._restored
            self._restored = bisect_right(self._fragment.bounds, stop, key=operator.itemgetter(1))
            if first < self._restored:
                anchors = self._fragment.anchor_views[first : self._restored]
                for params in self._fragment.params:
                    torch._foreach_copy_(params[first : self._restored], anchors)
        for digest in self._digests.values():
            digest.add(start, stop)


def round_sweep(fragment: Fragment, transfer: PartTransfer | None, *, restore: bool, prove: bool) -> FlatSweep | None:
    """Return the sweep of a fragment's round; None where it cannot be swept: on a GPU, or with another optimizer."""
    if not fragment.flat.is_cpu or not _holds_all_in_order(fragment):
        return None
    momentum = None
    if fragment.outer_sgd.param_groups[0]["momentum"] != 0:
        momentum = fragment.momentum()
        if momentum is None:
            if not _has_no_buffer(fragment):  # some parameters have a buffer and others lack it
                return None
            momentum = fragment.new_momentum()
    return FlatSweep(fragment, momentum, transfer, restore=restore, prove=prove)
