"""Whatever a cached page depends on changes its key, wherever such a key is formed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.worker import page_group, state

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits
from antiphon.model_worker.cache.events import BlockTracker
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES
from antiphon.wire.kv_events import BlocksStored
from antiphon.wire.namespaces import (
    PUBLIC,
    PageOrigin,
    announced_root,
    cache_namespace,
    cache_salt,
    prompt_digests,
    stored_name,
    tenant_salt,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.request import Request

PROMPT = [5] * (BLOCK_TOKENS + 1)
ORIGIN = PageOrigin(model_digest="m")
SHARD = RankLayout().shard(0)
LIMITS = EngineLimits(
    step_tokens_max=256,
    chunk_tokens=None,
    running_max=4,
    context_tokens=128,
    vocab_size=9,
    end_ids=frozenset(),
    weights_digest="",
)

Dependencies = tuple[PageOrigin, bytes]
"""All that a page depends on: its origin, and what the request brings."""

CHANGES: dict[str, Dependencies] = {
    **{
        name: (msgspec.structs.replace(ORIGIN, **{name: "x"}), b"")
        for name in PageOrigin.__struct_fields__
    },
    "salt": (ORIGIN, cache_salt("x")),
    "extra key": (ORIGIN, cache_salt(None, "x")),
    "tenant": (ORIGIN, tenant_salt("x", b"")),
    "other tenant": (ORIGIN, tenant_salt("y", b"")),
    "salt of a tenant": (ORIGIN, tenant_salt("x", cache_salt("x"))),
}
"""What a page may depend on, each changed alone."""


def started(origin: PageOrigin, salt: bytes) -> tuple[EngineCore, Request]:
    """An engine core of this origin, in which a request with this salt has started."""
    pools = CachePools([page_group(64)])
    core = EngineCore(LIMITS, pools, RadixIndex(pools, tracker=BlockTracker()), origin=origin)
    core.add(ChoiceKey(1), state(PROMPT, cache_salt=salt), 0.0)
    core.next_rows(0.0)
    return core, core.running[0]


def tree(origin: PageOrigin, salt: bytes) -> bytes:
    core, request = started(origin, salt)
    request.running_table.commit(BLOCK_TOKENS)
    core.batch.computed[request.slot] = BLOCK_TOKENS
    core.batch.cache_prefix(request)
    (root,) = core.index._tree._roots
    return root


def prefills_in_flight(origin: PageOrigin, salt: bytes) -> bytes:
    core, _ = started(origin, salt)
    ((namespace, _),) = core.batch.prefixes._leaders
    return namespace


def events(origin: PageOrigin, salt: bytes) -> bytes:
    core, request = started(origin, salt)
    core.batch.computed[request.slot] = BLOCK_TOKENS
    core.batch.cache_prefix(request)
    (event,) = core.index.take_events()
    assert isinstance(event, BlocksStored)
    return event.digests


def prompts(origin: PageOrigin, salt: bytes) -> bytes:
    """Tokenizers and gateways call this; each has a test of its own that it does."""
    return prompt_digests(origin, salt, pack_ids(PROMPT))


def stored_blocks(origin: PageOrigin, salt: bytes) -> bytes:
    block = prompts(origin, salt)[:DIGEST_BYTES]
    return stored_name(cache_namespace(origin, salt), block, SHARD)


def test_each_shard_of_a_block_has_a_name_of_its_own() -> None:
    namespace, block = cache_namespace(ORIGIN), bytes(DIGEST_BYTES)
    layouts = [RankLayout(), RankLayout(tp=2), RankLayout(pp=2), RankLayout(tp=2, pp=2)]
    shards = [layout.shard(rank) for layout in layouts for rank in range(layout.ranks)]
    assert len({stored_name(namespace, block, shard) for shard in shards}) == 1 + 2 + 2 + 4


PRIVATE = (tree, prefills_in_flight, stored_blocks)
"""Consumers that know everything."""
SHARED = (events, prompts)
"""Those whose keys are compared between services."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("key", PRIVATE, ids=lambda key: key.__name__)
def test_each_dependency_changes_the_key(
    key: Callable[[PageOrigin, bytes], bytes], change: str
) -> None:
    assert key(*CHANGES[change]) != key(ORIGIN, b"")


@pytest.mark.parametrize("key", SHARED, ids=lambda key: key.__name__)
def test_keys_between_services_depend_on_what_each_service_knows(
    key: Callable[[PageOrigin, bytes], bytes],
) -> None:
    changing = {name for name, change in CHANGES.items() if key(*change) != key(ORIGIN, b"")}
    assert changing == CHANGES.keys() - (set(PageOrigin.__struct_fields__) - PUBLIC)


@pytest.mark.parametrize("key", [*PRIVATE, *SHARED], ids=lambda key: key.__name__)
def test_no_two_dependencies_give_one_key(key: Callable[[PageOrigin, bytes], bytes]) -> None:
    keys = {name: key(*change) for name, change in CHANGES.items()}
    differing = {name: one for name, one in keys.items() if one != key(ORIGIN, b"")}
    assert len(set(differing.values())) == len(differing)


def test_events_of_a_worker_are_compared_with_prompts() -> None:
    for origin, salt in CHANGES.values():
        assert events(origin, salt) == prompts(origin, salt)


def test_namespace_is_rooted_in_what_services_share() -> None:
    namespaces = [cache_namespace(*change) for change in CHANGES.values()]
    assert {len(namespace) for namespace in namespaces} == {2 * DIGEST_BYTES}
    assert len({namespace[DIGEST_BYTES:] for namespace in namespaces}) == len(namespaces)
    assert {announced_root(namespace) for namespace in namespaces[2:5]} == {
        announced_root(cache_namespace(ORIGIN))
    }
