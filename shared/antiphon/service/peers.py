"""Who else lives: a table fed with heartbeats and a clock, and the verdicts drawn from silence."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from antiphon.config.digest import differing
from antiphon.wire.base import WIRE_VERSION, Process, ProcessState, Role, leading_term

if TYPE_CHECKING:
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Term
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import InstanceId, ModelName

log = logging.getLogger(__name__)

_REMEMBERED = 1024
_OFFSET_BEATS = 16
OFFSET_MAX_MS = 5_000
"""How far the clocks of two hosts may be apart."""


class Liveness(StrEnum):
    """What silence says of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """Gets no new work; what it has stays with it."""
    DEAD = "dead"
    """No longer listed. What it had is lost, or goes on elsewhere."""


class PeerChange(StrEnum):
    """What happened to a peer."""

    APPEARED = "appeared"
    CHANGED = "changed"
    """It sent a heartbeat, or its verdict is another."""
    DIED = "died"


@dataclass(frozen=True)
class Peer:
    """One life of another process, as last heard."""

    heartbeat: Heartbeat
    liveness: Liveness
    received_at: float

    @property
    def process(self) -> Process:
        """Whose heartbeat it is."""
        return self.heartbeat.process

    @property
    def accepts_work(self) -> bool:
        """Whether new work may go there."""
        return self.liveness is Liveness.ALIVE and self.heartbeat.state is ProcessState.READY


@dataclass(frozen=True, kw_only=True)
class LivenessConfig:
    """How much silence means what."""

    heartbeat_s: float
    suspect_beats: int
    dead_beats: int
    owner_s: float
    """Of a gateway that has not taken its leave: it may only pause, and owns what others run."""


Watcher = Callable[[PeerChange, Peer], None]


_STEP_MS = 1000
"""A clock that differs from before by more was set."""


class ClockOffset:
    """How far a process's clock is from ours, by its last heartbeats. Pure.

    The least of (receipt - sent) is the offset and the shortest way here, some milliseconds.
    """

    def __init__(self) -> None:
        self.sent_ms = 0  # of the last heartbeat that counted
        self._differences: deque[int] = deque(maxlen=_OFFSET_BEATS)

    def record(self, difference_ms: int) -> None:
        """Take in (receipt - sent) of one heartbeat.

        Two in a row that agree and lie above the least show that a clock was set, or that the
        least was forged: what came before is forgotten, or all that follow would be too late.
        """
        self._differences.append(difference_ms)
        *_, last = lately = list(self._differences)[-2:]
        if min(lately) - min(self._differences) > _STEP_MS and abs(last - lately[0]) < _STEP_MS / 2:
            self._differences.clear()
            self._differences.extend(lately)

    @property
    def offset_ms(self) -> int | None:
        """What is to be added to its times to make them ours; None before the first heartbeat."""
        return min(self._differences, default=None)


