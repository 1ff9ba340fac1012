"""Templates write what transformers writes of the same conversation, and are given as much."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from antiphon import embedded
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.tokenizer.template import ChatTemplate
from antiphon.wire.tokenize import ChatMessage, MessageToolCall, TemplateParams

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Zeigt <Wetter> für 'Orte' & Zeiten",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Kurz."},
    {"role": "user", "content": "Wie ist das Wetter in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Ein Ruf.",
        "tool_calls": [
            {
                "type": "function",
                "id": "call_1",
                "function": {"name": "wetter", "arguments": {"ort": "Köln", "an": [1, 2]}},
            }
        ],
    },
    {"role": "tool", "content": "Regen", "tool_call_id": "call_1"},
]

CALLS = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endif %}{% endfor %}"
TEMPLATES = {
    "ensure_ascii": "{{ tools | tojson(ensure_ascii=False) }}",
    "only ascii": "{{ tools | tojson(ensure_ascii=True) }}",
    "by position": "{{ tools | tojson(True) }}{{ tools | tojson(False, 2) }}",
    "separators": "{{ tools | tojson(separators=(',', ':')) }}",
    "sorted": "{{ tools | tojson(sort_keys=True, indent=2) }}",
    "indented": "{{ tools | tojson(indent=4) }}",
    "plain": "{{ tools | tojson }}{{ messages | tojson }}",
    "arguments": CALLS + "{{ c.function.arguments | tojson(ensure_ascii=False) }}" + END,
    "items": CALLS
    + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    + END,
    "null": (
        "{% for m in messages %}{% if m['content'] is none %}[none]{% endif %}"
        "{% if m.content is not none %}[{{ m.content }}]{% endif %}"
        "{% if m.content == none %}!{% endif %}{% if m.content is string %}s{% endif %}"
        "{% if m.content is defined and not m.content %}0{% endif %}{% endfor %}"
    ),
    "deepseek": (
        "{% set ns = namespace(is_first=true, out='') %}{{ bos_token }}"
        "{% for m in messages %}"
        "{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for c in m['tool_calls'] %}<call>{{ c['function']['name'] }}"
        "{{ '\\n```json\\n' ~ (c['function']['arguments'] | tojson) ~ '\\n```' }}"
        "{% set ns.is_first = false %}{% endfor %}"
        "{% elif m['role'] == 'assistant' and m['content'] is not none %}"
        "{{ m['content'] + eos_token }}{% endif %}{% endfor %}{{ ns.is_first }}"
    ),
    "documents": "{% if documents is none %}none{% else %}{{ documents }}{% endif %}",
    "documents wanted": "{% for d in documents or [] %}{{ d }}{% endfor %}",
    "special": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}",
    "undefined": "{{ sep_token }}{{ add_vision_id is defined }}{{ builtin_tools is defined }}",
    "thinking": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}",
    "loops": (
        "{%- for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "  {{ m.role }}\n  {% if m.role == 'assistant' %}{% break %}{% endif %}\n{%- endfor %}\n"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "macro": (
        "{% macro say(m) %}{{ strftime_now('%Y')[:0] }}<{{ m.role }}>{{ eos_token }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
    "dict": "{% set d = dict(a=1, **{'b': 2}) %}{{ d }}{{ dict({'c': 3}) }}",
    "prompt": "{% if add_generation_prompt %}<assistant>{% endif %}{{ tools is none }}",
}


def messages(turns: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(
            role=turn["role"],
            content=turn["content"] or "",
            reasoning_content=turn.get("reasoning_content"),
            tool_call_id=turn.get("tool_call_id"),
            without_content=turn["content"] is None,
            tool_calls=tuple(map(tool_call, turn.get("tool_calls", ()))),
        )
        for turn in turns
    )


def tool_call(call: dict[str, Any]) -> MessageToolCall:
    function = call["function"]
    arguments = msgspec.json.encode(function["arguments"]).decode()
    return MessageToolCall(id=call["id"], name=function["name"], arguments=arguments)


def theirs(source: str, turns: list[dict[str, Any]], **fields: Any) -> str:
    (text,), _ = render_jinja_template([turns], chat_template=source, **{**SPECIAL, **fields})
    return text


def ours(
    source: str,
    turns: list[dict[str, Any]],
    params: TemplateParams,
    *,
    continue_final: bool = False,
) -> str:
    template = ChatTemplate(source, SPECIAL)
    return template.render(messages(turns), params, continue_final=continue_final)


OPTIONS = {"documents": [{"title": "T", "text": "é"}], "pad_token": "<other>"}


@pytest.mark.parametrize(
    ("params", "given"),
    [
        (TemplateParams(tools=json.dumps(TOOLS)), {"tools": TOOLS, "add_generation_prompt": True}),
        (TemplateParams(generation_prompt=False, options=json.dumps(OPTIONS)), OPTIONS),
    ],
    ids=["tools", "options"],
)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_writes_what_transformers_writes(
    source: str, params: TemplateParams, given: dict[str, Any]
):
    assert ours(source, TURNS, params) == theirs(source, TURNS, **given)


@pytest.mark.parametrize("content", ["a", "so it is", " and so ", "s>", "<assistant>"])
@pytest.mark.parametrize("form", ["m.content", "m.content | trim", "'<s>' ~ m.content"])
def test_a_continued_answer_ends_where_transformers_ends_it(content: str, form: str):
    source = "{% for m in messages %}<assistant>{{ " + form + " }}</assistant> s>\n{% endfor %}"
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content},
    ]
    expected = theirs(source, turns, continue_final_message=True)
    assert ours(source, turns, TemplateParams(), continue_final=True) == expected


def test_content_that_is_null_is_no_text_to_templates_that_do_not_ask():
    source = "{% for m in messages %}{{ '[' + m.content + ']' ~ (m.content | trim) }}{% endfor %}"
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    assert ours(source, [turn], TemplateParams()) == "[]"


def test_every_special_token_is_defined_whichever_file_has_it(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((embedded.path() / "tokenizer.json").read_bytes())
    older = {"pad_token": {"content": "<old>"}, "mask_token": "<mask>", "bos_token": "<b>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    newer = {
        "pad_token": "<pad>",
        "cls_token": {"content": "<cls>", "lstrip": True},
        "sep_token": "<sep>",
        "eos_token": None,
        "chat_template": "{{ [pad_token, mask_token, cls_token, sep_token, bos_token] | join }}"
        "{{ eos_token is defined }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(newer))
    template = vocabulary.read_model_tokenizer(tmp_path).template
    assert template is not None
    text = template.render((ChatMessage(role="user", content="x"),), continue_final=False)
    assert text == "<pad><mask><cls><sep><b>False"
