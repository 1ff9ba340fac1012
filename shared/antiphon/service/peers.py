"""The peer table: peers by their heartbeats, and their liveness by missed heartbeats."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from antiphon.config.cluster import differing
from antiphon.wire.base import WIRE_VERSION, Process, ProcessState, Role, Term, leading_term

if TYPE_CHECKING:
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Message, Value
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import InstanceId, ModelName

K = TypeVar("K")
V = TypeVar("V")


log = logging.getLogger(__name__)

_REMEMBERED = 1024
_LATE_BEATS = 2
"""A whole interval more than between two heartbeats: one that reconnects is seldom so late."""
_OFFSET_BEATS = 16
OFFSET_MAX_MS = 5_000
"""Maximum offset between the clocks of two hosts."""


class Liveness(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    """Gets no new work but keeps its requests."""
    DEAD = "dead"
    """No longer listed, after silence. Its requests continue elsewhere, or are lost."""
    EXITED = "exited"
    """No longer listed, and it is certain that the process has ended."""


class PeerChange(StrEnum):
    APPEARED = "appeared"
    CHANGED = "changed"
    """It sent a heartbeat, or its liveness changed."""
    DIED = "died"


@dataclass(frozen=True)
class Peer:
    heartbeat: Heartbeat
    liveness: Liveness
    received_at: float
    probed_at: float = -math.inf
    """When it was last probed."""

    @property
    def process(self) -> Process:
        return self.heartbeat.process

    @property
    def accepts_work(self) -> bool:
        return self.liveness is Liveness.ALIVE and self.heartbeat.state is ProcessState.READY


@dataclass(frozen=True, kw_only=True)
class LivenessConfig:
    heartbeat_s: float
    suspect_beats: int
    dead_beats: int
    owner_s: float
    """Time until a gateway that is not draining counts as dead: it owns requests of others and may
    only be paused."""

    @property
    def suspect_s(self) -> float:
        return self.suspect_beats * self.heartbeat_s

    @property
    def dead_s(self) -> float:
        return self.dead_beats * self.heartbeat_s


Watcher = Callable[[PeerChange, Peer], None]


_STEP_MS = 1000
"""A larger change of a clock offset means that a clock was set."""


class ClockOffset:
    """Offset between a process's clock and ours, estimated from its last heartbeats. Pure.

    The minimum of (receipt time - send time) is the offset plus the shortest transit time, some
    milliseconds.
    """

    def __init__(self) -> None:
        self.sent_ms = 0  # of the last accepted heartbeat
        self._differences: deque[int] = deque(maxlen=_OFFSET_BEATS)

    def record(self, difference_ms: int) -> None:
        """Record (receipt time - send time) of one heartbeat."""
        # Two consecutive ones that agree with each other and exceed the minimum show that a clock
        # was set, or that the minimum was forged: earlier ones are dropped, or all later heartbeats
        # would seem late.
        self._differences.append(difference_ms)
        *_, last = recent = list(self._differences)[-2:]
        if min(recent) - min(self._differences) > _STEP_MS and abs(last - recent[0]) < _STEP_MS / 2:
            self._differences.clear()
            self._differences.extend(recent)

    @property
    def offset_ms(self) -> int | None:
        """Offset to add to the process's times; None before the first heartbeat."""
        return min(self._differences, default=None)


