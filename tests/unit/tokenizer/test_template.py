"""Chat templates render as model folders expect, and cannot reach out of their sandbox."""

# ruff: noqa: RUF001  # some marks have bars of another script

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.arguments import compare, settings_of
from tests.unit.config.described.gguf_files import byte_level, write
from tests.unit.config.described.test_converted import write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from antiphon.config.errors import ConfigError
from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.model_card.chat_templates import read_templates
from antiphon.model_card.converted.folder import gguf_folder, tokenizer_files_folder
from antiphon.model_card.served_model import tokenizer_path
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.tokenizer.model_tokenizer import detect_formats
from antiphon.tokenizer.template import ChatTemplate
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.tokenize import ChatMessage, MessageToolCall, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from antiphon.config.settings import Settings

TURNS = """\
{% for message in messages %}
    {% if message.role == 'tool' %}
        {{ raise_exception('tool messages are not known') }}
    {% endif %}
<{{ message.role }}>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}"""


def turns_of(*turns: tuple[str, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for role, content in turns)


def template(source: str = TURNS) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "</s>"})


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template("{{ messages[0].content }}").render(
            turns_of(("user", "hi"), ("assistant", "zzz")), continue_final=True
        )


def test_what_the_template_refuses_is_the_callers_error_in_its_words():
    with pytest.raises(InvalidRequest, match="tool messages are not known") as caught:
        template().render(turns_of(("tool", "x")), continue_final=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{{ namespace(__class__=1) }}",
        "{{ dict.mro() }}",
        "{{ dict.__subclasses__() }}",
    ],
)
def test_the_sandbox_holds(source: str):
    with pytest.raises(InvalidRequest):
        template(source).render(turns_of(("user", "x")), continue_final=False)


@pytest.mark.parametrize(
    ("source", "turns", "written"),
    [
        (
            TURNS,
            (("user", "hi"), ("assistant", "yo")),
            "<user>hi</s>\n<assistant>yo</s>\n<assistant>",
        ),
        (
            "{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }};{% endfor %}",
            (("system", "a"), ("developer", "b"), ("user", "c")),
            "system;dev;user;",
        ),
    ],
    ids=["blocks leave no blank lines", "known developer"],
)
def test_template_writes(source: str, turns: tuple[tuple[str, str], ...], written: str) -> None:
    assert template(source).render(turns_of(*turns), continue_final=False) == written


CALLED = (
    ChatMessage(
        role="assistant",
        content="",
        tool_calls=(MessageToolCall(id="c", name="f", arguments='{"a":"é"}'),),
    ),
)
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (f"{{% for k, v in {ARGUMENTS} | items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}", "a=é"),
        (f"{{{{ {ARGUMENTS}.a }}}}", "é"),
        (f"{{{{ 'args ' + {ARGUMENTS} + '!' }}}}", 'args {"a":"é"}!'),
        (f"{{{{ 'args ' ~ {ARGUMENTS} }}}}", 'args {"a":"é"}'),
        (f"{{{{ {ARGUMENTS} }}}}", '{"a":"é"}'),
        (f"{{{{ {ARGUMENTS} is mapping and {ARGUMENTS} is not string }}}}", "True"),
    ],
)
def test_arguments_are_an_object_to_some_templates_and_text_to_others(source: str, written: str):
    assert template(source).render(CALLED, continue_final=False) == written


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_the_callers_error(arguments: str):
    call = MessageToolCall(id="c", name="f", arguments=arguments)
    turns = (ChatMessage(role="assistant", content="", tool_calls=(call,)),)
    with pytest.raises(InvalidRequest, match="no JSON object"):
        template("{{ messages }}").render(turns, continue_final=False)


def test_developer_is_system_where_the_template_does_not_know_it():
    turns = turns_of(("system", "a"), ("developer", "b"), ("user", "c"), ("developer", "d"))
    text = template().render(turns, continue_final=False)
    assert text == template().render(
        turns_of(("system", "a\n\nb"), ("user", "c"), ("system", "d")), continue_final=False
    )
    only = template().render(turns_of(("developer", "b"), ("user", "c")), continue_final=False)
    assert only == template().render(turns_of(("system", "b"), ("user", "c")), continue_final=False)


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


@pytest.mark.parametrize("names", [["chat_template.json"], ["processor_config.json"], None])
def test_the_template_of_a_processor_wins(tmp_path: Path, names: list[str] | None) -> None:
    files(tokenizer_in(tmp_path), ALL)
    for name in names or ("chat_template.json", "processor_config.json"):
        shown = "images" if names or name == "processor_config.json" else "older"
        (tmp_path / name).write_text(json.dumps({"chat_template": shown, "image_seq_len": 4}))
    assert rendered(tmp_path, TemplateParams()) == "images"
    assert rendered(tmp_path, TOOLS) == "calls"
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 4}')
    (tmp_path / "chat_template.json").unlink(missing_ok=True)
    assert rendered(tmp_path, TemplateParams()) == "plain"


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
    fields = byte_level(**{"chat_template.tool_use": "calls", "chat_template.rag": "search"})
    if not has_default:
        del fields["chat_template"]
    folder = gguf_folder([write(tmp_path / "a.gguf", tokenizer=fields)], tmp_path)
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
    (tmp_path / "chat_template.json").write_text('{"chat_template": "images"}')
    folder = tokenizer_files_folder(tmp_path, tmp_path / "cache")
    assert folder is not None
    assert read_templates(folder) == {**ALL, "default": "images"}


@pytest.mark.parametrize(
    ("field", "expected", "template"),
    [
        ("tools", "hermes", '<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>'),
        ("tools", "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>"),
        ("tools", "glm45", "<tool_call>{name}\n<arg_key>"),
        ("tools", "llama3", "{{ '<|python_tag|>' + tool_call.name }}"),
        ("tools", "mistral", "[TOOL_CALLS]"),
        ("tools", "deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json"),
        ("tools", "deepseekv31", "<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>"),
        ("tools", "kimi_k2", "<|tool_calls_section_begin|>"),
        ("tools", "gpt-oss", "<|channel|>commentary <|constrain|>json"),
        ("tools", "minimax-m2", "<minimax:tool_call>"),
        ("tools", "hunyuan", "<tool_call><tool_sep><arg_key>"),
        ("tools", "cohere_command4", "<|START_ACTION|>"),
        ("tools", "minicpm5", '<function name="f"><param name="a">'),
        ("tools", "lfm2", "<|tool_call_start|>"),
        ("tools", None, "<tool_call>"),
        ("tools", None, "[TOOL_CALLS] or <|python_tag|>"),
        ("tools", None, "{{ messages }}"),
        ("reranks", True, 'Judge. The answer can only be "yes" or "no". {{ messages[0] }}'),
        ("reranks", True, r"""{{ 'The answer can only be \"yes\" or \"no\".' }}"""),
        ("reranks", False, 'The answer can only be "good" or "bad".'),
        ("reranks", False, "{{ messages }}"),
        ("reasoning", "qwen3", "{{ '<think>\n' + reasoning + '</think>' }}"),
        ("reasoning", None, "{{ content.split('</think>')[-1] }}"),
        ("reasoning", "kimi", "◁think▷"),
        ("reasoning", "mistral", "[THINK]{{ x }}[/THINK]"),
        ("reasoning", "gpt-oss", "<|channel|>analysis<|message|><think></think>"),
        ("reasoning", None, ""),
    ],
)
def test_formats_show_in_the_source_of_a_template(
    field: str, expected: object, template: str
) -> None:
    assert getattr(detect_formats(template), field) == expected
