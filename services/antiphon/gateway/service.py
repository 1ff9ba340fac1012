"""Wires the gateway: the owner to the bus, the APIs to the owner."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from antiphon.config.tenants import Tenants
from antiphon.gateway.access.access import Access
from antiphon.gateway.access.keys import KeysFile
from antiphon.gateway.http.core.app import http_server
from antiphon.gateway.http.core.auth import auth_middleware, is_admin
from antiphon.gateway.http.core.body_reader import BodyReader
from antiphon.gateway.http.core.detached import DetachedTasks
from antiphon.gateway.http.core.operation import routes
from antiphon.gateway.http.core.request_metrics import metrics_middleware
from antiphon.gateway.http.core.root_path import prefix_of
from antiphon.gateway.http.families import all_operations
from antiphon.gateway.metrics import GatewayMetrics
from antiphon.gateway.model_metrics import Exposition
from antiphon.gateway.nats.embeddings import NatsEmbeddingEndpoints
from antiphon.gateway.nats.generate import NatsGenerationEndpoints
from antiphon.gateway.owner.driver import OwnerDriver
from antiphon.gateway.owner.machine import Owner, OwnerLimits
from antiphon.gateway.request_log.crash_dump import dump_on_quit
from antiphon.gateway.request_log.request_log import RequestLog
from antiphon.gateway.requests.submission import Submission
from antiphon.gateway.requests.tokenizer_client import TokenizerClient
from antiphon.model_card.served_model import served_name, served_names
from antiphon.service.endpoint import StreamEndpoint
from antiphon.service.message_limits import OPEN_ENTRY_BYTES, check_message_fits
from antiphon.service.metrics_publisher import report_of
from antiphon.service.probes import probe_routes
from antiphon.service.service import Report
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import ABORT, METRICS, NOTICE, TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from antiphon.config.settings import Settings
    from antiphon.gateway.model_metrics import ModelMetrics
    from antiphon.service.endpoint import Endpoint
    from antiphon.service.service import Runtime
    from antiphon.wire.abort import AbortRequests
    from antiphon.wire.ids import ModelName


class GatewayService:
    """Serves one model over HTTP and NATS."""

    role = Role.GATEWAY

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model = served_name(settings)
        self.port = 0
        """HTTP port, after the lifespan has begun."""

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[None]:
        """Bind the HTTP port first: without it nothing else needs to start.

        Raises:
            CannotStart: The port is in use, or the address is not local.
            ConfigError: The keys file or `gateway.root_path` is not usable.
        """
        gateway, rules = self._settings.gateway, self._settings.access
        self._runtime = runtime
        check_message_fits(
            "gateway.requests_max",
            gateway.requests_max,
            each_bytes=OPEN_ENTRY_BYTES,
            message_bytes_max=runtime.bus.transport.payload_bytes_max,
        )
        metrics = GatewayMetrics(runtime.metrics, self._settings.metrics)
        self._model_metrics = self._show_model(runtime)
        runtime.metrics.before_collect(metrics.flush_inter_token_latencies)
        keys = KeysFile(rules.keys_file) if rules.keys_file else None
        access = Access(rules, keys.read() if keys else Tenants(), runtime.clock.now)
        metrics.add_tenants(access.names)
        limits = OwnerLimits(
            unread_bytes_max=gateway.unread_bytes_max, open_list_s=gateway.open_list_s
        )
        owner = Owner(runtime.process, self._model, runtime.clock, limits)
        self._driver = driver = OwnerDriver(owner, runtime, self._model, metrics)
        tokenizers = TokenizerClient(runtime, self._model)
        self._request_log = requests = RequestLog(runtime, self._model)
        await asyncio.to_thread(requests.check_folders)
        self._submission = submission = Submission(
            runtime, self._model, driver, tokenizers, metrics, access, requests
        )
        self._generations = NatsGenerationEndpoints(
            runtime, self._model, submission, driver, metrics, access
        )
        self._embeds = NatsEmbeddingEndpoints(
            served_names(self._settings), submission, driver, tokenizers, metrics, access
        )
        self._detached = detached = DetachedTasks(runtime.group)
        bodies = BodyReader()
        served = all_operations(
            runtime,
            self._model,
            submission,
            driver,
            tokenizers,
            metrics,
            access,
            detached,
            bodies,
            self._model_metrics.ports,
            requests,
        )
        metrics.watch_open(lambda: driver.open_count)
        probes = probe_routes(runtime.health, runtime.metrics, partial(is_admin, access))
        paths = (*routes(served), *probes)
        watch = auth_middleware(access, served, metrics, header_bytes_max=gateway.header_bytes_max)
        counts = metrics_middleware(metrics)
        prefix = prefix_of(gateway.root_path, (route.path for route in paths))
        server = http_server(gateway, paths, watch, rules.origins, counts, prefix)
        async with bodies, server as self.port:
            driver.start()
            if keys is not None:
                runtime.group.create_task(keys.follow(access, metrics))
            try:
                with self._start_crash_dump():
                    yield
            finally:
                driver.close(Unavailable("this gateway has left", retry_after_s=1.0))
                await self._generations.close()
                await requests.close()

    def endpoints(self) -> Sequence[Endpoint]:
        address = {"gateway": self._runtime.process.instance}
        return (
            StreamEndpoint(route=TEXT, apply=self._driver.on_text_batch, address=address),
            StreamEndpoint(route=NOTICE, apply=self._driver.on_notice, address=address),
            StreamEndpoint(route=ABORT, apply=self._on_abort, address={"model": self._model}),
            StreamEndpoint(route=METRICS, apply=self._model_metrics.take),
            *self._generations.endpoints(),
            *self._embeds.endpoints(),
        )

    @contextmanager
    def _start_crash_dump(self) -> Generator[None]:
        """Write the open requests to a file if the gateway crashes, if a folder is set."""
        requests = self._request_log
        if requests.crash_dump is None:
            yield
            return
        with dump_on_quit(requests.dump):
            try:
                yield
            except BaseException as error:
                if self._runtime.health.state is not ProcessState.STARTING:
                    requests.dump(f"the gateway failed: {type(error).__name__}: {error}")
                raise

    def _show_model(self, runtime: Runtime) -> ModelMetrics:
        # `/metrics` covers the whole model.
        own = partial(report_of, self, runtime)
        now = runtime.clock.now
        page = Exposition(self._settings.metrics, self._model, runtime.process, now, own)
        runtime.metrics.show(page.collect)
        return page.metrics

    def _on_abort(self, message: AbortRequests) -> None:
        sender = message.sender or self._runtime.process
        if self._runtime.peers.is_expired(message.not_after_unix_ms, sender):
            self._runtime.metrics.late.labels(ABORT.name).inc()
        else:
            self._submission.abort(message.prefix, tenant=message.tenant, exact=message.exact)

    def model(self) -> ModelName | None:
        return self._model

    def report(self) -> Report:
        return Report(load=self._driver.open_count)

    async def drain(self) -> None:
        """Return when every open request has ended and was sent over NATS or stored.

        HTTP clients are waited for when the server closes.
        """
        await self._driver.idle()
        await self._generations.idle()
        await self._detached.idle()
