"""Lossy wires for the sum of a pseudo-gradient over processes: bfloat16, or int8 with error feedback.

A float32 sum is an all-reduce. The lossy wires have two stages, with M processes:

    stage 1   process s sends c_s = encode(x_s + e_s); e_s <- x_s + e_s - decode(c_s)
              to the owner of each M-th part, which adds decode(c_0) + decode(c_1) + ... in the order of the ranks
    stage 2   the owner sends c = encode(y + e) of its sum y to all; e <- y + e - decode(c); everyone takes decode(c)

Each process sends about two vectors of codes, for any number of processes. Sums are made in the buffer's own type. All
processes hold the same bits. Several replicas in one process give these bits as well, because both run the same
functions on the same blocks. The error-feedback residuals e (int8 only) carry a round's rounding errors into the next
round, so that over many rounds nothing is lost.

Source: error feedback, Karimireddy et al. 2019 (arXiv 1901.09847); both stages of it, Tang et al. 2019
(DoubleSqueeze, arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.communicator import Communicator, Pending
from twophase.diloco.transfer import Channel, Transfer

BLOCK = 128
"""Elements that share a scale in int8; parts and pieces are whole numbers of blocks."""

_LEVELS = 127
_SMALLEST = 2.0**-149  # the least positive float32
_LARGEST_SCALE = float.fromhex("0x1.020406p+121")  # `_LEVELS` times the next float32 above overflows
_PIECE_ELEMENTS = 1 << 19  # on a CPU: the passes of an encoding stay in the cache
_PIECE_ELEMENTS_ELSEWHERE = 1 << 22  # on an accelerator: fewer kernels to start


# ------------------------------------------------------------------------------------------------------------- codes


@dataclass(frozen=True, slots=True)
class Packet:
    """Hold encoded elements.

    Args:
        codes: codes of the elements, int8 or bfloat16.
        scales: scales, float32, of blocks of `BLOCK` elements (the last may be shorter) for int8; else None.
    """

    codes: Tensor
    scales: Tensor | None

    def piece(self, start: int, stop: int) -> Packet:
        """Return elements `start`, a multiple of `BLOCK`, to `stop`."""
        scales = None if self.scales is None else self.scales[start // BLOCK : -(-stop // BLOCK)]
        return Packet(self.codes[start:stop], scales)


def packet_bytes(name: str, numel: int) -> int:
    """Return bytes of `numel` encoded elements, a multiple of `BLOCK`: bfloat16 has 2 an element, int8 132 a block."""
    return 2 * numel if name == "bfloat16" else numel + 4 * (numel // BLOCK)


def packet(name: str, payload: Tensor, numel: int) -> Packet:
    """Return the packet of `numel` elements, a multiple of `BLOCK`, that lies in `packet_bytes(name, numel)` bytes."""
    if name == "bfloat16":
        return Packet(payload.view(torch.bfloat16), None)
    return Packet(payload[:numel].view(torch.int8), payload[numel:].view(torch.float32))


def encode(values: Tensor, into: Packet, scratch: Tensor) -> None:
    """Write the codes of `values`.

    bfloat16 rounds to the nearest, ties to even. For int8, with the elements x of a block,

        scale = max|x| / 127 + 2^-149,    code = round(x / scale), ties to even, in -127 ... 127,

    so that code * scale is within scale / 2 of x, to rounding, for every finite float32. (2^-149 matters to subnormal
    scales only: rounded down, they could not reach max|x|.)

    A block with an element that is not finite gets the scale NaN, and decodes to NaN as a whole. So divergence shows on
    every process. In bfloat16 such an element is unchanged.

    Args:
        values: vector, 1-D, float32 or float64.
        into: packet of as many elements.
        scratch: vector of the same shape and dtype; overwritten.
    """
    if into.scales is None:
        into.codes.copy_(values)
        return
    torch.abs(values, out=scratch)
    scales = into.scales
    for scale, magnitudes in _by_block(scales, scratch):
        scale.copy_(torch.amax(magnitudes, dim=1, keepdim=True))
    nan_unless_finite = scales * 0
    scales.div_(_LEVELS).add_(_SMALLEST).clamp_(max=_LARGEST_SCALE).add_(nan_unless_finite)
    for scale, x, quotient in _by_block(scales, values, scratch):
        torch.div(x, scale, out=quotient)  # not times 1 / scale, which overflows for a subnormal scale
    into.codes.copy_(scratch.round_())  # within -127 ... 127 by themselves, since scale >= max|x| / 127, to rounding


def decode(source: Packet, out: Tensor) -> None:
    """Write the elements of a packet to `out`, 1-D of as many elements, float32 or float64."""
    out.copy_(source.codes)
    if source.scales is not None:
        for scale, codes in _by_block(source.scales, out):
            codes.mul_(scale)


def _by_block(scales: Tensor, *vectors: Tensor) -> Iterator[list[Tensor]]:
    """Yield scales as a column and vectors as matrices, a row a block: the whole blocks, then a shorter last one."""
    numel = vectors[0].numel()
    whole = numel // BLOCK
    if whole:
        yield [scales[:whole, None], *(vector[: whole * BLOCK].view(whole, BLOCK) for vector in vectors)]
    if numel > whole * BLOCK:
        yield [scales[whole:, None], *(vector[None, whole * BLOCK :] for vector in vectors)]


# ----------------------------------------------------------------------------------------------------------- channel


@dataclass(frozen=True, slots=True)
class _Residual:
    """Hold the error-feedback residuals of the elements from `start` on."""

    start: int
    value: Tensor


class LossyChannel(Channel):
    """Sum a pseudo-gradient in codes that lose digits: bfloat16, or int8 with error feedback.

    Besides the residuals it holds one encoded vector to send, one received, and scratch for a piece.

    Args:
        name: name of the wire, "bfloat16" or "int8".
        numel: elements of the fragment, >= 1.
        dtype: type of the tensors that are summed and of the residuals, float32 or float64.
        device: device of the tensors.
        senders: number of replicas in this process that call `quantize`, else 1; each has its own residual.
    """

    lossy = True

    def __init__(
        self,
        name: str,
        numel: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        senders: int,
    ) -> None:
        super().__init__(name, numel, dtype=dtype, device=device)
        self._feedback = name != "bfloat16"
        self._sent = [self._residual(0, numel) for _ in range(senders)] if self._feedback else []
        self._returned: _Residual | None = None  # of the part that this process owns, from the first sum on
        self._under_way: Transfer | None = None
        self._payloads: tuple[Tensor, Tensor] | None = None
        self._scratch: tuple[Tensor, Packet] | None = None

    def quantize(self, tensor: Tensor, sender: int) -> None:
        """Take stage one alone: replace a replica's contribution by the values that its peers would receive."""
        assert tensor.shape == (self._numel,), f"a vector of {self._numel} elements, not {tuple(tensor.shape)}"
        self._send(tensor, 0, None, self._sent[sender] if self._feedback else None)

    def launch(self, communicator: Communicator, tensor: Tensor, *, quantized: bool = False) -> Transfer:
        """Begin to replace `tensor` by its sum, in two stages; a `quantized` tensor needs only the second."""
        assert self._under_way is None, "wait for the transfer under way, or call withdraw()"
        size, rank = communicator.size, communicator.rank
        if size == 1:
            if not quantized:
                self.quantize(tensor, 0)
            self._return(tensor, 0, None)
            return Transfer()
        assert not quantized, "several processes do both stages"
        sent, received = self._buffers(size)
        for start, stop, share in self._shares(sent, size):
            self._send(tensor[start:stop], start, share, self._sent[0] if self._feedback else None)

        def second_stage() -> Pending:
            """Add up the contributions to this process's part in the order of the ranks, and send the sum to all."""
            shares = self._shares(received, size)
            start, stop, _ = shares[rank]
            total = tensor[start:stop]
            for sender, (_, _, share) in enumerate(shares):
                for first, last in self._pieces(len(total)):
                    addend = self._workspace()[0][: last - first] if sender else total[first:last]
                    decode(share.piece(first, last), addend)
                    if sender:
                        total[first:last].add_(addend)
            # The first stage is over, its buffers are free.
            self._return(total, start, self._shares(sent, size)[0][2])
            return communicator.launch_gather(received, sent.chunk(size)[0])

        def finish() -> None:
            for start, stop, share in self._shares(received, size):
                for first, last in self._pieces(stop - start):
                    decode(share.piece(first, last), tensor[start + first : start + last])
            self._under_way = None

        self._under_way = Transfer([communicator.launch_scatter(received, sent)], second_stage, finish)
        return self._under_way

    def _return(self, total: Tensor, start: int, into: Packet | None) -> None:
        """Encode the part that this process owns, for stage two."""
        owned = self._returned
        if self._feedback and (owned is None or (owned.start, len(owned.value)) != (start, len(total))):
            # Another part than before: its former owner has its residual.
            self._returned = self._residual(start, len(total))
        self._send(total, start, into, self._returned)

    def _send(self, tensor: Tensor, start: int, into: Packet | None, residual: _Residual | None) -> None:
        """Encode the elements from `start` on piece by piece; the residual takes their rounding errors.

        The tensor becomes its decoded values, or scratch with `into`, the packet for other processes.
        """
        for first, last in self._pieces(tensor.numel()):
            work, codes = self._workspace()
            values, work = tensor[first:last], work[: last - first]
            codes = codes.piece(0, last - first) if into is None else into.piece(first, last)
            if residual is None:
                encode(values, codes, work)
                if into is None:  # else the sum replaces it
                    decode(codes, values)
                continue
            offset = start - residual.start
            errors = residual.value[offset + first : offset + last]
            torch.add(values, errors, out=work)
            encode(work, codes, values)
            decode(codes, values)
            torch.sub(work, values, out=errors)

    # ------------------------------------------------------------------------------------------------------ memory

    def _residual(self, start: int, numel: int) -> _Residual:
        return _Residual(start, torch.zeros(numel, dtype=self._dtype, device=self._device))

    def _pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        size = _PIECE_ELEMENTS if self._device.type == "cpu" else _PIECE_ELEMENTS_ELSEWHERE
        for first in range(0, numel, size):
            yield first, min(first + size, numel)

    def _workspace(self) -> tuple[Tensor, Packet]:
        """Return buffers for the values and the codes of a piece."""
        if self._scratch is None:
            longest = -(-max(last - first for first, last in self._pieces(self._numel)) // BLOCK) * BLOCK
            work = torch.empty(longest, dtype=self._dtype, device=self._device)
            payload = torch.empty(packet_bytes(self.name, longest), dtype=torch.uint8, device=self._device)
            self._scratch = work, packet(self.name, payload, longest)
        return self._scratch

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the buffers to send and to receive: the packets of all parts, in the order of their owners."""
        total = size * packet_bytes(self.name, self._part(size))
        if self._payloads is None or self._payloads[0].numel() != total:
            sent = torch.zeros(total, dtype=torch.uint8, device=self._device)  # padding stays zero
            self._payloads = sent, torch.zeros_like(sent)
        return self._payloads

    def _part(self, size: int) -> int:
        """Return the elements of each of `size` equal parts of the padded vector: whole blocks."""
        return -(-self._numel // (size * BLOCK)) * BLOCK

    def _shares(self, payload: Tensor, size: int) -> list[tuple[int, int, Packet]]:
        """Return first element, end and packet of each owner's part; without padding, so that some are empty."""
        part = self._part(size)
        ends = [min(rank * part, self._numel) for rank in range(size + 1)]
        packets = [packet(self.name, share, part) for share in payload.chunk(size)]
        return list(zip(ends, ends[1:], packets, strict=False))

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, live."""
        if not self._feedback:
            return {}
        state: dict[str, Any] = {"wire": self.name, "sent": [residual.value for residual in self._sent]}
        if self._returned is not None:
            state |= {"returned": self._returned.value, "returned_start": self._returned.start}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of `state_dict()`; see `Channel.load_state_dict`."""
        super().load_state_dict(state)
        for residual, saved in zip(self._sent, state.get("sent", ()), strict=True):
            residual.value.copy_(saved)
        if "returned" in state:
            self._returned = self._residual(state["returned_start"], state["returned"].numel())
            self._returned.value.copy_(state["returned"])

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        if not self._feedback:
            return super()._misfit(state)
        if state.get("wire") != self.name:
            saved = "no residuals" if state.get("wire") is None else f"residuals of wire {state['wire']}"
            return f"the state has {saved}, this channel residuals of wire {self.name}"
        sent, returned, start = state["sent"], state.get("returned"), state.get("returned_start", 0)
        if len(sent) != len(self._sent):
            return f"the state has {len(sent)} senders' residuals, this channel {len(self._sent)}"
        for number, saved in enumerate(sent):
            if saved.shape != (self._numel,):
                return f"sender {number}'s residual has shape {tuple(saved.shape)} instead of ({self._numel},)"
        if returned is not None and (returned.dim() != 1 or not 0 <= start <= self._numel - returned.numel()):
            return f"the part's residual, {tuple(returned.shape)} at {start}, is not within {self._numel} elements"
        return None

    def withdraw(self) -> None:
        """Cancel a transfer under way.

        The residuals hold its rounding errors in the place of earlier ones; the next sum takes all of the rest.
        """
        if self._under_way is not None:
            self._under_way = self._payloads = None  # a failed collective may still write into them

    def clear(self) -> None:
        """Set all residuals to zero, and cancel a transfer under way: the state after construction."""
        for residual in self._sent:
            residual.value.zero_()
        self._returned = None
        self.withdraw()
