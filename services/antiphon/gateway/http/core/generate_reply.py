"""One output as JSON that grows: what was encoded once is not encoded again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.native.parse import FULL
from antiphon.gateway.http.native.replies import output_ids, scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.native.parse import GenerateResponseOptions
    from antiphon.gateway.owner.actions import Finished, TextDelta
    from antiphon.wire.text import Origin
    from antiphon.wire.token_outputs import TokenOutputsChunk


_SCORED = "output_token_logprobs"


class JsonList:
    """A JSON list that grows at its end."""

    def __init__(self) -> None:
        self.body = bytearray()
        """The items, without the brackets."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, items: Sequence[object]) -> None:
        """Encode and append items."""
        if items:
            if self.body:
                self.body += b","
            self.body += msgspec.json.encode(items)[1:-1]
            self._count += len(items)

    @property
    def raw(self) -> msgspec.Raw:
        """Return the whole list."""
        return msgspec.Raw(b"[%b]" % self.body)


class GenerateReplyWriter:
    """Fields of a reply, each as JSON that grows with the output.

    A cumulative event is as long as the output so far, but each token is encoded once.

    Attributes:
        finished: How generation ended, once it has.
        ids: Output token ids.
        texts: Their texts.
        origins: Their origins.
    """

    def __init__(
        self,
        options: GenerateResponseOptions,
        prompt_ids: Sequence[int],
        first_text: str | None = None,
    ) -> None:
        """Start with an empty reply.

        Args:
            options: Which fields to return.
            prompt_ids: Token ids of the prompt.
            first_text: Text of the first prompt token, if token texts are requested.
        """
        self.finished: Finished | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.origins: tuple[Origin, ...] = ()
        self._options = options
        self._prompt_ids = prompt_ids
        self._known: dict[int, str] = {}
        self._first_text = first_text
        self._begun = False  # token outputs were received
        self.restart()

    def restart(self) -> None:
        """Return only what is added from here on."""
        self._text = bytearray()
        self._ids = JsonList()
        self._columns: dict[str, JsonList] = {}
        self._states: tuple[JsonList, JsonList] | None = None  # of the prompt and of the output

    def add_token_texts(self, delta: TextDelta) -> None:
        """Add token texts, which other fields may need too."""
        if delta.details is not None:
            piece = delta.details
            self._known |= {token: piece.text_of(token) for token in piece.texts}

    def add(self, delta: TextDelta) -> None:
        """Encode what is new."""
        self.add_token_texts(delta)
        self.origins = delta.origins or self.origins
        self.texts.append(delta.text)
        self._text += msgspec.json.encode(delta.text)[1:-1]
        piece = delta.details
        if piece is None:
            return
        begins, self._begun = not self._begun, True
        ids = output_ids(piece)
        self.ids += ids
        self._ids.add(ids)
        if self._options.logprobs:
            columns = scores(
                piece,
                self._options,
                self._prompt_ids,
                texts=self._known,
                first_text=self._first_text,
                begins=begins,
            )
            for name, items in columns.items():
                self._columns.setdefault(name, JsonList()).add(items)
        if self._options.hidden:
            self._add_hidden_states(piece, together=self._options.hidden == FULL)

    def end(self, finished: Finished) -> None:
        """Set how generation ended."""
        self.finished = finished
        self.origins = finished.origins or self.origins

    @property
    def tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.ids)

    @property
    def reply(self) -> dict[str, object]:
        """Fields of `GenerateReply`."""
        return {
            "text": msgspec.Raw(b'"%b"' % self._text),
            "output_ids": self._ids.raw,
        }

    @property
    def meta(self) -> dict[str, object]:
        """Fields of `MetaInfo`."""
        fields: dict[str, object] = {name: column.raw for name, column in self._columns.items()}
        if _SCORED in self._columns:
            fields["output_token_logprobs_length"] = len(self._columns[_SCORED])
        if self._states is not None:
            read, drawn = self._states
            parts = [*([bytes(read.raw)] if read else ()), *([bytes(drawn.body)] if drawn else ())]
            fields["hidden_states"] = msgspec.Raw(b"[%b]" % b",".join(parts))
        return fields

    def _add_hidden_states(self, piece: TokenOutputsChunk, *, together: bool) -> None:
        """Add hidden states: those of the prompt as one list if `together`, else one per token.

        The first output token follows the last prompt token.
        """
        read, drawn = self._states = self._states or (JsonList(), JsonList())
        for offset, token in enumerate(piece.details.iter_tokens(), piece.offset):
            column = read if together and offset <= 0 else drawn
            column.add([list(token.hidden)])
