"""Stacks with keys and with a certificate, as an operator starts them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest
from tests.system.stack import Stack, run_antiphon, serving, wait_until
from tests.unit.arguments.certificates import make
from tests.unit.gateway.keyed import key_of, write_keys

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.client import Client
from antiphon.config.settings import BusConfig
from antiphon.wire.base import Process
from antiphon.wire.errors import Forbidden, RateLimited, Unauthorized
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation
from antiphon.wire.routes import CLIENT, GENERATE, HEARTBEAT, SUBMIT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from antiphon.bus.transport import Packet

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

API = "sk-operator"
ACME = {"requests_per_minute": 1, "requests_burst": 6, "tokens_per_minute": 1, "tokens_burst": 500}
QUESTION = "What is 12 + 30?"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(file, {"acme": ACME, "spare": {"concurrency": 1}})
    return file


@pytest.fixture(scope="module")
def stack(keys: Path) -> Iterator[Stack]:
    with serving("--api-key", API, "--access-keys-file", str(keys)) as running:
        yield running


def openai_client(stack: Stack, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


async def ask(client: openai.AsyncOpenAI, most: int = 32) -> str | None:
    answer = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=most,
    )
    return answer.choices[0].message.content


async def test_both_doors_ask_for_a_key_and_count_as_one(stack: Stack) -> None:
    assert stack.healthy()
    async with openai_client(stack, "sk-wrong") as wrong:
        with pytest.raises(openai.AuthenticationError):
            await ask(wrong)
    for tenant, key, error in (
        ("acme", "", Unauthorized),
        ("acme", "sk-wrong", Unauthorized),
        ("acme", API, Forbidden),
    ):
        async with Client(stack.nats_url, tenant=tenant, api_key=key) as refused:
            with pytest.raises(error):
                await refused.complete(stack.model, QUESTION, timeout_s=30)
    async with (
        openai_client(stack, key_of("acme")) as acme,
        Client(stack.nats_url, tenant="acme", api_key=key_of("acme")) as nats,
    ):
        for _ in range(2):
            assert await ask(acme) == "12 + 30 = 42."
            answer = await nats.complete(stack.model, QUESTION, max_tokens=32, temperature=0)
            assert answer.text == "12 + 30 = 42."
        # 500 tokens at once, of which four short answers have used some.
        with pytest.raises(openai.RateLimitError, match="tokens per minute") as caught:
            await ask(acme, most=470)
        assert int(caught.value.response.headers["Retry-After"]) > 60
        assert await ask(acme) == "12 + 30 = 42."
        with pytest.raises(openai.RateLimitError, match="requests per minute"):
            await ask(acme)
        with pytest.raises(RateLimited, match="requests per minute"):
            await nats.complete(stack.model, QUESTION, timeout_s=30)
    log = stack.log("gateway-0")
    assert "tenant=acme" in log
    assert not any(key in log for key in (API, key_of("acme"), "sk-wrong"))


async def test_nobody_passes_by_the_gateway(stack: Stack) -> None:
    process = Process(instance=InstanceId("stranger"), incarnation=new_incarnation())
    transport = NatsTransport(BusConfig(url=stack.nats_url), name="stranger")
    async with Bus(transport, ClusterName("antiphon"), process, party=CLIENT) as bus:
        await transport.subscribe(bus.subject(HEARTBEAT), ignore)
        await transport.subscribe(f"antiphon.v1.{GENERATE.subject_for(model=stack.model)}", ignore)
        for subject in (
            SUBMIT.subject_for(model=stack.model),
            "worker.worker-0.command",
            "discover",
        ):
            transport.publish(f"antiphon.v1.{subject}", b"x")
        await transport.flush(5)
        assert transport.errors.forbidden == 5


async def ignore(_: Packet) -> None:
    """Hear and do nothing."""


async def test_another_file_is_taken_without_a_restart(stack: Stack, keys: Path) -> None:
    async with openai_client(stack, key_of("later")) as later:
        with pytest.raises(openai.AuthenticationError):
            await ask(later)
        keys.write_text('{"tenants": ')
        kept = "keys file not reloaded"
        await asyncio.to_thread(wait_until, lambda: kept in stack.log("gateway-0"), 10, kept)
        async with openai_client(stack, key_of("spare")) as spare:
            assert await ask(spare) == "12 + 30 = 42."
        write_keys(keys, {"later": {}})
        read = "keys file reloaded"
        await asyncio.to_thread(wait_until, lambda: read in stack.log("gateway-0"), 10, read)
        assert await ask(later) == "12 + 30 = 42."


def test_the_chat_shows_a_key(stack: Stack) -> None:
    asked = ("chat", "--url", stack.url, "--message", QUESTION, "--temperature", "0")
    refused = run_antiphon(*asked)
    assert (refused.returncode, "an API key is required" in refused.stderr) == (1, True)
    assert run_antiphon(*asked, "--api-key", API).stdout.strip() == "12 + 30 = 42."


def test_a_bad_keys_file_is_told_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[tenants.acme]\nkeys = []\n")
    done = run_antiphon("serve", "--gateway-port", "0", "--access-keys-file", str(file))
    assert done.returncode == 1
    assert "tenant acme has no key" in done.stdout


def test_a_stack_with_a_certificate_is_talked_to_over_https(tmp_path: Path) -> None:
    made = make(tmp_path, "served")
    files = ("--ssl-certfile", str(made.certificate), "--ssl-keyfile", str(made.key))
    with serving(*files) as stack:
        assert stack.url.startswith("https://127.0.0.1:")
        asked = ("chat", "--message", "What is 17 + 25?", "--temperature", "0", "--url")
        answer = run_antiphon(*asked, f"{stack.url}/v1", "--ca-certs", str(made.certificate))
        assert (answer.returncode, "42" in answer.stdout) == (0, True), answer.stderr
        untrusted = run_antiphon(*asked, stack.url)
        assert untrusted.returncode == 1
        assert "is not trusted" in untrusted.stderr
        assert "--ca-certs" in untrusted.stderr
