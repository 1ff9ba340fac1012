"""A gateway that speaks the real messages, says what the test wants, and loses what it wants."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import client_bus

from antiphon.wire.base import FinishReason, Message, Role, Usage
from antiphon.wire.errors import EngineError, InvalidRequest, UnknownStream, encode_error
from antiphon.wire.generate import (
    ChoiceEnd,
    GenerateAccepted,
    GenerateCancel,
    GenerateDone,
    GenerateEnd,
    GenerateRequest,
    GenerateResume,
    GenerateText,
    ResumePosition,
)
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.routes import GATEWAY_CONTROL, GENERATE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.bus.transport import Subscription, Transport

MODEL = "m"
USAGE = Usage(prompt_tokens=3, completion_tokens=5)


@dataclass(frozen=True)
class Mischief:
    """Shares of what is said to a client that never arrive, come twice, or come later."""

    seed: int
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0


@dataclass
class Request:
    id: RequestId
    request: GenerateRequest
    delivery: Delivery
    said: list[str] = field(default_factory=list[str])
    error: EngineError | None = None
    ended: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class FakeGateway:
    """Accepts, and says `script` at once, or what a test makes it say.

    Attributes:
        refuses: What each submit is answered with, if anything.
        refuses_adoptions: The same for the next submits that continue an earlier response.
        deaf_to: Kinds of messages that it drops, and how many more of each.
        mute: Kinds of messages that it does not say, and how many more of each.
    """

    def __init__(
        self, bus: Bus, name: str, script: tuple[str, ...] | None, mischief: Mischief
    ) -> None:
        self.bus = bus
        self.name = InstanceId(name)
        self.requests: list[Request] = []
        self.submits = 0
        self.resumes = 0
        self.adoptions = 0
        self.refuses_adoptions: list[EngineError] = []
        self.refuses: EngineError | None = None
        self.deaf_to: dict[type[Message], int] = {}
        self.mute: dict[type[Message], int] = {}
        self._script = script
        self._mischief = mischief
        self._chance = random.Random(mischief.seed)
        self._held_back: list[tuple[Delivery, Message]] = []
        self._subscriptions: list[Subscription] = []

    async def listen(self) -> None:
        self._subscriptions = [
            await self.bus.listen(GENERATE, self._submit, model=MODEL),
            await self.bus.listen(GATEWAY_CONTROL, self._control, gateway=self.name),
        ]

    async def die(self) -> None:
        for subscription in self._subscriptions:
            await subscription.drain()

    async def say(self, request: Request, text: str) -> None:
        offset = len("".join(request.said).encode())
        request.said.append(text)
        if request.request.stream:
            await self._tell(request, self._piece(request, offset, text))

    async def finish(self, request: Request, error: EngineError | None = None) -> None:
        request.ended, request.error = True, error
        await self._tell(request, self._end(request))

    async def _submit(self, delivery: Delivery) -> None:
        message = delivery.read(GENERATE)
        self.submits += 1
        if self._spend(self.deaf_to, message):
            return
        if self.refuses is not None:
            delivery.respond(encode_error(self.refuses))
            return
        if message.resume_from is not None:
            await self._adopt(delivery, message, message.resume_from)
            return
        known = next((r for r in self.requests if r.request.key == message.key), None)
        if known is not None:
            known.delivery = delivery
            await self._tell(known, self._accepted(known))
            await self._say_again(known, 0)
            return
        request = Request(RequestId(f"{self.name}-{len(self.requests)}"), message, delivery)
        self.requests.append(request)
        await self._tell(request, self._accepted(request))
        if self._script is not None:
            for text in self._script:
                await self.say(request, text)
            await self.finish(request)

    async def _adopt(
        self, delivery: Delivery, message: GenerateRequest, position: ResumePosition
    ) -> None:
        self.adoptions += 1
        if self.refuses_adoptions:
            delivery.refuse(self.refuses_adoptions.pop(0))
            return
        request = next((r for r in self.requests if r.id == position.request_id), None)
        if request is None:
            delivery.refuse(UnknownStream("there is no such stream"))
            return
        assert msgspec.structs.replace(message, resume_from=None) == request.request
        request.delivery = delivery
        await self._tell(request, self._accepted(request))
        await self._say_again(request, position.places[0].text_offset if position.places else 0)

    async def _control(self, delivery: Delivery) -> None:
        message = delivery.read(GATEWAY_CONTROL)
        if self._spend(self.deaf_to, message):
            return
        request = next((r for r in self.requests if r.id == message.request_id), None)
        if request is None:
            delivery.refuse(InvalidRequest("this gateway has no such request"))
            return
        match message:
            case GenerateCancel():
                request.cancelled.set()
            case GenerateResume():
                self.resumes += 1
                await self._say_again(
                    request, message.places[0].text_offset if message.places else 0
                )
        delivery.respond(GenerateDone(request_id=request.id))

    async def _say_again(self, request: Request, start: int) -> None:
        for message in self._again(request, start):
            await self._tell(request, message)

    def _again(self, request: Request, start: int) -> Iterator[Message]:
        rest = "".join(request.said).encode()[start:].decode()
        if request.request.stream and rest:
            yield self._piece(request, start, rest)
        if request.ended:
            yield self._end(request)

    async def _tell(self, request: Request, message: Message) -> None:
        """Publish to the client, but for what mischief takes, and after it what was held back."""
        if self._spend(self.mute, message):
            return
        chance, mischief = self._chance, self._mischief
        if chance.random() < mischief.lost:
            return
        if chance.random() < mischief.late:
            self._held_back.append((request.delivery, message))
            return
        for _ in range(2 if chance.random() < mischief.repeated else 1):
            request.delivery.respond(message)
        late, self._held_back = self._held_back, []
        for delivery, held in late:
            delivery.respond(held)

    @staticmethod
    def _spend(left: dict[type[Message], int], message: Message) -> bool:
        kind = type(message)
        left[kind] = left.get(kind, 0) - 1
        return left[kind] >= 0

    def _accepted(self, request: Request) -> GenerateAccepted:
        return GenerateAccepted(key=request.request.key, request_id=request.id, gateway=self.name)

    def _piece(self, request: Request, offset: int, text: str) -> GenerateText:
        return GenerateText(request_id=request.id, choice=0, text_offset=offset, text=text)

    def _end(self, request: Request) -> GenerateEnd:
        text = "".join(request.said)
        end = ChoiceEnd(
            choice=0,
            finish_reason=FinishReason.STOP if request.error is None else FinishReason.ERROR,
            text_bytes=len(text.encode()),
            text=None if request.request.stream else text,
        )
        return GenerateEnd(
            request_id=request.id,
            choices=(end,),
            usage=USAGE,
            error=None if request.error is None else encode_error(request.error),
        )


@asynccontextmanager
async def gateway(
    broker: MemoryBroker | Transport,
    *,
    name: str = "gateway-0",
    script: tuple[str, ...] | None = None,
    mischief: Mischief | None = None,
) -> AsyncGenerator[FakeGateway]:
    transport = MemoryTransport(broker) if isinstance(broker, MemoryBroker) else broker
    async with client_bus(transport, name, Role.GATEWAY) as bus:
        fake = FakeGateway(bus, name, script, mischief or Mischief(0))
        await fake.listen()
        yield fake
