"""Keys, tenants and limits, without any API."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from tests.support.clock import ManualClock

from antiphon.config.gateway import AccessConfig
from antiphon.config.tenants import TenantConfig, Tenants
from antiphon.gateway.access.access import Access, AccessLevel, Caller
from antiphon.gateway.requests.generation_request import GenerationRequest, SamplingOptions
from antiphon.wire.errors import (
    EngineError,
    Forbidden,
    InvalidRequest,
    RateLimited,
    Unauthorized,
)
from antiphon.wire.ids import DEFAULT_TENANT, ModelName, TenantId

ACME = TenantId("acme")
MODEL = ModelName("toy")


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenants(**limits: object) -> Tenants:
    """One tenant, `acme`, whose key is `sk-acme`."""
    config = msgspec.convert({"keys": [hashed("sk-acme")], **limits}, TenantConfig)
    return Tenants(tenants={"acme": config})


def access(
    found: Tenants | None = None,
    clock: ManualClock | None = None,
    *,
    api_key: str = "",
    admin_api_key: str = "",
) -> Access:
    config = AccessConfig(
        api_key=api_key,
        admin_api_key=admin_api_key,
        keys_file="" if found is None else "keys.toml",
    )
    return Access(config, found or Tenants(), (clock or ManualClock()).now)


def ask(**fields: object) -> GenerationRequest:
    plain = GenerationRequest(api="test", model=None, prompt="x", tenant=ACME)
    return msgspec.structs.replace(plain, **fields)


def outcome(door: Access, key: str | None, *, admin: bool = False) -> object:
    try:
        return door.authenticate(key, admin=admin)
    except EngineError as error:
        return type(error)


OPERATOR, ADMIN, TENANT = (
    Caller(DEFAULT_TENANT, AccessLevel.OPERATOR),
    Caller(DEFAULT_TENANT, AccessLevel.ADMIN),
    Caller(ACME, AccessLevel.TENANT),
)
KEYS = (None, "", "wrong", "sk-api", "sk-admin", "sk-acme")
NO, NEVER = Unauthorized, Forbidden


@pytest.mark.parametrize(
    ("config", "file", "plain", "orders"),
    [
        # For each of KEYS: what it is for a plain call, and for an operator's.
        ({}, False, [OPERATOR] * 6, [OPERATOR] * 6),
        (
            {"api_key": "sk-api"},
            False,
            [NO, NO, NO, OPERATOR, NO, NO],
            [NO, NO, NO, OPERATOR, NO, NO],
        ),
        (
            {"admin_api_key": "sk-admin"},
            False,
            [OPERATOR, OPERATOR, OPERATOR, OPERATOR, ADMIN, OPERATOR],
            [NO, NO, NO, NO, ADMIN, NO],
        ),
        (
            {"api_key": "sk-api", "admin_api_key": "sk-admin"},
            True,
            [NO, NO, NO, OPERATOR, ADMIN, TENANT],
            [NO, NO, NO, NEVER, ADMIN, NEVER],
        ),
        ({}, True, [NO, NO, NO, NO, NO, TENANT], [NO, NO, NO, NO, NO, NEVER]),
    ],
)
def test_a_key_opens_what_it_is_for(
    config: dict[str, str], file: bool, plain: list[object], orders: list[object]
) -> None:
    door = access(
        tenants() if file else None,
        api_key=config.get("api_key", ""),
        admin_api_key=config.get("admin_api_key", ""),
    )
    assert [outcome(door, key) for key in KEYS] == plain
    assert [outcome(door, key, admin=True) for key in KEYS] == orders


def test_a_key_may_be_bytes_that_are_no_text() -> None:
    door = access(api_key="sk-api")
    assert outcome(door, b"\xff\xfe".decode("utf-8", "surrogateescape")) is Unauthorized


def test_who_claims_a_tenant_shows_its_key() -> None:
    door = access(tenants(), api_key="sk-api")
    assert door.authenticate_tenant("sk-acme", ACME) == ACME
    assert door.authenticate_tenant("sk-api", DEFAULT_TENANT) == DEFAULT_TENANT
    for key, tenant in (("sk-acme", DEFAULT_TENANT), ("sk-api", ACME)):
        with pytest.raises(Forbidden):
            door.authenticate_tenant(key, tenant)
    with pytest.raises(Unauthorized):
        door.authenticate_tenant(None, ACME)
    assert access().authenticate_tenant(None, TenantId("anybody")) == "anybody"


def test_calls_are_counted_by_the_minute() -> None:
    clock = ManualClock()
    door = access(tenants(requests_per_minute=30, requests_burst=2), clock)
    door.count_request(ACME)
    door.count_request(ACME)
    with pytest.raises(RateLimited, match="30 requests per minute") as caught:
        door.count_request(ACME)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    assert caught.value.details == {"limit": "requests_per_minute"}
    door.count_request(DEFAULT_TENANT)
    clock.advance(2.0)
    door.count_request(ACME)


def test_places_are_freed_by_the_end_and_once() -> None:
    door = access(tenants(concurrency=2))
    first, _ = door.admit(ask(), MODEL), door.admit(ask(), MODEL)
    with pytest.raises(RateLimited, match="2 concurrent requests"):
        door.admit(ask(), MODEL)
    first.end(0)
    first.end(0)
    door.admit(ask(), MODEL)
    with pytest.raises(RateLimited):
        door.admit(ask(), MODEL)
    with pytest.raises(InvalidRequest, match="the limit of this key is 2"):
        door.check_concurrency(ACME, 3)


def test_a_body_of_many_prompts_takes_no_more_places_than_there_are() -> None:
    assert access(tenants(concurrency=2)).max_concurrent(ACME, 64) == 2
    assert access(tenants(concurrency=100)).max_concurrent(ACME, 64) == 64
    assert access(tenants()).max_concurrent(ACME, 64) == 64


def test_tokens_are_reserved_whole_and_charged_as_used() -> None:
    clock = ManualClock()
    door = access(tenants(tokens_per_minute=600, tokens_burst=100), clock)
    hold = door.admit(ask(), MODEL)
    wanted = ask(tokens_max=35, choices=2)
    assert door.reserve(hold, wanted, prompt_tokens=10, tokens_max=35) == 35
    other = door.admit(ask(), MODEL)
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        door.reserve(other, ask(tokens_max=30), prompt_tokens=10, tokens_max=30)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    other.end(0)
    hold.end(30)
    third = door.admit(ask(), MODEL)
    assert door.reserve(third, ask(tokens_max=60), prompt_tokens=10, tokens_max=60) == 60


def test_an_answer_without_a_limit_gets_what_a_full_bucket_holds() -> None:
    door = access(tenants(tokens_per_minute=600, tokens_burst=100))
    hold = door.admit(ask(), MODEL)
    assert door.reserve(hold, ask(choices=2), prompt_tokens=10, tokens_max=4096) == 45


@pytest.mark.parametrize(
    ("wanted", "prompt_tokens", "param"),
    [
        (ask(tokens_max=91), 10, "max_tokens"),
        (
            ask(tokens_max=50, fields={"max_tokens": "max_new_tokens"}, choices=2),
            10,
            "max_new_tokens",
        ),
        (ask(), 100, None),
        (ask(sampling=SamplingOptions(min_tokens=20)), 90, None),
        (ask(tokens_max=0), 101, "max_tokens"),
    ],
)
def test_what_no_full_bucket_holds_is_the_clients_mistake(
    wanted: GenerationRequest, prompt_tokens: int, param: str | None
) -> None:
    door = access(tenants(tokens_per_minute=600, tokens_burst=100))
    hold = door.admit(wanted, MODEL)
    most = 4096 if wanted.tokens_max is None else wanted.tokens_max
    with pytest.raises(InvalidRequest, match="limit of this key is 100 tokens at once") as caught:
        door.reserve(hold, wanted, prompt_tokens=prompt_tokens, tokens_max=most)
    assert caught.value.param == param


def test_a_tenant_has_its_models_and_priorities() -> None:
    door = access(tenants(models=["toy"], priority=3, priority_max=5))
    assert door.admit(ask(), MODEL).tenant.priority(None) == 3
    assert door.admit(ask(priority=5), MODEL).tenant.priority(5) == 5
    with pytest.raises(InvalidRequest, match="exceeds 5") as caught:
        door.admit(ask(priority=6), MODEL)
    assert caught.value.param == "priority"
    with pytest.raises(Forbidden, match="other"):
        door.admit(ask(), ModelName("other"))
    assert not door.may_use_model(ACME, "other")
    assert door.may_use_model(DEFAULT_TENANT, "other")


def test_another_file_changes_limits_and_forgets_nothing_that_is_used() -> None:
    clock = ManualClock()
    door = access(tenants(tokens_per_minute=60, concurrency=2), clock)
    hold = door.admit(ask(), MODEL)
    door.reserve(hold, ask(tokens_max=30), prompt_tokens=10, tokens_max=30)
    door.reload(tenants(tokens_per_minute=120, concurrency=1))
    with pytest.raises(RateLimited):
        door.admit(ask(), MODEL)
    hold.end(40)
    again = door.admit(ask(), MODEL)
    with pytest.raises(RateLimited):  # 120, less the 40 that were taken
        door.reserve(again, ask(tokens_max=90), prompt_tokens=10, tokens_max=90)
    door.reserve(again, ask(tokens_max=70), prompt_tokens=10, tokens_max=70)


def test_the_same_limits_again_change_nothing() -> None:
    door = access(tenants(tokens_per_minute=60))
    hold = door.admit(ask(), MODEL)
    door.reserve(hold, ask(tokens_max=50), prompt_tokens=10, tokens_max=50)
    door.reload(tenants(tokens_per_minute=60))
    hold.end(0)
    door.reserve(door.admit(ask(), MODEL), ask(tokens_max=50), prompt_tokens=10, tokens_max=50)


def test_a_tenant_that_leaves_the_file_leaves_its_requests_running() -> None:
    door = access(tenants(concurrency=1))
    hold = door.admit(ask(), MODEL)
    door.reload(Tenants())
    assert outcome(door, "sk-acme") is Unauthorized
    with pytest.raises(Unauthorized):
        door.admit(ask(), MODEL)
    hold.end(5)
