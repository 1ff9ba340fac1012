"""One request as the bus side of the worker holds it: its outputs, and what was sent of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.tokens import TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.request import ChoiceKey, Finish, Progress
    from antiphon.wire.command import Admit

ROW_IDS_MAX = 16_384
"""Longest row: a replay after an outage still goes in messages of a sane size."""

_ID_BYTES = 4


class HeldChoice:
    """The outputs of one choice: the only place from which its tokens are ever sent."""

    def __init__(self, index: int, key: ChoiceKey, output_ids: bytes) -> None:
        self.index = index
        self.key = key
        self.finish: Finish | None = None
        self._ids = bytearray(output_ids)
        self._sent = 0
        self._end_sent = False
        self._stopped = False

    @property
    def length(self) -> int:
        """Output ids so far."""
        return len(self._ids) // _ID_BYTES

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.finish is None and not self._stopped

    def append(self, progress: Progress) -> None:
        """Take in what a step did to it."""
        assert self.live, "a choice went on after its end"
        self._ids += progress.token_ids
        self.finish = progress.finish

    def stop(self, offset: int | None = None) -> int:
        """End it without a word, cut off at `offset`; return how many ids went too far."""
        length = self.length if offset is None else min(self.length, max(0, offset))
        overrun = self.length - length
        del self._ids[length * _ID_BYTES :]
        self._stopped = True
        return overrun

    def rewind(self, offset: int) -> None:
        """Send again from `offset` on, its end included."""
        self._sent = min(max(0, offset), self.length)
        self._end_sent = False

    def unsent(self) -> Iterator[tuple[int, bytes, Finish | None]]:
        """Take what was not sent yet, as (offset, ids, end) in pieces of bounded size."""
        if self._stopped:
            return
        while self._sent < self.length or (self.finish is not None and not self._end_sent):
            offset = self._sent
            self._sent = min(self.length, offset + ROW_IDS_MAX)
            self._end_sent = self.finish is not None and self._sent == self.length
            ids = bytes(self._ids[offset * _ID_BYTES : self._sent * _ID_BYTES])
            yield offset, ids, self.finish if self._end_sent else None


class HeldRequest:
    """A request from its admission until its owner no longer lists it.

    Its prompt is not here: the batching loop has it, and nobody is ever sent it.
    """

    def __init__(self, admit: Admit, keys: Sequence[ChoiceKey], now_ms: int) -> None:
        self.request_id = admit.request_id
        self.owner = admit.owner
        self.attempt = admit.attempt
        self.detokenizer = admit.detokenizer
        self.deadline_unix_ms = admit.deadline_unix_ms
        self.admitted_ms = now_ms
        self.cached_tokens = 0
        self.listed_after_end = False
        self.choices = [
            HeldChoice(choice.choice, key, choice.output_ids)
            for choice, key in zip(admit.choices, keys, strict=True)
        ]
        self._prompt_tokens = len(admit.prompt_ids) // _ID_BYTES
        self._continues = admit.continues
        self._stop = admit.stop
        self._traceparent = admit.traceparent
        self._introduced = False

    @property
    def live(self) -> bool:
        """Whether any choice goes on."""
        return any(choice.live for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(choice.length for choice in self.choices)

    def rewind(self, offsets: dict[int, int]) -> None:
        """Send again from these offsets on, a choice; from 0 where none is given."""
        self._introduced = False
        for choice in self.choices:
            choice.rewind(offsets.get(choice.index, 0))

    def repeat_end(self) -> None:
        """Send again how each choice ended, without its ids."""
        self.rewind({choice.index: choice.length for choice in self.choices})

    def unsent(self) -> Iterator[TokenRow]:
        """Take the rows that were not sent yet; the first ever says what the request is."""
        for choice in self.choices:
            for offset, ids, finish in choice.unsent():
                yield TokenRow(
                    request_id=self.request_id,
                    choice=choice.index,
                    attempt=self.attempt,
                    offset=offset,
                    token_ids=ids,
                    stream=None if self._introduced else self._stream(),
                    finish_reason=finish.reason if finish else None,
                    matched_stop=finish.matched_stop if finish else None,
                    error=finish.error if finish else None,
                )
                self._introduced = True

    def _stream(self) -> TokenStream:
        return TokenStream(
            owner=self.owner,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            choices=len(self.choices),
            continues=self._continues,
            stop=self._stop,
            deadline_unix_ms=self.deadline_unix_ms,
            traceparent=self._traceparent,
        )
