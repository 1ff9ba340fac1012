"""SGLang's own APIs: generation in all its forms, sessions, control and server information."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import product
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as gauges
from tests.arguments import settings_of
from tests.support.services import client_bus, listening
from tests.support.wait import until
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    MESSAGES,
    TEXT,
    Body,
    call,
    chunks,
    failure,
    get,
    ok,
    post,
    refusal,
    running_post,
    stream,
)
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, house

from antiphon.config.sglang_arguments import rows
from antiphon.gateway import peers
from antiphon.gateway.http.native.absent_routes import ABSENT
from antiphon.wire.base import Role
from antiphon.wire.codec import unpack_ids
from antiphon.wire.command import (
    ContinueWorker,
    FlushCache,
    KernelChoice,
    ListKernels,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import InvalidRequest, Unavailable
from antiphon.wire.heartbeat import WorkerStats
from antiphon.wire.ids import InstanceId
from antiphon.wire.routes import ABORT
from antiphon.wire.sampling import TokenOutputParams
from antiphon.wire.submit import AbortRequests
from antiphon.wire.text import Origin

SPACES, PROCESSOR = "spaces_between_special_tokens", "custom_logit_processor"
HIDDEN = [0.5, 1.5]
OUTPUT = [10, 11, 12, 13]
"""Ids of the tokens that the cluster generates."""


def sampled(params: Body) -> Body:
    return {"text": "a", "sampling_params": params}


async def refused(at: House, path: str, body: Body) -> str | None:
    """The field that a 400 names."""
    status, param = await refusal(at, path, body)
    assert status == 400
    return param


async def generate(at: House, **body: object) -> Any:
    return await ok(at, GENERATE, {"text": "ab"} | body)


async def streamed(at: House, **body: object) -> list[Body]:
    """The events of a stream but its end."""
    return await chunks(at, GENERATE, {"text": "ab"} | body)


async def got(at: House, path: str) -> Any:
    """The body of the reply to a GET that succeeds."""
    status, reply, _ = await get(at, path)
    assert status == 200, reply
    return reply


async def test_duration_of_loads_is_measured(at: House) -> None:
    for _ in range(2):
        await got(at, "/v1/loads")
    name = 'sglang:get_loads_duration_seconds_count{model_name="toy"}'
    assert f"{name} 2.0" in at.metrics_text


async def test_generate_replies_with_text_ids_and_meta_info(at: House) -> None:
    reply = await generate(at, rid="mine", return_prompt_token_ids=True)
    meta = reply["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert abs(meta.pop("response_sent_to_client_ts") - time.time()) < 60
    assert reply == {
        "text": TEXT,
        "output_ids": [10, 11, 12, 13],
        "prompt_token_ids": list(b"ab"),
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "reasoning_tokens": 0,
            "cached_tokens": 1,
            "cached_tokens_details": {"device": 1, "host": 0},
            "weight_version": "7",
            "num_retractions": 0,
            "dp_rank": None,
        },
    }
    assert at.cluster.submits[0].sampling.max_new_tokens == CONTEXT_TOKENS - 2


async def test_input_ids_are_taken_as_they_are(at: House) -> None:
    reply = await generate(at, text=None, input_ids=list(b"ab"))
    assert (reply["text"], at.cluster.prompt) == (TEXT, list(b"ab"))
    assert at.cluster.sampling.temperature == 1.0, "SGLang's defaults, not the model's"


async def test_batch_gets_a_list_in_its_order(at: House) -> None:
    body = {
        "text": ["a", "bcd"],
        "rid": "mine",
        "sampling_params": [{"max_new_tokens": 5, "n": 2}, {"max_new_tokens": 6, "n": 2}],
        "return_logprob": [False, True],
    }
    replies = await ok(at, GENERATE, body)
    metas = [reply["meta_info"] for reply in replies]
    assert [meta["prompt_tokens"] for meta in metas] == [1, 1, 3, 3]
    assert [meta["id"] for meta in metas] == ["mine_0_0", "mine_0_1", "mine_1_0", "mine_1_1"]
    assert [reply["index"] for reply in replies] == [0, 1, 2, 3]
    assert ["output_token_logprobs" in meta for meta in metas] == [False] * 2 + [True] * 2
    assert sorted(submit.sampling.max_new_tokens for submit in at.cluster.submits) == [5, 6]


async def test_one_prompt_in_a_list_gets_a_list(at: House) -> None:
    replies = await ok(at, GENERATE, {"text": ["a"]})
    assert [reply["text"] for reply in replies] == [TEXT]


async def test_stream_repeats_all_output_so_far_and_ends_as_the_whole(at: House) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    whole = await generate(at, **asked)
    *events, last = await streamed(at, **asked)
    texts = [event["text"] for event in [*events, last]]
    assert texts == sorted(texts, key=len)
    for reply in (whole, last):
        for varies in ("e2e_latency", "id", "response_sent_to_client_ts"):
            del reply["meta_info"][varies]
    assert last == whole
    assert not any(event["meta_info"]["finish_reason"] for event in events)


async def test_stream_output_streams_only_what_is_new() -> None:
    async with house(stream_output=True) as at:
        events = await streamed(at, text=["ab", "c"])
    for index in (0, 1):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["text"] for event in mine) == TEXT
        assert [token for event in mine for token in event["output_ids"]] == [10, 11, 12, 13]
        assert mine[-1]["meta_info"]["completion_tokens"] == 4


async def test_stream_interval_spaces_events(at: House) -> None:
    events = await streamed(at, sampling_params={"stream_interval": 100, "n": 2})
    for index in (0, 1):
        mine = [event for event in events if event["index"] == index]
        assert len(mine) <= 2, "the first token, and the end"
        last = mine[-1]
        assert (last["text"], last["meta_info"]["completion_tokens"]) == (TEXT, 4)


async def test_logprobs_have_every_form(at: House) -> None:
    prompt_too: Body = {"logprob_start_len": 0, "return_text_in_logprobs": True}
    tops: Body = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [4, 5]}
    meta = (await generate(at, **prompt_too, **tops))["meta_info"]
    named = [[-0.25, 4, None], [-0.5, 5, "p"]]
    expected = {
        "input_token_logprobs": [[None, 97, "a"], [0.0, 5, "p"]],
        "output_token_logprobs": [[-0.5 * (n + 1), 10 + n, SCRIPT[n]] for n in range(4)],
        "output_token_logprobs_length": 4,
        "input_top_logprobs": [None, [[-9.0, 9, "?"]]],
        "output_top_logprobs": [[[-10.0 - n, 10 + n, SCRIPT[n]]] for n in range(4)],
        "output_token_ids_logprobs": [named] * 4,
    }
    assert {name: meta[name] for name in expected} == expected
    assert at.cluster.sampling.details == TokenOutputParams(
        ids=True, logprobs=True, top=1, named_ids=(4, 5), prompt_start=0
    )
    output_only = await generate(at, return_logprob=True)
    assert "input_token_logprobs" not in output_only["meta_info"]


@pytest.mark.parametrize("whole", [False, True])
async def test_prompt_of_one_token_has_logprobs_and_hidden_states(at: House, whole: bool) -> None:
    body: Body = {
        "text": None,
        "input_ids": [97],
        "return_hidden_states": True,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    }
    reply = await generate(at, **body) if whole else (await streamed(at, **body))[-1]
    meta = reply["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"]]
    assert meta["input_top_logprobs"] == [None]
    assert meta["hidden_states"] == [[HIDDEN], HIDDEN, HIDDEN, HIDDEN]


@pytest.mark.parametrize("prompt", [[97], [97, 98]])
async def test_incremental_stream_has_logprobs_of_the_prompt_once(prompt: list[int]) -> None:
    async with house(stream_output=True) as at:
        asked: Body = {"return_logprob": True, "logprob_start_len": 0}
        events = await streamed(at, text=None, input_ids=prompt, **asked)
    metas = [event["meta_info"] for event in events]
    of_prompt = [meta["input_token_logprobs"] for meta in metas if "input_token_logprobs" in meta]
    assert [len(logprobs) for logprobs in of_prompt] == [len(prompt)]
    assert sum(len(meta.get("output_token_logprobs", ())) for meta in metas) == 4


async def test_hidden_states_are_of_prompt_and_output_or_of_the_last_token(at: House) -> None:
    full = (await generate(at, return_hidden_states=True))["meta_info"]
    assert full["hidden_states"] == [[HIDDEN, HIDDEN], HIDDEN, HIDDEN, HIDDEN]
    assert "output_token_logprobs" not in full
    last = (await generate(at, return_hidden_states="last"))["meta_info"]
    assert last["hidden_states"] == [HIDDEN] * 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        (sampled({"max_new_tokens": -1}), "sampling_params.max_new_tokens"),
        (sampled({"max_tokens": 1}), "sampling_params.max_tokens"),
        (sampled({"logit_bias": {"x": 1}}), "sampling_params.logit_bias"),
        (sampled({"logit_bias": {"5": "x"}}), "sampling_params.logit_bias"),
        (sampled({"max_new_tokens": 2, "min_new_tokens": 3}), "sampling_params.min_new_tokens"),
        (sampled({"stop_token_ids": [10**6]}), "sampling_params.stop_token_ids"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ({"text": "a" * (CONTEXT_TOKENS + 1)}, "text"),
        ({"input_ids": [5] * (CONTEXT_TOKENS + 1)}, "input_ids"),
        ({"text": "a", "session_id": "s", "session_params": {"id": "s"}}, "session_id"),
        (sampled({"beam_width": 2}), "sampling_params.beam_width"),
        (sampled({"top_k": 0}), "sampling_params.top_k"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        (sampled({"regex": "a", "ebnf": "b"}), "sampling_params.ebnf"),
        (sampled({"stop_regex": "("}), "sampling_params.stop_regex"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "session_params": {"id": "none"}}, "session_params"),
        ({"text": ["a"], "session_params": {"id": "none"}}, "session_params"),
        (sampled({SPACES: False}), f"sampling_params.{SPACES}"),
        (sampled({"custom_params": {"a": 1}}), "sampling_params.custom_params"),
        ({"text": "a", PROCESSOR: '{"callable": "80"}'}, PROCESSOR),
        ({"text": ["a", "b"], PROCESSOR: ["allow_tokens"]}, PROCESSOR),
        (sampled({"watermark": {"enabled": True, "key": 1}}), "sampling_params.watermark"),
        ({"text": "a", "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"input_ids": [1], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"text": "a", "token_ids_logprob": [1] * 129}, "token_ids_logprob"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1], 2]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "return_hidden_states": [True]}, "return_hidden_states"),
    ],
)
async def test_generate_names_the_field_of_a_bad_body(at: House, body: Body, param: str) -> None:
    for streamed in (False, True):
        assert await refused(at, GENERATE, body | {"stream": streamed}) == param
    assert at.cluster.submits == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/open_session", {"capacity_of_str_len": 2**70}),
        ("/open_session", {"timeout": 1e300}),
        (GENERATE, sampled({"top_k": 2**70})),
        (GENERATE, sampled({"stream_interval": 2**70})),
        (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": 2**70}),
        (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": -(2**70)}),
        (GENERATE, {"text": "a", "session_params": {"id": "s", "rid": "a", "offset": 2**70}}),
        (CHAT, {"messages": HI, "top_k": 2**70}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/update_weight_version", {"new_version": "v", "abort_all_requests": 2**70}),
    ],
)
async def test_numbers_that_no_message_holds_cause_no_server_error(
    at: House, path: str, body: Body
) -> None:
    await post(at, "/open_session", {"session_id": "s"})
    await generate(at, rid="a", session_params={"id": "s"})
    status, reply, _ = await post(at, path, body)
    assert status < 500, reply


async def test_unsupported_features_may_be_turned_off(at: House) -> None:
    await generate(at, custom_logit_processor="")
    for off in ({"custom_params": {}}, {"custom_params": None}, {"watermark": {"enabled": False}}):
        await generate(at, sampling_params=off)


async def test_each_prompt_of_a_batch_has_its_own_ids_and_hidden_states(at: House) -> None:
    logprobs: Body = {"return_logprob": True, "token_ids_logprob": [[1], [2, 3]]}
    await generate(at, text=["a", "b"], return_hidden_states=[False, "last"], **logprobs)
    details = [submit.sampling.details for submit in at.cluster.submits]
    found = {(each.named_ids, each.hidden) for each in details if each is not None}
    assert found == {((1,), False), ((2, 3), True)}


async def test_mistake_in_a_grammar_names_the_field_of_the_client(at: House) -> None:
    at.cluster.script = ("",)
    at.cluster.row_error = InvalidRequest("no", param="grammar")
    body = sampled({"structural_tag": "{}"})
    assert await refused(at, GENERATE, body) == "sampling_params.structural_tag"


@pytest.mark.parametrize("path", [GENERATE, COMPLETE])
async def test_refusal_of_a_worker_names_the_field_of_the_client(at: House, path: str) -> None:
    at.cluster.script = ("",)
    at.cluster.row_error = InvalidRequest("details.hidden: no", param="details.hidden")
    status, error = await failure(at, path, BODIES[path] | {"return_hidden_states": True})
    assert (status, error["param"]) == (400, "return_hidden_states")
    assert error["message"] == "return_hidden_states: no"


async def test_lists_of_nulls_request_nothing(at: House) -> None:
    nothing: Body = {"lora_path": [None, None], "image_data": [None, None]}
    reply = await ok(at, GENERATE, {"text": ["a", "b"]} | nothing)
    assert len(reply) == 2
    body: Body = {"text": ["a", "b"], "lora_path": [None, "x"]}
    assert await refused(at, GENERATE, body) == "lora_path"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"return_token_logprobs": True}, "return_token_logprobs"),
        ("/v1/score", {"score_extraction_token": 3}, "score_extraction_token"),
        ("/v1/score", {"label_token_ids": [10**6]}, "label_token_ids"),
        ("/separate_reasoning", {"return_blocks": True}, "return_blocks"),
    ],
)
async def test_unsupported_field_is_refused_by_name(
    at: House, path: str, body: Body, param: str
) -> None:
    whole: dict[str, Body] = {
        "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
        "/separate_reasoning": {"text": "a", "reasoning_parser": "qwen3"},
    }
    assert await refused(at, path, whole[path] | body) == param


async def test_session_continues_from_its_earlier_output(at: House) -> None:
    name = await ok(at, "/open_session", {"capacity_of_str_len": 1000})

    async def prompt_of(text: str, **params: object) -> list[int]:
        reply = await generate(at, text=text, session_params={"id": name} | params)
        rids.append(reply["meta_info"]["id"])
        return at.cluster.prompt

    rids: list[str] = []
    assert await prompt_of("ab") == [97, 98]
    first = rids[0]
    assert await prompt_of("c", rid=first) == [97, 98, *OUTPUT, 99]
    assert await prompt_of("d", rid=first, offset=3) == [97, 98, 10, 100]
    assert await prompt_of("d", rid=first, offset=0) == [97, 98, *OUTPUT, 100]
    assert await prompt_of("d", rid=first, offset=None) == [97, 98, *OUTPUT, 100]
    assert await prompt_of("d", rid=first, offset=-1) == [97, 98, *OUTPUT[:-1], 100]
    assert await prompt_of("e", rid=first, drop_previous_output=True) == [97, 98, 101]
    assert at.cluster.encodes[-1].special_tokens is False
    assert at.cluster.encodes[0].special_tokens is True
    await prompt_of("f", rid=first, replace=True)
    for gone in (rids[1], "never"):
        body: Body = {"text": "g", "session_params": {"id": name, "rid": gone}}
        assert await refused(at, GENERATE, body) == "session_params.rid"
    await ok(at, "/close_session", {"session_id": name})
    assert (await post(at, "/close_session", {"session_id": name})).status == 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_and_generate_continue_the_same_session(
    at: House, streamed: bool
) -> None:
    name = await ok(at, "/open_session", {})

    async def complete(prompt: str, place: Body, **fields: object) -> list[Body]:
        body = fields | {"prompt": prompt, "session_params": {"id": name} | place}
        return await chunks(at, COMPLETE, body) if streamed else [await ok(at, COMPLETE, body)]

    (*_, first) = await complete("ab", {})
    events = await complete("c", {"rid": first["id"]}, rid="mine", echo=True)
    assert at.cluster.prompt == [97, 98, *OUTPUT, 99]
    assert "".join(event["choices"][0]["text"] for event in events).endswith("c" + TEXT)
    assert {event["id"] for event in events} == {"mine"}
    await generate(at, text="d", session_params={"id": name, "rid": "mine"})
    assert at.cluster.prompt == [97, 98, *OUTPUT, 99, *OUTPUT, 100]


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"n": 2}, {"best_of": 2}])
async def test_session_takes_one_text_at_a_time(at: House, fields: Body) -> None:
    name = await ok(at, "/open_session", {})
    body: Body = {"prompt": "a", "session_params": {"id": name}}
    assert await refused(at, COMPLETE, body | fields) == "session_params"


async def test_session_has_one_name_and_a_capacity(at: House) -> None:
    assert await ok(at, "/open_session", {"session_id": "s", "capacity_of_str_len": 3}) == "s"
    assert (await post(at, "/open_session", {"session_id": "s"})).status == 400
    assert (await post(at, "/open_session", {"streaming": True})).status == 400
    body = {"text": "abcd", "session_params": {"id": "s"}}
    assert (await post(at, GENERATE, body)).status == 400


async def test_ids_take_the_capacity_of_a_session_as_their_text_does(at: House) -> None:
    await post(at, "/open_session", {"session_id": "s", "capacity_of_str_len": 3})
    body: Body = {"input_ids": [97, 98, 99, 100], "session_params": {"id": "s"}}
    assert await refused(at, GENERATE, body) == "session_params"
    await ok(at, GENERATE, body | {"input_ids": [97]})


async def test_request_that_failed_cannot_be_continued(at: House) -> None:
    name = await ok(at, "/open_session", {})
    at.cluster.row_error = Unavailable("lost")
    body: Body = {"text": "a", "rid": "x", "session_params": {"id": name}}
    events = await stream(at, GENERATE, body)
    assert any("error" in json.loads(event) for event in events if event != "[DONE]")
    at.cluster.row_error = None
    on = {"text": "b", "session_params": {"id": name, "rid": "x"}}
    assert await refused(at, GENERATE, on) == "session_params.rid"
    await ok(at, GENERATE, body)


async def test_a_request_that_is_refused_replaces_nothing_of_its_session(at: House) -> None:
    name = await ok(at, "/open_session", {})
    await generate(at, text="a", rid="x", session_params={"id": name})
    anew: Body = {"text": "b", "session_params": {"id": name, "replace": True}}
    too_long = anew | {"sampling_params": {"max_new_tokens": 1000}}
    assert (await post(at, GENERATE, too_long)).status == 400
    on: Body = {"text": "c", "session_params": {"id": name, "rid": "x"}}
    await ok(at, GENERATE, on)
    await ok(at, GENERATE, anew)
    assert (await post(at, GENERATE, on))[0] == 400


async def test_abort_matches_every_rid_with_its_prefix(at: House) -> None:
    at.cluster.hold_at = 1
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(generate(at, rid=rid, stream=False)) for rid in ("x1", "x2", "y")
        ]
        await until(lambda: at.open_count == 3)
        assert (await post(at, "/abort_request", {"rid": "", "abort_all": False})).status == 400
        await ok(at, "/abort_request", {"rid": "x"})
        await until(lambda: at.open_count == 1)
        at.cluster.go.set()
    ends = [task.result()["meta_info"]["finish_reason"] for task in tasks]
    assert [end["type"] for end in ends] == ["abort", "abort", "stop"]
    rest = {"message": "Aborted", "status_code": None, "err_type": None}
    assert ends[0] == {"type": "abort"} | rest


async def test_abort_reaches_the_other_gateways(at: House) -> None:
    async with (
        client_bus(at.transport(), "gateway-1", party=Role.GATEWAY) as other,
        listening(other, ABORT, model=MODEL) as aborts,
    ):
        await ok(at, "/abort_request", {"abort_all": True})
        sent = await aborts.get()
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generate(at, rid="x"))
            await until(lambda: at.open_count == 1)
            late = AbortRequests(prefix="x", not_after_unix_ms=0)
            other.publish(ABORT, late, model=MODEL)
            other.publish(ABORT, msgspec.structs.replace(sent, prefix="x"), model=MODEL)
        assert task.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert sent.prefix == ""


async def test_control_commands_reach_the_workers(at: House) -> None:
    assert await got(at, "/flush_cache") == "Cache flushed: 3 pages.\n"
    assert (await ok(at, "/pause_generation", {"mode": "in_place"}))["status"] == "ok"
    await ok(at, "/continue_generation", {})
    await ok(at, "/update_weight_version", {"new_version": "8", "abort_all_requests": False})
    assert at.cluster.orders == [
        FlushCache(unless_busy=True),
        PauseWorker(mode=PauseMode.IN_PLACE),
        ContinueWorker(),
        SetWeightVersion(version="8", abort_all=False),
    ]
    assert (await post(at, "/pause_generation", {"mode": "soon"}))[0] == 400


async def test_output_names_the_weights_that_produced_it(at: House) -> None:
    """Not those of the last heartbeat: output may be of several weight versions."""

    def from_(*marks: tuple[int, str]) -> tuple[Origin, ...]:
        worker = InstanceId("worker-0")
        return tuple(Origin(start=start, worker=worker, weights=name) for start, name in marks)

    at.cluster.origins = from_((0, "8"))
    meta = (await generate(at))["meta_info"]
    assert (meta["weight_version"], meta["dp_rank"]) == ("8", 0)
    assert "weight_versions" not in meta
    assert (await ok(at, CHAT, {"messages": HI}))["metadata"] == {"weight_version": "8"}
    at.cluster.origins = from_((0, "8"), (2, "8"), (3, "9"), (4, "10"))
    meta = (await generate(at))["meta_info"]
    assert meta["weight_version"] == "10"
    assert meta["weight_versions"] == [
        {"version": "8", "start": 0, "end": 3},
        {"version": "9", "start": 3, "end": 4},
    ], "of four tokens none is of the last ones"


async def test_cache_in_use_is_not_flushed(at: House) -> None:
    assert (await get(at, "/flush_cache?timeout=never")).status == 400
    assert at.cluster.orders == []
    # The worker replies so itself, whatever its last heartbeat was.
    at.cluster.waiting = 1
    assert (await post(at, "/flush_cache", None)).status == 400
    async with asyncio.TaskGroup() as group:
        flushed = group.create_task(ok(at, "/flush_cache?timeout=60", None))
        await until(lambda: len(at.cluster.orders) >= 3)
        at.cluster.waiting = 0
    assert flushed.result() == "Cache flushed: 3 pages.\n"


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_describes_the_model(at: House, path: str) -> None:
    info = await got(at, path)
    expected = {
        "served_model_name": MODEL,
        "weight_version": "7",
        "max_model_len": CONTEXT_TOKENS,
        "is_generation": True,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "disaggregation_mode": "null",
    }
    assert expected.items() <= info.items()


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_the_settings_and_no_secret(at: House, path: str) -> None:
    info = await got(at, path)
    assert info["settings"]["gateway"]["requests_max"] == 1024
    assert "password" not in info["settings"]["bus"]
    assert info["internal_states"][0]["worker"] == "worker-0"
    assert (info["max_total_num_tokens"], info["max_req_input_len"]) == (16, CONTEXT_TOKENS - 1)
    assert info["served_model_name"] == MODEL
    assert info["tool_call_parser"] == "none"
    assert info["max_queued_requests"] == info["settings"]["scheduler"]["queue_max"]
    assert not {"api_key", "admin_api_key"} & set(info)


async def test_server_info_has_every_argument_of_sglang() -> None:
    line = (
        "--disable-radix-cache --chunked-prefill-size 128 --dtype half --model-impl sglang "
        "--enable-priority-scheduling --disable-priority-preemption --torchao-config int8wo "
        "--return-hidden-states-mode full --log-level ERROR --dp-size 2 --tp-size 1"
    )
    async with house(base=settings_of(*line.split())) as at:
        info = await got(at, "/server_info")
    secrets = {"api_key", "admin_api_key", "ssl_keyfile_password"}
    assert {row.name for row in rows()} - secrets <= set(info)
    assert not secrets & set(info)
    expected = {
        "disable_radix_cache": True,
        "chunked_prefill_size": 128,
        "dtype": "float16",
        "model_impl": "sglang",
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "torchao_config": "int8wo",
        "return_hidden_states_mode": "full",
        "log_level": "error",
        "dp_size": 2,
        # What is refused, with the value with which it changes nothing; what holds anyway.
        "tp_size": 1,
        "disaggregation_mode": "null",
        "enable_lora": False,
        "speculative_algorithm": None,
        "dllm_fdfo": True,
        "trust_remote_code": False,
        "enable_metrics": True,
    }
    assert {name: info[name] for name in expected} == expected
    async with house() as at:
        info = await got(at, "/server_info")
    for name in ("disable_radix_cache", "disable_priority_preemption", "enable_cache_report"):
        assert info[name] is False, name
    assert (info["torchao_config"], info["return_hidden_states_mode"]) == ("", None)


async def test_server_info_has_the_kernels_of_workers_that_report_them(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a worker of a version that does not read the call, nor one that is silent, fails."""
    monkeypatch.setattr(peers, "KERNELS_S", 0.05)
    at.cluster.kernels = (
        KernelChoice(op="norm.rmsnorm", backend="torch", refused={"cpu": "no compiler"}),
        KernelChoice(op="attention.paged", backend="cpu", draft=True),
    )
    assert (await got(at, "/server_info"))["kernels"] == {}
    assert not at.cluster.orders
    at.cluster.reads = (ListKernels.__name__,)
    workers = at.service.submission.runtime.peers
    await until(lambda: workers.read_by_all(ListKernels, Role.WORKER))
    assert (await got(at, "/server_info"))["kernels"] == {
        "worker-0": [
            {
                "operation": "norm.rmsnorm",
                "backend": "torch",
                "refused": {"cpu": "no compiler"},
                "draft": False,
            },
            {"operation": "attention.paged", "backend": "cpu", "refused": {}, "draft": True},
        ]
    }
    at.cluster.kernels = None
    info = await got(at, "/server_info")
    assert (info["kernels"], info["internal_states"][0]["worker"]) == ({}, "worker-0")
    assert at.cluster.orders == [ListKernels(), ListKernels()]


