"""One thing that can be asked over HTTP: its path, its body, its reply, and who answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import msgspec
    from aiohttp.typedefs import Handler

    from antiphon.gateway.http.core.fields import UnsupportedField


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The router, the OpenAPI document and the docs are all made from these.

    Attributes:
        method: In capitals.
        path: As aiohttp writes it.
        summary: A sentence.
        body: What its body is decoded as; None: it has none.
        reply: The type of what it answers with, if that is JSON: a struct, or whatever else a
            schema can be made of.
        streamed_as: The type of its streams, if its body may ask for one.
        told_as: The types of other replies that it may be asked for; each is text.
        query: Names of its query parameters, each with its meaning.
        examples: Bodies that are served, for the document.
        refused: Fields of other servers' bodies that are refused here.
        deprecated: Whether another path has taken its place.
        admin: Whether it is an operator's, as SGLang's admin key has it.
    """

    method: str
    path: str
    handler: Handler
    summary: str
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
    """For the router."""
    return [
        # What can be got answers HEAD, too.
        web.get(one.path, one.handler)
        if one.method == "GET"
        else web.route(one.method, one.path, one.handler)
        for one in operations
    ]
