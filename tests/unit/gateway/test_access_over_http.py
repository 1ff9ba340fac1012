"""Keys and limits over HTTP: the openai client, bare requests, and sockets that send too much."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import ollama
import openai
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    MESSAGES,
    TEXT,
    Body,
    call,
    failure,
    get,
    ok,
    openai_client,
    post,
)
from tests.unit.gateway.cluster import MODEL, House, fails_to_start, house
from tests.unit.gateway.keyed import bearer, key_of, keyed, write_keys

from antiphon.config.errors import ConfigError
from antiphon.config.gateway import AccessConfig
from antiphon.gateway import request_metrics
from antiphon.gateway.access import access as access_rules
from antiphon.gateway.http.core import app as server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


ORDERS = (
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weight_version",
    "/add_external_corpus",
    "/remove_external_corpus",
)
PROBES = ("/health", "/healthz", "/health_generate", "/ready", "/readyz", "/metrics")
API, ADMIN = "sk-api", "sk-admin"


def key_for(tenant: str) -> dict[str, str]:
    return bearer(key_of(tenant))


@asynccontextmanager
async def acme(folder: Path, **limits: object) -> AsyncGenerator[tuple[House, openai.AsyncOpenAI]]:
    """A gateway with one tenant of these limits, and its client."""
    async with (
        house(access=keyed(folder, {"acme": limits})) as at,
        openai_client(at, key_of("acme")) as client,
    ):
        yield at, client


async def ask(key: openai.AsyncOpenAI, **fields: object) -> str | None:
    wanted = {"model": MODEL, "messages": HI, **fields}
    answer = await key.chat.completions.create(**wanted)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return answer.choices[0].message.content


async def test_without_keys_none_is_needed(at: House) -> None:
    async with openai_client(at, "whatever") as client:
        assert await ask(client) == TEXT
    await ok(at, "/flush_cache", None)


async def test_openai_client_is_admitted_by_its_key_and_refused_without() -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        async with openai_client(at, API) as right:
            assert await ask(right) == TEXT
            assert [model.id async for model in await right.models.list()] == [MODEL]
        async with openai_client(at, "sk-wrong") as wrong:
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
async def test_key_is_a_bearer_or_a_header_of_its_own(headers: dict[str, str], status: int) -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        assert (await get(at, "/v1/models", **headers)).status == status


async def test_only_probes_are_open() -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        for path in PROBES:
            assert (await get(at, path)).status == 200, path
        paths = (await get(at, "/openapi.json", **bearer(API))).body["paths"]
        closed = [
            (method.upper(), path)
            for path, methods in paths.items()
            for method in methods
            if path not in PROBES
        ]
        assert len(closed) > 30
        for method, path in [*closed, ("GET", "/openapi.json"), ("GET", "/nothing/there")]:
            for spelled in (path, path.replace("o", "%6F"), f"/health/..{path}"):
                assert (await call(at, method, spelled)).status == 401, spelled
        assert at.cluster.orders == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_control_commands_need_the_admin_key_if_there_is_one(method: str) -> None:
    access = AccessConfig(api_key=API, admin_api_key=ADMIN)
    async with house(access=access) as at:
        for path in ORDERS if method == "POST" else ORDERS[:1]:
            assert (await call(at, method, path)).status == 401
            status, reply, _ = await call(at, method, path, **bearer(API))
            assert status == 403
            assert method == "HEAD" or reply["error"]["code"] == "forbidden"
        assert at.cluster.orders == []
        assert (await call(at, method, "/flush_cache", **bearer(ADMIN))).status == 200
        assert len(at.cluster.orders) == 1
        async with openai_client(at, ADMIN) as admin:
            assert await ask(admin) == TEXT


async def test_key_of_a_tenant_permits_no_control_commands(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"acme": {}}, api_key=API)) as at:
        for path in ORDERS:
            assert (await post(at, path, {}, **key_for("acme"))).status == 403
        await ok(at, "/flush_cache", None, **bearer(API))


async def test_too_many_calls_get_a_time_to_retry(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 6, "requests_burst": 2}
    async with house(access=keyed(tmp_path, {"acme": limits, "other": {}})) as at:
        async with openai_client(at, key_of("acme")) as acme:
            await ask(acme)
            await ask(acme)
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(acme)
            found = (caught.value.code, caught.value.type)
            assert found == ("rate_limit_exceeded", "rate_limit_error")
            assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 10
            assert [model.id async for model in await acme.models.list()] == [MODEL]
        async with openai_client(at, key_of("other")) as other:
            await ask(other)
        page = at.gateway.metrics.text(private=True).decode()
    label = 'tenant_requests_total{outcome="%s",tenant="acme"}'
    assert f"{label % 'rate_limit_exceeded'} 1.0" in page
    assert f"{label % 'stop'} 2.0" in page


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (MESSAGES, {"type": "error", "error": {"type": "%s", "message": "%s"}}),
        ("/api/chat", {"error": "%s"}),
        (GENERATE, {"error": {"type": "%s", "message": "%s"}}),
    ],
)
async def test_errors_of_access_have_the_shape_of_their_family(
    tmp_path: Path, path: str, shape: Body
) -> None:
    def shape_of(reply: Any) -> object:
        if isinstance(reply, dict):
            names = [name for name in ("type", "error", "message") if name in reply]
            return {name: shape_of(reply[name]) for name in names}
        return reply if reply == "error" else "%s"

    async with house(access=keyed(tmp_path, {"acme": {"requests_per_minute": 1}})) as at:
        key = {"X-Api-Key": key_of("acme")}
        await post(at, path, {}, **key)
        for sent, status in ((key, 429), ({}, 401)):
            found, reply, headers = await post(at, path, {}, **sent)
            assert (found, shape_of(reply)) == (status, shape)
            assert ("Retry-After" in headers) == (status == 429)


async def test_clients_of_other_families_are_admitted_and_understand_errors(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 1, "requests_burst": 2}
    async with house(access=keyed(tmp_path, {"acme": limits})) as at:

        async def messages(key: str) -> str:
            client = anthropic.AsyncAnthropic(base_url=at.url, api_key=key, max_retries=0)
            async with client as opened:
                reply = await opened.messages.create(model=MODEL, messages=HI, max_tokens=9)
            (block,) = reply.content
            assert block.type == "text"
            return block.text

        async def chat(key: str) -> str | None:
            async with ollama.AsyncClient(host=at.url, headers=bearer(key)) as opened:
                return (await opened.chat(model=MODEL, messages=HI)).message.content

        with pytest.raises(anthropic.AuthenticationError):
            await messages("sk-wrong")
        with pytest.raises(ollama.ResponseError) as refused:
            await chat("sk-wrong")
        assert refused.value.status_code == 401
        assert await messages(key_of("acme")) == await chat(key_of("acme")) == TEXT
        with pytest.raises(anthropic.RateLimitError) as limited:
            await messages(key_of("acme"))
        assert "Retry-After" in limited.value.response.headers
        with pytest.raises(ollama.ResponseError) as refused:
            await chat(key_of("acme"))
        assert refused.value.status_code == 429


async def test_tenant_at_its_limits_stops_neither_probes_nor_control(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 1, "concurrency": 1, "models": ["another"]}
    async with house(access=keyed(tmp_path, {"default": limits}, api_key=API)) as at:
        for status in (403, 429):
            assert (await post(at, COMPLETE, {"prompt": "hi"}, **bearer(API))).status == status
        assert (await get(at, "/health_generate")).status == 200
        await ok(at, "/flush_cache", None, **bearer(API))


async def test_concurrency_is_limited(tmp_path: Path) -> None:
    async with acme(tmp_path, concurrency=2) as (at, client):
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(ask(client)) for _ in range(2)]
            await until(lambda: at.open_count == 2)
            with pytest.raises(openai.RateLimitError, match="2 concurrent requests"):
                await ask(client)
            at.cluster.go.set()
        assert [task.result() for task in running] == [TEXT] * 2
        assert await ask(client) == TEXT


async def test_client_that_leaves_frees_its_slot(tmp_path: Path) -> None:
    async with acme(tmp_path, concurrency=1) as (at, client):
        at.cluster.hold_at = 1
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        await stream.close()
        await until(lambda: at.open_count == 0)
        at.cluster.go.set()
        assert await ask(client) == TEXT


async def test_more_prompts_than_may_ever_run_are_refused(tmp_path: Path) -> None:
    async with acme(tmp_path, concurrency=2) as (_, client):
        with pytest.raises(openai.BadRequestError, match="the limit of this key is 2"):
            await client.completions.create(model=MODEL, prompt=["a", "b", "c"])
        done = await client.completions.create(model=MODEL, prompt=["a", "b"])
        assert len(done.choices) == 2


async def test_tokens_are_charged_as_they_were_used(tmp_path: Path) -> None:
    async with acme(tmp_path, tokens_per_minute=1, tokens_burst=40) as (_, client):
        for _ in range(3):  # 2 of the prompt, 4 of the answer, though 32 are reserved
            await ask(client, max_tokens=20)
        with pytest.raises(openai.RateLimitError, match="1 tokens per minute") as caught:
            await ask(client, max_tokens=30)
        # 22 are left of 40, and 32 are needed.
        assert int(caught.value.response.headers["Retry-After"]) == pytest.approx(600, abs=5)
        await ask(client, max_tokens=20)


async def test_request_that_failed_before_it_ran_costs_nothing(tmp_path: Path) -> None:
    async with acme(tmp_path, tokens_per_minute=1, tokens_burst=40) as (_, client):
        for _ in range(3):
            with pytest.raises(openai.BadRequestError, match="vocabulary"):
                await ask(client, max_tokens=38, logit_bias={"9999": 1})
        await ask(client, max_tokens=38)


async def test_output_without_a_limit_gets_what_the_tenant_may_use(tmp_path: Path) -> None:
    async with acme(tmp_path, tokens_per_minute=40) as (at, client):
        await ask(client)
        assert at.cluster.submits[0].sampling.max_new_tokens == 38
        with pytest.raises(
            openai.BadRequestError, match="limit of this key is 40 tokens at once"
        ) as caught:
            await ask(client, max_tokens=39)
        assert caught.value.param == "max_tokens"


async def test_tenant_has_its_models_and_priorities(tmp_path: Path) -> None:
    tenants = {"acme": {"priority": 2, "priority_max": 3}, "none": {"models": ["another"]}}
    async with house(access=keyed(tmp_path, tenants)) as at:
        async with openai_client(at, key_of("acme")) as acme:
            await ask(acme)
            await ask(acme, extra_body={"priority": 3})
            found = [(submit.priority, submit.tenant) for submit in at.cluster.submits]
            assert found == [(2, "acme"), (3, "acme")]
            with pytest.raises(openai.BadRequestError, match="exceeds 3"):
                await ask(acme, extra_body={"priority": 4})
        async with openai_client(at, key_of("none")) as none:
            assert [model async for model in await none.models.list()] == []
            with pytest.raises(openai.NotFoundError):
                await none.models.retrieve(MODEL)
            with pytest.raises(openai.PermissionDeniedError, match="toy"):
                await ask(none)


async def test_rids_and_sessions_belong_to_a_tenant(tmp_path: Path) -> None:
    async with house(access=keyed(tmp_path, {"a": {}, "b": {}})) as at:
        session = {"session_id": "mine"}
        await ok(at, "/open_session", session, **key_for("a"))
        body: Body = {"text": "x", "rid": "one"}
        inside = body | {"session_params": {"id": "mine"}}
        status, error = await failure(at, GENERATE, inside, **key_for("b"))
        assert (status, error["message"]) == (400, "unknown session 'mine'")
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ok(at, GENERATE, inside, **key_for("a")))
            other = group.create_task(ok(at, GENERATE, body, **key_for("b")))
            await until(lambda: at.open_count == 2)
            await ok(at, "/close_session", session, **key_for("a"))
            await until(lambda: at.open_count == 1)
            at.cluster.go.set()
        reasons = [task.result()["meta_info"]["finish_reason"] for task in (first, other)]
        assert [reason["type"] for reason in reasons] == ["abort", "stop"]


@pytest.mark.parametrize("path", [GENERATE, COMPLETE])
async def test_prompt_in_a_session_is_encoded_in_the_turn_of_its_tenant(
    tmp_path: Path, path: str
) -> None:
    async with house(access=keyed(tmp_path, {"a": {}})) as at:
        await ok(at, "/open_session", {"session_id": "mine"}, **key_for("a"))
        body = BODIES[path] | {"session_params": {"id": "mine"}}
        await ok(at, path, body, **key_for("a"))
        (encode,) = [each for each in at.cluster.encodes if each.prompt == "hi"]
        assert encode.tenant == "a"


async def test_keys_file_is_reloaded_unless_it_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_rules, "POLL_S", 0.01)
    access = keyed(tmp_path, {"acme": {}})
    file = tmp_path / "keys.json"

    def logged(message: str) -> int:
        return sum(record.getMessage() == message for record in caplog.records)

    async def statuses() -> list[int]:
        return [(await get(at, "/v1/models", **key_for(name))).status for name in ("acme", "new")]

    caplog.set_level("INFO")
    async with house(access=access) as at:
        assert await statuses() == [200, 401]
        file.write_text("{")
        await until(lambda: logged("keys file not reloaded") == 1)
        file.unlink()
        await until(lambda: logged("keys file not reloaded") == 2)
        assert await statuses() == [200, 401]
        write_keys(file, {"new": {}})
        await until(lambda: logged("keys file reloaded") == 1)
        assert await statuses() == [401, 200]
        text = at.metrics_text
    assert 'antiphon_keys_file_reads_total{outcome="refused"} 2.0' in text
    assert 'antiphon_keys_file_reads_total{outcome="read"} 1.0' in text


async def test_invalid_keys_file_keeps_the_gateway_from_starting(tmp_path: Path) -> None:
    access = keyed(tmp_path, {"acme": {}})
    (tmp_path / "keys.json").write_text("{}x")
    await fails_to_start(ConfigError, "not valid JSON", access=access)


async def test_labels_of_tenants_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_metrics, "TENANTS_MAX", 2)
    async with house(access=keyed(tmp_path, {"a": {}, "b": {}})) as at:
        for name in ("a", "b"):
            await ok(at, CHAT, {"messages": HI}, **key_for(name))
        page = at.gateway.metrics.text(private=True).decode()
    # `default` is always there.
    assert 'antiphon_tenant_tokens_total{kind="completion",tenant="a"} 4.0' in page
    assert 'antiphon_tenant_tokens_total{kind="completion",tenant="other"} 4.0' in page
    assert 'tenant="b"' not in page


async def test_metrics_name_tenants_to_operators_only(tmp_path: Path) -> None:
    access = keyed(tmp_path, {"acme": {}}, api_key=API, admin_api_key=ADMIN)
    async with house(access=access) as at:
        await ok(at, CHAT, {"messages": HI}, **key_for("acme"))
        headers = ({}, key_for("acme"), bearer(API), bearer(ADMIN))
        pages = [await get(at, "/metrics", **each) for each in headers]
        own_page = at.metrics_text
    assert [page.status for page in pages] == [200] * 4
    assert ["acme" in page.body for page in pages] == [False, False, False, True]
    assert all("sglang:num_requests_total" in page.body for page in pages)
    assert "acme" not in own_page


async def test_no_key_is_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    access = AccessConfig(api_key=API, admin_api_key=ADMIN)
    async with house(access=access) as at:
        await post(at, CHAT, {}, **bearer("sk-mistyped"))
        info = (await get(at, "/server_info", **bearer(API))).body
        page = (await get(at, "/metrics")).body
    shown = f"{caplog.text} {[vars(record) for record in caplog.records]} {info} {page}"
    for key in (API, ADMIN, "sk-mistyped"):
        assert key not in shown


async def test_other_origins_may_not_call_unless_they_are_named() -> None:
    allowed = "Access-Control-Allow-Origin"
    page = {"Origin": "https://a.example"}
    preflight = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with house(access=AccessConfig(api_key=API)) as at:
        status, _, headers = await call(at, "OPTIONS", CHAT, **preflight)
        assert (status, allowed in headers) == (405, False)
    named = AccessConfig(api_key=API, allowed_origins="https://a.example")
    async with house(access=named) as at:
        status, _, headers = await call(at, "OPTIONS", CHAT, **preflight)
        assert (status, headers[allowed]) == (204, "https://a.example")
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        other = preflight | {"Origin": "https://b.example"}
        status, _, headers = await call(at, "OPTIONS", CHAT, **other)
        assert (status, allowed in headers) == (405, False)
        for key, expected in ((API, 200), ("sk-wrong", 401)):
            body = {"messages": HI, "stream": True}
            status, _, headers = await post(at, CHAT, body, **page, **bearer(key))
            assert (status, headers[allowed]) == (expected, page["Origin"])
            assert headers["Vary"] == "Origin"
    async with house(access=AccessConfig(allowed_origins="*")) as at:
        assert (await get(at, "/v1/models", **page)).headers[allowed] == "*"


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


async def test_path_over_the_limit_is_431() -> None:
    async with house(header_bytes_max=1000) as at:
        head, _ = await send(at, b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 431 " in head.partition(b"\r\n")[0]


async def test_headers_that_never_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    async with house() as at:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.service.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: ")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_refused_call_gets_its_reply_before_its_body_has_come() -> None:
    async with house(access=AccessConfig(api_key=API)) as at:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", at.service.port)
        writer.write(f"{head}Content-Length: 1000000\r\n\r\n".encode())
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
