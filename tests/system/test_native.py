"""SGLang's own APIs against a whole stack."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from openai import AsyncOpenAI
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

PROMPT = "<|bos|><|user|>What is 12 + 30?<|end|><|assistant|>"
GREEDY = {"temperature": 0, "max_new_tokens": 32}


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(stack.url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, **body: object) -> Any:
    async with http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def get(http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(path) as reply:
        return await reply.json()


async def last_event(reply: aiohttp.ClientResponse) -> Any:
    """Read a stream to its end; return what it says last."""
    *_, last, done = [event for event in (await reply.text()).split("\n\n") if event]
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))


async def test_whole_and_streamed_say_the_same(http: aiohttp.ClientSession) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    whole = await post(http, "/generate", **body)
    assert whole["text"] == "12 + 30 = 42."
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    async with http.post("/generate", json=body | {"stream": True}) as reply:
        last = await last_event(reply)
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    logprobs = whole["meta_info"]["output_token_logprobs"]
    assert [each[1] for each in logprobs] == whole["output_ids"]
    assert [each[0] for each in logprobs] == pytest.approx(
        [each[0] for each in last["meta_info"]["output_token_logprobs"]], abs=0.05
    )


async def test_a_batch_is_as_its_prompts_alone(http: aiohttp.ClientSession) -> None:
    prompts = [PROMPT, "Once upon a time"]
    alone = [await post(http, "/generate", text=text, sampling_params=GREEDY) for text in prompts]
    batch = await post(http, "/generate", text=prompts, sampling_params=GREEDY | {"n": 2})
    texts = [one["text"] for one in batch]
    assert texts == [alone[0]["text"]] * 2 + [alone[1]["text"]] * 2


async def test_a_session_goes_on_as_if_all_were_said_at_once(http: aiohttp.ClientSession) -> None:
    name = await post(http, "/open_session", capacity_of_str_len=0)
    first = await post(
        http,
        "/generate",
        text="<|bos|><|user|>My name is Ada.<|end|><|assistant|>",
        sampling_params=GREEDY,
        session_params={"id": name},
        return_prompt_token_ids=True,
    )
    rest = "<|end|><|user|>What is my name?<|end|><|assistant|>"
    second = await post(
        http,
        "/generate",
        text=rest,
        sampling_params=GREEDY,
        session_params={"id": name, "rid": first["meta_info"]["id"]},
        return_prompt_token_ids=True,
    )
    assert "Ada" in str(second["text"])
    ids = first["prompt_token_ids"] + first["output_ids"]
    asked = second["prompt_token_ids"]
    assert asked[: len(ids)] == ids
    again = await post(http, "/generate", input_ids=asked, sampling_params=GREEDY)
    assert again["text"] == second["text"]
    async with http.post("/close_session", json={"session_id": name}) as reply:
        assert reply.status == 200


async def test_texts_go_to_ids_and_back(http: aiohttp.ClientSession) -> None:
    text = "Grüße, 世界 👋 12 + 30"
    reported = await post(http, "/v1/tokenize", prompt=text)
    assert reported["count"] == len(reported["tokens"])
    assert await post(http, "/v1/detokenize", tokens=reported["tokens"]) == {"text": text}
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    rendered = await post(http, "/tokenize", messages=chat)
    written = await post(http, "/detokenize", tokens=rendered["tokens"], skip_special_tokens=False)
    assert written["text"] == PROMPT


async def test_a_score_is_the_probability_of_what_the_model_would_say(
    http: aiohttp.ClientSession,
) -> None:
    said = await post(
        http, "/generate", text=PROMPT, sampling_params=GREEDY, return_prompt_token_ids=True
    )
    ids = said["output_ids"]
    reported = await post(
        http,
        "/v1/score",
        query=said["prompt_token_ids"],
        items=[ids[:1], ids[:-1]],
        label_token_ids=[ids[1], ids[-1]],
        apply_softmax=True,
    )
    second, last = reported["scores"]
    assert second[0] > 0.9
    assert last[1] > 0.9
    plain = await post(http, "/v1/score", query=PROMPT, items=[""], label_token_ids=[ids[0]])
    ((first,),) = plain["scores"]
    assert 0.5 < first <= 1


async def test_calls_may_be_required_of_any_model(client: AsyncOpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [12, 30]}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 400,
    }
    answer = await client.chat.completions.create(**asked)
    arguments, reason = "", None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("add", "tool_calls")
    assert json.loads(call.function.arguments)["a"] in (12, 30)
    assert (arguments, reason) == (call.function.arguments, "tool_calls")


async def test_loads_tell_throughput_and_hit_rate(http: aiohttp.ClientSession) -> None:
    text = PROMPT + " Once upon a time there was a fox." * 12
    body = {"text": text, "sampling_params": GREEDY | {"ignore_eos": True}}
    first = await post(http, "/generate", **body)
    again = await post(http, "/generate", **body)
    cached = again["meta_info"]["cached_tokens"]
    assert cached >= 64

    while not (reported := (await get(http, "/v1/loads"))["loads"][0])["cache_hit_rate"]:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.05)
    assert reported["cache_hit_rate"] < 1
    assert reported["gen_throughput"] > 0
    assert reported["memory"]["weight_gb"] > 0
    assert reported["memory"]["kv_cache_gb"] > 0
    assert reported["num_cached_tokens"] >= cached
    assert first["text"] == again["text"]


async def test_orders_are_obeyed(http: aiohttp.ClientSession) -> None:
    assert (await post(http, "/pause_generation", mode="in_place"))["status"] == "ok"
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(post(http, "/generate", text=PROMPT, sampling_params=GREEDY))
        while not (await get(http, "/v1/loads"))["loads"][0]["paused"]:  # noqa: ASYNC110  # another process says it
            await asyncio.sleep(0.05)
        async with http.get("/ready") as reply:
            assert reply.status == 503
        assert not waiting.done()
        assert (await post(http, "/continue_generation"))["status"] == "ok"
    assert waiting.result()["text"] == "12 + 30 = 42."
    async with http.post("/flush_cache?timeout=10") as reply:
        assert reply.status == 200, await reply.text()


async def test_an_aborted_request_tells_what_it_had_said(http: aiohttp.ClientSession) -> None:
    said = {"temperature": 1, "max_new_tokens": 1500, "ignore_eos": True}
    body = {"text": PROMPT, "rid": "long-one", "sampling_params": said, "stream": True}
    async with http.post("/generate", json=body) as reply:
        await reply.content.readuntil(b"\n\n")
        async with http.post("/abort_request", json={"rid": "long"}) as aborted:
            assert aborted.status == 200
        last = await last_event(reply)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["text"]


async def test_a_server_tells_of_itself(http: aiohttp.ClientSession, stack: Stack) -> None:
    for path in ("/health_generate", "/ready", "/ping", "/metrics", "/openapi.json"):
        async with http.get(path) as reply:
            assert reply.status == 200, path
    assert (await get(http, "/model_info"))["served_model_name"] == stack.model
    info = await get(http, "/server_info")
    (load,) = info["internal_states"]
    assert load["max_total_num_tokens"] > 0
    backends = {each["operation"]: each["backend"] for each in info["kernels"][load["worker"]]}
    assert backends["attention.paged"] in ("cpu", "torch")
    async with http.get("/metrics") as reply:
        assert "antiphon_num_open_reqs 0.0" in await reply.text()


async def test_a_prefix_is_found_by_those_who_bring_the_same_salt_and_by_nobody_else(
    http: aiohttp.ClientSession, stack: Stack, client: AsyncOpenAI
) -> None:
    prompt = "<|bos|><|user|>" + "What is 12 + 30? " * 30 + "<|end|><|assistant|>"
    body = {"text": prompt, "sampling_params": GREEDY | {"max_new_tokens": 2}}

    async def cached(**said: object) -> int:
        reply = await post(http, "/generate", **body, **said)
        return int(str(reply["meta_info"]["cached_tokens"]))

    assert await cached(cache_salt="mine") == 0
    found = await cached(cache_salt="mine")
    assert found > 100
    assert await cached(cache_salt="yours") == 0
    assert await cached(cache_salt="mine", extra_key="more") == 0
    assert await cached() == 0
    said = "Tell me of 12 and 30. " * 20
    await client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": said}],
        max_tokens=2,
        extra_body={"cache_salt": "chat"},
    )
    async with Client(stack.nats_url) as nats:
        reported = [
            await nats.complete(stack.model, said, max_tokens=2, cache_salt=salt)
            for salt in ("chat", "other")
        ]
    assert [answer.usage.cached_tokens > 100 for answer in reported] == [True, False]
    assert reported[1].usage.cached_tokens == 0


async def test_orders_are_seen_by_whoever_asks_next(http: aiohttp.ClientSession) -> None:
    short = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    for name in ("one", "two", "default"):
        body = {"new_version": name, "abort_all_requests": False}
        await post(http, "/update_weight_version", **body)
        assert (await get(http, "/model_info"))["weight_version"] == name
        assert (await post(http, "/generate", **short))["meta_info"]["weight_version"] == name
        async with http.post("/flush_cache") as flushed:
            assert flushed.status == 200, "an answer that has ended is in no one's way"


async def test_a_running_answer_keeps_the_cache_and_names_all_its_weights(
    http: aiohttp.ClientSession,
) -> None:
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    body = {"text": "Count", "sampling_params": sampling, "stream": True}
    async with http.post("/generate", json=body) as reply:
        await reply.content.readuntil(b"\n\n")
        async with http.post("/flush_cache") as flushed:
            assert flushed.status == 400
        renamed = {"new_version": "later", "abort_all_requests": False}
        await post(http, "/update_weight_version", **renamed)
        meta = (await last_event(reply))["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "later")
    assert (first["start"], second["end"]) == (0, 1500)
    assert first["end"] == second["start"] > 0
    await post(http, "/update_weight_version", new_version="default")
