"""Liveness of the ranks of a worker: each has a connection to rank 0, with a heartbeat in it.

The connections are made before anything is loaded, and each side notices at once if the other one
ends. A rank that is stopped, or on a machine that is gone, is noticed by its silence. Everything
here runs in threads of its own: collectives and forward passes block the others.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import time
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.parallel import ParallelConfig

log = logging.getLogger(__name__)

BEAT_S = 0.25
"""Interval between signs of life."""
MISSED_MAX = 12
"""Beats without a sign of a rank that serves, before it counts as lost: 3 s. They are counted and
not timed, so that a pause of this process, or of the whole machine, is no silence of others."""
MISSED_MAX_STARTING = 120
"""The same while ranks start: an import or a page fault of a cold file may hold the interpreter."""
JOIN_S = 60.0
"""How long rank 0 is looked for, and waits for the other ranks."""
_GREETING = struct.Struct("!4sHH")
_MAGIC = b"ANTR"
_WELCOME = struct.Struct("!H")
_BEAT = b"."


class RankLost(Exception):
    """A rank has ended, or is silent."""


class Attendance:
    """Which ranks have joined and were seen lately: a state machine without clock or sockets."""

    def __init__(self, ranks: int) -> None:
        self._missed: dict[int, int | None] = dict.fromkeys(range(1, ranks))  # None: not joined
        self._serving = False
        self._joining = 0

    @property
    def complete(self) -> bool:
        return None not in self._missed.values()

    def join(self, rank: int) -> str | None:
        """A rank has connected; why it is refused, if it is."""
        if rank not in self._missed:
            return f"there is no rank {rank}"
        if self._missed[rank] is not None:
            return f"rank {rank} has joined twice"
        self._missed[rank] = 0
        return None

    def seen(self, rank: int) -> None:
        self._missed[rank] = 0

    def serve(self) -> None:
        """All ranks have loaded the model: from here on, silence is short."""
        self._serving = True

    def beat(self) -> str | None:
        """Another interval has passed; why the ranks are lost, if they are."""
        if not self.complete:
            self._joining += 1
            if self._joining * BEAT_S > JOIN_S:
                absent = [rank for rank, missed in self._missed.items() if missed is None]
                return f"ranks {absent} have not joined within {JOIN_S:.0f} s"
        limit = MISSED_MAX if self._serving else MISSED_MAX_STARTING
        for rank, missed in self._missed.items():
            if missed is not None:
                self._missed[rank] = missed + 1
                if missed >= limit:
                    return f"rank {rank} has been silent for {missed * BEAT_S:.1f} s"
        return None


class Membership:
    """Rank 0's side: accepts the other ranks, and watches them until it is closed.

    `lost` is called once, in a thread of its own, with the reason.
    """

    def __init__(
        self,
        listening: socket.socket,
        ranks: int,
        store_port: int,
        lost: Callable[[str], None],
        watched: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._attendance = Attendance(ranks)
        self._ranks, self._store_port = ranks, store_port
        self._lost, self._watched = lost, watched
        self._closing = Event()
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)  # noqa: FBT003
        self._selector.register(listening, selectors.EVENT_READ)
        self._listening = listening
        self._connections: dict[socket.socket, int] = {}
        self._thread = Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        self._attendance.serve()

    def stop(self) -> None:
        """Stop watching: the ranks may end."""
        self._closing.set()
        self._thread.join()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait, once the watch has stopped, until all ranks have ended; whether they have."""
        due = time.monotonic() + timeout_s
        for connection in self._connections:
            try:
                while (left_s := due - time.monotonic()) > 0:
                    connection.settimeout(left_s)
                    if not connection.recv(4096):
                        break
                else:
                    return False
            except TimeoutError:
                return False
            except OSError:  # it is gone
                continue
        return True

    def close(self) -> None:
        """Close the connections, once the watch has stopped."""
        self._listen()
        for key in list(self._selector.get_map().values()):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            connection.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            reason = self._watch()
        except Exception as error:
            # Unwatched, ranks would wait for one that has ended.
            log.exception("watch failed")
            reason = f"the watch over the ranks has failed: {error}"
        if reason is not None and not self._closing.is_set():
            self._lost(reason)

    def _watch(self) -> str | None:
        """Watch until it is closed, or the ranks are lost  ->  why they are."""
        due = time.monotonic() + BEAT_S
        reason = None
        while reason is None and not self._closing.is_set():
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                reason = reason or self._on_ready(connection)
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_S
                reason = reason or self._watched() or self._attendance.beat()
                self._send_beats()
                self._listen()
        return reason

    def _listen(self) -> None:
        if self._listening not in self._selector.get_map():
            self._selector.register(self._listening, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError as error:
            # Too many open files, perhaps: the next one would fail, too, before the next beat.
            log.warning("connection not accepted", extra={"reason": error.strerror})
            self._selector.unregister(self._listening)
            return
        accepted.setblocking(False)  # noqa: FBT003
        self._selector.register(accepted, selectors.EVENT_READ)

    def _on_ready(self, connection: socket.socket) -> str | None:
        if connection is self._listening:
            self._accept()
            return None
        try:
            content = connection.recv(4096)
        except BlockingIOError:
            return None
        except OSError:
            content = b""
        if connection in self._connections:
            rank = self._connections[connection]
            if not content:
                return f"rank {rank} has ended"
            self._attendance.seen(rank)
            return None
        return self._greeted(connection, content)

    def _greeted(self, connection: socket.socket, content: bytes) -> str | None:
        """The first bytes of a connection; whatever is not one of our ranks is closed.

        One that comes when all have joined is refused; before, no other one would take its place.
        """
        complete = self._attendance.complete
        greeting = _read_greeting(content)
        refused = None if greeting is None else self._join(greeting)
        if greeting is not None and refused is None:
            self._connections[connection] = greeting.rank
            with suppress(OSError):
                connection.sendall(_WELCOME.pack(self._store_port))
            return None
        self._selector.unregister(connection)
        connection.close()
        if refused is not None and complete:
            log.warning("rank refused", extra={"reason": refused})
            return None
        return refused

    def _join(self, greeting: _Greeting) -> str | None:
        """Record a rank that has come; return why it is refused."""
        rank, ranks = greeting
        refused = self._attendance.join(rank)
        if ranks != self._ranks:
            return f"rank {rank} was started as one of {ranks} ranks, not of {self._ranks}"
        return refused

    def _send_beats(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # the next read finds what is wrong
                connection.send(_BEAT)


class _Greeting(NamedTuple):
    rank: int
    ranks: int


def _read_greeting(content: bytes) -> _Greeting | None:
    """Read a greeting; None if it is none of ours."""
    greeting = content[: _GREETING.size]
    if len(greeting) < _GREETING.size or not greeting.startswith(_MAGIC):
        return None
    _, rank, ranks = _GREETING.unpack(greeting)
    return _Greeting(rank, ranks)


def address_of(parallel: ParallelConfig) -> tuple[str, int]:
    """Host and port at which rank 0 listens for the others; port 0: any free one."""
    if not parallel.init_address:
        return "127.0.0.1", 0
    host, _, port = parallel.init_address.rpartition(":")
    return host, int(port)


def join(address: tuple[str, int], rank: int, ranks: int) -> tuple[socket.socket, int]:
    """Connect a rank to rank 0, which may have yet to start  ->  the connection, the store's port.

    Raises:
        RankLost: Rank 0 is not there, or does not answer.
    """
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=JOIN_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLost(f"rank 0 is not at {address[0]}:{address[1]}: {error}") from error
            time.sleep(BEAT_S)
    connection.sendall(_GREETING.pack(_MAGIC, rank, ranks))
    welcome = b""
    while len(welcome) < _WELCOME.size:
        if not (more := connection.recv(_WELCOME.size - len(welcome))):
            connection.close()
            raise RankLost("rank 0 has refused this rank")
        welcome += more
    return connection, *_WELCOME.unpack(welcome)


class Attending:
    """Another rank's side: sends signs of life, and notices the end of rank 0, or its silence."""

    def __init__(self, connection: socket.socket, lost: Callable[[str], None]) -> None:
        self._connection, self._lost = connection, lost
        self._closing = Event()
        Thread(target=self._run, name="ranks", daemon=True).start()

    def close(self) -> None:
        """The end of rank 0 is expected from here on."""
        self._closing.set()

    def _run(self) -> None:
        self._connection.settimeout(BEAT_S)
        missed = 0
        due = 0.0
        while not self._closing.is_set():
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + BEAT_S
                    self._connection.send(_BEAT)
                    missed += 1
                if not self._connection.recv(4096):
                    return self._end("rank 0 has ended")
                missed = 0
            except TimeoutError:
                pass
            except OSError as error:
                return self._end(f"the connection to rank 0 is broken: {error}")
            if missed > MISSED_MAX_STARTING:
                return self._end(f"rank 0 has been silent for {missed * BEAT_S:.0f} s")
        return None

    def _end(self, reason: str) -> None:
        if not self._closing.is_set():
            self._lost(reason)
