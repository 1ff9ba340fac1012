"""The tokenizer on a bus: heavy texts beside small ones, copies of calls, callers that leave."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.nats import NatsServer
from tests.support.services import QUICK, client_bus, running
from tests.support.wait import until

from antiphon import embedded
from antiphon.config.cluster import ClusterConfig
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.tokenizer.encoding import Batcher, EncodedPrompt, TextEncoder, character_count
from antiphon.tokenizer.service import TokenizerService
from antiphon.wire.base import Role
from antiphon.wire.codec import id_count, unpack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES
from antiphon.wire.errors import PromptTooLong, Unavailable
from antiphon.wire.ids import ModelName, RequestId, TenantId
from antiphon.wire.routes import CANCEL_ENCODE, TOKENIZE
from antiphon.wire.tokenize import CancelEncode, EncodeReply, EncodeRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from antiphon.bus.bus import Bus

MODEL = ModelName("toy")
ACME = TenantId("acme")
FAR_UNIX_MS = 2**42
HEAVY = "word " * 4000  # more than one step of the loop may take, less than the context may hold


class World:
    """A tokenizer of the embedded model, and a gateway's link to it."""

    def __init__(self, bus: Bus, service: TokenizerService) -> None:
        self.bus = bus
        self.service = service

    async def encode(self, text: str, number: int = 1, *, truncate: bool = False) -> EncodeReply:
        request = EncodeRequest(
            request_id=RequestId(f"r-{number}"),
            model=MODEL,
            tenant=ACME,
            prompt=text,
            truncate=truncate,
            deadline_unix_ms=FAR_UNIX_MS,
        )
        return await self.bus.call(TOKENIZE, request, timeout_s=25, model=MODEL)

    def cancel(self, number: int = 1) -> None:
        message = CancelEncode(request_id=RequestId(f"r-{number}"))
        self.bus.publish(CANCEL_ENCODE, message, model=MODEL)

    @property
    def running(self) -> set[str]:
        return set(self.service._running)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    broker = MemoryBroker()
    settings = msgspec.structs.replace(
        QUICK,
        cluster=ClusterConfig(name="test", model=MODEL),
        model=msgspec.structs.replace(QUICK.model, path=str(embedded.path())),
    )
    async with (
        running(TokenizerService, MemoryTransport(broker), settings=settings) as tokenizer,
        client_bus(MemoryTransport(broker), "gateway-0", party=Role.GATEWAY) as bus,
    ):
        yield World(bus, tokenizer.service)


class HeldProcesses:
    """In place of the child processes: holds texts until it is let go."""

    def __init__(self) -> None:
        self.texts: list[EncodeRequest] = []
        self.tenants: list[TenantId] = []
        self.ended = 0
        self.go = asyncio.Event()

    async def encode(self, text: EncodeRequest, *, timeout_s: float) -> EncodedPrompt:
        assert timeout_s > 0
        self.texts.append(text)
        self.tenants.append(text.tenant)
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return EncodedPrompt(b"\x01\x00\x00\x00", b"")


@pytest.fixture
async def at() -> AsyncIterator[World]:
    async with world() as made:
        yield made


def hold(at: World) -> HeldProcesses:
    held = HeldProcesses()
    at.service._processes = held  # pyright: ignore[reportAttributeAccessIssue]
    return held


@pytest.mark.parametrize("truncate", [False, True])
async def test_text_of_too_many_characters_is_refused_unread(
    at: World, monkeypatch: pytest.MonkeyPatch, truncate: bool
) -> None:
    held = hold(at)

    def encoded(*_: object) -> None:
        raise AssertionError("the text is encoded")

    monkeypatch.setattr(TextEncoder, "_encoded", encoded)
    limit = 524288 if truncate else 26624
    with pytest.raises(PromptTooLong, match=rf"1000000 characters.*2048 tokens.*{limit}"):
        await at.encode("a b " * 250_000, truncate=truncate)
    assert held.texts == []


