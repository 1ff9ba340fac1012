"""Who else lives: a table fed with heartbeats and a clock, and the verdicts drawn from silence."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from antiphon.config.digest import differing
from antiphon.wire.base import WIRE_VERSION, Process, Role, State

if TYPE_CHECKING:
    from antiphon.service.clock import Clock
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

_REMEMBERED = 1024


class Verdict(StrEnum):
    """What silence says of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """Gets no new work; what it has stays with it."""
    DEAD = "dead"
    """No longer listed. What it had is lost, or goes on elsewhere."""


class Change(StrEnum):
    """What happened to a peer."""

    APPEARED = "appeared"
    CHANGED = "changed"
    """It sent a heartbeat, or its verdict is another."""
    DIED = "died"


@dataclass(frozen=True)
class Peer:
    """One life of another process, as last heard."""

    beat: Heartbeat
    verdict: Verdict
    heard_at: float

    @property
    def process(self) -> Process:
        """Whose heartbeat it is."""
        return self.beat.process

    @property
    def takes_work(self) -> bool:
        """Whether new work may go there."""
        return self.verdict is Verdict.ALIVE and self.beat.state is State.READY


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How much silence means what."""

    heartbeat_s: float
    suspect_beats: int
    dead_beats: int


Watcher = Callable[[Change, Peer], None]


class Peers:
    """Everybody whose heartbeats we hear, ourselves excepted. Pure: no bus, no task.

    Broker gone is not peer dead: silence counts only on a link that carries our own heartbeats
    back to us. While it does not (down, frozen, or we were stalled ourselves) nobody is judged,
    and when it does again everybody counts as just heard.
    """

    def __init__(
        self, process: Process, config_digest: str, clock: Clock, patience: Patience
    ) -> None:
        self._process = process
        self._config_digest = config_digest
        self._clock = clock
        self._patience = patience
        self._peers: dict[InstanceId, Peer] = {}
        self._watchers: list[Watcher] = []
        self._echo_at: float | None = None
        self._joins = 0
        self._replaced: OrderedDict[Process, None] = OrderedDict()
        self._refused: OrderedDict[tuple[Process, str], None] = OrderedDict()

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` at every change, in the order in which they happen. It must not wait."""
        self._watchers.append(watcher)

    def of(self, role: Role) -> list[Peer]:
        """Every peer of a role that is not dead, by name."""
        found = [peer for peer in self._peers.values() if peer.beat.role == role]
        return sorted(found, key=lambda peer: peer.process)

    def working(self, role: Role) -> list[Peer]:
        """The peers of a role that take new work, by name."""
        return [peer for peer in self.of(role) if peer.takes_work]

    def all(self) -> list[Peer]:
        """Every peer that is not dead."""
        return list(self._peers.values())

    def find(self, instance: InstanceId) -> Peer | None:
        """The life that now has this name."""
        return self._peers.get(instance)

    def lives(self, process: Process) -> bool:
        """Whether this very life is listed: not dead, and not replaced by a later one."""
        peer = self._peers.get(process.instance)
        return peer is not None and peer.process == process

    def hear(self, beat: Heartbeat) -> None:
        """Take a heartbeat, our own included: it proves that the link is whole."""
        if beat.process == self._process:
            self._hear_echo()
        elif (fault := self._fault(beat)) is not None:
            self._refuse(beat, fault)
        elif beat.process not in self._replaced:
            self._accept(beat)

    def judge(self, *, link_up: bool, joins: int) -> float:
        """Draw the verdicts; return when to draw them again, in seconds from now.

        That is when somebody's silence would next mean more, or after a heartbeat, so that it is
        soon known that the broker was left and joined again; while nobody can be judged, it is a
        fifth of one.

        Args:
            link_up: Whether the broker is reachable.
            joins: How often it was reached so far; see `Link.joins`.
        """
        if joins != self._joins:
            self._joins = joins
            self._echo_at = None
        beat_s = self._patience.heartbeat_s
        if not link_up or not self._link_whole():
            return beat_s / 5
        for peer in list(self._peers.values()):
            verdict = self._verdict(peer)
            if verdict is Verdict.DEAD:
                self._bury(peer)
            elif verdict is not peer.verdict:
                self._put(Change.CHANGED, replace(peer, verdict=verdict))
        due_s = min(map(self._due_s, self._peers.values()), default=beat_s)
        return min(max(due_s, beat_s / 50), beat_s)

    def age_s(self, peer: Peer) -> float:
        """Time since the peer was heard."""
        return self._clock.now() - peer.heard_at

    def _link_whole(self) -> bool:
        # Two beats: one that is merely late must not stop the verdicts.
        silence_max = 2 * self._patience.heartbeat_s
        return self._echo_at is not None and self._clock.now() - self._echo_at <= silence_max

    def _hear_echo(self) -> None:
        if not self._link_whole():
            now = self._clock.now()
            for peer in self._peers.values():
                self._peers[peer.process.instance] = replace(peer, heard_at=now)
        self._echo_at = self._clock.now()

    def _fault(self, beat: Heartbeat) -> str | None:
        """Why a heartbeat does not count: the fields that should be other than they are."""
        if beat.wire_version != WIRE_VERSION:
            return "wire_version"
        if beat.config_digest != self._config_digest:
            fields = differing(self._config_digest, beat.config_digest)
            return ", ".join(f"cluster.{field}" for field in fields)
        if beat.not_after_unix_ms < self._clock.unix_ms():
            return "not_after_unix_ms"
        return None

    def _refuse(self, beat: Heartbeat, field: str) -> None:
        if (beat.process, field) in self._refused:
            return
        _remember(self._refused, (beat.process, field))
        log.warning(
            "peer refused",
            extra={
                "role": beat.role,
                "peer": beat.process.instance,
                "field": field,
            },
        )

    def _accept(self, beat: Heartbeat) -> None:
        known = self._peers.get(beat.process.instance)
        peer = Peer(beat, Verdict.ALIVE, self._clock.now())
        if known is not None and known.process == beat.process:
            self._put(Change.CHANGED, peer)
            return
        if known is not None:
            # Messages of the earlier life may still be under way; it must not come back by them.
            _remember(self._replaced, known.process)
            self._bury(known)
        self._put(Change.APPEARED, peer)

    def _verdict(self, peer: Peer) -> Verdict:
        beats = self.age_s(peer) / self._patience.heartbeat_s
        if beats >= self._patience.dead_beats:
            return Verdict.DEAD
        return Verdict.SUSPECT if beats >= self._patience.suspect_beats else Verdict.ALIVE

    def _due_s(self, peer: Peer) -> float:
        """How much longer a peer may be silent before that means more than now."""
        alive = peer.verdict is Verdict.ALIVE
        beats = self._patience.suspect_beats if alive else self._patience.dead_beats
        return beats * self._patience.heartbeat_s - self.age_s(peer)

    def _bury(self, peer: Peer) -> None:
        del self._peers[peer.process.instance]
        log.log(
            logging.INFO if peer.beat.state is State.DRAINING else logging.WARNING,
            "peer died",
            extra={"role": peer.beat.role, "peer": peer.process.instance, "state": peer.beat.state},
        )
        self._tell(Change.DIED, replace(peer, verdict=Verdict.DEAD))

    def _put(self, change: Change, peer: Peer) -> None:
        self._peers[peer.process.instance] = peer
        self._tell(change, peer)

    def _tell(self, change: Change, peer: Peer) -> None:
        for watcher in self._watchers:
            watcher(change, peer)


K = TypeVar("K")


def _remember(table: OrderedDict[K, None], key: K) -> None:
    table[key] = None
    if len(table) > _REMEMBERED:
        table.popitem(last=False)
