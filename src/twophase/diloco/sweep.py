"""A fragment's round on its flat vectors, part by part: what is in the cache is used for all that is done with it.

Where replicas live in several processes, a part of the pseudo-gradient travels while later ones are computed, and the
parts that have arrived take their outer step while others travel. Each part is divided, measured, stepped, restarted,
copied to the replicas and digested before the next one, so the vectors are read from memory once.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from twophase.diloco.communicator import Communicator
from twophase.diloco.flat import DIGEST_ELEMENTS, Digest
from twophase.diloco.fragment import SMALL, Fragment
from twophase.diloco.transfer import PartTransfer
from twophase.optim.functional import Sweep, Update
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.optim.part_sweep import PartSweep
from twophase.optim.products import Dots
from twophase.policies.base import AGREEMENT, MEASURED, PROBES

_PART_ELEMENTS = 4 * DIGEST_ELEMENTS
"""Elements of a part: few enough for a cache, enough to pay for the calls."""


def goes_on_device(fragment: Fragment) -> bool:
    """Whether the kernels of an accelerator write a fragment's pseudo-gradient and take its outer step."""
    return (
        not fragment.flat.is_cpu
        and not fragment.channel.lossy
        and _is_sweepable(fragment)
        and not fragment.outer_sgd.needs & {PROBES, AGREEMENT}
        and _device().is_usable(fragment)
    )


def goes_in_parts(fragment: Fragment) -> bool:
    """Whether a fragment's pseudo-gradient may travel, and its outer step be taken, part by part.

    Not where a policy must know the whole pseudo-gradient before the step, and not where it would not pay.
    """
    return (
        fragment.layout.numel > SMALL
        and fragment.flat.is_cpu
        and not fragment.channel.lossy
        and _is_sweepable(fragment)
        and not fragment.outer_sgd.needs & (MEASURED | {PROBES, AGREEMENT})
        and all(theta.is_contiguous() and theta.is_cpu for params in fragment.params() for theta in params)
    )


def _is_sweepable(fragment: Fragment) -> bool:
    """Whether one group of an `OuterSGD` holds all parameters, in their order, with buffers for all or none."""
    return _holds_all_in_order(fragment) and (_has_no_buffer(fragment) or fragment.momentum() is not None)


def _holds_all_in_order(fragment: Fragment) -> bool:
    outer = fragment.outer
    # A subclass may step in its own way, and a hook may change the gradients that a sweep does not look at.
    if type(outer) is not OuterSGD or len(outer.param_groups) != 1 or outer._optimizer_step_pre_hooks:
        return False
    (group,) = outer.param_groups
    params, views = group["params"], fragment.anchor_views
    return not group["together"] and len(params) == len(views) and all(map(operator.is_, params, views))


def _has_no_buffer(fragment: Fragment) -> bool:
    """Whether no buffer is to be read: there is none yet, or a larger momentum has left it over."""
    (group,) = fragment.outer.param_groups
    return group["momentum"] == 0 or not any(BUFFER in fragment.outer.state.get(p, ()) for p in group["params"])


def transfer_in_parts(fragment: Fragment, communicator: Communicator) -> PartTransfer:
    """Return the sum of a fragment's pseudo-gradients; each part is written just before it is sent.

    The bits are those of `Fragment.write_pseudo_gradient`.
    """
    fragment.close_gaps()
    replicas = [[theta.view(-1) for theta in params] for params in fragment.params()]

    def fill(start: int, stop: int) -> None:
        for number, first, last in fragment.layout.within(start, stop):
            offset = fragment.layout.slots[number].offset
            anchor, out = fragment.flat[first:last], fragment.gradient[first:last]
            for replica, thetas in enumerate(replicas):
                theta = thetas[number][first - offset : last - offset]
                origin = anchor if theta.dtype == anchor.dtype else anchor.to(theta.dtype).to(anchor.dtype)
                if replica == 0:
                    torch.sub(origin, theta, out=out)
                else:
                    out.add_(torch.sub(origin, theta))

    return PartTransfer(communicator, fragment.gradient, fill)


@dataclass(frozen=True, slots=True)
class RoundSweep:
    """A fragment's outer step as one sweep, with all that follows it for each part.

    Args:
        sweep: for `OuterSGD.step`.
        digests: gives those of anchor and momentum buffer that were taken on the way.
    """

    sweep: Sweep
    digests: Callable[[], Mapping[str, str]]


def write_on_device(fragment: Fragment, divisor: int) -> None:
    """Write g <- sum over this process's replicas of (a - theta_r), over `divisor`, of one that `goes_on_device`."""
    fragment.close_gaps()
    _device_sweep(fragment, divisor, restore=True, prove=False, momentum=None).write_pseudo_gradient()


def dots_on_device(fragment: Fragment) -> list[Dots]:
    """The inner products of the only group of a fragment that `goes_on_device`; its pseudo-gradient is divided."""
    momentum = fragment.momentum() if fragment.outer_sgd.param_groups[0]["momentum"] != 0 else None
    sweep = _device_sweep(fragment, fragment.divisor, restore=False, prove=False, momentum=momentum)
    totals = sweep.dots(fresh=momentum is None, angle=True)
    fragment.divisor = 1
    return [totals]


