"""Limits of a request body other than its size in bytes.

The gateway's event loop serves all streams, so no input of one client may block it for more than
about 20 ms. The cost of a body after decoding depends on its values, not on its bytes: one text of
8 MB is decoded in 5 ms, while converting 260,000 messages of 30 bytes takes seconds. So lists are
limited in the types of the bodies, and the total number of values here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.gateway.parsing.tools.tool import TOOLS_MAX
from antiphon.wire.generate import CHOICES_MAX, IDS_MAX
from antiphon.wire.sampling import TokenId
from antiphon.wire.tokenize import MESSAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

SMALL_BODY_BYTES_MAX = 64 * 1024
"""Maximum size of bodies that hold only names and flags."""
PARTS_MAX = 1024
"""Maximum number of content parts, and of tool calls, of a message."""
UNKNOWN_MAX = 256
"""Maximum number of undocumented fields."""
VALUES_MAX = 600_000
"""Maximum number of values of a body."""
OBJECTS_MAX = 2**15
"""Maximum number of objects of a body."""
KEYS_MAX = 2**14
"""Maximum number of keys of free-form objects; values nested in them are not decoded or counted."""
JSON_BYTES_MAX = 1024 * 1024
"""Maximum size of free-form JSON: schemas, tools, template variables."""

LOOP_BYTES_MAX = 256 * 1024
"""Larger bodies are decoded in a child process."""
LOOP_VALUES_MAX = 1024
"""So are bodies with more values: each takes up to 15 us, so this many up to 15 ms."""
LOOP_ANSWER_BYTES = 8 * 1024
"""Longer output is parsed and encoded in a thread: it takes up to 1 us per character."""

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
"""Fields that are, or contain, free-form JSON."""

Json = dict[str, msgspec.Raw]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
TokensMax = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=256)]
"""Name of a function or of a speaker. OpenAI's API allows 64 characters."""
CallId = Annotated[str, Meta(max_length=1024)]
"""Some proxies store state in the ids of tool calls."""

Messages = Annotated[list[T], Meta(max_length=MESSAGES_MAX)]
Parts = Annotated[list[T], Meta(max_length=PARTS_MAX)]
Tools = Annotated[list[T], Meta(max_length=TOOLS_MAX)]
Ids = Annotated[list[T], Meta(max_length=IDS_MAX)]
PromptIds = Annotated[Ids[TokenId], Meta(min_length=1)]


def is_small(body: bytes) -> bool:
    """Whether a body can be decoded on the event loop.

    Commas and brackets inside texts count too. That is conservative, and searching 8 MB for single
    bytes takes 1 ms.
    """
    return (
        len(body) <= LOOP_BYTES_MAX
        and body.count(b",") + body.count(b"[") + body.count(b"{") <= LOOP_VALUES_MAX
    )


def oversized(fields: Mapping[str, msgspec.Raw]) -> tuple[str, int] | None:
    for name in FREE_FORM & fields.keys():
        size = len(bytes(fields[name]))
        if size > JSON_BYTES_MAX:
            return name, size
    return None
