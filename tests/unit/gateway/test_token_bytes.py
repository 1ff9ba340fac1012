"""What tokens write, one after the other, is the text: through all services, over HTTP."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from tests.support.echo_worker import EchoWorker
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, running
from tokenizers import Tokenizer, decoders, models

from antiphon import embedded
from antiphon.config.gateway import GatewayConfig
from antiphon.detokenizer.incremental import TokenTexts
from antiphon.detokenizer.service import DetokenizerService
from antiphon.gateway.service import GatewayService
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.scheduler.service import SchedulerService
from antiphon.tokenizer.service import TokenizerService

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

SETTINGS = msgspec.structs.replace(QUICK, gateway=GatewayConfig(port=0))
TEXT = "Wave \N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}, naïve 日本!"


@asynccontextmanager
async def echoing() -> AsyncGenerator[str]:
    """The URL of a stack whose worker echoes the prompt."""
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        for service in (SchedulerService, TokenizerService, DetokenizerService, EchoWorker()):
            transport = MemoryTransport(broker)
            await stack.enter_async_context(running(service, transport, settings=SETTINGS))
        gateway = running(GatewayService, MemoryTransport(broker), settings=SETTINGS)
        started = await stack.enter_async_context(gateway)
        yield f"http://127.0.0.1:{started.service.port}"


async def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, once the services have found each other."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while True:
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                if reply.status != 503:
                    assert reply.status == 200, await reply.text()
                    return await reply.json()
            await asyncio.sleep(0.05)


async def test_the_bytes_of_tokens_that_split_a_character_are_joined_to_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert "\N{REPLACEMENT CHARACTER}" in [tokenizer.decode([id_]) for id_ in ids]
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 200,
    }
    async with echoing() as url:
        (choice,) = (await ask(url, body))["choices"]
    text, tokens = choice["message"]["content"], choice["logprobs"]["content"]
    assert TEXT in text
    assert b"".join(bytes(token["bytes"] or ()) for token in tokens).decode() == text
    for token in tokens:
        (top,) = token["top_logprobs"]
        assert (top["token"], top["bytes"]) == (token["token"], token["bytes"])
    silent = {token["token"] for token in tokens if token["bytes"] is None}
    assert silent, "the text leaves the marks of the template out"
    assert all(tokenizer.token_to_id(token) is not None for token in silent)


@pytest.fixture
def sentence_pieces(tmp_path: Path) -> Path:
    """A tokenizer like Llama 2's: words with their spaces, and bytes."""
    words = ["<unk>", "\u2581Hi", "\u2581there", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: id_ for id_, word in enumerate(words)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_words_keep_their_spaces_and_bytes_are_bytes(sentence_pieces: Path) -> None:
    tokenizer = Tokenizer.from_file(str(sentence_pieces / "tokenizer.json"))

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    texts = TokenTexts(decode, read_vocabulary(sentence_pieces).tokens)
    ids = [1, 2, *(3 + byte for byte in " \N{GRINNING FACE}".encode())]
    written = texts.token_bytes(ids, skips_special=True)
    assert (written[1], written[2]) == (b" Hi", b" there")
    by_id = {id_: written.get(id_, text.encode()) for id_, text in texts.texts(ids).items()}
    said = b"".join(by_id[id_] for id_ in ids).decode()
    assert said == " Hi there \N{GRINNING FACE}"
    assert said.removeprefix(" ") == decode(ids, skip_special_tokens=True)


def test_without_a_vocabulary_a_token_writes_its_text() -> None:
    texts = TokenTexts(lambda ids, _: f"<{ids[0]}>")
    assert texts.token_bytes([1, 2], skips_special=True) == {}
    assert texts.texts([1, 2]) == {1: "<1>", 2: "<2>"}
