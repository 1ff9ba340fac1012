"""Operator commands: flush, abort, pause, continue, set the weight version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.core.limits import SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.reply import json_reply
from antiphon.wire.command import (
    ContinueWorker,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.requests.submission import Submission
    from antiphon.gateway.worker_control import WorkerControl

FLUSH_WAIT_MAX_S = 600.0


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Abort the requests whose ids start with `rid`, or all requests."""

    rid: Annotated[
        Annotated[str, Meta(max_length=256)],
        Meta(description="Prefix of the ids of the requests to abort."),
    ] = ""
    abort_all: Annotated[bool, Meta(description="Whether to abort all requests.")] = False


class PauseBody(msgspec.Struct, frozen=True):
    """Pause generation.

    With `abort` running requests are aborted; otherwise they continue later.
    """

    mode: Annotated[PauseMode, Meta(description="What to do with running requests.")] = (
        PauseMode.ABORT
    )


class ContinueBody(msgspec.Struct, frozen=True):
    """Continue generation. The body has no fields."""


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Set the weight version. Cached prefixes of the old version are not reused."""

    new_version: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)],
        Meta(description="The new weight version."),
    ]
    abort_all_requests: Annotated[
        bool, Meta(description="Whether to abort all running requests.")
    ] = True


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation that every worker applied the command."""

    success: bool = True
    status: str = "ok"
    message: str


class WeightVersionReply(ControlReply, frozen=True, kw_only=True):
    """Confirmation of the new weight version."""

    new_version: str


class ControlEndpoints:
    """Handlers for operator commands, which go to every worker of the model."""

    def __init__(
        self, response_handler: ResponseHandler, submission: Submission, workers: WorkerControl
    ) -> None:
        self._response_handler = response_handler
        self._submission = submission
        self._workers = workers

    def operations(self) -> list[Operation]:
        """Return the operations."""
        return [
            *(
                Operation(
                    method=method,
                    path="/flush_cache",
                    admin=True,
                    handler=self._flush,
                    summary="Flush the prefix cache of every worker. Fails with 400 "
                    "while requests are running or queued.",
                    query={
                        "timeout": "Seconds to wait until no request is running. Defaults to 0."
                    },
                )
                for method in ("GET", "POST")
            ),
            Operation(
                method="POST",
                path="/abort_request",
                admin=True,
                handler=self._abort,
                summary="Abort requests, whichever gateway owns them.",
                body=AbortBody,
                examples=({"rid": "mine"},),
            ),
            Operation(
                method="POST",
                path="/pause_generation",
                admin=True,
                handler=self._pause,
                summary="Pause generation on every worker.",
                body=PauseBody,
                reply=ControlReply,
                examples=({"mode": "in_place"},),
            ),
            Operation(
                method="POST",
                path="/continue_generation",
                admin=True,
                handler=self._continue,
                summary="Continue generation on every worker.",
                body=ContinueBody,
                reply=ControlReply,
                examples=({},),
            ),
            Operation(
                method="POST",
                path="/update_weight_version",
                admin=True,
                handler=self._name_weights,
                summary="Set the weight version. Cached prefixes of the old version "
                "are not reused.",
                body=VersionBody,
                reply=WeightVersionReply,
                examples=({"new_version": "2", "abort_all_requests": False},),
            ),
        ]

    async def _flush(self, request: web.Request) -> web.Response:
        pages = await self._workers.flush(_seconds(request.query.get("timeout", "0")))
        if pages is None:
            raise InvalidRequest(
                "the cache was not flushed: requests are running or queued; set timeout to "
                "wait for them"
            )
        return web.Response(text=f"Cache flushed: {pages} pages.\n")

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self._response_handler.parse_body(
            request, AbortBody, _checked, bytes_max=SMALL_BODY_BYTES_MAX
        )
        self._submission.abort(body.rid)
        await self._workers.abort_elsewhere(body.rid)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._response_handler.parse_body(
            request, PauseBody, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )
        done = await self._workers.command(PauseWorker(mode=body.mode))
        running = sum(each.requests for each in done)
        return json_reply(
            ControlReply(message=f"Generation paused; {running} requests were running.")
        )

    async def _continue(self, request: web.Request) -> web.Response:
        await self._response_handler.parse_body(
            request, ContinueBody, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )
        await self._workers.command(ContinueWorker())
        return json_reply(ControlReply(message="Generation continued."))

    async def _name_weights(self, request: web.Request) -> web.Response:
        body = await self._response_handler.parse_body(
            request, VersionBody, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )
        await self._workers.command(
            SetWeightVersion(version=body.new_version, abort_all=body.abort_all_requests)
        )
        return json_reply(
            WeightVersionReply(
                message=f"The weight version is '{body.new_version}'.",
                new_version=body.new_version,
            )
        )


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
        text = f"timeout: must be a number of seconds from 0 to {FLUSH_WAIT_MAX_S:g}"
        raise InvalidRequest(text, param="timeout")
    return seconds