class PeerTable:
    """All peers whose heartbeats this process receives, without itself. Pure: no bus, no task.

    A name belongs to the incarnation that holds it until that one is suspect. Only then can another
    incarnation take the name. If that one stops sending in turn and the first one resumes, the
    first one gets the name back. So neither a forged heartbeat nor a second process started by
    mistake can displace a live process.

    A broken link does not make peers dead: missed heartbeats count only while our own heartbeats
    come back to us. While they do not (the link is down or frozen, or this process was stalled), no
    liveness changes, and when they do again, all peers count as just received.

    A process that sends but receives nothing is as good as silent. Its heartbeats say how long its
    own ones have not come back to it, and that is how long it counts as silent.

    Of a process that is late, the broker knows whether its connection has ended: then no one
    responds to a call of its name, and it counts as dead at once. One that is frozen has kept its
    connection. A gateway is not probed: it keeps its requests while it connects again.
    """

    def __init__(
        self, process: Process, config_digest: str, clock: Clock, liveness: LivenessConfig
    ) -> None:
        self._process = process
        self._config_digest = config_digest
        self._clock = clock
        self._liveness = liveness
        self._peers: dict[InstanceId, Peer] = {}
        self._late: list[Peer] = []
        self._watchers: list[Watcher] = []
        self._echo_at: float | None = None
        self._echoed_at: float | None = None  # not reset on reconnects, unlike _echo_at
        self._connect_count = 0
        self._whole_since = -math.inf  # since when our heartbeats come back, or last came back
        self._sent_at = 0.0
        self._sent_connect_count = 0
        self._unechoed_s = 0.0
        self._silent_until: float | None = None
        self._name_conflict: Process | None = None
        self._timings: dict[Process, ClockOffset] = {}
        self._former: OrderedDict[Process, ClockOffset] = OrderedDict()  # of dead incarnations
        self._refused: OrderedDict[tuple[Process, str], None] = OrderedDict()
        self._count_refused: Callable[[str], None] = lambda _: None

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` at every change, in order. It must not block."""
        self._watchers.append(watcher)

    def on_reject(self, count: Callable[[str], None]) -> None:
        """Call `count` with the reason of each rejected heartbeat."""
        self._count_refused = count

    def with_role(self, role: Role) -> list[Peer]:
        found = [peer for peer in self._peers.values() if peer.heartbeat.role == role]
        return sorted(found, key=lambda peer: peer.process)

    def accepting_work(self, role: Role) -> list[Peer]:
        return [peer for peer in self.with_role(role) if peer.accepts_work]

    def read_by_all(
        self, message: type[Message | Value], *roles: str, started: bool = False
    ) -> bool:
        """Whether all live processes of these roles read a message that was added to v1 later.

        It may also be a part of a message. A process that is starting announces nothing yet; with
        `started` it does not count.
        """
        beats = [peer.heartbeat for peer in self._peers.values() if peer.heartbeat.role in roles]
        if started:
            beats = [beat for beat in beats if beat.state is not ProcessState.STARTING]
        return all(message.__name__ in beat.reads for beat in beats)

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def find(self, instance: InstanceId) -> Peer | None:
        return self._peers.get(instance)

    def is_alive(self, process: Process) -> bool:
        """Whether this incarnation is listed: neither dead nor replaced."""
        peer = self._peers.get(process.instance)
        return peer is not None and peer.process == process

    def claims(self, model: ModelName | None) -> list[Term]:
        beats = (peer.heartbeat for peer in self.with_role(Role.SCHEDULER))
        return [
            beat.leads
            for beat in beats
            if beat.leads and beat.leads.scheduler == beat.process and beat.model == model
        ]

    def leading(self, model: ModelName | None) -> Term | None:
        return leading_term(self.claims(model))

    def offset_ms(self, process: Process) -> int | None:
        """Return the offset to add to a process's times to get local ones; None if unknown."""
        if process == self._process:
            return 0
        # The offset of a dead incarnation is still known from its heartbeats.
        timing = self._timings.get(process) or self._former.get(process)
        return None if timing is None else timing.offset_ms

    def is_expired(self, not_after_unix_ms: int, sender: Process) -> bool:
        # A message of a process whose clock offset is unknown counts as expired: it may have been
        # in transit for any time.
        offset_ms = self.offset_ms(sender)
        return offset_ms is None or not_after_unix_ms + offset_ms < self._clock.unix_ms()

    def to_local_ms(self, unix_ms: int, sender: Process) -> int:
        # Unchanged if the offset is unknown. Used for deadlines, which are then off by some seconds
        # at most.
        return unix_ms + (self.offset_ms(sender) or 0)

    @property
    def is_echoed(self) -> bool:
        """Whether our own heartbeats come back, or none ever has."""
        return self._echoed_at is None or self._is_recent(self._echoed_at)

    def count_sent(self, connect_count: int) -> int:
        """Count a heartbeat that is about to be sent, and return its `unechoed_ms`.

        An interval counts for one heartbeat at most, and nothing before a reconnect: neither a
        freeze of this process nor an outage of the broker means that nothing reaches it.
        """
        now, beat_s = self._clock.now(), self._liveness.heartbeat_s
        if connect_count == self._sent_connect_count:
            self._unechoed_s += min(now - self._sent_at, beat_s)
        else:
            self._sent_connect_count, self._unechoed_s = connect_count, 0.0
        self._sent_at = now
        # The last one is due by now, so that it is the one before that may be missing.
        return round(self._unechoed_s * 1000) if self._unechoed_s > 1.5 * beat_s else 0

    def take_name_conflict(self) -> Process | None:
        """Return a process that sent heartbeats with our name while ours were missing, once."""
        rival, self._name_conflict = self._name_conflict, None
        return rival

    def reject_heartbeat(self, beat: Heartbeat, field: str, offset_ms: int = 0) -> None:
        """Count a heartbeat rejected because of this field; log it once per process."""
        self._count_refused(_reason(field))
        if (beat.process, field) in self._refused:
            return
        _remember(self._refused, (beat.process, field), None)
        log.warning(
            "peer refused",
            extra={
                "role": beat.role,
                "peer": beat.process.instance,
                "incarnation": beat.process.incarnation,
                "field": field,
                "reason": _REASONS.get(_reason(field), "it is of another cluster, or too late"),
                "clock_offset_s": offset_ms / 1000,
                "clock_offset_max_s": OFFSET_MAX_MS / 1000,
            },
        )

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Process a heartbeat. Our own ones come back, too: they prove that the link works."""
        if beat.process == self._process:
            self._on_own_heartbeat(beat)
            return
        now_ms = self._clock.unix_ms()
        timing = self._timings.get(beat.process) or ClockOffset()
        difference_ms = now_ms - self._sent_ms(beat)
        if abs(difference_ms) <= OFFSET_MAX_MS:
            timing.record(difference_ms)
        if (fault := self._rejection_reason(beat, timing, now_ms)) is not None:
            self.reject_heartbeat(beat, fault, difference_ms)
        elif beat.process.instance == self._process.instance:
            self._on_name_conflict(beat, timing)
        elif beat.unechoed_ms:
            self._count_as_silence(beat)
        else:
            self._accept(beat, timing)

    def on_exit(self, process: Process) -> None:
        """Remove a peer at once: the process that started it has seen its end.

        If that is not true, its next heartbeat brings it back.
        """
        peer = self._peers.get(process.instance)
        if peer is not None and peer.process == process:
            # Not one that it has sent before, and that is still in transit.
            timing = self._timings[process]
            timing.sent_ms = max(timing.sent_ms, self._clock.unix_ms() - (timing.offset_ms or 0))
            self._remove_dead(peer, Liveness.EXITED)

    def take_late(self) -> list[Peer]:
        """Return the peers to probe, which `update_liveness` has found late.

        Each is returned once a heartbeat interval. The caller calls its name, and passes the reply
        to `on_probed`.
        """
        late, self._late = self._late, []
        return late

    def on_probed(self, late: Peer, holder: Process | None) -> None:
        """Remove a peer that was late if it is not the holder of its name, and still late.

        `holder` is None if no process responds to the name.
        """
        peer = self._peers.get(late.process.instance)
        if holder != late.process and peer is not None and peer.received_at == late.received_at:
            self.on_exit(late.process)

    def update_liveness(self, *, link_up: bool, connect_count: int) -> float:
        """Update the liveness of all peers; return the time until the next update, in seconds.

        That is when the next peer could become late, suspect or dead, but at most one heartbeat
        interval, so that a reconnect is noticed soon. While the link does not work, it is a fifth
        of the interval.

        `link_up` and `connect_count` are those of `LinkState`.
        """
        if connect_count != self._connect_count:
            self._connect_count = connect_count
            self._echo_at = None
        beat_s = self._liveness.heartbeat_s
        if not link_up or not self._link_whole():
            return beat_s / 5
        for peer in list(self._peers.values()):
            liveness = self._liveness_of(peer)
            if liveness is Liveness.DEAD:
                self._remove_dead(peer, liveness)
            elif liveness is not peer.liveness:
                self._put(PeerChange.CHANGED, replace(peer, liveness=liveness))
        self._note_late()
        due_s = min(map(self._due_s, self._peers.values()), default=beat_s)
        return min(max(due_s, beat_s / 50), beat_s)

    def age_s(self, peer: Peer) -> float:
        return self._clock.now() - peer.received_at

    def _link_whole(self) -> bool:
        return self._echo_at is not None and self._is_recent(self._echo_at)

    def _is_recent(self, echo_at: float) -> bool:
        # Two intervals: one heartbeat that is merely late must not suspend liveness updates.
        return self._clock.now() - echo_at <= 2 * self._liveness.heartbeat_s

    def _on_own_heartbeat(self, beat: Heartbeat) -> None:
        now = self._clock.now()
        self._unechoed_s = 0.0
        if not self._link_whole():
            self._whole_since = now
            for peer in self._peers.values():
                self._peers[peer.process.instance] = replace(peer, received_at=now)
        # A process that was frozen right after its start has sent no heartbeat since its first one.
        sent_at = now - (self._clock.unix_ms() - self._sent_ms(beat)) / 1000
        heard_at = sent_at if self._echoed_at is None else self._echoed_at
        if now - heard_at >= self._liveness.suspect_s:
            self._silent_until = now
        self._echo_at = self._echoed_at = now

    def _on_name_conflict(self, beat: Heartbeat, timing: ClockOffset) -> None:
        """Record another process with our name, if it may own the name rightfully."""
        # It may if it sent a heartbeat before our first one, or while ours were missing.
        now = self._clock.now()
        silent = self._echoed_at is None or now - self._echoed_at >= self._liveness.suspect_s
        since = self._silent_until
        if silent or (since is not None and now - since < self._liveness.dead_s):
            self._name_conflict = beat.process
        else:
            self.reject_heartbeat(beat, "instance", timing.offset_ms or 0)

    def _sent_ms(self, beat: Heartbeat) -> int:
        if beat.sent_unix_ms is not None:
            return beat.sent_unix_ms
        # A heartbeat of an earlier version; they are valid for as long as ours.
        return beat.not_after_unix_ms - round(self._liveness.dead_s * 1000)

    def _rejection_reason(self, beat: Heartbeat, timing: ClockOffset, now_ms: int) -> str | None:
        """Return the fields because of which a heartbeat is rejected; None if it is accepted."""
        if beat.wire_version != WIRE_VERSION:
            return "wire_version"
        if beat.config_digest != self._config_digest:
            fields = differing(self._config_digest, beat.config_digest)
            return ", ".join(f"cluster.{field}" for field in fields)
        if abs(now_ms - self._sent_ms(beat)) > OFFSET_MAX_MS or timing.offset_ms is None:
            return "clock"
        if beat.not_after_unix_ms + timing.offset_ms < now_ms:
            return "not_after_unix_ms"
        former = self._former.get(beat.process)
        if former is not None and self._sent_ms(beat) <= former.sent_ms:
            return "sent_unix_ms"
        return None

    def _count_as_silence(self, beat: Heartbeat) -> None:
        """Note that its sender receives nothing, if that may not be due to the broker."""
        peer = self._peers.get(beat.process.instance)
        if peer is not None and peer.process == beat.process:
            # While our own heartbeats did not come back, those of no process did.
            since = max(self._clock.now() - beat.unechoed_ms / 1000, self._whole_since)
            received_at = min(peer.received_at, since)
            self._peers[beat.process.instance] = replace(peer, received_at=received_at)

    def _accept(self, beat: Heartbeat, timing: ClockOffset) -> None:
        known = self._peers.get(beat.process.instance)
        peer = Peer(beat, Liveness.ALIVE, self._clock.now())
        change = PeerChange.CHANGED
        if known is None or known.process != beat.process:
            change = PeerChange.APPEARED
            if known is not None:
                if not self._link_whole() or self._liveness_of(known) is Liveness.ALIVE:
                    self.reject_heartbeat(beat, "instance", timing.offset_ms or 0)
                    return
                self._remove_dead(known, Liveness.EXITED)
            # Old heartbeats of a dead incarnation may still be in transit; only later ones revive
            # it.
            self._former.pop(beat.process, None)
            self._timings[beat.process] = timing
        timing.sent_ms = self._sent_ms(beat)
        self._put(change, peer)
        self._check_claim(beat)

    def _check_claim(self, beat: Heartbeat) -> None:
        """Count a claimed term that is implausibly higher than those of other schedulers."""
        if beat.leads is None or beat.leads.scheduler != beat.process:
            return
        leading = self.leading(beat.model)
        if leading is None or beat.leads > leading:
            self.reject_heartbeat(beat, "leads")

    def _liveness_of(self, peer: Peer) -> Liveness:
        beats = self.age_s(peer) / self._liveness.heartbeat_s
        if self.age_s(peer) >= self._dead_s(peer):
            return Liveness.DEAD
        return Liveness.SUSPECT if beats >= self._liveness.suspect_beats else Liveness.ALIVE

    def _due_s(self, peer: Peer) -> float:
        alive = peer.liveness is Liveness.ALIVE
        silence_s = self._liveness.suspect_s if alive else self._dead_s(peer)
        return min(silence_s - self.age_s(peer), self._probe_due_s(peer))

    def _note_late(self) -> None:
        for instance, peer in self._peers.items():
            if self._probe_due_s(peer) <= 0:
                self._peers[instance] = late = replace(peer, probed_at=self._clock.now())
                self._late.append(late)

    def _probe_due_s(self, peer: Peer) -> float:
        """Return the time until a peer is probed unless its heartbeat arrives."""
        if peer.heartbeat.role is Role.GATEWAY:
            return math.inf
        beat_s = self._liveness.heartbeat_s
        due_at = max(peer.received_at + _LATE_BEATS * beat_s, peer.probed_at + beat_s)
        return due_at - self._clock.now()

    def _dead_s(self, peer: Peer) -> float:
        # A gateway gets more time: after a pause it finds its requests still running.
        beat, dead_s = peer.heartbeat, self._liveness.dead_s
        if beat.role is Role.GATEWAY and beat.state is not ProcessState.DRAINING:
            return max(dead_s, self._liveness.owner_s)
        return dead_s

    def _remove_dead(self, peer: Peer, liveness: Liveness) -> None:
        del self._peers[peer.process.instance]
        _remember(self._former, peer.process, self._timings.pop(peer.process))
        beat = peer.heartbeat
        fields = {
            "role": beat.role,
            "peer": peer.process.instance,
            "state": beat.state,
            "liveness": liveness,
        }
        level = logging.INFO if beat.state is ProcessState.DRAINING else logging.WARNING
        log.log(level, "peer died", extra=fields)
        self._notify(PeerChange.DIED, replace(peer, liveness=liveness))

    def _put(self, change: PeerChange, peer: Peer) -> None:
        self._peers[peer.process.instance] = peer
        self._notify(change, peer)

    def _notify(self, change: PeerChange, peer: Peer) -> None:
        for watcher in self._watchers:
            watcher(change, peer)


_REASONS = {
    "instance": "a live process has this name",
    "clock": "the clock of its host differs too much from this one",
    "sent_unix_ms": "it was sent before that process died",
    "leads": "its term is too high to be the result of elections",
    "worker.term": "the term it follows is too high to be the result of elections",
}


def _reason(field: str) -> str:
    """Return the metric label of a rejection; fields of the cluster config share one."""
    return "cluster" if field.startswith("cluster.") else field


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    if len(table) > _REMEMBERED:
        table.popitem(last=False)
