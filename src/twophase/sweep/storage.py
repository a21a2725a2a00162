"""Where a sweep's queue is kept: a journal file in the sweep's folder, or a database that all machines reach."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.base.config import UsageError
from twophase.sweep.beat import hide_password, host

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

JOURNAL = "queue.journal"
_CONNECT_SECONDS = 10
_PATIENCE_SECONDS = 30.0
"""How long the journal's lock may stay with one holder before it is taken from it."""
_PACKAGES = {"psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""Packages whose name on the index is not that of their module."""


def open_study(folder: Path, url: str | None, name: str) -> tuple[Study, BaseStorage]:
    """Create or load an Optuna study.

    Args:
        folder: the sweep's folder; its journal is the storage where there is no URL.
        url: a SQLAlchemy URL (`--storage`), or None.
        name: of the study.

    Returns:
        The study, for reading, and its storage, for writing.

    Raises:
        UsageError: Optuna or the database's driver is not installed; the URL is malformed or cannot be used; the folder
            cannot be written, or its journal is damaged.
    """
    try:
        import optuna  # noqa: PLC0415 - an extra, and a second that `import twophase` should not cost
    except ImportError:
        raise UsageError(
            "a sweep's queue needs optuna, which is not installed; pip install 'twophase[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings(), _explained(folder, url):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = _journal(folder / JOURNAL) if url is None else _database(url)
        return optuna.create_study(study_name=name, storage=storage, load_if_exists=True), storage


def check_storage(folder: Path, url: str | None) -> None:
    """Refuse a database that cannot be used, before anything is made on disk; arguments and errors as `open_study`."""
    if url is not None:
        with _explained(folder, url):
            engine: Any = getattr(_database(url), "engine", None)
            engine.dispose()


def shown(folder: Path, url: str | None) -> str:
    """The option and value that say where the queue is, without a password."""
    return f"--out {folder}: the queue {JOURNAL}" if url is None else f"--storage {hide_password(url)}"


def short_reason(error: BaseException) -> str:
    """The first line of what a database's driver said, without a password."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = hide_password(lines[0] if lines else type(error).__name__)
    return reason if len(reason) <= 200 else f"{reason[:200]}..."


def _journal(path: Path) -> BaseStorage:
    from optuna.storages import JournalStorage  # noqa: PLC0415 - as above
    from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    lock: Any = JournalLock(path)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage  # noqa: PLC0415 - as above
    from sqlalchemy.engine import make_url  # noqa: PLC0415
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise UsageError(f"--storage {url}: a database in memory is seen by one process only; name a file behind it")
    waiting = {
        "pysqlite": {"timeout": 60},  # for the write lock, not for a connection
        "psycopg": {"connect_timeout": _CONNECT_SECONDS},
        "psycopg2": {"connect_timeout": _CONNECT_SECONDS},
        "pymysql": {"connect_timeout": _CONNECT_SECONDS},
        "mysqldb": {"connect_timeout": _CONNECT_SECONDS},
        "mysqlconnector": {"connection_timeout": _CONNECT_SECONDS},
    }.get(parsed.get_driver_name(), {})
    connect = {key: value for key, value in waiting.items() if key not in parsed.query}
    for pause in (0.2, 0.5, 1.0, 2.0, None):
        try:
            # Jobs are long, and connections die meanwhile: each is asked whether it still lives before it is used.
            return RDBStorage(url, {"connect_args": connect, "pool_pre_ping": True})
        except DBAPIError as error:
            # Of several workers that start on an empty database, one makes the tables and the others stumble.
            made = any(word in str(error) for word in ("already exists", "UNIQUE", "duplicate", "Duplicate", "locked"))
            if not made or pause is None:
                raise
            time.sleep(pause)
    raise AssertionError


@contextmanager
def _explained(folder: Path, url: str | None) -> Iterator[None]:
    """Whatever goes wrong inside becomes one UsageError."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        if url is None:
            raise UsageError(f"--out {folder}: cannot be used ({error.strerror}); choose another --out") from None
        raise UsageError(f"{shown(folder, url)}: cannot be used ({short_reason(error)}); {_REACH}") from None
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        module = cause.name or "its driver"
        raise UsageError(
            f"{shown(folder, url)}: its driver {module} is not installed; pip install {_PACKAGES.get(module, module)}"
        ) from None
    except Exception as error:  # a dozen kinds, from three packages and a driver
        raise _as_usage_error(error, folder, url) from None


_REACH = "check host, port, name and password, or leave --storage out to keep the queue in the sweep's folder"


def _as_usage_error(error: Exception, folder: Path, url: str | None) -> UsageError:
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415 - as above

    where = shown(folder, url)
    if url is None:
        return UsageError(
            f"{where} is damaged ({short_reason(error)}); remove the file and repeat the command: "
            "what is finished is known from the runs' own folders"
        )
    if isinstance(error, (ArgumentError, KeyError, IndexError)) or type(error) is ValueError:
        # Their texts may repeat parts of the URL, the password among them.
        return UsageError(
            f"{where}: not the URL of a database; write it as postgresql://USER:PASSWORD@HOST/NAME, mysql://... or "
            "sqlite:////ABSOLUTE/PATH, with special characters in the password percent-encoded"
        )
    return UsageError(f"{where}: cannot be used ({short_reason(error)}); {_REACH}")


class JournalLock:
    """Lock of the journal between processes on any machines, in the form that Optuna's journal asks for.

    A symbolic link is made to take the lock, which is indivisible on NFS too, as in Optuna's own. Its weakness is that
    a holder that is killed leaves the link, and everybody waits half a minute until they dare to remove it. So a
    process holds, before the link, a lock of the system on a second file, which the system frees at a death: who has
    that lock and finds a link made on its own machine knows that the maker is dead, and removes the link at once.

    Whoever takes the lock also removes an unfinished line from the end of the journal, left by a process that was
    killed while it wrote: the next line would otherwise be glued to it, and the journal be unreadable for ever.

    Args:
        journal: the file that is locked.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self._link = journal.with_name(f"{journal.name}.lock")
        self._local_path = journal.with_name(f"{journal.name}.local-lock")
        self._local: int | None = None
        self._made = ""

    def acquire(self) -> bool:
        """Wait for the lock; it is taken from a holder on another machine that keeps it for half a minute."""
        self.release()  # from an exception that struck between acquire() and its caller's try
        try:
            self._local = self._acquire_local()
            self._acquire_link()
            self._mend()
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Free the lock, unless it was taken away; safe to repeat."""
        if self._made:
            with suppress(OSError):
                if str(self._link.readlink()) == self._made:
                    self._link.unlink()
            self._made = ""
        if self._local is not None:
            with suppress(OSError):  # explicitly: a process forked meanwhile keeps the file open
                fcntl.flock(self._local, fcntl.LOCK_UN)
            os.close(self._local)
            self._local = None

    def _acquire_local(self) -> int | None:
        """The lock among this machine's processes; None where there are no such locks or a suspended process has it."""
        file = os.open(self._local_path, os.O_RDWR | os.O_CREAT, 0o666)
        deadline, pause = time.monotonic() + _PATIENCE_SECONDS, 0.0005
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
                pause = min(1.5 * pause, 0.05)
            except OSError:
                break
            else:
                return file
        os.close(file)
        return None

    def _acquire_link(self) -> None:
        # Without the local lock the link must not bear this machine's name, or the next process here would remove it.
        here = f"{host()} " if self._local is not None else "? "
        name = f"{here}{os.getpid()} {secrets.token_hex(8)}"
        found, since, pause = None, time.monotonic(), 0.0005
        while True:
            try:
                self._link.symlink_to(name)
            except FileExistsError:
                pass
            else:
                self._made = name
                return
            holder = self._holder()
            if holder != found:
                found, since = holder, time.monotonic()
            abandoned = self._local is not None and holder is not None and holder[0].startswith(here)
            if abandoned or time.monotonic() - since > _PATIENCE_SECONDS:
                with suppress(OSError):
                    self._link.unlink()
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, 0.25)

    def _holder(self) -> tuple[str, int] | None:
        with suppress(OSError):
            return str(self._link.readlink()), self._link.lstat().st_mtime_ns
        return None

    def _mend(self) -> None:
        with self.journal.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - (1 << 20))
            file.seek(start)
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.truncate(start + tail.rfind(b"\n") + 1)