def round_sweep(fragment: Fragment, transfer: PartTransfer | None, *, restore: bool, prove: bool) -> RoundSweep | None:
    """Prepare the sweep of a fragment's round.

    Args:
        fragment: with its pseudo-gradient, to be divided by its `divisor`.
        transfer: of one that `goes_in_parts`.
        restore: also set the replicas to the new anchor.
        prove: also take the digest of the momentum buffer.

    Returns:
        The sweep; None where the fragment cannot be swept.
    """
    on_device = not fragment.flat.is_cpu
    if not (fragment.on_device if on_device else _holds_all_in_order(fragment)):
        return None
    momentum = None
    if fragment.outer_sgd.param_groups[0]["momentum"] != 0:
        momentum = fragment.momentum()
        if momentum is None:
            if not _has_no_buffer(fragment):  # some parameters have one and others have not
                return None
            momentum = fragment.new_momentum()
    divisor, fragment.divisor = fragment.divisor, 1
    if on_device:
        kernel = _device_sweep(fragment, divisor, restore=restore, prove=prove, momentum=momentum)
        return RoundSweep(kernel, lambda: kernel.digits)
    if fragment.channel.lossy:  # an infinity spoils its whole block
        fragment.close_gaps()
    digests = {"anchor": Digest(fragment.flat)}
    if prove and momentum is not None:
        digests["momentum buffer"] = Digest(momentum, beside=digests["anchor"])
    restore_until = _restorer(fragment) if restore else None

    def parts() -> Iterator[tuple[int, int]]:
        arrived = [(0, fragment.layout.numel)] if transfer is None else transfer.parts()
        for begin, stop in arrived:
            for start in range(begin, stop, _PART_ELEMENTS):
                end = min(start + _PART_ELEMENTS, stop)
                if divisor > 1:
                    fragment.gradient[start:end].div_(divisor)
                yield start, end

    gaps = fragment.layout.gaps(momentum) if momentum is not None and fragment.gaps else []

    def after(start: int, stop: int) -> None:
        # A negative factor leaves -0 there, which a digest sees, and a buffer that was loaded has not.
        if inside := [gap for gap in gaps if start <= gap.storage_offset() < stop]:
            torch._foreach_zero_(inside)
        if restore_until is not None:
            restore_until(stop)
        for digest in digests.values():
            digest.add(start, stop)

    sweep = PartSweep(
        x=fragment.flat,
        g=fragment.gradient,
        m=momentum,
        buffers=fragment.momentum_views,
        parts=parts,
        after=after,
        measure=fragment.layout.numel > SMALL and not fragment.outer_sgd.needs & MEASURED,
        dense=not fragment.gaps,
    )
    return RoundSweep(sweep, lambda: {name: digest.digits() for name, digest in digests.items()})


class OnDevice(Protocol):
    """A fragment's round by the kernels of an accelerator: the part of `device_sweep.DeviceSweep` that is used here."""

    digits: dict[str, str]
    buffers: Sequence[Tensor]
    measure: bool

    def write_pseudo_gradient(self) -> None:
        """Write g <- sum over the replicas of (x - theta_r), over the divisor."""
        ...

    def dots(self, *, fresh: bool, angle: bool) -> Dots:
        """Return the inner products before the round; g is divided on the way."""
        ...

    def run(self, update: Update) -> Dots | None:
        """Take the round."""
        ...


def _device() -> Any:
    """Return the module of the kernels' launches, which only fragments on an accelerator need."""
    return import_module("twophase.diloco.device_sweep")


def _device_sweep(fragment: Fragment, divisor: int, *, restore: bool, prove: bool, momentum: Tensor | None) -> OnDevice:
    module = _device().kernels(fragment.flat.device)
    assert module is not None, "goes_on_device() comes first"
    return _device().DeviceSweep(
        kernels=module,
        x=fragment.flat,
        g=fragment.gradient,
        m=momentum,
        buffers=fragment.momentum_views,
        slots=[(slot.offset, slot.numel) for slot in fragment.layout.slots],
        replicas=fragment.params() if restore else [],
        divisor=divisor,
        prove=prove,
        measure=not fragment.outer_sgd.needs & MEASURED,
    )


def _restorer(fragment: Fragment) -> Callable[[int], None]:
    """A function that sets the replicas' tensors that end before element `stop`, and have not been set, to the anchor.

    Whole tensors, in one call for many: they are mostly still in a cache that the parts share.
    """
    ends, replicas, first = fragment.ends, fragment.params(), 0

    def restore(stop: int) -> None:
        nonlocal first
        last = bisect_right(ends, stop)
        if first < last:
            for params in replicas:
                torch._foreach_copy_(params[first:last], fragment.anchor_views[first:last])
            first = last

    return restore
