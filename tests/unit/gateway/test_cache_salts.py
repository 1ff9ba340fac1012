"""With whom a request shares cached prefixes: the salt of every API, as it reaches the cluster."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    RESPONSES,
    ok,
    post,
    refusal,
)
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.keyed import bearer, keyed

from antiphon.client import Client
from antiphon.config.gateway import AccessConfig
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.namespaces import PageOrigin, cache_salt, prompt_digests, tenant_salt
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from pathlib import Path

IDS = [7] * BLOCK_TOKENS
ID_BODY = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}}
MINE = {"cache_salt": "mine"}
BOTH = {"cache_salt": "mine", "extra_key": "room 5"}
PATHS = (CHAT, COMPLETE, RESPONSES, GENERATE)
POOLED = {
    "/v1/embeddings": {"input": "hi"},
    "/encode": {"text": "hi"},
    "/v1/classify": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
}


def digests_of(salt: bytes) -> bytes:
    return prompt_digests(PageOrigin(model_digest=""), salt, pack_ids(IDS))


@pytest.mark.parametrize("path", [*PATHS, *POOLED])
async def test_salts_of_every_api_reach_tokenizer_and_queue(at: House, path: str) -> None:
    if path in POOLED:
        embeds = path in ("/v1/embeddings", "/encode")
        labels, vector = ((), [0.5, 0.5]) if embeds else (("only",), [0.5])
        at.cluster.pooling = PoolingCard(scores=not embeds, width=len(vector), labels=labels)
        at.cluster.vector = lambda _: vector
    body = (BODIES | POOLED)[path]
    for fields in ({}, MINE, BOTH, {"extra_key": "mine"}, {"cache_salt": "", "extra_key": None}):
        await ok(at, path, body | fields)
    salts = [b"", cache_salt("mine"), cache_salt("mine", "room 5"), cache_salt("", "mine"), b""]
    assert len(set(salts)) == 4
    assert [submit.cache_salt for submit in at.cluster.submits] == salts
    encodes = [each for each in at.cluster.encodes if each.prompt != "-"]  # asks for the card
    assert [each.cache_salt for each in encodes] == salts


async def test_digests_of_ids_are_those_of_a_tokenizer(at: House) -> None:
    for fields in ({}, MINE):
        await ok(at, GENERATE, ID_BODY | fields)
    digests = [submit.block_digests for submit in at.cluster.submits]
    assert digests == [digests_of(salt) for salt in (b"", cache_salt("mine"))]
    assert digests[0][:32] != digests[1][:32]


async def test_each_prompt_of_a_batch_may_have_its_own_salt(at: House) -> None:
    body = {"text": ["a", "b"], "cache_salt": ["x", "y"], "extra_key": "all"}
    await ok(at, GENERATE, body)
    salts = {submit.cache_salt for submit in at.cluster.submits}
    assert salts == {cache_salt("x", "all"), cache_salt("y", "all")}
    assert await refusal(at, GENERATE, body | {"cache_salt": ["x"]}) == (400, "cache_salt")


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("path", [*PATHS, *POOLED])
async def test_salt_that_is_too_long_is_refused(at: House, path: str, field: str) -> None:
    at.cluster.pooling = PoolingCard(width=1, scores=True) if path in POOLED else None
    body = (BODIES | POOLED)[path] | {field: "x" * 257}
    assert (await post(at, path, body)).status == 400
    assert not at.cluster.submits


async def test_nats_client_shares_prefixes_with_http_clients(at: House) -> None:
    await post(at, CHAT, {"messages": HI} | MINE)
    async with Client(at.transport(), cluster="test") as client:
        await client.complete(MODEL, "hi", cache_salt="mine")
        with pytest.raises(InvalidRequest):
            await client.complete(MODEL, "hi", cache_salt="x" * 257)
    http, nats = at.cluster.submits
    assert http.cache_salt == nats.cache_salt == cache_salt("mine")


def test_salt_is_not_readable_on_the_bus() -> None:
    secret = "a long secret that must not be readable"
    assert secret.encode() not in base64.b64encode(cache_salt(secret)) + cache_salt(secret)
    assert len(cache_salt(secret)) == 32


@pytest.mark.parametrize("fields", [{}, MINE])
@pytest.mark.parametrize("shared", [False, True])
async def test_tenants_share_no_prefixes_unless_configured(
    tmp_path: Path, fields: dict[str, str], shared: bool
) -> None:
    own = cache_salt(fields.get("cache_salt"))
    tenants = {"acme": {}, "globex": {}}
    access = keyed(tmp_path, tenants, api_key="sk-plain", share_prefix_cache=shared)
    async with house(access=access) as at:
        for key in ("sk-acme", "sk-globex", "sk-acme", "sk-plain"):
            for path, body in ((GENERATE, ID_BODY), (CHAT, {"messages": HI})):
                await ok(at, path, body | fields, **bearer(key))
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
    assert [submit.block_digests for submit in submits[::2]] == [digests_of(salt) for salt in salts]


async def test_one_key_for_all_changes_no_digest() -> None:
    async with house(access=AccessConfig(api_key="sk-plain")) as at:
        await ok(at, COMPLETE, {"prompt": "hi"}, **bearer("sk-plain"))
        assert [submit.cache_salt for submit in at.cluster.submits] == [b""]
