"""The radix tree of token pages and its keys: the structure, without eviction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.cache.groups import HOLE
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, TOKEN_BYTES, block_digests
from antiphon.wire.namespaces import announced_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.cache.events import BlockTracker
    from antiphon.model_worker.cache.pages import CachePools, PageTable


class CacheKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that determines the content of a page: the tokens up to it, and what computed them.

    Attributes:
        namespace: From `wire.namespaces.cache_namespace`; prefixes are never shared across
            namespaces.
        token_ids: int32, little-endian.
    """

    namespace: bytes
    token_ids: bytes


class RadixNode(msgspec.Struct, eq=False, kw_only=True):
    """A run of whole pages. Its children continue it, each with another first page.

    Attributes:
        parent: The node before it; None for a root, which represents its namespace.
        tokens: The ids of the run, int32, little-endian; for a root, the namespace.
        start: Number of pages before it.
        pages: By group, a page id for each page of the run. A hole where a window group has none;
            for a state group, a hole unless a state is cached: the one at the end of that page.
        used: By group, when it was last used, by the prefix cache's own clock.
        hits: Number of requests that started with it.
        blocks: Digests of the blocks that end in this run.
        announced: Up to which page its blocks are announced; its start where none are.
        announced_children: Number of its children that have announced pages.
        children: By the tokens of their first page.
    """

    parent: RadixNode | None
    tokens: bytes
    start: int
    pages: list[list[int]]
    used: list[int]
    hits: int = 0
    blocks: list[bytes] = msgspec.field(default_factory=list[bytes])
    announced: int = 0
    announced_children: int = 0
    children: dict[bytes, RadixNode] = msgspec.field(default_factory=dict[bytes, "RadixNode"])

    @property
    def length(self) -> int:
        """Pages of the run; 0 of a root, and of a node that was cut off."""
        return len(self.pages[0])

    @property
    def end(self) -> int:
        """Number of pages up to the end of this run."""
        return self.start + len(self.pages[0])


