"""Formats records as lines of the request log, the metrics file, and crash dumps."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.request_log.record import RecordedInput, TextTruncator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.gateway.request_log.record import RequestRecord

RECEIVED, FINISHED, UNFINISHED = "request.received", "request.finished", "request.unfinished"
PARAMETERS, TEXTS, EVERYTHING = 1, 2, 3
"""Levels from which sampling parameters are logged, texts are logged, and texts are complete."""

_UNPRINTABLE = re.compile(
    r"[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
"""Characters that JSON leaves unescaped but that end a line or control a terminal."""


def received(record: RequestRecord, level: int) -> dict[str, object]:
    return _head(RECEIVED, record.received_unix_ms, record) | _request_fields(record, level)


def finished(record: RequestRecord, level: int) -> dict[str, object]:
    """Format the end of a request, with everything logged on arrival."""
    assert record.ended_unix_ms is not None
    line = _head(FINISHED, record.ended_unix_ms, record)
    line |= _request_fields(record, level) | _end(record)
    if level >= PARAMETERS and record.error is not None:
        line["error"] = record.error  # it may quote the client's input
    return line | (_output(record, level) if level >= TEXTS else {})


def exported(record: RequestRecord, model: str) -> dict[str, object]:
    assert record.ended_unix_ms is not None
    head = _head(FINISHED, record.ended_unix_ms, record)
    return {"timestamp": head["timestamp"], "model_name": model} | _named(record) | _end(record)


def dumped(record: RequestRecord, unix_ms: int) -> dict[str, object]:
    if record.ended_unix_ms is not None:
        return finished(record, EVERYTHING)
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
