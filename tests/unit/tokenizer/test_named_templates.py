"""Checkpoints with several chat templates: which one a conversation is written with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.arguments import compare, settings_of
from tests.unit.config.described.gguf_files import byte_level, write
from tests.unit.config.described.test_tokenizer_files import write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from antiphon.config.errors import ConfigError
from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.model_card.chat_templates import read_templates
from antiphon.model_card.converted.folder import gguf_folder, tokenizer_files_folder
from antiphon.model_card.served_model import tokenizer_path
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.wire.tokenize import ChatMessage, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from antiphon.config.settings import Settings

HI = (ChatMessage(role="user", content="hi"),)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = TemplateParams(tools=json.dumps([TOOL]))
ALL = {"default": "plain", "rag": "search", "tool_use": "calls"}


def card(folder: Path, templates: Mapping[str, str]) -> None:
    named = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))


def files(folder: Path, templates: Mapping[str, str]) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": "of the card"}')
    inside = folder / "additional_chat_templates"
    inside.mkdir()
    for name, text in templates.items():
        file = folder / "chat_template.jinja" if name == "default" else inside / f"{name}.jinja"
        file.write_text(text)


FORMS = [card, files]


def tokenizer_in(folder: Path) -> Path:
    Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")).save(str(folder / "tokenizer.json"))
    return folder


def rendered(folder: Path, params: TemplateParams, name: str = "") -> str:
    template = vocabulary.read_model_tokenizer(folder, template_name=name).template
    assert template is not None
    return template.render(HI, params, continue_final=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("templates", [ALL, {"default": "plain", "rag": "search"}])
def test_template_is_the_one_that_transformers_takes(
    tmp_path: Path, form: Callable[[Path, Mapping[str, str]], None], templates: Mapping[str, str]
) -> None:
    form(tokenizer_in(tmp_path), templates)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "hi"}]
    for params, tools in ((TemplateParams(), None), (TOOLS, [TOOL])):
        expected = theirs.apply_chat_template(turns, tools=tools, tokenize=False)
        assert rendered(tmp_path, params) == expected
    named = theirs.apply_chat_template(turns, chat_template="rag", tools=[TOOL], tokenize=False)
    assert rendered(tmp_path, TOOLS, "rag") == named == "search"


def test_empty_list_of_tools_takes_the_default_template(tmp_path: Path) -> None:
    card(tokenizer_in(tmp_path), ALL)
    assert rendered(tmp_path, TemplateParams(tools="[]")) == "plain"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.argument("--hf-chat-template-name")
def test_hf_chat_template_name_chooses_for_every_conversation(
    tmp_path: Path, form: Callable[[Path, Mapping[str, str]], None]
) -> None:
    form(tokenizer_in(tmp_path), ALL)

    def texts(settings: Settings) -> tuple[str, str]:
        """Of a conversation without tools, and of one with some."""
        folder = tokenizer_path(settings)
        name = settings.model.chat_template_name
        return rendered(folder, TemplateParams(), name), rendered(folder, TOOLS, name)

    given, without = compare(
        "--hf-chat-template-name", "rag", observe=texts, base=("--tokenizer-path", str(tmp_path))
    )
    assert (given, without) == (("search", "search"), ("plain", "calls"))


@pytest.mark.parametrize("form", FORMS)
def test_unknown_name_is_refused_with_the_names_that_there_are(
    tmp_path: Path, form: Callable[[Path, Mapping[str, str]], None]
) -> None:
    form(tokenizer_in(tmp_path), ALL)
    with pytest.raises(ConfigError) as caught:
        vocabulary.read_model_tokenizer(tmp_path, template_name="none")
    assert str(caught.value) == (
        "model.chat_template_name (--hf-chat-template-name): the tokenizer has no template "
        "'none', only default, rag, tool_use"
    )


def test_name_without_any_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        vocabulary.read_model_tokenizer(tokenizer_in(tmp_path), template_name="rag")


def test_single_template_is_called_default(tmp_path: Path) -> None:
    (tokenizer_in(tmp_path) / "chat_template.jinja").write_text("plain")
    assert rendered(tmp_path, TOOLS, "default") == "plain"


def test_name_and_file_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.jinja"
    file.write_text("x")
    with pytest.raises(ConfigError, match="chat_template_name cannot be combined"):
        settings_of("--chat-template", str(file), "--hf-chat-template-name", "rag")


def test_formats_are_those_of_the_template_that_shows_tools(tmp_path: Path) -> None:
    calls = '<tool_call>{"name": "f"}</tool_call>'
    card(tokenizer_in(tmp_path), {"default": "<think></think>", "tool_use": calls})
    formats = vocabulary.read_model_tokenizer(tmp_path).template_formats
    assert (formats.tools, formats.reasoning) == (ToolParser.HERMES, ReasoningParser.QWEN3)
    named = vocabulary.read_model_tokenizer(tmp_path, template_name="default")
    assert named.template_formats.tools is None


@pytest.mark.parametrize("has_default", [True, False])
def test_templates_of_a_gguf_file_have_names(tmp_path: Path, has_default: bool) -> None:
    said = byte_level(**{"chat_template.tool_use": "calls", "chat_template.rag": "search"})
    if not has_default:
        del said["chat_template"]
    folder = gguf_folder([write(tmp_path / "a.gguf", tokenizer=said)], tmp_path)
    names = {"tool_use", "rag", "default"} if has_default else {"tool_use", "rag"}
    assert set(read_templates(folder)) == names
    assert rendered(folder, TOOLS) == "calls"
    assert rendered(folder, TemplateParams(), "rag") == "search"


def test_additional_templates_are_read_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    write_model(tmp_path, "bpe")
    files(tmp_path, ALL)
    folder = tokenizer_files_folder(tmp_path, tmp_path / "cache")
    assert folder is not None
    assert read_templates(folder) == ALL