async def test_loads_are_listed_by_worker(at: House) -> None:
    (load,) = (await got(at, "/v1/loads?include=core,memory&dp_rank=0"))["loads"]
    assert (load["num_running_reqs"], load["max_total_num_tokens"]) == (0, 16)
    assert "memory" in load
    assert not {"queues", "speculative"} & load.keys()
    for query in ("include=all,nothing", "format=xml", "dp_rank=7"):
        assert (await get(at, f"/v1/loads?{query}")).status == 400, query


async def test_loads_are_gauges_in_prometheus_format(at: House) -> None:
    path = "/v1/loads?format=prometheus"
    _, text, headers = await get(at, path)
    assert headers["Content-Type"].startswith("text/plain")
    families = {family.name: family for family in gauges(text)}
    (sample,) = families["antiphon_load_max_total_num_tokens"].samples
    assert (sample.labels, sample.value) == ({"dp_rank": "0", "worker": "worker-0"}, 16)
    assert {"antiphon_load_paused", "antiphon_load_queues_waiting"} < families.keys()
    text = await got(at, f"{path}&include=core")
    assert not any("queues" in family.name for family in gauges(text))


async def test_loads_have_the_statistics_of_workers(at: House) -> None:
    at.cluster.figures = WorkerStats(
        device="cpu",
        weight_bytes=2**31,
        cache_bytes=2**30,
        output_tokens_s=12.5,
        prompt_tokens=200,
        cached_tokens=50,
        waiting_tokens=33,
        pages_cached=1,
        grammars=2,
        retracted=1,
        verify_rows=10,
        drafts_proposed=40,
        drafts_accepted=20,
    )
    at.cluster.waiting = 3
    await until(lambda: [load.waiting for load in at.worker_loads] == [3])
    reply = await got(at, "/v1/loads")
    assert (reply["accelerator"], reply["num_accelerators"]) == ("cpu", 1)
    expected = {
        "gen_throughput": 12.5,
        "cache_hit_rate": 0.25,
        "num_waiting_uncached_tokens": 33,
        "num_total_tokens": 33,
        "num_used_tokens": 0,
        "num_cached_tokens": 16,
        "memory": {"weight_gb": 2.0, "kv_cache_gb": 1.0, "graph_gb": 0.0, "token_capacity": 16},
        "queues": {"waiting": 3, "grammar": 2, "paused": 0, "retracted": 1},
        "speculative": {"accept_length": 3.0, "accept_rate": 0.5},
        **dict.fromkeys(("lora", "disaggregation")),
    }
    (load,) = reply["loads"]
    assert {name: load[name] for name in expected} == expected


