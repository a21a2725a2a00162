"""Let replicas die, restart and join late: `TorchFT`, a communicator over torchft's quorum.

    with TorchFT(replica=0, replicas=4, lighthouse="http://10.0.0.1:29510", host="10.0.0.2") as communicator:
        engine = DiLoCo(model, OuterRule(0.7, 0.9, nesterov=True), inner_steps=500, communicator=communicator)
        communicator.attach(engine, save, load)     # save() and load(state): models, inner optimizers, data position
        report = engine.join()
        ...                                         # the usual loop

One process is one replica group. torchft's lighthouse, one for a run, names the members of every sync before it:

    torchft_lighthouse --bind 10.0.0.1:29510 --min_replicas 1 --join_timeout_ms 600000

Give it a `--join_timeout_ms` above the time of a round's inner steps. Then no live process is left out of a sync, and
two halves of the processes cannot continue apart.

torchft provides the quorum, the vote and the gloo groups; the engine provides the rounds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import TCPStore

from twophase.base.errors import RunError, first_line
from twophase.diloco.agreement import first_unlike
from twophase.diloco.communicator import Interrupted
from twophase.elastic import parts
from twophase.elastic.collectives import Collectives
from twophase.elastic.healing import Healing, TooSlow, bytes_of

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo

_log = logging.getLogger("twophase")
_HEAL_RATE = 0.1e9  # bytes a second, a third of the rate measured on loopback
_HEAL_MARGIN = 5.0
_POLL = 0.2
_NOTICE = 5.0  # seconds of waiting for the first sync before a log line
_WAITING = """replica %d waits at the lighthouse %s until its peers end their inner steps, or until the lighthouse's \
--min_replicas are present. It gives up after %g s (--quorum-timeout)"""
_SYNCS = 1 << 20
"""Weight of the run identity in the progress number: a run under way ranks above late joiners and earlier runs."""
_UNDER_WAY = 1 << 40
"""Progress number between any checkpoint and any run under way."""


