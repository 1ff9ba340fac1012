"""Writes the page of formats: `python -m antiphon.gateway.parsing.reference [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.config.markdown import table
from antiphon.config.sglang.arguments import values
from antiphon.gateway.parsing.reasoning.registry import REASONING_FORMATS
from antiphon.gateway.parsing.tools.registry import JSON_CALLS, TOOL_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.parsing.tools.format import ToolFormat

PAGE = Path("docs/tools.md")

_HEAD = """# Tool calls and thinking

<!-- Written by `python -m antiphon.gateway.parsing.reference`; change the text there. -->

Each family of models writes calls of tools, and marks its thinking, in its own way. The gateway
takes an answer apart while it comes in: into content, thinking and calls. What comes out does not
depend on how the text was cut into tokens or messages.

`--tool-call-parser` and `--reasoning-parser` name the formats. Left at `auto`, they are seen in
the model's chat template where it shows them for certain; `none` leaves everything in the
content.

## What comes out

* The arguments of a call are told as the model writes them, piece by piece; where a format writes
  values without quotes, they get the types of the tool's schema, and only strings are told before
  they are whole.
* White space before and after calls and thinking, up to 16 characters, is not content.
* A call ends the thinking that it stands in.
* A mark that no call follows is content, as it is.
* A call of a tool that was not offered is content, letter by letter as the model wrote it, marks
  included; calls of offered tools beside it count.
* A call that breaks, or is cut off, keeps what was said; it does not count as a call in
  `finish_reason`. What stands between it and its end is dropped.
* Text after a call is content.
* With `parallel_tool_calls: false` only the first call counts.

## Which tool is called

| `tool_choice` | what the model sees | what it is held to |
|---|---|---|
| `none`, or no tools | no tools | nothing; nothing is taken for a call |
| `auto` | the tools | nothing; with `strict` tools to their schemas, where it calls them |
| `required` | the tools | one or more calls; one with `parallel_tool_calls: false` |
| a function | the tools | one call of it |

A model is held to its own format where a grammar can write it. Special tokens, which the marks of
many formats are in their models' tokenizers, no grammar writes: then the answer is a JSON list of
`{"name", "parameters"}`. Thinking comes
before either, unless its marks are special tokens and the prompt has not begun it. In a grammar,
schemas are held as on the page of [grammars](grammars.md), and one that could not be held is
refused. So is a `strict` tool under `auto` where no grammar can write the model's form; only
`/v1/responses`, whose tools are strict unless they say otherwise, takes such a tool as it is. Held
so, an answer in the form `json` is a list of calls, or a text that does not begin like JSON.

With a form of the answer (`response_format`, `regex`, ...) `auto` holds the answer to calls, or to
that form: one grammar has both. A call that has to be wins, and the form counts for nothing.

Names are 1 to 128 letters, digits, dots, dashes and underscores. Parameters are a JSON schema of
an object, whose form is checked; types that databases and programs speak of (`varchar`, `int`,
`dict`, ...) are understood.
"""


def page() -> str:
    """The whole page."""
    tools = table(("names", "a call", "held in its own form", "ids"), map(_tool, TOOL_FORMATS))
    thinking = table(
        ("names", "thinking", "an answer begins", "the template's switch"),
        map(_reasoning, REASONING_FORMATS),
    )
    return "\n".join(
        [
            _HEAD,
            "## Formats of tool calls\n",
            *tools,
            f"\nNot built, and refused by name: {_names(values()['--tool-call-parser'])}.\n",
            "## Formats of thinking\n",
            "Where the prompt ends with one of the marks, that decides how an answer begins.\n",
            *thinking,
            f"\nNot built, and refused by name: {_names(values()['--reasoning-parser'])}.\n",
        ]
    )


def _tool(format_: ToolFormat) -> tuple[str, ...]:
    call_id = format_.call_id("f", 2)
    shown = call_id if call_id == format_.call_id("f", 2) else f"random, {len(call_id)} letters"
    return (
        _names(format_.names),
        _code(format_.example),
        _held(format_),
        f"`{shown}`" if ":" in shown else shown,
    )


def _reasoning(format_: ReasoningFormat) -> tuple[str, ...]:
    return (
        _names(format_.names),
        _code(f"{format_.begin}...{format_.end}"),
        _beginning(format_),
        f"`{format_.switch}`" if format_.switch else "",
    )


def _held(format_: ToolFormat) -> str:
    if format_.form is not None and format_.form.marks:
        return "where its marks are text; else as JSON"
    return "yes" if format_.form or format_ is JSON_CALLS else "no: as JSON"


def _beginning(format_: ReasoningFormat) -> str:
    if format_.shown:
        return "as thinking, which stays in the content with its first mark"
    return "as thinking" if format_.inside else "with the first mark, if it thinks"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _code(text: str) -> str:
    """Code in a cell, a line a line."""
    fences = (("`` ", " ``") if "`" in line else ("`", "`") for line in text.split("\n"))
    return "<br>".join(
        f"{a}{line}{b}" for line, (a, b) in zip(text.split("\n"), fences, strict=True)
    )


def main() -> None:
    """Write the page to a file, or to where it belongs."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page())


if __name__ == "__main__":
    main()
