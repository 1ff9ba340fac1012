"""What models write, by format: a conversation's last turn as the format's own template has it."""

# ruff: noqa: RUF001  # some marks have bars of another script

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import pytest

from antiphon.gateway.parsing.tools.registry import TOOL_FORMATS

FORMATS = [pytest.param(format_, id=format_.names[0]) for format_ in TOOL_FORMATS]

Arguments = Mapping[str, object]
CallText = tuple[str, Arguments]
Render = Callable[[str, Sequence[CallText]], str]


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    return value if isinstance(value, str) else dumped(value)


def hermes(content: str, calls: Sequence[CallText]) -> str:
    return content + "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {dumped(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def json_calls(_: str, calls: Sequence[CallText]) -> str:
    return dumped([{"name": name, "parameters": arguments} for name, arguments in calls])


def llama3(content: str, calls: Sequence[CallText]) -> str:
    texts = [dumped({"name": name, "parameters": arguments}) for name, arguments in calls]
    return f"{content}<|python_tag|>{'; '.join(texts)}" if calls else content


def llama3_bare(_: str, calls: Sequence[CallText]) -> str:
    return "; ".join(
        dumped({"type": "function", "name": name, "parameters": arguments})
        for name, arguments in calls
    )


def mistral(content: str, calls: Sequence[CallText]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"{content}[TOOL_CALLS] {dumped(listed)}" if calls else content


def mistral_named(content: str, calls: Sequence[CallText]) -> str:
    return content + "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abcDEF123[ARGS]{dumped(arguments)}"
        for name, arguments in calls
    )


def deepseekv3(content: str, calls: Sequence[CallText]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return content + "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseekv31(content: str, calls: Sequence[CallText]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return content + "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def kimi_k2(content: str, calls: Sequence[CallText]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{dumped(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"
    return content + section if calls else content


def qwen3_coder(content: str, calls: Sequence[CallText]) -> str:
    return content + "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def elements(
    outer: str, inner: str, around: tuple[str, str] = ("", "")
) -> Callable[[str, Sequence[CallText]], str]:
    def render(content: str, calls: Sequence[CallText]) -> str:
        texts = [
            f'{around[0]}<{inner}invoke name="{name}">\n'
            + "".join(
                f'<{inner}parameter name="{key}">{plain(value)}</{inner}parameter>\n'
                for key, value in arguments.items()
            )
            + f"</{inner}invoke>{around[1]}"
            for name, arguments in calls
        ]
        begin, end = outer.split(" ")
        return f"{content}\n{begin}\n{''.join(texts)}\n{end}" if calls else content

    return render


def dsml(section: str, space: str = "") -> Callable[[str, Sequence[CallText]], str]:
    def render(content: str, calls: Sequence[CallText]) -> str:
        texts = [
            f'<｜DSML｜{space}invoke name="{name}">\n'
            + "".join(
                f'<｜DSML｜{space}parameter name="{key}" string="{dumped(isinstance(value, str))}">'
                f"{plain(value)}</｜DSML｜{space}parameter>\n"
                for key, value in arguments.items()
            )
            + f"</｜DSML｜{space}invoke>\n"
            for name, arguments in calls
        ]
        begin, end = f"<｜DSML｜{space}{section}>", f"</｜DSML｜{space}{section}>"
        return f"{content}\n\n{begin}\n{''.join(texts)}{end}" if calls else content

    return render


def glm(mark: str, newline: str) -> Callable[[str, Sequence[CallText]], str]:
    def render(content: str, calls: Sequence[CallText]) -> str:
        return content + "".join(
            f"{newline}<{mark}>{name}{newline}"
            + "".join(
                f"<arg_key>{key}</arg_key>{newline}<arg_value>{plain(value)}</arg_value>{newline}"
                for key, value in arguments.items()
            )
            + f"</{mark}>"
            for name, arguments in calls
        )

    return render


def interns1(content: str, calls: Sequence[CallText]) -> str:
    return content + "".join(
        f"<|action_start|> <|plugin|>\n{dumped({'name': name, 'parameters': arguments})}"
        "<|action_end|>\n"
        for name, arguments in calls
    )


def apertus(content: str, calls: Sequence[CallText]) -> str:
    listed = [{name: arguments} for name, arguments in calls]
    return f"{content}<|tools_prefix|>{dumped(listed)}<|tools_suffix|>" if calls else content


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


def hunyuan(content: str, calls: Sequence[CallText]) -> str:
    texts = [
        f"<tool_call>{name}<tool_sep>\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    ]
    joined = "\n".join(texts)
    return f"{content}<tool_calls>\n{joined}\n</tool_calls>" if calls else content


def cohere(content: str, calls: Sequence[CallText]) -> str:
    listed = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    action = f"<|START_ACTION|>{dumped(listed)}<|END_ACTION|>" if calls else ""
    return f"<|START_RESPONSE|>{content}<|END_RESPONSE|>{action}"


def minicpm5(content: str, calls: Sequence[CallText]) -> str:
    return content + "".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{plain(value)}</param>' for key, value in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def kimi_k3(content: str, calls: Sequence[CallText]) -> str:
    def kind(value: object) -> str:
        return "string" if isinstance(value, str) else "json"

    texts = [
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>'
            f"{plain(value)}<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    ]
    response = f"{content}<|close|>response<|sep|>"
    section = f"<|open|>tools<|sep|>{''.join(texts)}<|close|>tools<|sep|>" if calls else ""
    return f"{response}{section}<|close|>message<|sep|>"


RENDERERS: dict[str, tuple[Render, ...]] = {
    "apertus2509": (apertus,),
    "cohere_command4": (cohere,),
    "deepseekv3": (deepseekv3,),
    "deepseekv31": (deepseekv31,),
    "deepseekv32": (dsml("function_calls"),),
    "deepseekv4": (dsml("tool_calls"),),
    "deepseekv41": (dsml("calls", " "),),
    "dots": (elements("<dots_function_call> </dots_function_call>", ""),),
    "glm45": (glm("tool_call", "\n"), glm("tool_call", "")),
    "gpt-oss": (gpt_oss,),
    "hermes": (hermes,),
    "hunyuan": (hunyuan,),
    "interns1": (interns1,),
    "iquest_q1": (glm("iquest_tool_call", ""),),
    "json": (json_calls,),
    "kimi_k2": (kimi_k2,),
    "kimi_k3": (kimi_k3,),
    "lfm2": (lfm2,),
    "llama3": (llama3, llama3_bare),
    "minicpm5": (minicpm5,),
    "minimax-m2": (elements("<minimax:tool_call> </minimax:tool_call>", ""),),
    "mistral": (mistral, mistral_named),
    "pythonic": (pythonic,),
    "qwen3_coder": (qwen3_coder,),
    "step3": (
        elements(
            "<｜tool_calls_begin｜> <｜tool_calls_end｜>",
            "steptml:",
            ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        ),
    ),
}
"""By the main name of each format. Those that ignore the content write calls alone."""

CALLS_ALONE = (json_calls, llama3_bare, pythonic)

TYPED = ("qwen3_coder", "hunyuan", "minicpm5", "minimax-m2", "dots", "step3", "glm45", "iquest_q1")
"""Formats that leave the types of arguments to the schema."""
