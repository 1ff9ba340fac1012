"""Wires the gateway: the owner to the bus, the APIs to the owner."""

from __future__ import annotations

import asyncio
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from antiphon.config.tenants import Tenants
from antiphon.gateway.access.access import Access, KeysFile
from antiphon.gateway.http.core.app import http_server, metrics_middleware, prefix_of
from antiphon.gateway.http.core.auth import auth_middleware, is_admin
from antiphon.gateway.http.core.body_reader import BodyReader
from antiphon.gateway.http.core.operation import Operation, routes
from antiphon.gateway.http.core.respond import DetachedTasks
from antiphon.gateway.http.families import all_operations
from antiphon.gateway.media.intake import MediaIntake
from antiphon.gateway.metrics_exposition import Exposition, ModelMetrics
from antiphon.gateway.nats.embeddings import NatsEmbeddingEndpoints
from antiphon.gateway.nats.generate import NatsGenerationEndpoints
from antiphon.gateway.owner.driver import OwnerDriver
from antiphon.gateway.owner.machine import Owner
from antiphon.gateway.request_log.request_log import RequestLog
from antiphon.gateway.request_log.writer import dump_on_quit
from antiphon.gateway.request_metrics import GatewayMetrics
from antiphon.gateway.requests.submission import Submission
from antiphon.gateway.requests.tokenizer_client import TokenizerClient
from antiphon.model_card.served_model import served_name
from antiphon.service.endpoint import Endpoint, StreamEndpoint
from antiphon.service.followed_lists import RUNNING_LIST_READS
from antiphon.service.metrics_publisher import report_of
from antiphon.service.service import Report, Runtime
from antiphon.service.startup import OPEN_ENTRY_BYTES, fitting_entries
from antiphon.service.web import probe_routes
from antiphon.telemetry.catalog import NUM_OPEN_REQS
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import ABORT, METRICS, NOTICE, OPEN, OPEN_FETCH, TEXT
from antiphon.wire.submit import OpenListState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from antiphon.wire.ids import ModelName
    from antiphon.wire.submit import AbortRequests


