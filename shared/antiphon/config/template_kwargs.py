"""Default variables of chat templates, which requests may override."""

from __future__ import annotations

from typing import cast

import msgspec

BYTES_MAX = 8 * 1024
"""Maximum length of the JSON."""
KEYS_MAX = 64
"""Maximum number of variables."""
DEPTH_MAX = 16
"""Maximum nesting depth of their values."""
_OF_REQUESTS = ("messages", "tools", "add_generation_prompt")
"""Variables that every request sets, so that a default would never be used."""
_KINDS = {"list": "a list", "str": "a string", "bool": "a boolean", "NoneType": "null"}


def read_template_kwargs(text: str) -> dict[str, object]:
    """Parse the JSON of default template arguments.

    Raises:
        ValueError: It is not a JSON object, is too large, or sets a variable of every request.
    """
    size = len(text.encode())
    if size > BYTES_MAX:
        raise ValueError(f"the JSON has {size} bytes; the limit is {BYTES_MAX} bytes")
    try:
        found: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(found, dict):
        kind = _KINDS.get(type(found).__name__, "a number")
        raise ValueError(f"expected a JSON object, such as {{}}, got {kind}")  # noqa: TRY004
    kwargs = cast("dict[str, object]", found)
    if len(kwargs) > KEYS_MAX:
        raise ValueError(f"the object has {len(kwargs)} keys; the limit is {KEYS_MAX} keys")
    for name in _OF_REQUESTS:
        if name in kwargs:
            raise ValueError(f"{name!r} comes from each request and cannot have a default")
    for name, value in kwargs.items():
        if not _is_shallow(value, DEPTH_MAX):
            raise ValueError(f"{name!r} is nested deeper than {DEPTH_MAX} levels")
    return kwargs


def _is_shallow(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        inner = list(cast("dict[str, object]", value).values())
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return True
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)