async def test_health_generate_shares_one_generation(at: House) -> None:
    at.cluster.hold_at = 0
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(get(at, "/health_generate")) for _ in range(40)]
        await until(lambda: len(at.cluster.submits) == 1)
        at.cluster.go.set()
    assert {task.result().status for task in calls} == {200}
    await got(at, "/health_generate")  # within the second: the same one
    assert len(at.cluster.submits) == 1


async def test_health_generate_outlives_the_caller_that_started_it(at: House) -> None:
    at.cluster.hold_at = 0
    loop = asyncio.get_running_loop()
    first = loop.create_task(get(at, "/health_generate"))
    await until(lambda: len(at.cluster.submits) == 1)
    second = loop.create_task(get(at, "/health_generate"))
    first.cancel()
    await asyncio.wait([first])
    at.cluster.go.set()
    assert (await second)[0] == 200
    assert len(at.cluster.submits) == 1
    assert at.cluster.cancelled == []


async def test_health_generate_takes_none_of_the_request_slots() -> None:
    async with house(requests_max=1) as at, asyncio.TaskGroup() as group:
        at.cluster.hold_at = 0
        probe = group.create_task(got(at, "/health_generate"))
        await until(lambda: len(at.cluster.submits) == 1)
        async with running_post(at, GENERATE, {"text": "hi"}, hold_at=0) as only:
            assert (await post(at, GENERATE, {"text": "hi"})).status == 503
        await probe
        assert only.result().status == 200
        await ok(at, GENERATE, {"text": "hi"})


