"""One HTTP operation: its path, body, reply and handler."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec
from aiohttp import web
from msgspec import inspect

from antiphon.config.fields import help_texts
from antiphon.gateway.http.core.errors import shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiohttp.typedefs import Handler

    from antiphon.wire.errors import EngineError

Object = dict[str, object]
_REF = "#/components/schemas/{name}"
_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


@dataclass(frozen=True)
class Operation:
    """The router, the OpenAPI document and the docs are built from these.

    `path` is a template in aiohttp's notation. `reply` is any type with a schema. `streamed_as` is
    the content type of streams, if the body may request one; `alternative_types` are others, each
    text. `query` describes the query parameters. `admin` operations need the operator's key. The
    body of a `form` is multipart, with a `file` beside its fields.
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
    deprecated: bool = False
    admin: bool = False
    form: bool = False


def routes(operations: Iterable[Operation]) -> list[web.RouteDef]:
    return [
        # GET routes support HEAD too.
        web.get(one.path, one.handler)
        if one.method == "GET"
        else web.route(one.method, one.path, one.handler)
        for one in operations
    ]


def refusal(error: type[EngineError], message: str) -> Handler:
    async def refuse(_: web.Request) -> NoReturn:
        raise error(message)

    return refuse


def json_reply(body: msgspec.Struct | Sequence[msgspec.Struct]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def openapi_operation(operations: Sequence[Operation], prefix: str) -> Operation:
    """Return the operation that serves the document of the others; `prefix` is that of a proxy."""
    whole = document(operations)
    if prefix:
        whole["servers"] = [{"url": prefix}]
    body = msgspec.json.encode(whole)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return Operation("GET", "/openapi.json", answer, "OpenAPI document of this server.")


def document(operations: Sequence[Operation]) -> Object:
    types: set[object] = {
        each
        for one in operations
        for each in (one.body, one.reply, shape_of(one.path).body)
        if each is not None
    }
    ordered = sorted(types, key=str)
    schemas_of_types, components = described_schemas(ordered)
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


def described_schemas(types: Sequence[object]) -> tuple[tuple[Object, ...], dict[str, Object]]:
    """Return JSON schemas and components, where the docstring below a field describes it."""
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    structs: set[type[msgspec.Struct]] = set()
    for info in inspect.multi_type_info(types):
        _add_structs(info, structs)
    for struct in structs:
        texts: dict[str, str] = {}
        for base in reversed(struct.__mro__):
            texts |= _field_texts(base)
        properties = cast("dict[str, Object]", components[struct.__name__].get("properties", {}))
        for name, key in zip(
            struct.__struct_fields__, struct.__struct_encode_fields__, strict=True
        ):
            if name in texts:
                properties[key] = {"description": texts[name]} | properties[key]
    return schemas, components


def _add_structs(info: inspect.Type, found: set[type[msgspec.Struct]]) -> None:
    match info:
        case inspect.StructType(cls=struct):
            if struct not in found:
                found.add(struct)
                for field in info.fields:
                    _add_structs(field.type, found)
        case inspect.UnionType(types=types):
            for one in types:
                _add_structs(one, found)
        case (
            inspect.Metadata(type=inner)
            | inspect.ListType(item_type=inner)
            | inspect.VarTupleType(item_type=inner)
            | inspect.DictType(value_type=inner)
        ):
            _add_structs(inner, found)
        case _:
            pass


def _field_texts(struct: type) -> dict[str, str]:
    if not issubclass(struct, msgspec.Struct) or struct is msgspec.Struct:
        return {}
    texts = help_texts(struct.__module__)
    return {name: text for (owner, name), text in texts.items() if owner == struct.__name__}


def _described(one: Operation, schemas: Mapping[object, Object]) -> Object:
    error = {"schema": {"$ref": _REF.format(name=shape_of(one.path).body.__name__)}}
    described: Object = {
        "summary": one.summary,
        "operationId": f"{one.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', one.path)}",
        "parameters": _parameters(one),
        "responses": {
            "200": _reply(one, schemas),
            "default": {"description": "Error response.", "content": {"application/json": error}},
        },
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
    if one.form:
        file = {"type": "string", "contentMediaType": "application/octet-stream"}
        with_file = {"type": "object", "properties": {"file": file}, "required": ["file"]}
        return {"multipart/form-data": {"schema": {"allOf": [content["schema"], with_file]}}}
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
