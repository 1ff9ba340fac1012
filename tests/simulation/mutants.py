"""Named faults of the batching loop, one replaced function each, and the worlds that find them.

A world that finds none of these would not find a fault of the same kind either.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tests.simulation.list_worlds import open_lists, running_lists
from tests.simulation.owner_world import renew_media
from tests.simulation.protocol_world import freeze_leaders, move_attempts, note_silences
from tests.simulation.seal_orders import ORDERS
from tests.simulation.seal_orders import live as live_in_order
from tests.simulation.settle_orders import ORDERS as SETTLE_ORDERS
from tests.simulation.settle_orders import live_numbered
from tests.simulation.stored_rank_world import StoredRankWorld
from tests.simulation.stored_world import STORED_TURNS, StoredWorld
from tests.simulation.worker_worlds import (
    drafting,
    drafting_states,
    keeping_states,
    live,
    overlaps,
    stumbling,
    with_grammars,
)

from antiphon.detokenizer.choice import ChoiceState
from antiphon.detokenizer.machine import Detokenizer
from antiphon.gateway.owner.machine import Owner
from antiphon.gateway.owner.request import OwnedChoice, OwnedRequest
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.logits import LogitsProcessors
from antiphon.model_worker.batching.logprobs import LogprobsParams
from antiphon.model_worker.batching.outcome import OutcomeProcessor
from antiphon.model_worker.batching.page_transfers import PageTransfers
from antiphon.model_worker.batching.plan import DeviceLost
from antiphon.model_worker.batching.prefixes import Prefixes
from antiphon.model_worker.batching.running_batch import RunningBatch
from antiphon.model_worker.batching.slot_tables import ChangeLog
from antiphon.model_worker.cache.codec import PageCodec
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import PageTable
from antiphon.model_worker.cache.pool import PagePool
from antiphon.model_worker.cache.states import StateChains
from antiphon.model_worker.grammar.matcher import GrammarMatcher
from antiphon.model_worker.protocol.held_request import HeldChoice
from antiphon.model_worker.ranks import page_shards
from antiphon.scheduler.core import SchedulerCore
from antiphon.service.followed_lists import FollowedLists, LineSet, ListChange
from antiphon.service.peers import PeerTable
from antiphon.transfer.checksums import page_checksum
from antiphon.wire import namespaces
from antiphon.wire.codec import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from antiphon.wire.base import Term

SEEDS = 50


@dataclass(frozen=True)
class Mutant:
    """A fault: `replace` makes the wrong function from the right one; `live` is a world's life."""

    name: str
    owner: object  # a class or a module
    function: str
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    live: Callable[[int], object]

    @contextmanager
    def applied(self) -> Generator[None]:
        right = getattr(self.owner, self.function)
        setattr(self.owner, self.function, self.replace(right))
        try:
            yield
        finally:
            setattr(self.owner, self.function, right)

    def found_by(self) -> int | None:
        """The first seed whose world goes wrong."""
        with self.applied():
            return next((seed for seed in range(SEEDS) if not self.lives(seed)), None)

    def lives(self, seed: int) -> bool:
        try:
            self.live(seed)
        except AssertionError:
            return False
        return True


