"""A prompt that is too long for messages is fetched from its gateway, until its request ends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import GENERATE, running_post
from tests.unit.gateway.cluster import House, house

from antiphon.gateway.media.intake import is_reached
from antiphon.gateway.requests import submission
from antiphon.transfer.blobs import BlobGone, fetch
from antiphon.wire.base import Role
from antiphon.wire.claim import PromptClaim
from antiphon.wire.codec import pack_ids

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.wire.submit import SubmitRequest

PROMPT = list(range(1, 41))
CLAIMS = (PromptClaim.__name__,)


@asynccontextmanager
async def submitted(
    at: House, prompt: list[int], reads: tuple[str, ...] = CLAIMS
) -> AsyncGenerator[SubmitRequest]:
    """A running request, among processes that read these messages of later versions."""
    at.cluster.reads = reads
    peers = at.service.submission.runtime.peers
    await until(lambda: peers.read_by_all(PromptClaim, Role.SCHEDULER, Role.WORKER) == bool(reads))
    async with running_post(at, GENERATE, {"input_ids": prompt}) as task:
        yield at.cluster.submits[-1]
    assert task.result().status == 200


async def test_long_prompt_is_fetched_from_its_gateway_until_its_request_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "CLAIMED_BYTES_MIN", 100)
    async with house() as at:
        async with submitted(at, PROMPT) as submit:
            assert (submit.prompt_ids, submit.prompt_tokens) == (b"", len(PROMPT))
            assert submit.prompt is not None
            claim = submit.prompt.claim
            assert await fetch(claim, timeout_s=5, bytes_max=1000) == pack_ids(PROMPT)
            assert "media_bytes 160.0" in at.metrics_text
        with pytest.raises(BlobGone):
            await fetch(claim, timeout_s=5, bytes_max=1000)
        assert "media_bytes 0.0" in at.metrics_text


async def test_long_prompt_is_sent_where_a_process_cannot_fetch_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "CLAIMED_BYTES_MIN", 100)
    async with house() as at, submitted(at, PROMPT, reads=()) as submit:
        assert (submit.prompt_ids, submit.prompt) == (pack_ids(PROMPT), None)


async def test_short_prompt_and_one_that_may_be_resumed_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "CLAIMED_BYTES_MIN", 100)
    async with house() as at, submitted(at, PROMPT[:20]) as submit:
        assert submit.prompt is None
    async with house() as at:
        body = {"input_ids": PROMPT, "stream": True}
        headers = {"X-Antiphon-Resume": "5"}
        async with running_post(at, GENERATE, body, hold_at=1, **headers):
            submit = at.cluster.submits[-1]
            assert (submit.prompt_ids, submit.prompt) == (pack_ids(PROMPT), None)


@pytest.mark.parametrize(
    ("address", "bus_url", "reached"),
    [
        ("127.0.0.1:5", "", True),
        ("127.0.0.1:5", "nats://127.0.0.1:4222, nats://localhost:4223", True),
        ("[::1]:5", "nats://[::1]:4222", True),
        ("127.0.0.1:5", "nats://broker:4222", False),
        ("127.0.0.1:5", "nats://127.0.0.1:4222,nats://10.0.0.2:4222", False),
        ("gateway-7:5", "nats://broker:4222", True),
    ],
)
def test_gateway_of_this_machine_alone_is_reached_if_the_broker_is_here(
    address: str, bus_url: str, reached: bool
) -> None:
    assert is_reached(address, bus_url) is reached


async def test_long_prompt_is_sent_where_no_worker_reaches_its_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "CLAIMED_BYTES_MIN", 100)
    async with house() as at:
        at.service.submission.media.serves_prompts = False
        async with submitted(at, PROMPT) as submit:
            assert (submit.prompt_ids, submit.prompt) == (pack_ids(PROMPT), None)
