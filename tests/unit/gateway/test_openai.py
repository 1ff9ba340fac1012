"""Every field of the OpenAI family, whole and streamed: the two say the same."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import (
    CHAT,
    COMPLETE,
    HI,
    TEXT,
    Body,
    chunks,
    failure,
    ok,
    post,
    refusal,
    stream,
)
from tests.unit.gateway.cluster import SCRIPT, House, house

from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import InvalidRequest, WorkerLost
from antiphon.wire.sampling import GrammarKind, TokenOutputParams
from antiphon.wire.tokenize import MessageToolCall

if TYPE_CHECKING:
    from antiphon.wire.text import TextRow

Choice = dict[str, Any]


async def both(at: House, path: str, body: Body) -> tuple[list[Choice], list[Choice]]:
    """The choices of an answer, told whole; and the same, put together from chunks."""
    whole = await ok(at, path, body)
    choices = whole["choices"]
    joined: list[Choice] = [{} for _ in choices]
    for event in (await stream(at, path, body))[:-1]:
        for piece in json.loads(event)["choices"]:
            _join(joined[piece["index"]], piece)
    return choices, joined


def _join(choice: Choice, piece: Choice) -> None:
    """Add what a chunk says to what was said before."""
    for name, value in piece.items():
        before = choice.get(name)
        if before is None or name == "index":
            choice[name] = value
        elif isinstance(value, dict):
            _join(before, value)
        elif isinstance(value, str | list):
            choice[name] = before + value


async def test_prompts_are_answered_in_their_order_and_counted_together(at: House) -> None:
    body: Body = {"prompt": ["one", "three"], "n": 2, "rid": "mine"}
    whole, joined = await both(at, COMPLETE, body | {"stream_options": {"include_usage": True}})
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    assert {choice["text"] for choice in whole} == {TEXT}
    assert [choice["text"] for choice in joined] == [TEXT] * 4
    assert [choice["finish_reason"] for choice in joined] == ["stop"] * 4
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
    status, reply, _ = await post(at, COMPLETE, {"prompt": ["one", "x" * 64]})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert at.cluster.open == set()


async def test_an_echo_begins_with_the_prompt_and_tells_of_its_tokens(at: House) -> None:
    body: Body = {"prompt": "ab", "echo": True, "logprobs": 1}
    whole, joined = await both(at, COMPLETE, body)
    assert joined[0]["text"] == whole[0]["text"] == "ab" + TEXT
    columns = whole[0]["logprobs"]
    assert columns == joined[0]["logprobs"]
    assert columns["tokens"] == ["a", "p", *SCRIPT]
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert columns["text_offset"] == [0, 1, 2, 5, 9, 14]
    by_ids, _ = await both(at, COMPLETE, {"prompt": list(b"ab"), "echo": True})
    assert by_ids[0]["text"] == "ab" + TEXT


async def test_a_suffix_goes_with_each_prompt_and_is_not_echoed(at: House) -> None:
    body: Body = {"prompt": ["ab", "c"], "suffix": "def", "echo": True}
    whole, joined = await both(at, COMPLETE, body)
    assert [one["text"] for one in whole] == ["ab" + TEXT, "c" + TEXT]
    assert [one["text"] for one in joined] == ["ab" + TEXT, "c" + TEXT]
    assert {(one.prompt, one.suffix) for one in at.cluster.encodes} == {("ab", "def"), ("c", "def")}


@pytest.mark.parametrize("suffix", ["", None])
async def test_no_suffix_is_no_gap(at: House, suffix: str | None) -> None:
    for prompt in ("ab", [1, 2]):
        await both(at, COMPLETE, {"prompt": prompt, "suffix": suffix})
    assert {one.suffix for one in at.cluster.encodes} == {None}


async def test_an_echo_of_no_new_tokens_is_a_score_of_the_prompt(at: House) -> None:
    await post(at, COMPLETE, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0})
    sampling = at.cluster.submits[0].sampling
    assert sampling.max_new_tokens == 0
    assert sampling.details == TokenOutputParams(logprobs=True, prompt_start=0)


async def test_the_best_of_several_are_returned(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    says = at.cluster.row

    def row(request: object, step: int, choice: int) -> TextRow:
        row = says(request, step, choice)  # pyright: ignore[reportArgumentType]
        assert row.details is not None
        worse = row.details.details.columns
        if choice != 2:
            # A number far below that of the others.
            details = type(row.details.details).from_columns(
                1, (worse[0], b"\0\0\x80\xc1", *worse[2:])
            )
            row = _with(row, text=str(choice), text_offset=step, details=details)
        return row

    monkeypatch.setattr(at.cluster, "row", row)
    asked = {"return_meta_info": True, "return_output_ids_in_sglext": True, "rid": "mine"}
    reply = await ok(at, COMPLETE, {"prompt": "x", "best_of": 3} | asked)
    (only,) = reply["choices"]
    assert only["meta_info"]["id"] == "mine_2"
    assert reply["sglext"] == {"output_ids": [10, 11, 12, 13]}
    assert (only["text"], only["index"], only["logprobs"]) == (TEXT, 0, None)
    assert at.cluster.submits[0].choices == 3
    assert await refusal(at, COMPLETE, {"prompt": "x", "best_of": 3, "stream": True}) == (
        400,
        "best_of",
    )


def _with(row: TextRow, *, text: str, text_offset: int, details: object) -> TextRow:
    piece = msgspec.structs.replace(row.details, details=details)  # pyright: ignore
    return msgspec.structs.replace(row, text=text, text_offset=text_offset, details=piece)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "triggered_tags", "triggers": ["<"], "tags": []}


@pytest.mark.parametrize(
    ("said", "kind", "form"),
    [
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": "root ::= x"}, GrammarKind.EBNF, "root ::= x"),
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {"response_format": {"type": "structural_tag", "format": TAG}},
            GrammarKind.STRUCTURAL_TAG,
            {"format": TAG},
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
            GrammarKind.STRUCTURAL_TAG,
            {"structures": [], "triggers": ["<"]},
        ),
        ({"response_format": {"type": "text"}, "regex": "", "ebnf": None}, None, None),
    ],
)
async def test_the_form_of_an_answer_reaches_the_worker(
    at: House, said: Body, kind: GrammarKind | None, form: object
) -> None:
    for path, body in ((CHAT, {"messages": HI}), (COMPLETE, {"prompt": "x"})):
        await ok(at, path, body | said)
    for submit in at.cluster.submits:
        grammar = submit.sampling.grammar
        if grammar is None or kind is None:
            assert grammar is kind
        else:
            read = grammar.text if isinstance(form, str) else json.loads(grammar.text)
            assert (grammar.kind, read) == (kind, form)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_mistake_in_a_form_is_400_before_the_first_byte_and_names_its_field(
    at: House, streamed: bool
) -> None:
    at.cluster.script = ("",)
    at.cluster.row_error = InvalidRequest("grammar: nothing can be said", param="grammar")
    body = {"messages": HI, "stream": streamed, "response_format": {"type": "json_object"}}
    status, error = await failure(at, CHAT, body)
    assert (status, error["param"], error["code"]) == (400, "response_format", "invalid_request")


async def test_what_else_a_choice_may_tell_is_the_same_in_a_stream(at: House) -> None:
    asked = {"return_token_ids": True, "return_hidden_states": True}
    bodies: dict[str, Body] = {CHAT: {"messages": HI}, COMPLETE: {"prompt": "hi"}}
    for path, body in bodies.items():
        whole, joined = await both(at, path, body | asked)
        assert whole[0]["prompt_token_ids"] == list(b"hi")
        assert whole[0]["response_token_ids"] == [10, 11, 12, 13]
        assert whole[0]["hidden_states"] == [[0.5, 1.5]] * 4
        assert whole[0]["logprobs"] is None
        for name in ("prompt_token_ids", "response_token_ids", "finish_reason"):
            assert joined[0][name] == whole[0][name], name
        # One chunk of a stream has them all; of a chat, in its delta.
        told = joined[0]["delta"] if path == CHAT else joined[0]
        assert told["hidden_states"] == whole[0]["hidden_states"]
        events = (await stream(at, path, body | asked))[:-1]
        assert sum('"hidden_states"' in event for event in events) == 1
        assert '"finish_reason":"stop"' in events[-2]
    details = at.cluster.submits[0].sampling.details
    assert details == TokenOutputParams(ids=True, hidden=True)
    assert not at.cluster.submits[0].stop.token_texts


async def test_templates_get_tools_thoughts_and_variables(at: House) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "function": {"name": "look", "arguments": '{"at": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    body = {
        "messages": messages,
        "reasoning_effort": "none",
        "chat_template_kwargs": {"style": {"a": [1]}},
    }
    await ok(at, CHAT, body)
    asked = at.cluster.encodes[0]
    assert asked.messages is not None
    _, called, answered = asked.messages
    assert called.tool_calls == (MessageToolCall(id="c1", name="look", arguments='{"at": "Rome"}'),)
    assert (called.content, called.reasoning_content) == ("", "hm")
    assert (called.without_content, answered.without_content) == (True, False)
    assert (answered.role, answered.tool_call_id) == ("tool", "c1")
    assert json.loads(asked.template.options or "") == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
        "style": {"a": [1]},
    }


async def test_a_turn_may_be_of_parts_and_its_calls_of_objects(at: House) -> None:
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
    asked = at.cluster.encodes[0]
    assert asked.messages is not None
    reminder, said, _ = asked.messages
    assert reminder.role == "latest_reminder"
    assert (said.content, said.reasoning_content) == ("Well, no.", "hm")
    assert said.tool_calls == (MessageToolCall(id="c1", name="look", arguments='{"at":["Rome"]}'),)


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
async def test_a_last_message_with_prefix_is_where_the_answer_goes_on(at: House, path: str) -> None:
    begun = {"role": "assistant", "content": "The", "prefix": True}
    await ok(at, path, {"messages": [*HI, begun]})
    assert at.cluster.encodes[0].continue_final_message
    for messages in ([begun, *HI], [{**HI[0], "prefix": True}]):
        assert await refusal(at, path, {"messages": messages}) == (400, "messages[0].prefix")


async def test_patterns_priorities_and_the_name_default_are_taken(at: House) -> None:
    body = {"messages": HI, "stop_regex": ["a+b", r"\d"], "priority": -3, "model": "default"}
    await ok(at, CHAT, body)
    submit = at.cluster.submits[0]
    assert submit.stop.patterns == ("a+b", r"\d")
    assert submit.priority == -3


async def test_a_chat_may_bring_its_prompt_as_ids(at: House) -> None:
    await ok(at, CHAT, {"messages": HI, "input_ids": list(b"abc")})
    assert at.cluster.submits[0].prompt_ids == pack_ids(list(b"abc"))
    assert all(asked.messages is None for asked in at.cluster.encodes)


async def test_usage_names_cached_tokens_where_the_operator_wants_it() -> None:
    async with house(cache_report=True) as at:
        reply = await ok(at, CHAT, {"messages": HI})
    usage = reply["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_usage_so_far_counts_every_prompt(at: House) -> None:
    body: Body = {"prompt": ["a", "b"], "stream_options": {"continuous_usage_stats": True}}
    events = await chunks(at, COMPLETE, body)
    counts = [event["usage"]["completion_tokens"] for event in events if event["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * len(SCRIPT)


async def test_an_error_in_one_of_several_streams_ends_all_of_them(at: House) -> None:
    at.cluster.row_error = WorkerLost("gone")
    events = await stream(at, COMPLETE, {"prompt": ["a", "b"]})
    assert json.loads(events[-2])["error"]["code"] == "worker_lost"
    assert events[-1] == "[DONE]"
    assert at.open_count == 0


async def test_an_aborted_request_ends_well(at: House) -> None:
    at.cluster.hold_at = 1

    async def abort() -> None:
        driver = at.service.submission.driver  # pyright: ignore[reportPrivateUsage]
        await until(lambda: driver.open_count == 1)
        (one,) = driver.streams()
        await until(lambda: one.first_token_at is not None)
        driver.abort(one)

    async with asyncio.TaskGroup() as group:
        group.create_task(abort())
        told = group.create_task(post(at, CHAT, {"messages": HI}))
    status, reply, _ = told.result()
    (choice,) = reply["choices"]
    assert (status, choice["finish_reason"]) == (200, "abort")
    assert choice["message"]["content"] == SCRIPT[0]
    await until(lambda: len(at.cluster.cancelled) == 1)


async def test_it_is_told_where_cached_tokens_were(at: House) -> None:
    details = {"cached_tokens_details": {"device": 1, "host": 0}}
    asked = {"return_cached_tokens_details": True}
    cases: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": HI}),
        ("/v1/completions", {"prompt": "a"}),
    ]
    for path, body in cases:
        whole = await ok(at, path, body | asked)
        assert whole["sglext"] == details
        plain = await ok(at, path, body)
        assert "sglext" not in plain
        options = {"stream_options": {"include_usage": True}}
        *_, beside, last, done = await stream(at, path, body | asked | options)
        told = json.loads(beside)
        assert (told["choices"], told["sglext"]) == ([], details)
        assert "sglext" not in json.loads(last)
        assert done == "[DONE]"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (COMPLETE, {"prompt": "hi"})])
async def test_a_choice_tells_what_generate_tells_of_it(at: House, path: str, body: Body) -> None:
    top = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    asked = {"return_meta_info": True, "rid": "mine", "n": 2, "return_hidden_states": True}
    whole, joined = await both(at, path, body | asked | top)
    native: Body = {
        "text": "hi",
        "rid": "mine",
        "sampling_params": {"n": 2},
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "return_hidden_states": "last",
    }
    replies = await ok(at, "/generate", native)
    for said in (whole, joined):
        told = [_timeless(choice["meta_info"]) for choice in said]
        assert told == [_timeless(reply["meta_info"]) for reply in replies]
        assert [meta["id"] for meta in told] == ["mine_0", "mine_1"]


def _timeless(told: Any) -> Body:
    """What is told of an answer, without when it ended and how long it took."""
    meta = dict(told)
    assert meta.pop("e2e_latency")
    assert meta.pop("response_sent_to_client_ts")
    return meta


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_meta_info_comes_with_the_end_and_changes_nothing_else(at: House, path: str) -> None:
    body: Body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    events = await stream(at, path, body | {"return_meta_info": True})
    (told,) = (json.loads(event)["choices"][0] for event in events[:-1] if "meta_info" in event)
    assert told["finish_reason"] == told["meta_info"]["finish_reason"]["type"] == "stop"
    assert told["meta_info"]["completion_tokens"] == len(SCRIPT)
    assert "output_token_logprobs" not in told["meta_info"]
    assert len(events) == len(await stream(at, path, body))


async def test_an_echo_is_told_of_in_meta_info(at: House) -> None:
    body: Body = {"prompt": "ab", "echo": True, "logprobs": 0, "return_meta_info": True}
    whole, joined = await both(at, COMPLETE, body)
    for (choice,) in (whole, joined):
        read = choice["meta_info"]["input_token_logprobs"]
        assert [token[1:] for token in read] == [[97, "a"], [5, "p"]]


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        (CHAT, {"messages": HI}, (list(b"hi"), [10, 11, 12, 13])),
        (CHAT, {"messages": HI, "n": 2}, (list(b"hi"), [[10, 11, 12, 13]] * 2)),
        (COMPLETE, {"prompt": "hi"}, (list(b"hi"), [10, 11, 12, 13])),
        (COMPLETE, {"prompt": ["a", "bc"]}, ([[97], [98, 99]], [[10, 11, 12, 13]] * 2)),
    ],
)
async def test_ids_are_told_beside_the_choices(
    at: House, path: str, body: Body, ids: tuple[list[object], list[object]]
) -> None:
    asked = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    told = {"input_ids": ids[0], "output_ids": ids[1]}
    whole = await ok(at, path, body | asked)
    assert whole["sglext"] == told
    options = {"stream_options": {"include_usage": True}}
    *chunks, beside, _, _ = await stream(at, path, body | asked | options)
    assert (json.loads(beside)["choices"], json.loads(beside)["sglext"]) == ([], told)
    assert not any("sglext" in chunk or "meta_info" in chunk for chunk in chunks)
    whole = await ok(at, path, body | {"return_input_ids_in_sglext": True})
    assert whole["sglext"] == {"input_ids": ids[0]}
    assert at.cluster.submits[-1].sampling.details is None
