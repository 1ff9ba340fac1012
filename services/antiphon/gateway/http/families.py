"""All families of HTTP APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.anthropic.endpoints import MessagesEndpoints
from antiphon.gateway.http.core.keepalive import Keepalive
from antiphon.gateway.http.core.operation import Operation, openapi_operation
from antiphon.gateway.http.core.respond import DetachedTasks, ResponseHandler
from antiphon.gateway.http.core.session_requests import SessionRequests
from antiphon.gateway.http.native.absent_routes import absent_operations
from antiphon.gateway.http.native.control import ControlEndpoints
from antiphon.gateway.http.native.corpora import CorpusEndpoints
from antiphon.gateway.http.native.encode import EncodeEndpoints
from antiphon.gateway.http.native.endpoints import GenerateEndpoints
from antiphon.gateway.http.native.health import HealthEndpoints
from antiphon.gateway.http.native.info import InfoEndpoints
from antiphon.gateway.http.native.parsing import ParsingEndpoints
from antiphon.gateway.http.ollama.endpoints import OllamaEndpoints
from antiphon.gateway.http.ollama.models import OllamaModelsEndpoints
from antiphon.gateway.http.openai.embeddings import EmbeddingsEndpoints
from antiphon.gateway.http.openai.endpoints import CompletionsEndpoints
from antiphon.gateway.http.openai.models import ModelsEndpoints
from antiphon.gateway.http.openai.responses.cipher import ReasoningCipher
from antiphon.gateway.http.openai.responses.endpoints import ResponsesEndpoints
from antiphon.gateway.http.openai.responses.store import ResponseStore
from antiphon.gateway.http.openai.score import ScoreEndpoints
from antiphon.gateway.http.openai.tokenize import TokenizeEndpoints
from antiphon.gateway.http.openai.transcriptions import TranscriptionEndpoints
from antiphon.gateway.peers import GatewayLiveness, WorkerControl
from antiphon.gateway.sessions import Sessions, session_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.gateway.http.core.body_reader import BodyReader
    from antiphon.gateway.requests.submission import Submission
    from antiphon.wire.base import Process
    from antiphon.wire.ids import TenantId


def all_operations(
    submission: Submission,
    detached: DetachedTasks,
    bodies: BodyReader,
    metrics_ports: Callable[[], Mapping[str, int]],
) -> Sequence[Operation]:
    runtime, model = submission.runtime, submission.model
    tokenizers, access = submission.tokenizers, submission.access
    gateway = runtime.settings.gateway
    keepalive = Keepalive(runtime.clock)
    runtime.group.create_task(keepalive.run())
    response_handler = ResponseHandler(submission, detached, keepalive, bodies)
    workers = WorkerControl(runtime, model)

    async def abort_one(tenant: TenantId, name: str, owner: Process) -> None:
        if owner == runtime.process:
            submission.abort(name, tenant=tenant, exact=True)
        else:
            await workers.abort_elsewhere(name, tenant=tenant, exact=True)

    sessions = Sessions(
        session_store(runtime.settings.sessions, runtime.bus),
        runtime.process,
        runtime.clock.unix_ms,
        GatewayLiveness(runtime).is_abandoned,
        abort_one,
        keep_s=runtime.settings.sessions.keep_s,
        timeout_s=gateway.request_timeout_s,
    )
    in_session = SessionRequests(response_handler, tokenizers, sessions, runtime)
    common = (response_handler, tokenizers, runtime, model)
    endpoints = (
        CompletionsEndpoints(*common, in_session, workers.dp_rank),
        MessagesEndpoints(*common),
        ResponsesEndpoints(
            *common, submission, ResponseStore(runtime), ReasoningCipher(runtime.settings.access)
        ),
        ModelsEndpoints(*common, access, created=runtime.clock.unix_ms() // 1000),
        TokenizeEndpoints(*common),
        ScoreEndpoints(*common),
        TranscriptionEndpoints(*common),
        EmbeddingsEndpoints(*common),
        EncodeEndpoints(*common),
        GenerateEndpoints(*common, sessions, in_session, workers.dp_rank),
        OllamaEndpoints(*common),
        OllamaModelsEndpoints(*common, access, since_unix_ms=runtime.clock.unix_ms()),
        InfoEndpoints(*common, workers, metrics_ports, submission.metrics),
        HealthEndpoints(*common),
        ControlEndpoints(*common, submission, workers),
        CorpusEndpoints(*common, workers),
        ParsingEndpoints(*common),
    )
    served = (*(one for each in endpoints for one in each.operations()), *absent_operations())
    return (*served, openapi_operation(served, gateway.root_path.rstrip("/")))