async def test_health_routes_fail_without_a_worker(at: House) -> None:
    for path in ("/health", "/ping", "/ready", "/health_generate", "/"):
        assert (await get(at, path)).status == 200, path
    assert (await call(at, "HEAD", "/")).status == 200
    assert at.cluster.sampling.max_new_tokens == 1
    await at.worker_leaves()
    for path in ("/health", "/ping", "/ready", "/health_generate"):
        assert (await get(at, path)).status == 503, path
    await until(lambda: all(peer.heartbeat.role is not Role.WORKER for peer in at.peers))
    assert (await post(at, "/pause_generation", {})).status == 503


async def test_tokenize_and_detokenize_are_inverse(at: House) -> None:
    one = await ok(at, "/v1/tokenize", {"prompt": "ab", "add_special_tokens": False})
    assert one == {"tokens": [97, 98], "count": 2, "max_model_len": CONTEXT_TOKENS}
    assert at.cluster.encodes[-1].special_tokens is False
    several = await ok(at, "/tokenize", {"prompt": ["a", "bc"]})
    assert (several["tokens"], several["count"]) == ([[97], [98, 99]], [1, 2])
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    await post(at, "/v1/tokenize", chat | {"add_generation_prompt": False})
    template = at.cluster.encodes[-1].template
    assert (template.generation_prompt, template.tools) == (False, '[{"type":"function"}]')
    assert await ok(at, "/v1/detokenize", {"tokens": [97, 98]}) == {"text": "ab"}
    assert await ok(at, "/detokenize", {"tokens": [[97], [98]]}) == {"text": ["a", "b"]}
    for path, body in (
        ("/v1/tokenize", {}),
        ("/v1/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/detokenize", {"tokens": [1, [2]]}),
        ("/v1/detokenize", {"tokens": ["x"]}),
    ):
        assert (await post(at, path, body))[0] == 400, body


