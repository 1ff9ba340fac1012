"""The output ids of all choices, in chunks: the only place in the process where they are.

The batching loop appends; any thread may read what was reported to it, since that never changes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Floats, Indices, Ints

CHUNK_TOKENS = 64
_CHUNKS = 64


class TokenStore:
    """Ids, and logprobs of sampled tokens where requested, of the choices that are held.

    Axes: C chunks, N tokens.

    Attributes:
        ids: (C, CHUNK_TOKENS)
        logprobs: (C, CHUNK_TOKENS) NaN where none was requested.
    """

    def __init__(self) -> None:
        self.ids: Ints = np.zeros((_CHUNKS, CHUNK_TOKENS), np.int32)
        self.logprobs: Floats = np.full((_CHUNKS, CHUNK_TOKENS), np.nan, np.float32)
        self._free = deque(range(_CHUNKS))

    def open(self, ids: Ints) -> OutputIds:
        """A new choice's output ids, which begin with these."""
        outputs = OutputIds(self)
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            chunk = outputs.add_chunk()  # replaces the arrays if they are full
            self.ids[chunk, : len(part)] = part
        return outputs

    def write(self, chunks: Indices, offsets: Indices, ids: Ints, logprobs: Floats | None) -> None:
        """Write tokens at these offsets of chunks, all (N,)."""
        self.ids[chunks, offsets] = ids
        if logprobs is not None:
            self.logprobs[chunks, offsets] = logprobs

    def take_chunk(self) -> int:
        if not self._free:
            self._grow()
        chunk = self._free.popleft()
        self.logprobs[chunk] = np.nan  # it has those of another choice
        return chunk

    def give_back(self, chunks: list[int]) -> None:
        """Free chunks; called from any thread."""
        self._free.extend(chunks)

    def _grow(self) -> None:
        """Double the chunks. A reader that still has the old arrays reads the same tokens."""
        count = len(self.ids)
        self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
        self.logprobs = np.concatenate([self.logprobs, np.full_like(self.logprobs, np.nan)])
        self._free.extend(range(count, 2 * count))


class OutputIds:
    """The output ids of one choice. Its chunks are freed with the last reference to it."""

    __slots__ = ("_chunks", "_store")

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._chunks: list[int] = []

    def __del__(self) -> None:
        self._store.give_back(self._chunks)

    def add_chunk(self) -> int:
        """Add a chunk, and return its number."""
        chunk = self._store.take_chunk()
        self._chunks.append(chunk)
        return chunk

    @property
    def last_chunk(self) -> int:
        return self._chunks[-1]

    def write(self, start: int, ids: Ints, logprobs: Floats | None) -> None:
        """Write ids from `start` on, where the outputs end."""
        while start + len(ids) > len(self._chunks) * CHUNK_TOKENS:
            self.add_chunk()
        places = np.arange(start, start + len(ids))
        chunks = np.array(self._chunks)[places // CHUNK_TOKENS]
        self._store.write(chunks, places % CHUNK_TOKENS, ids, logprobs)

    def read(self, start: int, end: int) -> Ints:
        """A copy of the ids [start, end)."""
        among, places = self._places(start, end)
        if len(among) == 1:  # most often; to pick rows and join them takes twice as long
            return self._store.ids[among[0], places].copy()
        return self._store.ids[among].reshape(-1)[places]

    def read_logprobs(self, start: int, end: int) -> Floats:
        """The logprobs of these tokens as they were sampled; NaN where none was requested."""
        among, places = self._places(start, end)
        return self._store.logprobs[among].reshape(-1)[places]

    def _places(self, start: int, end: int) -> tuple[list[int], slice]:
        """The chunks of tokens [start, end), and where the tokens are in these."""
        first, last = start // CHUNK_TOKENS, -(-end // CHUNK_TOKENS)
        skipped = first * CHUNK_TOKENS
        return self._chunks[first:last], slice(start - skipped, end - skipped)
