"""Error bodies. Each family of APIs has its format, selected by path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

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
    """Details of an error.

    `code` is OpenAI's code, or a more specific one of this server. `param` is the invalid field, if
    there is one.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """Body of every response with a status of 400 or above, and of error events."""

    error: ErrorBody


class MessagesError(msgspec.Struct, frozen=True):
    """Details of an error. The message starts with the invalid field, if there is one.

    `details` holds data that the SDKs act on.
    """

    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class MessagesErrorEnvelope(msgspec.Struct, frozen=True):
    """Error body of the Messages API. Every request has an id, rejected ones included."""

    type: Literal["error"]
    error: MessagesError
    request_id: str | None


class PlainError(msgspec.Struct, frozen=True):
    """Error body of the Ollama API: a message that names the invalid field, if there is one."""

    error: str


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Error format of a family of APIs.

    Attributes:
        body: Struct of the error body.
        write: Builds the body; the second argument is the request's id, if it has one.
        status: Returns the response status.
        id_header: Response header with the request id, in addition to `X-Request-Id`.
    """

    body: type[msgspec.Struct]
    write: Callable[[EngineError, str | None], msgspec.Struct]
    status: Callable[[EngineError], int]
    id_header: str | None = None


def shape_of(path: str) -> Shape:
    at = (shape for place, shape in _SHAPES if path == place or path.startswith(f"{place}/"))
    return next(at, _OPENAI)


def envelope(error: EngineError) -> ErrorEnvelope:
    kind = _TYPES.get(error.status, "invalid_request_error")
    if error.status >= _SERVER_ERROR:
        kind = "server_error"
    code = error.details.get(OPENAI_CODE) or _OPENAI_CODES.get(error.code, error.code)
    return ErrorEnvelope(ErrorBody(_public_message(error), kind, error.param, code))


def messages_envelope(error: EngineError, request_id: str | None) -> MessagesErrorEnvelope:
    text = _public_message(error)
    if error.param is not None and not text.startswith(error.param):
        text = f"{error.param}: {text}"
    fallback = "api_error" if error.status >= _SERVER_ERROR else "invalid_request_error"
    kind = _MESSAGES_TYPES.get(_messages_status(error), fallback)
    code = error.details.get(_ERROR_CODE)
    details = UNSET if code is None else {_ERROR_CODE: code}
    return MessagesErrorEnvelope("error", MessagesError(kind, text, details), request_id)


def plain(error: EngineError) -> PlainError:
    text = _public_message(error)
    named = error.param is None or error.param in text
    return PlainError(text if named else f"{error.param}: {text}")


def retry_after(error: EngineError) -> dict[str, str]:
    """Build the Retry-After header, in whole seconds, if the error can be retried."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def _public_message(error: EngineError) -> str:
    """Return the error as shown to clients: an internal error shows only its code."""
    return "Internal server error." if error.status == _SERVER_ERROR else error.message


_OPENAI_CODES = {PromptTooLong.code: "context_length_exceeded"}
"""OpenAI's names for codes that differ on the bus."""
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
    """Return Anthropic's status: a full queue has a status that is not registered with IANA."""
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
