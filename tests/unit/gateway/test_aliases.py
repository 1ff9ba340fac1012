"""Every API takes any of the names that `--served-model-name a,b` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.unit.gateway.calls import HI
from tests.unit.gateway.cluster import House, house

from antiphon.config.cluster import ClusterConfig
from antiphon.config.errors import ConfigError
from antiphon.config.load import load

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/show": {},
    "/api/pull": {"stream": False},
}


@pytest.fixture
async def at() -> AsyncGenerator[House]:
    async with house(names="toy, gpt-4o,claude-x") as gate:
        yield gate


async def post(at: House, path: str, model: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(at.url + path, json={"model": model, **BODIES[path]}) as reply,
    ):
        return reply.status, await reply.text()


@pytest.mark.parametrize("path", BODIES)
async def test_api_takes_every_name_and_lists_them_when_it_refuses_one(
    at: House, path: str
) -> None:
    for name in ("toy", "gpt-4o", "claude-x"):
        status, text = await post(at, path, name)
        assert status == 200, (name, text)
    status, text = await post(at, path, "other")
    assert status == 404
    assert "toy, gpt-4o, claude-x" in text


@pytest.mark.parametrize("path", ["/api/chat", "/api/show"])
async def test_ollama_takes_an_alias_with_its_tag(at: House, path: str) -> None:
    assert (await post(at, path, "gpt-4o:latest"))[0] == 200


async def test_models_are_listed_by_every_name(at: House) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{at.url}/v1/models") as reply:
            listed = (await reply.json())["data"]
        async with session.get(f"{at.url}/v1/models/claude-x") as reply:
            one = await reply.json()
    assert [(model["id"], model["root"]) for model in listed] == [
        ("toy", "toy"),
        ("gpt-4o", "toy"),
        ("claude-x", "toy"),
    ]
    assert one == listed[2]


@pytest.mark.parametrize("names", ["a,", ",a", "a,,b", "a,b,a"])
def test_names_that_are_none_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match="cluster: model = "):
        load(environ={"ANTIPHON_CLUSTER__MODEL": names})
    assert ClusterConfig().names == ()
