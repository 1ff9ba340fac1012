"""A minimal service: in place of the tokenizer, it answers each request at its deadline.

Run `python -m tests.support.echo` in tests that need a process to send signals to.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from antiphon.service.clock import Clock, deadline_in, remaining_s
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.service.main import run
from antiphon.service.service import Report, Runtime
from antiphon.wire.base import Role
from antiphon.wire.errors import PromptTooLong
from antiphon.wire.ids import ModelName, new_request_id
from antiphon.wire.routes import TOKENIZE
from antiphon.wire.tokenize import EncodeReply, EncodeRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.bus.bus import Delivery

MODEL = ModelName("echo")
BUG = "bug"
"""A prompt whose handler raises an unexpected exception."""
TOO_LONG = "too long"
"""A prompt that is rejected."""


class EchoService:
    """Answers a prompt with its own bytes."""

    role = Role.TOKENIZER

    def __init__(self) -> None:
        self.open = 0
        self.left = False
        self.runtime: Runtime

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[Self]:
        self.runtime = runtime
        try:
            yield self
        finally:
            self.left = True

    def endpoints(self) -> Sequence[Endpoint]:
        return [RequestEndpoint(route=TOKENIZE, handler=self.encode, address={"model": MODEL})]

    def model(self) -> ModelName | None:
        return MODEL

    def report(self) -> Report:
        return Report(load=self.open)

    async def drain(self) -> None:
        """Do nothing: there is no state beyond a call."""

    async def encode(self, request: EncodeRequest, _: Delivery) -> EncodeReply:
        assert request.prompt is not None
        self.open += 1
        try:
            await asyncio.sleep(remaining_s(request.deadline_unix_ms, self.runtime.clock))
        finally:
            self.open -= 1
        if request.prompt == BUG:
            raise ValueError("a bug, on purpose")
        if request.prompt == TOO_LONG:
            raise PromptTooLong.of(prompt_tokens=9, tokens_max=8)
        return EncodeReply(
            request_id=request.request_id,
            token_ids=request.prompt.encode(),
            vocabulary_size=256,
            context_tokens=8,
        )


def echo_request(clock: Clock, prompt: str = "echo", after_s: float = 0.0) -> EncodeRequest:
    """A request that is answered `after_s` from now."""
    return EncodeRequest(
        request_id=new_request_id(),
        model=MODEL,
        prompt=prompt,
        deadline_unix_ms=deadline_in(after_s, clock),
    )


if __name__ == "__main__":
    run(EchoService())
