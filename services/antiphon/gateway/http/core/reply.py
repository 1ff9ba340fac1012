"""JSON responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Sequence


def json_reply(body: msgspec.Struct | Sequence[msgspec.Struct]) -> web.Response:
    """Write a struct, or a list of structs, as JSON."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
