"""Texts of token ids, and an index of their n-grams."""

from __future__ import annotations

from array import array
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from antiphon.wire.digests import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MATCHES_MAX = 16
"""Maximum number of occurrences of an n-gram that are read, newest first."""
STEPS_MAX = 8 * MATCHES_MAX
"""Maximum number of entries of a chain that are read; n-grams with the same hash are among them."""
BUCKETS_MIN = 1024


class NgramMatch(NamedTuple):
    """An occurrence of the end of a context.

    Attributes:
        length: Number of tokens that are equal, from the end of the context backwards.
        continuation: The tokens that follow it, at least one.
    """

    length: int
    continuation: tuple[int, ...]


class NgramLevel(NamedTuple):
    """The newest occurrences of the last `width` tokens of a context, newest first."""

    width: int
    matches: list[NgramMatch]

    @property
    def longest(self) -> int:
        return max([match.length for match in self.matches])


class IndexedText:
    """A text that grows at its end and is evicted from its start.

    Attributes:
        root: The namespace that it belongs to.
        number: Its index in the list of texts.
        ids: The tokens that are left: int32, little-endian.
        first: Position in the text of the first one of these.
        newest: Number of its last token in the index; -1 if it has none.
        context: Its last tokens, as many as the widest n-gram has before its last one.
        open: Whether more tokens may follow.
    """

    __slots__ = ("context", "first", "ids", "newest", "number", "open", "root")

    def __init__(self, root: TextRoot, number: int) -> None:
        self.root = root
        self.number = number
        self.ids = bytearray()
        self.first = 0
        self.newest = -1
        self.context = b""
        self.open = True

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + len(self.ids) // TOKEN_BYTES

    def drop(self, tokens: int) -> None:
        """Remove the first tokens, which a bytearray does without moving the rest."""
        self.first += tokens
        del self.ids[: tokens * TOKEN_BYTES]


class TextRoot:
    """The texts of one namespace."""

    __slots__ = ("namespace", "seed", "texts")

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.seed = crc32(namespace)
        self.texts: set[IndexedText] = set()


