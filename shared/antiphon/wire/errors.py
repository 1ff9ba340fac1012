"""Errors that cross the bus.

EngineError               code               status  retry
├── InvalidRequest        invalid_request    400     never    the caller must change the request
│   ├── PromptTooLong     prompt_too_long    400     never
│   ├── Unsupported       unsupported        400     never    known, but not in this build or model
│   ├── UnknownModel      model_not_found    404     never
│   ├── UnknownResponse   response_not_found 404     never    unknown or expired
│   ├── UnknownStream     stream_not_found   404     never    unknown, ended, or of another tenant
│   └── RequestTooLarge   request_too_large  413     never
│       └── HeadersTooLarge  request_headers_too_large  431  never
├── Unauthorized          invalid_api_key    401     never    no API key, or an unknown one
├── Forbidden             forbidden          403     never    the API key lacks permission
├── RateLimited           rate_limit_exceeded  429   after_s  the tenant's limit is reached
├── DuplicateRequest      duplicate_request  409     never    a live request has this id
├── WrongTerm             wrong_term         409     never    a lower term; names the higher one
├── Overloaded            overloaded         503     after_s  nothing was started
├── Unavailable           unavailable        503     after_s  draining, or no responders
├── WorkerLost            worker_lost        503     never    the worker died; the stream ends
│   └── RequestQuarantined  request_quarantined  503  never  workers died while they computed it
├── GatewayLost           gateway_lost       503     never    the gateway lost the request
├── DeadlineExceeded      deadline           504     never
├── Cancelled             cancelled          499     never    the client disconnected
└── Internal              internal           500     never    our bug; the log has the traceback

An operating condition is an `EngineError`; a bug is an assertion. `encode_error` and
`decode_error` carry it over the bus without loss of code, message, retry advice or details.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

from antiphon.wire.base import Message
from antiphon.wire.bounds import Seconds, ShortText

if TYPE_CHECKING:
    from collections.abc import Sequence


OPENAI_CODE = "openai_code"
"""Key in `details`: the `code` of OpenAI's API, where it is more specific than the error's."""


class ErrorReply(Message):
    """An error, in place of a reply or as the end of a stream."""

    code: ShortText
    message: str
    retry_after_s: Seconds | None = None
    param: str | None = None
    details: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class EngineError(Exception):
    """An operating condition that is reported to the caller."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init_subclass__(cls, *, code: str = "", status: int = 0) -> None:
        super().__init_subclass__()
        cls.code, cls.status = code or cls.code, status or cls.status

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details or {}

    @classmethod
    def at(cls, field: str, problem: str) -> Self:
        """Create the error of one field, with which the message begins."""
        return cls(f"{field}: {problem}", param=field)


class InvalidRequest(EngineError, code="invalid_request", status=400):
    """The request can never be served as sent; `param` names the field."""


class PromptTooLong(InvalidRequest, code="prompt_too_long"):
    """The prompt does not fit even in an empty KV cache."""

    @classmethod
    def of(cls, *, prompt_tokens: int, tokens_max: int, param: str | None = None) -> PromptTooLong:
        return cls(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length "
            f"({tokens_max} tokens).",
            param=param,
            details={"prompt_tokens": str(prompt_tokens), "tokens_max": str(tokens_max)},
        )

    @classmethod
    def of_characters(
        cls,
        *,
        characters: int,
        context_tokens: int,
        token_characters: int,
        truncated_max: int | None = None,
        param: str | None = None,
    ) -> PromptTooLong:
        """The error of a text that exceeds the context even with the longest tokens.

        With `truncated_max`, it exceeds the longest text that is encoded for truncation.
        """
        most = context_tokens * token_characters
        limit = f"({context_tokens} tokens of at most {token_characters} characters: {most})."
        if truncated_max is not None:
            most = truncated_max
            limit = f"({context_tokens} tokens), and than what is truncated ({most} characters)."
        return cls(
            f"The input ({characters} characters) is longer than the model's context length "
            f"{limit}",
            param=param,
            details={"characters": str(characters), "characters_max": str(most)},
        )


class Unsupported(InvalidRequest, code="unsupported"):
    """The field or call is known, but not supported by this build or model."""


