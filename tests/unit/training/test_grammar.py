"""The data of the embedded model: the same for the same seed, and nothing of the exam in it."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

import pytest
from tests.training.dialogue import Skill, Split, Tools
from tests.training.evaluate import held_out_cases
from tests.training.grammar import SKILLS, choose_skills, conversations, weave
from tests.training.skills.sums import pair_key

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
