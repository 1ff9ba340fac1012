"""What is told of tokens beside their text: log-probabilities and hidden states.

The tokens of a choice are counted by offset: its outputs from 0 on, and tokens of its prompt, where
they are told of, at the negative offsets before. So one number places ids and details alike, and
what is sent twice or missing shows as it does for ids.
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
    """Columns about `count` consecutive tokens, each little-endian and row after row.

    A column that nobody asked for is empty.

    Attributes:
        token_ids: int32; -1 stands for what would follow a prompt after which nothing is drawn.
        logprobs: float32, of the tokens themselves; NaN for -1.
        top_ids: int32, the likeliest tokens at each place, the likeliest first.
        top_logprobs: float32, theirs.
        named_logprobs: float32, of the ids that the request named, in its order.
        hidden: float32, the hidden state that each token followed from.
        pooled: float32, what the whole prompt became; of one token, -1.
    """

    count: TokenCount = 0
    token_ids: bytes = b""
    logprobs: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    named_logprobs: bytes = b""
    hidden: bytes = b""
    pooled: bytes = b""

    @property
    def columns(self) -> tuple[bytes, ...]:
        """Every column, in the order of `of`."""
        return (
            self.token_ids,
            self.logprobs,
            self.top_ids,
            self.top_logprobs,
            self.named_logprobs,
            self.hidden,
            self.pooled,
        )

    @classmethod
    def from_columns(cls, count: int, columns: Iterable[bytes]) -> TokenOutputs:
        """Join what `columns` gave."""
        token_ids, logprobs, top_ids, top_logprobs, named_logprobs, hidden, pooled = columns
        return cls(
            count=count,
            token_ids=token_ids,
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            named_logprobs=named_logprobs,
            hidden=hidden,
            pooled=pooled,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(map(len, self.columns))

    def drop_first(self, start: int) -> TokenOutputs:
        """All but the first `start` tokens."""
        if start == 0:
            return self
        assert start <= self.count, "there are not so many tokens"
        rest = (column[len(column) // self.count * start :] for column in self.columns)
        return TokenOutputs.from_columns(self.count - start, rest)

    def iter_tokens(self) -> Iterator[TokenOutput]:
        """The tokens one by one."""
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
        """Every token that is spoken of here, but for those that the request named."""
        return {*unpack_ids(self.token_ids), *unpack_ids(self.top_ids)} - {-1}


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What is told of one token. `top` are pairs of id and log-probability."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    named: tuple[float, ...]
    hidden: Sequence[float]


class TokenOutputsChunk(Value):
    """Details of one choice, beginning at a token offset.

    Without tokens it says only that nothing is missing up to there. `texts` has the text of each
    token by itself, where the request wanted it. `written` has the bytes of those tokens that write
    something else than that: by itself a part of a character shows as U+FFFD, a word may lose its
    space, and a special token that the text leaves out writes nothing. What the tokens of an answer
    write, one after the other, is its text.
    """

    offset: TokenOffset
    details: TokenOutputs
    texts: dict[TokenCount, str] = msgspec.field(default_factory=dict[int, str])
    written: dict[TokenCount, bytes] = msgspec.field(default_factory=dict[int, bytes])

    @property
    def end(self) -> int:
        """The offset after the last token."""
        return self.offset + self.details.count

    @property
    def size_bytes(self) -> int:
        """About the bytes that it takes."""
        texts = sum(5 + len(text.encode()) for text in self.texts.values())
        written = sum(5 + len(some) for some in self.written.values())
        return self.details.size_bytes + texts + written

    def text_of(self, token_id: int) -> str:
        """What a token looks like: its text by itself, or what it writes."""
        written = self.written.get(token_id)
        return written.decode(errors="replace") if written else self.texts.get(token_id, "")

    def bytes_of(self, token_id: int) -> bytes:
        """What a token writes."""
        written = self.written.get(token_id)
        return self.texts.get(token_id, "").encode() if written is None else written

    def beyond(self, offset: int) -> TokenOutputsChunk:
        """What lies from `offset` on; `offset` is not past the end."""
        if offset <= self.offset:
            return self
        details = self.details.drop_first(offset - self.offset)
        piece = TokenOutputsChunk(offset=offset, details=details)
        return piece.with_texts(self.texts, self.written)

    def with_texts(
        self, texts: Mapping[int, str], written: Mapping[int, bytes]
    ) -> TokenOutputsChunk:
        """The same, with what is known of its own tokens."""
        ids = sorted(self.details.ids())
        return TokenOutputsChunk(
            offset=self.offset,
            details=self.details,
            texts={token: texts[token] for token in ids if token in texts},
            written={token: written[token] for token in ids if token in written},
        )


class TokenOutputsBuffer:
    """Details as they come, so that any stretch of them can be told again."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.end = first
        self._columns: tuple[bytearray, ...] = ()

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's details; 0 as long as there are none."""
        return sum(map(len, self._columns)) // len(self) if len(self) else 0

    def append(self, details: TokenOutputs) -> None:
        """Add what comes next."""
        if not self._columns:
            self._columns = tuple(map(bytearray, details.columns))
        else:
            for column, more in zip(self._columns, details.columns, strict=True):
                column.extend(more)
        self.end += details.count

    def truncate(self, end: int) -> None:
        """Forget what lies at `end` and beyond."""
        keep = max(0, end - self.first)
        if keep < len(self):
            for column in self._columns:
                del column[len(column) // len(self) * keep :]
            self.end = self.first + keep

    def read(self, start: int, stop: int) -> TokenOutputs:
        """The tokens from offset `start` to before `stop`, as far as they are here."""
        start, stop = max(start, self.first), min(stop, self.end)
        if stop <= start:
            return TokenOutputs()
        first, last = start - self.first, stop - self.first
        widths = (len(column) // len(self) for column in self._columns)
        return TokenOutputs.from_columns(
            stop - start,
            (
                bytes(column[first * width : last * width])
                for column, width in zip(self._columns, widths, strict=True)
            ),
        )


def join_token_outputs(pieces: Iterable[TokenOutputs]) -> TokenOutputs:
    """Put consecutive details together."""
    store = TokenOutputsBuffer()
    for piece in pieces:
        store.append(piece)
    return store.read(0, store.end)


def join_chunks(pieces: Iterable[TokenOutputsChunk | None]) -> TokenOutputsChunk | None:
    """Put consecutive pieces together; None if there are none."""
    told = [piece for piece in pieces if piece is not None]
    if not told:
        return None
    texts = {token: text for piece in told for token, text in piece.texts.items()}
    written = {token: some for piece in told for token, some in piece.written.items()}
    details = join_token_outputs(piece.details for piece in told)
    return TokenOutputsChunk(offset=told[0].offset, details=details, texts=texts, written=written)


def pack_floats(values: Iterable[float]) -> bytes:
    """Write numbers as little-endian float32."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(packed: bytes) -> Sequence[float]:
    """Read numbers written by `pack_floats`."""
    values = array("f", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _rows(values: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    width = len(values) // max(1, count)
    return (values[at * width : (at + 1) * width] for at in range(count))
