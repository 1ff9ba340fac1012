"""Health checks: by heartbeats, and by generating one token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.requests.generation_request import (
    PROBE_API,
    GenerationRequest,
    SamplingOptions,
)
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.errors import EngineError, Unavailable, decode_error, encode_error
from antiphon.wire.sampling import PoolParams

if TYPE_CHECKING:
    from aiohttp import web


_GENERATE_S = 20.0
_MIN_INTERVAL_S = 1.0
"""Minimum interval between the starts of two health generations."""


class HealthReply(msgspec.Struct, frozen=True):
    """All services that generation needs are available."""

    status: str = "ok"


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """Server information at the root path."""

    name: str = "antiphon"
    version: str
    model: str
    status: str = "Antiphon is running."
    links: dict[str, str]


_LINKS = {
    "models": "/v1/models",
    "openapi": "/openapi.json",
    "health": "/health",
    "metrics": "/metrics",
    "server_info": "/server_info",
}


@dataclass
class _Probe:
    """The last health generation."""

    task: asyncio.Task[EngineError | None] | None = None
    began_at: float = 0.0


@dataclass(frozen=True)
class HealthEndpoints(Endpoints):
    """Handlers of the health checks; all but `/health_generate` return immediately."""

    _probe: _Probe = field(default_factory=_Probe, init=False)

    @operation("GET", "/", "Server name and links to documentation.", reply=Root)
    async def _hello(self, _: web.Request) -> web.Response:
        prefix = self.runtime.settings.gateway.root_path.rstrip("/")
        links = {name: f"{prefix}{path}" for name, path in _LINKS.items()}
        return json_reply(Root(version=metadata.version("antiphon"), model=self.model, links=links))

    @operation(
        "GET",
        "/health /ping",
        "Check readiness by heartbeats: 200, or 503 with the names of the missing services.",
        reply=HealthReply,
    )
    async def _health(self, _: web.Request) -> web.Response:
        self._check()
        return json_reply(HealthReply())

    @operation(
        "GET",
        "/ready",
        "Check readiness as /health does, and that no worker is paused.",
        reply=HealthReply,
    )
    async def _ready(self, _: web.Request) -> web.Response:
        self._check()
        beats = [peer.heartbeat for peer in self.runtime.peers.accepting_work(Role.WORKER)]
        if all(beat.worker is not None and beat.worker.paused for beat in beats):
            raise Unavailable("generation is paused", retry_after_s=1.0)
        return json_reply(HealthReply())

    @operation(
        "GET",
        "/health_generate",
        "Check health by generating one token, or a vector: 200, or 503 after 20 s. "
        "Callers share at most one generation per second.",
        reply=HealthReply,
    )
    async def _generate(self, request: web.Request) -> web.Response:
        """Wait for the current health generation; start one if the last began over a second ago.

        The route needs no key, so callers must not cause work in proportion to their number.
        """
        self._check()
        now = self.runtime.clock.now()
        probe = self._probe
        if probe.task is None or (probe.task.done() and now >= probe.began_at + _MIN_INTERVAL_S):
            # Other callers wait for it, so a caller's disconnect must not cancel it: it is a task
            # of the process.
            probe.task = self.runtime.group.create_task(self._generated(request))
            probe.began_at = now
        error = await asyncio.shield(probe.task)
        if error is not None:
            raise decode_error(encode_error(error))
        return json_reply(HealthReply())

    async def _generated(self, request: web.Request) -> EngineError | None:
        try:
            async with asyncio.timeout(_GENERATE_S):
                pools = (await self.tokenizers.card(_GENERATE_S)).pooling is not None
                gen_request = GenerationRequest(
                    api=PROBE_API,
                    model=None,
                    prompt_ids=(0,),
                    tokens_max=0 if pools else 1,
                    sampling=SamplingOptions(temperature=0.0, ignore_eos=True),
                    pooling=PoolParams() if pools else None,
                )
                await self.response_handler.collect(request, [gen_request])
        except TimeoutError:
            text = f"the model generated nothing within {_GENERATE_S:g} s"
            return Unavailable(text, retry_after_s=1.0)
        except EngineError as error:
            return error
        return None

    def _check(self) -> None:
        """Reject unless all services that generation needs are accepting work."""
        peers = self.runtime.peers
        missing = [
            str(role)
            for role in (Role.TOKENIZER, Role.WORKER, Role.DETOKENIZER)
            if not peers.accepting_work(role)
        ]
        if not any(
            peer.heartbeat.leads is not None for peer in peers.accepting_work(Role.SCHEDULER)
        ):
            missing.append(Role.SCHEDULER)
        if self.runtime.health.state is not ProcessState.READY:
            missing.append(Role.GATEWAY)
        if missing:
            raise Unavailable(f"not ready: {', '.join(missing)}", retry_after_s=1.0)
