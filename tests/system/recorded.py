"""Recorded HTTP exchanges: a request, and of its answer what clients depend on.

Of an answer are kept its status, the `code` and `param` of an error, and its shape: the keys at
every depth with the types of their values. Of a stream, the shapes of its events in their order;
equal neighbours are kept once, since how much text an event carries depends on timing. Texts, ids,
numbers and times are left out; values that are names of the API, such as `finish_reason`, are kept.

`python -m tests.system.recorded URL` records the answers of a running stack again.
"""

from __future__ import annotations

import itertools
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDED = Path(__file__).with_name("recorded_requests.json")
TIMEOUT_S = 60
NAMES_OF_THE_API = frozenset(
    ("done_reason", "finish_reason", "object", "role", "status", "stop_reason", "type")
)
KEYED_BY_TEXT = frozenset(("top_logprobs",))

Json = Any
Exchange = dict[str, Json]


def play(url: str, requests: list[list[Json]]) -> list[Exchange]:
    """Send the requests in turn; `{id}` in a path is the id of the latest answer that had one."""
    exchanges: list[Exchange] = []
    latest_id = "none"
    for request in requests:
        method, path, *body = request
        status, kind, text = _send(url, str(method), str(path).replace("{id}", latest_id), *body)
        answer = _answer(status, kind, text)
        if isinstance(parsed := _parsed(text), dict) and isinstance(parsed.get("id"), str):
            latest_id = str(parsed["id"])
        exchanges.append({"send": request, **answer})
    return exchanges


def load() -> list[Exchange]:
    return json.loads(RECORDED.read_text())


def save(exchanges: list[Exchange]) -> None:
    """Write a line an exchange."""
    lines = (json.dumps(exchange, ensure_ascii=False) for exchange in exchanges)
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _send(url: str, method: str, path: str, body: Json = None) -> tuple[int, str, str]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read().decode()


def _answer(status: int, kind: str, text: str) -> Exchange:
    if kind == "text/event-stream":
        return {"status": status, "events": _events(map(_event, text.strip().split("\n\n")))}
    if kind == "application/x-ndjson":
        return {
            "status": status,
            "events": _events((_parsed(line), "") for line in text.splitlines()),
        }
    body = _parsed(text)
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        kept = {name: error[name] for name in ("code", "param") if name in error}
        return {"status": status, **kept, "keys": shape(body)}
    return {"status": status, "keys": shape(body)}


def _event(block: str) -> tuple[Json, str]:
    """The data of a server-sent event, and its other lines."""
    lines = [line.partition(": ") for line in block.splitlines()]
    data = next((_parsed(value) for name, _, value in lines if name == "data"), None)
    return data, "".join(f"{name}: {value} " for name, _, value in lines if name != "data")


def _events(events: Iterable[tuple[Json, str]]) -> list[str]:
    """The shapes in order, one choice after the other: how choices interleave is timing."""
    shapes: list[str] = []
    for _, together in itertools.groupby(events, lambda event: _choice(event[0]) is None):
        by_choice = sorted(together, key=lambda event: _choice(event[0]) or 0)
        shapes += [head + (data if data == "[DONE]" else shape(data)) for data, head in by_choice]
    return [one for one, _ in itertools.groupby(shapes)]


def _choice(data: Json) -> int | None:
    match data:
        case {"choices": [{"index": int(index)}, *_]} | {"index": int(index)}:
            return index
        case _:
            return None


def _parsed(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return text


def same(played: Exchange, recorded: Exchange) -> bool:
    """Whether two exchanges are equal, but for events that were merged with the next one.

    An event of a choice that goes on may be merged with its next event when tokens come close
    together, down to the event that ends it; no such event may have a shape that is not recorded.
    """
    if played.keys() != recorded.keys() or "events" not in played:
        return played == recorded
    events, expected = played["events"], recorded["events"]
    return {**played, "events": _lasting(events)} == {
        **recorded,
        "events": _lasting(expected),
    } and set(events) <= set(expected)


def _lasting(events: list[str]) -> list[str]:
    return [one for one, _ in itertools.groupby(event for event in events if not _may_merge(event))]


def _may_merge(event: str) -> bool:
    return "finish_reason: null" in event or ("done: bool" in event and "done_reason" not in event)


def shape(value: Json, key: str = "") -> str:
    """Return the keys of a JSON value at every depth, and the types of what they hold."""
    match value:
        case dict() if key in KEYED_BY_TEXT:
            return "{text: " + "|".join(sorted({shape(each) for each in value.values()})) + "}"
        case dict():
            fields = (f"{name}: {shape(each, name)}" for name, each in sorted(value.items()))
            return "{" + ", ".join(fields) + "}"
        case list():
            return "[" + "|".join(sorted({shape(each, key) for each in value})) + "]"
        case None:
            return "null"
        case bool():
            return "bool"
        case str():
            return repr(value) if key in NAMES_OF_THE_API else "str"
        case _:
            return "number"


if __name__ == "__main__":
    save(play(sys.argv[1], [exchange["send"] for exchange in load()]))
