"""The record of one request, from its arrival until some time after its end, and its log lines.

The event loop updates a record until the request has ended; then it no longer changes, so that the
writer thread may read it.
"""

from __future__ import annotations

import re
import time
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


RECEIVED, FINISHED, UNFINISHED = "request.received", "request.finished", "request.unfinished"
PARAMETERS, TEXTS, EVERYTHING = 1, 2, 3
"""Levels from which sampling parameters are logged, texts are logged, and texts are complete."""

_UNPRINTABLE = re.compile(
    r"[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
"""Characters that JSON leaves unescaped but that end a line or control a terminal."""


def received_line(record: RequestRecord, level: int) -> dict[str, object]:
    return _head(RECEIVED, record.received_unix_ms, record) | _request_fields(record, level)


def finished_line(record: RequestRecord, level: int) -> dict[str, object]:
    assert record.ended_unix_ms is not None
    line = _head(FINISHED, record.ended_unix_ms, record)
    line |= _request_fields(record, level) | _end(record)
    if level >= PARAMETERS and record.error is not None:
        line["error"] = record.error  # it may quote the client's input
    return line | (_output(record, level) if level >= TEXTS else {})


def exported_line(record: RequestRecord, model: str) -> dict[str, object]:
    assert record.ended_unix_ms is not None
    head = _head(FINISHED, record.ended_unix_ms, record)
    return {"timestamp": head["timestamp"], "model_name": model} | _named(record) | _end(record)


def dumped_line(record: RequestRecord, unix_ms: int) -> dict[str, object]:
    if record.ended_unix_ms is not None:
        return finished_line(record, EVERYTHING)
    line = _head(UNFINISHED, unix_ms, record) | _request_fields(record, EVERYTHING)
    return line | _output(record, EVERYTHING)


def as_json(line: Mapping[str, object]) -> bytes:
    return _json(line).encode() + b"\n"


def as_text(line: Mapping[str, object]) -> bytes:
    """Format a line as time, event and `name=value` words; values with spaces are JSON."""
    rest = dict(line)
    words = [str(rest.pop("timestamp")), str(rest.pop("event"))]
    words += [f"{name}={_word(value)}" for name, value in rest.items()]
    return " ".join(words).encode() + b"\n"


def stamp(unix_ms: int) -> str:
    """Format a time as `2026-11-20T15:46:01.123Z`."""
    seconds, milliseconds = divmod(unix_ms, 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{milliseconds:03d}Z"


def _head(event: str, unix_ms: int, record: RequestRecord) -> dict[str, object]:
    return {"timestamp": stamp(unix_ms), "event": event} | _named(record)


def _named(record: RequestRecord) -> dict[str, object]:
    found: dict[str, object] = {
        "rid": record.rid,
        "id": record.request_id,
        "tenant": record.tenant,
        "api": record.api,
        "n": record.choices,
        "request_received_ts": record.received_unix_ms / 1000,
    }
    return found if record.priority is None else found | {"priority": record.priority}


def _request_fields(record: RequestRecord, level: int) -> dict[str, object]:
    found: dict[str, object] = {}
    if level >= PARAMETERS and record.sampling is not None:
        found["sampling_params"] = record.sampling
    content = record.content
    if level >= TEXTS and content is not None:
        shortened = level < EVERYTHING and isinstance(content, RecordedInput)
        found["input"] = TextTruncator().value(content) if shortened else content
    return found


def _output(record: RequestRecord, level: int) -> dict[str, object]:
    texts = ["".join(pieces) for pieces in record.texts]
    if level < EVERYTHING:
        texts = [str(TextTruncator().value(text)) for text in texts]
    found: dict[str, object] = {"output": texts}
    # A truncated text below this ends with an ellipsis.
    return found | {"cut": True} if record.cut and level >= EVERYTHING else found


def _end(record: RequestRecord) -> dict[str, object]:
    assert record.ended_unix_ms is not None
    usage = record.usage
    return {
        "outcome": record.outcome,
        "finish_reasons": record.finish_reasons,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "request_finished_ts": record.ended_unix_ms / 1000,
        "e2e_latency": record.e2e_s,
        "first_token_latency": record.first_token_s,
        "decode_throughput": _throughput(record),
    }


def _throughput(record: RequestRecord) -> float | None:
    """Tokens per second after the first one."""
    tokens = record.usage.completion_tokens - 1
    return None if not record.decode_s or tokens < 1 else tokens / record.decode_s


def _word(value: object) -> str:
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "'):
        return value
    return _json(value)


def _json(value: object) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