class TextIndex:
    """The newest tokens of all texts, and where the end of a context occurs in a namespace.

    A counted trie of depth 18 has up to 18 nodes for each token, and visits 18 for each that is
    added. Here a token is stored once and linked into a few chains: the occurrences of the n-gram
    that ends with it, newest first, for widths of 1, 2, 4 and 8 tokens. A match that is longer than
    the width is found by comparing the texts, as in the window of an LZ77 compressor. In 420,000
    tokens of source code, drafts from the newest 16 occurrences at these widths were accepted as
    often as drafts from all occurrences at all widths: 1.82 tokens a step in both cases.

    Tokens are numbered in the order in which they are added, over all texts. The newest `capacity`
    are kept, in arrays that are overwritten from the start. Eviction therefore searches nothing: an
    entry is valid if its token is among the newest, and the first that is not ends a chain.

    Hashes and orders are the same in every process, so equal texts give equal answers.
    """

    def __init__(self, *, capacity: int, width_min: int, width_max: int) -> None:
        """Create an empty index, which grows with its texts.

        Args:
            capacity: Maximum number of tokens.
            width_min: Minimum length of a match.
            width_max: Maximum length of a match.
        """
        self.capacity = capacity
        self.tokens = 0
        self._now = 0  # the number of the next token
        self._width_max = width_max
        self._widths = tuple(_doubled(width_min, width_max))
        self._context_bytes = (self._widths[-1] - 1) * TOKEN_BYTES
        self._roots: dict[bytes, TextRoot] = {}
        self._texts: list[IndexedText | None] = []
        self._free: list[int] = []
        # By the number of a token, modulo the capacity: its text, its position there, and for each
        # width the distance to the previous occurrence; 0 if there is none.
        self._owners = array("i")
        self._positions = array("i")
        self._distances = [array("i") for _ in self._widths]
        # For each width, by hash: the number of the token at the end of the last occurrence.
        self._heads = [array("q", [-capacity]) * BUCKETS_MIN for _ in self._widths]

    def begin(self, namespace: bytes) -> IndexedText:
        """Begin a text; the caller ends it."""
        if (root := self._roots.get(namespace)) is None:
            root = self._roots[namespace] = TextRoot(namespace)
        number = self._free.pop() if self._free else len(self._texts)
        text = IndexedText(root, number)
        self._texts[number : number + 1] = [text]
        root.texts.add(text)
        return text

    def extend(self, text: IndexedText, ids: bytes) -> None:
        """Append ids (int32, little-endian) to an open text."""
        assert text.open, "a text was extended after its end"
        count = len(ids) // TOKEN_BYTES
        self._reserve(count)
        window = text.context + ids
        number, position, seed = text.number, text.end, text.root.seed
        text.ids += ids
        text.context = window[len(window) - min(len(window), self._context_bytes) :]
        text.newest = self._now + count - 1 if count else text.newest
        self.tokens += count
        capacity, owners, positions = self.capacity, self._owners, self._positions
        chains = tuple(zip(self._widths, self._heads, self._distances, strict=True))
        mask = len(self._heads[0]) - 1
        now = self._now
        for end in range(len(window) - len(ids) + TOKEN_BYTES, len(window) + 1, TOKEN_BYTES):
            slot = now % capacity
            if now >= capacity:
                self._evict(slot)
            owners[slot] = number
            positions[slot] = position
            for width, heads, distances in chains:
                start = end - width * TOKEN_BYTES
                if start < 0:
                    break
                bucket = crc32(window[start:end], seed) & mask
                distance = now - heads[bucket]
                distances[slot] = distance if distance < capacity else 0
                heads[bucket] = now
            now += 1
            position += 1
        self._now = now

    def end(self, text: IndexedText) -> None:
        """End a text; its tokens stay until they are evicted."""
        text.open = False
        if text.newest < self._oldest:
            self._release(text)

    def levels(self, namespace: bytes, context: bytes, tokens_max: int) -> Iterator[NgramLevel]:
        """Find the end of a context before at least one token, widest n-gram first.

        Args:
            namespace: The namespace that is searched.
            context: The last tokens, at least `width_max` if there are as many.
            tokens_max: Maximum length of a continuation.
        """
        if (root := self._roots.get(namespace)) is None:
            return
        for index in reversed(range(len(self._widths))):
            if self._widths[index] * TOKEN_BYTES <= len(context):
                matches = list(self._matches(root, context, index, tokens_max))
                if matches:
                    yield NgramLevel(self._widths[index], matches)

    def _matches(
        self, root: TextRoot, context: bytes, index: int, tokens_max: int
    ) -> Iterator[NgramMatch]:
        width, heads, distances = self._widths[index], self._heads[index], self._distances[index]
        ngram = context[-width * TOKEN_BYTES :]
        longest = min(self._width_max, len(context) // TOKEN_BYTES)
        token = heads[crc32(ngram, root.seed) & (len(heads) - 1)]
        found = 0
        for _ in range(STEPS_MAX):
            if token < self._oldest:
                return
            slot = token % self.capacity
            text = self._texts[self._owners[slot]]
            # The root is compared, not only hashed: drafts must not cross namespaces.
            if text is not None and text.root is root:
                ids = text.ids
                end = (self._positions[slot] + 1 - text.first) * TOKEN_BYTES
                if 0 < end < len(ids) and ids.endswith(ngram, 0, end):
                    length = width
                    while length < longest and ids.endswith(
                        context[-(length + 1) * TOKEN_BYTES :], 0, end
                    ):
                        length += 1
                    count = min(tokens_max, (len(ids) - end) // TOKEN_BYTES)
                    yield NgramMatch(length, _ids(count).unpack_from(ids, end))
                    found += 1
            if not distances[slot] or found == MATCHES_MAX:
                return
            token -= distances[slot]

    @property
    def _oldest(self) -> int:
        """Number of the oldest token that is kept."""
        return max(0, self._now - self.capacity)

    def _reserve(self, count: int) -> None:
        """Make room for more tokens, up to the capacity."""
        wanted = min(self._now + count, self.capacity)
        if (missing := wanted - len(self._owners)) > 0:
            for column in (self._owners, self._positions, *self._distances):
                column.frombytes(bytes(missing * column.itemsize))
        # In a table of twice the size a hash has its old bucket or the one as far behind: both
        # begin with the old chain, and nothing is hashed again.
        while len(self._heads[0]) < wanted:
            for heads in self._heads:
                heads.extend(heads)

    def _evict(self, slot: int) -> None:
        text = self._texts[self._owners[slot]]
        assert text is not None, "a text was released before its last token was evicted"
        position = self._positions[slot]
        text.drop(1)
        self.tokens -= 1
        if not text.open and position + 1 == text.end:
            self._release(text)

    def _release(self, text: IndexedText) -> None:
        self._texts[text.number] = None
        self._free.append(text.number)
        text.root.texts.remove(text)
        if not text.root.texts:
            del self._roots[text.root.namespace]


def _doubled(least: int, most: int) -> Iterator[int]:
    while least <= most:
        yield least
        least *= 2


@cache
def _ids(count: int) -> Struct:
    return Struct(f"<{count}i")
