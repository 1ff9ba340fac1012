"""A stack whose model sees, asked by the OpenAI client, unmodified, against transformers."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import random
import signal
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import anthropic
import numpy as np
import ollama
import openai
import pytest
import transformers
from openai import AsyncOpenAI
from tests.support.llava import IMAGE_TOKENS, PLACEHOLDER, picture, write_llava
from tests.support.wait import until
from tests.system.seeing import TOKENS, Seeing, answer, message, url
from tests.system.stack import pages_in_use, serving, wait_until

from antiphon.client.client import Client
from antiphon.wire.claim import Claim
from antiphon.wire.errors import EngineError, InvalidRequest
from antiphon.wire.media import EmbeddingForm, MediumInput
from antiphon.wire.tokenize import ChatMessage, MessagePart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

ENCODERS = ("encoder-0", "encoder-1")
QUESTION = "Which of the two is larger, and what is the colour of the sky above them, if any?"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    files = tmp_path_factory.mktemp("files")
    (files / "one.png").write_bytes(picture(1))
    with serving(
        *("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--media-allowed-local-path", str(files), "--media-images-max", "4"),
        *("--batching-chunk-tokens", "24", "--supervisor-encoders", str(len(ENCODERS))),
        *("--page-size", "16"),
        *("--media-claim-networks", "127.0.0.1/32"),
    ) as stack:
        yield Seeing(stack, folder, transformers.LlavaForConditionalGeneration, encoders=ENCODERS)


@pytest.fixture
async def client(seeing: Seeing) -> Any:
    async with AsyncOpenAI(base_url=f"{seeing.stack.url}/v1", api_key="none") as made:
        yield made


async def test_answers_are_those_of_transformers(seeing: Seeing, client: AsyncOpenAI) -> None:
    one, two, three = picture(1), picture(2, 200, 31), picture(3, 9, 70, "JPEG")
    asked = [
        ("What is this?", one),
        (two, "What is this?"),
        ("First ", one, " and then ", two, QUESTION),
        (three, three, one, "What has changed?"),
    ]
    replies = await asyncio.gather(*(answer(client, message(*parts)) for parts in asked))
    outputs = set[tuple[int, ...]]()
    for parts, (prompt, output) in zip(asked, replies, strict=True):
        images = [part for part in parts if isinstance(part, bytes)]
        placeholder = seeing.reference.config.image_token_index
        assert prompt.count(placeholder) == IMAGE_TOKENS * len(images)
        assert len(output) == TOKENS
        seeing.check(prompt, output, images)
        outputs.add(tuple(output))
    assert len(outputs) == len(asked), "the images make no difference"


async def test_a_stream_has_the_same_text_and_the_second_time_no_encoder_works(
    seeing: Seeing, client: AsyncOpenAI
) -> None:
    messages = message("Look: ", picture(11), picture(12), QUESTION)

    async def text() -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=TOKENS, stream=True
        )
        return "".join(
            [each.choices[0].delta.content or "" async for each in stream if each.choices]
        )

    before = seeing.worked()
    first = await text()
    calls, embedded = seeing.worked()
    assert (calls, embedded) == (before[0] + 2, before[1] + 2)
    again = await client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=TOKENS
    )
    assert first == again.choices[0].message.content
    assert seeing.worked() == (calls, embedded)


async def test_a_file_below_the_allowed_folder_is_as_its_bytes(
    seeing: Seeing, client: AsyncOpenAI, tmp_path: Path
) -> None:
    folder = seeing.stack.argument("--media-allowed-local-path")

    def named(path: str) -> list[Any]:
        part = {"type": "image_url", "image_url": {"url": f"file://{path}"}}
        return [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]

    by_file = await answer(client, named(f"{folder}/one.png"))
    assert by_file == await answer(client, message(picture(1), "What is this?"))
    (tmp_path / "secret.png").write_bytes(picture(1))
    for path in (f"{tmp_path}/secret.png", f"{folder}/../secret.png", f"{folder}/none.png"):
        with pytest.raises(openai.BadRequestError, match="not below the allowed folder"):
            await answer(client, named(path))


def test_prompts_of_generate_see_their_images(seeing: Seeing) -> None:
    one, two = picture(31), picture(32, 90, 40)
    both, named = f"First {PLACEHOLDER}, then {PLACEHOLDER}: ", f"Here: {PLACEHOLDER}"
    encoded = base64.b64encode(two).decode()
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {
        "text": [both, named, "Nothing here."],
        "image_data": [[{"url": url(one)}, encoded], "one.png", None],
        "sampling_params": sampling,
        "return_prompt_token_ids": True,
    }
    replies = seeing.stack.post("/generate", body)
    for reply, images in zip(replies, ([one, two], [picture(1)], []), strict=True):
        prompt = reply["prompt_token_ids"]
        assert prompt.count(seeing.placeholder) == IMAGE_TOKENS * len(images)
        seeing.check(prompt, reply["output_ids"], images)
    alone = {"text": both, "image_data": [url(one), encoded], "sampling_params": sampling}
    assert seeing.stack.post("/generate", alone)["text"] == replies[0]["text"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"text": "a", "image_data": url(picture(1))}, "text", "0 placeholders <image> for 1"),
        (
            {"text": ["a", f"b {PLACEHOLDER}"], "image_data": [None, [url(b"no image")]]},
            "image_data[1][0]",
            "not an image",
        ),
        (
            {"text": ["a", f"b {PLACEHOLDER}"], "image_data": [None, url(picture(1)[:60])]},
            "image_data[1]",
            "cannot be decoded",
        ),
        ({"input_ids": [5], "image_data": url(picture(1))}, "image_data", "token ids"),
        (
            {"text": PLACEHOLDER, "image_data": {"format": "processor_output"}},
            "image_data.format",
            "send the image",
        ),
    ],
)
def test_images_of_generate_that_cannot_be_used_are_a_400(
    seeing: Seeing, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = json.loads(seeing.stack.refusal("/generate", fields))["error"]
    assert reason in error["message"]
    assert error["param"] == param


async def test_tokens_are_counted_with_images(seeing: Seeing, client: AsyncOpenAI) -> None:
    one, question = picture(41), "What is this?"
    prompt, _ = await answer(client, message(one, question))
    body = {"messages": message(one, question)}
    assert seeing.stack.post("/tokenize", body)["tokens"] == prompt
    shown = [
        {"type": "input_image", "image_url": url(one)},
        {"type": "input_text", "text": question},
    ]
    body = {"input": [{"role": "user", "content": shown}]}
    assert seeing.stack.post("/v1/responses/input_tokens", body)["input_tokens"] == len(prompt)
    source: Any = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(one).decode(),
    }
    blocks: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    async with anthropic.AsyncAnthropic(base_url=seeing.stack.url, api_key="none") as other:
        counted = await other.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": blocks}]
        )
        assert counted.input_tokens == len(prompt)
        for call in (other.messages.count_tokens, other.messages.create):
            limit: Any = {"max_tokens": 2} if call == other.messages.create else {}
            source["data"] = "%"
            with pytest.raises(anthropic.BadRequestError, match=r"content\[0\].source"):
                await call(model="tiny", messages=[{"role": "user", "content": blocks}], **limit)


async def test_nats_clients_send_images(seeing: Seeing, client: AsyncOpenAI) -> None:
    one, two, question = picture(51), picture(1), "What differs?"
    folder = Path(seeing.stack.argument("--media-allowed-local-path"))
    parts = (MessagePart(medium=0), MessagePart(medium=1), MessagePart(text=question))
    turn = ChatMessage(role="user", content="", parts=parts)
    media = (MediumInput(data=one), MediumInput(url=f"file://{folder}/one.png"))
    reply = await client.chat.completions.create(
        model="tiny", messages=message(one, two, question), temperature=0, max_tokens=TOKENS
    )
    async with Client(seeing.stack.nats_url) as nats:
        completion = await nats.complete(
            "tiny", [turn], media=media, temperature=0, max_tokens=TOKENS
        )
        assert completion.text == reply.choices[0].message.content
        with pytest.raises(InvalidRequest, match="each must be named once") as caught:
            await nats.complete("tiny", [turn], media=media[:1])
        assert caught.value.param == "messages"
        for bad in (MediumInput(), MediumInput(data=b"no image")):
            with pytest.raises(InvalidRequest) as caught:
                await nats.complete("tiny", [turn], media=(media[0], bad))
            assert caught.value.param == "media[1]"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("data:image/png;base64,%%%", "nor base64 data"),
        ("data:image/png," + "a" * 8, "data URL must have the form"),
        (url(b"no image at all"), "not an image of a known format"),
        (url(picture(1)[:60]), "cannot be decoded"),
        ("http://127.0.0.1:1/a.png", "not a public address"),
        ("http://localhost:1/a.png", "could not be fetched"),
        ("http://[::ffff:127.0.0.1]/a.png", "not a public address"),
        ("ftp://example.com/a.png", "neither an http"),
    ],
)
def test_an_image_that_cannot_be_used_is_a_400_that_names_its_part(
    seeing: Seeing, source: str, reason: str
) -> None:
    parts = [{"type": "text", "text": "See: "}, {"type": "image_url", "image_url": {"url": source}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    error = json.loads(seeing.stack.refusal("/v1/chat/completions", body))
    error = error.get("error", error)
    assert reason in error["message"]
    assert error["param"] == "messages[0].content[1].image_url"


def test_too_many_images_and_placeholders_in_texts_are_refused(seeing: Seeing) -> None:
    def refusal(*parts: str | bytes) -> str:
        body = {"model": "tiny", "messages": message(*parts), "max_tokens": 2}
        return seeing.stack.refusal("/v1/chat/completions", body)

    assert "5 images; the limit is 4" in refusal(*[picture(1)] * 5)
    assert "2 placeholders for 1 media" in refusal(f"Here: {PLACEHOLDER}", picture(1))


async def test_an_image_is_sent_again_by_its_uuid_alone(
    seeing: Seeing, client: AsyncOpenAI
) -> None:
    asked = message(picture(61), "What is this?")
    asked[0]["content"][0]["uuid"] = "picture 61"
    prompt, output = await answer(client, asked)
    before = seeing.worked()
    asked[0]["content"][0]["image_url"] = None
    assert await answer(client, asked) == (prompt, output)
    assert seeing.worked()[1] == before[1], "it is the image that was embedded before"
    asked[0]["content"][0]["uuid"] = "picture 62"
    with pytest.raises(openai.BadRequestError, match="'picture 62' is kept") as caught:
        await answer(client, asked)
    assert caught.value.param == "messages[0].content[0].image_url"


async def test_an_embedding_that_a_client_has_made_is_as_its_image(
    seeing: Seeing, client: AsyncOpenAI
) -> None:
    image = picture(63)
    expected = await answer(client, message(image, "What is this?"))
    before = seeing.worked()
    part = seeing.embeds(image)
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]
    assert await answer(client, asked) == expected
    cached = seeing.metric("gateway-0", "cached_tokens_total")
    assert await answer(client, asked) == expected
    found = seeing.metric("gateway-0", "cached_tokens_total") - cached
    assert found >= len(expected[0]) - 16, "its key goes by its numbers"
    feature = part["image_embeds"]["feature"]
    rows, width = feature["shape"]
    numbers = np.frombuffer(base64.b64decode(feature["data"]), "<f4").reshape(rows, width)
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

    def generated(image: object) -> str:
        body = {"text": f"Here: {PLACEHOLDER}", "image_data": image, "sampling_params": sampling}
        return seeing.stack.post("/generate", body)["text"]

    made = {"format": "precomputed_embedding", "feature": numbers.tolist()}
    assert generated([made]) == generated(base64.b64encode(image).decode())
    calls, embedded = seeing.worked()
    assert (calls, embedded) == (before[0] + 1, before[1]), "it was called for the image alone"
    for wrong, reason in (
        (numbers[1:], f"has {rows - 1} rows; in this model such an image has {rows}"),
        (numbers[:, 1:], f"rows of {width - 1} numbers; this model has {width}"),
        (np.where(numbers == numbers.max(), np.inf, numbers), "not finite"),
    ):
        data = base64.b64encode(wrong.astype("<f4").tobytes()).decode()
        feature |= {"data": data, "shape": [*wrong.shape]}
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            await answer(client, asked)
        assert caught.value.param == "messages[0].content[0].image_embeds"


async def test_nats_clients_serve_media_that_are_too_large_for_a_message(
    seeing: Seeing, client: AsyncOpenAI
) -> None:
    """Above 1 MiB by claim; what is not allowed, or is gone, is refused."""
    image = picture(64, 900, 700, "BMP")
    assert len(image) > 1024**2
    reply = await client.chat.completions.create(
        model="tiny", messages=message(image, "?"), temperature=0, max_tokens=TOKENS
    )
    parts = (MessagePart(medium=0), MessagePart(text="?"))
    turn = ChatMessage(role="user", content="", parts=parts)
    async with Client(seeing.stack.nats_url, media_host="127.0.0.1") as nats:
        completion = await nats.complete(
            "tiny", [turn], media=(MediumInput(data=image),), temperature=0, max_tokens=TOKENS
        )
        assert completion.text == reply.choices[0].message.content
        assert not nats.media_bytes_held
    made = seeing.vision.embed(seeing.preprocess.decoded(image))
    form = EmbeddingForm(rows=made.tokens, width=made.hidden)
    async with Client(seeing.stack.nats_url) as nats:
        media = (MediumInput(data=made.data, embedding=form),)
        completion = await nats.complete(
            "tiny", [turn], media=media, temperature=0, max_tokens=TOKENS
        )
        assert completion.text == reply.choices[0].message.content
        claim = Claim(
            address="127.0.0.2:1", token="00", size_bytes=1, digest=bytes(32), expires_unix_ms=0
        )
        with pytest.raises(InvalidRequest, match=r"not fetched from 127\.0\.0\.2") as caught:
            await nats.complete("tiny", [turn], media=(MediumInput(claim=claim),))
        assert caught.value.param == "media[0]"


def broken(preprocess: Callable[[bytes], object]) -> Iterator[bytes]:
    """Images that are cut short, changed, or far too large, without end."""
    chance = random.Random(5)
    huge = bytearray(picture(1))
    huge[16:24] = struct.pack(">II", 60_000, 60_000)
    yield bytes(huge)
    while True:
        kind = chance.choice(("PNG", "JPEG", "WEBP", "GIF", "BMP"))
        data = bytearray(picture(chance.randrange(40), 24, 20, kind))
        if chance.random() < 0.5:
            del data[chance.randrange(len(data)) :]
        for _ in range(chance.randrange(6)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            preprocess(bytes(data))
        except EngineError:
            yield bytes(data)


@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it repairs
@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.long)])
async def test_malformed_images_are_400s_and_leave_nothing(seeing: Seeing, count: int) -> None:
    images = [*itertools.islice(broken(seeing.preprocess), count)]
    before = seeing.worked()
    slots = asyncio.Semaphore(32)

    async with aiohttp.ClientSession(seeing.stack.url) as session:

        async def send(data: bytes) -> tuple[int, str, str]:
            body = {"model": "tiny", "messages": message(data, "What is this?"), "max_tokens": 1}
            async with slots, session.post("/v1/chat/completions", json=body) as reply:
                error = (await reply.json()).get("error", {})
                # The reason of a 400 has details of its image; that of a 503 says what is missing.
                reason = error.get("message", "") if reply.status != 400 else ""
                return reply.status, error.get("param", ""), reason

        replies = Counter(await asyncio.gather(*map(send, images)))
    assert replies == {(400, "messages[0].content[0].image_url", ""): len(images)}
    calls, embedded = seeing.worked()
    assert calls > before[0] + count / 4, "headers alone gave them away"
    assert embedded == before[1]
    await asyncio.to_thread(
        wait_until, lambda: seeing.metric("gateway-0", "media_bytes") == 0, 10, "no bytes are held"
    )
    await asyncio.to_thread(wait_until, lambda: pages_in_use(seeing.stack) == 0, 10, "pages free")


async def test_a_response_and_the_one_that_continues_it_see_the_images(
    seeing: Seeing, client: AsyncOpenAI
) -> None:
    one, question = picture(23), "What is this?"
    shown: list[Any] = [
        {"type": "input_image", "image_url": url(one), "detail": "auto"},
        {"type": "input_text", "text": question},
    ]
    response = await client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": shown}],
        temperature=0,
        max_output_tokens=TOKENS,
    )
    asked = message(one, question)
    reply = await client.chat.completions.create(
        model="tiny", messages=asked, temperature=0, max_tokens=TOKENS
    )
    text = reply.choices[0].message.content
    assert response.output_text == text
    going_on = await client.responses.create(
        model="tiny",
        input="And now?",
        previous_response_id=response.id,
        temperature=0,
        max_output_tokens=TOKENS,
    )
    turns = [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    reply = await client.chat.completions.create(
        model="tiny", messages=[*asked, *turns], temperature=0, max_tokens=TOKENS
    )
    assert going_on.output_text == reply.choices[0].message.content
    bad: list[Any] = [{"role": "user", "content": [shown[1], shown[0] | {"image_url": "%"}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input=bad)
    assert caught.value.param == "input[0].content[1].image_url"


async def test_the_three_apis_have_the_same_prompt(seeing: Seeing, client: AsyncOpenAI) -> None:
    one, two, question = picture(21), picture(22), "What differs?"
    texts: list[str] = []
    reply = await client.chat.completions.create(
        model="tiny", messages=message(one, two, question), temperature=0, max_tokens=TOKENS
    )
    assert reply.usage is not None
    texts.append(reply.choices[0].message.content or "")
    sources: list[Any] = [
        {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        for data in (one, two)
    ]
    blocks: list[Any] = [{"type": "image", "source": each} for each in sources]
    asked: list[Any] = [{"role": "user", "content": [*blocks, {"type": "text", "text": question}]}]
    async with (
        anthropic.AsyncAnthropic(base_url=seeing.stack.url, api_key="none") as other,
        other.messages.stream(
            model="tiny",
            max_tokens=TOKENS,
            messages=asked,
            extra_body={"temperature": 0},
        ) as stream,
    ):
        texts.append(await stream.get_final_text())
        usage = (await stream.get_final_message()).usage
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached == reply.usage.prompt_tokens
    assert cached > 2 * IMAGE_TOKENS - 16
    async with ollama.AsyncClient(seeing.stack.url) as third:
        parts = await third.chat(
            "tiny",
            messages=[{"role": "user", "content": question, "images": [one, two]}],
            options={"temperature": 0, "num_predict": TOKENS},
            stream=True,
        )
        texts.append("".join([part.message.content or "" async for part in parts]))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("killed", [ENCODERS[:1], ENCODERS], ids=["one of two", "both"])
async def test_no_request_is_lost_when_encoders_die(
    seeing: Seeing, client: AsyncOpenAI, killed: Sequence[str]
) -> None:
    pids = {name: seeing.stack.pid(name) for name in killed}
    before = seeing.worked()[0]
    images = [picture(100 * len(killed) + number, 900, 700) for number in range(16)]
    asked = [*(("What is this?", image) for image in images), *((f"Say {n}.",) for n in range(16))]
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(answer(client, message(*parts))) for parts in asked]
        await until(lambda: seeing.worked()[0] > before, 30)
        for name, pid in pids.items():
            assert pid is not None, name
            os.kill(pid, signal.SIGKILL)
    for parts, each in zip(asked, answers, strict=True):
        prompt, output = each.result()
        seeing.check(prompt, output, [part for part in parts if isinstance(part, bytes)])
    for name, pid in pids.items():
        assert seeing.stack.pid(name) != pid
