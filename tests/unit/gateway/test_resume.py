"""Resumed streams: what a client has at any event and what it receives after it make the whole."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from tests.simulation.owner_world import submission
from tests.support.clock import ManualClock
from tests.support.wait import until
from tests.unit.gateway.calls import BODIES, CHAT, COMPLETE, HI, RESPONSES, post
from tests.unit.gateway.cluster import house

from antiphon.gateway.http.core.chat import OutputParserOptions
from antiphon.gateway.http.core.meta_info import GenerateOutputs, GenerateResponseOptions
from antiphon.gateway.http.core.resume import (
    RESUME_HEADER,
    Cursor,
    Position,
    Resumption,
)
from antiphon.gateway.http.native.parse import parse_generate
from antiphon.gateway.http.native.schema import GenerateBody
from antiphon.gateway.http.native.write import GenerateResponseWriter
from antiphon.gateway.http.openai.parse import OpenAiResponseOptions
from antiphon.gateway.http.openai.write import (
    ChatResponseWriter,
    CompletionHeader,
    CompletionResponseWriter,
    PromptEcho,
)
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.formats import reasoning_format, tool_format
from antiphon.gateway.parsing.tools.choice import ToolPlan
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.codec import pack_ids
from antiphon.wire.submit import ResumeWindow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.stream.stream import RequestStream

REQUEST = "0123456789abcdef0123456789abcdef"
SUBMIT = msgspec.structs.replace(
    submission(REQUEST, ManualClock()), choices=2, prompt_ids=pack_ids([7, 8])
)
WINDOW = ResumeWindow(window_ms=1000)
HEADER = CompletionHeader(id="x", created=7, model="m", weight_version="v")
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome", "n": [1, 2]}}\n</tool_call>'
TEXTS = (
    f"So it is, 世界.</think>\n\nWell 👋🏽, let me look.\n{CALL}\n{CALL}",
    f"Hm.</think>{CALL} <tool_call",
)
RESUME = {RESUME_HEADER: "30"}


class Stream:
    """What writers need of a stream."""

    submit = SUBMIT
    starts_in_reasoning = True
    name = None
    accepted_at = first_token_at = ended_at = None
    received_at = submitted_at = 0.0
    ended = None


def streams() -> list[RequestStream]:
    return [cast("RequestStream", Stream())]


def chat(**options: Any) -> ResponseWriter:
    parser = OutputParserOptions(
        plan=ToolPlan(format=tool_format("hermes")), reasoning=reasoning_format("qwen3")
    )
    reply_options = OpenAiResponseOptions(n=2, parser_options=parser, **options)
    return ChatResponseWriter(HEADER, streams(), reply_options, cached=False)


def completion() -> ResponseWriter:
    echoes = [PromptEcho("The prompt: ")]
    options = OpenAiResponseOptions(n=2, logprobs=True, usage_last=True, echo=True)
    return CompletionResponseWriter(HEADER, streams(), options, cached=False, echoes=echoes)


def generate(*, incremental: bool) -> ResponseWriter:
    body = msgspec.convert({"text": ["x"], "sampling_params": {"n": 2}}, GenerateBody)
    options = GenerateResponseOptions(logprobs=True, interval=3)
    outputs = GenerateOutputs(
        streams(), [options], firsts=[None], rank_of=lambda _: None, weight_version="v"
    )
    parsed = msgspec.structs.replace(parse_generate(body), all_reply_options=(options,))
    return GenerateResponseWriter(parsed, outputs, incremental=incremental)


WRITERS: dict[str, Callable[[], ResponseWriter]] = {
    "chat": chat,
    "chat, usage in each chunk": lambda: chat(usage_always=True, usage_last=True),
    "completion, logprobs, echo": completion,
    "generate, cumulative": lambda: generate(incremental=False),
    "generate, incremental": lambda: generate(incremental=True),
}


def delta(choice: int, first: int, last: int) -> TextDelta:
    """Text between two places, in characters, each of which is one token."""
    text, count = TEXTS[choice], last - first
    details = TokenOutputs(
        count=count,
        token_ids=pack_ids([ord(letter) % 1000 for letter in text[first:last]]),
        logprobs=pack_floats([-0.5 * n for n in range(first, last)]),
    )
    chunk = TokenOutputsChunk(
        offset=first, details=details, texts={ord(a) % 1000: a for a in text[first:last]}
    )
    usage = Usage(prompt_tokens=2, completion_tokens=last)
    return TextDelta(choice, len(text[:first].encode()), text[first:last], usage, chunk)


def inputs(rng: random.Random) -> Iterator[TextDelta | Finished]:
    """The events of two choices, in any pieces and any order."""
    queues: list[list[TextDelta | Finished]] = []
    for choice, text in enumerate(TEXTS):
        cuts = [0, *sorted(rng.sample(range(1, len(text)), rng.randint(0, 12))), len(text)]
        pieces = [delta(choice, a, b) for a, b in itertools.pairwise(cuts)]
        end = Finished(choice, FinishReason.STOP, None, len(text.encode()))
        queues.append([*pieces, end])
    while any(queues):
        yield rng.choice([queue for queue in queues if queue]).pop(0)


def written(writer: ResponseWriter, rng: random.Random) -> list[tuple[str, str]]:
    """The events of a whole stream, as (id, data)."""
    data = writer.begin()
    for event in inputs(rng):
        data += writer.chunks(0, [event])
    data += writer.end([Usage(prompt_tokens=2, completion_tokens=5)])
    events: list[tuple[str, str]] = []
    for event in data.decode().split("\n\n")[:-1]:
        name, _, text = event.partition("\n")
        assert name.startswith("id: ")
        events.append((name.removeprefix("id: "), text.removeprefix("data: ")))
    return events


def read(events: list[tuple[str, str]], *, incremental: bool) -> object:
    """What a client makes of events."""
    found: dict[object, Any] = {}

    def add(*key: object, value: Any) -> None:
        found[key] = found[key] + value if key in found else value

    for _, data in events:
        if data == "[DONE]":
            add("done", value=1)
            continue
        chunk = json.loads(data)
        if "meta_info" in chunk:
            meta = chunk["meta_info"]
            which = chunk["index"]
            logprobs = meta.get("output_token_logprobs", [])
            if incremental:
                add(which, value=chunk["text"])
                add(which, "logprobs", value=logprobs)
            else:
                assert chunk["text"].startswith(found.get((which,), ""))
                found[which,], found[which, "logprobs"] = chunk["text"], logprobs
        for choice in chunk.get("choices", ()):
            message = choice.get("delta") or {}
            for name in ("role", "content", "reasoning_content"):
                if message.get(name):
                    add(choice["index"], name, value=message[name])
            if choice.get("text"):
                add(choice["index"], "text", value=choice["text"])
            for called in message.get("tool_calls") or ():
                function = called["function"]
                add(choice["index"], called["index"], value=function.get("name") or "")
                add(choice["index"], called["index"], value=function["arguments"])
            if choice.get("logprobs"):
                for name, column in choice["logprobs"].items():
                    add(choice["index"], name, value=column or [])
            if choice.get("finish_reason"):
                add(choice["index"], "reason", value=choice["finish_reason"])
        if chunk.get("usage") and not chunk.get("choices"):
            add("usage", value=[chunk["usage"]])
    return found


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("seed", range(12))
def test_stream_resumed_at_any_event_has_the_rest(name: str, seed: int) -> None:
    rng = random.Random(seed)
    incremental = name.endswith("incremental")
    whole = written(Resumption(WINDOW, None).writer(WRITERS[name](), SUBMIT), rng)
    assert len({event_id for event_id, _ in whole}) == len(whole)
    expected = read(whole, incremental=incremental)
    for at, (event_id, _) in enumerate(whole, 1):
        resumption = Resumption(WINDOW, Position.parse(event_id))
        rest = written(resumption.writer(WRITERS[name](), SUBMIT), rng)
        assert read(whole[:at] + rest, incremental=incremental) == expected, event_id
        if rest:  # and once more, at an event of the resumed stream
            cut = rng.randrange(len(rest))
            again = Resumption(WINDOW, Position.parse(rest[cut][0]))
            last = written(again.writer(WRITERS[name](), SUBMIT), rng)
            events = whole[:at] + rest[: cut + 1] + last
            assert read(events, incremental=incremental) == expected, (event_id, rest[cut][0])


@pytest.mark.parametrize(
    "text",
    [
        REQUEST,
        f"{REQUEST}.0,0",
        f"{REQUEST}.5:-2,7:3$",
        f"{REQUEST}.5,7~2",
        f"{REQUEST}.5,7~2.1.9$",
    ],
)
def test_position_is_written_as_it_is_read(text: str) -> None:
    assert str(Position.parse(text)) == text


def test_cursor_without_token_outputs_covers_by_its_text() -> None:
    assert Cursor(5).covers(Cursor(5, 9))
    assert not Cursor(4).covers(Cursor(5))
    assert not Cursor(5, 2).covers(Cursor(5, 3))


@pytest.mark.parametrize("seconds", ["0", "61", "-1", "nan", "soon", ""])
async def test_window_is_a_number_of_seconds(seconds: str) -> None:
    async with house() as at:
        body = BODIES[CHAT] | {"stream": True}
        reply = await post(at, CHAT, body, **{RESUME_HEADER: seconds})
    assert reply.status == 400
    assert reply.body["error"]["param"] == RESUME_HEADER


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, {"messages": HI}, "only streams"),
        (COMPLETE, {"prompt": ["a", "b"], "stream": True}, "several prompts"),
        (RESPONSES, BODIES[RESPONSES] | {"stream": True}, "this API"),
        ("/api/chat", BODIES["/api/chat"], "this API"),
    ],
)
async def test_streams_that_cannot_be_resumed_are_refused(
    path: str, body: dict[str, Any], reason: str
) -> None:
    async with house() as at:
        reply = await post(at, path, body, **RESUME)
        assert reply.status == 400
        assert reason in json.dumps(reply.body)
        await until(lambda: not at.open_count)


async def test_events_have_ids_only_if_they_are_asked_for() -> None:
    async with house() as at:
        body = BODIES[COMPLETE] | {"stream": True}
        assert "id: " not in (await post(at, COMPLETE, body)).body
        reply = await post(at, COMPLETE, body, **RESUME)
        ids = [line[4:] for line in reply.body.splitlines() if line.startswith("id: ")]
    assert ids[0].startswith(reply.headers["X-Request-Id"])
    assert len(ids) == reply.body.count("data: ")
