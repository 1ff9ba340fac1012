"""Reasoning is separated from the output, wherever the prompt left it."""

from __future__ import annotations

import pytest

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.events import Parsed
from antiphon.gateway.parsing.formats import REASONING_FORMATS, reasoning_format, tool_format
from antiphon.gateway.parsing.tools.tool import OfferedTools
from antiphon.wire.errors import InvalidRequest

FORMATS = [pytest.param(format_, id=format_.names[0]) for format_ in REASONING_FORMATS]
APART = [
    pytest.param(format_, id=format_.names[0]) for format_ in REASONING_FORMATS if not format_.shown
]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(name: str | None, text: str, *, inside: bool = False, tools: str | None = None) -> Parsed:
    made = AnswerParser(
        reasoning=reasoning_format(name) if name else None,
        inside=inside,
        tools=tool_format(tools) if tools else None,
        offer=OfferedTools(schemas={"f": {}}),
    )
    return parse(made, list(text))


@pytest.mark.parametrize("format_", APART)
def test_thinking_and_answer_come_apart(format_):
    text = f"{format_.begin}\nSo it is.\n{format_.end}"
    if format_.names[0] == "gpt-oss":
        text = f"{format_.begin}So it is.{format_.end}<|start|>assistant<|channel|>final<|message|>"
    assert read(format_.names[0], text + "Yes.") == Parsed(content="Yes.", reasoning="So it is.")


def test_an_answer_that_begins_inside_needs_no_mark_and_bears_one():
    assert read("deepseek-r1", "So.</think>Yes.", inside=True).reasoning == "So."
    assert read("deepseek-r1", "<think>So.</think>Yes.", inside=True).reasoning == "So."


@pytest.mark.parametrize("written", ["", "<think>"])
def test_thinking_that_is_sent_back_stays_in_the_answer_with_its_mark(written: str):
    text = f"{written}So.</think>\n\nYes.{CALL}"
    parsed = read("minimax-append-think", text, inside=True, tools="hermes")
    assert (parsed.content, parsed.reasoning) == ("<think>So.</think>\n\nYes.", "")
    assert [call.name for call in parsed.calls] == ["f"]
    closed = read("minimax-append-think", "Yes.", inside=False)
    assert closed == Parsed(content="Yes.")


def test_marks_around_the_answer_are_no_part_of_it():
    text = "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert read("cohere_command4", text) == Parsed(content="Yes.", reasoning="So.")
    assert read("cohere_command4", text, tools="cohere_command4") == Parsed(
        content="Yes.", reasoning="So."
    )


def test_a_prompt_may_have_begun_the_answers_block():
    text = "Yes.<|close|>response<|sep|><|close|>message<|sep|>"
    assert read("kimi_k3", text) == Parsed(content="Yes.")
    thought = f"So.<|close|>think<|sep|><|open|>response<|sep|>{text}"
    assert read("kimi_k3", thought, inside=True) == Parsed(content="Yes.", reasoning="So.")


def test_an_answer_without_thinking_is_content():
    assert read("qwen3", "\nYes, <think> is a mark.") == Parsed(content="\nYes, <think> is a mark.")


@pytest.mark.parametrize("inside", [True, False])
def test_an_answer_may_begin_with_the_end_of_no_thinking(inside: bool):
    assert read("minimax-m3", "</mm:think>\nYes.", inside=inside) == Parsed(content="Yes.")


def test_thinking_that_does_not_end_is_thinking():
    assert read("qwen3", "<think>So it </thin") == Parsed(reasoning="So it </thin")


def test_without_a_format_thinking_stays_in_the_content():
    text = "<think>So.</think>Yes."
    assert read(None, text) == Parsed(content=text)
    harmony = (
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Y"
    )
    assert read(None, harmony, tools="gpt-oss") == Parsed(content="So.Y")
    assert read("gpt-oss", harmony) == Parsed(content="Y", reasoning="So.")


def test_a_call_ends_thinking():
    parsed = read("qwen3", f"<think>\nI call.\n{CALL}", tools="hermes")
    assert parsed.reasoning == "I call."
    assert [call.name for call in parsed.calls] == ["f"]


def test_a_call_in_thinking_is_thinking_when_no_calls_are_read():
    assert read("qwen3", f"<think>{CALL}</think>Yes.") == Parsed(content="Yes.", reasoning=CALL)


@pytest.mark.parametrize(
    ("name", "prompt_end", "thinking", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("deepseek-r1", "<think>\n\n</think>\n\n", None, False),
        ("qwen3", "<|im_start|>assistant\n", None, False),
        ("qwen3", None, None, False),
        ("deepseek-r1", "assistant: ", None, True),
        ("deepseek-r1", None, None, True),
        ("qwen3-thinking", None, False, False),
    ],
)
def test_where_an_answer_begins_is_seen_in_its_prompt(name, prompt_end, thinking, inside):
    assert reasoning_format(name).begins_inside(prompt_end, thinking=thinking) is inside


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequest, match="unknown reasoning parser 'x'; available are apertus"):
        reasoning_format("x")