async def test_score_is_the_probability_of_each_label_as_next_token(at: House) -> None:
    at.cluster.script = ("",)
    body: Body = {"query": "a", "items": ["b", "cd"], "label_token_ids": [5, 6]}
    plain = await ok(at, "/v1/score", body)
    assert plain["scores"] == [pytest.approx([0.7788, 0.6065], rel=1e-3)] * 2
    soft = await ok(at, "/v1/score", body | {"apply_softmax": True, "item_first": True})
    for row in soft["scores"]:
        assert sum(row) == pytest.approx(1.0)
    prompts = {bytes(list(unpack_ids(submit.prompt_ids))) for submit in at.cluster.submits}
    assert prompts == {b"ab", b"acd", b"ba", b"cda"}
    assert {submit.sampling.max_new_tokens for submit in at.cluster.submits} == {0}
    assert (await post(at, "/v1/score", body | {"items": [[1]]})).status == 400


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/rerank", "/v1/classify", "/encode", "/classify"]
)
async def test_pooling_of_a_generative_model_is_unsupported(at: House, path: str) -> None:
    status, error = await failure(at, path, {"input": "x"})
    assert (status, error["code"]) == (400, "unsupported")
    assert "this model does not" in error["message"]


async def test_logprobs_cannot_start_beyond_the_prompt(at: House) -> None:
    body: Body = {"text": "ab", "return_logprob": True, "logprob_start_len": 2}
    await ok(at, GENERATE, body)
    status, error = await failure(at, GENERATE, body | {"logprob_start_len": 3})
    assert (status, error["param"]) == (400, "logprob_start_len")
    assert "(3)" in error["message"]
    assert "(2)" in error["message"]


