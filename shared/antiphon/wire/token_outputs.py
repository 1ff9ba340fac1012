"""Logprobs and hidden states per token ("details" on the wire).

Token offsets count the output tokens of a choice from 0; its prompt tokens, if included, have the
negative offsets before. So one offset addresses token ids and token outputs alike, and repeats and
gaps are detected in the same way.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.wire.base import Value
from antiphon.wire.bounds import TokenCount, TokenOffset
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

T = TypeVar("T", int, float)


class TokenOutputs(Value):
    """Columns of `count` consecutive tokens, each little-endian and row-major.

    A column that was not requested is empty.

    Attributes:
        token_ids: int32; -1 is the position after a prompt of a request of no new tokens.
        logprobs: float32, of the tokens themselves; NaN for -1.
        top_ids: int32, the most likely tokens at each position, in descending order.
        top_logprobs: float32, of `top_ids`.
        named_logprobs: float32, of the ids that the request named, in its order.
        hidden: float32, the hidden state that each token was computed from.
        pooled: float32, the pooled vector of the whole prompt, at one token with the id -1.
        times: float32, where each aligned token of the prompt begins, in tokens of the encoder, at
            one token with the id -1.
    """

    count: TokenCount = 0
    token_ids: bytes = b""
    logprobs: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    named_logprobs: bytes = b""
    hidden: bytes = b""
    pooled: bytes = b""
    times: bytes = b""

    @property
    def columns(self) -> tuple[bytes, ...]:
        return msgspec.structs.astuple(self)[1:]

    @classmethod
    def from_columns(cls, count: int, columns: Iterable[bytes]) -> TokenOutputs:
        """Build from columns in the order of `columns`."""
        ids, logprobs, top_ids, top_logprobs, named_logprobs, hidden, pooled, times = columns
        return cls(
            count=count,
            token_ids=ids,
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            named_logprobs=named_logprobs,
            hidden=hidden,
            pooled=pooled,
            times=times,
        )

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.columns))

    def drop_first(self, start: int) -> TokenOutputs:
        if start == 0:
            return self
        assert start <= self.count, "there are not so many tokens"
        rest = (column[len(column) // self.count * start :] for column in self.columns)
        return TokenOutputs.from_columns(self.count - start, rest)

    def iter_tokens(self) -> Iterator[TokenOutput]:
        logprobs = unpack_floats(self.logprobs)
        columns = zip(
            unpack_ids(self.token_ids),
            logprobs or [None] * self.count,
            _rows(unpack_ids(self.top_ids), self.count),
            _rows(unpack_floats(self.top_logprobs), self.count),
            _rows(unpack_floats(self.named_logprobs), self.count),
            _rows(unpack_floats(self.hidden), self.count),
            strict=True,
        )
        for token_id, logprob, top_ids, top, named, hidden in columns:
            likeliest = tuple(zip(top_ids, top, strict=True))
            yield TokenOutput(token_id, logprob, likeliest, tuple(named), hidden)

    def ids(self) -> set[int]:
        """All token ids here except those that the request named."""
        return {*unpack_ids(self.token_ids), *unpack_ids(self.top_ids)} - {-1}


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Outputs of one token. `top` are pairs of token id and logprob."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    named: tuple[float, ...]
    hidden: Sequence[float]


class TokenOutputsChunk(Value):
    """Token outputs of one choice, beginning at a token offset.

    Without tokens it only confirms that nothing is missing up to there. `texts` has the text of
    each token decoded by itself, if requested. `written` has the bytes that a token contributes to
    the choice's text where they differ: decoded by itself, a partial character is U+FFFD, a word
    may lose its space, and a special token skipped in the text contributes nothing. The
    concatenated contributions of all tokens are the choice's text.
    """

    offset: TokenOffset
    details: TokenOutputs
    texts: dict[TokenCount, str] = msgspec.field(default_factory=dict[int, str])
    written: dict[TokenCount, bytes] = msgspec.field(default_factory=dict[int, bytes])

    @property
    def end(self) -> int:
        return self.offset + self.details.count

    @property
    def size_bytes(self) -> int:
        """Approximate size on the wire."""
        texts = sum(5 + len(text.encode()) for text in self.texts.values())
        written = sum(5 + len(some) for some in self.written.values())
        return self.details.size_bytes + texts + written

    def text_of(self, token_id: int) -> str:
        """Text of a token for display: what it contributes, or its text by itself."""
        written = self.written.get(token_id)
        return written.decode(errors="replace") if written else self.texts.get(token_id, "")

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token contributes to the text."""
        written = self.written.get(token_id)
        return self.texts.get(token_id, "").encode() if written is None else written

    def beyond(self, offset: int) -> TokenOutputsChunk:
        """The part from `offset` on; `offset` is not past the end."""
        if offset <= self.offset:
            return self
        details = self.details.drop_first(offset - self.offset)
        piece = TokenOutputsChunk(offset=offset, details=details)
        return piece.with_texts(self.texts, self.written)

    def before(self, offset: int) -> TokenOutputsChunk:
        """The part before `offset`, which may be none of it."""
        if offset >= self.end:
            return self
        buffer = TokenOutputsBuffer(self.offset)
        buffer.append(self.details)
        piece = TokenOutputsChunk(offset=self.offset, details=buffer.read(self.offset, offset))
        return piece.with_texts(self.texts, self.written)

    def with_texts(
        self, texts: Mapping[int, str], written: Mapping[int, bytes]
    ) -> TokenOutputsChunk:
        ids = sorted(self.details.ids())
        return TokenOutputsChunk(
            offset=self.offset,
            details=self.details,
            texts={token: texts[token] for token in ids if token in texts},
            written={token: written[token] for token in ids if token in written},
        )


