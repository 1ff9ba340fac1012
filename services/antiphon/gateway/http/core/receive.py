"""Receives request bodies: JSON, and multipart forms with one file (RFC 7578).

Limits of size and time hold while a body arrives.
"""

from __future__ import annotations

import asyncio
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    hdrs,
    web,
)
from aiohttp.http_exceptions import HttpProcessingError
from msgspec.inspect import BoolType, FloatType, IntType, ListType, Type, type_info

from antiphon.wire.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

BODY_S = 60.0
"""Maximum time to receive a body, in seconds."""
FIELDS_MAX = 64
"""Maximum number of fields of a form."""
FIELD_BYTES_MAX = 64 * 1024
"""Maximum size of a field that is not the file."""
_CHUNK_BYTES = 64 * 1024
_INSIDE = "["
"""Begins what a name says of its place in a field: `include[]`, `chunking_strategy[type]`."""
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_BROKEN_FORM = (ValueError, RuntimeError, AssertionError, LookupError, HttpProcessingError)
"""What aiohttp raises on a body that is no such form."""


def ignore_warnings() -> None:
    """Ignore aiohttp's warnings of headers: Python keeps each text of one for ever, and logs it."""
    for kind in (BadContentDispositionHeader, BadContentDispositionParam):
        warnings.simplefilter("ignore", kind)


ignore_warnings()


async def read_json(request: web.Request, bytes_max: int, count: Callable[[int], None]) -> bytes:
    """Read a body. `count` may reject it; it gets the size of each piece before that is kept."""
    if request.content_type != "application/json" and not _accepts_untyped(request):
        raise InvalidRequest(
            f"Unsupported Media Type: send application/json, not {request.content_type}"
        )
    _check_size(request, bytes_max)
    async with _receiving("the body is incomplete or cannot be decoded"):
        return await _read(request, bytes_max, count)


def _accepts_untyped(request: web.Request) -> bool:
    """Whether the content type is optional: Ollama's users send `curl -d`, which declares a form.

    A request from a web page, which has an origin, must not bypass the preflight that way.
    """
    return request.path.startswith("/api/") and "Origin" not in request.headers


async def _read(request: web.Request, bytes_max: int, count: Callable[[int], None]) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        count(len(chunk))
        body += chunk
        if len(body) > bytes_max:
            raise RequestTooLarge.of(size_bytes=len(body), bytes_max=bytes_max)
    return bytes(body)


class Form(NamedTuple):
    """A form: the texts of its fields by name, and the bytes of its file; None: it has none."""

    fields: Mapping[str, list[str]]
    file: bytearray | None

    def json(self, kind: type[msgspec.Struct]) -> bytes:
        """The fields as a JSON object of this kind: texts are numbers, or true, where it has such.

        Of fields that are no lists the last text counts. What is no such text stays one.
        """
        types = {each.encode_name: type_info(each.type) for each in msgspec.structs.fields(kind)}
        return msgspec.json.encode(
            {name: _value(texts, types.get(name)) for name, texts in self.fields.items()}
        )


async def read_form(
    request: web.Request, file_bytes_max: int, count: Callable[[int], None]
) -> Form:
    """Read the form in a request's body, whose file is the field `file`.

    `count` may reject it; it gets the size of each piece before that is kept.

    Raises:
        InvalidRequest: It is no such form, or was not received in time.
        RequestTooLarge: The file or a field is too large, or there are too many fields.
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest(
            f"Unsupported Media Type: send multipart/form-data, not {request.content_type}"
        )
    _check_size(request, file_bytes_max, file_bytes_max + FIELDS_MAX * FIELD_BYTES_MAX)
    async with _receiving("the body is incomplete, or no multipart form", *_BROKEN_FORM):
        return await _read_parts(request, file_bytes_max, count)


def _check_size(request: web.Request, bytes_max: int, whole_max: int | None = None) -> None:
    """Reject by its header a body larger than `whole_max`; the limit that it names is the other."""
    size_bytes = request.content_length or 0
    if size_bytes > (whole_max or bytes_max):
        raise RequestTooLarge.of(size_bytes=size_bytes, bytes_max=bytes_max)


@asynccontextmanager
async def _receiving(broken: str, *errors: type[Exception]) -> AsyncGenerator[None]:
    """While this is entered a body arrives in time; what these errors say of it is `broken`."""
    try:
        async with asyncio.timeout(BODY_S):
            yield
    except TimeoutError:
        raise InvalidRequest(f"the body was not received within {BODY_S:g} s") from None
    except (web.RequestPayloadError, *errors) as error:
        raise InvalidRequest(broken) from error


async def _read_parts(
    request: web.Request, file_bytes_max: int, count: Callable[[int], None]
) -> Form:
    reader = await request.multipart()
    fields, file = dict[str, list[str]](), None
    for _ in range(FIELDS_MAX + 1):
        if (part := await reader.next()) is None:
            return Form(fields, file)
        if not isinstance(part, BodyPartReader) or not (name := _name(part)):
            raise InvalidRequest("a part of the form has no name")
        if hdrs.CONTENT_TRANSFER_ENCODING in part.headers or hdrs.CONTENT_ENCODING in part.headers:
            raise InvalidRequest("parts of the form must not be encoded", param=name)
        is_file = name == "file"
        bytes_max = file_bytes_max if is_file else FIELD_BYTES_MAX
        content = await _content(part, name, bytes_max, count)
        if is_file:
            if file is not None:
                raise InvalidRequest("the form has several files", param="file")
            file = content
        else:
            fields.setdefault(name, []).append(_text(content, name))
    raise RequestTooLarge(f"the form has more than {FIELDS_MAX} fields")


def _name(part: BodyPartReader) -> str:
    """The field that a part belongs to."""
    name = (part.name or "").partition(_INSIDE)[0]
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("a name in the form is not UTF-8") from error
    return name


async def _content(
    part: BodyPartReader, name: str, bytes_max: int, count: Callable[[int], None]
) -> bytearray:
    content = bytearray()
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        count(len(chunk))
        if len(content) + len(chunk) > bytes_max:
            error = RequestTooLarge.of(size_bytes=len(content) + len(chunk), bytes_max=bytes_max)
            error.param = name
            raise error
        content += chunk
    return content


def _text(content: bytearray, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8", param=name) from error


def _value(texts: list[str], kind: Type | None) -> object:
    text = texts[-1]
    match kind:
        case ListType():
            return texts
        case BoolType():
            return _TRUTHS.get(text.lower(), text)
        case FloatType() | IntType():
            try:
                return msgspec.json.decode(text, type=float | int)
            except (msgspec.DecodeError, ValueError):  # the second of thousands of digits
                return text
        case _:
            return text
