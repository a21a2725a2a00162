"""What ends a program: a mistake of the user's, a failure while running, and a full memory."""

FULL = (RuntimeError, OSError, ImportError, MemoryError)
"""What may be raised where memory runs out."""
_FULL = (
    "can't allocate memory",
    "annot allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't start new thread",
    "failed to map segment",
)
_TORCH = "[enforce fail at alloc_cpu"  # torch builds its message in a full memory too, and it may be cut short


class UsageError(ValueError):
    """A mistake of the user's, with the remedy in its message; the command line ends with status 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device or this machine is out of memory; for the latter torch has no exception of its own."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without its import
        return True
    if isinstance(error, ImportError) and error.__cause__ is not None:  # SciPy's, which says that it is broken
        return is_out_of_memory(error.__cause__)
    text = str(error)
    cut = len(text) >= len("[enforce fail") and _TORCH.startswith(text)
    return isinstance(error, FULL) and (cut or any(phrase in text for phrase in (*_FULL, _TORCH)))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def message_of(error: BaseException) -> str:
    """Return what to say of an error: its own message, with the remedy where this machine's memory is full."""
    if isinstance(error, UsageError | RunError) or not is_out_of_memory(error):
        return str(error) or type(error).__name__
    reason = (str(error).splitlines() or [""])[0] or "no more is known"
    return (
        f"the memory is full ({reason}). Give a smaller model, fewer --replicas, --data.batch-size or "
        "--data.validation-windows, fewer --workers, or a GPU to each replica by torchrun. Saved state is intact"
    )


class RunError(RuntimeError):
    """A failure that ends a run, with the remedy in its message; the command line ends with status 1."""
