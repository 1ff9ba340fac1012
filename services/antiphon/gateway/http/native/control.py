"""What an operator tells a running server: flush, abort, pause, go on, another weight version."""

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
    """POST /abort_request: the requests whose names begin so, or all."""

    rid: Annotated[str, Meta(max_length=256)] = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, frozen=True):
    """POST /pause_generation: `abort` ends what runs, the others go on with it later."""

    mode: PauseMode = PauseMode.ABORT


class ContinueBody(msgspec.Struct, frozen=True):
    """POST /continue_generation. There is nothing to say."""


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /update_weight_version."""

    new_version: Annotated[str, Meta(min_length=1, max_length=256)]
    abort_all_requests: bool = True


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    """An order was obeyed by every worker."""

    success: bool = True
    status: str = "ok"
    message: str


class WeightsNamed(ControlReply, frozen=True, kw_only=True):
    """The weights have a new name."""

    new_version: str


class ControlEndpoints:
    """Orders go to every worker of the model, whichever gateway takes them."""

    def __init__(
        self, response_handler: ResponseHandler, submission: Submission, workers: WorkerControl
    ) -> None:
        self._response_handler = response_handler
        self._submission = submission
        self._workers = workers

    def operations(self) -> list[Operation]:
        """All orders."""
        return [
            *(
                Operation(
                    method=method,
                    path="/flush_cache",
                    admin=True,
                    handler=self._flush,
                    summary="Drops the prefix cache of every worker; 400 while requests run.",
                    query={"timeout": "Seconds to wait until nothing runs; 0 unless said."},
                )
                for method in ("GET", "POST")
            ),
            Operation(
                method="POST",
                path="/abort_request",
                admin=True,
                handler=self._abort,
                summary="Ends requests as aborted, whichever gateway owns them.",
                body=AbortBody,
                examples=({"rid": "mine"},),
            ),
            Operation(
                method="POST",
                path="/pause_generation",
                admin=True,
                handler=self._pause,
                summary="Runs no more steps until told to go on.",
                body=PauseBody,
                reply=ControlReply,
                examples=({"mode": "in_place"},),
            ),
            Operation(
                method="POST",
                path="/continue_generation",
                admin=True,
                handler=self._continue,
                summary="Runs steps again.",
                body=ContinueBody,
                reply=ControlReply,
                examples=({},),
            ),
            Operation(
                method="POST",
                path="/update_weight_version",
                admin=True,
                handler=self._name_weights,
                summary="Names the weights anew; nothing that was cached is found again.",
                body=VersionBody,
                reply=WeightsNamed,
                examples=({"new_version": "2", "abort_all_requests": False},),
            ),
        ]

    async def _flush(self, request: web.Request) -> web.Response:
        pages = await self._workers.flush(_seconds(request.query.get("timeout", "0")))
        if pages is None:
            raise InvalidRequest("the cache was not flushed: requests run or wait")
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
        met = sum(each.requests for each in done)
        return json_reply(ControlReply(message=f"Generation paused; {met} answers were under way."))

    async def _continue(self, request: web.Request) -> web.Response:
        await self._response_handler.parse_body(
            request, ContinueBody, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )
        await self._workers.command(ContinueWorker())
        return json_reply(ControlReply(message="Generation goes on."))

    async def _name_weights(self, request: web.Request) -> web.Response:
        body = await self._response_handler.parse_body(
            request, VersionBody, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )
        await self._workers.command(
            SetWeightVersion(version=body.new_version, abort_all=body.abort_all_requests)
        )
        return json_reply(
            WeightsNamed(
                message=f"The weights are called '{body.new_version}'.",
                new_version=body.new_version,
            )
        )


def _checked(body: AbortBody) -> AbortBody:
    if not body.rid and not body.abort_all:
        raise InvalidRequest("name a rid, or say abort_all", param="rid")
    return AbortBody(rid="" if body.abort_all else body.rid)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= FLUSH_WAIT_MAX_S:
        text = f"timeout: seconds from 0 to {FLUSH_WAIT_MAX_S:g}"
        raise InvalidRequest(text, param="timeout")
    return seconds
