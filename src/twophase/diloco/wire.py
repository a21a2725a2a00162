"""Lossy wires for the sum of a pseudo-gradient over processes: bfloat16, or int8 with error feedback.

A float32 sum is an all-reduce. The others lose digits, so they travel in two stages, with M processes:

    stage 1   process s sends c_s = encode(x_s + e_s); e_s <- x_s + e_s - decode(c_s)
              to the owner of each M-th part, which adds decode(c_0) + decode(c_1) + ... in the order of the ranks
    stage 2   the owner sends c = encode(y + e) of its sum y to all; e <- y + e - decode(c); everyone takes decode(c)

Each process sends about two vectors of codes, however many processes there are; sums are made in the buffer's own type;
and all processes hold the same bits, which several replicas in one process have as well, since both ways run the same
functions on the same blocks. The residuals e (error feedback) carry what a round could not send into the next round, so
that over many rounds nothing is lost.

Source: error feedback, Karimireddy et al. 2019 (arXiv 1901.09847); both stages of it, Tang et al. 2019
(DoubleSqueeze, arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.codec import BLOCK, Packet, decode, encode, packet, packet_bytes
from twophase.diloco.communicator import Communicator, Pending
from twophase.diloco.transfer import Channel, Transfer

_PIECE_ELEMENTS = 1 << 19  # on a CPU: what an encoding goes over several times stays in the cache
_PIECE_ELEMENTS_ELSEWHERE = 1 << 22  # on an accelerator: fewer kernels to start


class _Residual:
    """What was not sent yet of elements `start` to `stop`; with `undoable`, also as it was at the last commit."""

    def __init__(self, start: int, stop: int, dtype: torch.dtype, device: torch.device, *, undoable: bool) -> None:
        self.span = (start, stop)
        self.value = torch.zeros(stop - start, dtype=dtype, device=device)
        self.committed = torch.zeros_like(self.value) if undoable else None


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

    # ------------------------------------------------------------------------------------------------------ a sum

    def quantize(self, tensor: Tensor, sender: int) -> None:
        """Take stage one alone: replace a replica's contribution by what the others would receive of it."""
        assert tensor.shape == (self._numel,), f"a vector of {self._numel} elements, not {tuple(tensor.shape)}"
        self._send(tensor, 0, None, self._sent[sender] if self._feedback else None)

    def launch(self, communicator: Communicator, tensor: Tensor, *, quantized: bool = False) -> Transfer:
        """Begin to replace `tensor` by its sum, in two stages; of a `quantized` tensor only the second is left."""
        assert self._under_way is None, "wait for the transfer under way, or call rollback()"
        size, rank = communicator.size, communicator.rank
        if size == 1:
            if not quantized:
                self.quantize(tensor, 0)
            self._return(tensor, (0, self._numel), None)
            return Transfer()
        assert not quantized, "several processes do both stages"
        sent, received = self._buffers(size)
        for owner, share in enumerate(self._packets(sent, size)):
            start, stop = self._span(owner, size)
            self._send(tensor[start:stop], start, share, self._sent[0] if self._feedback else None)
        pending = communicator.launch_scatter(received, sent)
        second = partial(self._second_stage, communicator, size, rank, tensor)
        self._under_way = Transfer([pending], second, partial(self._finish, size, tensor))
        return self._under_way

    def _second_stage(self, communicator: Communicator, size: int, rank: int, tensor: Tensor) -> Pending:
        """As the owner of a part, add up what came, in the order of the ranks, and send the sum to all."""
        sent, received = self._buffers(size)
        start, stop = self._span(rank, size)
        total = tensor[start:stop]
        for sender, share in enumerate(self._packets(received, size)):
            for first, last in self._pieces(total.numel()):
                if sender == 0:
                    decode(share.piece(first, last), total[first:last])
                else:
                    addend = self._workspace()[0][: last - first]
                    decode(share.piece(first, last), addend)
                    total[first:last].add_(addend)
        part = self._part(size)
        answer = sent[: packet_bytes(self.name, part)]  # the first stage is over, its buffers are free
        self._return(total, (start, stop), packet(self.name, answer, part))
        return communicator.launch_gather(received, answer)

    def _finish(self, size: int, tensor: Tensor) -> None:
        for owner, share in enumerate(self._packets(self._buffers(size)[1], size)):
            start, stop = self._span(owner, size)
            for first, last in self._pieces(stop - start):
                decode(share.piece(first, last), tensor[start + first : start + last])
        self._under_way = None

    def _return(self, total: Tensor, span: tuple[int, int], into: Packet | None) -> None:
        """Encode the part that this process owns, for stage two."""
        if self._feedback and (self._returned is None or self._returned.span != span):
            self._returned = self._residual(*span)  # another part than before: its former owner has what was left
        self._send(total, span[0], into, self._returned)

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
            owed = residual.value[offset + first : offset + last]
            torch.add(values, owed, out=work)
            encode(work, codes, values)
            decode(codes, values)
            torch.sub(work, values, out=owed)

    # ------------------------------------------------------------------------------------------------------ memory

    def _part(self, size: int) -> int:
        """Return the elements of each of `size` equal parts of the padded vector: whole blocks."""
        return -(-self._numel // (size * BLOCK)) * BLOCK

    def _span(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first element of a rank's part and the next part's, without padding; some may be empty."""
        part = self._part(size)
        return min(rank * part, self._numel), min((rank + 1) * part, self._numel)

    def _residual(self, start: int, stop: int) -> _Residual:
        return _Residual(start, stop, self._dtype, self._device, undoable=self._transactional)

    def _residuals(self) -> list[_Residual]:
        return self._sent if self._returned is None else [*self._sent, self._returned]

    def _pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        size = _PIECE_ELEMENTS if self._device.type == "cpu" else _PIECE_ELEMENTS_ELSEWHERE
        for first in range(0, numel, size):
            yield first, min(first + size, numel)

    def _workspace(self) -> tuple[Tensor, Packet]:
        """Return room for the values and the codes of a piece."""
        if self._scratch is None:
            longest = -(-max(last - first for first, last in self._pieces(self._numel)) // BLOCK) * BLOCK
            work = torch.empty(longest, dtype=self._dtype, device=self._device)
            payload = torch.empty(packet_bytes(self.name, longest), dtype=torch.uint8, device=self._device)
            self._scratch = work, packet(self.name, payload, longest)
        return self._scratch

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        """Return what is sent and what is received: the packets of all parts, in the order of their owners."""
        total = size * packet_bytes(self.name, self._part(size))
        if self._payloads is None or self._payloads[0].numel() != total:
            sent = torch.zeros(total, dtype=torch.uint8, device=self._device)  # padding stays zero
            self._payloads = sent, torch.zeros_like(sent)
        return self._payloads

    def _packets(self, payload: Tensor, size: int) -> list[Packet]:
        return [packet(self.name, share, self._part(size)) for share in payload.chunk(size)]

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, live."""
        if not self._feedback:
            return {}
        state: dict[str, Any] = {"wire": self.name, "sent": [residual.value for residual in self._sent]}
        if self._returned is not None:
            state |= {"returned": self._returned.value, "returned_start": self._returned.span[0]}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of `state_dict()`; see `Channel.load_state_dict`."""
        super().load_state_dict(state)
        if not self._feedback:
            return
        for residual, saved in zip(self._sent, state["sent"], strict=True):
            residual.value.copy_(saved)
        if "returned" in state:
            start, saved = state["returned_start"], state["returned"]
            self._returned = self._residual(start, start + saved.numel())
            self._returned.value.copy_(saved)
        self.commit()

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
            if residual.committed is not None:
                residual.committed.copy_(residual.value)

    def rollback(self) -> None:
        """Set the residuals back to the last `commit()`, and give up a transfer under way: the sum has failed.

        A residual of the second stage that began later, because this process came to own another part, is zero then.
        """
        assert self._transactional or not self._feedback, "only a channel built with transactional=True can undo"
        for residual in self._residuals():
            if residual.committed is not None:
                residual.value.copy_(residual.committed)
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
            residual.value.zero_()
        self._returned = None
        self.commit()
        self._give_up()

    def _give_up(self) -> None:
        if self._under_way is not None:
            self._under_way = self._payloads = None  # what has failed may still write into them
