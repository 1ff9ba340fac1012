"""Keys and limits over HTTP: the openai client, bare requests, and sockets that send too much."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import aiohttp
import anthropic
import msgspec
import ollama
import openai
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import running
from tests.support.wait import until
from tests.unit.gateway.calls import CHAT, HI
from tests.unit.gateway.cluster import MODEL, SCRIPT, House, house, settings
from tests.unit.gateway.keyed import key_of, keyed, write_keys

from antiphon.config.errors import ConfigError
from antiphon.config.gateway import AccessConfig
from antiphon.gateway import request_metrics
from antiphon.gateway.access import access as access_rules
from antiphon.gateway.http.core import app as server
from antiphon.gateway.service import GatewayService

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from multidict import CIMultiDictProxy

ORDERS = (
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weight_version",
)
PROBES = ("/health", "/healthz", "/health_generate", "/ready", "/readyz", "/metrics")
API, ADMIN = "sk-api", "sk-admin"


@asynccontextmanager
async def client(at: House, key: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=key, max_retries=0) as made:
        yield made


@asynccontextmanager
async def acme(folder: Path, **limits: object) -> AsyncGenerator[tuple[House, openai.AsyncOpenAI]]:
    """A gateway with one tenant of these limits, and its client."""
    async with (
        house(access=keyed(folder, {"acme": limits})) as at,
        client(at, key_of("acme")) as made,
    ):
        yield at, made


async def call(
    at: House, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, object, CIMultiDictProxy[str]]:
    """Return status, JSON (or text) and headers."""
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, at.url + path, json=body) as reply,
    ):
        is_json = reply.content_type == "application/json"
        return reply.status, await (reply.json() if is_json else reply.text()), reply.headers


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error_of(reply: object) -> dict[str, str | None]:
    return cast("dict[str, dict[str, str | None]]", reply)["error"]


async def ask(key: openai.AsyncOpenAI, **fields: object) -> str | None:
    wanted = {"model": MODEL, "messages": HI, **fields}
    answer = await key.chat.completions.create(**wanted)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return answer.choices[0].message.content


def open_count(at: House) -> int:
    return at.open_count


async def test_without_keys_nobody_is_asked_for_one() -> None:
    async with house() as at, client(at, "whatever") as openai_client:
        assert await ask(openai_client) == "".join(SCRIPT)
        assert (await call(at, "POST", "/flush_cache"))[0] == 200


async def test_the_openai_client_is_let_in_by_its_key_and_refused_without() -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        async with client(at, API) as right:
            assert await ask(right) == "".join(SCRIPT)
            assert [model.id async for model in await right.models.list()] == [MODEL]
        async with client(at, "sk-wrong") as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                await ask(wrong)
            with pytest.raises(openai.AuthenticationError):
                await ask(wrong, stream=True)
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["WWW-Authenticate"] == "Bearer"
        assert len(at.cluster.submits) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": API}, 401),
        ({"Authorization": f"Basic {API}"}, 401),
        ({"Authorization": f"bearer  {API}"}, 200),
        ({"X-Api-Key": API}, 200),
        ({"X-Api-Key": "sk-wrong"}, 401),
        ({"Authorization": "Bearer ", "X-Api-Key": API}, 401),
        ({"Authorization": f"Bearer {API}ä"}, 401),
    ],
)
async def test_a_key_is_a_bearer_or_a_header_of_its_own(
    headers: dict[str, str], status: int
) -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        assert (await call(at, "GET", "/v1/models", **headers))[0] == status


async def test_only_probes_are_open() -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        for path in PROBES:
            assert (await call(at, "GET", path))[0] == 200, path
        _, document, _ = await call(at, "GET", "/openapi.json", **bearer(API))
        paths = cast("dict[str, dict[str, object]]", cast("dict[str, object]", document)["paths"])
        closed = [
            (method.upper(), path)
            for path, methods in paths.items()
            for method in methods
            if path not in PROBES
        ]
        assert len(closed) > 30
        for method, path in [*closed, ("GET", "/openapi.json"), ("GET", "/nothing/there")]:
            for spelled in (path, path.replace("o", "%6F"), f"/health/..{path}"):
                assert (await call(at, method, spelled))[0] == 401, spelled
        assert at.cluster.orders == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_orders_are_for_the_admin_key_alone_where_there_is_one(method: str) -> None:
    access = AccessConfig(api_key=API, admin_api_key=ADMIN)
    async with house(access=access) as at:
        for path in ORDERS if method == "POST" else ORDERS[:1]:
            assert (await call(at, method, path))[0] == 401
            status, reply, _ = await call(at, method, path, **bearer(API))
            assert status == 403
            assert method == "HEAD" or error_of(reply)["code"] == "forbidden"
        assert at.cluster.orders == []
        assert (await call(at, method, "/flush_cache", **bearer(ADMIN)))[0] == 200
        assert len(at.cluster.orders) == 1
        async with client(at, ADMIN) as admin:
            assert await ask(admin) == "".join(SCRIPT)


async def test_a_tenants_key_gives_no_orders(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"acme": {}}, api_key=API)) as at:
        for path in ORDERS:
            assert (await call(at, "POST", path, {}, **bearer(key_of("acme"))))[0] == 403
        assert (await call(at, "POST", "/flush_cache", **bearer(API)))[0] == 200


async def test_too_many_calls_are_told_when_to_come_back(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 6, "requests_burst": 2}
    async with house(access=keyed(tmp_path, {"acme": limits, "other": {}})) as at:
        async with client(at, key_of("acme")) as acme:
            await ask(acme)
            await ask(acme)
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(acme)
            assert caught.value.code == "rate_limit_exceeded"
            assert caught.value.type == "rate_limit_error"
            assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 10
            assert [model.id async for model in await acme.models.list()] == [MODEL]
        async with client(at, key_of("other")) as other:
            await ask(other)
        said = at.gateway.metrics.text(private=True).decode()
        label = 'tenant_requests_total{outcome="%s",tenant="acme"}'
        assert f"{label % 'rate_limit_exceeded'} 1.0" in said
        assert f"{label % 'stop'} 2.0" in said


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "%s", "message": "%s"}}),
        ("/api/chat", {"error": "%s"}),
        ("/generate", {"error": {"type": "%s", "message": "%s"}}),
    ],
)
async def test_each_family_tells_it_in_its_own_shape(
    tmp_path: Path, path: str, wanted: dict[str, object]
) -> None:
    def shape(reply: object) -> object:
        if isinstance(reply, dict):
            known = cast("dict[str, object]", reply)
            return {
                name: shape(known[name]) for name in ("type", "error", "message") if name in known
            }
        return reply if reply == "error" else "%s"

    limits = {"requests_per_minute": 1}
    async with house(access=keyed(tmp_path, {"acme": limits})) as at:
        key = {"X-Api-Key": key_of("acme")}
        await call(at, "POST", path, {}, **key)
        for headers, status in ((key, 429), ({}, 401)):
            found, reply, told = await call(at, "POST", path, {}, **headers)
            assert (found, shape(reply)) == (status, wanted)
            assert ("Retry-After" in told) == (status == 429)


async def test_the_clients_of_other_families_are_let_in_and_understand_refusals(
    tmp_path: Path,
) -> None:
    limits = {"requests_per_minute": 1, "requests_burst": 2}
    async with house(access=keyed(tmp_path, {"acme": limits})) as at:

        async def messages(key: str) -> str:
            async with anthropic.AsyncAnthropic(
                base_url=at.url, api_key=key, max_retries=0
            ) as opened:
                said: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
                answer = await opened.messages.create(model=MODEL, messages=said, max_tokens=9)
            (block,) = answer.content
            assert block.type == "text"
            return block.text

        async def chat(key: str) -> str | None:
            async with ollama.AsyncClient(host=at.url, headers=bearer(key)) as opened:
                said = [{"role": "user", "content": "hi"}]
                return (await opened.chat(model=MODEL, messages=said)).message.content

        with pytest.raises(anthropic.AuthenticationError):
            await messages("sk-wrong")
        with pytest.raises(ollama.ResponseError) as refused:
            await chat("sk-wrong")
        assert refused.value.status_code == 401
        assert await messages(key_of("acme")) == await chat(key_of("acme")) == "".join(SCRIPT)
        with pytest.raises(anthropic.RateLimitError) as limited:
            await messages(key_of("acme"))
        assert "Retry-After" in limited.value.response.headers
        with pytest.raises(ollama.ResponseError) as refused:
            await chat(key_of("acme"))
        assert refused.value.status_code == 429


async def test_a_tenant_that_is_at_its_limits_stops_neither_probes_nor_orders(
    tmp_path: Path,
) -> None:
    limits = {"requests_per_minute": 1, "concurrency": 1, "models": ["another"]}
    access = keyed(tmp_path, {"default": limits}, api_key=API)
    async with house(access=access) as at:
        for status in (403, 429):
            body = {"prompt": "hi"}
            assert (await call(at, "POST", "/v1/completions", body, **bearer(API)))[0] == status
        assert (await call(at, "GET", "/health_generate"))[0] == 200
        assert (await call(at, "POST", "/flush_cache", **bearer(API)))[0] == 200


async def test_only_so_many_answers_at_a_time(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"acme": {"concurrency": 2}})) as at:
        at.cluster.hold_at = 1
        async with client(at, key_of("acme")) as acme, asyncio.TaskGroup() as group:
            running = [group.create_task(ask(acme)) for _ in range(2)]
            await until(lambda: open_count(at) == 2)
            with pytest.raises(openai.RateLimitError, match="2 concurrent requests"):
                await ask(acme)
            at.cluster.go.set()
            assert [await each for each in running] == ["".join(SCRIPT)] * 2
            assert await ask(acme) == "".join(SCRIPT)


async def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"acme": {"concurrency": 1}})) as at:
        at.cluster.hold_at = 1
        async with client(at, key_of("acme")) as acme:
            stream = await acme.chat.completions.create(model=MODEL, messages=HI, stream=True)
            await stream.close()
            await until(lambda: open_count(at) == 0)
            at.cluster.go.set()
            assert await ask(acme) == "".join(SCRIPT)


async def test_more_prompts_than_may_ever_run_are_a_mistake(tmp_path: Path) -> None:
    async with acme(tmp_path, concurrency=2) as (_, acme_client):
        with pytest.raises(openai.BadRequestError, match="the limit of this key is 2"):
            await acme_client.completions.create(model=MODEL, prompt=["a", "b", "c"])
        done = await acme_client.completions.create(model=MODEL, prompt=["a", "b"])
        assert len(done.choices) == 2


async def test_tokens_are_charged_as_they_were_used(tmp_path: Path) -> None:
    async with acme(tmp_path, tokens_per_minute=1, tokens_burst=40) as (_, acme_client):
        for _ in range(3):  # 2 of the prompt, 4 of the answer, though 32 are reserved
            await ask(acme_client, max_tokens=20)
        with pytest.raises(openai.RateLimitError, match="1 tokens per minute") as caught:
            await ask(acme_client, max_tokens=30)
        # 22 are left of 40, and 32 are needed.
        assert int(caught.value.response.headers["Retry-After"]) == pytest.approx(600, abs=5)
        await ask(acme_client, max_tokens=20)


async def test_what_failed_before_it_ran_costs_nothing(tmp_path: Path) -> None:
    async with acme(tmp_path, tokens_per_minute=1, tokens_burst=40) as (_, acme_client):
        for _ in range(3):
            with pytest.raises(openai.BadRequestError, match="vocabulary"):
                await ask(acme_client, max_tokens=38, logit_bias={"9999": 1})
        await ask(acme_client, max_tokens=38)


async def test_an_answer_without_a_limit_gets_what_the_tenant_may_use(tmp_path: Path) -> None:
    async with acme(tmp_path, tokens_per_minute=40) as (at, acme_client):
        await ask(acme_client)
        assert at.cluster.submits[0].sampling.max_new_tokens == 38
        with pytest.raises(
            openai.BadRequestError, match="limit of this key is 40 tokens at once"
        ) as caught:
            await ask(acme_client, max_tokens=39)
        assert caught.value.param == "max_tokens"


async def test_a_tenant_has_its_models_and_priorities(tmp_path: Path) -> None:
    tenants = {
        "acme": {"priority": 2, "priority_max": 3},
        "none": {"models": ["another"]},
    }
    async with house(access=keyed(tmp_path, tenants)) as at:
        async with client(at, key_of("acme")) as acme:
            await ask(acme)
            await ask(acme, extra_body={"priority": 3})
            assert [submit.priority for submit in at.cluster.submits] == [2, 3]
            assert {submit.tenant for submit in at.cluster.submits} == {"acme"}
            with pytest.raises(openai.BadRequestError, match="exceeds 3"):
                await ask(acme, extra_body={"priority": 4})
        async with client(at, key_of("none")) as none:
            assert [model async for model in await none.models.list()] == []
            with pytest.raises(openai.NotFoundError):
                await none.models.retrieve(MODEL)
            with pytest.raises(openai.PermissionDeniedError, match="toy"):
                await ask(none)


async def test_names_and_sessions_are_a_tenants_own(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"a": {}, "b": {}})) as at:
        opened = {"session_id": "mine"}
        assert (await call(at, "POST", "/open_session", opened, **bearer(key_of("a"))))[0] == 200
        body = {"text": "x", "session_params": {"id": "mine"}, "rid": "one"}
        status, reply, _ = await call(at, "POST", "/generate", body, **bearer(key_of("b")))
        assert (status, error_of(reply)["message"]) == (400, "unknown session 'mine'")
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            both = [
                group.create_task(
                    call(
                        at,
                        "POST",
                        "/generate",
                        body if name == "a" else {"text": "x", "rid": "one"},
                        **bearer(key_of(name)),
                    )
                )
                for name in ("a", "b")
            ]
            await until(lambda: open_count(at) == 2)
            assert (await call(at, "POST", "/close_session", opened, **bearer(key_of("a"))))[
                0
            ] == 200
            await until(lambda: open_count(at) == 1)
            at.cluster.go.set()
        answers = [cast("dict[str, dict[str, dict[str, str]]]", (await each)[1]) for each in both]
        reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["abort", "stop"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_prompt_in_a_session_is_encoded_in_the_turn_of_its_tenant(
    tmp_path: Path, path: str
) -> None:
    async with house(access=keyed(tmp_path, {"a": {}})) as at:
        opened = {"session_id": "mine"}
        assert (await call(at, "POST", "/open_session", opened, **bearer(key_of("a"))))[0] == 200
        prompt = {"text": "x"} if path == "/generate" else {"prompt": "x"}
        body = prompt | {"session_params": {"id": "mine"}}
        status, reply, _ = await call(at, "POST", path, body, **bearer(key_of("a")))
        assert status == 200, reply
        (encode,) = [each for each in at.cluster.encodes if each.prompt == "x"]
        assert encode.tenant == "a"


async def test_the_file_is_read_again_and_a_bad_one_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_rules, "POLL_S", 0.01)
    access = keyed(tmp_path, {"acme": {}})
    file = tmp_path / "keys.json"

    def said(message: str) -> int:
        return sum(record.getMessage() == message for record in caplog.records)

    async def status(tenant: str) -> int:
        return (await call(at, "GET", "/v1/models", **bearer(key_of(tenant))))[0]

    caplog.set_level("INFO")
    async with house(access=access) as at:
        assert [await status("acme"), await status("new")] == [200, 401]
        file.write_text("{")
        await until(lambda: said("keys file not reloaded") == 1)
        file.unlink()
        await until(lambda: said("keys file not reloaded") == 2)
        assert [await status("acme"), await status("new")] == [200, 401]
        write_keys(file, {"new": {}})
        await until(lambda: said("keys file reloaded") == 1)
        assert [await status("acme"), await status("new")] == [401, 200]
        text = at.metrics_text
    assert 'antiphon_keys_file_reads_total{outcome="refused"} 2.0' in text
    assert 'antiphon_keys_file_reads_total{outcome="read"} 1.0' in text


async def test_a_bad_file_at_the_start_is_no_start(tmp_path: Path) -> None:
    access = keyed(tmp_path, {"acme": {}})
    (tmp_path / "keys.json").write_text("{}x")
    chosen = settings(access=access)
    transport = MemoryTransport(MemoryBroker())
    with pytest.raises(ExceptionGroup) as caught:
        async with running(GatewayService, transport, settings=chosen):
            pass
    assert caught.group_contains(ConfigError, match="not valid JSON", depth=None)


async def test_labels_of_tenants_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_metrics, "TENANTS_MAX", 2)
    async with house(access=keyed(tmp_path, {"a": {}, "b": {}})) as at:
        for name in ("a", "b"):
            async with client(at, key_of(name)) as each:
                await ask(each)
        said = at.gateway.metrics.text(private=True).decode()
    # `default` is always there.
    assert 'antiphon_tenant_tokens_total{kind="completion",tenant="a"} 4.0' in said
    assert 'antiphon_tenant_tokens_total{kind="completion",tenant="other"} 4.0' in said
    assert 'tenant="b"' not in said


async def test_metrics_name_tenants_to_operators_only(tmp_path: Path) -> None:
    rules = keyed(tmp_path, {"acme": {}})
    access = msgspec.structs.replace(rules, api_key=API, admin_api_key=ADMIN)
    async with house(access=access) as at:
        async with client(at, key_of("acme")) as acme:
            await ask(acme)
        pages = [
            (await call(at, "GET", "/metrics", **headers))[:2]
            for headers in ({}, bearer(key_of("acme")), bearer(API), bearer(ADMIN))
        ]
        own_page = at.metrics_text
    assert [status for status, _ in pages] == [200] * 4
    assert ["acme" in str(page) for _, page in pages] == [False, False, False, True]
    assert all("sglang:num_requests_total" in str(page) for _, page in pages)
    assert "acme" not in own_page


async def test_no_key_is_logged_or_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    access = AccessConfig(api_key=API, admin_api_key=ADMIN)
    async with house(access=access) as at:
        await call(at, "POST", CHAT, {}, **bearer("sk-mistyped"))
        _, info, _ = await call(at, "GET", "/server_info", **bearer(API))
        _, said, _ = await call(at, "GET", "/metrics")
    shown = caplog.text + str([vars(record) for record in caplog.records]) + str(info) + str(said)
    for key in (API, ADMIN, "sk-mistyped"):
        assert key not in shown


async def test_pages_of_other_origins_may_not_call_unless_they_are_named() -> None:
    page = {"Origin": "https://a.example"}
    leave = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with house(access=AccessConfig(api_key=API)) as at:
        status, _, headers = await call(at, "OPTIONS", CHAT, **leave)
        assert (status, "Access-Control-Allow-Origin" in headers) == (405, False)
    named = AccessConfig(api_key=API, allowed_origins="https://a.example")
    async with house(access=named) as at:
        status, _, headers = await call(at, "OPTIONS", CHAT, **leave)
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, "https://a.example")
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        other = leave | {"Origin": "https://b.example"}
        status, _, headers = await call(at, "OPTIONS", CHAT, **other)
        assert (status, "Access-Control-Allow-Origin" in headers) == (405, False)
        for key, wanted in ((API, 200), ("sk-wrong", 401)):
            body = {"messages": HI, "stream": True}
            status, _, headers = await call(at, "POST", CHAT, body, **page, **bearer(key))
            assert (status, headers["Access-Control-Allow-Origin"]) == (wanted, page["Origin"])
            assert headers["Vary"] == "Origin"
    async with house(access=AccessConfig(allowed_origins="*")) as at:
        _, _, headers = await call(at, "GET", "/v1/models", **page)
        assert headers["Access-Control-Allow-Origin"] == "*"


async def send(at: House, data: bytes) -> tuple[bytes, bytes]:
    """Send bytes on a socket of one's own; return the head and the body of what comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.service.port)
    writer.write(data)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
    writer.close()
    return head, body


