"""Ollama's API: what its bodies ask for, what its client is told, whole and streamed."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import aiohttp
import ollama
import pytest
from tests.support.wait import until
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, house
from tests.unit.gateway.test_http import HI, post
from tests.unit.gateway.test_tools import CALL, TOOLS

from antiphon.wire.errors import EngineError, InvalidRequest, Overloaded, PromptTooLong, WorkerLost
from antiphon.wire.heartbeat import WorkerStats
from antiphon.wire.sampling import GrammarKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator


TEXT = "".join(SCRIPT)
CHAT = "/api/chat"
GENERATE = "/api/generate"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
Body = dict[str, object]
MESSAGES: list[dict[str, str]] = HI
ASKED: tuple[tuple[str, Body], ...] = ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"}))
RAW: tuple[str, Body] = (GENERATE, {"prompt": "hi", "raw": True})


@pytest.fixture
async def thinking() -> AsyncIterator[House]:
    """A house whose model thinks, speaks and calls."""
    async with house(tool_call_parser="hermes", reasoning_parser="qwen3") as world:
        world.cluster.script = (
            "<thi", "nk>Where?", "</think>", "Let me see. ", CALL[:8], CALL[8:40], CALL[40:], "",
        )  # fmt: skip
        yield world


@asynccontextmanager
async def talking(at: House) -> AsyncGenerator[ollama.AsyncClient]:
    async with ollama.AsyncClient(at.url) as client:
        yield client


async def lines(at: House, path: str, body: Body) -> list[Body]:
    """Send a body that says nothing of streams; return the objects of the stream."""
    async with aiohttp.ClientSession() as session, session.post(at.url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await reply.text()).splitlines()]


async def both(at: House, path: str, body: Body) -> Body:
    """Ask whole and streamed, which say the same but for the times; return it."""
    status, whole, _ = await post(at, path, body | {"stream": False})
    assert status == 200, whole
    *pieces, last = await lines(at, path, body)
    assert last["done"] is True
    assert not any(piece["done"] for piece in pieces)
    said = _said(whole)
    streamed = [_said(piece) for piece in [*pieces, last]]
    for part in ("content", "thinking"):
        assert "".join(str(one.get(part, "")) for one in streamed) == said.get(part, "")
    for part in ("tool_calls", "logprobs"):
        joined = [each for one in streamed for each in cast("list[object]", one.get(part, []))]
        assert [_nameless(each) for each in joined] == [
            _nameless(each) for each in cast("list[object]", said.get(part, []))
        ]
    for name in ("model", "done_reason", "prompt_eval_count", "eval_count", "load_duration"):
        assert last[name] == whole[name], name
    return whole


def _said(told: Body) -> Body:
    message = cast("Body", told.get("message", {"content": told.get("response")}))
    return told | message


def _nameless(value: object) -> object:
    """Without the id of a call, which is drawn anew for each."""
    if isinstance(value, dict):
        return {name: each for name, each in cast("Body", value).items() if name != "id"}
    return value


def sampling(at: House) -> SamplingParams:
    return at.cluster.submits[-1].sampling


async def refusal(at: House, path: str, body: Body) -> tuple[int, str]:
    """The status of an error and its text, which is all that there is."""
    status, reply, _ = await post(at, path, body)
    assert list(reply) == ["error"], reply
    return status, str(reply["error"])


async def test_the_client_hears_a_chat_whole_and_streamed(at: House) -> None:
    async with talking(at) as client:
        whole = await client.chat(MODEL, MESSAGES)
        pieces = [piece async for piece in await client.chat(MODEL, MESSAGES, stream=True)]
    assert whole.message.role == "assistant"
    assert whole.message.content == TEXT
    assert (whole.model, whole.done, whole.done_reason) == (MODEL, True, "stop")
    assert (whole.prompt_eval_count, whole.eval_count) == (2, len(SCRIPT))
    assert [piece.message.content for piece in pieces] == [*SCRIPT, ""]
    assert [piece.done for piece in pieces] == [False] * len(SCRIPT) + [True]
    assert pieces[-1].eval_count == len(SCRIPT)
    assert pieces[0].eval_count is None


async def test_the_client_hears_the_answer_to_a_prompt_whole_and_streamed(at: House) -> None:
    async with talking(at) as client:
        whole = await client.generate(MODEL, "hi", system="Be brief.")
        pieces = [
            piece
            async for piece in await client.generate(MODEL, "hi", system="Be brief.", stream=True)
        ]
    assert whole.response == TEXT
    assert "".join(piece.response or "" for piece in pieces) == TEXT
    assert pieces[-1].done_reason == whole.done_reason == "stop"
    for encode in at.cluster.encodes:
        turns = [(turn.role, turn.content) for turn in encode.messages or ()]
        assert turns == [("system", "Be brief."), ("user", "hi")]


async def test_times_are_measured_and_nothing_is_loaded(at: House) -> None:
    before = datetime.now(UTC)
    told = await both(at, CHAT, {"messages": HI})
    total, load, prompt, answer = (
        cast("int", told[f"{name}_duration"]) for name in ("total", "load", "prompt_eval", "eval")
    )
    assert load == 0
    assert min(prompt, answer) > 0
    assert prompt + answer <= total
    made = datetime.fromisoformat(str(told["created_at"]))
    assert before <= made <= datetime.now(UTC)
    assert total <= (datetime.now(UTC) - before).total_seconds() * 1e9


async def test_a_raw_prompt_is_the_whole_text(at: House) -> None:
    told = await both(at, GENERATE, {"prompt": "once", "raw": True})
    assert told["response"] == TEXT
    encode = at.cluster.encodes[-1]
    assert (encode.prompt, encode.messages, encode.special_tokens) == ("once", None, True)
    # What is left open comes from the model, and the answer may fill the context.
    assert (sampling(at).temperature, sampling(at).top_k) == (0.25, 7)
    assert sampling(at).max_new_tokens == CONTEXT_TOKENS - len("once")


async def test_a_gap_is_filled_without_a_template(at: House) -> None:
    bodies: tuple[Body, ...] = ({"prompt": "once"}, {"prompt": "once", "raw": True}, {})
    for body in bodies:
        told = await both(at, GENERATE, body | {"suffix": "end"})
        assert told["response"] == TEXT
        encode = at.cluster.encodes[-1]
        assert (encode.prompt, encode.suffix) == (body.get("prompt", ""), "end")
        assert encode.messages is None
    await both(at, GENERATE, {"prompt": "once", "suffix": ""})
    assert at.cluster.encodes[-1].messages is not None


async def test_options_are_what_tokens_are_drawn_by(at: House) -> None:
    options = {
        "num_predict": 9, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 3,
        "stop": ["a", "b"], "num_ctx": 4096, "num_thread": 2, "repeat_last_n": 64, "mirostat": 0,
        "typical_p": 1.0, "tfs_z": 1, "penalize_newline": True,
    }  # fmt: skip
    for path, body in (*ASKED, RAW):
        await both(at, path, body | {"options": options})
        drawn = sampling(at)
        assert drawn.max_new_tokens == 9
        assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.5, 5, 0.5, 0.25)
        penalties = (drawn.repetition_penalty, drawn.presence_penalty, drawn.frequency_penalty)
        assert penalties == (1.5, 0.5, -0.5)
        assert drawn.seed == 3
        assert at.cluster.submits[-1].stop.strings == ("a", "b")


async def test_some_options_say_that_there_is_no_limit(at: House) -> None:
    for limit in (-2, -1, CONTEXT_TOKENS, 2**31 - 1):
        options = {"num_predict": limit, "top_k": 0, "seed": -1}
        await both(at, CHAT, {"messages": HI, "options": options})
        assert sampling(at).max_new_tokens == CONTEXT_TOKENS - 2
        assert sampling(at).top_k == 0
        assert sampling(at).seed >= 0
    await both(at, CHAT, {"messages": HI, "options": {"num_predict": 0}})
    assert sampling(at).max_new_tokens == 0


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [("json", GrammarKind.JSON_OBJECT, ""), (SCHEMA, GrammarKind.JSON_SCHEMA, None)],
)
async def test_a_format_is_the_form_of_the_answer(
    at: House, said: object, kind: GrammarKind, text: str | None
) -> None:
    for path, body in ASKED:
        await both(at, path, body | {"format": said})
        grammar = sampling(at).grammar
        assert grammar is not None
        assert grammar.kind is kind
        assert grammar.text == text or json.loads(grammar.text) == SCHEMA
        await both(at, path, body | {"format": ""})
        assert sampling(at).grammar is None


async def test_thinking_and_calls_are_told_apart_from_the_content(thinking: House) -> None:
    told = await both(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    message = cast("Body", told["message"])
    (call,) = cast("list[Body]", message["tool_calls"])
    assert call.pop("id")
    assert call == {"function": {"index": 0, "name": "look", "arguments": {"at": "Rome"}}}
    assert (message["thinking"], message["content"]) == ("Where?", "Let me see.")
    assert told["done_reason"] == "stop"
    async with talking(thinking) as client:
        answer = await client.chat(MODEL, MESSAGES, tools=cast("list[ollama.Tool]", TOOLS))
    calls = answer.message.tool_calls
    assert calls is not None
    (heard,) = calls
    assert (heard.function.name, heard.function.arguments) == ("look", {"at": "Rome"})
    shown = json.loads(thinking.cluster.encodes[-1].template.tools or "")
    assert shown[0]["function"]["name"] == "look"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (CALL[:45], '{"name": "look", "arguments": {"a'),
        (CALL.replace('{"at": "Rome"}', "[1]"), '{"name": "look", "arguments": [1]'),
    ],
)
async def test_a_call_that_is_cut_off_or_is_no_object_stays_text(
    thinking: House, said: str, told: str
) -> None:
    thinking.cluster.script = (said, "")
    reply = await both(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    message = cast("Body", reply["message"])
    assert "tool_calls" not in message
    assert message["content"] == told


async def test_arguments_of_many_lines_are_told_in_one(thinking: House) -> None:
    thinking.cluster.script = (CALL.replace(" ", "\n").replace("\n{", "{", 1), "")
    await both(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    *pieces, _ = await lines(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    (told,) = (piece for piece in pieces if "tool_calls" in cast("Body", piece["message"]))
    (call,) = cast("list[dict[str, Body]]", cast("Body", told["message"])["tool_calls"])
    assert call["function"]["arguments"] == {"at": "Rome"}


async def test_earlier_turns_are_shown_with_their_thoughts_and_calls(at: House) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "Rome"}}}
    messages = [
        *HI,
        {"role": "assistant", "thinking": "Where?", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "look"},
    ]
    await both(at, CHAT, {"messages": messages})
    turns = at.cluster.encodes[-1].messages
    assert turns is not None
    _, asked, answered = turns
    assert asked.reasoning_content == "Where?"
    (shown,) = asked.tool_calls
    assert (shown.name, json.loads(shown.arguments)) == ("look", {"at": "Rome"})
    assert (answered.role, answered.content, answered.name) == ("tool", "rain", "look")


async def test_a_last_message_of_the_assistant_is_continued(at: House) -> None:
    await both(at, CHAT, {"messages": [*HI, {"role": "assistant", "content": "Hel"}]})
    assert at.cluster.encodes[-1].continue_final_message
    await both(at, CHAT, {"messages": HI})
    assert not at.cluster.encodes[-1].continue_final_message


@pytest.mark.parametrize(
    ("think", "shown"),
    [
        (None, None),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
    ],
)
async def test_think_is_for_the_template(thinking: House, think: object, shown: Body) -> None:
    for path, body in ASKED:
        told = await both(thinking, path, body | {"think": think})
        assert _said(told)["thinking"] == "Where?"
        options = thinking.cluster.encodes[-1].template.options
        assert (None if options is None else json.loads(options)) == shown


async def test_a_form_begins_behind_the_thinking(thinking: House) -> None:
    await both(thinking, CHAT, {"messages": HI, "format": SCHEMA})
    grammar = sampling(thinking).grammar
    assert grammar is not None
    assert "</think>" in grammar.text


async def test_log_probabilities_are_told(at: House) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    for path, body in (*ASKED, RAW):
        told = await both(at, path, body | asked)
        tokens = cast("list[Body]", told["logprobs"])
        assert [token["token"] for token in tokens] == list(SCRIPT)
        assert [token["logprob"] for token in tokens] == [-0.5, -1.0, -1.5, -2.0]
        assert len(cast("list[Body]", tokens[0]["top_logprobs"])) == 2
        assert bytes(cast("list[int]", tokens[2]["bytes"])).decode() == SCRIPT[2]


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", "default", "", None])
async def test_the_model_has_a_tag_or_not(at: House, name: str | None) -> None:
    told = await both(at, CHAT, {"messages": HI, "model": name})
    assert told["model"] == (name or MODEL)


async def test_nothing_to_say_asks_whether_the_model_is_there(at: House) -> None:
    async with talking(at) as client:
        ready = await client.generate(f"{MODEL}:latest")
        assert (ready.response, ready.done, ready.done_reason) == ("", True, "load")
        hello = await client.chat(MODEL, keep_alive="5m")
        assert (hello.message.content, hello.done_reason) == ("", "load")
    assert at.cluster.submits == []
    for path in (CHAT, GENERATE):
        status, text = await refusal(at, path, {"model": "other"})
        assert (status, "other" in text) == (404, True)
        for at_once in (0, "0", "0s"):
            status, text = await refusal(at, path, {"keep_alive": at_once})
            assert (status, text.partition(":")[0]) == (400, "keep_alive")


@pytest.mark.parametrize(
    ("path", "said", "field"),
    [
        (GENERATE, {"suffix": "b", "system": "a"}, "system"),
        (GENERATE, {"suffix": "b", "think": True}, "think"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"context": [1]}, "context"),
        (GENERATE, {"images": ["aGk="]}, "images"),
        (GENERATE, {"raw": True, "system": "a"}, "system"),
        (GENERATE, {"raw": True, "think": True}, "think"),
        (GENERATE, {"raw": True, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"truncate": True}, "truncate"),
        (CHAT, {"think": True}, "think"),
        (CHAT, {"think": "very"}, "think"),
        (CHAT, {"tools": TOOLS}, "tools"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "[0].images"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "god", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"options": {"typical_p": 0.7}}, "options.typical_p"),
        (CHAT, {"options": {"repeat_last_n": 33}}, "options.repeat_last_n"),
        (CHAT, {"options": {"penalize_newline": False}}, "options.penalize_newline"),
    ],
)
async def test_what_is_not_served_is_named(at: House, path: str, said: Body, field: str) -> None:
    body: Body = {"messages": HI, "prompt": "hi"} | said
    for stream in (True, False):
        status, text = await refusal(at, path, body | {"stream": stream})
        assert (status, field in text) == (400, True), text
    assert at.cluster.submits == []


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Overloaded("the queue is full", retry_after_s=1.0), 503, "the queue is full"),
        (InvalidRequest("grammar: no", param="grammar"), 400, "format: grammar: no"),
    ],
)
async def test_what_fails_before_the_first_word_has_a_status(
    at: House, error: EngineError, status: int, text: str
) -> None:
    at.cluster.script, at.cluster.row_error = ("",), error
    for path, body in ASKED:
        assert await refusal(at, path, body | {"format": "json"}) == (status, text)
    async with talking(at) as client:
        with pytest.raises(ollama.ResponseError) as refused:
            await client.chat(MODEL, MESSAGES, format="json")
    assert (refused.value.error, refused.value.status_code) == (text, status)


async def test_what_fails_later_is_a_line(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker died")
    *pieces, last = await lines(at, CHAT, {"messages": HI})
    assert last == {"error": "the worker died"}
    assert not any(piece["done"] for piece in pieces)
    async with talking(at) as client:
        told = await client.generate(MODEL, "hi", stream=True)
        assert [(await anext(told)).response for _ in SCRIPT[:-1]] == list(SCRIPT[:-1])
        with pytest.raises(ollama.ResponseError, match="the worker died"):
            await anext(told)


async def test_what_is_wrong_with_a_prompt_is_not_blamed_on_messages(at: House) -> None:
    at.cluster.encode_error = InvalidRequest("chat template: no", param="messages")
    assert await refusal(at, GENERATE, {"prompt": "hi"}) == (400, "prompt: chat template: no")
    assert await refusal(at, CHAT, {"messages": HI}) == (400, "messages: chat template: no")
    at.cluster.encode_error = PromptTooLong.of(prompt_tokens=9, tokens_max=8, param="prompt")
    status, text = await refusal(at, GENERATE, {"prompt": "hi"})
    assert (status, "9 tokens" in text) == (400, True)


async def test_every_error_beneath_api_is_a_text(at: House) -> None:
    assert await refusal(at, "/api/signin", {}) == (404, "POST /api/signin does not exist")
    assert (await refusal(at, "/api/tags", {}))[0] == 405
    async with aiohttp.ClientSession() as session:
        async with session.post(at.url + CHAT, data=b"{") as reply:
            assert reply.status == 400
            assert "JSON" in (await reply.json())["error"]
        async with session.post(f"{at.url}/v1/nothing", json={}) as reply:
            assert (await reply.json())["error"]["code"] == "not_found"


async def test_the_type_of_a_body_may_be_left_open_but_not_by_a_page(at: House) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"messages": HI, "stream": False})
    async with aiohttp.ClientSession(at.url, headers=headers) as session:
        async with session.post(CHAT, data=body) as reply:
            assert (await reply.json())["message"]["content"] == TEXT
        origin = {"Origin": "http://elsewhere.example"}
        async with session.post(CHAT, data=body, headers=origin) as reply:
            assert reply.status == 400
        async with session.post("/v1/chat/completions", data=body) as reply:
            assert reply.status == 400


async def test_pull_of_the_served_model_succeeds_and_of_another_is_a_404(at: House) -> None:
    async with talking(at) as client:
        assert (await client.pull(MODEL)).status == "success"
        steps = [step.status async for step in await client.pull(f"{MODEL}:latest", stream=True)]
        assert steps[-1] == "success"
        with pytest.raises(ollama.ResponseError, match="--model-path") as unknown:
            await client.pull("llama3.2")
    assert unknown.value.status_code == 404


async def test_the_client_is_told_what_there_is(at: House) -> None:
    at.cluster.figures = WorkerStats(weight_bytes=3_000_000)
    await until(
        lambda: any(
            peer.heartbeat.worker and peer.heartbeat.worker.figures.weight_bytes
            for peer in at.workers
        )
    )
    async with talking(at) as client:
        (listed,) = (await client.list()).models
        (running,) = (await client.ps()).models
        shown = await client.show(f"{MODEL}:latest")
        with pytest.raises(ollama.ResponseError) as unknown:
            await client.show("other")
    assert listed.model == running.model == running.name == f"{MODEL}:latest"
    assert listed.modified_at is not None
    assert shown.modified_at == listed.modified_at <= datetime.now(UTC)
    assert running.context_length == CONTEXT_TOKENS
    assert running.expires_at is not None
    assert running.expires_at.year == 9999
    for each in (listed, running):
        assert re.fullmatch("[0-9a-f]{64}", each.digest or "")
        assert each.size == 3_000_000
        assert each.details is not None
        assert each.details.family == "llama"
    assert shown.details is not None
    assert shown.details.families == ["llama"]
    assert (shown.details.parameter_size, shown.details.quantization_level) == ("1.5M", "BF16")
    assert shown.capabilities == ["completion"]
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == CONTEXT_TOKENS
    said = [line.split() for line in (shown.parameters or "").splitlines()]
    assert said == [["temperature", "0.25"], ["top_k", "7"], ["repeat_penalty", "1.25"]]
    assert unknown.value.status_code == 404


async def test_a_model_can_do_what_its_formats_say(thinking: House) -> None:
    async with talking(thinking) as client:
        shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    _, reply, _ = await post(thinking, "/api/show", {"name": MODEL})
    assert reply["capabilities"] == shown.capabilities
    status, text = await refusal(thinking, "/api/show", {"name": MODEL, "model": "other"})
    assert (status, "name" in text) == (400, True)


async def test_a_model_that_no_worker_runs_is_not_running(at: House) -> None:
    await at.worker_leaves()
    async with talking(at) as client:
        assert (await client.ps()).models == []
        assert len((await client.list()).models) == 1


async def test_what_is_not_done_to_models_is_refused_with_a_reason(at: House) -> None:
    async with talking(at) as client:
        for refused in (
            client.push(MODEL),
            client.create(MODEL, from_="other"),
            client.copy(MODEL, "other"),
            client.delete(MODEL),
            client.embed(MODEL, "hi"),
            client.embeddings(MODEL, "hi"),
        ):
            with pytest.raises(ollama.ResponseError) as error:
                await refused
            assert error.value.status_code == 400
            assert error.value.error
    assert (await refusal(at, "/api/blobs/sha256:0", {}))[0] == 400


async def test_the_version_is_that_of_the_api(at: House) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{at.url}/api/version") as reply,
    ):
        version = (await reply.json())["version"]
        assert [part.isdecimal() for part in version.split(".")] == [True] * 3
    async with aiohttp.ClientSession() as session, session.head(at.url) as reply:
        assert reply.status == 200
