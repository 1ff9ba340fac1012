"""Every field of the OpenAI family: a stream carries the same as a whole response."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    TEXT,
    Body,
    chunks,
    failure,
    ok,
    post,
    refusal,
    running_post,
    stream,
)
from tests.unit.gateway.cluster import SCRIPT, House, house

from antiphon.wire.errors import InvalidRequest, WorkerLost
from antiphon.wire.sampling import GrammarKind, TokenOutputParams
from antiphon.wire.token_outputs import TokenOutputs, pack_floats
from antiphon.wire.tokenize import MessageToolCall

if TYPE_CHECKING:
    from antiphon.wire.text import TextRow

BOTH_LOGPROBS = {CHAT: {"logprobs": True, "top_logprobs": 1}, COMPLETE: {"logprobs": 1}}
OUTPUT = [10, 11, 12, 13]
"""Ids of the tokens that the cluster generates."""
USAGE_TOO = {"stream_options": {"include_usage": True}}


async def both(at: House, path: str, body: Body) -> tuple[list[Body], list[Body]]:
    """The choices of a whole response, and those joined from the chunks of a stream."""
    choices = (await ok(at, path, body))["choices"]
    joined: list[Body] = [{} for _ in choices]
    for event in await chunks(at, path, body):
        for piece in event["choices"]:
            _join(joined[piece["index"]], piece)
    return choices, joined


def _join(choice: Body, piece: Body) -> None:
    """Add the fields of a chunk to those of the chunks before it."""
    for name, value in piece.items():
        before = choice.get(name)
        if before is None or name == "index":
            choice[name] = value
        elif isinstance(value, dict):
            _join(before, value)
        elif isinstance(value, str | list):
            choice[name] = before + value


async def test_prompts_have_choices_in_order_and_one_usage(at: House) -> None:
    body: Body = {"prompt": ["one", "three"], "n": 2, "rid": "mine"}
    whole, joined = await both(at, COMPLETE, body | USAGE_TOO)
    assert [(choice["index"], choice["text"]) for choice in whole] == [(n, TEXT) for n in range(4)]
    ends = [(choice["text"], choice["finish_reason"]) for choice in joined]
    assert ends == [(TEXT, "stop")] * 4
    reply = await ok(at, COMPLETE, body)
    assert reply["id"] == "mine"
    assert reply["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 16,
        "total_tokens": 24,
        "prompt_tokens_details": None,
        "completion_tokens_details": {"reasoning_tokens": 0},
        "reasoning_tokens": 0,
    }


async def test_one_prompt_that_fails_ends_them_all(at: House) -> None:
    status, error = await failure(at, COMPLETE, {"prompt": ["one", "x" * 64]})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert at.cluster.open == set()


async def test_echo_begins_with_the_prompt_and_has_its_logprobs(at: House) -> None:
    (whole,), (joined,) = await both(at, COMPLETE, {"prompt": "ab", "echo": True, "logprobs": 1})
    assert joined["text"] == whole["text"] == "ab" + TEXT
    columns = whole["logprobs"]
    assert columns == joined["logprobs"]
    assert columns["tokens"] == ["a", "p", *SCRIPT]
    assert (columns["token_logprobs"][0], columns["top_logprobs"][0]) == (None, None)
    assert columns["text_offset"] == [0, 1, 2, 5, 9, 14]
    (by_ids,), _ = await both(at, COMPLETE, {"prompt": list(b"ab"), "echo": True})
    assert by_ids["text"] == "ab" + TEXT


async def test_suffix_goes_with_each_prompt_and_is_not_echoed(at: House) -> None:
    body: Body = {"prompt": ["ab", "c"], "suffix": "def", "echo": True}
    for choices in await both(at, COMPLETE, body):
        assert [choice["text"] for choice in choices] == ["ab" + TEXT, "c" + TEXT]
    assert {(one.prompt, one.suffix) for one in at.cluster.encodes} == {("ab", "def"), ("c", "def")}


@pytest.mark.parametrize("suffix", ["", None])
async def test_empty_suffix_is_none(at: House, suffix: str | None) -> None:
    for prompt in ("ab", [1, 2]):
        await both(at, COMPLETE, {"prompt": prompt, "suffix": suffix})
    assert {one.suffix for one in at.cluster.encodes} == {None}


async def test_echo_of_no_new_tokens_scores_the_prompt(at: House) -> None:
    await post(at, COMPLETE, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0})
    sampling = at.cluster.sampling
    assert sampling.max_new_tokens == 0
    assert sampling.details == TokenOutputParams(logprobs=True, prompt_start=0)


async def test_best_of_several_is_returned(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    generated = at.cluster.row

    def row(request: Any, step: int, choice: int) -> TextRow:
        row = generated(request, step, choice)
        if choice == 2 or row.details is None:
            return row
        # A logprob far below that of the best choice.
        ids, _, *rest = row.details.details.columns
        details = TokenOutputs.from_columns(1, (ids, pack_floats([-16.0]), *rest))
        piece = msgspec.structs.replace(row.details, details=details)
        return msgspec.structs.replace(row, text=str(choice), text_offset=step, details=piece)

    monkeypatch.setattr(at.cluster, "row", row)
    asked = {"return_meta_info": True, "return_output_ids_in_sglext": True, "rid": "mine"}
    reply = await ok(at, COMPLETE, {"prompt": "x", "best_of": 3} | asked)
    (only,) = reply["choices"]
    assert only["meta_info"]["id"] == "mine_2"
    assert reply["sglext"] == {"output_ids": OUTPUT}
    assert (only["text"], only["index"], only["logprobs"]) == (TEXT, 0, None)
    assert at.cluster.submits[0].choices == 3
    streamed = {"prompt": "x", "best_of": 3, "stream": True}
    assert await refusal(at, COMPLETE, streamed) == (400, "best_of")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "triggered_tags", "triggers": ["<"], "tags": []}


def response_format(kind: str, **fields: object) -> Body:
    return {"response_format": {"type": kind} | fields}


@pytest.mark.parametrize(
    ("fields", "kind", "form"),
    [
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": "root ::= x"}, GrammarKind.EBNF, "root ::= x"),
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA),
        (response_format("json_object"), GrammarKind.JSON_OBJECT, ""),
        (
            response_format("json_schema", json_schema={"schema": SCHEMA}),
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            response_format("structural_tag", format=TAG),
            GrammarKind.STRUCTURAL_TAG,
            {"format": TAG},
        ),
        (
            response_format("structural_tag", structures=[], triggers=["<"]),
            GrammarKind.STRUCTURAL_TAG,
            {"structures": [], "triggers": ["<"]},
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_form_of_the_output_reaches_the_worker(
    at: House, path: str, fields: Body, kind: GrammarKind, form: object
) -> None:
    await ok(at, path, BODIES[path] | fields)
    grammar = at.cluster.grammar
    text = grammar.text if isinstance(form, str) else json.loads(grammar.text)
    assert (grammar.kind, text) == (kind, form)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_plain_text_has_no_grammar(at: House, path: str) -> None:
    await ok(at, path, BODIES[path] | response_format("text") | {"regex": "", "ebnf": None})
    assert at.cluster.sampling.grammar is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_error_in_a_form_is_400_before_the_first_byte_and_names_its_field(
    at: House, streamed: bool
) -> None:
    at.cluster.script = ("",)
    at.cluster.row_error = InvalidRequest("grammar: nothing matches", param="grammar")
    body = {"messages": HI, "stream": streamed} | response_format("json_object")
    status, error = await failure(at, CHAT, body)
    assert (status, error["param"], error["code"]) == (400, "response_format", "invalid_request")


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_ids_and_hidden_states_are_the_same_in_a_stream(at: House, path: str) -> None:
    body = BODIES[path] | {"return_token_ids": True, "return_hidden_states": True}
    (whole,), (joined,) = await both(at, path, body)
    expected = {
        "prompt_token_ids": list(b"hi"),
        "response_token_ids": OUTPUT,
        "hidden_states": [[0.5, 1.5]] * 4,
        "logprobs": None,
    }
    assert expected.items() <= whole.items()
    for name in ("prompt_token_ids", "response_token_ids", "finish_reason"):
        assert joined[name] == whole[name], name
    # One chunk of a stream has them all; of a chat, in its delta.
    states = joined["delta"] if path == CHAT else joined
    assert states["hidden_states"] == whole["hidden_states"]
    *events, last, _ = await stream(at, path, body)
    assert sum('"hidden_states"' in event for event in [*events, last]) == 1
    assert '"finish_reason":"stop"' in events[-1]
    submit = at.cluster.submits[0]
    assert submit.sampling.details == TokenOutputParams(ids=True, hidden=True)
    assert not submit.stop.token_texts


async def test_template_gets_tools_reasoning_and_variables(at: House) -> None:
    call = {"id": "c1", "function": {"name": "look", "arguments": '{"at": "Rome"}'}}
    assistant = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    messages = [
        {"role": "user", "content": "weather?"},
        assistant | {"tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    variables = {"reasoning_effort": "none", "chat_template_kwargs": {"style": {"a": [1]}}}
    await ok(at, CHAT, {"messages": messages} | variables)
    _, called, tool = at.cluster.turns
    assert called.tool_calls == (MessageToolCall(id="c1", name="look", arguments='{"at": "Rome"}'),)
    assert (called.content, called.reasoning_content) == ("", "hm")
    assert (called.without_content, tool.without_content) == (True, False)
    assert (tool.role, tool.tool_call_id) == ("tool", "c1")
    assert at.cluster.template_options == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
        "style": {"a": [1]},
    }


async def test_turn_may_be_of_parts_and_its_calls_of_objects(at: House) -> None:
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "Well,"},
        {"type": "refusal", "refusal": "no."},
    ]
    call = {"id": "c1", "function": {"name": "look", "arguments": {"at": ["Rome"]}}}
    messages = [
        {"role": "latest_reminder", "content": "be brief"},
        {"role": "assistant", "content": parts, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    await ok(at, CHAT, {"messages": messages})
    reminder, turn, _ = at.cluster.turns
    assert reminder.role == "latest_reminder"
    assert (turn.content, turn.reasoning_content) == ("Well, no.", "hm")
    assert turn.tool_calls == (MessageToolCall(id="c1", name="look", arguments='{"at":["Rome"]}'),)


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
async def test_last_message_with_prefix_is_continued(at: House, path: str) -> None:
    begun = {"role": "assistant", "content": "The", "prefix": True}
    await ok(at, path, {"messages": [*HI, begun]})
    assert at.cluster.encodes[0].continue_final_message
    for messages in ([begun, *HI], [{**HI[0], "prefix": True}]):
        assert await refusal(at, path, {"messages": messages}) == (400, "messages[0].prefix")


async def test_patterns_priorities_and_the_name_default_are_taken(at: House) -> None:
    body = {"messages": HI, "stop_regex": ["a+b", r"\d"], "priority": -3, "model": "default"}
    await ok(at, CHAT, body)
    submit = at.cluster.submits[0]
    assert (submit.stop.patterns, submit.priority) == (("a+b", r"\d"), -3)


async def test_chat_may_have_its_prompt_as_ids(at: House) -> None:
    await ok(at, CHAT, {"messages": HI, "input_ids": list(b"abc")})
    assert at.cluster.prompt == list(b"abc")
    assert all(encode.messages is None for encode in at.cluster.encodes)


async def test_cache_report_adds_cached_tokens_to_usage() -> None:
    async with house(cache_report=True) as at:
        usage = (await ok(at, CHAT, {"messages": HI}))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_continuous_usage_counts_every_prompt(at: House) -> None:
    body: Body = {"prompt": ["a", "b"], "stream_options": {"continuous_usage_stats": True}}
    usages = [event["usage"] for event in await chunks(at, COMPLETE, body)]
    counts = [usage["completion_tokens"] for usage in usages if usage]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * len(SCRIPT)


async def test_error_in_one_of_several_streams_ends_all_of_them(at: House) -> None:
    at.cluster.row_error = WorkerLost("gone")
    *_, error, end = await stream(at, COMPLETE, {"prompt": ["a", "b"]})
    assert (json.loads(error)["error"]["code"], end) == ("worker_lost", "[DONE]")
    assert at.open_count == 0


async def test_aborted_request_ends_well(at: House) -> None:
    driver = at.service.submission.driver
    async with running_post(at, CHAT, {"messages": HI}) as task:
        await until(lambda: any(one.first_token_at for one in driver.streams()))
        (one,) = driver.streams()
        driver.abort(one)
        await until(task.done)
    status, reply, _ = task.result()
    (choice,) = reply["choices"]
    assert (status, choice["finish_reason"]) == (200, "abort")
    assert choice["message"]["content"] == SCRIPT[0]
    await until(lambda: len(at.cluster.cancelled) == 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_cached_tokens_details_are_beside_the_choices(at: House, path: str) -> None:
    details = {"cached_tokens_details": {"device": 1, "host": 0}}
    body = BODIES[path] | {"return_cached_tokens_details": True}
    assert (await ok(at, path, body))["sglext"] == details
    assert "sglext" not in await ok(at, path, BODIES[path])
    *_, beside, last = await chunks(at, path, body | USAGE_TOO)
    assert (beside["choices"], beside["sglext"]) == ([], details)
    assert "sglext" not in last


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_meta_info_of_a_choice_is_that_of_generate(at: House, path: str) -> None:
    asked = {"return_meta_info": True, "rid": "mine", "n": 2, "return_hidden_states": True}
    both_ways = await both(at, path, BODIES[path] | asked | BOTH_LOGPROBS[path])
    native: Body = {
        "text": "hi",
        "rid": "mine",
        "sampling_params": {"n": 2},
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "return_hidden_states": "last",
    }
    replies = await ok(at, GENERATE, native)
    for choices in both_ways:
        metas = [_timeless(choice["meta_info"]) for choice in choices]
        assert metas == [_timeless(reply["meta_info"]) for reply in replies]
        assert [meta["id"] for meta in metas] == ["mine_0", "mine_1"]


def _timeless(meta_info: Body) -> Body:
    """Without when the output ended and how long it took."""
    meta = dict(meta_info)
    assert meta.pop("e2e_latency")
    assert meta.pop("response_sent_to_client_ts")
    return meta


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_meta_info_comes_with_the_end_and_changes_nothing_else(at: House, path: str) -> None:
    events = await chunks(at, path, BODIES[path] | {"return_meta_info": True})
    choices = [event["choices"][0] for event in events]
    (choice,) = (choice for choice in choices if "meta_info" in choice)
    meta = choice["meta_info"]
    assert choice["finish_reason"] == meta["finish_reason"]["type"] == "stop"
    assert meta["completion_tokens"] == len(SCRIPT)
    assert "output_token_logprobs" not in meta
    assert len(events) == len(await chunks(at, path, BODIES[path]))


async def test_meta_info_of_an_echo_has_logprobs_of_the_prompt(at: House) -> None:
    body: Body = {"prompt": "ab", "echo": True, "logprobs": 0, "return_meta_info": True}
    for (choice,) in await both(at, COMPLETE, body):
        logprobs = choice["meta_info"]["input_token_logprobs"]
        assert [token[1:] for token in logprobs] == [[97, "a"], [5, "p"]]


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        (CHAT, {"messages": HI}, (list(b"hi"), OUTPUT)),
        (CHAT, {"messages": HI, "n": 2}, (list(b"hi"), [OUTPUT] * 2)),
        (COMPLETE, {"prompt": "hi"}, (list(b"hi"), OUTPUT)),
        (COMPLETE, {"prompt": ["a", "bc"]}, ([[97], [98, 99]], [OUTPUT] * 2)),
    ],
)
async def test_ids_are_beside_the_choices(
    at: House, path: str, body: Body, ids: tuple[list[object], list[object]]
) -> None:
    asked = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    expected = {"input_ids": ids[0], "output_ids": ids[1]}
    assert (await ok(at, path, body | asked))["sglext"] == expected
    *pieces, beside, _ = await chunks(at, path, body | asked | USAGE_TOO)
    assert (beside["choices"], beside["sglext"]) == ([], expected)
    assert not any("sglext" in str(piece) or "meta_info" in str(piece) for piece in pieces)
    inputs_only = body | {"return_input_ids_in_sglext": True}
    assert (await ok(at, path, inputs_only))["sglext"] == {"input_ids": ids[0]}
    assert at.cluster.sampling.details is None
