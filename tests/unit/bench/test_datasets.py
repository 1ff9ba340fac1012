"""Prompts have the stated length and shared prefix, in tokens of the real tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.bench.models import SHAPES
from tests.bench.serving.datasets import (
    MultiTurn,
    RandomLengths,
    SharedPrefix,
    Vocabulary,
    parse_dataset,
)
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_random_prompts_have_their_length_and_nothing_in_common(words: Vocabulary) -> None:
    scripts = RandomLengths(128, 32).scripts(words, 20, seed=1)
    assert {words.tokens(script.turns[0]) for script in scripts} == {128}
    assert {script.output_tokens for script in scripts} == {32}
    assert len({script.turns[0][:24] for script in scripts}) == 20


def test_lengths_spread_between_a_share_of_the_longest_and_the_longest(words: Vocabulary) -> None:
    scripts = RandomLengths(100, 40, spread=0.5).scripts(words, 200, seed=2)
    assert {words.tokens(s.turns[0]) for s in scripts} == {s.prompt_tokens for s in scripts}
    assert 50 <= min(s.prompt_tokens for s in scripts) < 60
    assert 90 < max(s.prompt_tokens for s in scripts) <= 100
    assert min(s.output_tokens for s in scripts) >= 20


def test_prompts_of_a_group_share_exactly_the_prefix(folder: Path, words: Vocabulary) -> None:
    dataset = SharedPrefix(96, 16, 8, groups=2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(s.turns[0]).ids for s in dataset.scripts(words, 8, seed=3)]
    assert {len(each) for each in ids} == {dataset.prompt_tokens} == {112}
    assert len({tuple(each[:96]) for each in ids}) == 2
    assert ids[0][:96] == ids[2][:96] != ids[1][:96]
    assert len({tuple(each[96:]) for each in ids}) == 8


def test_conversations_have_their_turns(words: Vocabulary) -> None:
    scripts = MultiTurn(4, 20, 16).scripts(words, 3, seed=4)
    assert [len(script.turns) for script in scripts] == [4, 4, 4]
    assert {words.tokens(turn) for script in scripts for turn in script.turns} == {20}


def test_a_seed_gives_the_same_prompts_and_another_gives_others(words: Vocabulary) -> None:
    dataset = RandomLengths(64, 8)
    assert dataset.scripts(words, 5, seed=5) == dataset.scripts(words, 5, seed=5)
    assert dataset.scripts(words, 5, seed=5) != dataset.scripts(words, 5, seed=6)


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("random:128:64", RandomLengths(128, 64)),
        ("random:128:64:0.5", RandomLengths(128, 64, 0.5)),
        ("shared:768:32:32", SharedPrefix(768, 32, 32)),
        ("shared:768:32:32:4", SharedPrefix(768, 32, 32, 4)),
        ("turns:4:64:32", MultiTurn(4, 64, 32)),
        ("long:3000", RandomLengths(3000, 16)),
    ],
)
def test_a_dataset_is_read_as_it_is_written(text: str, dataset: object) -> None:
    assert parse_dataset(text) == dataset


@pytest.mark.parametrize("text", ["", "random", "random:128", "poem:3", "random:a:b"])
def test_what_is_no_dataset_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|could not convert"):
        parse_dataset(text)


def test_the_shapes_weigh_what_they_are_called() -> None:
    llama, qwen = SHAPES["llama-135m"], SHAPES["qwen2.5-0.5b"]
    assert llama.weights_count == 110_886_912  # 135 M with the vocabulary of the original
    assert qwen.weights_count == 365_166_592
    assert (llama.kv_bytes, qwen.kv_bytes) == (30 * 2 * 192 * 2, 24 * 2 * 128 * 2)
