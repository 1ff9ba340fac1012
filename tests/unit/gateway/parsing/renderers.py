"""What models write, by format: a conversation's last turn as the format's own template has it."""

# ruff: noqa: RUF001  # some marks have bars of another script

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import pytest

from antiphon.gateway.parsing.formats import TOOL_FORMATS

FORMATS = [pytest.param(format_, id=format_.names[0]) for format_ in TOOL_FORMATS]

Arguments = Mapping[str, object]
CallText = tuple[str, Arguments]
Render = Callable[[str, Sequence[CallText]], str]


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def written(
    call: str,
    *,
    argument: str | None = None,
    section: str = "⟨calls⟩",
    between: str = "",
    first: int = 0,
    always: bool = False,
) -> Render:
    """Text, and then calls: `call` has ⟨name⟩, ⟨index⟩ and ⟨arguments⟩.

    The arguments are JSON, or an `argument` each with ⟨key⟩, ⟨value⟩, ⟨is_text⟩ or ⟨type⟩. The
    `section` is left out if there are no calls, unless it is `always` there.
    """

    def arguments_of(arguments: Arguments) -> str:
        if argument is None:
            return dumped(arguments)
        return "".join(
            argument.replace("⟨key⟩", key)
            .replace("⟨is_text⟩", dumped(isinstance(value, str)))
            .replace("⟨type⟩", "string" if isinstance(value, str) else "json")
            .replace("⟨value⟩", value if isinstance(value, str) else dumped(value))
            for key, value in arguments.items()
        )

    def render(content: str, calls: Sequence[CallText]) -> str:
        texts = [
            call.replace("⟨name⟩", name)
            .replace("⟨index⟩", str(index))
            .replace("⟨arguments⟩", arguments_of(arguments))
            for index, (name, arguments) in enumerate(calls, first)
        ]
        return content + section.replace("⟨calls⟩", between.join(texts)) * bool(calls or always)

    return render


def elements(begin: str, end: str, inner: str = "", around: tuple[str, str] = ("", "")) -> Render:
    return written(
        f'{around[0]}<{inner}invoke name="⟨name⟩">\n⟨arguments⟩</{inner}invoke>{around[1]}',
        argument=f'<{inner}parameter name="⟨key⟩">⟨value⟩</{inner}parameter>\n',
        section=f"\n{begin}\n⟨calls⟩\n{end}",
    )


def dsml(section: str, space: str = "") -> Render:
    mark = f"｜DSML｜{space}"
    return written(
        f'<{mark}invoke name="⟨name⟩">\n⟨arguments⟩</{mark}invoke>\n',
        argument=f'<{mark}parameter name="⟨key⟩" string="⟨is_text⟩">⟨value⟩</{mark}parameter>\n',
        section=f"\n\n<{mark}{section}>\n⟨calls⟩</{mark}{section}>",
    )


def glm(mark: str, newline: str) -> Render:
    return written(
        f"{newline}<{mark}>⟨name⟩{newline}⟨arguments⟩</{mark}>",
        argument=f"<arg_key>⟨key⟩</arg_key>{newline}<arg_value>⟨value⟩</arg_value>{newline}",
    )


def json_calls(_: str, calls: Sequence[CallText]) -> str:
    return dumped([{"name": name, "parameters": arguments} for name, arguments in calls])


def llama3_bare(_: str, calls: Sequence[CallText]) -> str:
    return "; ".join(
        dumped({"type": "function", "name": name, "parameters": arguments})
        for name, arguments in calls
    )


def pythonic(_: str, calls: Sequence[CallText]) -> str:
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(texts)}]"


def lfm2(content: str, calls: Sequence[CallText]) -> str:
    section = f"<|tool_call_start|>{pythonic('', calls)}<|tool_call_end|>"
    return content + section if calls else content


