"""A template shows how its model answers, or nothing is said of it."""

# ruff: noqa: RUF001  # some marks have bars of another script

from __future__ import annotations

import pytest

from antiphon.tokenizer.model_tokenizer import detect_formats


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ('<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json", "deepseekv3"),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseekv31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|channel|>commentary <|constrain|>json", "gpt-oss"),
        ("<minimax:tool_call>", "minimax-m2"),
        ("<tool_call><tool_sep><arg_key>", "hunyuan"),
        ("<|START_ACTION|>", "cohere_command4"),
        ('<function name="f"><param name="a">', "minicpm5"),
        ("<|tool_call_start|>", "lfm2"),
        ("<tool_call>", None),
        ("[TOOL_CALLS] or <|python_tag|>", None),
        ("{{ messages }}", None),
    ],
)
def test_calls(template: str, tools: str | None):
    assert detect_formats(template).tools == tools


@pytest.mark.parametrize(
    ("template", "reranks"),
    [
        ('Judge. Note that the answer can only be "yes" or "no". {{ messages[0] }}', True),
        (r"""{{ 'The answer can only be \"yes\" or \"no\".' }}""", True),
        ('The answer can only be "good" or "bad".', False),
        ("{{ messages }}", False),
    ],
)
def test_reranking(template: str, reranks: bool):
    assert detect_formats(template).reranks is reranks


@pytest.mark.parametrize(
    ("template", "reasoning"),
    [
        ("{{ '<think>\n' + reasoning + '</think>' }}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", None),
        ("◁think▷", "kimi"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|channel|>analysis<|message|><think></think>", "gpt-oss"),
        ("", None),
    ],
)
def test_thinking(template: str, reasoning: str | None):
    assert detect_formats(template).reasoning == reasoning
