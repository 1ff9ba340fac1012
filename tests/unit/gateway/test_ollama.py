"""Ollama's API: what its requests mean and what its client reads, whole and streamed."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import cast

import ollama
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import CALL, HI, TEXT, Body, call, failure, get, ok, post
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House
from tests.unit.gateway.test_tools import TOOLS

from antiphon.wire.errors import EngineError, InvalidRequest, Overloaded, PromptTooLong, WorkerLost
from antiphon.wire.heartbeat import WorkerStats
from antiphon.wire.sampling import GrammarKind, SamplingParams

CHAT = "/api/chat"
GENERATE = "/api/generate"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
REQUESTS: tuple[tuple[str, Body], ...] = ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"}))
RAW: tuple[str, Body] = (GENERATE, {"prompt": "hi", "raw": True})


def ollama_client(at: House) -> ollama.AsyncClient:
    return ollama.AsyncClient(at.url)


async def lines(at: House, path: str, body: Body) -> list[Body]:
    """The objects of a stream, which is what a body gets that has no `stream`."""
    status, text, headers = await post(at, path, body)
    assert status == 200, text
    assert headers["Content-Type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in text.splitlines()]


async def both(at: House, path: str, body: Body) -> Body:
    """The whole reply; a stream carries the same but for the times."""
    whole = await ok(at, path, body | {"stream": False})
    *pieces, last = await lines(at, path, body)
    assert last["done"] is True
    assert not any(piece["done"] for piece in pieces)
    message = _message(whole)
    streamed = [_message(piece) for piece in [*pieces, last]]
    for part in ("content", "thinking"):
        assert "".join(piece.get(part, "") for piece in streamed) == message.get(part, "")
    for part in ("tool_calls", "logprobs"):
        joined = [each for piece in streamed for each in piece.get(part, [])]
        assert _without_ids(joined) == _without_ids(message.get(part, []))
    for name in ("model", "done_reason", "prompt_eval_count", "eval_count", "load_duration"):
        assert last[name] == whole[name], name
    return whole


def _message(reply: Body) -> Body:
    """The fields of a reply and of its message."""
    return reply | reply.get("message", {"content": reply.get("response")})


def _without_ids(calls: list[Body]) -> list[Body]:
    """The id of a call is random."""
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


async def rejection(at: House, path: str, body: object) -> tuple[int, str]:
    """The status of an error and its text, which is all that there is."""
    status, reply, _ = await post(at, path, body)
    assert list(reply) == ["error"], reply
    return status, reply["error"]


async def test_client_reads_a_chat_whole_and_streamed(at: House) -> None:
    async with ollama_client(at) as client:
        whole = await client.chat(MODEL, HI)
        pieces = [piece async for piece in await client.chat(MODEL, HI, stream=True)]
    assert (whole.message.role, whole.message.content) == ("assistant", TEXT)
    assert (whole.model, whole.done, whole.done_reason) == (MODEL, True, "stop")
    assert (whole.prompt_eval_count, whole.eval_count) == (2, len(SCRIPT))
    found = [(piece.message.content, piece.done) for piece in pieces]
    assert found == [*((text, False) for text in SCRIPT), ("", True)]
    assert (pieces[0].eval_count, pieces[-1].eval_count) == (None, len(SCRIPT))


async def test_client_reads_a_completion_whole_and_streamed(at: House) -> None:
    async with ollama_client(at) as client:
        whole = await client.generate(MODEL, "hi", system="Be brief.")
        stream = await client.generate(MODEL, "hi", system="Be brief.", stream=True)
        pieces = [piece async for piece in stream]
    assert whole.response == "".join(piece.response or "" for piece in pieces) == TEXT
    assert pieces[-1].done_reason == whole.done_reason == "stop"
    for encode in at.cluster.encodes:
        turns = [(turn.role, turn.content) for turn in encode.messages or ()]
        assert turns == [("system", "Be brief."), ("user", "hi")]


async def test_durations_are_measured_and_nothing_is_loaded(at: House) -> None:
    before = datetime.now(UTC)
    reply = await both(at, CHAT, {"messages": HI})
    total, load, prompt, output = (
        reply[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")
    )
    assert load == 0
    assert min(prompt, output) > 0
    assert prompt + output <= total
    assert before <= datetime.fromisoformat(reply["created_at"]) <= datetime.now(UTC)
    assert total <= (datetime.now(UTC) - before).total_seconds() * 1e9


async def test_raw_prompt_is_the_whole_text(at: House) -> None:
    reply = await both(at, GENERATE, {"prompt": "once", "raw": True})
    assert reply["response"] == TEXT
    encode, sampling = at.cluster.encodes[-1], at.cluster.sampling
    assert (encode.prompt, encode.messages, encode.special_tokens) == ("once", None, True)
    # What is left open comes from the model, and the output may fill the context.
    assert (sampling.temperature, sampling.top_k) == (0.25, 7)
    assert sampling.max_new_tokens == CONTEXT_TOKENS - len("once")


async def test_suffix_is_used_without_a_template(at: House) -> None:
    bodies: tuple[Body, ...] = ({"prompt": "once"}, {"prompt": "once", "raw": True}, {})
    for body in bodies:
        reply = await both(at, GENERATE, body | {"suffix": "end"})
        assert reply["response"] == TEXT
        encode = at.cluster.encodes[-1]
        found = (encode.prompt, encode.suffix, encode.messages)
        assert found == (body.get("prompt", ""), "end", None)
    await both(at, GENERATE, {"prompt": "once", "suffix": ""})
    assert at.cluster.encodes[-1].messages is not None


async def test_options_are_the_sampling_parameters(at: House) -> None:
    options = {
        "num_predict": 9, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 3,
        "stop": ["a", "b"], "num_ctx": 4096, "num_thread": 2, "repeat_last_n": 64, "mirostat": 0,
        "typical_p": 1.0, "tfs_z": 1, "penalize_newline": True,
    }  # fmt: skip
    for path, body in (*REQUESTS, RAW):
        await both(at, path, body | {"options": options})
        assert at.cluster.sampling == SamplingParams(
            max_new_tokens=9,
            temperature=0.5,
            top_k=5,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            seed=3,
        )
        assert at.cluster.submits[-1].stop.strings == ("a", "b")


async def test_some_options_mean_no_limit(at: House) -> None:
    for limit in (-2, -1, CONTEXT_TOKENS, 2**31 - 1):
        options = {"num_predict": limit, "top_k": 0, "seed": -1}
        await both(at, CHAT, {"messages": HI, "options": options})
        sampling = at.cluster.sampling
        assert (sampling.max_new_tokens, sampling.top_k) == (CONTEXT_TOKENS - 2, 0)
        assert sampling.seed >= 0
    await both(at, CHAT, {"messages": HI, "options": {"num_predict": 0}})
    assert at.cluster.sampling.max_new_tokens == 0


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("json", GrammarKind.JSON_OBJECT, '""'),
        (SCHEMA, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ],
)
async def test_format_constrains_the_output(
    at: House, value: object, kind: GrammarKind, text: str
) -> None:
    for path, body in REQUESTS:
        await both(at, path, body | {"format": value})
        grammar = at.cluster.grammar
        assert (grammar.kind, json.loads(grammar.text or '""')) == (kind, json.loads(text))
        await both(at, path, body | {"format": ""})
        assert at.cluster.sampling.grammar is None


async def test_thinking_and_calls_are_apart_from_the_content(thinking: House) -> None:
    reply = await both(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    message = reply["message"]
    (call,) = message["tool_calls"]
    assert call.pop("id")
    assert call == {"function": {"index": 0, "name": "look", "arguments": {"at": "Rome"}}}
    assert (message["thinking"], message["content"]) == ("Where?", "Let me see.")
    assert reply["done_reason"] == "stop"
    async with ollama_client(thinking) as client:
        read = await client.chat(MODEL, HI, tools=cast("list[ollama.Tool]", TOOLS))
    assert read.message.tool_calls is not None
    (called,) = read.message.tool_calls
    assert (called.function.name, called.function.arguments) == ("look", {"at": "Rome"})
    assert thinking.cluster.template_tools[0]["name"] == "look"


@pytest.mark.parametrize(
    ("written", "content"),
    [
        (CALL[:45], '{"name": "look", "arguments": {"a'),
        (CALL.replace('{"at": "Rome"}', "[1]"), '{"name": "look", "arguments": [1]'),
    ],
)
async def test_call_that_is_cut_off_or_is_no_object_stays_text(
    thinking: House, written: str, content: str
) -> None:
    thinking.cluster.script = (written, "")
    reply = await both(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    assert "tool_calls" not in reply["message"]
    assert reply["message"]["content"] == content


async def test_arguments_of_many_lines_come_in_one_piece(thinking: House) -> None:
    thinking.cluster.script = (CALL.replace(" ", "\n").replace("\n{", "{", 1), "")
    await both(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    pieces = await lines(thinking, CHAT, {"messages": HI, "tools": TOOLS})
    (calls,) = (p["message"]["tool_calls"] for p in pieces if "tool_calls" in p["message"])
    (call,) = calls
    assert call["function"]["arguments"] == {"at": "Rome"}


async def test_earlier_turns_have_their_thinking_and_calls(at: House) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "Rome"}}}
    messages = [
        *HI,
        {"role": "assistant", "thinking": "Where?", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "look"},
    ]
    await both(at, CHAT, {"messages": messages})
    _, assistant, tool = at.cluster.turns
    assert assistant.reasoning_content == "Where?"
    (shown,) = assistant.tool_calls
    assert (shown.name, json.loads(shown.arguments)) == ("look", {"at": "Rome"})
    assert (tool.role, tool.content, tool.name) == ("tool", "rain", "look")


async def test_last_message_of_the_assistant_is_continued(at: House) -> None:
    await both(at, CHAT, {"messages": [*HI, {"role": "assistant", "content": "Hel"}]})
    assert at.cluster.encodes[-1].continue_final_message
    await both(at, CHAT, {"messages": HI})
    assert not at.cluster.encodes[-1].continue_final_message


@pytest.mark.parametrize(
    ("think", "options"),
    [
        (None, None),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
    ],
)
async def test_think_is_for_the_template(thinking: House, think: object, options: Body) -> None:
    for path, body in REQUESTS:
        reply = await both(thinking, path, body | {"think": think})
        assert _message(reply)["thinking"] == "Where?"
        assert thinking.cluster.template_options == options


async def test_form_of_the_output_begins_after_thinking(thinking: House) -> None:
    await both(thinking, CHAT, {"messages": HI, "format": SCHEMA})
    assert "</think>" in thinking.cluster.grammar.text


async def test_logprobs_are_in_the_reply(at: House) -> None:
    for path, body in (*REQUESTS, RAW):
        reply = await both(at, path, body | {"logprobs": True, "top_logprobs": 2})
        tokens = reply["logprobs"]
        found = [(token["token"], token["logprob"]) for token in tokens]
        assert found == list(zip(SCRIPT, (-0.5, -1.0, -1.5, -2.0), strict=True))
        assert len(tokens[0]["top_logprobs"]) == 2
        assert bytes(tokens[2]["bytes"]).decode() == SCRIPT[2]


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", "default", "", None])
async def test_model_has_a_tag_or_not(at: House, name: str | None) -> None:
    reply = await both(at, CHAT, {"messages": HI, "model": name})
    assert reply["model"] == (name or MODEL)


async def test_request_without_a_prompt_only_loads_the_model(at: House) -> None:
    async with ollama_client(at) as client:
        ready = await client.generate(f"{MODEL}:latest")
        assert (ready.response, ready.done, ready.done_reason) == ("", True, "load")
        hello = await client.chat(MODEL, keep_alive="5m")
        assert (hello.message.content, hello.done_reason) == ("", "load")
    assert at.cluster.submits == []
    for path in (CHAT, GENERATE):
        status, text = await rejection(at, path, {"model": "other"})
        assert (status, "other" in text) == (404, True)
        for at_once in (0, "0", "0s"):
            status, text = await rejection(at, path, {"keep_alive": at_once})
            assert (status, text.partition(":")[0]) == (400, "keep_alive")


@pytest.mark.parametrize(
    ("path", "fields", "field"),
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
async def test_unsupported_field_is_named(at: House, path: str, fields: Body, field: str) -> None:
    body: Body = {"messages": HI, "prompt": "hi"} | fields
    for stream in (True, False):
        status, text = await rejection(at, path, body | {"stream": stream})
        assert (status, field in text) == (400, True), text
    assert at.cluster.submits == []


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Overloaded("the queue is full", retry_after_s=1.0), 503, "the queue is full"),
        (InvalidRequest("grammar: no", param="grammar"), 400, "format: grammar: no"),
    ],
)
async def test_failure_before_the_first_token_has_a_status(
    at: House, error: EngineError, status: int, text: str
) -> None:
    at.cluster.script, at.cluster.row_error = ("",), error
    for path, body in REQUESTS:
        assert await rejection(at, path, body | {"format": "json"}) == (status, text)
    async with ollama_client(at) as client:
        with pytest.raises(ollama.ResponseError) as refused:
            await client.chat(MODEL, HI, format="json")
    assert (refused.value.error, refused.value.status_code) == (text, status)


async def test_later_failure_is_the_last_line(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker died")
    *pieces, last = await lines(at, CHAT, {"messages": HI})
    assert last == {"error": "the worker died"}
    assert not any(piece["done"] for piece in pieces)
    async with ollama_client(at) as client:
        stream = await client.generate(MODEL, "hi", stream=True)
        assert [(await anext(stream)).response for _ in SCRIPT[:-1]] == list(SCRIPT[:-1])
        with pytest.raises(ollama.ResponseError, match="the worker died"):
            await anext(stream)


async def test_error_in_a_prompt_does_not_name_messages(at: House) -> None:
    at.cluster.encode_error = InvalidRequest("chat template: no", param="messages")
    assert await rejection(at, GENERATE, {"prompt": "hi"}) == (400, "prompt: chat template: no")
    assert await rejection(at, CHAT, {"messages": HI}) == (400, "messages: chat template: no")
    at.cluster.encode_error = PromptTooLong.of(prompt_tokens=9, tokens_max=8, param="prompt")
    status, text = await rejection(at, GENERATE, {"prompt": "hi"})
    assert (status, "9 tokens" in text) == (400, True)


async def test_every_error_under_api_is_a_text(at: House) -> None:
    assert await rejection(at, "/api/signin", {}) == (404, "POST /api/signin does not exist")
    assert (await rejection(at, "/api/tags", {}))[0] == 405
    status, text = await rejection(at, CHAT, b"{")
    assert (status, "JSON" in text) == (400, True)
    assert (await failure(at, "/v1/nothing", {}))[1]["code"] == "not_found"


async def test_content_type_may_be_left_out_but_not_by_a_web_page(at: House) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = {"messages": HI, "stream": False}
    assert (await ok(at, CHAT, body, **form))["message"]["content"] == TEXT
    page = form | {"Origin": "http://elsewhere.example"}
    assert (await post(at, CHAT, body, **page)).status == 400
    assert (await post(at, "/v1/chat/completions", body, **form)).status == 400


async def test_pull_of_the_served_model_succeeds_and_of_another_is_a_404(at: House) -> None:
    async with ollama_client(at) as client:
        assert (await client.pull(MODEL)).status == "success"
        steps = [step.status async for step in await client.pull(f"{MODEL}:latest", stream=True)]
        assert steps[-1] == "success"
        with pytest.raises(ollama.ResponseError, match="--model-path") as unknown:
            await client.pull("llama3.2")
    assert unknown.value.status_code == 404


async def test_client_lists_and_shows_the_model(at: House) -> None:
    at.cluster.figures = WorkerStats(weight_bytes=3_000_000)
    await until(lambda: any(load.figures.weight_bytes for load in at.worker_loads))
    async with ollama_client(at) as client:
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
        assert each.details is not None
        assert (each.size, each.details.family) == (3_000_000, "llama")
    assert shown.details is not None
    assert shown.details.families == ["llama"]
    assert (shown.details.parameter_size, shown.details.quantization_level) == ("1.5M", "BF16")
    assert shown.capabilities == ["completion"]
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == CONTEXT_TOKENS
    parameters = [line.split() for line in (shown.parameters or "").splitlines()]
    assert parameters == [["temperature", "0.25"], ["top_k", "7"], ["repeat_penalty", "1.25"]]
    assert unknown.value.status_code == 404


async def test_capabilities_follow_the_formats_of_the_model(thinking: House) -> None:
    async with ollama_client(thinking) as client:
        shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    reply = await ok(thinking, "/api/show", {"name": MODEL})
    assert reply["capabilities"] == shown.capabilities
    status, text = await rejection(thinking, "/api/show", {"name": MODEL, "model": "other"})
    assert (status, "name" in text) == (400, True)


async def test_model_without_a_worker_is_not_running(at: House) -> None:
    await at.worker_leaves()
    async with ollama_client(at) as client:
        assert (await client.ps()).models == []
        assert len((await client.list()).models) == 1


async def test_unsupported_operations_are_refused_with_a_reason(at: House) -> None:
    async with ollama_client(at) as client:
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
    assert (await rejection(at, "/api/blobs/sha256:0", {}))[0] == 400


async def test_version_is_that_of_the_api(at: House) -> None:
    version = (await get(at, "/api/version")).body["version"]
    assert [part.isdecimal() for part in version.split(".")] == [True] * 3
    assert (await call(at, "HEAD", "/")).status == 200