class PeerTable:
    """Everybody whose heartbeats we hear, ourselves excepted. Pure: no bus, no task.

    A name belongs to the life that has it until that one is silent for so long that it is suspect.
    Only then another life takes the name; should that one fall silent in turn, and the first one
    send heartbeats again, the first one has it back. So a heartbeat that is forged, or of a second
    process that was started by mistake, shuts nobody out.

    Broker gone is not peer dead: silence counts only on a link that carries our own heartbeats
    back to us. While it does not (down, frozen, or we were stalled ourselves) nobody is judged,
    and when it does again everybody counts as just heard.
    """

    def __init__(
        self, process: Process, config_digest: str, clock: Clock, liveness: LivenessConfig
    ) -> None:
        self._process = process
        self._config_digest = config_digest
        self._clock = clock
        self._liveness = liveness
        self._peers: dict[InstanceId, Peer] = {}
        self._watchers: list[Watcher] = []
        self._echo_at: float | None = None
        self._echoed_at: float | None = None  # whatever became of the link since
        self._connect_count = 0
        self._silent_until: float | None = None
        self._name_conflict: Process | None = None
        self._timings: dict[Process, ClockOffset] = {}
        self._former: OrderedDict[Process, ClockOffset] = OrderedDict()  # of lives that have died
        self._refused: OrderedDict[tuple[Process, str], None] = OrderedDict()
        self._count_refused: Callable[[str], None] = _uncounted

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` at every change, in the order in which they happen. It must not wait."""
        self._watchers.append(watcher)

    def on_reject(self, count: Callable[[str], None]) -> None:
        """Call `count` with the reason for each heartbeat that does not count."""
        self._count_refused = count

    def with_role(self, role: Role) -> list[Peer]:
        """Every peer of a role that is not dead, by name."""
        found = [peer for peer in self._peers.values() if peer.heartbeat.role == role]
        return sorted(found, key=lambda peer: peer.process)

    def accepting_work(self, role: Role) -> list[Peer]:
        """The peers of a role that take new work, by name."""
        return [peer for peer in self.with_role(role) if peer.accepts_work]

    def all(self) -> list[Peer]:
        """Every peer that is not dead."""
        return list(self._peers.values())

    def find(self, instance: InstanceId) -> Peer | None:
        """The life that now has this name."""
        return self._peers.get(instance)

    def is_alive(self, process: Process) -> bool:
        """Whether this very life is listed: not dead, and not replaced by a later one."""
        peer = self._peers.get(process.instance)
        return peer is not None and peer.process == process

    def claims(self, model: ModelName | None) -> list[Term]:
        """The terms that living schedulers of a model claim: each its own."""
        return [
            peer.heartbeat.leads
            for peer in self.with_role(Role.SCHEDULER)
            if peer.heartbeat.leads is not None
            and peer.heartbeat.leads.scheduler == peer.process
            and peer.heartbeat.model == model
        ]

    def leading(self, model: ModelName | None) -> Term | None:
        """The term that leads a model's queue, by what living schedulers claim."""
        return leading_term(self.claims(model))

    def offset_ms(self, process: Process) -> int | None:
        """What is to be added to this life's times to make them ours; None if that is not known."""
        if process == self._process:
            return 0
        # One that is silent now has said what its clock shows all the same.
        timing = self._timings.get(process) or self._former.get(process)
        return None if timing is None else timing.offset_ms

    def is_expired(self, not_after_unix_ms: int, sender: Process) -> bool:
        """Whether a message of this life does not count any more.

        One of a process whose clock is not known is as good as late: it may have been under way
        for any time.
        """
        offset_ms = self.offset_ms(sender)
        return offset_ms is None or not_after_unix_ms + offset_ms < self._clock.unix_ms()

    def to_local_ms(self, unix_ms: int, sender: Process) -> int:
        """What our clock shows when the clock of this life shows `unix_ms`.

        The same, for a process that was not heard yet: for deadlines, which end some seconds later
        then at most.
        """
        return unix_ms + (self.offset_ms(sender) or 0)

    def take_name_conflict(self) -> Process | None:
        """Return who sent heartbeats under our own name while we were silent, once."""
        rival, self._name_conflict = self._name_conflict, None
        return rival

    def reject_heartbeat(self, beat: Heartbeat, field: str, offset_ms: int = 0) -> None:
        """Count a heartbeat of which this field does not count; log it once for each process."""
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
        """Take a heartbeat, our own included: it proves that the link is whole."""
        if beat.process == self._process:
            self._on_own_heartbeat()
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
        else:
            self._accept(beat, timing)

    def update_liveness(self, *, link_up: bool, connect_count: int) -> float:
        """Draw the verdicts; return when to draw them again, in seconds from now.

        That is when somebody's silence would next mean more, or after a heartbeat, so that it is
        soon known that the broker was left and joined again; while nobody can be judged, it is a
        fifth of one.

        Args:
            link_up: Whether the broker is reachable.
            connect_count: How often it was reached so far; see `Link.joins`.
        """
        if connect_count != self._connect_count:
            self._connect_count = connect_count
            self._echo_at = None
        beat_s = self._liveness.heartbeat_s
        if not link_up or not self._link_whole():
            return beat_s / 5
        for peer in list(self._peers.values()):
            verdict = self._liveness_of(peer)
            if verdict is Liveness.DEAD:
                self._remove_dead(peer)
            elif verdict is not peer.liveness:
                self._put(PeerChange.CHANGED, replace(peer, liveness=verdict))
        due_s = min(map(self._due_s, self._peers.values()), default=beat_s)
        return min(max(due_s, beat_s / 50), beat_s)

    def age_s(self, peer: Peer) -> float:
        """Time since the peer was heard."""
        return self._clock.now() - peer.received_at

    @property
    def _suspect_s(self) -> float:
        return self._liveness.suspect_beats * self._liveness.heartbeat_s

    def _link_whole(self) -> bool:
        # Two beats: one that is merely late must not stop the verdicts.
        silence_max = 2 * self._liveness.heartbeat_s
        return self._echo_at is not None and self._clock.now() - self._echo_at <= silence_max

    def _on_own_heartbeat(self) -> None:
        now = self._clock.now()
        if not self._link_whole():
            for peer in self._peers.values():
                self._peers[peer.process.instance] = replace(peer, received_at=now)
        if self._echoed_at is not None and now - self._echoed_at >= self._suspect_s:
            self._silent_until = now
        self._echo_at = self._echoed_at = now

    def _on_name_conflict(self, beat: Heartbeat, timing: ClockOffset) -> None:
        """Note who else uses our name, if that one may be in the right.

        It is if it came before our first heartbeat, or took the name while we were silent.
        """
        now = self._clock.now()
        silent = self._echoed_at is None or now - self._echoed_at >= self._suspect_s
        back_s = self._liveness.dead_beats * self._liveness.heartbeat_s
        if silent or (self._silent_until is not None and now - self._silent_until < back_s):
            self._name_conflict = beat.process
        else:
            self.reject_heartbeat(beat, "instance", timing.offset_ms or 0)

    def _sent_ms(self, beat: Heartbeat) -> int:
        if beat.sent_unix_ms is not None:
            return beat.sent_unix_ms
        # Of an earlier version, whose heartbeats count for as long as ours.
        valid_s = self._liveness.dead_beats * self._liveness.heartbeat_s
        return beat.not_after_unix_ms - round(valid_s * 1000)

    def _rejection_reason(self, beat: Heartbeat, timing: ClockOffset, now_ms: int) -> str | None:
        """Why a heartbeat does not count: the fields that should be other than they are."""
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

    def _accept(self, beat: Heartbeat, timing: ClockOffset) -> None:
        known = self._peers.get(beat.process.instance)
        peer = Peer(beat, Liveness.ALIVE, self._clock.now())
        if known is not None and known.process == beat.process:
            timing.sent_ms = self._sent_ms(beat)
            self._put(PeerChange.CHANGED, peer)
            self._check_claim(beat)
            return
        if known is not None:
            if not self._link_whole() or self._liveness_of(known) is Liveness.ALIVE:
                self.reject_heartbeat(beat, "instance", timing.offset_ms or 0)
                return
            self._remove_dead(known)
        # Heartbeats of an earlier life may still be under way; it comes back by later ones only.
        self._former.pop(beat.process, None)
        timing.sent_ms = self._sent_ms(beat)
        self._timings[beat.process] = timing
        self._put(PeerChange.APPEARED, peer)
        self._check_claim(beat)

    def _check_claim(self, beat: Heartbeat) -> None:
        """Count a claim that is too high beside those of the other schedulers."""
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
        """How much longer a peer may be silent before that means more than now."""
        silence_s = self._suspect_s if peer.liveness is Liveness.ALIVE else self._dead_s(peer)
        return silence_s - self.age_s(peer)

    def _dead_s(self, peer: Peer) -> float:
        """How long a peer may be silent before it counts as dead.

        An owner that pauses comes back to requests that others have kept for it.
        """
        dead_s = self._liveness.dead_beats * self._liveness.heartbeat_s
        if (
            peer.heartbeat.role is Role.GATEWAY
            and peer.heartbeat.state is not ProcessState.DRAINING
        ):
            return max(dead_s, self._liveness.owner_s)
        return dead_s

    def _remove_dead(self, peer: Peer) -> None:
        del self._peers[peer.process.instance]
        _remember(self._former, peer.process, self._timings.pop(peer.process))
        log.log(
            logging.INFO if peer.heartbeat.state is ProcessState.DRAINING else logging.WARNING,
            "peer died",
            extra={
                "role": peer.heartbeat.role,
                "peer": peer.process.instance,
                "state": peer.heartbeat.state,
            },
        )
        self._notify(PeerChange.DIED, replace(peer, liveness=Liveness.DEAD))

    def _put(self, change: PeerChange, peer: Peer) -> None:
        self._peers[peer.process.instance] = peer
        self._notify(change, peer)

    def _notify(self, change: PeerChange, peer: Peer) -> None:
        for watcher in self._watchers:
            watcher(change, peer)


K = TypeVar("K")
V = TypeVar("V")

_REASONS = {
    "instance": "a live process has this name",
    "clock": "the clock of its host differs too much from this one",
    "sent_unix_ms": "it was sent before that process died",
    "leads": "its term is too high to be the result of elections",
    "worker.term": "the term it follows is too high to be the result of elections",
}


def _reason(field: str) -> str:
    """The label of a refusal: fields of the cluster config are one."""
    return "cluster" if field.startswith("cluster.") else field


def _uncounted(_: str) -> None:
    """Count nothing."""


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    if len(table) > _REMEMBERED:
        table.popitem(last=False)
