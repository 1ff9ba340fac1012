"""Videos in chats, /generate and over NATS, against transformers for the same frames."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
import transformers
from aiohttp import web
from openai import AsyncOpenAI
from tests.support import video_files
from tests.support.llava import picture
from tests.support.qwen_vl import PLACEHOLDER_ID, patches, video_patches, write_qwen3_vl
from tests.system.seeing import TIE, TOKENS, Seeing, answer, url
from tests.system.stack import serving, wait_until

from antiphon.client.client import Client
from antiphon.wire.claim import VideoHeader
from antiphon.wire.frames import pack_frames
from antiphon.wire.media import MediumInput
from antiphon.wire.tokenize import ChatMessage, MessagePart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

FRAMES = [picture(number, 60, 44) for number in range(5)]
"""An odd number, at two a second."""
LISTED = "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in FRAMES)
PLAIN = "<|vision_start|><|video_pad|><|vision_end|>"


def asked(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts]}]


def video(source: str = LISTED) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": source}}


def check(seeing: Seeing, prompt: list[int], output: list[int], image: bytes) -> None:
    """Compare with what transformers generates of the same prompt, image and frames, greedily."""
    videos = seeing.vision.videos
    assert videos is not None
    header = VideoHeader(frames=len(FRAMES), fps=2, chosen=True)
    decoded = videos.decoded(pack_frames(FRAMES), 60, 44, header)
    ids = torch.tensor([prompt + output])
    kinds = (ids == PLACEHOLDER_ID).int() + 2 * (ids == PLACEHOLDER_ID + 1).int()
    with torch.inference_mode():
        logits = seeing.reference(
            input_ids=ids,
            mm_token_type_ids=kinds,
            **patches([torch.as_tensor(seeing.preprocess(image))]),
            **video_patches(torch.as_tensor(videos.normalized(decoded.pixels))),
        ).logits[0]
    for index, token in enumerate(output, start=len(prompt) - 1):
        assert logits[index, token] >= logits[index].max() - TIE, f"token {index} of {output}"


MEBIBYTE = 1024**2


@asynccontextmanager
async def serving_file(data: bytes) -> AsyncGenerator[str]:
    """Serves a file, under any query, and one that is said to have 200 MiB."""

    async def sent(_: web.Request) -> web.Response:
        return web.Response(body=data)

    async def claimed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 200 * MEBIBYTE
        await response.prepare(request)
        return response

    app = web.Application()
    app.add_routes([web.get("/sent.mp4", sent), web.get("/claimed.mp4", claimed)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def check_large(client: AsyncOpenAI, folder: Path) -> None:
    """A file as telephones write it, of 70 MiB, is seen as one without its padding."""
    small = video_files.written()
    large = video_files.padded(small, 70 * MEBIBYTE)
    (folder / "small.mp4").write_bytes(small)
    right = await answer(client, asked(video(f"file://{folder}/small.mp4")))
    async with serving_file(large) as at:
        assert await answer(client, asked(video(f"{at}/sent.mp4"))) == right
        for sources, reason in (
            ([f"{at}/claimed.mp4"], f"has {200 * MEBIBYTE} bytes; the limit is {100 * MEBIBYTE}"),
            # Each would fit alone.
            ([f"{at}/sent.mp4?1", f"{at}/sent.mp4?2"], f"the limit is {120 * MEBIBYTE} bytes"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                await answer(client, asked(*map(video, sources)))


async def test_answers_are_those_of_transformers_and_are_cached(tmp_path: Path) -> None:
    """A picture and a video, which is fetched in several windows; then of all ways in."""
    folder = write_qwen3_vl(tmp_path)
    model = ("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32")
    sizes = ("--page-size", "16", "--batching-chunk-tokens", "24")
    window = ("--batching-media-window-bytes", "4096")
    files = ("--allowed-local-media-path", str(tmp_path), "--media-allowed-domains", "localhost")
    most = ("--media-url-max-file-size-mb", "100", "--media-store-bytes-max", str(160 * MEBIBYTE))
    with serving(*model, *sizes, *window, *files, *most) as stack:
        seeing = Seeing(stack, folder, transformers.Qwen3VLForConditionalGeneration)
        image = picture(9)
        shown = {"type": "image_url", "image_url": {"url": url(image)}}
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            both = asked(shown, video())
            prompt, output = await answer(client, both)
            check(seeing, prompt, output, image)
            text = stack.post("/detokenize", {"model": "tiny", "tokens": prompt})["text"]
            assert [stamp in text for stamp in ("<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>")]
            worked = seeing.worked()
            assert worked[1] == 2
            assert await answer(client, both) == (prompt, output)
            assert seeing.worked() == worked, "no encoder is called for what is cached"
            # Other seconds are written, and the frames are embedded no second time.
            slower = (await answer(client, asked(video()), mm_processor_kwargs={"fps": 1}))[0]
            text = stack.post("/detokenize", {"model": "tiny", "tokens": slower})["text"]
            assert "<0.5 seconds>" in text
            assert seeing.worked()[1] == worked[1]

            expected = await client.chat.completions.create(
                model="tiny", messages=asked(video()), temperature=0, max_tokens=TOKENS
            )
            parts = (MessagePart(text="Look: "), MessagePart(medium=0))
            turn = ChatMessage(role="user", content="Look: ", parts=parts)
            async with Client(stack.nats_url) as nats:
                for medium in (
                    MediumInput(url=LISTED, video=True),
                    MediumInput(data=pack_frames(FRAMES), video=True),
                ):
                    completion = await nats.complete(
                        "tiny", [turn], media=(medium,), temperature=0, max_tokens=TOKENS
                    )
                    assert completion.text == expected.choices[0].message.content
            sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
            body = {"text": f"Here: {PLAIN}", "video_data": LISTED, "sampling_params": sampling}
            written = stack.post("/generate", body)
            listed = stack.post("/generate", body | {"video_data": [{"url": LISTED}]})
            assert written["text"] == listed["text"]
            assert written["meta_info"]["prompt_tokens"] > 50

            many = LISTED + ",".join(["", *LISTED.partition(",")[2].split(",") * 3])
            for source, reason in (
                (many, "has 20 frames; the limit is 16"),
                ("data:video/mp4;base64," + base64.b64encode(b"\0" * 64).decode(), "not a video"),
                (LISTED[:-40], "image"),
            ):
                with pytest.raises(openai.BadRequestError, match=reason) as caught:
                    await answer(client, asked(shown, video(source)))
                assert caught.value.param == "messages[0].content[2].video_url"

            await check_large(client, tmp_path)
            await asyncio.to_thread(
                wait_until,
                lambda: seeing.metric("gateway-0", "media_bytes") == 0,
                10,
                "no bytes are held",
            )