class RadixTree:
    """Runs of pages under one root for each namespace.

    It holds a reference to each page that it lists. Every node but a root has pages, and every root
    has a child.

    Blocks are announced up to the last page border at which every group holds the prefix: with
    windows and recurrent states, tokens beyond it would be prefilled again. Whenever that border
    may have moved, the node is noted, and `settle` updates what is announced.
    """

    def __init__(self, pools: CachePools, tracker: BlockTracker | None = None) -> None:
        self._pools = pools
        self._tracker = tracker
        self._page_tokens = pools.page_tokens
        self._step = pools.page_tokens * TOKEN_BYTES  # bytes of a page's ids
        self._roots: dict[bytes, RadixNode] = {}
        self._moved: dict[RadixNode, None] = {}

    def nodes(self) -> Iterator[RadixNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def root(self, namespace: bytes) -> RadixNode:
        """The root of a namespace, made if it is new. The caller appends to it."""
        if (root := self._roots.get(namespace)) is None:
            groups = len(self._pools.groups)
            root = RadixNode(
                parent=None,
                tokens=namespace,
                start=0,
                pages=[[] for _ in range(groups)],
                used=[0] * groups,
            )
            self._roots[namespace] = root
        return root

    def find(self, key: CacheKey, pages_max: int) -> tuple[list[RadixNode], int]:
        """Follow a key for so many pages: the nodes without the root, and how many pages match.

        The match may end within the last node.
        """
        path: list[RadixNode] = []
        length, step, ids = 0, self._step, key.token_ids
        node = self._roots.get(key.namespace)
        while node is not None and length < pages_max:
            at = length * step
            if (node := node.children.get(ids[at : at + step])) is not None:
                path.append(node)
                length += self._common(node, ids, at, pages_max - length)
                if length < node.end:
                    break
        return path, length

    def split(self, node: RadixNode, end: int) -> RadixNode:
        """Split a node before page `end`; return the new node that holds the first part.

        The node itself keeps the last part, so that its children stay where they are.
        """
        count = end - node.start
        assert 0 < count < node.length, "a node was split at its border"
        cut = count * self._step
        blocks = self._blocks_before(end) - self._blocks_before(node.start)
        upper = RadixNode(
            parent=node.parent,
            tokens=node.tokens[:cut],
            start=node.start,
            pages=[pages[:count] for pages in node.pages],
            used=node.used.copy(),
            hits=node.hits,
            blocks=node.blocks[:blocks],
            announced=min(node.announced, end),
            announced_children=int(node.announced > end),
        )
        if node in self._moved:
            self._moved[upper] = None
        node.announced = max(node.announced, end)
        self._parent(node).children[node.tokens[: self._step]] = upper
        node.parent = upper
        node.start = end
        node.tokens = node.tokens[cut:]
        node.pages = [pages[count:] for pages in node.pages]
        node.blocks = node.blocks[blocks:]
        upper.children[node.tokens[: self._step]] = node
        return upper

    def append(self, parent: RadixNode, key: CacheKey, table: PageTable, end: int) -> RadixNode:
        """Add a node below `parent` with the pages of a table that follow it, up to page `end`."""
        node = RadixNode(
            parent=parent,
            tokens=b"",
            start=parent.end,
            pages=[[] for _ in self._pools.groups],
            used=[0] * len(self._pools.groups),
            announced=parent.end,
        )
        parent.children[self._ids(key, parent.end, parent.end + 1)] = node
        self.extend(node, key, table, end)
        return node

    def extend(self, node: RadixNode, key: CacheKey, table: PageTable, end: int) -> None:
        """Extend a node without children, up to page `end`, by the pages of a table."""
        assert not node.children, "a node with children was extended"
        begin = node.end
        for group, pool in enumerate(self._pools.pools):
            pages = table.entries(group, begin, end)
            pool.cache(_listed(pages))
            node.pages[group] += pages
        node.tokens += self._ids(key, begin, end)
        if self._tracker is not None:
            self._name(node, key, begin)
            self._moved[node] = None

    def trim(self, node: RadixNode, count: int) -> None:
        """Remove the last `count` pages of a node without children, and an empty node as well."""
        assert not node.children, "a node with children was trimmed"
        keep = node.length - count
        first_page = node.tokens[: self._step]
        if self._tracker is not None:
            end = node.start + keep
            self._retract(self._tracker, node, min(node.announced, end))
            del node.blocks[self._blocks_before(end) - self._blocks_before(node.start) :]
            self._moved[node] = None
        for group, pool in enumerate(self._pools.pools):
            pool.forget(_listed(node.pages[group][keep:]))
            del node.pages[group][keep:]
        node.tokens = node.tokens[: keep * self._step]
        if not keep:
            self._cut_off(node, first_page)

    def fill(self, node: RadixNode, group: int, index: int, page: int) -> None:
        """Fill a hole of a node with a page of a window group, or a state."""
        self._pools.pools[group].cache((page,))
        node.pages[group][index] = page
        self._note(node, group, index)

    def punch(self, node: RadixNode, group: int, indices: Sequence[int]) -> None:
        """Remove pages of a window group, or states; the node stays, with holes."""
        pages = node.pages[group]
        self._pools.pools[group].forget(pages[index] for index in indices)
        for index in indices:
            pages[index] = HOLE
        if indices:
            self._note(node, group, max(indices))

    def settle(self) -> None:
        """Announce blocks that match now and did not before, and retract those that do no more."""
        while self._moved and self._tracker is not None:
            node, _ = self._moved.popitem()
            if not node.length:
                continue  # it was removed
            border = node.end if node.announced_children else self._border(node)
            if border > node.announced:
                self._announce(self._tracker, node, border)
            elif border < node.announced:
                self._retract(self._tracker, node, border)

    def clear(self) -> None:
        for node in self.nodes():
            for pool, pages in zip(self._pools.pools, node.pages, strict=True):
                pool.forget(_listed(pages))
        self._roots.clear()
        self._moved.clear()
        if self._tracker is not None:
            self._tracker.cleared()

    def _common(self, node: RadixNode, ids: bytes, at: int, pages_max: int) -> int:
        """Number of pages that node and key have in common, from `at` on; the first one always."""
        tokens, step = node.tokens, self._step
        known, limit = 1, min(node.length, pages_max, (len(ids) - at) // step)
        if limit == node.length and ids.startswith(tokens, at):
            return limit
        while known < limit:
            # The rest is compared by bisection, so that no page is compared more than twice.
            middle = (known + limit + 1) // 2
            low, high = known * step, middle * step
            if tokens[low:high] == ids[at + low : at + high]:
                known = middle
            else:
                limit = middle - 1
        return known

    def _name(self, node: RadixNode, key: CacheKey, begin: int) -> None:
        """Compute the digests of the blocks that end after page `begin` of a node."""
        first, last = self._blocks_before(begin), self._blocks_before(node.end)
        if first == last:
            return
        size = BLOCK_TOKENS * TOKEN_BYTES
        chain = block_digests(self._last_block(node), key.token_ids[first * size : last * size])
        node.blocks += (chain[i : i + DIGEST_BYTES] for i in range(0, len(chain), DIGEST_BYTES))

    def _note(self, node: RadixNode, group: int, index: int) -> None:
        """Note that pages of a window group, or states, were added or removed, up to `index`."""
        if self._tracker is None:
            return
        self._moved[node] = None
        window = self._pools.groups[group].window
        if window is None:
            return
        # The window of the children's first queries reaches back into their parents.
        seen = node.start + index + 1 + -(-window // self._page_tokens)
        stack = [child for child in node.children.values() if child.start <= seen]
        while stack:
            child = stack.pop()
            self._moved[child] = None
            stack += (each for each in child.children.values() if each.start <= seen)

    def _border(self, node: RadixNode) -> int:
        """The last page border in a node at which every group holds the prefix, or its start.

        A border only moves down, so the groups are checked in turn until none moves it.
        """
        border, before = node.end, None
        while before != border > node.start:
            before = border
            for group in self._pools.sparse:
                border = self._whole_before(node, group, border)
        return max(border, node.start)

    def _whole_before(self, node: RadixNode, group: int, border: int) -> int:
        """The last border, up to this one, at which a query attends to no hole of a group."""
        config = self._pools.groups[group]
        seen = config.dead_len(border * self._page_tokens)
        holder, index = node, border - 1
        while index >= seen and border > node.start:
            while index < holder.start:
                holder = self._parent(holder)
            if holder.pages[group][index - holder.start] == HOLE:
                border = index
                seen = config.dead_len(border * self._page_tokens)
            index -= 1
        return border

    def _announce(self, tracker: BlockTracker, node: RadixNode, border: int) -> None:
        """Announce a node up to a border, and all nodes before it, from the top down."""
        chain = [node]
        above = self._parent(node)
        while above.parent is not None and above.announced < above.end:
            chain.append(above)
            above = above.parent
        for each in reversed(chain):
            first = self._announced_blocks(each)
            if each.announced == each.start:
                self._parent(each).announced_children += 1
            each.announced = border if each is node else each.end
            if blocks := each.blocks[first : self._announced_blocks(each)]:
                before = each.blocks[first - 1] if first else self._last_block(self._parent(each))
                tracker.stored(before, blocks)

    def _retract(self, tracker: BlockTracker, node: RadixNode, border: int) -> None:
        """Retract the blocks of a node beyond a border; none of its children is announced."""
        if border == node.announced:
            return
        announced = self._announced_blocks(node)
        node.announced = border
        if blocks := node.blocks[self._announced_blocks(node) : announced]:
            tracker.removed(blocks)
        if border == node.start:
            parent = self._parent(node)
            parent.announced_children -= 1
            if parent.parent is not None:
                self._moved[parent] = None

    def _announced_blocks(self, node: RadixNode) -> int:
        return self._blocks_before(node.announced) - self._blocks_before(node.start)

    def _last_block(self, node: RadixNode) -> bytes:
        """Digest of the last block that ends in a node or above, or of the namespace."""
        while not node.blocks and node.parent is not None:
            node = node.parent
        return node.blocks[-1] if node.blocks else announced_root(node.tokens)

    def _blocks_before(self, page: int) -> int:
        return page * self._page_tokens // BLOCK_TOKENS

    def _ids(self, key: CacheKey, begin: int, end: int) -> bytes:
        return key.token_ids[begin * self._step : end * self._step]

    def _cut_off(self, node: RadixNode, first_page: bytes) -> None:
        parent = self._parent(node)
        self._moved.pop(node, None)
        del parent.children[first_page]
        if parent.parent is None and not parent.children:
            del self._roots[parent.tokens]

    def _parent(self, node: RadixNode) -> RadixNode:
        assert node.parent is not None, "a root has no parent"
        return node.parent


def _listed(pages: list[int]) -> list[int]:
    return [page for page in pages if page != HOLE] if HOLE in pages else pages
