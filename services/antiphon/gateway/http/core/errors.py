"""Errors as clients read them: each family of APIs has its shape, which goes by the path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.wire.errors import OPENAI_CODE, EngineError, Overloaded, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Callable

_SERVER_ERROR = 500
_ERROR_CODE = "error_code"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong.

    `code` is OpenAI's name for it, or ours where that is narrower; `param` the field at fault, if
    one is.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every reply with a status of 400 and above, and of an error event."""

    error: ErrorBody


class MessagesError(msgspec.Struct, frozen=True):
    """What went wrong; the message begins with the field at fault, if one is.

    `details` says what the SDKs act on, as that a thread is not held here.
    """

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class MessagesErrorEnvelope(msgspec.Struct, frozen=True):
    """The same of the Messages API. Each request has an id, refused ones too."""

    type: Literal["error"]
    error: MessagesError
    request_id: str | None


class PlainError(msgspec.Struct, frozen=True):
    """The same to Ollama's clients: a text, which names the field at fault, if one is."""

    error: str


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a family shows errors.

    Attributes:
        body: What their JSON is made from.
        write: Makes it; the second argument is the request's id, if it was taken in.
        status: The status of the reply.
        id_header: What names the request on every answer besides `X-Request-Id`.
    """

    body: type[msgspec.Struct]
    write: Callable[[EngineError, str | None], msgspec.Struct]
    status: Callable[[EngineError], int]
    id_header: str | None = None


def shape_of(path: str) -> Shape:
    """The shape of errors on a path, whether or not it is routed."""
    at = (shape for place, shape in _SHAPES if path == place or path.startswith(f"{place}/"))
    return next(at, _OPENAI)


def envelope(error: EngineError) -> ErrorEnvelope:
    """Write an error as OpenAI clients read it."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    if error.status >= _SERVER_ERROR:
        kind = "server_error"
    code = error.details.get(OPENAI_CODE) or _OPENAI_CODES.get(error.code, error.code)
    return ErrorEnvelope(ErrorBody(_shown(error), kind, error.param, code))


def messages_envelope(error: EngineError, request_id: str | None) -> MessagesErrorEnvelope:
    """Write an error as Anthropic clients read it."""
    text = _shown(error)
    if error.param is not None and not text.startswith(error.param):
        text = f"{error.param}: {text}"
    fallback = "api_error" if error.status >= _SERVER_ERROR else "invalid_request_error"
    kind = _MESSAGES_TYPES.get(_messages_status(error), fallback)
    code = error.details.get(_ERROR_CODE)
    details = msgspec.UNSET if code is None else {_ERROR_CODE: code}
    return MessagesErrorEnvelope("error", MessagesError(kind, text, details), request_id)


def plain(error: EngineError) -> PlainError:
    """Write an error as Ollama's clients read it."""
    text = _shown(error)
    named = error.param is None or error.param in text
    return PlainError(text if named else f"{error.param}: {text}")


def retry_after(error: EngineError) -> dict[str, str]:
    """The header that says when to come back, in whole seconds, where that makes sense."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def _shown(error: EngineError) -> str:
    """A bug of ours shows its code and nothing of its text."""
    return "Internal server error." if error.status == _SERVER_ERROR else error.message


_OPENAI_CODES = {PromptTooLong.code: "context_length_exceeded"}
"""OpenAI's names of codes that are called otherwise on the bus."""
_OVERLOADED = 529
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def _messages_status(error: EngineError) -> int:
    """A full queue has a status of its own there, which no registry of HTTP has."""
    return _OVERLOADED if isinstance(error, Overloaded) else error.status


_OPENAI = Shape(
    body=ErrorEnvelope,
    write=lambda error, _: envelope(error),
    status=lambda error: error.status,
)
_SHAPES = (
    (
        "/v1/messages",
        Shape(
            body=MessagesErrorEnvelope,
            write=messages_envelope,
            status=_messages_status,
            id_header="request-id",
        ),
    ),
    (
        "/api",
        Shape(
            body=PlainError,
            write=lambda error, _: plain(error),
            status=lambda error: error.status,
        ),
    ),
)
