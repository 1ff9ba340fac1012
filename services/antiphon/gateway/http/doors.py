"""Every family of APIs over HTTP, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.answering import Answering
from antiphon.gateway.http.anthropic.messages import Messages
from antiphon.gateway.http.keepalive import Keepalive
from antiphon.gateway.http.native.absent import AbsentRoutes
from antiphon.gateway.http.native.control import Control
from antiphon.gateway.http.native.encoding import Encoding
from antiphon.gateway.http.native.generation import Generation
from antiphon.gateway.http.native.health import Health
from antiphon.gateway.http.native.in_session import InSession
from antiphon.gateway.http.native.info import Info
from antiphon.gateway.http.native.logging_control import LoggingControl
from antiphon.gateway.http.native.parsing import Parsing
from antiphon.gateway.http.ollama.embedding import OllamaEmbedding
from antiphon.gateway.http.ollama.generation import OllamaGeneration
from antiphon.gateway.http.ollama.library import Library
from antiphon.gateway.http.openai.classifying import Classifying
from antiphon.gateway.http.openai.completions import Completions
from antiphon.gateway.http.openai.embeddings import Embeddings
from antiphon.gateway.http.openai.models import Models
from antiphon.gateway.http.openai.reranking import Reranking
from antiphon.gateway.http.openai.responses.responses import Responses
from antiphon.gateway.http.openai.scoring import Scoring
from antiphon.gateway.http.openai.tokens import Tokens
from antiphon.gateway.http.openapi import OpenApi
from antiphon.gateway.http.pooling import Vectors
from antiphon.gateway.owners import Owners
from antiphon.gateway.sessions.sessions import Sessions
from antiphon.gateway.sessions.shelf import shelf
from antiphon.gateway.workers import Workers
from antiphon.service.model import served_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.gateway.access.access import Access
    from antiphon.gateway.driver import Driver
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.entrance import Entrance
    from antiphon.gateway.http.body_reader import BodyReader
    from antiphon.gateway.http.detached import Detached
    from antiphon.gateway.http.operation import Operation
    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.gateway.request_log.request_log import RequestLog
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Process
    from antiphon.wire.ids import ModelName, TenantId


def operations(
    runtime: Runtime,
    model: ModelName,
    entrance: Entrance,
    driver: Driver,
    tokenizers: TokenizerCalls,
    metrics: GatewayMetrics,
    access: Access,
    detached: Detached,
    bodies: BodyReader,
    metrics_ports: Callable[[], Mapping[str, int]],
    request_log: RequestLog,
) -> Sequence[Operation]:
    """All that can be asked."""
    gateway = runtime.settings.gateway
    keepalive = Keepalive(runtime.clock)
    runtime.group.create_task(keepalive.run())
    answering = Answering(
        entrance, driver, metrics, detached, keepalive, bodies, gateway.body_bytes_max
    )
    workers = Workers(runtime, model)
    control = Control(answering, entrance, workers)
    vectors = Vectors(answering, tokenizers)

    async def abort_one(tenant: TenantId, name: str, owner: Process) -> None:
        if owner == runtime.process:
            entrance.abort(name, tenant=tenant, exact=True)
        else:
            await workers.abort_elsewhere(name, tenant=tenant, exact=True)

    sessions = Sessions(
        shelf(runtime.settings.sessions, runtime.bus),
        runtime.process,
        runtime.clock.unix_ms,
        Owners(runtime).abandoned,
        abort_one,
        keep_s=runtime.settings.sessions.keep_s,
        timeout_s=gateway.request_timeout_s,
    )
    in_session = InSession(answering, tokenizers, sessions, runtime)
    served = (
        *Completions(answering, tokenizers, runtime, model, in_session, workers.rank).operations(),
        *Messages(answering, tokenizers, runtime, model).operations(),
        *Responses(answering, entrance, tokenizers, runtime, model).operations(),
        *Models(runtime, model, tokenizers, access).operations(),
        *Tokens(answering, tokenizers, runtime, model).operations(),
        *Scoring(answering, model).operations(),
        *Embeddings(answering, vectors, model).operations(),
        *Classifying(answering, vectors, model).operations(),
        *Reranking(answering, vectors, tokenizers).operations(),
        *Encoding(answering, vectors, runtime).operations(),
        *Generation(
            answering, tokenizers, sessions, in_session, runtime, workers.rank
        ).operations(),
        *OllamaEmbedding(answering, vectors, served_names(runtime.settings)).operations(),
        *OllamaGeneration(answering, tokenizers, runtime, model).operations(),
        *Library(answering, tokenizers, runtime, model, access).operations(),
        *Info(runtime, model, tokenizers, workers, metrics_ports, metrics).operations(),
        *Health(runtime, model, answering, tokenizers).operations(),
        *control.operations(),
        *LoggingControl(answering, request_log, access).operations(),
        *Parsing(answering).operations(),
        *AbsentRoutes().operations(),
    )
    return (*served, *OpenApi(served, gateway.root_path.rstrip("/")).operations())
