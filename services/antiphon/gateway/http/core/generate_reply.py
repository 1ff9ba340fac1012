"""One answer as JSON, as far as it was told: what was written once is not written again."""

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
    """A list of JSON that grows at its end."""

    def __init__(self) -> None:
        self.body = bytearray()
        """Its items, without the brackets around them."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, items: Sequence[object]) -> None:
        """Write more items, and none of those before."""
        if items:
            if self.body:
                self.body += b","
            self.body += msgspec.json.encode(items)[1:-1]
            self._count += len(items)

    @property
    def raw(self) -> msgspec.Raw:
        """The whole list."""
        return msgspec.Raw(b"[%b]" % self.body)


class GenerateReplyWriter:
    """The fields of a reply, each as JSON that grows with the answer.

    An event that tells all so far is as long as that; but each token is worked on once.

    Attributes:
        finished: How the answer ended, once it has.
        ids: Of the answer, from its beginning.
        texts: What they say.
        origins: Where they come from.
    """

    def __init__(
        self,
        options: GenerateResponseOptions,
        prompt_ids: Sequence[int],
        first_text: str | None = None,
    ) -> None:
        """Nothing is told yet.

        Args:
            options: What is told of the answer.
            prompt_ids: Of its prompt.
            first_text: Of the first of these, where texts of tokens are told.
        """
        self.finished: Finished | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.origins: tuple[Origin, ...] = ()
        self._options = options
        self._prompt_ids = prompt_ids
        self._known: dict[int, str] = {}
        self._first_text = first_text
        self._begun = False  # anything was told of its tokens
        self.restart()

    def restart(self) -> None:
        """Tell only what comes from here on."""
        self._text = bytearray()
        self._ids = JsonList()
        self._columns: dict[str, JsonList] = {}
        self._states: tuple[JsonList, JsonList] | None = None  # of the prompt, and of the answer

    def learn_texts(self, said: TextDelta) -> None:
        """Learn the texts of tokens, which may be told of elsewhere, too."""
        if said.details is not None:
            piece = said.details
            self._known |= {token: piece.text_of(token) for token in piece.texts}

    def add(self, said: TextDelta) -> None:
        """Write what is new."""
        self.learn_texts(said)
        self.origins = said.origins or self.origins
        self.texts.append(said.text)
        self._text += msgspec.json.encode(said.text)[1:-1]
        piece = said.details
        if piece is None:
            return
        begins, self._begun = not self._begun, True
        ids = output_ids(piece)
        self.ids += ids
        self._ids.add(ids)
        if self._options.logprobs:
            told = scores(
                piece,
                self._options,
                self._prompt_ids,
                texts=self._known,
                first_text=self._first_text,
                begins=begins,
            )
            for name, items in told.items():
                self._columns.setdefault(name, JsonList()).add(items)
        if self._options.hidden:
            self._add_hidden_states(piece, together=self._options.hidden == FULL)

    def end(self, finished: Finished) -> None:
        """Note how it ended."""
        self.finished = finished
        self.origins = finished.origins or self.origins

    @property
    def tokens(self) -> int:
        """Tokens of the answer, from its beginning."""
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
        told: dict[str, object] = {name: column.raw for name, column in self._columns.items()}
        if _SCORED in self._columns:
            told["output_token_logprobs_length"] = len(self._columns[_SCORED])
        if self._states is not None:
            read, drawn = self._states
            parts = [*([bytes(read.raw)] if read else ()), *([bytes(drawn.body)] if drawn else ())]
            told["hidden_states"] = msgspec.Raw(b"[%b]" % b",".join(parts))
        return told

    def _add_hidden_states(self, piece: TokenOutputsChunk, *, together: bool) -> None:
        """Write hidden states: those of the prompt `together` as one, or each by itself.

        The first token of an answer follows the last of its prompt.
        """
        read, drawn = self._states = self._states or (JsonList(), JsonList())
        for offset, token in enumerate(piece.details.iter_tokens(), piece.offset):
            column = read if together and offset <= 0 else drawn
            column.add([list(token.hidden)])
