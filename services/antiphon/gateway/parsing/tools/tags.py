"""Formats whose calls are elements, with an element for each argument."""

# ruff: noqa: RUF001  # these bars are the letters of the marks

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import Emit, Marks, Reader, Steps
from antiphon.gateway.parsing.tools.format import (
    Body,
    CallGrammar,
    CallOutcome,
    ToolFormat,
    after,
    framed_format,
    repeated,
)
from antiphon.gateway.parsing.tools.values import ArgumentsWriter

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink
    from antiphon.wire.schemas import Json


def _tagged(
    *,
    header: tuple[str, str],
    call_end: str,
    argument_begin: str,
    after_name: tuple[tuple[str, bool | None], ...] = (('">', None),),
    argument_end: str,
    end: str | None,
    lines: bool = True,
) -> Body:
    """Create a reader of calls with tags between their start and end delimiters.

    Args:
        header: Around a name; without an `end`, what is before it has been read.
        call_end: After the arguments.
        argument_begin: Before the name of an argument.
        after_name: After that name, in all variants, each with whether the value is a string,
            JSON, or depends on the schema.
        argument_end: After the value.
        end: Delimiter after the calls; None if each call ends by itself.
        lines: Whether a value may be on lines of its own: then a line break after the opening
            delimiter and one before the closing one are not part of it.
    """
    stops = re.escape(header[1][0] + ">\n")
    name_letters = re.compile(f"[^{stops}]*")
    values = Marks(*[f"\n{argument_end}"] * lines, argument_end)

    def call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        name = yield from reader.word(name_letters, NAME_MAX)
        if not name or not (yield from reader.starts(header[1])):
            return CallOutcome.NOTHING
        complete = yield from arguments(reader, out.begin(reader, name), out.schema(name))
        out.end(reader, complete=complete)
        return CallOutcome.DONE if complete else CallOutcome.BROKEN

    def arguments(reader: Reader, emit: Emit, schema: Json) -> Steps[bool]:
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            sound = yield from json_text.value(reader, emit)
            yield from reader.space()
            return sound and (yield from reader.starts(call_end)) is not None
        written = ArgumentsWriter(schema, emit)
        while True:
            yield from reader.space()
            mark = yield from reader.starts(argument_begin, call_end)
            if mark == call_end:
                written.close()
                return True
            name = yield from reader.word(name_letters, NAME_MAX)
            after = yield from reader.starts(*(after for after, _ in after_name))
            if mark is None or after is None:
                return False
            if lines:
                yield from reader.starts("\n")
            text = dict(after_name)[after]
            if not (yield from written.value(reader, name, values, text=text)):
                return False

    return repeated(header[0], end, call) if end else call


def _invocations(
    name: str,
    begin: str,
    end: str,
    *,
    mark: str = "",
    typed: bool = False,
    style: str | None = None,
) -> ToolFormat:
    """Declare a format of `invoke` and `parameter` elements.

    `mark` precedes the name of each element. `typed` parameters declare whether they are strings.
    """
    invoke, invoke_end = f'<{mark}invoke name="', f"</{mark}invoke>"
    parameter, parameter_end = f'<{mark}parameter name="', f"</{mark}parameter>"
    values = (
        (('" string="true">', True), ('" string="false">', False)) if typed else (('">', None),)
    )
    body = _tagged(
        header=(invoke, '">'),
        call_end=invoke_end,
        argument_begin=parameter,
        after_name=values,
        argument_end=parameter_end,
        end=end,
        lines=not typed,
    )
    form = CallGrammar(
        trigger=begin,
        begin=f"{begin}\n{invoke}",
        middle='">\n',
        end=f"{invoke_end}\n{end}",
        separator="\n",
        style=style or "",
        marks=(begin, end, *filter(None, [mark.strip()])),
    )
    return framed_format(
        (name,),
        begin,
        end,
        body,
        example=(
            f'{begin}\n{invoke}f">\n{parameter}a{values[-1][0]}1{parameter_end}\n{invoke_end}\n{end}'
        ),
        form=form if style else None,
    )


def _dsml(name: str, section: str, style: str, space: str = "") -> ToolFormat:
    """DeepSeek's format; `space` precedes the name of each element."""
    mark = f"｜DSML｜{space}"
    begin, end = f"<{mark}{section}>", f"</{mark}{section}>"
    return _invocations(name, begin, end, mark=mark, typed=True, style=style)


DOTS = _invocations("dots", "<dots_function_call>", "</dots_function_call>")
MINIMAX_M2 = _invocations(
    "minimax-m2", "<minimax:tool_call>", "</minimax:tool_call>", style="minimax_xml"
)
DEEPSEEK_V32 = _dsml("deepseekv32", "function_calls", "deepseek_xml")
DEEPSEEK_V4 = _dsml("deepseekv4", "tool_calls", "deepseek_xml")
DEEPSEEK_V41 = _dsml("deepseekv41", "calls", "deepseek_v4_1_xml", space=" ")

MINICPM5 = framed_format(
    ("minicpm5",),
    '<function name="',
    None,
    _tagged(
        header=("", '">'),
        call_end="</function>",
        argument_begin='<param name="',
        argument_end="</param>",
        end=None,
    ),
    example='<function name="f"><param name="a">1</param></function>',
)

