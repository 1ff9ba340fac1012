"""Operator commands: flush, abort, pause, continue, set the weight version, configure logging."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.config.gateway import STDOUT, TARGETS_MAX, LogFormat, LogLevel, targets
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.limits import SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.request_log.request_log import LoggingOptions
from antiphon.gateway.request_log.writer import folder_of, make_folder
from antiphon.wire.command import ContinueWorker, PauseMode, PauseWorker, SetWeightVersion
from antiphon.wire.errors import Forbidden, InvalidRequest

if TYPE_CHECKING:
    from antiphon.gateway.peers import WorkerControl
    from antiphon.gateway.requests.submission import Submission

FLUSH_WAIT_MAX_S = 600.0

_TARGET = "log_requests_target"
_PICKLE = (
    "requests are not dumped as pickle files, since reading one runs code; log_requests_level 3 "
    "with a folder as log_requests_target writes them as JSON lines"
)
_START = "the crash dump folder is set at startup with --crash-dump-folder"


Place = Annotated[str, Meta(min_length=1, max_length=1024)]


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Abort the requests whose ids start with `rid`, or all requests."""

    rid: Annotated[str, Meta(max_length=256)] = ""
    """Prefix of the ids of the requests to abort."""
    abort_all: bool = False
    """Whether to abort all requests."""


class PauseBody(msgspec.Struct, frozen=True):
    """Pause generation.

    With `abort` running requests are aborted; otherwise they continue later.
    """

    mode: PauseMode = PauseMode.ABORT
    """What to do with running requests."""


class ContinueBody(msgspec.Struct, frozen=True):
    """Continue generation. The body has no fields."""


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Set the weight version. Cached prefixes of the old version are not reused."""

    new_version: Annotated[str, Meta(min_length=1, max_length=256)]
    """The new weight version."""
    abort_all_requests: bool = True
    """Whether to abort all running requests."""


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation that every worker applied the command."""

    success: bool = True
    status: str = "ok"
    message: str


class WeightVersionReply(ControlReply, frozen=True, kw_only=True):
    """Confirmation of the new weight version."""

    new_version: str


class ConfigureLogging(msgspec.Struct, frozen=True, kw_only=True):
    """Change the request log. Fields that are null or absent stay unchanged."""

    log_requests: bool | None = None
    log_requests_level: LogLevel | None = None
    log_requests_format: LogFormat | None = None
    log_requests_target: (
        Annotated[list[Place], Meta(min_length=1, max_length=TARGETS_MAX)] | Place | None
    ) = None

    UNSUPPORTED: ClassVar = {
        "dump_requests_folder": UnsupportedField(_PICKLE, ("",)),
        "dump_requests_threshold": UnsupportedField(_PICKLE, (1000,)),
        "crash_dump_folder": UnsupportedField(_START),
    }


class LoggingConfigured(msgspec.Struct, frozen=True, kw_only=True):
    """The current request log settings."""

    success: bool = True
    message: str
    log_requests: bool
    log_requests_level: int
    log_requests_format: str
    log_requests_target: list[str]


