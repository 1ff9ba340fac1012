from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.model_card.card import read_card
from antiphon.model_card.vocabulary import tokenizer_eos_ids

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = ["<s>", "</s>", "<|eom_id|>", "<tool>"]


def write(folder: Path, card: dict[str, object] | None, tokens: list[str] = TOKENS) -> Path:
    added = [{"id": 100 + index, "content": name} for index, name in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {}}))
    if card is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(card))
    return folder


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "special": True}], ids=type)
def test_the_end_token_is_found_however_it_is_written(tmp_path: Path, end: object) -> None:
    assert tokenizer_eos_ids(write(tmp_path, {"eos_token": end}, TOKENS[:2])) == (101,)


@pytest.mark.parametrize(
    ("card", "ends"), [({"eos_token": "</s>"}, (101, 102)), (None, (102,))], ids=["card", "none"]
)
def test_the_end_of_a_message_that_calls_a_tool_is_an_end(tmp_path: Path, card, ends) -> None:
    assert tokenizer_eos_ids(write(tmp_path, card)) == ends


def test_a_folder_without_a_tokenizer_names_no_ends(tmp_path: Path) -> None:
    assert tokenizer_eos_ids(tmp_path) == ()


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tokenizer_eos_ids(tmp_path)


def test_the_embedded_tokenizer_ends_as_its_model_does() -> None:
    folder = embedded.path()
    assert set(tokenizer_eos_ids(folder)) == set(read_card(folder).eos_ids)
