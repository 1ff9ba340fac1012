"""Patterns of JSON strings, rewritten so that the compiler parses them as JSON Schema means them.

The compiler parses them with other code than standalone regular expressions. That code lets quotes
through where a non-ASCII letter is not escaped, and goes wrong past the beginning of an optional
group whose end repeats: `1(a[0-9]+)?` also matched 155. The rewritten patterns mean the same to any
other parser.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
      \\. | \[ (?: \\. | [^\]\\] )* \]            # an escape; a class
    | \( (?: \?: | \?<\w+> )? | \)                # a group
    | \?\?? | \{0,(?P<most>\d*)\}\??              # it may be left out
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
_CHARACTER = re.compile(r"\\.|[^\x00-\x7f]", re.DOTALL)


def ascii_pattern(pattern: str) -> str:
    """The same pattern in ASCII, with each optional group as a choice of nothing or the group."""
    output: list[str] = []
    opened: list[int] = []
    ended: int | None = None  # start of the group that has just been closed
    for token in _TOKEN.finditer(pattern):
        text, group, ended = token[0], ended, None
        if text == ")" and opened:
            ended = opened.pop()
        elif text[0] == "(":
            opened.append(len(output))
        elif group is not None and text in ("?", "??"):
            output[group] += "|"
            continue
        elif group is not None and token["most"] is not None:
            output[group] = f"(|{output[group]}"
            text = f"{{1,{token['most']}}})"
        output.append(_CHARACTER.sub(_numbered, text))
    return "".join(output)


def _numbered(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.isascii() else f"\\u{{{ord(text[-1]):x}}}"