async def test_heavy_text_is_encoded_as_a_small_one_in_a_child(
    at: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[int] = []
    encoded = TextEncoder._encoded

    def noted(self: TextEncoder, text: EncodeRequest) -> EncodedPrompt:
        here.append(character_count(text))
        return encoded(self, text)

    monkeypatch.setattr(TextEncoder, "_encoded", noted)
    few = await at.encode("word " * 40, 1)
    with pytest.raises(PromptTooLong, match="8002 tokens"):
        await at.encode(HEAVY, 2)
    tokenizer = vocabulary.read_model_tokenizer(embedded.path()).tokenizer
    longest = max((tokenizer.decode([each]) for each in range(1024)), key=len)
    many = await at.encode(longest * (17_000 // len(longest)), 3)
    assert id_count(few.token_ids) < id_count(many.token_ids) <= 2048
    assert here == [200]


@pytest.mark.parametrize(
    "text", ["word " * 2000, HEAVY, "word " * 20_000], ids=("light", "heavy", "long")
)
async def test_prompt_that_is_too_long_is_sent_truncated(at: World, text: str) -> None:
    encoding = vocabulary.read_model_tokenizer(embedded.path()).tokenizer.encode(text)
    assert len(encoding.ids) > 2048
    reply = await at.encode(text, truncate=True)
    assert list(unpack_ids(reply.token_ids)) == encoding.ids[:2048]
    assert len(reply.block_digests) == 2048 // BLOCK_TOKENS * DIGEST_BYTES
    assert reply.untruncated_tokens == len(encoding.ids)
    assert (await at.encode("word", 2, truncate=True)).untruncated_tokens is None


async def test_small_text_passes_a_heavy_one(at: World) -> None:
    held = hold(at)
    heavy = asyncio.get_running_loop().create_task(at.encode(HEAVY, 1))
    await until(lambda: len(held.texts) == 1)
    assert held.tenants == [ACME]
    assert id_count((await at.encode("small", 2)).token_ids) > 0
    assert not heavy.done()
    held.go.set()
    assert id_count((await heavy).token_ids) == 1


async def test_copies_of_a_call_are_encoded_once(at: World) -> None:
    held = hold(at)
    async with asyncio.TaskGroup() as group:
        copies = [group.create_task(at.encode(HEAVY)) for _ in range(8)]
        await until(lambda: at.service.report().load == 8)
        held.go.set()
    assert len(held.texts) == 1
    assert len({copy.result().token_ids for copy in copies}) == 1
    assert at.running == set()


async def test_call_whose_caller_left_ends(at: World) -> None:
    held = hold(at)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_refused(at, HEAVY)) for _ in range(2)]
        await until(lambda: at.service.report().load == 2)
        at.cancel()
        await until(lambda: held.ended == 1)
    assert all(call.done() for call in calls)
    assert at.running == set()
    at.cancel()  # of a request that is not known: nothing
    held.go.set()
    assert id_count((await at.encode(HEAVY, 2)).token_ids) == 1


async def _refused(at: World, text: str) -> None:
    with pytest.raises(Unavailable):
        await at.encode(text)


class Work:
    """Doubles numbers in a thread that can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started = threading.Event()
        self.go = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        self.started.set()
        assert self.go.wait(5)
        return [ValueError("odd") if item % 2 else 2 * item for item in items]


async def test_what_arrives_meanwhile_is_one_batch_and_errors_are_ones_own():
    work = Work()
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=2)
        async with asyncio.TaskGroup() as group:
            runner = group.create_task(batcher.run())
            first = group.create_task(batcher.submit(2))
            await asyncio.to_thread(work.started.wait, 5)
            rest = [group.create_task(_caught(batcher, item)) for item in (4, 5, 6)]
            await asyncio.sleep(0)
            work.go.set()
            assert await first == 4
            assert [await task for task in rest] == [8, "odd", 12]
            runner.cancel()
    assert work.batches == [[2], [4, 5], [6]]


async def test_a_caller_that_left_is_skipped():
    work = Work()
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=8)
        async with asyncio.TaskGroup() as group:
            leaver = group.create_task(batcher.submit(2))
            await asyncio.sleep(0)
            leaver.cancel()
            stayer = group.create_task(batcher.submit(4))
            await asyncio.sleep(0)
            runner = group.create_task(batcher.run())
            work.go.set()
            assert await stayer == 8
            runner.cancel()
    assert work.batches == [[4]]


async def test_bug_is_raised_to_its_callers_and_the_next_batch_runs():
    def work(items: Sequence[int]) -> list[int | Exception]:
        return [1 // item for item in items]

    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=8)
        async with asyncio.TaskGroup() as group:
            runner = group.create_task(batcher.run())
            with pytest.raises(ZeroDivisionError):
                await batcher.submit(0)
            assert await batcher.submit(1) == 1
            runner.cancel()


async def test_waiting_callers_are_cancelled_with_the_work():
    work = Work()
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=8)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(batcher.submit(2))
            runner = group.create_task(batcher.run())
            await asyncio.to_thread(work.started.wait, 5)
            runner.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            work.go.set()


async def _caught(batcher: Batcher[int, int], item: int) -> int | str:
    try:
        return await batcher.submit(item)
    except ValueError as error:
        return str(error)


async def test_a_broken_model_card_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(embedded.path(), tmp_path / "model"))
    (folder / "config.json").write_text("{")
    async with NatsServer() as server, asyncio.timeout(20):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "antiphon.tokenizer", "--instance", "tokenizer-0"),
            *("--bus-url", server.url, "--model-path", str(folder)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, log = await process.communicate()
    assert process.returncode == 3
    assert f"{folder}/config.json: Input data was truncated" in log.decode()
    assert "Traceback" not in log.decode()
