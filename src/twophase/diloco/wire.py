"""What travels when a pseudo-gradient is summed over processes: float32, bfloat16, or int8 with error feedback.

A float32 sum is one all-reduce. The others lose digits, so they travel in two stages, with M processes:

    stage 1   process s sends c_s = encode(x_s + e_s); e_s <- x_s + e_s - decode(c_s)
              to the owner of each M-th part, which adds decode(c_0) + decode(c_1) + ... in the order of the ranks
    stage 2   the owner sends c = encode(y + e) of its sum y to all; e <- y + e - decode(c); everyone takes decode(c)

Each process sends about two vectors of codes, however many processes there are; sums are made in the buffer's own type;
and all processes hold the same bits, which several replicas in one process find as well, since both ways run the same
functions on the same blocks. The residuals e (error feedback) carry what a round could not send into the next one, so
that over many rounds nothing is lost.

Source: error feedback, Karimireddy et al. 2019 (arXiv 1901.09847); both stages of it, Tang et al. 2019
(DoubleSqueeze, arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.codec import BLOCK, Packet, decode, encode, packet, packet_bytes
from twophase.diloco.communicator import Communicator, Pending
from twophase.diloco.transfer import Channel, Transfer

_PIECE_ELEMENTS = 1 << 19  # on a CPU: what an encoding goes over several times stays in the cache
_PIECE_ELEMENTS_ELSEWHERE = 1 << 22  # on an accelerator: fewer kernels to start


# --- what is remembered ---------------------------------------------------------------------------------------------


class _Residual:
    """What was not sent yet. `old` is read and `new` is written; they differ in memory if updates can be undone."""

    def __init__(self, start: int, stop: int, dtype: torch.dtype, device: torch.device, *, transactional: bool) -> None:
        self.span = (start, stop)  # of the fragment's elements
        self.value = torch.zeros(stop - start, dtype=dtype, device=device)
        self._spare = torch.zeros_like(self.value) if transactional else None
        self._changed = False

    @property
    def old(self) -> Tensor:
        return self._spare if self._changed and self._spare is not None else self.value

    @property
    def new(self) -> Tensor:
        return self.value if self._spare is None else self._spare

    def written(self) -> None:
        """All of `new` is written: it is what the next update reads."""
        self._changed = True

    def commit(self) -> None:
        if self._changed and self._spare is not None:
            self.value, self._spare = self._spare, self.value
        self._changed = False

    def rollback(self) -> None:
        self._changed = False

    def load(self, value: Tensor) -> None:
        self.value.copy_(value)
        self._changed = False

    def clear(self) -> None:
        self.value.zero_()
        self._changed = False


# --- the channel ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Route:
    """The owners of the parts: `size` equal parts of a vector of `numel` elements, padded to whole blocks."""

    numel: int
    size: int
    rank: int

    @property
    def part(self) -> int:
        """Elements of a part, padding included."""
        return -(-self.numel // (self.size * BLOCK)) * BLOCK

    def span(self, rank: int) -> tuple[int, int]:
        """First element of a part and the one after its last, without padding; in a short vector some are empty."""
        return min(rank * self.part, self.numel), min((rank + 1) * self.part, self.numel)


class LossyChannel(Channel):
    """A channel with codes that lose digits: bfloat16, or int8 with error feedback.

    Besides the residuals it holds one encoded vector to send, one received, and scratch for a piece.

    Args:
        name: "bfloat16" or "int8".
        numel: elements of the fragment, >= 1.
        dtype: float32 or float64, of the tensors that are summed and of the residuals.
        device: of the tensors.
        senders: replicas in this process that `quantize` is called for, else 1; each has a residual of its own.
        error_feedback: whether to carry what was not sent into the next round; None means for int8 only.
        transactional: whether `rollback()` is possible; it costs a second copy of the residuals.
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
        error_feedback: bool | None = None,
        transactional: bool = False,
    ) -> None:
        super().__init__(name, numel, dtype=dtype, device=device)
        self._transactional = transactional
        self._feedback = name == "int8" if error_feedback is None else error_feedback
        self._sent = [self._residual(0, numel) for _ in range(senders)] if self._feedback else []
        self._returned: _Residual | None = None  # of the part that this process owns, from the first sum on
        self._under_way: Transfer | None = None
        self._payloads: tuple[Tensor, Tensor] | None = None
        self._scratch: tuple[Tensor, Packet] | None = None

    def quantize(self, tensor: Tensor, sender: int) -> None:
        """Take stage one alone: replace a replica's contribution by what the others would receive of it."""
        self._check(tensor)
        residual = self._sent[sender] if self._feedback else None
        self._send(tensor, 0, None, residual)
        _written(residual)

    def launch(self, communicator: Communicator, tensor: Tensor, *, quantized: bool = False) -> Transfer:
        """Begin to replace `tensor` by its sum, in two stages; of a `quantized` one only the second is left."""
        self._check(tensor)
        assert self._under_way is None, "wait for the transfer under way, or call rollback()"
        route = _Route(self._numel, communicator.size, communicator.rank)
        if route.size == 1:
            if not quantized:
                self.quantize(tensor, 0)
            self._return(tensor, route, None)
            return Transfer()
        assert not quantized, "several processes do both stages"
        pending = self._first_stage(communicator, route, tensor)
        second = partial(self._second_stage, communicator, route, tensor)
        self._under_way = Transfer([pending], second, partial(self._finish, route, tensor))
        return self._under_way

    def _first_stage(self, communicator: Communicator, route: _Route, tensor: Tensor) -> Pending:
        sent, received = self._buffers(route)
        residual = self._sent[0] if self._feedback else None
        for owner, share in enumerate(self._packets(sent, route)):
            start, stop = route.span(owner)
            self._send(tensor[start:stop], start, share, residual)
        _written(residual)
        return communicator.launch_scatter(received, sent)

    def _second_stage(self, communicator: Communicator, route: _Route, tensor: Tensor) -> Pending:
        """The owner's part: add up what came, in the order of the ranks, and send the sum to all."""
        sent, received = self._buffers(route)
        start, stop = route.span(route.rank)
        total = tensor[start:stop]
        for sender, share in enumerate(self._packets(received, route)):
            for first, last in self._pieces(total.numel()):
                if sender == 0:
                    decode(share.piece(first, last), total[first:last])
                else:
                    addend = self._workspace()[0][: last - first]
                    decode(share.piece(first, last), addend)
                    total[first:last].add_(addend)
        answer = sent[: packet_bytes(self.name, route.part)]  # the first stage is over, its buffers are free
        self._return(total, route, packet(self.name, answer, route.part))
        return communicator.launch_gather(received, answer)

    def _finish(self, route: _Route, tensor: Tensor) -> None:
        for owner, share in enumerate(self._packets(self._buffers(route)[1], route)):
            start, stop = route.span(owner)
            for first, last in self._pieces(stop - start):
                decode(share.piece(first, last), tensor[start + first : start + last])
        self._under_way = None

    def _return(self, total: Tensor, route: _Route, into: Packet | None) -> None:
        """Stage two's encoding of the part that this process owns."""
        span = route.span(route.rank)
        if self._feedback and (self._returned is None or self._returned.span != span):
            self._returned = self._residual(*span)  # another part than before: its former owner has what was left
        self._send(total, span[0], into, self._returned)
        _written(self._returned)

    def _send(self, tensor: Tensor, start: int, into: Packet | None, residual: _Residual | None) -> None:
        """Encode `tensor` piece by piece, its codes in `into` and what they lack in the residual.

        The tensor becomes what is received of it, or scratch where `into` is given.

        Args:
            tensor: 1-D.
            start: where it starts in the fragment.
            into: None where no other process reads the codes.
            residual: None without error feedback.
        """
        for first, last in self._pieces(tensor.numel()):
            work, codes = self._workspace()
            values, work = tensor[first:last], work[: last - first]
            codes = codes.piece(0, last - first) if into is None else into.piece(first, last)
            if residual is None:
                encode(values, codes, work)
                if into is None:  # else it comes back with the sum
                    decode(codes, values)
                continue
            offset = start - residual.span[0]
            place = slice(offset + first, offset + last)
            torch.add(values, residual.old[place], out=work)
            encode(work, codes, values)
            decode(codes, values)
            torch.sub(work, values, out=residual.new[place])

    def _check(self, tensor: Tensor) -> None:
        assert tensor.shape == (self._numel,), f"a vector of {self._numel} elements, not {tuple(tensor.shape)}"
        assert tensor.dtype == self._dtype
        assert tensor.is_contiguous()

    # --- memory

    def _residual(self, start: int, stop: int) -> _Residual:
        return _Residual(start, stop, self._dtype, self._device, transactional=self._transactional)

    def _residuals(self) -> list[_Residual]:
        return self._sent if self._returned is None else [*self._sent, self._returned]

    def _pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        size = _PIECE_ELEMENTS if self._device.type == "cpu" else _PIECE_ELEMENTS_ELSEWHERE
        for first in range(0, numel, size):
            yield first, min(first + size, numel)

    def _workspace(self) -> tuple[Tensor, Packet]:
        """Room for the values and the codes of a piece."""
        if self._scratch is None:
            longest = -(-max(last - first for first, last in self._pieces(self._numel)) // BLOCK) * BLOCK
            work = torch.empty(longest, dtype=self._dtype, device=self._device)
            payload = torch.empty(packet_bytes(self.name, longest), dtype=torch.uint8, device=self._device)
            self._scratch = work, packet(self.name, payload, longest)
        return self._scratch

    def _buffers(self, route: _Route) -> tuple[Tensor, Tensor]:
        """What is sent and what is received: the packets of all parts, in the order of their owners."""
        total = route.size * packet_bytes(self.name, route.part)
        if self._payloads is None or self._payloads[0].numel() != total:
            sent = torch.zeros(total, dtype=torch.uint8, device=self._device)  # padding stays zero
            self._payloads = sent, torch.zeros_like(sent)
        return self._payloads

    def _packets(self, payload: Tensor, route: _Route) -> list[Packet]:
        return [packet(self.name, share, route.part) for share in payload.chunk(route.size)]

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, live."""
        if not self._feedback:
            return {}
        state: dict[str, Any] = {"wire": self.name, "sent": [residual.old for residual in self._sent]}
        if self._returned is not None:
            state |= {"returned": self._returned.old, "returned_start": self._returned.span[0]}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of `state_dict()`; see `Channel.load_state_dict`."""
        super().load_state_dict(state)
        if not self._feedback:
            return
        for residual, saved in zip(self._sent, state["sent"], strict=True):
            residual.load(saved)
        if "returned" in state:
            start, saved = state["returned_start"], state["returned"]
            self._returned = self._residual(start, start + saved.numel())
            self._returned.load(saved)

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

    def commit(self) -> None:
        """Keep the residuals as they are now."""
        for residual in self._residuals():
            residual.commit()

    def rollback(self) -> None:
        """Set the residuals back to the last `commit()`, and give up a transfer under way: the sum has failed.

        A residual of the second stage that began later, because this process came to own another part, is zero then.
        """
        assert self._transactional or not self._feedback, "only a channel built with transactional=True can undo"
        for residual in self._residuals():
            residual.rollback()
        self._give_up()

    def withdraw(self) -> None:
        """Give up a transfer under way that was not applied: `rollback()` where that is possible.

        Elsewhere the residuals keep what the codes of this transfer lacked, in the place of what those before it did:
        a rounding error either way, and the next sum takes all of the rest.
        """
        if self._transactional:
            self.rollback()
        else:
            self._give_up()

    def clear(self) -> None:
        """Forget all residuals, and give up a transfer under way: as after construction."""
        for residual in self._sent:
            residual.clear()
        self._returned = None
        self._give_up()

    def _give_up(self) -> None:
        if self._under_way is not None:
            self._under_way = self._payloads = None  # what has failed may still write into them


def _written(residual: _Residual | None) -> None:
    if residual is not None:
        residual.written()