@pytest.mark.parametrize(
    "lines",
    [
        b"X-A: " + b"x" * 3000 + b"\r\n",
        b"X-A: " + b"x" * 600 + b"\r\nX-B: " + b"x" * 600 + b"\r\n",
        b"".join(b"X-%d: x\r\n" % n for n in range(300)),
        b"x" * 3000 + b": x\r\n",
    ],
    ids=["one", "together", "many", "name"],
)
async def test_headers_over_the_limit_are_431(lines: bytes) -> None:
    async with house(header_bytes_max=1000) as at:
        start = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
        head, body = await send(at, start + lines + b"\r\n")
        assert b" 431 " in head.partition(b"\r\n")[0]
        assert b"application/json" in head
        assert b'"code":"request_headers_too_large"' in body
        head, _ = await send(at, start + b"Connection: close\r\nX-A: " + b"x" * 500 + b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")


async def test_a_path_over_the_limit_is_431() -> None:
    async with house(header_bytes_max=1000) as at:
        head, _ = await send(at, b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 431 " in head.partition(b"\r\n")[0]


async def test_headers_that_never_end_are_not_waited_for(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", at.service.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: ")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


async def test_a_refused_call_is_answered_before_its_body_has_come() -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", at.service.port)
        writer.write(f"{head}Content-Length: 1000000\r\n\r\n".encode())
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
