"""Fast encoding of chunks that only have a text, which nearly all chunks are."""

from __future__ import annotations

import msgspec

GAP = "\0"
"""Stands for the text; no other part of a chunk is written unescaped."""

_GAP_JSON = msgspec.json.encode(GAP)


class Frame:
    """The JSON around the text. Consecutive chunks of a choice differ only in their text."""

    def __init__(self, chunk: bytes) -> None:
        """Create from a chunk whose text is `GAP`."""
        self._before, gap, self._after = chunk.partition(_GAP_JSON)
        assert gap, "a chunk without its text"

    def around(self, text: str) -> bytes:
        """Encode the chunk of a text."""
        return self._before + msgspec.json.encode(text) + self._after
