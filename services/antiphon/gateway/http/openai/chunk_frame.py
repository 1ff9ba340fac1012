"""A chunk that says a text and nothing else, which nearly all chunks do."""

from __future__ import annotations

import msgspec

GAP = "\0"
"""Stands where the text comes; no other part of a chunk is written as it is."""

_GAP_JSON = msgspec.json.encode(GAP)


class Frame:
    """What stands around the text. From one chunk of a choice to the next only the text differs."""

    def __init__(self, chunk: bytes) -> None:
        """Take a chunk whose text is `GAP`."""
        self._before, gap, self._after = chunk.partition(_GAP_JSON)
        assert gap, "a chunk without its text"

    def around(self, text: str) -> bytes:
        """Write the chunk of a text."""
        return self._before + msgspec.json.encode(text) + self._after
