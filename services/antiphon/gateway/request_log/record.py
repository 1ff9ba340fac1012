"""The record of one request, from its arrival until some time after its end.

The event loop updates a record until the request has ended; then it no longer changes, so that the
writer thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.wire.base import Usage
from antiphon.wire.tokenize import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.ids import RequestId, TenantId

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


class TextTruncator:
    """Truncates a value after a number of text characters, without visiting the rest."""

    def __init__(self, characters: int = CUT_CHARACTERS) -> None:
        self._left = characters

    def value(self, value: object) -> object:
        match value:
            case str():
                taken = value[: max(0, self._left)]
                self._left -= len(value)
                return value if len(taken) == len(value) else taken + _MORE
            case tuple() | list():
                return self._items(cast("Sequence[object]", value))
            case msgspec.Struct():
                return {
                    field.name: self.value(one)
                    for field in msgspec.structs.fields(value)
                    if (one := getattr(value, field.name)) != field.default
                }
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


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one request.

    Attributes:
        rid: The client's request id, or the cluster's.
        private: Whether it is excluded from logs and dumps.
        room: Characters of each output that may still be recorded.
        texts: Output of each choice, in pieces; empty if outputs are not recorded.
        finish_reasons: Finish reason of each choice; None while it is running.
        sampling: Its sampling parameters, if they are logged.
        content: Its input, if it is logged or dumped: a `RecordedInput`, or truncated.
        held_bytes: Size of its texts.
        cut: Whether a text was truncated.
        logged: Whether its arrival was logged.
        outcome: Finish reason of the last choice, or an error code.
    """

    request_id: RequestId
    rid: str
    tenant: TenantId
    api: str
    priority: int | None
    choices: int
    private: bool
    received_unix_ms: int
    room: list[int]
    texts: list[list[str]]
    finish_reasons: list[str | None]
    sampling: Mapping[str, object] | None = None
    content: object = None
    held_bytes: int = _BASE_BYTES
    cut: bool = False
    logged: bool = False
    outcome: str | None = None
    error: str | None = None
    usage: Usage = field(default_factory=Usage)
    ended_at: float | None = None
    ended_unix_ms: int | None = None
    first_token_s: float | None = None
    e2e_s: float | None = None
    decode_s: float | None = None

    @classmethod
    def of(
        cls, gen_request: GenerationRequest, request_id: RequestId, received_unix_ms: int
    ) -> RequestRecord:
        choices = gen_request.choices
        return cls(
            request_id=request_id,
            rid=str(request_id if gen_request.key is None else gen_request.key),
            tenant=gen_request.tenant,
            api=gen_request.api,
            priority=gen_request.priority,
            choices=choices,
            private=gen_request.private,
            received_unix_ms=received_unix_ms,
            room=[0] * choices,
            texts=[[] for _ in range(choices)],
            finish_reasons=[None] * choices,
        )

    def keep(self, choice: int, text: str) -> int:
        """Record as much of an output piece as fits; return its number of characters."""
        if len(text) > self.room[choice]:
            self.cut = True
            text = text[: self.room[choice]]
        if text:
            self.room[choice] -= len(text)
            self.texts[choice].append(text)
        return len(text)


def sampling_of(gen_request: GenerationRequest) -> dict[str, object]:
    """Return the request's sampling parameters by SGLang's names; long ones are truncated."""
    found: dict[str, object] = {}
    for each in msgspec.structs.fields(gen_request.sampling):
        value = getattr(gen_request.sampling, each.name)
        if each.name not in _NO_SAMPLING and value not in (None, {}, each.default):
            found[_NAMES.get(each.name, each.name)] = TextTruncator().value(value)
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