def gpt_oss(content: str, calls: Sequence[CallText]) -> str:
    messages = [f"<|channel|>commentary<|message|>{content}<|end|>"] if content else []
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{dumped(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


def cohere(content: str, calls: Sequence[CallText]) -> str:
    action = written(
        '{"tool_call_id": "⟨index⟩", "tool_name": "⟨name⟩", "parameters": ⟨arguments⟩}',
        section="<|START_ACTION|>[⟨calls⟩]<|END_ACTION|>",
        between=", ",
    )
    return action(f"<|START_RESPONSE|>{content}<|END_RESPONSE|>", calls)


def kimi_k3(content: str, calls: Sequence[CallText]) -> str:
    tools = written(
        '<|open|>call tool="⟨name⟩" index="⟨index⟩"<|sep|>⟨arguments⟩<|close|>call<|sep|>',
        argument='<|open|>argument key="⟨key⟩" type="⟨type⟩"<|sep|>⟨value⟩<|close|>argument<|sep|>',
        section="<|open|>tools<|sep|>⟨calls⟩<|close|>tools<|sep|>",
        first=1,
    )
    return tools(f"{content}<|close|>response<|sep|>", calls) + "<|close|>message<|sep|>"


RENDERERS: dict[str, tuple[Render, ...]] = {
    "apertus2509": (
        written(
            '{"⟨name⟩": ⟨arguments⟩}',
            section="<|tools_prefix|>[⟨calls⟩]<|tools_suffix|>",
            between=", ",
        ),
    ),
    "cohere_command4": (cohere,),
    "deepseekv3": (
        written(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>⟨name⟩\n```json\n⟨arguments⟩\n```"
            "<｜tool▁call▁end｜>",
            section="<｜tool▁calls▁begin｜>⟨calls⟩<｜tool▁calls▁end｜>",
            between="\n",
            always=True,
        ),
    ),
    "deepseekv31": (
        written(
            "<｜tool▁call▁begin｜>⟨name⟩<｜tool▁sep｜>⟨arguments⟩<｜tool▁call▁end｜>",
            section="<｜tool▁calls▁begin｜>⟨calls⟩<｜tool▁calls▁end｜>",
            always=True,
        ),
    ),
    "deepseekv32": (dsml("function_calls"),),
    "deepseekv4": (dsml("tool_calls"),),
    "deepseekv41": (dsml("calls", " "),),
    "dots": (elements("<dots_function_call>", "</dots_function_call>"),),
    "glm45": (glm("tool_call", "\n"), glm("tool_call", "")),
    "gpt-oss": (gpt_oss,),
    "hermes": (
        written('\n<tool_call>\n{"name": "⟨name⟩", "arguments": ⟨arguments⟩}\n</tool_call>'),
    ),
    "hunyuan": (
        written(
            "<tool_call>⟨name⟩<tool_sep>\n⟨arguments⟩</tool_call>",
            argument="<arg_key>⟨key⟩</arg_key>\n<arg_value>⟨value⟩</arg_value>\n",
            section="<tool_calls>\n⟨calls⟩\n</tool_calls>",
            between="\n",
        ),
    ),
    "interns1": (
        written(
            '<|action_start|> <|plugin|>\n{"name": "⟨name⟩", "parameters": ⟨arguments⟩}'
            "<|action_end|>\n"
        ),
    ),
    "iquest_q1": (glm("iquest_tool_call", ""),),
    "json": (json_calls,),
    "kimi_k2": (
        written(
            "<|tool_call_begin|>functions.⟨name⟩:⟨index⟩<|tool_call_argument_begin|>⟨arguments⟩"
            "<|tool_call_end|>",
            section="<|tool_calls_section_begin|>⟨calls⟩<|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": (kimi_k3,),
    "lfm2": (lfm2,),
    "llama3": (
        written(
            '{"name": "⟨name⟩", "parameters": ⟨arguments⟩}',
            section="<|python_tag|>⟨calls⟩",
            between="; ",
        ),
        llama3_bare,
    ),
    "minicpm5": (
        written(
            '<function name="⟨name⟩">⟨arguments⟩</function>',
            argument='<param name="⟨key⟩">⟨value⟩</param>',
        ),
    ),
    "minimax-m2": (elements("<minimax:tool_call>", "</minimax:tool_call>"),),
    "mistral": (
        written(
            '{"name": "⟨name⟩", "arguments": ⟨arguments⟩}',
            section="[TOOL_CALLS] [⟨calls⟩]",
            between=", ",
        ),
        written("[TOOL_CALLS]⟨name⟩[CALL_ID]abcDEF123[ARGS]⟨arguments⟩"),
    ),
    "pythonic": (pythonic,),
    "qwen3_coder": (
        written(
            "\n<tool_call>\n<function=⟨name⟩>\n⟨arguments⟩</function>\n</tool_call>",
            argument="<parameter=⟨key⟩>\n⟨value⟩\n</parameter>\n",
        ),
    ),
    "step3": (
        elements(
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "steptml:",
            ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        ),
    ),
}
"""By the main name of each format. Those that ignore the content write calls alone."""

CALLS_ALONE = (json_calls, llama3_bare, pythonic)

TYPED = ("qwen3_coder", "hunyuan", "minicpm5", "minimax-m2", "dots", "step3", "glm45", "iquest_q1")
"""Formats that leave the types of arguments to the schema."""
