"""Whether the cluster can answer: by what its heartbeats say, and by an answer of one token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from antiphon.gateway.ask import Ask, Sampling
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.wire.base import Role, State
from antiphon.wire.errors import Unavailable
from antiphon.wire.sampling import PoolParams

if TYPE_CHECKING:
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_GENERATE_S = 20.0


class Healthy(msgspec.Struct, frozen=True):
    """Everybody is there."""

    status: str = "ok"


class Health:
    """Answers at once, but for `/health_generate`."""

    def __init__(
        self,
        runtime: Runtime,
        model: ModelName,
        answering: Answering,
        tokenizers: TokenizerCalls,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._answering = answering
        self._tokenizers = tokenizers

    def operations(self) -> list[Operation]:
        """What a load balancer asks."""
        here = "200 if an answer can be given now, else 503 that names who is missing."
        return [
            Operation(method="GET", path="/", answer=self._hello, summary="Who is here."),
            Operation(
                method="GET", path="/health", answer=self._health, summary=here, reply=Healthy
            ),
            Operation(method="GET", path="/ping", answer=self._health, summary=here, reply=Healthy),
            Operation(
                method="GET",
                path="/ready",
                answer=self._ready,
                summary="As /health, and no worker is paused.",
                reply=Healthy,
            ),
            Operation(
                method="GET",
                path="/health_generate",
                answer=self._generate,
                summary="200 once the model has said a token, or made a vector; 503 after 20 s.",
                reply=Healthy,
            ),
        ]

    async def _hello(self, _: web.Request) -> web.Response:
        return web.Response(text=f"Antiphon is running and serves {self._model}.\n")

    async def _health(self, _: web.Request) -> web.Response:
        self._check()
        return json_reply(Healthy())

    async def _ready(self, _: web.Request) -> web.Response:
        self._check()
        beats = [peer.beat for peer in self._runtime.peers.working(Role.WORKER)]
        if all(beat.worker is not None and beat.worker.paused for beat in beats):
            raise Unavailable("generation is paused", retry_after_s=1.0)
        return json_reply(Healthy())

    async def _generate(self, request: web.Request) -> web.Response:
        self._check()
        try:
            async with asyncio.timeout(_GENERATE_S):
                pools = (await self._tokenizers.card(_GENERATE_S)).pooling is not None
                ask = Ask(
                    door="health",
                    model=None,
                    prompt_ids=(0,),
                    tokens_max=0 if pools else 1,
                    sampling=Sampling(temperature=0.0, ignore_eos=True),
                    pool=PoolParams() if pools else None,
                )
                await self._answering.hear(request, [ask])
        except TimeoutError:
            text = f"the model said nothing in {_GENERATE_S:g} s"
            raise Unavailable(text, retry_after_s=1.0) from None
        return json_reply(Healthy())

    def _check(self) -> None:
        missing = self._missing()
        if missing:
            raise Unavailable(f"not ready: {', '.join(missing)}", retry_after_s=1.0)

    def _missing(self) -> list[str]:
        """Which of the services that an answer needs do not take work."""
        peers = self._runtime.peers
        missing = [
            str(role)
            for role in (Role.TOKENIZER, Role.WORKER, Role.DETOKENIZER)
            if not peers.working(role)
        ]
        if not any(peer.beat.leads is not None for peer in peers.working(Role.SCHEDULER)):
            missing.append(Role.SCHEDULER)
        if self._runtime.health.state is not State.READY:
            missing.append(Role.GATEWAY)
        return missing