def seal_order(number: int) -> None:
    """One of the orders in which a request is sealed twice, spread over all of them."""
    live_in_order(ORDERS[number * len(ORDERS) // SEEDS])


def owner_seal_order(number: int) -> None:
    live_in_order(ORDERS[number * len(ORDERS) // SEEDS], forgets=True)


def settle_order(number: int) -> None:
    """One of the orders in which a new leader learns, spread over all of them."""
    live_numbered(number * len(SETTLE_ORDERS) // SEEDS)


# Faults.


def computed_off_by(error: int) -> Callable[..., Any]:
    """Of rows that have rejected a draft, and accepted one."""

    def replace(right: Callable[..., Any]) -> Callable[..., Any]:
        def commit(self: OutcomeProcessor, rows: Any, outcome: Any) -> None:
            accepted, lengths = np.diff(outcome.starts), rows.ends - rows.starts
            wrong = (rows.logit_counts > 1) & (accepted > 1) & (accepted < lengths)
            computed = outcome.computed + error * wrong
            right(self, rows, msgspec.structs.replace(outcome, computed=computed))

        return commit

    return replace


def mask_before(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, request, draft: right(self, request, max(0, draft - 1))


def stale_length(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, request, launched, computed: right(self, request, launched, launched)


def bound_for_a_length(_: Callable[..., Any]) -> Callable[..., Any]:
    """A row after drafts in flight is told the most that they can become."""
    return lambda self, slots: None


def not_repeated(right: Callable[..., Any]) -> Callable[..., Any]:
    """What the runner keeps by slot is not written again for a row that runs once more."""

    def repeat(self: RunningBatch, rows: Any) -> Any:
        base = self.base_len.copy()
        again = right(self, rows)
        self.base_len[:] = base
        return again

    return repeat


def reused_changes(right: Callable[..., Any]) -> Callable[..., Any]:
    """The changes of a plan are written over those of the plan before, if these are as many."""
    last: dict[object, Any] = {}

    def read(self: ChangeLog) -> Any:
        changes, before = right(self), last.get(self)
        if changes is not None and before is not None:
            pairs = list(zip(before.entries, changes.entries, strict=True))
            if all(old.shape == new.shape for old, new in pairs) and not len(changes.slots):
                for old, new in pairs:
                    old[:] = new
                return before
        last[self] = changes
        return changes

    return read


def early_pages(right: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: RunningBatch, decodes: Any, drafted: Any, *others: Any) -> Any:
        rows = right(self, decodes, drafted, *others)
        for slot in drafted:
            table = self.running[slot].table
            assert table is not None
            table.truncate(max(self.running[slot].length, table.committed))
        return rows

    return launch


def unfenced(right: Callable[..., Any]) -> Callable[..., Any]:
    """A released page is free at once, although a plan in flight may read or write it."""

    def release(self: PagePool, pages: Any) -> None:
        launched, self._step_launched = self._step_launched, self._step_finished
        right(self, pages)
        self._step_launched = launched

    return release


def never_given_back(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tokens: None


def never_blocked(right: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: RunningBatch, *scheduled: Any) -> Any:
        rows = right(self, *scheduled)
        self.blocked[:] = False
        return rows

    return launch


def first_state(right: Callable[..., Any]) -> Callable[..., Any]:
    """The state after the first token of a row is the next one, however many it accepted."""

    return lambda self, slot, writes, place: right(self, slot, writes, 1)


def reused_checkpoint(right: Callable[..., Any]) -> Callable[..., Any]:
    """A state that the prefix cache or another request holds is written by the next row."""

    def commit(self: StateChains, at: Any) -> None:
        counts = self._pool.holder_counts
        self._pool.holder_counts = np.minimum(counts, 1)
        right(self, at)
        self._pool.holder_counts = counts

    return commit


def logprobs_of_the_row_before(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, request, outcome, row, count: right(
        self, request, outcome, max(0, row - 1), count
    )


def never_rolled_back(_: Callable[..., Any]) -> Callable[..., Any]:
    def propose(self: GrammarMatcher, drafts: Any) -> int:
        del self.masks[1:]
        for count, token in enumerate(drafts):
            if not self._state.accept(token) or self._state.terminated:
                return count
            self.masks.append(self._next_mask())
        return len(drafts)

    return propose


def without_tenant(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tenant, salt: salt


def without_salts(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, state: namespaces.cache_namespace(self.origin)


def without_shard(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda half, _: right(half, "")


def freed_in_flight(right: Callable[..., Any]) -> Callable[..., Any]:
    """The pages of a late fetch are freed when its request stops waiting for it."""

    def expire(self: PageTransfers, now: float) -> None:
        for fetch in self._fetches.values():
            if fetch.waiting and fetch.due <= now:
                fetch.table.release()
        right(self, now)

    return expire


def states_unchecked(right: Callable[..., Any]) -> Callable[..., Any]:
    """A record that has a state is not compared with its checksum."""

    def check(self: PageCodec, name: bytes, record: Any, checksum: bytes) -> Any:
        masks = right(self, name, record, page_checksum(record))
        states = [group.kind is GroupKind.STATE for group in self.groups]
        found = any(mask for mask, state in zip(masks, states, strict=True) if state)
        return masks if found else right(self, name, record, checksum)

    return check


def stored(seed: int) -> None:
    live(StoredWorld(seed, overlap=overlaps(seed)), STORED_TURNS)


def stored_on_ranks(seed: int) -> None:
    world = StoredRankWorld(seed, overlap=overlaps(seed))
    try:
        with world.ranks_end():
            live(world, STORED_TURNS)
    except DeviceLost as error:
        raise AssertionError("a rank has ended") from error
    world.check_ranks()


def agreed_by_one(right: Callable[..., Any]) -> Callable[..., Any]:
    """What the first rank can use of fetched blocks counts for all."""
    return lambda groups, ends: right(groups, ends[:1])


def states_of_any_end(right: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks agree on an end, after which some of them have written another state."""
    return lambda _, ends: right((), ends)


def answered_with_more(right: Callable[..., Any]) -> Callable[..., Any]:
    """A seal that does not hold: the second answer has what was accepted after the first."""

    def seal(self: Detokenizer, one: Any, bytes_max: int) -> Any:
        sealed = right(self, one, bytes_max)
        self._sealed.pop(one.request_id, None)
        return sealed

    return seal


def one_id_short(right: Callable[..., Any]) -> Callable[..., Any]:
    def sealed(self: Any, index: int, **options: Any) -> Any:
        output = right(self, index, **options)
        return msgspec.structs.replace(output, output_ids=output.output_ids[:-ID_BYTES])

    return sealed


def taken_for_whole(_: Callable[..., Any]) -> Callable[..., Any]:
    """The copy of a list counts as complete whatever its process has."""

    def compare(self: Any, source: Any, *_: Any) -> Any:
        return ListChange(source, lines=self._copies[source].set.lines)

    return compare


def not_removed(right: Callable[..., Any]) -> Callable[..., Any]:
    """Every seventh request stays in the set when it is closed."""

    def remove(self: LineSet[Any], request_id: Any) -> None:
        if len(self.lines) % 7:
            right(self, request_id)

    return remove


def not_applied(right: Callable[..., Any]) -> Callable[..., Any]:
    """Changes that are lost once are taken for applied, and the whole list with them."""

    def update(self: Any, source: Any, message: Any, now: float) -> Any:
        if message.whole or message.version % 5:
            return right(self, source, message, now)
        self._copy(source, now).version = message.version
        return None

    return update


def taken_for_ended(right: Callable[..., Any]) -> Callable[..., Any]:
    """A process that is late counts as dead, although the broker knows better."""

    def take(self: PeerTable) -> list[Any]:
        for peer in right(self):
            self.on_exit(peer.process)
        return []

    return take


def never_probed(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _: []


def never_dropped(_: Callable[..., Any]) -> Callable[..., Any]:
    """A choice that is sealed, stopped or cancelled runs on to its end."""
    return lambda self, key, kept=None: None


def pages_kept(right: Callable[..., Any]) -> Callable[..., Any]:
    """A choice that is dropped while it runs leaves its pages behind."""

    def drop(self: EngineCore, key: Any, kept: int | None = None) -> None:
        request = self._requests.get(key)
        if request is not None and request.table is not None:
            for group, pool in enumerate(self.pools.pools):
                pool.share(request.table.pages(group))
        right(self, key, kept)

    return drop


def slot_kept(right: Callable[..., Any]) -> Callable[..., Any]:
    """A choice that is dropped while it runs leaves its slot behind."""

    def drop(self: EngineCore, key: Any, kept: int | None = None) -> None:
        request = self._requests.get(key)
        slot = None if request is None or not request.running else request.slot
        right(self, key, kept)
        if slot is not None:
            self.batch.free = sorted(set(self.batch.free) - {slot})

    return drop


def counted_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    """The last token of a sealed attempt is also the first one of the next."""

    def request(self: EngineCore, key: Any, state: Any, *others: Any) -> Any:
        ids = state.output_ids + state.output_ids[-ID_BYTES:]
        return right(self, key, msgspec.structs.replace(state, output_ids=ids), *others)

    return request


def sent_from_the_next(right: Callable[..., Any]) -> Callable[..., Any]:
    """What the loop reports after a rebind begins a token later than what was sent again ends."""

    def rebind(self: HeldChoice, attempt: Any, *, columns: bool) -> None:
        right(self, attempt, columns=columns)
        self.length += self.live and self.length > 0

    return rebind


def ready_at_once(_: Callable[..., Any]) -> Callable[..., Any]:
    """A new leader binds and aborts before lists and workers' reports of its term have come."""

    def all_reported(self: SchedulerCore) -> bool:
        del self
        return True

    return all_reported


def taken_from_an_answer(right: Callable[..., Any]) -> Callable[..., Any]:
    """A leader is known by its answer, and what the one before had queued is not submitted."""

    def accept(self: Owner, request: OwnedRequest, term: Term) -> None:
        if self._term is None:
            self._term = term
        right(self, request, term)

    return accept


def renewed_if_idle(right: Callable[..., Any]) -> Callable[..., Any]:
    """Media that come while a submit is under way wait for the next one, which may never be."""

    def renew(self: Owner, request_id: Any, media: Any) -> Any:
        actions, request = right(self, request_id, media), self._requests.get(request_id)
        if request is not None and request.submitting:
            request.renewed = False
        return actions

    return renew


MUTANTS = (
    Mutant("leader taken from an answer", Owner, "_accept", taken_from_an_answer, freeze_leaders),
    Mutant("media come during a submit", Owner, "renew_media", renewed_if_idle, renew_media),
    Mutant("late one taken for ended", PeerTable, "take_late", taken_for_ended, note_silences),
    Mutant("late one not probed", PeerTable, "take_late", never_probed, note_silences),
    Mutant("choice not dropped", EngineCore, "drop", never_dropped, move_attempts),
    Mutant("pages of a dropped choice", EngineCore, "drop", pages_kept, move_attempts),
    Mutant("slot of a dropped choice", EngineCore, "drop", slot_kept, move_attempts),
    Mutant("token counted twice", EngineCore, "_request", counted_twice, move_attempts),
    Mutant("token counted at a rebind", HeldChoice, "rebind", sent_from_the_next, move_attempts),
    Mutant("seal answered with more", Detokenizer, "_seal", answered_with_more, seal_order),
    Mutant("sealed ids one short", ChoiceState, "sealed", one_id_short, seal_order),
    Mutant("owner's ids one short", OwnedChoice, "sealed", one_id_short, owner_seal_order),
    Mutant("leader ready at once", SchedulerCore, "_all_reported", ready_at_once, settle_order),
    Mutant("change not counted", LineSet, "remove", not_removed, open_lists),
    Mutant("digest not compared", FollowedLists, "compare", taken_for_whole, open_lists),
    Mutant("worker's change not counted", LineSet, "remove", not_removed, running_lists),
    Mutant("worker's change not applied", FollowedLists, "update", not_applied, running_lists),
    Mutant("worker's digest ignored", FollowedLists, "compare", taken_for_whole, running_lists),
    Mutant("page in flight freed", PageTransfers, "expire", freed_in_flight, stored),
    Mutant("state without checksum", PageCodec, "check", states_unchecked, stored),
    Mutant("computed + 1", OutcomeProcessor, "commit", computed_off_by(1), drafting),
    Mutant("computed - 1", OutcomeProcessor, "commit", computed_off_by(-1), drafting),
    Mutant("mask of the token before", LogitsProcessors, "_mask", mask_before, with_grammars),
    Mutant("stale length", RunningBatch, "commit_accepted", stale_length, drafting),
    Mutant("bound for a length", RunningBatch, "_future_start", bound_for_a_length, drafting),
    Mutant("buffer reused in flight", ChangeLog, "read", reused_changes, keeping_states),
    Mutant("counts not restored", RunningBatch, "repeat", not_repeated, stumbling),
    Mutant("pages given back early", RunningBatch, "launch", early_pages, drafting),
    Mutant("pages free in flight", PagePool, "release", unfenced, drafting),
    Mutant("pages never given back", PageTable, "truncate", never_given_back, drafting),
    Mutant("row after an open one", RunningBatch, "launch", never_blocked, drafting),
    Mutant("state of the first token", StateChains, "accept", first_state, drafting_states),
    Mutant("checkpoint written over", StateChains, "commit", reused_checkpoint, keeping_states),
    Mutant(
        "logprobs of the row before",
        LogprobsParams,
        "accepted",
        logprobs_of_the_row_before,
        drafting,
    ),
    Mutant("key of another shard", namespaces, "_sharded", without_shard, stored),
    Mutant("blocks of one rank", page_shards, "agreed_blocks", agreed_by_one, stored_on_ranks),
    Mutant("state of one rank", page_shards, "agreed_blocks", states_of_any_end, stored_on_ranks),
    Mutant("key of another rank", namespaces, "_sharded", without_shard, stored_on_ranks),
    Mutant("key without tenant", namespaces, "tenant_salt", without_tenant, keeping_states),
    Mutant("key without salts", Prefixes, "namespace_of", without_salts, keeping_states),
    Mutant("matcher left ahead", GrammarMatcher, "propose", never_rolled_back, with_grammars),
)
