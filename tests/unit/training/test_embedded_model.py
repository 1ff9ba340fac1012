"""The model that ships: small, complete, and right in a first conversation."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from typing import TYPE_CHECKING

import pytest
from tests.training.dialogue import Chat, Message, Skill, Split, messages_of, seeded
from tests.training.evaluate import held_out_cases, score
from tests.training.generation import LocalModel
from tests.training.grammar import SKILLS, weave
from tests.training.skills.copying import COPYING
from tests.training.skills.sums import SUMS

from antiphon import embedded

if TYPE_CHECKING:
    from collections.abc import Sequence

FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
}
BYTES_MAX = 10_000_000


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(embedded.path())


def test_the_folder_holds_five_files_below_ten_megabytes() -> None:
    files = list(embedded.path().iterdir())
    assert {file.name for file in files} == FILES
    assert sum(file.stat().st_size for file in files) < BYTES_MAX


def test_the_weights_are_one_to_five_million_numbers_in_bfloat16() -> None:
    with (embedded.path() / "model.safetensors").open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    assert {tensor["dtype"] for tensor in tensors} == {"BF16"}
    assert 1_000_000 <= sum(prod(tensor["shape"]) for tensor in tensors) <= 5_000_000


def test_finding_the_folder_does_not_import_torch() -> None:
    code = "import sys, antiphon.embedded as e; assert e.path(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_generation_ends_at_the_end_of_a_turn() -> None:
    settings = json.loads((embedded.path() / "generation_config.json").read_text())
    tokenizer = json.loads((embedded.path() / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert settings["eos_token_id"] == ids["<|end|>"]


def test_a_conversation_of_three_turns_is_answered_rightly(model: LocalModel) -> None:
    chat: list[Message] = []
    for question, answer in (
        ("Hello, my name is Ada.", "Nice to meet you, Ada!"),
        ("What is 12 + 30?", "12 + 30 = 42."),
        ("What is my name?", "Your name is Ada."),
    ):
        chat.append(Message("user", question))
        assert model([Chat(tuple(chat))], 40) == [answer]
        chat.append(Message("assistant", answer))


def test_a_name_is_remembered_over_a_long_chat(model: LocalModel) -> None:
    """About a thousand tokens lie between the name and the question."""
    rng = seeded("long chat", 0)
    between = [skill.write(rng, Split.TRAIN) for _ in range(20) for skill in (SUMS, COPYING)]
    messages = (
        Message("user", "My name is Ada."),
        Message("assistant", "Nice to meet you, Ada!"),
        *messages_of(weave(rng, between)),
        Message("user", "What is my name?"),
    )
    assert model([Chat(messages)], 20) == ["Your name is Ada."]


@pytest.mark.parametrize(
    "skill", [skill for skill in SKILLS if skill.floor], ids=lambda skill: skill.name
)
def test_a_sample_of_held_out_prompts_is_answered(model: LocalModel, skill: Skill) -> None:
    """A quick look; `tests.training.evaluate` gives the whole score."""
    assert skill.floor
    assert score(skill, held_out_cases(skill, seed=0, count=20), model).share >= skill.floor - 0.1


def test_a_score_counts_exact_answers_and_keeps_the_misses() -> None:
    cases = held_out_cases(SUMS, seed=0, count=10)
    right = [case.answer for case in cases]

    def all_but_one(chats: Sequence[Chat], tokens_max: int) -> list[str]:
        assert len(chats) == len(cases)
        assert tokens_max >= max(len(answer) for answer in right)
        return [*right[:-1], "I do not know."]

    result = score(SUMS, cases, all_but_one)
    assert (result.exact, result.prompts, result.share) == (9, 10, 0.9)
    assert result.reached
    assert result.misses[0].expected == right[-1]
