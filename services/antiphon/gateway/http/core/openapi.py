"""/openapi.json, built from the operations and the structs of their bodies."""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING, cast

import msgspec
from aiohttp import web

from antiphon.gateway.http.core.errors import shape_of
from antiphon.gateway.http.core.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Object = dict[str, object]

_REF = "#/components/schemas/{name}"
_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


class OpenApi:
    """The document, built once; `prefix` is the path prefix of a proxy."""

    def __init__(self, operations: Sequence[Operation], prefix: str = "") -> None:
        whole = document(operations)
        if prefix:
            whole["servers"] = [{"url": prefix}]
        self._document = msgspec.json.encode(whole)

    def operations(self) -> list[Operation]:
        """Return the operation that serves the document, which does not include it."""
        return [
            Operation(
                method="GET",
                path="/openapi.json",
                handler=self._answer,
                summary="OpenAPI document of this server.",
            )
        ]

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")


def document(operations: Sequence[Operation]) -> Object:
    """Describe operations in OpenAPI 3.1."""
    types: set[object] = {
        each
        for one in operations
        for each in (one.body, one.reply, shape_of(one.path).body)
        if each is not None
    }
    ordered = sorted(types, key=str)
    schemas_of_types, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas = dict(zip(ordered, schemas_of_types, strict=True))
    paths: dict[str, Object] = {}
    for one in operations:
        at = paths.setdefault(_VARIABLE.sub(r"{\1}", one.path), {})
        at[one.method.lower()] = _described(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Antiphon", "version": metadata.version("antiphon")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(one: Operation, schemas: Mapping[object, Object]) -> Object:
    described: Object = {
        "summary": one.summary,
        "operationId": f"{one.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', one.path)}",
        "parameters": _parameters(one),
        "responses": {"200": _reply(one, schemas), "default": _error(one)},
    }
    if one.deprecated:
        described["deprecated"] = True
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": _content(one, one.body)}
    return described


def _content(one: Operation, body: type[msgspec.Struct]) -> Object:
    content: Object = {"schema": {"$ref": _REF.format(name=body.__name__)}}
    if one.examples:
        content["examples"] = {
            f"example_{number}": {"value": example}
            for number, example in enumerate(one.examples, start=1)
        }
    return {"application/json": content}


def _reply(one: Operation, schemas: Mapping[object, Object]) -> Object:
    reply: Object = {"description": one.summary}
    if one.reply is not None:
        reply["content"] = {"application/json": {"schema": schemas[one.reply]}}
        fields = set(() if one.body is None else one.body.__struct_fields__)
        content = cast("dict[str, Object]", reply["content"])
        if "stream" in fields:
            content[one.streamed_as] = {"schema": {"type": "string"}}
        content |= {kind: {"schema": {"type": "string"}} for kind in one.alternative_types}
    return reply


def _error(one: Operation) -> Object:
    schema: Object = {"$ref": _REF.format(name=shape_of(one.path).body.__name__)}
    return {
        "description": "Error response.",
        "content": {"application/json": {"schema": schema}},
    }


def _parameters(one: Operation) -> list[Object]:
    text: Object = {"type": "string"}
    in_path: list[Object] = [
        {"name": name, "in": "path", "required": True, "schema": {**text, "minLength": 1}}
        for name in _VARIABLE.findall(one.path)
    ]
    in_query: list[Object] = [
        {"name": name, "in": "query", "description": meaning, "schema": text}
        for name, meaning in (one.query or {}).items()
    ]
    return [*in_path, *in_query]
