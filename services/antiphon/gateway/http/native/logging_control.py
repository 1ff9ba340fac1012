"""/configure_logging: change this gateway's request log at run time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.config.request_log import STDOUT, TARGETS_MAX, LogFormat, LogLevel, targets
from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.limits import SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.reply import json_reply
from antiphon.gateway.request_log.request_log import LoggingOptions
from antiphon.gateway.request_log.writer import folder_of, make_folder
from antiphon.wire.errors import Forbidden, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from antiphon.gateway.access.access import Access
    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.request_log.request_log import RequestLog

_TARGET = "log_requests_target"
_PICKLE = (
    "requests are not dumped as pickle files, since reading one runs code; log_requests_level 3 "
    "with a folder as log_requests_target writes them as JSON lines"
)
_START = "the crash dump folder is set at startup with --crash-dump-folder"
REFUSED: Mapping[str, UnsupportedField] = {
    "dump_requests_folder": UnsupportedField(_PICKLE, (None, "")),
    "dump_requests_threshold": UnsupportedField(_PICKLE, (None, 1000)),
    "crash_dump_folder": UnsupportedField(_START, (None,)),
}
T = TypeVar("T")
Place = Annotated[str, Meta(min_length=1, max_length=1024)]


class ConfigureLogging(msgspec.Struct, frozen=True, kw_only=True):
    """Change the request log. Fields that are null or absent stay unchanged."""

    log_requests: bool | None = None
    log_requests_level: LogLevel | None = None
    log_requests_format: LogFormat | None = None
    log_requests_target: (
        Annotated[list[Place], Meta(min_length=1, max_length=TARGETS_MAX)] | Place | None
    ) = None


class LoggingConfigured(msgspec.Struct, frozen=True, kw_only=True):
    """The current request log settings."""

    success: bool = True
    message: str
    log_requests: bool
    log_requests_level: int
    log_requests_format: str
    log_requests_target: list[str]


class LoggingEndpoints:
    """Handler of /configure_logging. It changes this gateway only."""

    def __init__(
        self, response_handler: ResponseHandler, request_log: RequestLog, access: Access
    ) -> None:
        self._response_handler = response_handler
        self._request_log = request_log
        self._access = access

    def operations(self) -> list[Operation]:
        """Return the operation."""
        return [
            Operation(
                method="POST",
                path="/configure_logging",
                admin=True,
                handler=self._configure,
                summary="Change the request log settings of this gateway.",
                body=ConfigureLogging,
                reply=LoggingConfigured,
                unsupported=REFUSED,
                examples=({"log_requests": True, "log_requests_level": 1},),
            )
        ]

    async def _configure(self, request: web.Request) -> web.Response:
        body = await self._response_handler.parse_body(
            request, ConfigureLogging, lambda body: body, REFUSED, bytes_max=SMALL_BODY_BYTES_MAX
        )
        now = self._request_log.logging
        wanted = LoggingOptions(
            enabled=_or(body.log_requests, now.enabled),
            level=_or(body.log_requests_level, now.level),
            format=_or(body.log_requests_format, now.format),
            target=now.target if body.log_requests_target is None else _places(body),
        )
        if wanted.enabled:
            for name in wanted.target:
                if name != STDOUT:
                    await self._check_folder(name)
        self._request_log.configure(wanted)
        return json_reply(
            LoggingConfigured(
                message=f"Requests are {'' if wanted.enabled else 'not '}logged.",
                log_requests=wanted.enabled,
                log_requests_level=wanted.level,
                log_requests_format=wanted.format,
                log_requests_target=list(wanted.target),
            )
        )

    async def _check_folder(self, name: str) -> None:
        """Reject a folder that is not usable, or that the caller may not choose."""
        if name not in self._request_log.folders and not self._access.admin_guarded:
            text = (
                f"{_TARGET}: {name} is not in --log-requests-target; other folders are only "
                "allowed if the server has keys (--api-key or --admin-api-key)"
            )
            raise Forbidden(text, param=_TARGET)
        try:
            await asyncio.to_thread(make_folder, folder_of(name))
        except OSError as error:
            raise InvalidRequest(f"{_TARGET}: {error}", param=_TARGET) from error


def _places(body: ConfigureLogging) -> tuple[str, ...]:
    given = body.log_requests_target
    text = given if isinstance(given, str) else " ".join(given or ())
    try:
        return targets(text)
    except ValueError as error:
        raise InvalidRequest(f"{_TARGET}: {error}", param=_TARGET) from error


def _or(value: T | None, other: T) -> T:
    return other if value is None else value
