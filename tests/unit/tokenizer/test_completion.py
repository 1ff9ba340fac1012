"""Text with a gap to fill is written as the model's tokenizer, or the operator, says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.unit.tokenizer.requests import asks
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from antiphon.config.errors import ConfigError
from antiphon.config.model import TEMPLATES, CompletionTemplate
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.wire.codec import unpack_ids
from antiphon.wire.digests import namespace
from antiphon.wire.errors import InvalidRequest, RequestTooLarge, Unsupported
from antiphon.wire.tokenize import ChatMessage

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.tokenize import EncodeRequest

GAP = asks(None, "a", suffix="b")
FILE = {
    "name": "mine",
    "fim_begin_token": "[PRE]",
    "fim_middle_token": "[MID]",
    "fim_end_token": "[SUF]",
}


def write(folder: Path, *marks: str, special: bool = False) -> None:
    """A tokenizer of two words that adds `<s>`, and whose marks have the ids from 4 on."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "a": 2, "b": 3}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))


def encode(
    folder: Path, text: EncodeRequest = GAP, said: str = "", bytes_max: int = 1000
) -> list[int]:
    words = vocabulary.read_model_tokenizer(folder, completion_template=said)
    (result,) = TextEncoder(words, namespace("model", ""), bytes_max).encode([text])
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, EncodedPrompt)
    return list(unpack_ids(result.token_ids))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_form_is_known_by_its_marks(
    tmp_path: Path, template: CompletionTemplate, special: bool
) -> None:
    write(tmp_path, *template.marks, special=special)
    assert encode(tmp_path) == [0, 4, 2, 5, 3, 6]
    assert encode(tmp_path, said=template.name) == [0, 4, 2, 5, 3, 6]
    assert encode(tmp_path, asks(None, "", suffix="b")) == [0, 4, 5, 3, 6]
    assert encode(tmp_path, asks(None, "a")) == [0, 2]


def test_the_forms_are_those_the_models_were_trained_on() -> None:
    assert [template.write("P", "S") for template in TEMPLATES] == [
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",  # noqa: RUF001
        "<fim_prefix>P<fim_suffix>S<fim_middle>",
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    ]


def test_marks_of_no_form_or_of_two_show_none_for_certain(tmp_path: Path) -> None:
    star, qwen = (template.marks for template in TEMPLATES[1:])
    for marks in ((), star[:2], (*star, *qwen)):
        write(tmp_path, *marks)
        with pytest.raises(Unsupported, match="--completion-template") as refused:
            encode(tmp_path)
        assert refused.value.param == "suffix"
    assert encode(tmp_path, said="qwen_coder") == [0, 7, 2, 8, 3, 9]


def test_a_mark_that_is_no_token_is_named_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, *TEMPLATES[1].marks[:2])
    with pytest.raises(ConfigError, match=r"star_coder: the tokenizer has no token <fim_middle>$"):
        vocabulary.read_model_tokenizer(tmp_path, completion_template="star_coder")


@pytest.mark.parametrize(
    ("position", "ids"), [("MIDDLE", [0, 4, 2, 5, 3, 6]), ("END", [0, 4, 2, 6, 3, 5])]
)
def test_file_sets_the_position_of_the_middle_marker(
    tmp_path: Path, position: str, ids: list[int]
) -> None:
    write(tmp_path, "[PRE]", "[MID]", "[SUF]")
    file = tmp_path / "form.json"
    file.write_text(json.dumps(FILE | {"fim_position": position}))
    assert encode(tmp_path, said=str(file)) == ids


@pytest.mark.parametrize("text", ["{", "{}", json.dumps(FILE | {"fim_position": "BEGIN"}), None])
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path, text: str | None) -> None:
    write(tmp_path)
    file = tmp_path / "form.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.completion_template: .*form\.json"):
        vocabulary.read_model_tokenizer(tmp_path, completion_template=str(file))


def test_both_sides_of_the_gap_count_for_its_size(tmp_path: Path) -> None:
    write(tmp_path, *TEMPLATES[1].marks)
    with pytest.raises(RequestTooLarge):
        encode(tmp_path, asks(None, "a" * 10, suffix="b" * 10), bytes_max=50)


def test_a_conversation_has_no_gap(tmp_path: Path) -> None:
    write(tmp_path, *TEMPLATES[1].marks)
    turns = (ChatMessage(role="user", content="a"),)
    with pytest.raises(InvalidRequest):
        encode(tmp_path, asks(turns, None, suffix="b"))
