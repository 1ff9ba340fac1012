"""Requests to encode a text."""

from __future__ import annotations

from typing import Any

from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.tokenize import ChatMessage, EncodeRequest


def asks(
    messages: tuple[ChatMessage, ...] | None, prompt: str | None, **fields: Any
) -> EncodeRequest:
    return EncodeRequest(
        request_id=RequestId("r"),
        model=ModelName("m"),
        messages=messages,
        prompt=prompt,
        deadline_unix_ms=2**42,
        **fields,
    )
