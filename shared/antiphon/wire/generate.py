"""Client and gateway over NATS: submit, text, the terminal; resume and cancel.

A client publishes `GenerateRequest` to `generate.<model>` with an inbox `client.<tenant>.<id>` as
its reply subject. Everything comes back there: `GenerateAccepted` or an `ErrorReply`, then
`GenerateText`, then one `GenerateEnd`, which carries the total length. Text is placed by (choice,
byte offset), so that a repeat is cut off and a gap is seen.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import FinishReason, Message, Usage, Value
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import ClientKey, InstanceId, ModelName, RequestId
from antiphon.wire.sampling import MinP, Seed, StopString, Temperature, TopP
from antiphon.wire.tokenize import ChatMessage


class GenerateRequest(Message):
    """One request of a NATS client. Exactly one of `messages`, `prompt`, `prompt_ids` is given.

    The same `key` with the same content is a retry and answered as the first; with another
    content it is refused while the first is live. Unset sampling fields take the model's defaults.
    """

    key: ClientKey
    model: ModelName
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Annotated[tuple[StopString, ...], Meta(max_length=32)] = ()
    stop_token_ids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    ignore_eos: bool = False
    stream: bool = True
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    traceparent: str | None = None


class GenerateAccepted(Message):
    """The gateway owns the request from now on; cancel and resume go to this gateway."""

    key: ClientKey
    request_id: RequestId
    gateway: InstanceId


class GenerateText(Message):
    """More text of one choice, beginning at a byte offset of the choice's UTF-8 text."""

    request_id: RequestId
    choice: int
    text_offset: int
    text: str


class ChoiceEnd(Value):
    """How one choice ended. `text` is the whole text where the client did not stream."""

    choice: int
    finish_reason: FinishReason
    text_bytes: int
    text: str | None = None
    matched_stop: str | int | None = None


class GenerateEnd(Message):
    """The one terminal of a request: success, or an error with what had been said by then."""

    request_id: RequestId
    choices: tuple[ChoiceEnd, ...]
    usage: Usage
    error: ErrorReply | None = None


class TextPlace(Value):
    """How much of a choice's text somebody has, in bytes."""

    choice: int
    text_offset: int


class GenerateResume(Message):
    """Say again what lies beyond these places, and the terminal if there is one."""

    request_id: RequestId
    places: tuple[TextPlace, ...] = ()


class GenerateCancel(Message):
    """The client no longer wants the answer."""

    request_id: RequestId


class GenerateDone(Message):
    """A resume or cancel was understood; what it asked for comes to the inbox."""

    request_id: RequestId
