"""Which errors are those of a full memory."""

from __future__ import annotations

import pytest

from twophase.base.errors import UsageError, is_out_of_memory, message_of


@pytest.mark.parametrize(
    "words",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
        "[enforce fail a",  # of "[enforce fail at alloc_cpu.cpp:127] ...", cut short by the full memory
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_memory_is_told(words: str) -> None:
    """Whichever library says it, in whichever words: the message has the remedy."""
    assert is_out_of_memory(RuntimeError(words))
    assert "the memory is full" in message_of(RuntimeError(words))
    assert not is_out_of_memory(UsageError("--outer.lr is -1"))
    assert not is_out_of_memory(RuntimeError("[enforce fail at inline_container.cc:659] . unexpected pos 1"))
    assert not is_out_of_memory(RuntimeError(""))
    broken = ImportError("Error importing numpy")
    broken.__cause__ = OSError(words)
    assert is_out_of_memory(broken)
