"""The data of the embedded model: of a seed, without the exam, and as the gateway reads it."""

from __future__ import annotations

import json
import re
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.training.dialogue import Call, Message, Skill, Split, Tools, said, schema
from tests.training.evaluate import PROMPTS_PER_SKILL, held_out_cases
from tests.training.grammar import SKILLS, Case, choose_skills, conversations, weave
from tests.training.skills.json_answers import JSON, JSON_FORCED
from tests.training.skills.sums import THINKING, pair_key
from tests.training.skills.tools import TOOL_CALL
from tests.training.tokenizer import CHAT_TEMPLATE

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.formats import reasoning_format, tool_format
from antiphon.gateway.parsing.tools.tool import OfferedTools, read_tools
from antiphon.tokenizer.model_tokenizer import detect_formats

if TYPE_CHECKING:
    from antiphon.wire.schemas import Json

CONVERSATIONS = 3000


def test_the_same_seed_writes_the_same_conversations() -> None:
    assert list(islice(conversations(7), 200)) == list(islice(conversations(7), 200))


def test_another_seed_writes_other_conversations() -> None:
    assert list(islice(conversations(7), 200)) != list(islice(conversations(8), 200))


def test_user_and_assistant_take_turns_and_the_assistant_has_the_last_word() -> None:
    for conversation in islice(conversations(1), 500):
        roles = "".join(message.role[0] for message in conversation.messages)
        assert re.fullmatch("s?(u(at+)?a)+", roles)
        for message in conversation.messages:
            assert message.content or message.calls


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_no_held_out_question_is_ever_trained_on(skill: Skill) -> None:
    """A name is told before it is asked for, so there the whole thread is compared."""
    rng = Random(f"trained {skill.name}")
    trained = {skill.write(rng, Split.TRAIN) for _ in range(CONVERSATIONS)}
    held_out = {skill.write(rng, Split.HELD_OUT) for _ in range(200)}
    assert not trained & held_out


def test_no_sum_is_held_out_in_one_order_and_trained_on_in_the_other() -> None:
    assert pair_key((12, 34)) == pair_key((34, 12))


def test_a_case_is_a_chat_that_ends_in_its_question_or_in_what_a_tool_says() -> None:
    for skill in SKILLS:
        for case in held_out_cases(skill, seed=3, count=50):
            assert case.chat.messages[-1].role in ("user", "tool")
            assert case.answer


def test_no_subject_comes_twice_in_a_conversation() -> None:
    rng = Random(5)
    for _ in range(200):
        subjects = [skill.subject for skill in choose_skills(rng, 12) if skill.subject]
        assert len(subjects) == len(set(subjects))


def test_weaving_keeps_each_thread_in_order() -> None:
    rng = Random(2)
    threads = [skill.write(rng, Split.TRAIN) for skill in SKILLS]
    woven = weave(rng, threads)
    for thread in threads:
        rest = iter(woven)
        assert all(exchange in rest for exchange in thread)


def test_no_chat_with_tools_asks_for_what_only_a_chat_without_them_answers() -> None:
    rng = Random(6)
    for _ in range(300):
        kinds = {skill.tools for skill in choose_skills(rng, 8)}
        assert not {Tools.OFFERS, Tools.WITHOUT} <= kinds


def read(case: Case, answer: str) -> Message:
    """An answer as the gateway takes it apart, with the formats that it sees in the template."""
    habits = detect_formats(CHAT_TEMPLATE)
    assert habits.tools is not None
    assert habits.reasoning is not None
    tools = read_tools([cast("Json", schema(tool)) for tool in case.chat.tools])
    parser = AnswerParser(
        tools=tool_format(habits.tools) if tools else None,
        offer=OfferedTools(schemas={tool.name: tool.parameters for tool in tools}),
        reasoning=reasoning_format(habits.reasoning),
        inside=case.chat.thinks,
    )
    heard = parse(parser, list(answer))
    calls = tuple(Call(call.name, call.arguments) for call in heard.calls)
    return Message("assistant", heard.content, calls, heard.reasoning)


def assert_keeps(value: dict[str, Any], held: dict[str, Any]) -> None:
    """The schemas here are flat: properties with types, some of which have to be there."""
    assert set(held["required"]) <= set(value) <= set(held["properties"])
    for key, one in value.items():
        about = held["properties"][key]
        assert isinstance(one, {"string": str, "integer": int, "number": int}[about["type"]])
        assert one in about.get("enum", [one])


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_the_gateway_reads_what_was_meant(skill: Skill) -> None:
    """So an answer that is right to the letter is right for every client."""
    for case in held_out_cases(skill, seed=0, count=100):
        message = read(case, case.answer)
        assert said(message, thinks=case.chat.thinks) == case.answer
        assert bool(message.thinking) == case.chat.thinks
        assert message.content or message.calls


def test_calls_are_of_offered_tools_and_keep_to_their_schemas() -> None:
    called = 0
    for case in held_out_cases(TOOL_CALL, seed=0):
        offered: dict[str, Any] = {tool.name: schema(tool) for tool in case.chat.tools}
        for call in read(case, case.answer).calls:
            called += 1
            function = offered[call.name]["function"]
            assert_keeps(json.loads(call.arguments), function["parameters"])
    assert called > PROMPTS_PER_SKILL / 3


def test_most_questions_that_think_need_two_sums() -> None:
    for case in held_out_cases(THINKING, seed=0, count=50):
        message = read(case, case.answer)
        assert message.thinking.count("=") == 2
        assert message.content.count("+") == 2


@pytest.mark.parametrize("skill", [JSON, JSON_FORCED], ids=lambda skill: skill.name)
def test_objects_are_objects_and_keep_to_their_schemas(skill: Skill) -> None:
    for case in held_out_cases(skill, seed=0, count=100):
        value = json.loads(read(case, case.answer).content)
        assert isinstance(value, dict)
        assert bool(case.chat.schema) == (skill is JSON_FORCED)
        if case.chat.schema:
            assert_keeps(value, json.loads(case.chat.schema))
