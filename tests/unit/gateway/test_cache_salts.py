"""Whom a request shares its cached prefixes with, said at every door and told to the cluster."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import CHAT, COMPLETE, HI, ok, post, refusal
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.keyed import keyed

from antiphon.client import Client
from antiphon.config.gateway import AccessConfig
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import (
    BLOCK_TOKENS,
    block_digests,
    cache_salt,
    namespace,
    salted,
    tenant_salt,
)
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from pathlib import Path

MINE = {"cache_salt": "mine"}
BOTH = {"cache_salt": "mine", "extra_key": "room 5"}
DOORS = {
    CHAT: {"messages": HI},
    COMPLETE: {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/generate": {"text": "hi"},
}
POOLED = {
    "/v1/embeddings": {"input": "hi"},
    "/encode": {"text": "hi"},
    "/v1/classify": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
}


@pytest.mark.parametrize("path", [*DOORS, *POOLED])
async def test_every_door_tells_the_tokenizer_and_the_queue(at: House, path: str) -> None:
    if path in POOLED:
        embeds = path in ("/v1/embeddings", "/encode")
        labels = () if embeds else ("only",)
        at.cluster.pooling = PoolingCard(scores=not embeds, width=2 if embeds else 1, labels=labels)
        at.cluster.vector = lambda _prompt: [0.5] * (2 if embeds else 1)
    body = (DOORS | POOLED)[path]
    for said in ({}, MINE, BOTH, {"extra_key": "mine"}, {"cache_salt": "", "extra_key": None}):
        await ok(at, path, body | said)
    salts = [b"", cache_salt("mine"), cache_salt("mine", "room 5"), cache_salt("", "mine"), b""]
    assert len(set(salts)) == 4
    assert [submit.cache_salt for submit in at.cluster.submits] == salts
    encodes = [each for each in at.cluster.encodes if each.prompt != "-"]  # asks for the card
    assert [each.cache_salt for each in encodes] == salts


async def test_ids_are_named_at_the_gateway_as_a_tokenizer_would_name_them(at: House) -> None:
    ids = [7] * BLOCK_TOKENS
    for said in ({}, MINE):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}} | said
        await ok(at, "/generate", body)
    root = namespace("", "")
    roots = [root, salted(root, cache_salt("mine"))]
    named = [submit.block_digests for submit in at.cluster.submits]
    assert named == [block_digests(each, pack_ids(ids)) for each in roots]
    assert named[0][:32] != named[1][:32]


async def test_each_prompt_of_a_batch_may_bring_its_own(at: House) -> None:
    body = {"text": ["a", "b"], "cache_salt": ["x", "y"], "extra_key": "all"}
    await ok(at, "/generate", body)
    salts = {submit.cache_salt for submit in at.cluster.submits}
    assert salts == {cache_salt("x", "all"), cache_salt("y", "all")}
    assert await refusal(at, "/generate", body | {"cache_salt": ["x"]}) == (400, "cache_salt")  # type: ignore[index]


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("path", [*DOORS, *POOLED])
async def test_what_is_too_long_is_refused(at: House, path: str, field: str) -> None:
    at.cluster.pooling = PoolingCard(width=1, scores=True) if path in POOLED else None
    body = (DOORS | POOLED)[path]
    status, reply, _ = await post(at, path, body | {field: "x" * 257})
    assert status == 400, reply
    assert not at.cluster.submits


async def test_a_client_over_nats_shares_with_those_who_come_over_http(at: House) -> None:
    await post(at, CHAT, {"messages": HI} | MINE)
    async with Client(at.transport(), cluster="test") as client:
        await client.complete(MODEL, "hi", cache_salt="mine")
        with pytest.raises(InvalidRequest):
            await client.complete(MODEL, "hi", cache_salt="x" * 257)
    http, nats = at.cluster.submits
    assert http.cache_salt == nats.cache_salt == cache_salt("mine")


def test_what_was_said_is_not_readable_on_the_bus() -> None:
    secret = "a long secret that nobody should read"
    assert secret.encode() not in base64.b64encode(cache_salt(secret)) + cache_salt(secret)
    assert len(cache_salt(secret)) == 32


@pytest.mark.parametrize("said", [{}, MINE])
async def test_tenants_share_no_prefixes_unless_the_operator_says_so(
    tmp_path: Path, said: dict[str, str]
) -> None:
    ids = [7] * BLOCK_TOKENS
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}} | said
    own = cache_salt(said.get("cache_salt"))
    tenants = {"acme": {}, "globex": {}}
    for shared in (False, True):
        access = keyed(tmp_path, tenants, api_key="sk-plain", share_prefix_cache=shared)
        async with house(access=access) as at:
            for key in ("sk-acme", "sk-globex", "sk-acme", "sk-plain"):
                headers = {"Authorization": f"Bearer {key}"}
                for path, sent in (("/generate", body), (CHAT, {"messages": HI} | said)):
                    await ok(at, path, sent, **headers)
            submits, encodes = at.cluster.submits, at.cluster.encodes
        salts = [submit.cache_salt for submit in submits[::2]]
        if shared:
            assert salts == [own] * 4
        else:
            assert salts == [tenant_salt(name, own) for name in ("acme", "globex", "acme")] + [own]
            assert len(set(salts)) == 3
        # Worker, digests of ids and digests of texts go by one salt.
        assert [submit.cache_salt for submit in submits[1::2]] == salts
        assert [each.cache_salt for each in encodes if each.prompt != "-"] == salts
        roots = [salted(namespace("", ""), salt) for salt in salts]
        named = [submit.block_digests for submit in submits[::2]]
        assert named == [block_digests(root, pack_ids(ids)) for root in roots]


async def test_one_key_for_all_changes_no_digest() -> None:
    async with house(access=AccessConfig(api_key="sk-plain")) as at:
        headers = {"Authorization": "Bearer sk-plain"}
        await post(at, COMPLETE, {"prompt": "hi"}, **headers)
        assert [submit.cache_salt for submit in at.cluster.submits] == [b""]