@dataclass(frozen=True)
class GatewayService:
    """Serves one model over HTTP and NATS."""

    role: ClassVar = Role.GATEWAY

    submission: Submission
    generations: NatsGenerationEndpoints
    embeds: NatsEmbeddingEndpoints
    detached: DetachedTasks
    model_metrics: ModelMetrics
    port: int  # of HTTP

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[GatewayService]:
        """Bind the HTTP port first: without it nothing else needs to start.

        Raises:
            CannotStart: The port is in use, or the address is not local.
            ConfigError: The keys file or `gateway.root_path` is not usable.
        """
        settings, model = runtime.settings, served_name(runtime.settings)
        gateway, rules = settings.gateway, settings.access
        metrics = GatewayMetrics(runtime.metrics, settings.metrics)
        model_metrics = _show_model(runtime, model)
        runtime.metrics.before_collect(metrics.latencies.flush_inter_token)
        keys = KeysFile(rules.keys_file) if rules.keys_file else None
        access = Access(rules, keys.read() if keys else Tenants(), runtime.clock.now)
        metrics.tenants.add(access.names)
        owner = Owner(
            runtime.process,
            model,
            runtime.clock,
            gateway,
            list_part_max=fitting_entries(
                OPEN_ENTRY_BYTES, runtime.bus.transport.payload_bytes_max
            ),
            states_read=partial(runtime.peers.read_by_all, OpenListState, *OPEN.listeners),
        )
        driver = OwnerDriver(owner, runtime, model, metrics)
        tokenizers = TokenizerClient(runtime, model)
        requests = RequestLog(runtime, model)
        await asyncio.to_thread(requests.check_folders)
        detached, bodies = DetachedTasks(runtime.group), BodyReader()
        runtime.metrics.gauge(NUM_OPEN_REQS).set_function(lambda: driver.open_count)
        async with MediaIntake.lifespan(runtime) as media, AsyncExitStack() as stack:
            submission = Submission(
                runtime, model, driver, tokenizers, metrics, access, requests, media
            )
            generations = NatsGenerationEndpoints(submission)
            embeds = NatsEmbeddingEndpoints(submission)
            served = all_operations(submission, detached, bodies, model_metrics.ports)
            await stack.enter_async_context(bodies)
            port = await stack.enter_async_context(_server(runtime, access, served, metrics))
            driver.start()
            if keys is not None:
                runtime.group.create_task(access.follow(keys, metrics))
            try:
                with _crash_dump(runtime, requests):
                    yield GatewayService(
                        submission, generations, embeds, detached, model_metrics, port
                    )
            finally:
                driver.close(Unavailable("this gateway has left", retry_after_s=1.0))
                await generations.close()
                await requests.close()

    def endpoints(self) -> Sequence[Endpoint]:
        driver = self.submission.driver
        address = {"gateway": self.submission.runtime.process.instance}
        return (
            StreamEndpoint(route=TEXT, apply=driver.on_text_batch, address=address),
            StreamEndpoint(route=NOTICE, apply=driver.on_notice, address=address),
            StreamEndpoint(route=OPEN_FETCH, apply=driver.on_open_list_request, address=address),
            StreamEndpoint(route=ABORT, apply=self._on_abort, address={"model": self.model()}),
            StreamEndpoint(route=METRICS, apply=self.model_metrics.take),
            *self.generations.endpoints(),
            *self.embeds.endpoints(),
        )

    def _on_abort(self, message: AbortRequests) -> None:
        runtime = self.submission.runtime
        sender = message.sender or runtime.process
        if runtime.peers.is_expired(message.not_after_unix_ms, sender):
            runtime.metrics.late.labels(ABORT.name).inc()
        else:
            self.submission.abort(message.prefix, tenant=message.tenant, exact=message.exact)

    def model(self) -> ModelName:
        return self.submission.model

    def report(self) -> Report:
        return Report(load=self.submission.driver.open_count, reads=RUNNING_LIST_READS)

    async def drain(self) -> None:
        """Return when every job and open request has ended and was sent over NATS or stored.

        HTTP clients are waited for when the server closes.
        """
        await self.submission.jobs_ended()
        await self.submission.driver.idle()
        await self.generations.idle()
        await self.detached.idle()


def _server(
    runtime: Runtime, access: Access, served: Sequence[Operation], metrics: GatewayMetrics
) -> AbstractAsyncContextManager[int]:
    gateway = runtime.settings.gateway
    probes = probe_routes(runtime.health, runtime.metrics, partial(is_admin, access))
    paths = (*routes(served), *probes)
    watch = auth_middleware(access, served, metrics, header_bytes_max=gateway.header_bytes_max)
    counts = metrics_middleware(metrics)
    prefix = prefix_of(gateway.root_path, (route.path for route in paths))
    origins = runtime.settings.access.origins
    return http_server(gateway, paths, watch, origins, counts, prefix)


def _show_model(runtime: Runtime, model: ModelName) -> ModelMetrics:
    own = partial(report_of, Role.GATEWAY, model, runtime, number=0)
    config = runtime.settings.metrics
    model_metrics = ModelMetrics(config, model, runtime.process, runtime.clock.now, own)
    runtime.metrics.show(Exposition(model_metrics, config.extra_labels).collect)
    return model_metrics


@contextmanager
def _crash_dump(runtime: Runtime, requests: RequestLog) -> Generator[None]:
    """Write the open requests to a file if the gateway crashes, if a folder is set."""
    if requests.crash_dump is None:
        yield
        return
    with dump_on_quit(requests.dump):
        try:
            yield
        except BaseException as error:
            if runtime.health.state is not ProcessState.STARTING:
                requests.dump(f"the gateway failed: {type(error).__name__}: {error}")
            raise
