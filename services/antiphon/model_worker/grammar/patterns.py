"""Patterns of JSON strings, written so that the compiler reads what they say.

It reads them with other code than regular expressions by themselves. That lets quotes through where
a letter beyond ASCII stands as it is, and past the beginning of an optional group whose end
repeats: `1(a[0-9]+)?` also matched 155. What is written here means the same to any other reader.
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
    """The same pattern in ASCII, each group that may be left out as a choice of nothing or it."""
    said: list[str] = []
    opened: list[int] = []
    ended: int | None = None  # where the group begins that has just ended
    for token in _TOKEN.finditer(pattern):
        text, group, ended = token[0], ended, None
        if text == ")" and opened:
            ended = opened.pop()
        elif text[0] == "(":
            opened.append(len(said))
        elif group is not None and text in ("?", "??"):
            said[group] += "|"
            continue
        elif group is not None and token["most"] is not None:
            said[group] = f"(|{said[group]}"
            text = f"{{1,{token['most']}}})"
        said.append(_CHARACTER.sub(_numbered, text))
    return "".join(said)


def _numbered(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.isascii() else f"\\u{{{ord(text[-1]):x}}}"