class TokenOutputsBuffer:
    """Accumulates token outputs, so that any range of them can be sent again."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.end = first
        self._columns: tuple[bytearray, ...] = ()

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's outputs; 0 as long as there are none."""
        return sum(map(len, self._columns)) // len(self) if len(self) else 0

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._columns))

    def append(self, details: TokenOutputs) -> None:
        if not self._columns:
            self._columns = tuple(map(bytearray, details.columns))
        else:
            for column, more in zip(self._columns, details.columns, strict=True):
                column.extend(more)
        self.end += details.count

    def truncate(self, end: int) -> None:
        """Drop the tokens from offset `end` on."""
        keep = max(0, end - self.first)
        if keep < len(self):
            for column in self._columns:
                del column[len(column) // len(self) * keep :]
            self.end = self.first + keep

    def read(self, start: int, stop: int) -> TokenOutputs:
        """Return the tokens from offset `start` to before `stop`, as far as present."""
        start, stop = max(start, self.first), min(stop, self.end)
        if stop <= start:
            return TokenOutputs()
        first, last = start - self.first, stop - self.first
        widths = [len(column) // len(self) for column in self._columns]
        pairs = zip(self._columns, widths, strict=True)
        columns = (bytes(column[first * width : last * width]) for column, width in pairs)
        return TokenOutputs.from_columns(stop - start, columns)


def join_token_outputs(pieces: Iterable[TokenOutputs]) -> TokenOutputs:
    """Concatenate consecutive token outputs."""
    buffer = TokenOutputsBuffer()
    for piece in pieces:
        buffer.append(piece)
    return buffer.read(0, buffer.end)


def join_chunks(pieces: Iterable[TokenOutputsChunk | None]) -> TokenOutputsChunk | None:
    """Concatenate consecutive chunks; None if there are none."""
    chunks = [piece for piece in pieces if piece is not None]
    if not chunks:
        return None
    texts = {token: text for chunk in chunks for token, text in chunk.texts.items()}
    written = {token: some for chunk in chunks for token, some in chunk.written.items()}
    details = join_token_outputs(chunk.details for chunk in chunks)
    return TokenOutputsChunk(offset=chunks[0].offset, details=details, texts=texts, written=written)


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(packed: bytes) -> Sequence[float]:
    """Unpack numbers packed by `pack_floats`."""
    values = array("f", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _rows(values: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    width = len(values) // max(1, count)
    return (values[at * width : (at + 1) * width] for at in range(count))