async def test_update_weight_version_replies_with_the_version(at: House) -> None:
    reply = await ok(at, "/update_weight_version", {"new_version": "9"})
    assert (reply["new_version"], reply["success"]) == ("9", True)


async def test_get_load_version_and_tokenizer_info_are_served(at: House) -> None:
    (load,) = await got(at, "/get_load")
    assert set(load) == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"}
    assert (await got(at, "/version"))["version"]
    info = await got(at, "/tokenizer_info")
    assert (info["vocab_size"], info["model_max_length"]) == (256, CONTEXT_TOKENS)


async def test_root_names_the_server_and_its_links(at: House) -> None:
    root = await got(at, "/")
    assert (root["name"], root["model"]) == ("antiphon", MODEL)
    assert root["version"]
    for path in root["links"].values():
        await got(at, path)


async def test_routes_of_sglang_that_are_not_served_say_why(at: House) -> None:
    assert len({path for _, _, paths, _ in ABSENT for path in paths.split()}) >= 36
    for kind, methods, paths, reason in ABSENT:
        for path, method in product(paths.split(), methods.split()):
            status, reply, _ = await call(at, method, path)
            assert (status, reply["error"]["code"]) == (404, kind.code), path
            assert reason in reply["error"]["message"]


@pytest.mark.parametrize("path", [GENERATE, "/nowhere", CHAT, MESSAGES])
async def test_refused_requests_have_an_id(at: House, path: str) -> None:
    status, _, headers = await post(at, path, {})
    assert (status in (400, 404), len(headers["X-Request-Id"])) == (True, 32)


async def test_invocations_is_a_chat(at: House) -> None:
    assert (await ok(at, "/invocations", {"messages": HI}))["object"] == "chat.completion"
