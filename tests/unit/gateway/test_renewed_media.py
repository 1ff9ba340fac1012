"""Media of streams that are resumed at another gateway: it holds them from then on."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import web
from tests.support.services import QUICK
from tests.support.wait import until
from tests.unit.gateway.calls import CHAT, Body, Response, post, running_post
from tests.unit.gateway.cluster import SCRIPT, House, house, second_gateway
from tests.unit.gateway.test_media import IMAGES, serving

from antiphon.config.gateway import MediaConfig
from antiphon.gateway.http.core.resume import POSITION_HEADER, RESUME_HEADER
from antiphon.gateway.media import stored
from antiphon.gateway.requests import renewed_media
from antiphon.transfer.blobs import BlobGone, fetch
from antiphon.wire.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.wire.media import Medium
    from antiphon.wire.submit import SubmitRequest

IMAGE, OTHER = IMAGES["png"], IMAGES["gif"]
INLINE = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
RESUME = {RESUME_HEADER: "30"}
LOCAL = msgspec.structs.replace(QUICK, media=MediaConfig(allowed_domains="localhost"))


def shown(url: str) -> Body:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "stream": True}


@asynccontextmanager
async def moved(
    at: House, body: Body, *, lost: bool = False
) -> AsyncGenerator[tuple[SubmitRequest, asyncio.Task[Response]]]:
    """A stream that is resumed at another gateway, and goes on after the block.

    With `lost` the first gateway has lost the media by then, as one that has died.
    """
    at.cluster.sees = True
    async with second_gateway(at) as other, running_post(at, CHAT, body, hold_at=2, **RESUME):
        (submit,) = at.cluster.submits
        for medium in submit.media if lost else ():
            at.service.submission.media._store.discard(medium.claim)
        position = {POSITION_HEADER: submit.request_id}
        async with asyncio.TaskGroup() as group:
            yield submit, group.create_task(post(other, CHAT, body, **RESUME, **position))
            at.cluster.go.set()


async def renewed(at: House) -> Medium:
    """The medium of a request as it was submitted again."""
    await until(lambda: len(at.cluster.submits) > 1)
    first, second = at.cluster.submits
    assert (second.request_id, second.digest) == (first.request_id, first.digest)
    assert second.owner != first.owner
    (before,), (after,) = first.media, second.media
    assert after.claim.token != before.claim.token
    assert msgspec.structs.replace(after, claim=before.claim) == before
    assert await content(after) == IMAGE
    return after


async def content(medium: Medium) -> bytes:
    return bytes(await fetch(medium.claim, timeout_s=5, bytes_max=len(IMAGE)))


@pytest.mark.parametrize("lost", [False, True])
async def test_media_are_held_where_a_stream_is_resumed_until_its_end(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(stored, "HANDOVER_S", 0.0)
    async with house() as at:
        async with moved(at, shown(INLINE), lost=lost) as (submit, resumed):
            medium = await renewed(at)
            await until(lambda: not at.service.submission.media._store.bytes_held)
            at.cluster.go.set()
            await until(resumed.done)
            for each in (*submit.media, medium):
                with pytest.raises(BlobGone, match="no longer"):
                    await content(each)
        assert text(resumed) == "".join(SCRIPT)


@pytest.mark.parametrize("status", [200, 404])
async def test_media_that_are_not_as_they_were_come_from_the_gateway_before(status: int) -> None:
    """Their URL has nothing any more, or another image."""
    asked = list[web.Request]()

    async def source(request: web.Request) -> web.Response:
        asked.append(request)
        if len(asked) == 1:
            return web.Response(body=IMAGE)
        return web.Response(status=status, body=OTHER)

    async with serving(web.get("/a", source)) as port, house(base=LOCAL) as at:
        async with moved(at, shown(f"http://localhost:{port}/a")) as (_, resumed):
            await renewed(at)
        assert len(asked) == 2
        assert text(resumed) == "".join(SCRIPT)


@pytest.mark.parametrize("needed", [False, True])
async def test_stream_whose_media_are_nowhere_ends_with_the_reason_if_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, needed: bool
) -> None:
    monkeypatch.setattr(renewed_media, "PAUSES_S", (0.0, 0.01))
    asked = list[web.Request]()

    async def source(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(body=IMAGE if len(asked) == 1 else OTHER)

    async with serving(web.get("/a", source)) as port, house(base=LOCAL) as at:
        if needed:
            at.cluster.row_error = Unavailable("a gateway is gone", param="media.0")
        url = f"http://localhost:{port}/a"
        async with moved(at, shown(url), lost=True) as (_, resumed):
            await until(lambda: "media not renewed" in caplog.messages)
        assert (len(asked), len(at.cluster.submits)) == (3, 1)
        assert (text(resumed) == "".join(SCRIPT)) == (not needed)
        error = "could not be fetched again: it has other bytes than when the request began"
        assert (error in resumed.result().body) == needed
        assert ("messages[0].content[0].image_url" in resumed.result().body) == needed


def text(resumed: asyncio.Task[Response]) -> str:
    """The text of a chat's stream."""
    status, body, _ = resumed.result()
    assert status == 200, body
    events = [line.removeprefix("data: ") for line in body.splitlines() if line[:6] == "data: "]
    chunks = [msgspec.json.decode(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
