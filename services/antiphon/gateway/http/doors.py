"""Every family of APIs over HTTP, put together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from antiphon.gateway.http.answering import Answering
from antiphon.gateway.http.native.control import Control
from antiphon.gateway.http.native.generation import Generation
from antiphon.gateway.http.native.health import Health
from antiphon.gateway.http.native.info import Info
from antiphon.gateway.http.native.parsing import Parsing
from antiphon.gateway.http.openai.completions import Completions
from antiphon.gateway.http.openai.models import Models
from antiphon.gateway.http.openai.scoring import Scoring
from antiphon.gateway.http.openai.tokens import Tokens
from antiphon.gateway.http.openapi import OpenApi
from antiphon.gateway.sessions import Sessions
from antiphon.gateway.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.driver import Driver
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.entrance import Entrance
    from antiphon.gateway.http.operation import Operation
    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName


def operations(
    runtime: Runtime,
    model: ModelName,
    entrance: Entrance,
    driver: Driver,
    tokenizers: TokenizerCalls,
    metrics: GatewayMetrics,
) -> Sequence[Operation]:
    """All that can be asked."""
    gateway = runtime.settings.gateway
    answering = Answering(entrance, driver, metrics, gateway.body_bytes_max)
    workers = Workers(runtime, model)
    control = Control(answering, entrance, workers)
    sessions = Sessions(runtime.clock.now, partial(entrance.abort, exact=True))
    served = (
        *Completions(answering, tokenizers, runtime, model).operations(),
        *Models(runtime, model, tokenizers).operations(),
        *Tokens(answering, tokenizers, runtime, model).operations(),
        *Scoring(answering, model).operations(),
        *Generation(answering, tokenizers, sessions, runtime).operations(),
        *Info(runtime, model, tokenizers, workers).operations(),
        *Health(runtime, model, answering).operations(),
        *control.operations(),
        *Parsing(answering).operations(),
    )
    return (*served, *OpenApi(served).operations())
