"""How a worker fetches a prompt from its gateway: late, in part, in another form, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace
from tests.support.wait import until
from tests.support.worker import attempt

from antiphon.model_worker.protocol import media
from antiphon.model_worker.protocol.media import PromptFetcher
from antiphon.model_worker.protocol.worker_output import DropPrompt, FetchPrompt
from antiphon.service.clock import SystemClock, deadline_in
from antiphon.service.startup import bind
from antiphon.service.tasks import Tasks
from antiphon.transfer.blobs import BlobServer, BlobStore, new_token
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator

    import pytest

    from antiphon.service.service import Runtime
    from antiphon.wire.claim import Claim
    from antiphon.wire.errors import EngineError

PROMPT = pack_ids(range(100_000))


class Bench:
    """A gateway's store, and a fetcher."""

    def __init__(self, group: asyncio.TaskGroup, bound: socket.socket) -> None:
        self.clock = SystemClock()
        self.group = group
        self.bound = bound
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        self.store = BlobStore(address, 10**6, self.clock)
        self.prompts: list[bytes] = []
        self.errors: list[EngineError] = []
        self.fetcher = PromptFetcher(
            cast("Runtime", self),
            bytes_max=len(PROMPT),
            fetched=lambda _, prompt: self.prompts.append(prompt),
            failed=lambda _, error: self.errors.append(error),
        )

    def serve(self) -> None:
        self.group.create_task(BlobServer(self.bound, self.store).run())

    def put(self) -> Claim:
        return self.store.put(PROMPT, 60, checksum=hashlib.sha256(PROMPT).digest())

    def fetch(self, claim: Claim, left_s: float = 30.0) -> None:
        due_ms = deadline_in(left_s, self.clock)
        self.fetcher.begin(FetchPrompt(RequestId("r"), attempt(), claim, due_ms))

    async def error(self) -> EngineError:
        await until(lambda: bool(self.errors))
        assert (len(self.fetcher), self.prompts) == (0, [])
        return self.errors[0]


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench]:
    with bind("127.0.0.1", 0) as bound:
        async with Tasks() as group:
            yield Bench(group, bound)
            await group.cancel(1.0)


async def test_prompt_of_a_gateway_that_answers_late_arrives_whole() -> None:
    async with bench() as at:
        at.fetch(at.put())
        await asyncio.sleep(0)
        at.serve()
        await until(lambda: bool(at.prompts))
        assert at.prompts == [PROMPT]
        assert not at.errors


async def test_prompt_that_its_gateway_holds_no_longer_is_gone() -> None:
    async with bench() as at:
        at.serve()
        at.fetch(replace(at.put(), token=new_token()))
        error = await at.error()
        assert error.code == "unavailable"
        assert error.message.endswith("has it no longer")


async def test_prompt_with_another_digest_is_refused() -> None:
    async with bench() as at:
        at.serve()
        at.fetch(replace(at.put(), digest=bytes(32)))
        assert "another checksum" in (await at.error()).message


async def test_prompt_that_is_longer_than_the_context_is_refused() -> None:
    async with bench() as at:
        at.serve()
        at.fetch(replace(at.put(), size_bytes=len(PROMPT) + 4))
        assert (await at.error()).code == "request_too_large"


async def test_prompt_of_a_gateway_that_never_answers_ends_with_its_deadline() -> None:
    async with bench() as at:
        at.fetch(at.put(), left_s=0.3)
        assert (await at.error()).code == "deadline"


async def test_gateway_that_cannot_be_reached_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "GATEWAY_LOST_S", 0.1)
    async with bench() as at:
        claim = at.put()
        at.bound.close()
        at.fetch(claim)
        error = await at.error()
        assert error.code == "unavailable"
        assert "media.port" in error.message


async def test_prompt_that_is_dropped_is_reported_in_no_way() -> None:
    async with bench() as at:
        at.fetch(at.put())
        at.fetcher.drop(DropPrompt(RequestId("r"), attempt()))
        at.serve()
        assert len(at.fetcher) == 0
        at.fetch(at.put())  # another one comes after it
        await until(lambda: bool(at.prompts))
        assert (len(at.prompts), at.errors) == (1, [])
