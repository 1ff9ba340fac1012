"""SGLang's own APIs: generation in all its forms, sessions, control and what a server says."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import product
from typing import TYPE_CHECKING, cast

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as gauges
from tests.arguments import settings_of
from tests.support.services import client_bus
from tests.support.wait import until
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, house
from tests.unit.gateway.test_http import post, stream

from antiphon.config.sglang_arguments import rows
from antiphon.gateway.http.native.absent_routes import ABSENT
from antiphon.wire.base import Role
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import (
    ContinueWorker,
    FlushCache,
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

if TYPE_CHECKING:
    from antiphon.bus.bus import Delivery

TEXT = "".join(SCRIPT)
GENERATE = "/generate"
Body = dict[str, object]
Reply = dict[str, "Reply"]  # what a test reads of it, it knows


def sampled(params: Body) -> Body:
    return {"text": "a", "sampling_params": params}


async def refused(at: House, path: str, body: Body) -> object:
    """The field that a 400 names."""
    status, reply, _ = await post(at, path, body)
    assert status == 400, reply
    return cast("Reply", reply["error"])["param"]


async def generate(at: House, **body: object) -> Reply:
    status, reply, _ = await post(at, GENERATE, {"text": "ab"} | body)
    assert status == 200, reply
    return cast("Reply", reply)


async def streamed(at: House, **body: object) -> list[Reply]:
    """The events of a stream but its end."""
    *events, end = await stream(at, GENERATE, {"text": "ab"} | body)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


async def get(at: House, path: str, method: str = "GET") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, at.url + path) as reply,
    ):
        return reply.status, await reply.text()


async def test_the_time_of_loads_is_measured(at: House) -> None:
    for _ in range(2):
        assert (await get(at, "/v1/loads"))[0] == 200
    page = at.gateway.metrics.text().decode()
    assert 'sglang:get_loads_duration_seconds_count{model_name="toy"} 2.0' in page


async def test_a_prompt_gets_text_ids_and_what_is_known_of_them(at: House) -> None:
    reply = await generate(at, rid="mine", return_prompt_token_ids=True)
    assert (reply["text"], reply["output_ids"]) == (TEXT, [10, 11, 12, 13])
    assert reply["prompt_token_ids"] == list(b"ab")
    meta = reply["meta_info"]
    assert cast("float", meta.pop("e2e_latency")) > 0
    assert abs(cast("float", meta.pop("response_sent_to_client_ts")) - time.time()) < 60
    assert meta == {
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
    }
    assert "index" not in reply
    assert at.cluster.submits[0].sampling.max_new_tokens == CONTEXT_TOKENS - 2


async def test_ids_are_taken_as_they_are(at: House) -> None:
    reply = await generate(at, text=None, input_ids=list(b"ab"))
    assert reply["text"] == TEXT
    assert at.cluster.submits[0].prompt_ids == pack_ids(list(b"ab"))
    assert at.cluster.submits[0].sampling.temperature == 1.0, "SGLang's defaults, not the model's"


async def test_a_batch_gets_a_list_in_its_order(at: House) -> None:
    body = {
        "text": ["a", "bcd"],
        "rid": "mine",
        "sampling_params": [{"max_new_tokens": 5, "n": 2}, {"max_new_tokens": 6, "n": 2}],
        "return_logprob": [False, True],
    }
    status, replies, _ = await post(at, GENERATE, body)
    told = cast("list[Reply]", replies)
    assert status == 200
    assert [one["meta_info"]["prompt_tokens"] for one in told] == [1, 1, 3, 3]
    names = [one["meta_info"]["id"] for one in told]
    assert names == ["mine_0_0", "mine_0_1", "mine_1_0", "mine_1_1"]
    assert [one["index"] for one in told] == [0, 1, 2, 3]
    assert ["output_token_logprobs" in one["meta_info"] for one in told] == [False] * 2 + [True] * 2
    assert sorted(submit.sampling.max_new_tokens for submit in at.cluster.submits) == [5, 6]


async def test_one_prompt_in_a_list_gets_a_list(at: House) -> None:
    _, replies, _ = await post(at, GENERATE, {"text": ["a"]})
    assert [one["text"] for one in cast("list[Reply]", replies)] == [TEXT]


async def test_a_stream_tells_all_so_far_and_ends_as_the_whole(at: House) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    whole = await generate(at, **asked)
    told = await streamed(at, **asked)
    texts = [event["text"] for event in told]
    assert texts == sorted(texts, key=len)
    last = told[-1]
    for reply in (whole, last):
        for varies in ("e2e_latency", "id", "response_sent_to_client_ts"):
            del reply["meta_info"][varies]
    assert last == whole
    assert [event["meta_info"]["finish_reason"] for event in told[:-1]] == [None] * (len(told) - 1)


async def test_a_stream_tells_only_what_is_new_where_the_operator_says_so() -> None:
    async with house(stream_output=True) as at:
        told = await streamed(at, text=["ab", "c"])
    for index in (0, 1):
        mine = [event for event in told if event["index"] == index]
        assert "".join(str(event["text"]) for event in mine) == TEXT
        assert [token for event in mine for token in event["output_ids"]] == [10, 11, 12, 13]
        assert mine[-1]["meta_info"]["completion_tokens"] == 4


async def test_an_interval_is_said_of_events(at: House) -> None:
    sampling = {"stream_interval": 100, "n": 2}
    told = await streamed(at, sampling_params=sampling)
    for index in (0, 1):
        mine = [event for event in told if event["index"] == index]
        assert len(mine) <= 2, "the first token, and the end"
        assert mine[-1]["text"] == TEXT
        assert mine[-1]["meta_info"]["completion_tokens"] == 4


async def test_log_probabilities_have_every_form(at: House) -> None:
    reply = await generate(
        at,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        token_ids_logprob=[4, 5],
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [0.0, 5, "p"]]
    assert meta["output_token_logprobs"] == [[-0.5 * (n + 1), 10 + n, SCRIPT[n]] for n in range(4)]
    assert meta["output_token_logprobs_length"] == 4
    assert meta["input_top_logprobs"] == [None, [[-9.0, 9, "?"]]]
    assert meta["output_top_logprobs"] == [[[-10.0 - n, 10 + n, SCRIPT[n]]] for n in range(4)]
    assert meta["output_token_ids_logprobs"] == [[[-0.25, 4, None], [-0.5, 5, "p"]]] * 4
    asked = at.cluster.submits[0].sampling.details
    assert asked == TokenOutputParams(
        ids=True, logprobs=True, top=1, named_ids=(4, 5), prompt_start=0
    )
    answer_only = await generate(at, return_logprob=True)
    assert "input_token_logprobs" not in answer_only["meta_info"]


@pytest.mark.parametrize("whole", [False, True])
async def test_a_prompt_of_one_token_is_told_of_like_any_other(at: House, whole: bool) -> None:
    body: Body = {
        "text": None,
        "input_ids": [97],
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
        "top_logprobs_num": 1,
        "return_hidden_states": True,
    }
    reply = await generate(at, **body) if whole else (await streamed(at, **body))[-1]
    meta = reply["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"]]
    assert meta["input_top_logprobs"] == [None]
    row = [0.5, 1.5]
    assert meta["hidden_states"] == [[row], row, row, row]


async def test_what_comes_new_tells_of_the_prompt_once() -> None:
    async with house(stream_output=True) as at:
        for prompt in ([97], [97, 98]):
            asked: Body = {"return_logprob": True, "logprob_start_len": 0}
            events = await streamed(at, text=None, input_ids=prompt, **asked)
            told = [event["meta_info"] for event in events]
            read = [meta["input_token_logprobs"] for meta in told if "input_token_logprobs" in meta]
            assert [len(each) for each in read] == [len(prompt)], prompt
            drawn = [len(meta.get("output_token_logprobs", ())) for meta in told]
            assert sum(drawn) == 4


async def test_hidden_states_are_told_of_prompt_and_answer_or_of_the_last(at: House) -> None:
    full = await generate(at, return_hidden_states=True)
    row = [0.5, 1.5]
    assert full["meta_info"]["hidden_states"] == [[row, row], row, row, row]
    assert "output_token_logprobs" not in full["meta_info"]
    last = await generate(at, return_hidden_states="last")
    assert last["meta_info"]["hidden_states"] == [row] * 4


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
        (
            sampled({"spaces_between_special_tokens": False}),
            "sampling_params.spaces_between_special_tokens",
        ),
        (sampled({"custom_params": {"a": 1}}), "sampling_params.custom_params"),
        ({"text": "a", "custom_logit_processor": '{"callable": "80"}'}, "custom_logit_processor"),
        (
            {"text": ["a", "b"], "custom_logit_processor": ["allow_tokens"]},
            "custom_logit_processor",
        ),
        (sampled({"watermark": {"enabled": True, "key": 1}}), "sampling_params.watermark"),
        ({"text": "a", "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"input_ids": [1], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"text": "a", "token_ids_logprob": [1] * 129}, "token_ids_logprob"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1], 2]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "return_hidden_states": [True]}, "return_hidden_states"),
    ],
)
async def test_a_bad_body_is_400_and_names_the_field(at: House, body: Body, param: str) -> None:
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
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_k": 2**70}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/update_weight_version", {"new_version": "v", "abort_all_requests": 2**70}),
    ],
)
async def test_numbers_that_no_message_holds_are_no_error_of_the_server(
    at: House, path: str, body: Body
) -> None:
    await post(at, "/open_session", {"session_id": "s"})
    await generate(at, rid="a", session_params={"id": "s"})
    status, reply, _ = await post(at, path, body)
    assert status < 500, reply


async def test_what_is_not_built_may_be_said_to_be_off(at: House) -> None:
    await generate(at, custom_logit_processor="")
    for off in ({"custom_params": {}}, {"custom_params": None}, {"watermark": {"enabled": False}}):
        await generate(at, sampling_params=off)


async def test_each_prompt_of_a_batch_may_name_its_own_ids_and_states(at: House) -> None:
    await generate(
        at,
        text=["a", "b"],
        return_logprob=True,
        token_ids_logprob=[[1], [2, 3]],
        return_hidden_states=[False, "last"],
    )
    wanted = [submit.sampling.details for submit in at.cluster.submits]
    told = {(each.named_ids, each.hidden) for each in wanted if each is not None}
    assert told == {((1,), False), ((2, 3), True)}


async def test_a_mistake_in_a_grammar_names_the_field_it_came_by(at: House) -> None:
    at.cluster.script = ("",)
    at.cluster.row_error = InvalidRequest("no", param="grammar")
    body = {"text": "a", "sampling_params": {"structural_tag": "{}"}}
    status, reply, _ = await post(at, GENERATE, body)
    param = cast("Reply", reply["error"])["param"]
    assert (status, param) == (400, "sampling_params.structural_tag")


@pytest.mark.parametrize("path", [GENERATE, "/v1/completions"])
async def test_what_a_worker_refuses_is_named_as_the_client_named_it(at: House, path: str) -> None:
    at.cluster.script = ("",)
    at.cluster.row_error = InvalidRequest("details.hidden: no", param="details.hidden")
    prompt = {"text": "a"} if path == GENERATE else {"prompt": "a"}
    status, reply, _ = await post(at, path, prompt | {"return_hidden_states": True})
    error = cast("Reply", reply["error"])
    assert (status, error["param"]) == (400, "return_hidden_states")
    assert error["message"] == "return_hidden_states: no"


async def test_lists_of_nulls_ask_for_nothing(at: House) -> None:
    nothing: Body = {"lora_path": [None, None], "image_data": [None, None]}
    _, reply, _ = await post(at, GENERATE, {"text": ["a", "b"]} | nothing)
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
async def test_what_is_not_done_is_refused_by_name(
    at: House, path: str, body: Body, param: str
) -> None:
    whole: dict[str, Body] = {
        "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
        "/separate_reasoning": {"text": "a", "reasoning_parser": "qwen3"},
    }
    assert await refused(at, path, whole[path] | body) == param


async def test_a_session_goes_on_from_what_was_said(at: House) -> None:
    _, name, _ = await post(at, "/open_session", {"capacity_of_str_len": 1000})

    async def say(text: str, **params: object) -> list[int]:
        reply = await generate(at, text=text, session_params={"id": name} | params)
        rids.append(str(reply["meta_info"]["id"]))
        return list(unpack_ids(at.cluster.submits[-1].prompt_ids))

    rids: list[str] = []
    said = [10, 11, 12, 13]
    assert await say("ab") == [97, 98]
    assert await say("c", rid=rids[0]) == [97, 98, *said, 99]
    assert await say("d", rid=rids[0], offset=3) == [97, 98, 10, 100]
    assert await say("d", rid=rids[0], offset=0) == [97, 98, *said, 100]
    assert await say("d", rid=rids[0], offset=None) == [97, 98, *said, 100]
    assert await say("d", rid=rids[0], offset=-1) == [97, 98, *said[:-1], 100]
    assert await say("e", rid=rids[0], drop_previous_output=True) == [97, 98, 101]
    assert at.cluster.encodes[-1].special_tokens is False
    assert at.cluster.encodes[0].special_tokens is True
    await say("f", rid=rids[0], replace=True)
    for gone in (rids[1], "never"):
        body: Body = {"text": "g", "session_params": {"id": name, "rid": gone}}
        assert await refused(at, GENERATE, body) == "session_params.rid"
    status, _, _ = await _post_plain(at, "/close_session", {"session_id": name})
    assert status == 200
    status, _, _ = await post(at, "/close_session", {"session_id": name})
    assert status == 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_text_completions_and_generate_go_on_in_the_same_session(
    at: House, streamed: bool
) -> None:
    _, name, _ = await post(at, "/open_session", {})

    async def complete(prompt: str, **said: object) -> list[Reply]:
        body = said | {"prompt": prompt, "session_params": {"id": name} | place}
        if streamed:
            events = (await stream(at, "/v1/completions", body))[:-1]
            return [json.loads(event) for event in events]
        status, reply, _ = await post(at, "/v1/completions", body)
        assert status == 200, reply
        return [cast("Reply", reply)]

    said = [10, 11, 12, 13]
    place: Body = {}
    (*_, first) = await complete("ab")
    place = {"rid": first["id"]}
    told = await complete("c", rid="mine", echo=True)
    assert list(unpack_ids(at.cluster.submits[-1].prompt_ids)) == [97, 98, *said, 99]
    assert "".join(str(each["choices"][0]["text"]) for each in told).endswith("c" + TEXT)  # type: ignore[index]
    assert {str(each["id"]) for each in told} == {"mine"}
    await generate(at, text="d", session_params={"id": name, "rid": "mine"})
    prompt_ids = [97, 98, *said, 99, *said, 100]
    assert list(unpack_ids(at.cluster.submits[-1].prompt_ids)) == prompt_ids


@pytest.mark.parametrize("said", [{"prompt": ["a", "b"]}, {"n": 2}, {"best_of": 2}])
async def test_a_session_takes_one_text_at_a_time(at: House, said: Body) -> None:
    _, name, _ = await post(at, "/open_session", {})
    body: Body = {"prompt": "a", "session_params": {"id": name}}
    assert await refused(at, "/v1/completions", body | said) == "session_params"


async def _post_plain(at: House, path: str, body: Body) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.post(at.url + path, json=body) as reply:
        return reply.status, await reply.text(), reply.content_type


async def test_a_session_has_one_name_and_its_room(at: House) -> None:
    status, name, _ = await post(at, "/open_session", {"session_id": "s", "capacity_of_str_len": 3})
    assert (status, name) == (200, "s")
    assert (await post(at, "/open_session", {"session_id": "s"}))[0] == 400
    assert (await post(at, "/open_session", {"streaming": True}))[0] == 400
    body = {"text": "abcd", "session_params": {"id": "s"}}
    assert (await post(at, GENERATE, body))[0] == 400


async def test_ids_take_room_in_a_session_as_their_text_does(at: House) -> None:
    await post(at, "/open_session", {"session_id": "s", "capacity_of_str_len": 3})
    body: Body = {"input_ids": [97, 98, 99, 100], "session_params": {"id": "s"}}
    assert await refused(at, GENERATE, body) == "session_params"
    assert (await post(at, GENERATE, body | {"input_ids": [97]}))[0] == 200


async def test_an_answer_that_broke_off_is_nothing_to_go_on_from(at: House) -> None:
    _, name, _ = await post(at, "/open_session", {})
    at.cluster.row_error = Unavailable("lost")
    body: Body = {"text": "a", "rid": "x", "session_params": {"id": name}}
    events = await stream(at, GENERATE, body)
    assert any("error" in json.loads(event) for event in events if event != "[DONE]")
    at.cluster.row_error = None
    on = {"text": "b", "session_params": {"id": name, "rid": "x"}}
    assert await refused(at, GENERATE, on) == "session_params.rid"
    assert (await post(at, GENERATE, body))[0] == 200


async def test_a_request_that_is_refused_replaces_nothing_of_its_session(at: House) -> None:
    _, name, _ = await post(at, "/open_session", {})
    await generate(at, text="a", rid="x", session_params={"id": name})
    anew: Body = {"text": "b", "session_params": {"id": name, "replace": True}}
    status, _, _ = await post(at, GENERATE, anew | {"sampling_params": {"max_new_tokens": 1000}})
    assert status == 400
    on: Body = {"text": "c", "session_params": {"id": name, "rid": "x"}}
    assert (await post(at, GENERATE, on))[0] == 200
    assert (await post(at, GENERATE, anew))[0] == 200
    assert (await post(at, GENERATE, on))[0] == 400


async def test_an_abort_meets_every_name_that_begins_so(at: House) -> None:
    at.cluster.hold_at = 1
    async with asyncio.TaskGroup() as group:
        told = [
            group.create_task(post(at, GENERATE, {"text": "a", "rid": rid, "stream": False}))
            for rid in ("x1", "x2", "y")
        ]
        await until(lambda: at.service.submission.driver.open_count == 3)  # pyright: ignore[reportPrivateUsage]
        assert (await post(at, "/abort_request", {"rid": "", "abort_all": False}))[0] == 400
        assert (await _post_plain(at, "/abort_request", {"rid": "x"}))[0] == 200
        await until(lambda: at.service.submission.driver.open_count == 1)  # pyright: ignore[reportPrivateUsage]
        at.cluster.go.set()
    ends = [cast("Reply", task.result()[1])["meta_info"]["finish_reason"] for task in told]
    assert [end["type"] for end in ends] == ["abort", "abort", "stop"]
    assert ends[0] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }


async def test_an_abort_is_told_to_the_other_gateways(at: House) -> None:
    heard: list[AbortRequests] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.read(ABORT))

    async with client_bus(at.transport(), "gateway-1", party=Role.GATEWAY) as other:
        await other.listen(ABORT, hear, model=MODEL)
        await _post_plain(at, "/abort_request", {"abort_all": True})
        await until(lambda: len(heard) == 1)
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            told = group.create_task(post(at, GENERATE, {"text": "a", "rid": "x"}))
            await until(lambda: at.service.submission.driver.open_count == 1)  # pyright: ignore[reportPrivateUsage]
            late = AbortRequests(prefix="x", not_after_unix_ms=0)
            other.publish(ABORT, late, model=MODEL)
            other.publish(ABORT, msgspec.structs.replace(heard[0], prefix="x"), model=MODEL)
        assert cast("Reply", told.result()[1])["meta_info"]["finish_reason"]["type"] == "abort"
    assert heard[0].prefix == ""


async def test_orders_reach_the_workers(at: House) -> None:
    assert await get(at, "/flush_cache") == (200, "Cache flushed: 3 pages.\n")
    status, reply, _ = await post(at, "/pause_generation", {"mode": "in_place"})
    assert (status, reply["status"]) == (200, "ok")
    assert (await post(at, "/continue_generation", {}))[0] == 200
    status, _, _ = await post(
        at, "/update_weight_version", {"new_version": "8", "abort_all_requests": False}
    )
    assert status == 200
    assert at.cluster.orders == [
        FlushCache(unless_busy=True),
        PauseWorker(mode=PauseMode.IN_PLACE),
        ContinueWorker(),
        SetWeightVersion(version="8", abort_all=False),
    ]
    assert (await post(at, "/pause_generation", {"mode": "soon"}))[0] == 400


async def test_an_answer_names_the_weights_that_drew_it(at: House) -> None:
    """Not those of the last heartbeat: an answer comes in no time, and may be of several."""

    def from_(*marks: tuple[int, str]) -> tuple[Origin, ...]:
        worker = InstanceId("worker-0")
        return tuple(Origin(start=start, worker=worker, weights=name) for start, name in marks)

    at.cluster.origins = from_((0, "8"))
    meta = (await generate(at))["meta_info"]
    assert (meta["weight_version"], meta["dp_rank"]) == ("8", 0)
    assert "weight_versions" not in meta
    _, chat, _ = await post(
        at, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}
    )
    assert chat["metadata"] == {"weight_version": "8"}
    at.cluster.origins = from_((0, "8"), (2, "8"), (3, "9"), (4, "10"))
    meta = (await generate(at))["meta_info"]
    assert meta["weight_version"] == "10"
    assert meta["weight_versions"] == [
        {"version": "8", "start": 0, "end": 3},
        {"version": "9", "start": 3, "end": 4},
    ], "of four tokens none is of the last ones"


async def test_a_cache_in_use_is_not_flushed(at: House) -> None:
    assert (await get(at, "/flush_cache?timeout=never"))[0] == 400
    assert at.cluster.orders == []
    # The worker says so itself, whatever its last heartbeat said.
    at.cluster.waiting = 1
    assert (await get(at, "/flush_cache", "POST"))[0] == 400
    async with asyncio.TaskGroup() as group:
        flushed = group.create_task(get(at, "/flush_cache?timeout=60", "POST"))
        await until(lambda: len(at.cluster.orders) >= 3)
        at.cluster.waiting = 0
    assert flushed.result() == (200, "Cache flushed: 3 pages.\n")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_a_model_is_described(at: House, path: str) -> None:
    status, text = await get(at, path)
    info = json.loads(text)
    assert (status, info["served_model_name"], info["weight_version"]) == (200, MODEL, "7")
    assert (info["max_model_len"], info["is_generation"]) == (CONTEXT_TOKENS, True)
    assert (info["model_type"], info["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert info["disaggregation_mode"] == "null"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_a_server_tells_its_settings_and_no_secret(at: House, path: str) -> None:
    status, text = await get(at, path)
    info = json.loads(text)
    assert status == 200
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
        info = json.loads((await get(at, "/server_info"))[1])
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
        info = json.loads((await get(at, "/server_info"))[1])
    for name in ("disable_radix_cache", "disable_priority_preemption", "enable_cache_report"):
        assert info[name] is False, name
    assert (info["torchao_config"], info["return_hidden_states_mode"]) == ("", None)


async def test_loads_are_told_worker_by_worker(at: House) -> None:
    status, text = await get(at, "/v1/loads?include=core,memory&dp_rank=0")
    (load,) = json.loads(text)["loads"]
    assert status == 200
    assert (load["num_running_reqs"], load["max_total_num_tokens"]) == (0, 16)
    assert "memory" in load
    assert "queues" not in load
    assert "speculative" not in load
    for query in ("include=all,nothing", "format=xml", "dp_rank=7"):
        assert (await get(at, f"/v1/loads?{query}"))[0] == 400, query


async def test_loads_are_told_as_gauges_where_that_is_asked_for(at: House) -> None:
    path = "/v1/loads?format=prometheus"
    async with aiohttp.ClientSession() as session, session.get(at.url + path) as reply:
        assert reply.content_type == "text/plain"
        families = {family.name: family for family in gauges(await reply.text())}
    (told,) = families["antiphon_load_max_total_num_tokens"].samples
    assert (told.labels, told.value) == ({"dp_rank": "0", "worker": "worker-0"}, 16)
    assert {"antiphon_load_paused", "antiphon_load_queues_waiting"} < families.keys()
    _, text = await get(at, f"{path}&include=core")
    assert not any("queues" in family.name for family in gauges(text))


async def test_loads_tell_what_workers_have_done_lately(at: House) -> None:
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
    )
    at.cluster.waiting = 3

    def heard() -> bool:
        beats = [peer.heartbeat.worker for peer in at.workers]
        return [beat.waiting for beat in beats if beat is not None] == [3]

    await until(heard)
    status, text = await get(at, "/v1/loads")
    told = json.loads(text)
    (load,) = told["loads"]
    assert status == 200
    assert (told["accelerator"], told["num_accelerators"]) == ("cpu", 1)
    assert (load["gen_throughput"], load["cache_hit_rate"]) == (12.5, 0.25)
    assert (load["num_waiting_uncached_tokens"], load["num_total_tokens"]) == (33, 33)
    assert (load["num_used_tokens"], load["num_cached_tokens"]) == (0, 16)
    assert load["memory"] == {
        "weight_gb": 2.0,
        "kv_cache_gb": 1.0,
        "graph_gb": 0.0,
        "token_capacity": 16,
    }
    assert load["queues"] == {"waiting": 3, "grammar": 2, "paused": 0, "retracted": 1}
    assert (load["speculative"], load["lora"], load["disaggregation"]) == (None, None, None)


async def test_health_generate_shares_one_generation(at: House) -> None:
    at.cluster.hold_at = 0
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(get(at, "/health_generate")) for _ in range(40)]
        await until(lambda: len(at.cluster.submits) == 1)
        at.cluster.go.set()
    assert {call.result()[0] for call in calls} == {200}
    assert (await get(at, "/health_generate"))[0] == 200  # within the second: the same one
    assert len(at.cluster.submits) == 1


async def test_health_generate_outlives_the_caller_that_began_it(at: House) -> None:
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


async def test_health_generate_has_a_place_of_its_own() -> None:
    async with house(requests_max=1) as at, asyncio.TaskGroup() as group:
        at.cluster.hold_at = 0
        probe = group.create_task(get(at, "/health_generate"))
        await until(lambda: len(at.cluster.submits) == 1)
        tenant = group.create_task(post(at, "/generate", {"text": "hi"}))
        await until(lambda: len(at.cluster.submits) == 2)
        assert (await post(at, "/generate", {"text": "hi"}))[0] == 503
        at.cluster.go.set()
        assert ((await probe)[0], (await tenant)[0]) == (200, 200)
        assert (await post(at, "/generate", {"text": "hi"}))[0] == 200


async def test_health_is_asked_in_every_way(at: House) -> None:
    for path in ("/health", "/ping", "/ready", "/health_generate", "/"):
        assert (await get(at, path))[0] == 200, path
    assert (await get(at, "/", "HEAD"))[0] == 200
    assert at.cluster.submits[0].sampling.max_new_tokens == 1
    await at.worker_leaves()
    for path in ("/health", "/ping", "/ready", "/health_generate"):
        assert (await get(at, path))[0] == 503, path
    await until(lambda: all(peer.heartbeat.role is not Role.WORKER for peer in at.peers))
    assert (await post(at, "/pause_generation", {}))[0] == 503


async def test_texts_become_ids_and_ids_texts(at: House) -> None:
    _, one, _ = await post(at, "/v1/tokenize", {"prompt": "ab", "add_special_tokens": False})
    assert one == {"tokens": [97, 98], "count": 2, "max_model_len": CONTEXT_TOKENS}
    assert at.cluster.encodes[-1].special_tokens is False
    _, several, _ = await post(at, "/tokenize", {"prompt": ["a", "bc"]})
    assert (several["tokens"], several["count"]) == ([[97], [98, 99]], [1, 2])
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    await post(at, "/v1/tokenize", chat | {"add_generation_prompt": False})
    template = at.cluster.encodes[-1].template
    assert (template.generation_prompt, template.tools) == (False, '[{"type":"function"}]')
    _, text, _ = await post(at, "/v1/detokenize", {"tokens": [97, 98]})
    assert text == {"text": "ab"}
    _, texts, _ = await post(at, "/detokenize", {"tokens": [[97], [98]]})
    assert texts == {"text": ["a", "b"]}
    for path, body in (
        ("/v1/tokenize", {}),
        ("/v1/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/detokenize", {"tokens": [1, [2]]}),
        ("/v1/detokenize", {"tokens": ["x"]}),
    ):
        assert (await post(at, path, body))[0] == 400, body


async def test_labels_are_scored_by_what_would_come_next(at: House) -> None:
    at.cluster.script = ("",)
    body: Body = {"query": "a", "items": ["b", "cd"], "label_token_ids": [5, 6]}
    _, plain, _ = await post(at, "/v1/score", body)
    assert plain["scores"] == [pytest.approx([0.7788, 0.6065], rel=1e-3)] * 2
    _, soft, _ = await post(at, "/v1/score", body | {"apply_softmax": True, "item_first": True})
    for row in cast("list[list[float]]", soft["scores"]):
        assert sum(row) == pytest.approx(1.0)
    prompts = {bytes(list(unpack_ids(submit.prompt_ids))) for submit in at.cluster.submits}
    assert prompts == {b"ab", b"acd", b"ba", b"cda"}
    assert {submit.sampling.max_new_tokens for submit in at.cluster.submits} == {0}
    status, _, _ = await post(at, "/v1/score", body | {"items": [[1]]})
    assert status == 400


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/rerank", "/v1/classify", "/encode", "/classify"]
)
async def test_what_this_model_cannot_do_is_refused_with_a_reason(at: House, path: str) -> None:
    status, reply, _ = await post(at, path, {"input": "x"})
    error = cast("Reply", reply["error"])
    assert (status, error["code"]) == (400, "unsupported")
    assert "this model does not" in str(error["message"])


async def test_logprobs_cannot_begin_beyond_the_prompt(at: House) -> None:
    body: Body = {"text": "ab", "return_logprob": True, "logprob_start_len": 2}
    status, reply, _ = await post(at, GENERATE, body)
    assert status == 200, reply
    status, reply, _ = await post(at, GENERATE, body | {"logprob_start_len": 3})
    error = cast("Body", reply["error"])
    assert (status, error["param"]) == (400, "logprob_start_len")
    assert "(3)" in cast("str", error["message"])
    assert "(2)" in cast("str", error["message"])


async def test_weights_named_anew_tell_their_name(at: House) -> None:
    status, reply, _ = await post(at, "/update_weight_version", {"new_version": "9"})
    assert (status, reply["new_version"], reply["success"]) == (200, "9", True)


async def test_older_loads_the_version_and_the_tokenizer_are_shown(at: House) -> None:
    _, text = await get(at, "/get_load")
    (load,) = json.loads(text)
    assert set(load) == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"}
    _, text = await get(at, "/version")
    assert json.loads(text)["version"]
    _, text = await get(at, "/tokenizer_info")
    info = json.loads(text)
    assert (info["vocab_size"], info["model_max_length"]) == (256, CONTEXT_TOKENS)


async def test_root_names_the_server_and_what_to_read(at: House) -> None:
    status, text = await get(at, "/")
    root = json.loads(text)
    assert (status, root["name"], root["model"]) == (200, "antiphon", MODEL)
    assert root["version"]
    for path in root["links"].values():
        assert (await get(at, path))[0] == 200, path


async def test_routes_of_sglang_that_are_not_served_say_why(at: House) -> None:
    assert len({path for _, _, paths, _ in ABSENT for path in paths.split()}) >= 40
    async with aiohttp.ClientSession(at.url) as session:
        for kind, methods, paths, reason in ABSENT:
            for path, method in product(paths.split(), methods.split()):
                async with session.request(method, path) as reply:
                    error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (404, kind.code), path
                assert reason in error["message"]


@pytest.mark.parametrize("path", [GENERATE, "/nowhere", "/v1/chat/completions", "/v1/messages"])
async def test_refused_requests_have_an_id(at: House, path: str) -> None:
    status, _, headers = await post(at, path, {})
    assert status in (400, 404)
    assert len(cast("dict[str, str]", headers)["X-Request-Id"]) == 32


async def test_invocations_is_a_chat(at: House) -> None:
    body: Body = {"messages": [{"role": "user", "content": "hi"}]}
    status, reply, _ = await post(at, "/invocations", body)
    assert (status, reply["object"]) == (200, "chat.completion")