@dataclass(frozen=True)
class ControlEndpoints(Endpoints):
    """Commands go to every worker of the model; logging is configured for this gateway only."""

    submission: Submission
    workers: WorkerControl

    @operation(
        "GET POST",
        "/flush_cache",
        "Flush the prefix cache of every worker. Fails with 400 while requests are running or "
        "queued.",
        query={"timeout": "Seconds to wait until no request is running. Defaults to 0."},
        admin=True,
    )
    async def _flush(self, request: web.Request) -> web.Response:
        pages = await self.workers.flush(_seconds(request.query.get("timeout", "0")))
        if pages is None:
            raise InvalidRequest(
                "the cache was not flushed: requests are running or queued; set timeout to "
                "wait for them"
            )
        return web.Response(text=f"Cache flushed: {pages} pages.\n")

    @operation(
        "POST",
        "/abort_request",
        "Abort requests, whichever gateway owns them.",
        body=AbortBody,
        examples=({"rid": "mine"},),
        admin=True,
    )
    async def _abort(self, request: web.Request) -> web.Response:
        body = await self.response_handler.parse_body(
            request, AbortBody, _checked, bytes_max=SMALL_BODY_BYTES_MAX
        )
        self.submission.abort(body.rid)
        await self.workers.abort_elsewhere(body.rid)
        return web.Response()

    @operation(
        "POST",
        "/pause_generation",
        "Pause generation on every worker.",
        body=PauseBody,
        reply=ControlReply,
        examples=({"mode": "in_place"},),
        admin=True,
    )
    async def _pause(self, request: web.Request) -> web.Response:
        body = await self.response_handler.small_body(request, PauseBody)
        done = await self.workers.command(PauseWorker(mode=body.mode))
        running = sum(each.requests for each in done)
        message = f"Generation paused; {running} requests were running."
        return json_reply(ControlReply(message=message))

    @operation(
        "POST",
        "/continue_generation",
        "Continue generation on every worker.",
        body=ContinueBody,
        reply=ControlReply,
        examples=({},),
        admin=True,
    )
    async def _continue(self, request: web.Request) -> web.Response:
        await self.response_handler.small_body(request, ContinueBody)
        await self.workers.command(ContinueWorker())
        return json_reply(ControlReply(message="Generation continued."))

    @operation(
        "POST",
        "/update_weight_version",
        "Set the weight version. Cached prefixes of the old version are not reused.",
        body=VersionBody,
        reply=WeightVersionReply,
        examples=({"new_version": "2", "abort_all_requests": False},),
        admin=True,
    )
    async def _name_weights(self, request: web.Request) -> web.Response:
        body = await self.response_handler.small_body(request, VersionBody)
        version = body.new_version
        await self.workers.command(
            SetWeightVersion(version=version, abort_all=body.abort_all_requests)
        )
        message = f"The weight version is '{version}'."
        return json_reply(WeightVersionReply(message=message, new_version=version))

    @operation(
        "POST",
        "/configure_logging",
        "Change the request log settings of this gateway.",
        body=ConfigureLogging,
        reply=LoggingConfigured,
        examples=({"log_requests": True, "log_requests_level": 1},),
        admin=True,
    )
    async def _configure_logging(self, request: web.Request) -> web.Response:
        body = await self.response_handler.small_body(request, ConfigureLogging)
        now = self.submission.request_log.logging
        wanted = LoggingOptions(
            enabled=now.enabled if body.log_requests is None else body.log_requests,
            level=now.level if body.log_requests_level is None else body.log_requests_level,
            format=body.log_requests_format or now.format,
            target=now.target if body.log_requests_target is None else _places(body),
        )
        if wanted.enabled:
            for name in wanted.target:
                if name != STDOUT:
                    await self._check_folder(name)
        self.submission.request_log.configure(wanted)
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
        if (
            name not in self.submission.request_log.folders
            and not self.submission.access.admin_guarded
        ):
            raise Forbidden.at(
                _TARGET,
                f"{name} is not in --log-requests-target; other folders are only allowed if the "
                "server has keys (--api-key or --admin-api-key)",
            )
        try:
            await asyncio.to_thread(make_folder, folder_of(name))
        except OSError as error:
            raise InvalidRequest.at(_TARGET, str(error)) from error


def _checked(body: AbortBody) -> AbortBody:
    if not body.rid and not body.abort_all:
        raise InvalidRequest("rid or abort_all is required", param="rid")
    return AbortBody(rid="" if body.abort_all else body.rid)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= FLUSH_WAIT_MAX_S:
        raise InvalidRequest.at(
            "timeout", f"must be a number of seconds from 0 to {FLUSH_WAIT_MAX_S:g}"
        )
    return seconds


def _places(body: ConfigureLogging) -> tuple[str, ...]:
    given = body.log_requests_target
    text = given if isinstance(given, str) else " ".join(given or ())
    try:
        return targets(text)
    except ValueError as error:
        raise InvalidRequest.at(_TARGET, str(error)) from error