QWEN3_CODER = framed_format(
    ("qwen3_coder", "mimo", "nanbeige", "step3p5"),
    "<tool_call>",
    "</tool_call>",
    _tagged(
        header=("<function=", ">"),
        call_end="</function>",
        argument_begin="<parameter=",
        after_name=((">", None),),
        argument_end="</parameter>",
        end="</tool_call>",
    ),
    example="<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    special=False,
    form=CallGrammar(
        trigger="<tool_call>\n<function=",
        begin="<tool_call>\n<function=",
        middle=">\n",
        end="\n</function>\n</tool_call>",
        separator="\n",
        style="qwen_xml",
    ),
)

# Step 3: invocations in DeepSeek's frame, with other characters.

_step = _tagged(
    header=('<steptml:invoke name="', '">'),
    call_end="</steptml:invoke>",
    argument_begin='<steptml:parameter name="',
    argument_end="</steptml:parameter>",
    end="<｜tool_call_end｜>",
)
STEP3 = framed_format(
    ("step3",),
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    after("function<｜tool_sep｜>", _step),
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    example=(
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>"
    ),
)

# GLM and Hunyuan: a name, then keys and values in elements.

_KEY = re.compile(r"[^<\n]*")
_VALUE_END = Marks("</arg_value>")
_ELEMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _elements(end: str, *, after_name: str | None = None) -> Body:
    """Create a reader of a name, maybe `after_name`, then keys and values, up to the delimiter."""

    def body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        yield from reader.space()
        name = (yield from reader.word(_KEY, NAME_MAX)).strip()
        yield from reader.space()
        if after_name and (yield from reader.starts(after_name)):
            yield from reader.space()
        # A name alone could be any text: it is a call if an argument or the end comes next.
        mark = yield from reader.starts("<arg_key>", end)
        if not name or mark is None:
            return CallOutcome.NOTHING
        emit = out.begin(reader, name)
        complete = yield from _pairs(reader, emit, out.schema(name), mark, end)
        out.end(reader, complete=complete)
        return CallOutcome.ENDED if complete else CallOutcome.BROKEN

    return body


def _pairs(reader: Reader, emit: Emit, schema: Json, mark: str | None, end: str) -> Steps[bool]:
    written = ArgumentsWriter(schema, emit)
    while mark == "<arg_key>":
        key = (yield from reader.word(_KEY, NAME_MAX)).strip()
        if not (yield from reader.starts("</arg_key>")):
            return False
        yield from reader.space()
        if not (yield from reader.starts("<arg_value>")):
            return False
        if not (yield from written.value(reader, key, _VALUE_END)):
            return False
        yield from reader.space()
        mark = yield from reader.starts("<arg_key>", end)
    if mark is None:
        return False
    written.close()
    return True


def _glm(names: tuple[str, ...], begin: str, end: str) -> ToolFormat:
    return framed_format(
        names,
        begin,
        end,
        _elements(end),
        example=f"{begin}f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n{end}",
        form=CallGrammar(
            trigger=begin,
            begin=begin,
            middle="\n",
            end=end,
            style="glm_xml",
            marks=(begin, end, *_ELEMENTS),
        ),
    )


GLM = _glm(
    ("glm45", "glm", "glm47", "ling3", "poolside_v1", "spark25"), "<tool_call>", "</tool_call>"
)
IQUEST = _glm(("iquest_q1",), "<iquest_tool_call>", "</iquest_tool_call>")
HUNYUAN = framed_format(
    ("hunyuan",),
    "<tool_call>",
    "</tool_call>",
    _elements("</tool_call>", after_name="<tool_sep>"),
    section=("<tool_calls>", "</tool_calls>"),
    example=(
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "</tool_call>\n</tool_calls>"
    ),
)

# Kimi K3: blocks that start and end with a name between tokens; so do calls and arguments.

_K3_BEGIN, _K3_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_K3_CALL_END = "<|close|>call<|sep|>"
_K3_ARGUMENT = '<|open|>argument key="'
_K3_SEP = '"<|sep|>'
KIMI_K3_AROUND = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
"""Delimiters around text, and at the end of a message."""

_QUOTED = re.compile(r'[^"<]*')
_K3_VALUE_END = Marks("<|close|>argument<|sep|>")


def _k3_call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    name = yield from reader.word(_QUOTED, NAME_MAX)
    if not name or not (yield from _k3_attribute(reader, '" index="')):
        return CallOutcome.NOTHING
    complete = yield from _k3_arguments(reader, out.begin(reader, name), out.schema(name))
    out.end(reader, complete=complete)
    return CallOutcome.DONE if complete else CallOutcome.BROKEN


def _k3_attribute(reader: Reader, before: str) -> Steps[str]:
    """Read the last attribute of a block and the end of its header; empty if it is missing."""
    if not (yield from reader.starts(before)):
        return ""
    value = yield from reader.word(_QUOTED, NAME_MAX)
    return value if (yield from reader.starts(_K3_SEP)) else ""


def _k3_arguments(reader: Reader, emit: Emit, schema: Json) -> Steps[bool]:
    written = ArgumentsWriter(schema, emit)
    while True:
        yield from reader.space()
        mark = yield from reader.starts(_K3_ARGUMENT, _K3_CALL_END)
        if mark == _K3_CALL_END:
            written.close()
            return True
        key = yield from reader.word(_QUOTED, NAME_MAX)
        kind = yield from _k3_attribute(reader, '" type="')
        if mark is None or not kind:
            return False
        if not (yield from written.value(reader, key, _K3_VALUE_END, text=kind == "string")):
            return False


KIMI_K3 = framed_format(
    ("kimi_k3",),
    _K3_BEGIN,
    _K3_END,
    repeated('<|open|>call tool="', _K3_END, _k3_call),
    example=(
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="integer"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    around=KIMI_K3_AROUND,
    call_id=lambda name, number: f"{name}:{number}",
)