class TorchFT(Collectives):
    """Communicate between the processes of an elastic run: see the module's beginning, and `DiLoCo.join`.

    Args:
        replica: number of this process's replica group, from 0; the same after a restart.
        replicas: number of replicas when all are present, >= 1.
        lighthouse: "http://HOST:PORT" of torchft's lighthouse.
        host: address of this machine in a trusted network, where other replicas reach it without authentication. All
            listeners of this process use it alone.
        timeout: seconds after which a collective or a heal has failed; longer than a heal takes.
        quorum_timeout: seconds to wait for the other replicas at a sync; longer than their inner steps take.
        connect_timeout: seconds to wait for a connection.
        patience: seconds that the lighthouse may be unreachable.
        min_replicas: number of replicas that a run needs to begin; None means all. Later on a sync needs most of the
            replicas of the last one, or this number where it is not None.
        start_timeout: seconds to wait for these replicas.
        max_attempts: number of consecutive failures of a sync that end the process, >= 1. Failures while another
            replica is healed count for that replica alone.
        over: function that returns whether a run of this identity (0: not yet set) has ended elsewhere; called before
            each sync.

    Raises:
        ImportError: torchft is not installed, or is another release.
        ValueError: an argument outside its range, a variable of the environment that would override one, or a replica
            of several processes.
    """

    def __init__(
        self,
        *,
        replica: int,
        replicas: int,
        lighthouse: str,
        host: str = "127.0.0.1",
        timeout: float = 120.0,
        quorum_timeout: float = 3600.0,
        connect_timeout: float = 30.0,
        patience: float = 300.0,
        min_replicas: int | None = None,
        start_timeout: float = 600.0,
        max_attempts: int = 10,
        over: Callable[[int], bool] = lambda _: False,
    ) -> None:
        parts.check_environment()
        parts.check_installed()
        if not 0 <= replica < replicas:
            raise ValueError(
                f"TorchFT: replica is {replica} and replicas is {replicas}; replica counts from 0 to replicas - 1"
            )
        self.min_replicas = replicas if min_replicas is None else min_replicas
        self.allowance = math.inf if min_replicas is None else min_replicas
        if not 1 <= self.min_replicas <= replicas:
            raise ValueError(f"TorchFT: min_replicas is {min_replicas}; it must be between 1 and replicas = {replicas}")
        self.timeout, self.quorum_timeout, self.connect_timeout = timeout, quorum_timeout, connect_timeout
        self.patience, self.start_timeout, self.max_attempts = patience, start_timeout, max_attempts
        for name in ("timeout", "quorum_timeout", "connect_timeout", "patience", "start_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"TorchFT: {name} is {getattr(self, name)}; it must be a number of seconds above 0")
        if max_attempts < 1:
            raise ValueError(f"TorchFT: max_attempts is {max_attempts}; it must be at least 1")
        self.replica, self.replicas, self._over = replica, replicas, over
        self.lighthouse, self._lighthouse_at = parts.lighthouse(lighthouse)
        self.address = parts.address_of(host, self._lighthouse_at[0])
        super().__init__()
        self._store: TCPStore | None = None
        self._healing: Healing | None = None
        self._save: Callable[[], Mapping[str, Any]] | None = None
        self._load: Callable[[Mapping[str, Any]], None] | None = None
        self._size: Callable[[], int] = lambda: 0
        self._run: Callable[[], int] = lambda: 0
        self._listening_before: set[str] = set()
        self._healed = False
        self._refusal: Exception | None = None
        self._members: list[int] = []
        self._twice: list[int] = []
        """Numbers that more than one process uses."""
        self._failures = 0
        self._syncs = 0
        self._running = False
        self._waiting_since: float | None = None
        self._closed = False
        self._hush: parts.Hush | None = None

    # -------------------------------------------------------------------------------------------- the state of a heal

    def attach(
        self, engine: DiLoCo, save: Callable[[], Mapping[str, Any]], load: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Define the state that a late joiner receives; once, before `engine.join()`.

        The engine adds its own state, and the joiner checks that both were started alike.

        Args:
            engine: engine of this process.
            save: function that returns the state without the engine's: models, inner optimizers, data position, and
                random number generators if they matter. Its tensors may be live: they are sent while all wait.
            load: function that takes a donor's `save()`, with tensors in main memory that it may change.

        Raises:
            ValueError: the state holds an object that cannot be sent, lacks the models, or needs a longer `timeout`.
        """
        saved = bytes_of(save(), "save()")
        least = sum(p.nbytes for replica in engine.replicas for p in replica.parameters())
        if saved < least:
            raise ValueError(
                f"TorchFT.attach: save() returned {saved} bytes of tensors, but the replicas alone have {least}: a "
                "restarted replica would continue with its own weights. Return the state_dict() of the models and of "
                "the inner optimizers, and the data position"
            )

        def give() -> Mapping[str, Any]:
            return {"run": _facts(engine), "engine": engine.state_dict(), "own": save()}

        def take(state: Mapping[str, Any]) -> None:
            difference = first_unlike(_facts(engine), state["run"], ("this replica", "the run that it joins"))
            if difference is not None:
                raise ValueError(f"TorchFT: {difference}; start it with the run's program and options")
            if self._running and state["engine"]["run"] != engine.run:
                raise RunError(
                    f"TorchFT: this replica belongs to run {engine.run}, but the lighthouse at {self.lighthouse} now "
                    f"serves run {state['engine']['run']}, which began later; give each run its own lighthouse"
                )
            engine.load_state_dict(state["engine"])
            load(state["own"])

        self._save, self._load, self._run = give, take, lambda: engine.run
        self._size = lambda: bytes_of(save()) + sum(f.flat.nbytes for f in engine.fragments) + _outer_bytes(engine)[0]
        bytes_of(give())  # refuses objects that cannot be sent
        # Optimizers that have not stepped yet will add the inner one's moments and the outer one's buffer.
        self._check_timeout(2 * least + _outer_bytes(engine)[1])

    def _check_timeout(self, to_come: int = 0) -> None:
        size = self._size() + to_come
        needed = size / _HEAL_RATE + _HEAL_MARGIN
        if self.timeout < needed:
            raise ValueError(
                f"TorchFT.attach: timeout is {self.timeout:g} s, but a restarted replica receives about "
                f"{size / 1e9:.2f} GB, which may take {needed:.0f} s (at {_HEAL_RATE / 1e9:g} GB/s). Pass "
                f"timeout={needed:.0f} or more (twophase train: --sync-timeout)"
            )

    # ---------------------------------------------------------------------------------------------------- a sync

    def enter(self, syncs: int, *, run: int = 0) -> None:
        """Announce this process's progress before `begin`: a run under way ranks above any checkpoint."""
        self._running = run > 0
        self._started().load_state_dict({"step": syncs + _SYNCS * run, "batches_committed": 0})

    def begin(self) -> bool:
        """Wait for the other members of the next sync; return whether this process was behind and received a state.

        Raises:
            RunError: the lighthouse is unreachable, other replicas or a donor's state do not arrive in time, or the run
                has ended without this process.
        """
        if self._over(self._run()):
            raise RunError("TorchFT: the run has ended without this replica; take the result of one that has finished")
        manager = self._started()
        assert self._healing is not None
        self._healing.disallow_checkpoint()
        self._works, self._failure, self._healed = [], None, False
        with self._lighthouse_watched() as watch:
            try:
                manager.start_quorum()
            except Exception as error:
                if error is self._refusal:
                    raise
                raise RunError(self._no_quorum(watch, error)) from None
        if manager.errored() is not None:
            error = manager.errored().original_exception
            self._fail(error)
            if isinstance(error, TooSlow):  # the next attempt would be as slow, and all would wait again
                raise RunError(f"TorchFT: {error}; the other replicas continue, and checkpoints are intact")
        else:
            self._look_around()
        return self._healed

    def commit(self) -> bool:
        """Return whether all collectives have succeeded, here and, as far as visible, in the other replicas.

        Raises:
            RunError: they have failed `max_attempts` times in a row.
        """
        with suppress(Interrupted):
            self.exchange([1.0])  # a process that has lost a sum must fail its peers' vote too
        if self._manager.should_commit():
            self._failures = 0
            self._syncs += 1
            self._running = self._running or self._manager._client.furthest >= _UNDER_WAY
            if self._syncs == 2:  # the first sync after joining: the inner optimizers have all their state
                try:
                    self._check_timeout()
                except ValueError as error:  # not an argument's fault in the middle of a run
                    raise RunError(str(error)) from None
            return True
        if self._manager._client.others_heal:
            _log.warning("a sync has failed in which a replica was to receive a peer's state; it is tried again")
            return False
        self._failures += 1
        if self._failures >= self.max_attempts:
            raise RunError(
                f"TorchFT: a sync has failed {self._failures} times in a row, at last with: {self._failure}. Look for "
                "a process that fails again and again, and at the network; checkpoints are intact, so repeat the "
                "same command"
            )
        return False

    def enough(self, count: int, needed: int | None = None) -> bool:
        """Return whether `min_replicas` are present, or as many as a sync needs; wait a moment if not.

        Raises:
            RunError: they have not joined within `start_timeout`.
        """
        now = time.monotonic()
        if count >= (self.min_replicas if needed is None else needed) and not (needed is None and self._twice):
            self._waiting_since = None
            return True
        if needed and self._waiting_since is None:
            _log.warning(
                "%d of the last sync's replicas are present, %d are needed; waiting for the rest", count, needed
            )
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since > self.start_timeout:
            if self._twice:
                raise RunError(
                    f"TorchFT: two processes are replica {self._twice[0]}, and would train on the same data; give each "
                    "its own number (twophase train: --replica)"
                )
            if needed:
                raise RunError(
                    f"TorchFT: {count} of the last sync's replicas are present after {self.start_timeout:g} s, but "
                    f"{needed} are needed, or two parts of a run could continue apart. Restart the others and repeat "
                    "this command, or take the result of a finished replica. If the others are lost, repeat it with "
                    f"min_replicas={len(self._members)} (twophase train: --min-replicas {len(self._members)})"
                )
            raise RunError(
                f"TorchFT: {count} of {self.min_replicas} replicas are present after {self.start_timeout:g} s. Start "
                "the others with the same lighthouse, lower min_replicas (twophase train: --min-replicas), or take "
                "the result of a finished replica"
            )
        time.sleep(_POLL)
        return False

    def _look_around(self) -> None:
        """Log the replicas that have left and joined, and refuse two with one number."""
        first, before, members = not self._members, set(self._members), sorted(self._group.members)
        twice = sorted({member for member in members if members.count(member) > 1})
        if twice and twice != self._twice:
            # A process that was killed and restarted at once is listed twice until its heartbeat expires.
            _log.warning("replica %s is present twice", ", ".join(map(str, twice)))
        changes = [f"replica {member} has left" for member in sorted(before - set(members))]
        changes += [f"replica {member} has joined" for member in sorted(set(members) - before)]
        if changes and not first:
            _log.warning("%s; %d of %d are present", ", ".join(changes), len(members), self.replicas)
        self._members, self._twice = members, twice
        if self.replica in twice and not self._running and self._manager._client.furthest >= _UNDER_WAY:
            self.close()
            raise RunError(
                f"TorchFT: replica {self.replica} is in this run already, and two would train on the same data; give "
                "this process its own number (twophase train: --replica). If the other has just died, repeat the "
                "command in some seconds"
            )
        ports = parts.listening() - self._listening_before if first else set()
        if ports:
            self.close()
            raise RunError(
                f"TorchFT: this process listens on {', '.join(sorted(ports))}, open to every network, though host is "
                f"{self.address}. This is a fault, and the run has been stopped for safety"
            )

    def _no_quorum(self, watch: parts.Watch, error: Exception) -> str:
        if watch.away_for:
            return (
                f"TorchFT: the lighthouse at {self.lighthouse} cannot be reached for {watch.away_for:.0f} s; start it "
                "again (torchft_lighthouse), then repeat the same command; checkpoints are intact"
            )
        return (
            f"TorchFT: the other replicas did not come to a sync within {self.quorum_timeout:g} s "
            f"({first_line(error)[:300]}). See whether they hang, or pass a quorum_timeout (twophase train: "
            "--quorum-timeout) longer than their inner steps take"
        )

    @contextmanager
    def _lighthouse_watched(self) -> Iterator[parts.Watch]:
        """Stop waiting when the lighthouse is unreachable for too long; torchft alone would wait for the quorum."""
        watch = parts.Watch(self._lighthouse_at, self.patience, self._manager._executor.give_up)
        self._manager._client.was_away = lambda: watch.missed
        watch.start()
        notice = threading.Timer(_NOTICE, _log.warning, (_WAITING, self.replica, self.lighthouse, self.quorum_timeout))
        notice.daemon = True
        if not self._members:  # later on, a wait is that for the slowest replica's inner steps
            notice.start()
        try:
            yield watch
        finally:
            watch.over.set()
            notice.cancel()

    # ------------------------------------------------------------------------------------------- joining, leaving

    def _started(self) -> Any:
        """Return torchft's manager; it starts late, because from then on the lighthouse waits for it."""
        if self._manager is not None:
            return self._manager
        if self._closed:
            raise ValueError("TorchFT: it is closed; make a new one")
        if self._save is None:
            raise ValueError(
                "TorchFT: call attach(engine, save, load) before engine.join(); a restarted replica without a peer's "
                "state would corrupt the average"
            )
        self._hush = parts.Hush()
        self._listening_before = parts.listening()
        try:
            self._store = parts.store(self.address)
            self._healing = Healing(self.address, self.timeout)
        except OSError as error:
            self.close()
            raise RunError(
                f"TorchFT: cannot listen on {self.address} ({error.strerror or error}); give an address of this "
                "machine that the other replicas reach (host=..., --host)"
            ) from None
        self._group = parts.group(self.address, self.timeout, self.connect_timeout)
        try:
            self._manager = parts.manager(
                self.address,
                self._store.port,
                pg=self._group,
                load_state_dict=self._take,
                state_dict=self._save,
                timeout=timedelta(seconds=self.timeout),
                quorum_timeout=timedelta(seconds=self.quorum_timeout),
                connect_timeout=timedelta(seconds=self.connect_timeout),
                lighthouse_addr=self.lighthouse,
                replica_id=f"replica-{self.replica}",
                checkpoint_transport=self._healing,
                quorum_retries=math.ceil(self.quorum_timeout / parts.ASK_EVERY),
            )
        except Exception as error:
            self.close()
            raise RunError(
                f"TorchFT: the lighthouse at {self.lighthouse} cannot be reached for {self.connect_timeout:g} s "
                f"({first_line(error)[:300]}); start it (torchft_lighthouse), see that its address is right, and "
                "repeat the command"
            ) from None
        return self._manager

    def _take(self, state: Mapping[str, Any]) -> None:
        assert self._load is not None
        try:
            self._load(state)
        except Exception as error:
            self._refusal = error
            raise
        self._healed = True

    def close(self) -> None:
        """Leave the group and stop listening; a second call does nothing."""
        self._closed = True
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.shutdown(wait=False)  # stops healing as well
        elif self._healing is not None:
            self._healing.shutdown()
        if self._group is not None:
            self._group.abort(errored=False)
        self._healing = self._group = self._store = None
        self._works = []
        if self._hush is not None:
            self._hush.close()
            self._hush = None

    def __enter__(self) -> TorchFT:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def _outer_bytes(engine: DiLoCo) -> tuple[int, int]:
    """Return the bytes of the outer optimizers' tensors, and of the buffers that their first steps add."""
    outers = [fragment.outer for fragment in engine.fragments]
    values = [value for outer in outers for state in outer.state.values() for value in state.values()]
    groups = [(outer, group) for outer in outers for group in outer.param_groups if group.get("momentum")]
    coming = [p for outer, group in groups for p in group["params"] if p not in outer.state]
    return sum(x.nbytes for x in values if isinstance(x, Tensor)), sum(p.nbytes for p in coming)


def _facts(engine: DiLoCo) -> dict[str, Any]:
    """Return the facts that a late joiner must share with its run; it receives the outer settings."""
    return {key: value for key, value in engine.description().items() if key != "outer settings"}
