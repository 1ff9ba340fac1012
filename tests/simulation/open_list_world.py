"""An owner whose open list others follow, over a network that loses changes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.simulation.owner_world import ME, MODEL, submission
from tests.support.clock import ManualClock

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.machine import Owner
from antiphon.service.open_lists import OpenLists
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import FetchOpenList, OpenList, OpenListState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.gateway.owner.actions import Action

PART_MAX = 5
"""Few requests a part: most whole lists have several."""
LOSS = 0.2


class Follower:
    """One of those that follow the list, each with losses of its own.

    Attributes:
        stale: Consecutive states after which its copy was not known to be complete.
    """

    def __init__(self) -> None:
        self.lists = OpenLists()
        self.known: set[RequestId] = set()
        self.stale = 0

    def receive(self, message: OpenList | OpenListState, now: float) -> FetchOpenList | None:
        if (change := self.lists.apply(message, now)) is None:
            return None
        if change.requests is not None:
            self.known, self.stale = set(change.requests), 0
        elif change.torn:
            self.stale += 1
            return FetchOpenList(gateway=message.owner)
        return None


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.config = GatewayConfig()
        self.owner = Owner(ME, MODEL, self.clock, self.config, list_part_max=PART_MAX)
        self.followers = [Follower(), Follower()]
        self.open: set[RequestId] = set()
        self.loss = LOSS
        self._count = 0

    def change(self) -> None:
        """A request comes, or one ends."""
        if self.open and self.random.random() < 0.4:
            ended = self.random.choice(sorted(self.open))
            self.open.remove(ended)
            self.publish(self.owner.cancel(ended))
        else:
            self._count += 1
            request_id = RequestId(f"r{self._count}")
            self.open.add(request_id)
            self.publish(self.owner.open(submission(request_id, self.clock, 1e6)))

    def beat(self) -> None:
        self.clock.advance(self.config.open_list_s)
        self.publish(self.owner.tick())

    def publish(self, actions: Iterable[Action]) -> None:
        messages = [each for each in actions if isinstance(each, OpenList | OpenListState)]
        fetches: list[FetchOpenList] = []
        for message in messages:
            for follower in self.followers:
                if self.random.random() >= self.loss:
                    fetch = follower.receive(message, self.clock.now())
                    fetches += [] if fetch is None else [fetch]
        for fetch in fetches:
            if self.random.random() >= self.loss:
                self.publish(self.owner.open_list_requested(fetch))

    def check(self) -> None:
        """Two beats without loss make every copy whole, and nothing else is taken for whole."""
        self.loss = 0.0
        self.beat()
        self.beat()
        self.loss = LOSS
        for follower in self.followers:
            assert follower.stale == 0, "a lost change was not made up for in two beats"
            assert follower.known == self.open, "an incomplete copy was taken for complete"


def live(seed: int) -> None:
    world = World(seed)
    for _ in range(20):
        for _ in range(world.random.randint(0, 12)):
            world.change()
        world.beat()
        if world.random.random() < 0.3:
            world.check()
    world.check()
