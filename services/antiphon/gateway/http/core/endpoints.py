"""Base of the handlers of an API."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from antiphon.gateway.http.core.app import REQUEST_ID
from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.operation import Operation
from antiphon.model_card.served_model import served_names
from antiphon.wire.codec import id_count
from antiphon.wire.errors import UnknownModel
from antiphon.wire.ids import ModelName, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.service.service import Runtime

Method = TypeVar("Method", bound="Callable[..., object]")

_COUNT_S = 30.0


def operation(
    methods: str,
    paths: str,
    summary: str,
    *,
    deprecated: bool = False,
    **options: Any,  # noqa: ANN401
) -> Callable[[Method], Method]:
    """Mark a method of `Endpoints` as the handler of operations with these fields.

    Several methods or paths are separated by a space. A PUT is deprecated: the POST replaces it.
    """

    def mark(method: Method) -> Method:
        method.__dict__["operations"] = [
            partial(
                Operation,
                verb,
                path,
                summary=summary,
                deprecated=deprecated or verb == "PUT",
                **options,
            )
            for path in paths.split()
            for verb in methods.split()
        ] + method.__dict__.get("operations", [])
        return method

    return mark


@dataclass(frozen=True)
class Endpoints:
    """Handlers of an API, each marked with its operations, and what most of them use."""

    response_handler: ResponseHandler
    tokenizers: TokenizerClient
    runtime: Runtime
    model: ModelName

    def operations(self) -> list[Operation]:
        return [
            bind(handler=getattr(self, name))
            for name, method in vars(type(self)).items()
            for bind in getattr(method, "operations", ())
        ]

    @property
    def served(self) -> tuple[ModelName, ...]:
        return served_names(self.runtime.settings)

    def check_model(self, requested: str | None) -> None:
        if requested is not None and requested not in self.served:
            raise UnknownModel.of(requested, self.served)

    async def count_tokens(self, request: web.Request, gen_request: GenerationRequest) -> int:
        """Number of tokens of a prompt, which is not submitted."""
        self.check_model(gen_request.model)
        request[REQUEST_ID] = request_id = new_request_id()
        gen_request = msgspec.structs.replace(gen_request, tenant=tenant_of(request))
        encoded = await self.response_handler.tokenize(gen_request, request_id, _COUNT_S)
        return id_count(encoded.token_ids)
