"""Writes the page of formats: `python -m antiphon.gateway.parsing.reference [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.config.markdown import table
from antiphon.config.sglang.arguments import values
from antiphon.gateway.parsing.reasoning.registry import REASONING_FORMATS
from antiphon.gateway.parsing.tools.objects import JSON_CALLS
from antiphon.gateway.parsing.tools.registry import TOOL_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.parsing.tools.format import ToolFormat

PAGE = Path("docs/tools.md")

_HEAD = """# Tool calls and reasoning

<!-- Written by `python -m antiphon.gateway.parsing.reference`; change the text there. -->

Each model family has its own format of tool calls and its own markers of reasoning. The gateway
parses the output while it is generated, into content, reasoning and calls. The result does not
depend on how the text is split into tokens or messages.

`--tool-call-parser` and `--reasoning-parser` select the formats. With `auto`, they are detected
from the model's chat template if it shows them unambiguously; `none` leaves everything in the
content.

## Parsing rules

* The arguments of a call are streamed as the model generates them; in formats whose values have no
  quotes, values get the types of the tool's schema, and only strings are streamed before they are
  complete.
* Whitespace before and after calls and reasoning, up to 16 characters, is not content.
* A call inside reasoning ends the reasoning.
* A marker that is not followed by a call is content, unchanged.
* A call of an unknown tool is content, exactly as the model wrote it, including markers; calls of
  known tools beside it are returned as calls.
* A malformed or truncated call keeps what was streamed so far; it does not count as a call in
  `finish_reason`. The text between the error and the end of the call is dropped.
* Text after a call is content.
* With `parallel_tool_calls: false` only the first call is returned.

## Tool choice

| `tool_choice` | tools in the prompt | constraint |
|---|---|---|
| `none`, or no tools | none | none; calls are not parsed |
| `auto` | all | none; calls of `strict` tools follow their schemas |
| `required` | all | one or more calls; one with `parallel_tool_calls: false` |
| a function | all | one call of it |

The output is constrained to the model's own format if a grammar can express it. Grammars cannot
generate special tokens, and the markers of many formats are special tokens in their models'
tokenizers; then the output is a JSON list of `{"name", "parameters"}`. Reasoning comes before
either, unless its markers are special tokens and the prompt has not opened it. Within a grammar,
schemas are enforced as described in [grammars](grammars.md), and schemas that cannot be enforced
are rejected. So are `strict` tools with `auto` if a grammar cannot express the model's format;
only `/v1/responses`, whose tools are strict by default, accepts such tools without enforcement.
With enforcement, an output in the format `json` is a list of calls, or a text that does not start
like JSON.

With structured output (`response_format`, `regex`, ...), `auto` constrains the output to calls or
to the given form, with one grammar for both. A required call takes precedence, and the form is
ignored.

Names have 1 to 128 letters, digits, dots, dashes and underscores. Parameters are a JSON schema of
an object, whose structure is validated; type names from databases and programming languages
(`varchar`, `int`, `dict`, ...) are accepted.
"""


def page() -> str:
    tools = table(
        ("names", "example", "constrained in its own format", "call IDs"), map(_tool, TOOL_FORMATS)
    )
    thinking = table(
        ("names", "markers", "output starts", "template variable"),
        map(_reasoning, REASONING_FORMATS),
    )
    return "\n".join(
        [
            _HEAD,
            "## Tool call formats\n",
            *tools,
            f"\nNot supported, and rejected by name: {_names(values()['--tool-call-parser'])}.\n",
            "## Formats of thinking\n",
            "If the prompt ends with one of the markers, the output starts accordingly.\n",
            *thinking,
            f"\nNot supported, and rejected by name: {_names(values()['--reasoning-parser'])}.\n",
        ]
    )


def _tool(format_: ToolFormat) -> tuple[str, ...]:
    call_id = format_.call_id("f", 2)
    shown = call_id if call_id == format_.call_id("f", 2) else f"random, {len(call_id)} letters"
    return (
        _names(format_.names),
        _code(format_.example),
        _constraint_cell(format_),
        f"`{shown}`" if ":" in shown else shown,
    )


def _reasoning(format_: ReasoningFormat) -> tuple[str, ...]:
    return (
        _names(format_.names),
        _code(f"{format_.begin}...{format_.end}"),
        _start_cell(format_),
        f"`{format_.switch}`" if format_.switch else "",
    )


def _constraint_cell(format_: ToolFormat) -> str:
    if format_.form is not None and format_.form.marks:
        return "if its markers are text; else as JSON"
    return "yes" if format_.form or format_ is JSON_CALLS else "no: as JSON"


def _start_cell(format_: ReasoningFormat) -> str:
    if format_.shown:
        return "as thinking, which stays in the content with its start marker"
    return "as thinking" if format_.inside else "with the start marker, if it thinks"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _code(text: str) -> str:
    """Code in a cell, a line a line."""
    fences = (("`` ", " ``") if "`" in line else ("`", "`") for line in text.split("\n"))
    return "<br>".join(
        f"{a}{line}{b}" for line, (a, b) in zip(text.split("\n"), fences, strict=True)
    )


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page())


if __name__ == "__main__":
    main()
