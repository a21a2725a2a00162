"""A sparse wire: the largest elements of the error-feedback residual travel, in a few bits each.

With M senders, g_r the contribution of sender r, and e_r its residual, 0 at first,

    e_r <- 0.95 e_r + g_r,   s_r = Q(top-k(e_r)),   e_r <- e_r - s_r,   sum = s_0 + s_1 + ... in the order of the ranks

The vector is cut into chunks (`formats.TopK`), and top-k takes the k largest magnitudes of each. Q keeps the sign and
rounds the magnitude to the nearest of 2^(bits-1) levels. They lie from the least of the k, t, to the largest, both in
float32:

    step = (largest - t) / (2^(bits-1) - 1),    code = round((|e| - t) / step),    s = sign(e) (t + code step)

So no element loses more than its own size, and 0 stays 0. Senders choose different elements, so a sum of packets is not
a packet. Each packet goes to all (all-gather), and all add them in the order of the ranks, to the same bits. A process
sends M - 1 packets, where an all-reduce sends 2 (M - 1) / M vectors.

A residual holds most of the contributions, not a rounding error: a cancelled sum always restores it. It does the work
of an outer momentum, so SparseLoCo's rule is momentum 0 with a learning rate near 1.

Source: SparseLoCo, arXiv 2508.15706. (There Q's levels are those of a whole tensor; here each chunk has its own.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from twophase.diloco.communicator import Communicator
from twophase.diloco.formats import TopK
from twophase.diloco.transfer import Transfer
from twophase.diloco.wire import LossyChannel

DECAY = 0.95
"""Share of the residual that stays in it until the next round."""


class SparseChannel(LossyChannel):
    """Sum a pseudo-gradient on `topk:RATIO:BITS`; arguments as of `LossyChannel`, and always transactional."""

    def __init__(self, name: str, numel: int, **options: Any) -> None:
        super().__init__(name, numel, **{**options, "transactional": True})
        sparse = TopK.of(name)
        assert sparse is not None, "the name of a sparse wire"
        self._bits, self._word_bits, self._most = sparse.bits, sparse.word_bits, 2 ** (sparse.bits - 1) - 1
        self._chunks, self._length = sparse.chunks(numel)
        self._per_chunk = self._length // sparse.ratio
        self._pending = False
        """True if the residuals have changed since the last commit."""

    def quantize(self, tensor: Tensor, sender: int) -> None:
        """Replace a replica's contribution by the values that its peers would receive."""
        self._sum([self._take(tensor, sender)], tensor)

    def launch(self, communicator: Communicator, tensor: Tensor, *, quantized: bool = False) -> Transfer:
        """Begin to replace `tensor` by its sum, in one stage; a `quantized` tensor is complete."""
        assert self._under_way is None, "wait for the transfer under way, or call withdraw()"
        if communicator.size == 1:
            if not quantized:
                self.quantize(tensor, 0)
            return Transfer()
        assert not quantized, "several processes send packets"
        sent = self._take(tensor, 0)
        received = sent.new_empty(communicator.size * len(sent))

        def finish() -> None:
            self._sum(received.chunk(communicator.size), tensor)
            self._under_way = None

        self._under_way = Transfer([communicator.launch_gather(received, sent)], finish=finish)
        return self._under_way

    def _take(self, tensor: Tensor, sender: int) -> Tensor:
        """Add a contribution to a sender's residual; subtract and return the packet that is sent."""
        assert tensor.shape == (self._numel,), f"a vector of {self._numel} elements, not {tuple(tensor.shape)}"
        self._pending = True
        residual = self._sent[sender].value
        residual.mul_(DECAY).add_(tensor)
        ends, words = zip(*(self._encode(residual, *rows) for rows in self._rows()), strict=True)
        packet = torch.cat([*ends, *words])
        self._add(packet, residual, -1)
        return packet

    def _sum(self, packets: Sequence[Tensor], total: Tensor) -> None:
        total.zero_()
        for packet in packets:
            self._add(packet, total, 1)

    def _encode(self, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of chunks `first` to `last`: least and largest magnitude of each, and its elements."""
        start, stop = first * self._length, last * self._length
        x = values[start:stop]
        if stop > self._numel:
            x = functional.pad(x, (0, stop - self._numel))
        x = x.view(-1, self._length)
        magnitudes, indices = x.abs().topk(self._per_chunk, dim=1, sorted=False)
        ends = torch.stack(magnitudes.aminmax(dim=1), 1).float()
        ends += ends[:, 1:] * 0  # NaN unless finite, which makes the whole chunk NaN: divergence shows
        least, step = self._steps(ends)
        codes = ((magnitudes - least) / step).round_().nan_to_num_(0.0).clamp_(0, self._most).long()
        codes += (x.gather(1, indices) < 0).long() << (self._bits - 1)
        return ends.view(torch.uint8).flatten(), _packed((indices << self._bits) + codes, self._word_bits).flatten()

    def _add(self, packet: Tensor, total: Tensor, sign: int) -> None:
        """Add the elements of a packet, times `sign`, to a vector."""
        ends, octets = packet[: 8 * self._chunks], packet[8 * self._chunks :].view(self._chunks, -1)
        ends = ends.clone().view(torch.float32).view(-1, 2)  # a copy: packets begin at any byte
        for first, last in self._rows():
            least, step = self._steps(ends[first:last])
            words = _unpacked(octets[first:last], self._word_bits, self._per_chunk)
            magnitudes = least + (words & self._most) * step
            negative = (words >> (self._bits - 1) & 1).bool()
            starts = torch.arange(first, last, device=words.device)[:, None] * self._length
            # Padding sends only zeros, which change no element.
            indices = ((words >> self._bits) + starts).clamp_(max=self._numel - 1)
            total.index_add_(0, indices.flatten(), torch.where(negative, -magnitudes, magnitudes).flatten(), alpha=sign)

    def _steps(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least magnitude and the step of each chunk, as columns in the buffer's own type."""
        least, largest = ends.to(self._dtype).unsqueeze(2).unbind(1)
        return least, (largest - least) / self._most

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Yield first chunk and end of each piece that is encoded or decoded at once."""
        ends = sorted({-(-stop // self._length) for _, stop in self._pieces(self._numel)})
        yield from zip([0, *ends], ends, strict=False)

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, live; before a commit also those of the last one, which `withdraw` restores."""
        committed = {"committed": [residual.committed for residual in self._sent]} if self._pending else {}
        return super().state_dict() | committed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of `state_dict()`; see `Channel.load_state_dict`."""
        super().load_state_dict(state)
        self._pending = "committed" in state
        for residual, saved in zip(self._sent, state.get("committed", ()), strict=False):
            residual.committed = saved.to(residual.value, copy=True)

    def commit(self) -> None:
        """Record the present residuals for `withdraw`."""
        super().commit()
        self._pending = False

    def withdraw(self) -> None:
        """Cancel a transfer under way, and restore the residuals of the last `commit()`."""
        super().withdraw()
        self._pending = False


def _packed(words: Tensor, width: int) -> Tensor:
    """Return rows of int64 words of `width` bits as rows of bytes, the low bits first."""
    bits = (words.unsqueeze(2) >> torch.arange(width, device=words.device) & 1).flatten(1)
    octets = functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(words), -1, 8)
    return (octets << torch.arange(8, device=words.device)).sum(2).to(torch.uint8)


def _unpacked(octets: Tensor, width: int, count: int) -> Tensor:
    """Return rows of `count` words from the bytes of `_packed`."""
    bits = (octets.unsqueeze(2).long() >> torch.arange(8, device=octets.device) & 1).flatten(1)[:, : count * width]
    return (bits.view(-1, count, width) << torch.arange(width, device=octets.device)).sum(2)
