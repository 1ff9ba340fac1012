"""One HTTP operation: its path, body, reply and handler."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import msgspec
    from aiohttp.typedefs import Handler

    from antiphon.gateway.http.core.fields import UnsupportedField
    from antiphon.wire.errors import EngineError


@dataclass(frozen=True)
class Operation:
    """The router, the OpenAPI document and the docs are built from these.

    Attributes:
        method: HTTP method, in capitals.
        path: Path template in aiohttp's notation.
        handler: Handles the request.
        summary: One sentence.
        body: Struct of the request body; None without one.
        reply: Type of a JSON response: a struct, or any other type with a schema.
        streamed_as: Content type of streams, if the body may request one.
        alternative_types: Other content types it may return, each as text.
        query: Query parameters, each with its description.
        examples: Example bodies for the document.
        unsupported: Documented fields that are rejected.
        deprecated: Whether another path has replaced it.
        admin: Whether it needs the operator's key, as SGLang's admin key.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    _: KW_ONLY
    body: type[msgspec.Struct] | None = None
    reply: object = None
    streamed_as: str = "text/event-stream"
    alternative_types: tuple[str, ...] = ()
    query: Mapping[str, str] | None = None
    examples: tuple[Mapping[str, object], ...] = ()
    unsupported: Mapping[str, UnsupportedField] = field(
        default_factory=dict[str, "UnsupportedField"]
    )
    deprecated: bool = False
    admin: bool = False


def routes(operations: Iterable[Operation]) -> list[web.RouteDef]:
    """Return the routes for the router."""
    return [
        # GET routes support HEAD too.
        web.get(one.path, one.handler)
        if one.method == "GET"
        else web.route(one.method, one.path, one.handler)
        for one in operations
    ]


def refusal(error: type[EngineError], message: str) -> Handler:
    """Return the handler of a route that is not supported."""

    async def refuse(_: web.Request) -> NoReturn:
        raise error(message)

    return refuse
