"""Every API takes any of the names that `--served-model-name a,b` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import BODIES, GENERATE, HI, Body, get, ok, post
from tests.unit.gateway.cluster import House, house

from antiphon.config.cluster import ClusterConfig
from antiphon.config.errors import ConfigError
from antiphon.config.load import load

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATHS: dict[str, Body] = {path: body for path, body in BODIES.items() if path != GENERATE} | {
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/show": {},
    "/api/pull": {"stream": False},
}
"""Of the APIs whose body names a model."""


@pytest.fixture
async def at() -> AsyncGenerator[House]:
    async with house(names="toy, gpt-4o,claude-x") as gate:
        yield gate


@pytest.mark.parametrize("path", PATHS)
async def test_api_takes_every_name_and_lists_them_when_it_refuses_one(
    at: House, path: str
) -> None:
    for name in ("toy", "gpt-4o", "claude-x"):
        await ok(at, path, PATHS[path] | {"model": name})
    status, reply, _ = await post(at, path, PATHS[path] | {"model": "other"})
    assert (status, "toy, gpt-4o, claude-x" in str(reply)) == (404, True)


@pytest.mark.parametrize("path", ["/api/chat", "/api/show"])
async def test_ollama_takes_an_alias_with_its_tag(at: House, path: str) -> None:
    await ok(at, path, PATHS[path] | {"model": "gpt-4o:latest"})


async def test_models_are_listed_by_every_name(at: House) -> None:
    listed = (await get(at, "/v1/models")).body["data"]
    names = [(model["id"], model["root"]) for model in listed]
    assert names == [("toy", "toy"), ("gpt-4o", "toy"), ("claude-x", "toy")]
    assert (await get(at, "/v1/models/claude-x")).body == listed[2]


@pytest.mark.parametrize("names", ["a,", ",a", "a,,b", "a,b,a"])
def test_names_that_are_none_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match="cluster: model = "):
        load(environ={"ANTIPHON_CLUSTER__MODEL": names})
    assert ClusterConfig().names == ()
