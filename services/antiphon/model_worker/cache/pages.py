"""Pools of pages, and page tables: the pages and states of one request in every cache group."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import HOLE, UNKNOWN_STATE, CacheGroup, GroupKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_CACHED = 1
_WATCHED = 2  # cached, and reported by `take_loosened` once it is loose


class PagePool:
    """Allocates and frees the pages 0..total-1 of a group, by reference counts.

    A released page is not free at once: a plan that was launched before may still read it. It
    becomes free when `finished` has named that plan's step.

    A page that the prefix cache holds is *cached*; a cached page without another holder is *loose*:
    it can be evicted. Loose pages are counted whenever a reference count changes, so that reading
    the count costs nothing.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack: the page that was freed last is the warmest in the processor's cache.
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._cached = bytearray(total)
        self.loose_count = 0
        self._loosened: list[int] = []
        self._loose_since = [0] * total  # last launched step when its last request released it
        self._fenced: deque[tuple[int, int]] = deque()  # (step that may still read it, page)
        self._step_launched = 0
        self._step_finished = 0

    @property
    def free_count(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages with a holder, the prefix cache included; neither free nor fenced."""
        return self.total - len(self._free) - len(self._fenced)

    def holders(self, page: int) -> int:
        """Reference count of a page, the prefix cache included; 0 for a free or fenced one."""
        return self._holders[page]

    def is_loose(self, page: int) -> bool:
        return self._holders[page] == 1 and self._cached[page] > 0

    def loose_end(self, pages: Sequence[int], limit: int) -> int:
        """Number of loose pages at the end of a run, up to `limit`."""
        holders, cached = self._holders, self._cached
        count = 0
        for page in islice(reversed(pages), limit):
            if holders[page] != 1 or not cached[page]:
                break
            count += 1
        return count

    def allocate(self, count: int) -> list[int]:
        """The caller has checked `free_count`."""
        assert count <= len(self._free), "more pages allocated than are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        holders = self._holders
        for page in pages:
            count = holders[page]
            assert count > 0, "a page without a holder was shared"
            if count == 1 and self._cached[page]:
                self.loose_count -= 1
            holders[page] = count + 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to pages. Without another one they are fenced, then free."""
        holders = self._holders
        for page in pages:
            count = holders[page] - 1
            cached = self._cached[page]
            assert count >= (cached > 0), "a page was released twice"
            holders[page] = count
            if count == 0:
                self._fenced.append((self._step_launched, page))
            elif count == 1 and cached:
                self._loosen(page)
        self._lift()

    def cache(self, pages: Iterable[int]) -> None:
        """Add the prefix cache's reference to pages, which a request holds now."""
        for page in pages:
            assert self._holders[page] > 0, "a page without a holder was cached"
            assert not self._cached[page], "a page was cached twice"
            self._cached[page] = _CACHED
            self._holders[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """Drop the prefix cache's reference to pages.

        The prefix cache never reads pages: a page is fenced only for plans that were launched
        before its last request released it, and most often these have finished long ago.
        """
        holders, loose_since = self._holders, self._loose_since
        for page in pages:
            assert self._cached[page], "a page was forgotten that was not cached"
            self._cached[page] = 0
            holders[page] -= 1
            if holders[page]:
                continue
            self.loose_count -= 1
            if loose_since[page] <= self._step_finished:
                self._free.append(page)
            else:
                self._fenced.append((loose_since[page], page))

    def watch(self, page: int) -> None:
        """Report a cached page by `take_loosened` once it is loose. It is not loose now."""
        assert self._cached[page], "a page was watched that was not cached"
        assert self._holders[page] > 1, "a loose page was watched"
        self._cached[page] = _WATCHED

    def take_loosened(self) -> list[int]:
        """Watched pages that became loose since the last call; they are not watched any more."""
        loosened, self._loosened = self._loosened, []
        return loosened

    def launched(self, step: int) -> None:
        """Note that a plan is about to run: it may read pages released from here on."""
        self._step_launched = step

    def finished(self, step: int) -> None:
        """Note that the plan of `step`, and all before it, have finished."""
        self._step_finished = step
        self._lift()

    def _loosen(self, page: int) -> None:
        self.loose_count += 1
        self._loose_since[page] = self._step_launched
        if self._cached[page] == _WATCHED:
            self._cached[page] = _CACHED
            self._loosened.append(page)

    def _lift(self) -> None:
        while self._fenced and self._fenced[0][0] <= self._step_finished:
            self._free.append(self._fenced.popleft()[1])


class StateChain:
    """The states of a request in the pool of one group, the oldest first.

    The first is the state after the committed tokens, the next ones are those after the launched
    rows, and the last is written by the next row. So a row can be run again, a dropped row leaves
    nothing behind, and the first state can be inserted into the prefix cache as it is: a checkpoint
    is a state with one more holder, and a request that matches it continues from it without a copy.

    Without overlap a request has two states: a row reads one and writes the other. A verify row
    writes one after each of its tokens, since any of them may be its last accepted one.

    Attributes:
        pages: The states; the first is a hole while no token is committed, since it reads as zeros.
        ends: The number of tokens of the first state, and, at most, after each launched row.
    """

    def __init__(self, pool: PagePool, tokens: int = 0, page: int = HOLE) -> None:
        self._pool = pool
        self.pages = [page]
        self.ends = [tokens]
        self._writes: list[int] = []  # states that each launched row writes

    def need(self, writes: int = 1) -> int:
        """Number of states to allocate before a row can be launched that writes so many."""
        return max(0, 1 + sum(self._writes) + writes - len(self.pages))

    def allocate(self, writes: int = 1) -> None:
        """Allocate the states that the next row writes. The caller has checked they are free."""
        self.pages += self._pool.allocate(self.need(writes))

    def launch(self, end: int, writes: int = 1) -> None:
        assert not self.need(writes), "a row has nowhere to write its state"
        self.ends.append(end)
        self._writes.append(writes)

    def states(self, start: int) -> list[int]:
        """The states that the launched row from token `start` on reads, and then writes.

        Which state a row reads after one that verifies drafts is not known yet: `UNKNOWN_STATE`.
        """
        row = self.ends.index(start)
        first = sum(self._writes[:row])
        states = self.pages[first : first + 1 + self._writes[row]]
        if row and self._writes[row - 1] > 1:
            states[0] = UNKNOWN_STATE
        return states

    def commit(self, tokens: int) -> None:
        """Make the state after `tokens` tokens, which the first launched row wrote, the first one.

        The states before it are reused, unless they have another holder.
        """
        start, writes = self.ends[0], self._writes.pop(0)
        place = tokens - start if writes > 1 else 1
        assert 0 < place <= writes, "no state of these tokens was written"
        rejected = self.ends[1] - tokens
        assert writes > 1 or not rejected, "a state does not match the committed tokens"
        old, written, rest = self.pages[0], self.pages[1 : 1 + writes], self.pages[1 + writes :]
        current = written.pop(place - 1)
        self.ends = [tokens, *(end - rejected for end in self.ends[2:])]
        if old != HOLE and self._pool.holders(old) == 1:
            written.append(old)
        elif old != HOLE:
            self._pool.release((old,))
        self.pages = [current, *rest, *written]
        self._trim()

    def recall(self) -> None:
        """Drop the launched rows; the next one continues from the first state."""
        del self.ends[1:]
        self._writes.clear()
        self._trim()

    def _trim(self) -> None:
        """Release the states that neither the launched rows nor the next one uses."""
        used = 2 + sum(self._writes)
        self._pool.release(self.pages[used:])
        del self.pages[used:]

    def replace(self, page: int) -> None:
        """Replace the first state by one with the same content, and take a reference to it."""
        old, self.pages[0] = self.pages[0], page
        self._pool.share((page,))
        self._pool.release((old,))

    def release(self) -> None:
        self._pool.release(page for page in self.pages if page != HOLE)
        self.pages = [HOLE]
        self.ends = [0]
        self._writes.clear()


class CachePools:
    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        sizes = {group.page_tokens for group in groups}
        assert groups, "a worker has at least one cache group"
        assert len(sizes) == 1, "groups with different page sizes cannot share a prefix"
        self.page_tokens = sizes.pop()
        self.groups = tuple(groups)
        self.pools = tuple(PagePool(group.pages_total) for group in groups)
        self.windows = tuple(index for index, group in enumerate(groups) if group.window)
        """The groups that have a window, by index."""
        self.states = tuple(
            index for index, group in enumerate(groups) if group.kind is GroupKind.STATE
        )
        """The groups of recurrent states, by index."""
        self.sparse = self.windows + self.states
        """The groups that need not have a page for each page of the others, by index."""
        self.measured = tuple(
            index for index in range(len(groups)) if index not in self.states
        ) or tuple(range(len(groups)))
        """The groups by whose pages capacity is measured, by index."""
        self.cutoffs = 0
        """How often the prefix cache was cleared: pages from before are not inserted any more."""

    @property
    def tokens_max(self) -> int:
        return min(group.tokens_max for group in self.groups)

    @property
    def pages_total(self) -> int:
        """Pages of the smallest group, states aside."""
        return min(self.groups[index].pages_total for index in self.measured)

    def free(self) -> list[int]:
        return [pool.free_count for pool in self.pools]

    def used(self) -> list[int]:
        return [pool.used_count for pool in self.pools]

    def loose(self) -> list[int]:
        return [pool.loose_count for pool in self.pools]

    def launched(self, step: int) -> None:
        """See `PagePool.launched`."""
        for pool in self.pools:
            pool.launched(step)

    def finished(self, step: int) -> None:
        """See `PagePool.finished`."""
        for pool in self.pools:
            pool.finished(step)


class PageTable:
    """The pages of one request (strictly: of one choice).

    Tokens below `committed` are computed and never written again; those up to `reserved` have
    pages and may be written by the next step. Only full committed pages are ever shared, so shared
    pages are never written and no step has to copy a page first. Recurrent states follow the same
    rule by a chain, see `StateChain`.
    """

    def __init__(self, pools: CachePools) -> None:
        self._pools = pools
        self._pages: list[list[int]] = [[] for _ in pools.groups]
        self._dead = [0] * len(pools.groups)  # leading entries that are holes
        self.chains = {index: StateChain(pools.pools[index]) for index in pools.states}
        """The states, by group; most models have none."""
        self._cutoffs = pools.cutoffs
        self.committed = 0
        self.reserved = 0
        self.revision = 0
        """Grows when existing entries change or are removed; not when some are added."""

    @classmethod
    def sharing(cls, pools: CachePools, tokens: int, pages: Sequence[list[int]]) -> PageTable:
        """A table with a shared prefix of `tokens` tokens, which ends at a page border.

        `pages` are the entries by group. The new table adds a reference to those that a query at
        `tokens` attends to; the others become holes.
        """
        table = cls(pools)
        for index, group in enumerate(pools.groups):
            dead = group.dead_len(tokens)
            live = pages[index][dead:]
            pools.pools[index].share(live)
            if index not in table.chains:
                table._pages[index] = [HOLE] * dead + live
                table._dead[index] = dead
            elif live:
                table.chains[index] = StateChain(pools.pools[index], tokens, live[-1])
        table.committed = table.reserved = tokens
        return table

    @property
    def outdated(self) -> bool:
        """Whether the prefix cache was cleared after its start: its pages are not inserted."""
        return self._cutoffs != self._pools.cutoffs

    def pages(self, group: int) -> list[int]:
        """The table of one group; entry i holds tokens from `i * page_tokens` on.

        For a state group: the states that it holds, the current one first.
        """
        return self.chains[group].pages if group in self.chains else self._pages[group]

    def entries(self, group: int, begin: int, end: int) -> list[int]:
        """The entries of a group from page `begin` to `end`, as the prefix cache lists them.

        For a state group: holes, and the current state where it is at the end of a page.
        """
        if group not in self.chains:
            return self._pages[group][begin:end]
        listed = [HOLE] * (end - begin)
        full, partial = divmod(self.committed, self._pools.page_tokens)
        if not partial and begin < full <= end:
            listed[full - 1 - begin] = self.chains[group].pages[0]
        return listed

    def dead(self, group: int) -> int:
        """Leading `entries` of a group that are holes."""
        if group not in self.chains:
            return self._dead[group]
        return -(-self.committed // self._pools.page_tokens) - 1

    def held(self, group: int) -> int:
        """Number of pages of a group that it holds: `pages` without the leading holes."""
        if group in self.chains:
            return sum(page != HOLE for page in self.chains[group].pages)
        return len(self._pages[group]) - self._dead[group]

    def covers(self, tokens: int, states: int = 1) -> bool:
        """Whether the pages suffice for a row up to token `tokens` that writes so many states."""
        if tokens > self.reserved:
            return False
        return not self.chains or not any(chain.need(states) for chain in self.chains.values())

    def need(self, tokens: int, states: int = 1) -> list[int]:
        """Pages by group that `allocate` would take."""
        return [
            self.chains[index].need(states)
            if index in self.chains
            else max(0, group.table_len(tokens) - len(self._pages[index]))
            for index, group in enumerate(self._pools.groups)
        ]

    def allocate(self, tokens: int, states: int = 1) -> None:
        """Allocate pages for a row up to `tokens`. The caller has checked that they are free."""
        for index, count in enumerate(self.need(tokens, states)):
            if index in self.chains:
                self.chains[index].allocate(states)
            else:
                self._pages[index] += self._pools.pools[index].allocate(count)
        page_tokens = self._pools.page_tokens
        self.reserved = max(self.reserved, -(-tokens // page_tokens) * page_tokens)

    def append(self, group: int, page: int) -> None:
        """Take a page for the next tokens, in a group without states. All groups must take one."""
        self._pages[group].append(page)
        self.reserved = len(self._pages[group]) * self._pools.page_tokens

    def commit(self, tokens: int) -> None:
        """Mark the first `tokens` tokens as computed. Window groups release what they leave behind.

        For states: the first launched row has ended there, or is undone if it is where it started.
        """
        assert self.committed <= tokens <= self.reserved, "committed tokens have no pages"
        if self.chains and tokens > self.committed:
            for chain in self.chains.values():
                chain.commit(tokens)
        self.committed = tokens
        for index in self._pools.windows:
            pages, dead = self._pages[index], self._pools.groups[index].dead_len(tokens)
            if gone := pages[self._dead[index] : dead]:
                self._pools.pools[index].release(gone)
                pages[self._dead[index] : dead] = [HOLE] * len(gone)
                self._dead[index] = dead
                self.revision += 1

    def truncate(self, tokens: int) -> None:
        """Release the pages beyond `tokens` tokens, which are those of rejected drafts."""
        assert tokens >= self.committed, "committed tokens were truncated"
        for index, group in enumerate(self._pools.groups):
            length = group.table_len(tokens)
            if index not in self.chains and length < len(self._pages[index]):
                self._pools.pools[index].release(self._pages[index][length:])
                del self._pages[index][length:]
                self.revision += 1
        page_tokens = self._pools.page_tokens
        self.reserved = min(self.reserved, -(-tokens // page_tokens) * page_tokens)

    def replace(self, group: int, index: int, page: int) -> None:
        """Replace the page of an entry by one with the same content, and release the old one."""
        if group in self.chains:
            self.chains[group].replace(page)
            return
        pool, pages = self._pools.pools[group], self._pages[group]
        pool.share((page,))
        pool.release((pages[index],))
        pages[index] = page
        self.revision += 1

    def shareable_tokens(self, tokens: int) -> int:
        """The longest prefix, up to `tokens`, that a fork can share.

        0 where a window group has released pages that a query there attends to, and with states:
        the current one belongs to all committed tokens, and only the prefix cache has others.
        """
        groups = self._pools.groups
        if self.chains:
            return 0
        whole = min(tokens, self.committed) // self._pools.page_tokens * self._pools.page_tokens
        if any(self._dead[index] > groups[index].dead_len(whole) for index in self._pools.windows):
            return 0
        return whole

    def fork(self, tokens: int | None = None) -> PageTable:
        """A second table that shares `shareable_tokens` of this one, at most `tokens`.

        The fork prefills the tokens of the last, partial page again: at most a page less one
        token, which is cheaper than a copy within the step.
        """
        tokens = self.shareable_tokens(self.committed if tokens is None else tokens)
        lengths = [group.table_len(tokens) for group in self._pools.groups]
        pages = [pages[:length] for pages, length in zip(self._pages, lengths, strict=True)]
        other: PageTable = PageTable.sharing(self._pools, tokens, pages)
        other._cutoffs = self._cutoffs
        return other

    def release(self) -> None:
        """Release all pages. The table is empty then and may be used again."""
        for index, pool in enumerate(self._pools.pools):
            pool.release(self._pages[index][self._dead[index] :])
            self._pages[index] = []
            self._dead[index] = 0
        for chain in self.chains.values():
            chain.release()
        self._cutoffs = self._pools.cutoffs
        self.committed = self.reserved = 0
        self.revision += 1
