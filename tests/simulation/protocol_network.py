"""Virtual time, and a broker that delays, loses and repeats: everything follows from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tests.support.clock import ManualClock

from antiphon.bus.transport import BusDown, NoResponders
from antiphon.wire.codec import decode, decode_reply, encode
from antiphon.wire.errors import DeadlineExceeded, EngineError, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.wire.base import Message
    from antiphon.wire.routes import RequestRoute, Route


class Timeline:
    """Runs what is due, in the order of its times."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when, self.clock.now()), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        self.at(self.clock.now() + seconds, act)

    def run_until(self, end: float) -> None:
        events, clock = self._events, self.clock
        while events and events[0][0] <= end:
            when, _, act = heapq.heappop(events)
            if when > clock.now():
                clock.advance(when - clock.now())
            act()
        self.clock.advance(max(0.0, end - self.clock.now()))


class Party(Protocol):
    """A connected process: knows when it can run what reaches it.

    Attributes:
        connected: Whether its connection to the broker stands, if there is a broker.
        reconnects: How often it has connected again by itself.
    """

    name: str
    mute_until: float
    deaf_until: float
    connected: bool
    reconnects: int

    def run(self, act: Callable[[], object]) -> None:
        """Run this as soon as the process can; never if it has died."""
        ...


class Supervisor:
    """Sends, and receives nothing."""

    name = "supervisor"
    mute_until = deaf_until = 0.0
    connected = True
    reconnects = 0

    def run(self, act: Callable[[], object]) -> None:
        act()


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How messages fare. Shares are of single deliveries; order within a subject is kept."""

    delay_s: float = 0.002
    loss: float = 0.0
    repeat: float = 0.0


@dataclass(eq=False)
class Interest:
    """One subscription. `handle` returns the reply where there is one to give."""

    party: Party
    subject: list[str]
    carries: tuple[type[Message], ...]
    handle: Callable[[Any], Message | None]

    def receive(self, parcel: Parcel) -> Message | None:
        return self.handle(parcel.read(self))

    def matches(self, subject: list[str]) -> bool:
        return len(subject) == len(self.subject) and all(
            mine in ("*", theirs) for mine, theirs in zip(self.subject, subject, strict=True)
        )


class Parcel:
    """An encoded message. What is immutable need not be decoded by each of its receivers.

    One that is repeated is another message to its receiver.
    """

    def __init__(self, message: Message) -> None:
        self._data = encode(message)
        self._decoded: Message | None = None
        self._readers: list[Interest] = []

    def read(self, reader: Interest) -> Message:
        if self._decoded is None or reader in self._readers:
            self._decoded = decode(self._data, reader.carries)
        self._readers.append(reader)
        return self._decoded


class Network:
    """The broker. Everything crosses it as bytes."""

    def __init__(self, timeline: Timeline, seed: int, weather: Weather) -> None:
        self.seed = seed
        self.weather = weather
        self.joins = 1
        self.up = True
        self.parties: list[Party] = []
        self.apart_ms = 0
        """How far the clocks of two hosts may be apart."""
        self._ahead_ms: dict[str, int] = {}
        self._timeline = timeline
        self._random = random.Random(f"network {seed}")
        self._interests: list[Interest] = []
        self._matching: dict[str, list[Interest]] = {}
        self._last: dict[tuple[str, str, str], float] = {}

    def ahead_ms(self, instance: str) -> int:
        """How far the clock of a process's host is ahead."""
        half = self.apart_ms // 2
        return self._ahead_ms.setdefault(instance, self._random.randint(-half, half) if half else 0)

    def listen(
        self, party: Party, route: Route[Any], receive: Callable[[Any], Message | None], **part: str
    ) -> Interest:
        subject = route.subject_filter(**part).split(".")
        interest = Interest(party, subject, route.carries, receive)
        self._interests.append(interest)
        self._matching.clear()
        return interest

    def ignore(self, interest: Interest) -> None:
        self._interests.remove(interest)
        self._matching.clear()

    def leave(self, party: Party) -> None:
        self.parties = [one for one in self.parties if one is not party]
        self._interests = [one for one in self._interests if one.party is not party]
        self._matching.clear()

    def outage(self, seconds: float) -> None:
        """The broker dies, and all that is under way with it, and comes back."""
        self.up = False

        def back() -> None:
            self.up = True
            self.joins += 1

        self._timeline.after(seconds, back)

    def publish(self, party: Party, route: Route[Any], message: Message, **part: str) -> None:
        if not (self.up and party.connected):
            raise BusDown("the broker is away")
        subject, parcel = route.subject_for(**part), Parcel(message)
        for interest in self._listeners(subject):
            self._carry(party, interest.party, subject, partial(interest.receive, parcel))

    def call(
        self,
        party: Party,
        route: RequestRoute[Any, Any],
        message: Message,
        answer: Callable[[Any], None],
        **part: str,
    ) -> None:
        """Ask; `answer` gets the reply or the error, once."""
        calls = [answer]

        def settle(reply: Message | EngineError) -> None:
            if calls:
                party.run(partial(calls.pop(), reply))

        if not (self.up and party.connected):
            self._timeline.after(0.0, lambda: settle(BusDown("the broker is away")))
            return
        subject, parcel = route.subject_for(**part), Parcel(message)
        listeners = self._listeners(subject)
        if not listeners:
            absent = NoResponders("absent", retry_after_s=1.0)
            self._timeline.after(self._delay(), lambda: settle(absent))
            return

        def read(reply: bytes) -> None:
            try:
                settle(decode_reply(reply, route.replies))
            except EngineError as error:
                settle(error)

        def serve(interest: Interest) -> None:
            try:
                reply = interest.receive(parcel)
                assert reply is not None
            except EngineError as error:
                reply = encode_error(error)
            replied = encode(reply)
            self._carry(interest.party, party, f"inbox of {party.name}", lambda: read(replied))

        for interest in listeners:
            self._carry(party, interest.party, subject, partial(serve, interest))
        self._timeline.after(1.0, lambda: settle(DeadlineExceeded("no answer")))

    def _listeners(self, subject: str) -> list[Interest]:
        if subject not in self._matching:
            parts = subject.split(".")
            self._matching[subject] = [one for one in self._interests if one.matches(parts)]
        return [one for one in self._matching[subject] if one.party.connected]

    def _carry(
        self, sender: Party, receiver: Party, subject: str, act: Callable[[], object]
    ) -> None:
        joins, reconnects = self.joins, receiver.reconnects
        if self._timeline.clock.now() < sender.mute_until:
            return

        def arrive() -> None:
            deaf = self._timeline.clock.now() < receiver.deaf_until
            kept = receiver.connected and receiver.reconnects == reconnects
            if self.up and self.joins == joins and kept and not deaf:
                receiver.run(act)

        copies = 1 + (self._random.random() < self.weather.repeat)
        for _ in range(copies):
            if sender is not receiver and self._random.random() < self.weather.loss:
                continue
            # Not before what went the same way before: NATS keeps order within a subject.
            way = (sender.name, receiver.name, subject)
            when = max(self._timeline.clock.now() + self._delay(), self._last.get(way, 0.0))
            self._last[way] = when
            self._timeline.at(when, arrive)

    def _delay(self) -> float:
        return self._random.expovariate(1 / self.weather.delay_s) if self.weather.delay_s else 0.0
