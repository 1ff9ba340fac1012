"""The record of one request, from its arrival until some time after its end.

The event loop updates a record until the request has ended; then it no longer changes, so that the
writer thread may read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.wire.base import Usage
from antiphon.wire.tokenize import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.gateway.owner.actions import Finished
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.ids import RequestId

CUT_CHARACTERS = 2048
"""Maximum characters of an input or output logged at level 2, and of a parameter at level 1."""
_BASE_BYTES = 1024
"""Size of a record without its texts."""
_ID_BYTES = 8
_NAMES = {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "processors": "custom_logit_processor",
}
"""SGLang's names of sampling parameters that differ."""
_NO_SAMPLING = frozenset({"details"})
_MORE = "..."


class RecordedInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The input of a request. It references the request's texts without copying."""

    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    pair: str | None = None
    suffix: str | None = None
    input_ids: tuple[int, ...] | None = None
    tools: str | None = None
    chat_template_kwargs: str | None = None

    @classmethod
    def of(cls, gen_request: GenerationRequest) -> RecordedInput:
        """Take the input of a request."""
        return cls(
            messages=gen_request.messages,
            text=gen_request.prompt,
            pair=gen_request.text_pair,
            suffix=gen_request.suffix,
            input_ids=gen_request.prompt_ids,
            tools=gen_request.template.tools,
            chat_template_kwargs=gen_request.template.options,
        )

    @property
    def size_bytes(self) -> int:
        """Approximate memory size of its texts."""
        texts = (self.text, self.pair, self.suffix, self.tools, self.chat_template_kwargs)
        size = sum(len(text) for text in texts if text is not None)
        size += _ID_BYTES * len(self.input_ids or ())
        return size + sum(
            len(message.content) + len(message.reasoning_content or "") + 256
            for message in self.messages or ()
        )

    def cut(self) -> Mapping[str, object]:
        """Return its first `CUT_CHARACTERS`."""
        cut = TextTruncator()
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: cut.value(value) for name, value in fields.items() if value is not None}


class TextTruncator:
    """Truncates a value after a number of text characters, without visiting the rest."""

    def __init__(self, characters: int = CUT_CHARACTERS) -> None:
        self._left = characters

    def value(self, value: object) -> object:
        """Return as much of it as fits."""
        match value:
            case str():
                taken = value[: max(0, self._left)]
                self._left -= len(value)
                return value if len(taken) == len(value) else taken + _MORE
            case tuple() | list():
                return self._items(cast("Sequence[object]", value))
            case msgspec.Struct():
                fields = msgspec.structs.asdict(value)
                defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
                kept = {name: one for name, one in fields.items() if one != defaults[name]}
                return {name: self.value(one) for name, one in kept.items()}
            case dict():
                return self._named(cast("Mapping[str, object]", value))
            case _:
                self._left -= len(str(value)) + 1
                return value

    def _named(self, values: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in values.items():
            if self._left <= 0:
                found[_MORE] = _MORE
                break
            self._left -= len(name)
            found[name] = self.value(value)
        return found

    def _items(self, values: Sequence[object]) -> list[object]:
        found: list[object] = []
        for value in values:
            if self._left <= 0:
                found.append(_MORE)
                break
            found.append(self.value(value))
        return found


class RequestRecord:
    """The record of one request.

    Attributes:
        request_id: The cluster's request id; `rid` is the client's, or the same.
        api: API of the request.
        received_unix_ms: Time of arrival.
        sampling: Its sampling parameters, if they are logged.
        content: Its input, if it is logged or dumped: truncated, or a `RecordedInput`.
        room: Characters of each output that may still be recorded.
        held_bytes: Size of its texts.
        texts: Output of each choice, in pieces; empty if outputs are not recorded.
        cut: Whether a text was truncated.
        logged: Whether its arrival was logged.
        private: Whether it is excluded from logs and dumps.
        finish_reasons: Finish reason of each choice; None while it is running.
        outcome: Finish reason of the last choice, or an error code.
    """

    __slots__ = (
        "api",
        "choices",
        "content",
        "cut",
        "decode_s",
        "e2e_s",
        "ended_at",
        "ended_unix_ms",
        "error",
        "finish_reasons",
        "first_token_s",
        "held_bytes",
        "logged",
        "outcome",
        "priority",
        "private",
        "received_unix_ms",
        "request_id",
        "rid",
        "room",
        "sampling",
        "tenant",
        "texts",
        "usage",
    )

    def __init__(
        self, gen_request: GenerationRequest, request_id: RequestId, received_unix_ms: int
    ) -> None:
        self.request_id = request_id
        self.rid = str(request_id if gen_request.key is None else gen_request.key)
        self.tenant = gen_request.tenant
        self.api = gen_request.api
        self.priority = gen_request.priority
        self.choices = gen_request.choices
        self.received_unix_ms = received_unix_ms
        self.sampling: Mapping[str, object] | None = None
        self.content: RecordedInput | Mapping[str, object] | None = None
        self.room = [0] * gen_request.choices
        self.held_bytes = _BASE_BYTES
        self.texts: list[list[str]] = [[] for _ in range(gen_request.choices)]
        self.cut = False
        self.logged = False
        self.private = gen_request.private
        self.finish_reasons: list[str | None] = [None] * gen_request.choices
        self.outcome: str | None = None
        self.error: str | None = None
        self.usage = Usage()
        self.ended_at: float | None = None
        self.ended_unix_ms: int | None = None
        self.first_token_s: float | None = None
        self.e2e_s: float | None = None
        self.decode_s: float | None = None

    def keep(self, choice: int, text: str) -> int:
        """Record as much of an output piece as fits; return its number of characters."""
        if len(text) > self.room[choice]:
            self.cut = True
            text = text[: self.room[choice]]
        if text:
            self.room[choice] -= len(text)
            self.texts[choice].append(text)
        return len(text)

    def finish(self, event: Finished) -> None:
        """A choice has finished."""
        self.finish_reasons[event.choice] = str(event.reason)


def sampling_of(gen_request: GenerationRequest) -> dict[str, object]:
    """Return the request's sampling parameters by SGLang's names; long ones are truncated."""
    found: dict[str, object] = {}
    for name, field in zip(
        gen_request.sampling.__struct_fields__,
        msgspec.structs.fields(gen_request.sampling),
        strict=True,
    ):
        value = getattr(gen_request.sampling, name)
        if name not in _NO_SAMPLING and value not in (None, {}, field.default):
            found[_NAMES.get(name, name)] = TextTruncator().value(value)
    named = {
        "max_new_tokens": gen_request.tokens_max,
        "n": gen_request.choices if gen_request.choices > 1 else None,
        "stop": gen_request.stop.strings or None,
        "stop_regex": gen_request.stop.patterns or None,
        "dimensions": None if gen_request.pooling is None else gen_request.pooling.dimensions,
    }
    return found | {
        name: TextTruncator().value(one) for name, one in named.items() if one is not None
    }
