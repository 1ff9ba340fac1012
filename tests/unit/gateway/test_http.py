"""The HTTP API on a real socket: responses, streams, every error, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import openai
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    HI,
    TEXT,
    Body,
    chunks,
    failure,
    get,
    ok,
    openai_client,
    post,
    refusal,
    running_post,
    stream,
)
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, fails_to_start, house

from antiphon.gateway.requests import tokenizer_client as encode
from antiphon.service.startup import CannotStart
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import EngineError, Overloaded, Unavailable, WorkerLost
from antiphon.wire.sampling import LogitBias, SamplingParams, StopStrings, TokenOutputParams
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


MISSING = object()
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
OBJECT = {"type": "json_object"}
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


async def test_openai_client_reads_the_same_streamed_and_whole(at: House) -> None:
    async with openai_client(at) as client:
        create = partial(client.chat.completions.create, model=MODEL, messages=HI)
        whole = await create()
        streamed = await create(stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in streamed]
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, len(SCRIPT))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == TEXT
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_stream_has_role_text_end_usage_and_done_in_this_order(at: House) -> None:
    body = {"messages": HI, "stream_options": {"include_usage": True}}
    events = await chunks(at, CHAT, body)
    plain = {"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None}
    delta = {"reasoning_content": None}
    choices = [
        plain | {"delta": delta | {"role": "assistant", "content": ""}},
        *(plain | {"delta": delta | {"content": text}} for text in SCRIPT),
        plain | {"delta": delta, "finish_reason": "stop", "matched_stop": 2},
    ]
    assert [event["choices"] for event in events] == [*([choice] for choice in choices), []]
    assert events[-1]["usage"]["total_tokens"] == 2 + len(SCRIPT)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_session_id_by_itself_is_a_label(at: House, path: str) -> None:
    await ok(at, path, BODIES[path] | {"session_id": "mine"})
    body = BODIES[path] | {"session_params": {"id": "mine"}}
    assert await refusal(at, path, body) == (400, "session_params")


async def test_continuous_usage_stats_put_usage_in_every_chunk(at: House) -> None:
    body = {"messages": HI, "stream_options": {"continuous_usage_stats": True}}
    events = await chunks(at, CHAT, body)
    usages = [event["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3, 4, 4]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1


async def test_completion_stream_ends_on_its_last_text(at: House) -> None:
    events = await chunks(at, COMPLETE, {"prompt": "once"})
    choices = [event["choices"][0] for event in events]
    ends = [(choice["text"], choice["finish_reason"]) for choice in choices]
    assert ends == list(zip(SCRIPT, (None, None, None, "stop"), strict=True))
    assert events[0]["object"] == "text_completion"


async def test_completion_takes_text_or_ids_and_sixteen_tokens_by_default(at: House) -> None:
    for prompt in ("once", ["once"], list(b"once"), [list(b"once")]):
        status, body, headers = await post(at, COMPLETE, {"prompt": prompt})
        assert (status, body["object"]) == (200, "text_completion")
        assert headers["X-Request-Id"] == body["id"]
    submits = at.cluster.submits
    assert len({submit.prompt_ids for submit in submits}) == 1
    assert {submit.sampling.max_new_tokens for submit in submits} == {16}
    # A completion has OpenAI's defaults, not the model's; a chat has the model's.
    assert {(s.sampling.temperature, s.sampling.top_k) for s in submits} == {(1.0, 0)}


async def test_request_comes_before_the_model_and_the_model_before_openai(at: House) -> None:
    await post(at, CHAT, {"messages": HI, "temperature": 0, "seed": 5, "top_k": -1})
    await post(at, CHAT, {"messages": HI})
    given, default = (submit.sampling for submit in at.cluster.submits)
    assert (given.temperature, given.top_k, given.seed) == (0.0, 0, 5)
    assert (default.temperature, default.top_k, default.top_p) == (0.25, 7, 1.0)
    assert default.repetition_penalty == 1.25
    assert given.max_new_tokens == default.max_new_tokens == CONTEXT_TOKENS - 2


async def test_every_field_of_a_request_reaches_the_leader(at: House) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}],
        "max_completion_tokens": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "continue_final_message": True,
        "rid": "mine",
        "user": "me",
        "undocumented": 1,
        "n": 2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "logit_bias": {"7": -1.5, "8": 100},
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [],
        "response_format": {"type": "text"},
    }
    status, reply, _ = await post(at, CHAT, body, traceparent=TRACE)
    encode, submit = at.cluster.encodes[0], at.cluster.submits[0]
    assert (status, reply["id"]) == (200, "mine")
    assert [turn.content for turn in at.cluster.turns] == ["a b", "c"]
    assert encode.continue_final_message
    assert submit.sampling == SamplingParams(
        max_new_tokens=5,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
        min_new_tokens=3,
        logit_bias=LogitBias(token_ids=pack_ids([7, 8]), values=pack_floats([-1.5, 100.0])),
        stop_token_ids=(3,),
        ignore_eos=True,
        seed=submit.sampling.seed,
        details=TokenOutputParams(logprobs=True, top=2),
    )
    assert submit.stop == StopStrings(
        strings=("x",), include=True, skip_special_tokens=False, token_texts=True
    )
    assert (submit.choices, submit.traceparent) == (2, TRACE)
    assert "antiphon_unknown_fields_total 1.0" in at.metrics_text


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_of_a_chat_has_text_and_logprobs(at: House, streamed: bool) -> None:
    async with openai_client(at) as client:
        logprobs = {"logprobs": True, "top_logprobs": 2}
        asked: Any = {"model": MODEL, "messages": HI, "n": 2} | logprobs
        texts, tokens = ["", ""], [[], []]
        if streamed:
            chunks = await client.chat.completions.create(**asked, stream=True)
            async for chunk in chunks:
                choice = chunk.choices[0]
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += (choice.logprobs and choice.logprobs.content) or []
        else:
            whole = await client.chat.completions.create(**asked)
            texts = [choice.message.content for choice in whole.choices]
            tokens = [choice.logprobs.content for choice in whole.choices]
    assert texts == [TEXT, TEXT]
    for content in tokens:
        assert [token.token for token in content] == list(SCRIPT)
        assert [token.logprob for token in content] == [-0.5, -1.0, -1.5, -2.0]
        assert bytes(content[2].bytes).decode() == SCRIPT[2]
        tops = [(top.token, top.logprob) for top in content[0].top_logprobs]
        assert tops == [(SCRIPT[0], -10.0), (SCRIPT[1], -11.0)]


async def test_logprobs_of_a_completion_are_columns(at: House) -> None:
    body = {"prompt": "once", "logprobs": 2}
    (choice,) = (await ok(at, COMPLETE, body))["choices"]
    pieces = [event["choices"][0]["logprobs"] for event in await chunks(at, COMPLETE, body)]
    expected = {
        "tokens": list(SCRIPT),
        "token_logprobs": [-0.5, -1.0, -1.5, -2.0],
        "text_offset": [0, 3, 7, 12],
    }
    for name, column in expected.items():
        assert choice["logprobs"][name] == column
        assert [value for piece in pieces for value in piece[name]] == column
    assert choice["logprobs"]["top_logprobs"][0] == {SCRIPT[0]: -10.0, SCRIPT[1]: -11.0}


async def test_max_tokens_may_be_zero(at: House) -> None:
    for path in (CHAT, COMPLETE):
        await ok(at, path, BODIES[path] | {"max_tokens": 0})
    assert [submit.sampling.max_new_tokens for submit in at.cluster.submits] == [0, 0]


async def test_a_model_that_takes_no_such_media_is_named(at: House) -> None:
    for kind, value, named in (
        ("image_url", "https://a.example/b.png", "images"),
        ("video_url", "https://a.example/b.mp4", "videos"),
        ("audio_url", "https://a.example/b.wav", "audio"),
        ("input_audio", {"data": "AAAA", "format": "wav"}, "audio"),
    ):
        medium = {"type": kind, kind: value}
        messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, medium]}]
        status, error = await failure(at, CHAT, {"messages": messages})
        assert (status, error["param"]) == (400, f"messages[0].content[1].{kind}")
        assert error["message"] == f"the model {MODEL} takes no {named}"


GEMMA3N, PHI4 = "Gemma3nForConditionalGeneration", "Phi4MultimodalForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "kind", "reason"),
    [
        (GEMMA3N, "image_url", "images: its towers, MobileNet-v5"),
        (GEMMA3N, "audio_url", "audio: its towers, .* a Conformer"),
        (PHI4, "audio_url", "audio: its tower for audio"),
    ],
)
async def test_refusal_of_media_says_why_they_are_not_taken(
    at: House, monkeypatch: pytest.MonkeyPatch, architecture: str, kind: str, reason: str
) -> None:
    tokenizers = at.service.submission.tokenizers
    card = msgspec.structs.replace(await tokenizers.card(5), architecture=architecture)
    monkeypatch.setattr(tokenizers, "_card", card)
    medium = {"type": kind, kind: "https://a.example/b"}
    status, error = await failure(at, CHAT, {"messages": [{"role": "user", "content": [medium]}]})
    assert (status, error["param"]) == (400, f"messages[0].content[0].{kind}")
    assert re.match(rf"the model {MODEL} takes no {reason}.* not supported$", error["message"])


async def test_a_request_whose_media_do_not_come_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house(request_timeout_s=0.3) as at:
        submission, left = at.service.submission, asyncio.Event()
        card = await submission.tokenizers.card(5)
        seeing = msgspec.structs.replace(card, sees=True)
        monkeypatch.setattr(submission.tokenizers, "_card", seeing)

        async def fetch_for_ever(*_: object, **__: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        monkeypatch.setattr(submission.media, "open", fetch_for_ever)
        shown = {"type": "image_url", "image_url": "https://a.example/b.png"}
        messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, shown]}]
        status, error = await failure(at, CHAT, {"messages": messages})
    assert (status, error["message"]) == (
        504,
        "the media of the request were not there within 0.3 s",
    )
    assert left.is_set()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": MISSING}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [IMAGE]}, "messages[0].content[0].image_url"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_k": 0}, "top_k"),
        (CHAT, {"max_tokens": 63}, "max_tokens"),
        (CHAT, {"stop": ["a"] * 33}, "stop"),
        (CHAT, {"stop_token_ids": [256]}, "stop_token_ids"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 129}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"response_format": {"type": "json"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format.format"),
        (CHAT, {"regex": "a", "ebnf": "root ::= x"}, "ebnf"),
        (CHAT, {"json_schema": "{}", "response_format": OBJECT}, "response_format"),
        (CHAT, {"stop_regex": "(?=a)"}, "stop_regex"),
        (CHAT, {"stop_regex": ["a*"]}, "stop_regex"),
        (CHAT, {"stop_regex": ["[a-z]{200}"] * 3}, "stop_regex"),
        (CHAT, {"stop_regex": "[a-z]{300}", "n": 2}, "stop_regex"),
        (COMPLETE, {"stop_regex": "[a-z]{300}", "n": 2}, "stop_regex"),
        (CHAT, {"reasoning_effort": 1.5}, "reasoning_effort"),
        (CHAT, {"presence_penalty": 2.5}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -2.5}, "frequency_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"logit_bias": {"256": 2}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 1e39}}, "logit_bias"),
        (CHAT, {"regex": "a" * 131_073}, "regex"),
        (CHAT, {"lora_path": "x"}, "lora_path"),
        (COMPLETE, {"best_of": 2, "n": 3}, "best_of"),
        (COMPLETE, {"prompt": [1, 2], "suffix": "y"}, "suffix"),
        (COMPLETE, {"prompt": ["x", [1]], "suffix": "y"}, "suffix"),
        (COMPLETE, {"suffix": 3}, "suffix"),
        (COMPLETE, {"suffix": "y", "echo": True, "logprobs": 0}, "echo"),
        (COMPLETE, {"logprobs": 21}, "logprobs"),
        (COMPLETE, {"prompt": ["x", 1]}, "prompt"),
        (COMPLETE, {"prompt": ["x"] * 257}, "prompt"),
        (COMPLETE, {"prompt": []}, "prompt"),
        (COMPLETE, {"prompt": ""}, "prompt"),
        (COMPLETE, {"prompt": [256]}, "prompt"),
    ],
)
async def test_bad_request_is_400_and_names_the_field(
    at: House, path: str, body: Body, param: str
) -> None:
    for streamed in (False, True):
        said = {"stream": streamed} | BODIES[path] | body
        sent = {name: value for name, value in said.items() if value is not MISSING}
        status, error = await failure(at, path, sent)
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert at.cluster.submits == []


async def test_prompt_over_the_context_names_both_numbers(at: House) -> None:
    status, error = await failure(at, COMPLETE, {"prompt": "x" * CONTEXT_TOKENS})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert error["message"].count(str(CONTEXT_TOKENS)) == 2


async def test_unknown_model_is_404(at: House) -> None:
    for streamed in (False, True):
        body = {"messages": HI, "model": "other", "stream": streamed}
        error = {
            "message": "The model 'other' does not exist; this server serves toy.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert await failure(at, CHAT, body) == (404, error)


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("application/json", b"{"),
        ("application/json", b""),
        ("application/json", b'{"messages": [], "tools": "\xff"}'),
        ("text/plain", b"{}"),
        ("", b"{}"),
    ],
)
async def test_what_is_not_json_is_400(at: House, content_type: str, data: bytes) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    async with (
        aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session,
        session.post(at.url + CHAT, data=data, headers=headers) as reply,
    ):
        assert reply.status == 400
        assert (await reply.json())["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (b"1e999", "lora_path"),
        (b"9" * 5000, "lora_path"),
        (b'"\xff"', "lora_path"),
        (b"[" * 20_000 + b"]" * 20_000, None),
    ],
    ids=["huge float", "huge integer", "not utf-8", "deep"],
)
async def test_value_that_cannot_be_read_is_400(at: House, value: bytes, param: str | None) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "lora_path": %b}' % value
    status, error = await failure(at, CHAT, body)
    assert (status, error["code"], error["param"]) == (400, "invalid_request", param)


async def test_what_is_not_http_is_one_line_in_the_log_without_traceback(
    at: House, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = at.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.INFO):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n")
        async with asyncio.timeout(5):
            status = await reader.readline()
        writer.close()
    assert b" 400 " in status
    (record,) = [
        record for record in caplog.records if record.getMessage() == "invalid HTTP request"
    ]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert "Content-Length" in vars(record)["reason"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_limit_is_413_with_both_numbers(chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 1000

    async with house(body_bytes_max=1000) as at:
        status, error = await failure(at, CHAT, pieces() if chunked else b"x" * 3000)
    assert (status, error["code"]) == (413, "request_too_large")
    assert "1000" in error["message"]
    assert "000 bytes; the limit" in error["message"]


async def test_unknown_paths_and_methods_answer_in_the_same_shape(at: House) -> None:
    status, error = await failure(at, "/v1/nothing", {})
    assert (status, error["code"]) == (404, "not_found")
    status, reply, headers = await get(at, CHAT)
    assert (status, headers["Allow"]) == (405, "POST")
    assert reply["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("The request queue is full.", retry_after_s=2.5), 503, "overloaded"),
        (WorkerLost("the worker died"), 503, "worker_lost"),
    ],
)
async def test_refusal_of_the_leader_has_its_status(
    at: House, error: EngineError, status: int, code: str
) -> None:
    at.cluster.submit_error = error
    retry = None if error.retry_after_s is None else "3"
    for streamed in (False, True):
        found, reply, headers = await post(at, CHAT, {"messages": HI, "stream": streamed})
        assert (found, reply["error"]["code"]) == (status, code)
        assert (headers.get("Retry-After"), len(headers["X-Request-Id"])) == (retry, 32)


async def test_error_after_the_first_text_is_an_event_and_then_done(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker of this request died")
    events = await stream(at, CHAT, {"messages": HI})
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "worker_lost"
    assert "wörld" in events[-3]
    async with openai_client(at) as client:
        chunks = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="died"):
            await anext(chunk async for chunk in chunks if chunk.choices[0].finish_reason)
    assert (await post(at, CHAT, {"messages": HI})).status == 503


async def test_no_tokenizer_is_503_and_names_no_subject(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CARD_TIMEOUT_S", 0.0)
    at.cluster.encode_error = Unavailable("no process serves tokenizer.encode")
    status, reply, headers = await post(at, CHAT, {"messages": HI})
    found = (status, reply["error"]["message"], reply["error"]["type"])
    assert found == (503, "no tokenizer is available", "server_error")
    assert "Retry-After" in headers


async def test_tokenizer_that_comes_back_is_waited_for(at: House) -> None:
    at.cluster.encode_error = Unavailable("this process is shutting down")
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(post(at, CHAT, {"messages": HI}))
        await until(lambda: len(at.cluster.encodes) == 2)
        at.cluster.encode_error = None
    assert waiting.result()[0] == 200


async def test_one_open_request_too_many_is_503() -> None:
    async with (
        house(requests_max=1) as at,
        running_post(at, CHAT, {"messages": HI}, hold_at=0) as first,
    ):
        status, error = await failure(at, CHAT, {"messages": HI})
    assert (status, error["code"]) == (503, "overloaded")
    assert first.result().status == 200


async def test_live_rid_is_409_and_free_again_afterwards(at: House) -> None:
    body = {"messages": HI, "rid": "mine"}
    async with running_post(at, CHAT, body) as first:
        status, error = await failure(at, CHAT, body)
    assert (status, error["code"]) == (409, "duplicate_request")
    assert first.result().status == 200
    await ok(at, CHAT, body)


@pytest.mark.parametrize("streamed", [False, True])
async def test_client_that_leaves_cancels_its_request(at: House, streamed: bool) -> None:
    at.cluster.hold_at = 1
    async with aiohttp.ClientSession() as session:
        body = {"messages": HI, "stream": streamed}
        async with asyncio.TaskGroup() as group:
            task = group.create_task(session.post(at.url + CHAT, json=body))
            await until(lambda: len(at.cluster.submits) == 1)
            if streamed:
                reply = await task
                await reply.content.readuntil(b"\n\n")
                reply.close()
            else:
                task.cancel()
        submitted = at.cluster.submits[0].request_id
        await until(lambda: at.cluster.cancelled == [submitted])
    await until(lambda: at.service.report().load == 0)
    await until(lambda: at.cluster.open == set())


async def test_client_that_does_not_read_ends_in_an_error_and_holds_little() -> None:
    async with house(unread_bytes_max=200_000) as at:
        at.cluster.script = ("x" * 100_000,) * 80
        with socket.socket() as small:
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.setblocking(False)
            await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", at.service.port))
            reader, writer = await asyncio.open_connection(sock=small.dup(), limit=1024)
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: len(at.cluster.cancelled) == 1)
        assert 'antiphon_num_requests_total{outcome="cancelled"} 1.0' in at.metrics_text
        received = b""
        while not received.endswith(b"0\r\n\r\n") and (piece := await reader.read(1 << 20)):
            received += piece
        writer.close()
        await writer.wait_closed()
    assert b'"code":"cancelled"' in received
    assert b"[DONE]" in received
    assert len(received) < len(at.cluster.script) * 100_000


async def test_models_are_listed_with_their_context(at: House) -> None:
    async with openai_client(at) as client:
        models = await client.models.list()
        one = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    assert [model.id for model in models.data] == [MODEL]
    assert one.model_dump()["max_model_len"] == CONTEXT_TOKENS


async def test_health_is_200_only_with_every_role_present(at: House) -> None:
    for path in ("/", "/health", "/healthz", "/readyz", "/metrics"):
        assert (await get(at, path)).status == 200, path
    await at.worker_leaves()
    status, reply, _ = await get(at, "/health")
    assert (status, reply["error"]["message"]) == (503, "not ready: worker")


async def test_draining_gateway_finishes_what_it_has_and_takes_no_more(at: House) -> None:
    at.cluster.hold_at = 1
    async with asyncio.TaskGroup() as group:
        running_one = group.create_task(stream(at, CHAT, {"messages": HI}))
        await until(lambda: len(at.cluster.submits) == 1)
        leaving = group.create_task(at.gateway.ended())
        await until(lambda: at.gateway.health.state == "draining")
        status, _, headers = await post(at, CHAT, {"messages": HI})
        at.cluster.go.set()
        await leaving
    assert status == 503
    assert "Retry-After" in headers
    assert running_one.result()[-1] == "[DONE]"
    assert "error" not in running_one.result()[-2]


async def test_stopped_gateway_ends_its_streams_with_an_error() -> None:
    async with house(drain_timeout_s=0.1) as at:
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            task = group.create_task(stream(at, CHAT, {"messages": HI}))
            await until(lambda: len(at.cluster.submits) == 1)
            at.gateway.stop.set()
        *_, error, end = task.result()
        assert (json.loads(error)["error"]["code"], end) == ("unavailable", "[DONE]")
        await until(lambda: at.cluster.open == set())


async def test_taken_port_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        await fails_to_start(CannotStart, str(port), port=port)
