"""How much one body may hold, beside its bytes.

The gateway's event loop serves every stream, so nothing that one client sends may hold it for more
than about 20 ms. What a body costs after it was read goes by its values, not by its bytes: one text
of 8 MB is decoded in 5 ms, 260,000 messages of 30 bytes take seconds to be made requests of. So
lists are bounded in the types of the bodies, and all values of a body together here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import Meta

from antiphon.wire.generate import IDS_MAX
from antiphon.wire.tokenize import MESSAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

T = TypeVar("T")

SMALL_BODY_BYTES_MAX = 64 * 1024
"""Largest body of the routes that take names and switches, and no text of any length."""
PARTS_MAX = 1024
"""Most parts of one message, and calls in it."""
TOOLS_MAX = 512
UNKNOWN_MAX = 256
"""Most fields that no documentation has."""
VALUES_MAX = 600_000
"""Most values of a body."""
OBJECTS_MAX = 2**15
"""Most objects of a body."""
KEYS_MAX = 2**14
"""Most keys of objects of free form; what is nested in their values is not read, so not counted."""
JSON_BYTES_MAX = 1024 * 1024
"""Longest JSON of a free form: schemas, tools, variables of the template."""

LOOP_BYTES_MAX = 256 * 1024
"""Larger bodies are decoded in a child process."""
LOOP_VALUES_MAX = 1024
"""So are bodies with more values. Reading one takes up to 15 us, so these take up to 15 ms."""
LOOP_ANSWER_BYTES = 8 * 1024
"""Longer pieces of an answer are parsed and written in a thread: up to 1 us a character."""

FREE_FORM = frozenset(
    {
        "chat_template_kwargs",
        "custom_params",
        "format",
        "json_schema",
        "output_config",
        "output_format",
        "response_format",
        "sampling_params",
        "text_format",
        "tool_choice",
        "tools",
    }
)
"""Fields that are, or hold, JSON of a free form."""

Name = Annotated[str, Meta(max_length=256)]
"""A name of a function, or of who speaks. OpenAI's API allows 64 characters."""
CallId = Annotated[str, Meta(max_length=1024)]
"""Some proxies put what they have to remember into the ids of calls."""

Messages = Annotated[list[T], Meta(max_length=MESSAGES_MAX)]
Parts = Annotated[list[T], Meta(max_length=PARTS_MAX)]
Tools = Annotated[list[T], Meta(max_length=TOOLS_MAX)]
Ids = Annotated[list[T], Meta(max_length=IDS_MAX)]


def is_small(body: bytes) -> bool:
    """Whether a body can be read on the event loop.

    Commas and brackets inside texts are counted, too: that errs on the safe side, and a search for
    single bytes takes 1 ms for 8 MB.
    """
    return (
        len(body) <= LOOP_BYTES_MAX
        and body.count(b",") + body.count(b"[") + body.count(b"{") <= LOOP_VALUES_MAX
    )


def oversized(fields: Mapping[str, msgspec.Raw]) -> tuple[str, int] | None:
    """A field of free form that is too long, and its bytes."""
    for name in FREE_FORM & fields.keys():
        size = len(bytes(fields[name]))
        if size > JSON_BYTES_MAX:
            return name, size
    return None
