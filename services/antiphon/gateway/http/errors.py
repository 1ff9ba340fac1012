"""Errors as OpenAI clients read them: `{"error": {message, type, param, code}}` everywhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.wire.errors import EngineError

_SERVER_ERROR = 500


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong. `code` is our name for it; `param` the field at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every reply with a status of 400 and above, and of an error event."""

    error: ErrorBody


def envelope(error: EngineError) -> ErrorEnvelope:
    """Write an error for a client. A bug of ours shows its code and nothing of its text."""
    message = "Internal server error." if error.status == _SERVER_ERROR else error.message
    kind = "server_error" if error.status >= _SERVER_ERROR else "invalid_request_error"
    return ErrorEnvelope(ErrorBody(message, kind, error.param, error.code))


def retry_after(error: EngineError) -> dict[str, str]:
    """The header that says when to come back, in whole seconds, where that makes sense."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
