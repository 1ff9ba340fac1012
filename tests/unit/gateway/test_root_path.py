"""A gateway behind a proxy that serves it under a path prefix."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.arguments import compare_async, settings_of
from tests.unit.gateway.calls import CHAT, GENERATE, HI, chunks, get, ok, post
from tests.unit.gateway.cluster import House, fails_to_start, house
from tests.unit.gateway.keyed import bearer, key_of, keyed

from antiphon.config.errors import ConfigError
from antiphon.gateway.http.core.app import prefix_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from antiphon.config.settings import Settings


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(root_path="/llm/a/") as world:
        yield world


@pytest.mark.argument("--fastapi-root-path")
async def test_fastapi_root_path_serves_paths_with_the_prefix_and_names_it() -> None:
    async def seen(settings: Settings) -> tuple[int, object, object]:
        """The status under the prefix, a link, and the servers of the OpenAPI document."""
        async with house(root_path=settings.gateway.root_path) as at:
            status = (await get(at, "/llm/v1/models")).status
            root = (await get(at, "/")).body
            document = (await get(at, "/openapi.json")).body
        return status, root["links"]["models"], document.get("servers")

    given, without = await compare_async("--fastapi-root-path", "/llm", observe=seen)
    assert given == (200, "/llm/v1/models", [{"url": "/llm"}])
    assert without == (404, "/v1/models", None)


@pytest.mark.parametrize("prefix", ["", "/llm/a"])
async def test_request_is_served_with_the_prefix_and_without_it(at: House, prefix: str) -> None:
    await ok(at, f"{prefix}{CHAT}", {"messages": HI})
    await chunks(at, f"{prefix}{GENERATE}", {"text": "hi"})
    status, loads, _ = await get(at, f"{prefix}/v1/loads?include=core&dp_rank=0")
    assert (status, len(loads["loads"])) == (200, 1)
    assert (await get(at, f"{prefix}/")).status == 200


async def test_prefix_alone_is_the_root(at: House) -> None:
    for path in ("/llm/a", "/llm/a?x=1"):
        assert (await get(at, path)).body["name"] == "antiphon"


@pytest.mark.parametrize(
    "path", ["/llm/v1/models", "/llm/ab/v1/models", "/x/llm/a/v1/models", "/llm/a/llm/a/v1/models"]
)
async def test_other_prefixes_are_not_found(at: House, path: str) -> None:
    status, reply, _ = await get(at, path)
    assert (status, reply["error"]["code"]) == (404, "not_found")


async def test_errors_under_the_prefix_have_the_shape_of_their_family(at: House) -> None:
    status, reply, _ = await post(at, "/llm/a/v1/messages", {"messages": HI})
    assert (status, reply["type"]) == (400, "error")
    status, reply, _ = await post(at, "/llm/a/api/chat", {"model": "none", "messages": HI})
    assert (status, type(reply["error"])) == (404, str)


async def test_keys_and_roles_hold_under_the_prefix(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"a": {}}), root_path="/llm") as at:
        key = bearer(key_of("a"))
        assert (await get(at, "/llm/v1/models")).status == 401
        assert (await get(at, "/llm/v1/models", **key)).status == 200
        assert (await post(at, "/llm/flush_cache", {}, **key)).status == 403
        assert (await get(at, "/llm/health")).status == 200


async def test_absolute_target_is_served_under_the_prefix(at: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", at.service.port)
    writer.write(b"GET http://proxy/llm/a/v1/models HTTP/1.1\r\nHost: proxy\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "path", ["llm", "/a b", "/a//b", "//", "/..", "/a/./b", "/a?b", "/%41", "/é"]
)
def test_root_path_that_is_no_plain_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path"):
        settings_of("--fastapi-root-path", path)


@pytest.mark.parametrize("path", ["", "/", "/llm", "/llm/", "/a.b/c-d/e_f~"])
def test_plain_paths_are_taken(path: str) -> None:
    assert prefix_of(settings_of("--fastapi-root-path", path).gateway.root_path, ()) == (
        path.rstrip("/")
    )


@pytest.mark.parametrize("path", ["/v1", "/v1/chat", "/api/", "/metrics"])
async def test_prefix_of_own_paths_is_refused_at_start(path: str) -> None:
    await fails_to_start(ConfigError, "the API's own path", root_path=path)