class UnknownModel(InvalidRequest, code="model_not_found", status=404):
    """The model is not served here."""

    @classmethod
    def of(cls, model: str, served: Sequence[str]) -> UnknownModel:
        known = f"; this server serves {', '.join(served)}" if served else ""
        return cls(f"The model '{model}' does not exist{known}.", param="model")


class UnknownResponse(InvalidRequest, code="response_not_found", status=404):
    """No response with this id is stored for this tenant."""

    @classmethod
    def of(cls, response_id: str) -> UnknownResponse:
        return cls(f"response with id '{response_id}' not found.", param="id")


class UnknownStream(InvalidRequest, code="stream_not_found", status=404):
    """No stream of this tenant can be resumed under this id."""


class RequestTooLarge(InvalidRequest, code="request_too_large", status=413):
    """A body or message exceeds its size limit."""

    @classmethod
    def of(cls, *, size_bytes: int, bytes_max: int) -> RequestTooLarge:
        return cls(
            f"The request has {size_bytes} bytes; the limit is {bytes_max} bytes.",
            details={"size_bytes": str(size_bytes), "bytes_max": str(bytes_max)},
        )


class HeadersTooLarge(RequestTooLarge, code="request_headers_too_large", status=431):
    """The headers or the path of a request exceed their size limit."""


class Unauthorized(EngineError, code="invalid_api_key", status=401):
    """An API key is required, and the request has none or an unknown one."""


class Forbidden(EngineError, code="forbidden", status=403):
    """The API key is valid but lacks permission."""


class RateLimited(EngineError, code="rate_limit_exceeded", status=429):
    """The tenant has reached one of its limits; `details` names it. Has `retry_after_s`."""


class DuplicateRequest(EngineError, code="duplicate_request", status=409):
    """A live request has the same id but other content or another owner."""


class WrongTerm(EngineError, code="wrong_term", status=409):
    """The sender's term is lower than a known one; `details` names the higher one."""


class Overloaded(EngineError, code="overloaded", status=503):
    """The request was not admitted and nothing was started. Always has `retry_after_s`."""

    @classmethod
    def late(cls, *, timeout_s: float, retry_after_s: float) -> Overloaded:
        message = f"queue timeout: no place for it within {timeout_s:g} s"
        return cls(message, retry_after_s=retry_after_s)


class Unavailable(EngineError, code="unavailable", status=503):
    """The process is draining or there are no responders; retry elsewhere or later."""


class WorkerLost(EngineError, code="worker_lost", status=503):
    """The worker of a running request died, and the request ends with it."""

    @classmethod
    def too_large(cls, *, size_bytes: int, bytes_max: int) -> WorkerLost:
        return cls(
            f"a process that served the request failed, and its output of {size_bytes} bytes is "
            f"too large to be continued elsewhere; the limit is {bytes_max} bytes",
            details={"size_bytes": str(size_bytes), "bytes_max": str(bytes_max)},
        )


class RequestQuarantined(WorkerLost, code="request_quarantined", status=503):
    """Several workers died while they computed this request, which may be the reason."""


class GatewayLost(EngineError, code="gateway_lost", status=503):
    """The gateway does not own the request any more: another one does, or it was silent."""


class DeadlineExceeded(EngineError, code="deadline", status=504):
    """The request's deadline passed before it ended."""


class Cancelled(EngineError, code="cancelled", status=499):
    """The client disconnected, or the request was aborted."""


class Internal(EngineError, code="internal", status=500):
    """A bug in the server. The traceback is in the log, not in the message."""


_TYPES: dict[str, type[EngineError]] = {
    error.code: error
    for error in tuple(globals().values())
    if isinstance(error, type) and issubclass(error, EngineError)
}


def encode_error(error: EngineError) -> ErrorReply:
    """Convert an error to its message."""
    return ErrorReply(
        code=error.code,
        message=error.message,
        retry_after_s=error.retry_after_s,
        param=error.param,
        details=error.details,
    )


def decode_error(reply: ErrorReply) -> EngineError:
    """Convert a message back to its error. Unknown codes become `Internal`."""
    return _TYPES.get(reply.code, Internal)(
        reply.message, param=reply.param, retry_after_s=reply.retry_after_s, details=reply.details
    )
