"""How each API takes the options of images: their detail, and between which sizes they are."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec
import pytest

from antiphon.gateway.http.anthropic import parse as anthropic
from antiphon.gateway.http.anthropic.schema import PromptBody
from antiphon.gateway.http.core import fields
from antiphon.gateway.http.native.parse import parse_generate
from antiphon.gateway.http.native.schema import GenerateBody
from antiphon.gateway.http.ollama import parse as ollama
from antiphon.gateway.http.ollama.schema import OllamaChatBody
from antiphon.gateway.http.openai.parse import parse_chat
from antiphon.gateway.http.openai.responses.parse import (
    parse_responses_request,
    prepare_responses_request,
)
from antiphon.gateway.http.openai.responses.schema import ResponsesBody
from antiphon.gateway.http.openai.schema import ChatBody
from antiphon.gateway.nats.generate import to_generation_request
from antiphon.gateway.parsing.formats import NO_FORMATS
from antiphon.gateway.requests.generation_request import GenerationRequest, MediumSource
from antiphon.wire.claim import Claim, PixelLimits
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.generate import GenerateRequest
from antiphon.wire.ids import DEFAULT_TENANT
from antiphon.wire.media import EmbeddingForm

Parse = Callable[[dict[str, Any]], GenerationRequest]
URL = "https://a.example/b.png"
LIMITS = {"min_pixels": 5000, "max_pixels": 9000}
OPTIONS = {"mm_processor_kwargs": LIMITS}


def body_of(body: dict[str, Any], kind: type[fields.B]) -> fields.B:
    return fields.read(msgspec.json.encode(body), kind)[0]


def chat(body: dict[str, Any]) -> GenerationRequest:
    return parse_chat(body_of(body, ChatBody)).gen_requests[0]


def responses(body: dict[str, Any]) -> GenerationRequest:
    parsed = parse_responses_request(body_of(body, ResponsesBody), lambda text, _: text)
    return prepare_responses_request(parsed, parsed.items, NO_FORMATS)[0]


def messages(body: dict[str, Any]) -> GenerationRequest:
    return anthropic.parse_count(body_of(body, PromptBody), NO_FORMATS)


def ollama_chat(body: dict[str, Any]) -> GenerationRequest:
    parsed = ollama.parse_chat(body_of(body, OllamaChatBody), NO_FORMATS, ())
    assert parsed is not None
    return parsed.gen_request


def generate(body: dict[str, Any]) -> GenerationRequest:
    return parse_generate(body_of(body, GenerateBody)).gen_requests[0]


def nats(body: dict[str, Any]) -> GenerationRequest:
    request = msgspec.convert({"key": "k", "model": "m"} | body, GenerateRequest)
    return to_generation_request(request, DEFAULT_TENANT, b"")


def chat_body(**image: object) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": URL, **image}}
    return {"messages": [{"role": "user", "content": [part]}]}


def responses_body(**image: object) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": URL, **image}
    return {"input": [{"role": "user", "content": [part]}]}


def generate_body(**image: object) -> dict[str, Any]:
    return {"text": "<image>", "image_data": [{"url": URL, **image}]}


def nats_body(**image: object) -> dict[str, Any]:
    return {"prompt": "<image>", "media": [{"url": URL, **image}]}


MESSAGE = {
    "role": "user",
    "content": [{"type": "image", "source": {"type": "url", "url": URL}}],
}


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (chat, chat_body, "messages[0].content[0].image_url.detail"),
        (responses, responses_body, "input[0].content[0].detail"),
        (generate, generate_body, "image_data[0].detail"),
    ],
    ids=["chat", "responses", "generate"],
)
def test_detail_of_an_image_is_read_or_refused(
    parse: Parse, body: Callable[..., dict[str, Any]], param: str
) -> None:
    for detail in ("auto", "low", "high"):
        assert [each.detail for each in parse(body(detail=detail)).media] == [detail]
    assert parse(body()).media[0].detail is None
    with pytest.raises(InvalidRequest, match=r"detail: .*'lowest'") as caught:
        parse(body(detail="lowest"))
    assert caught.value.param == param


def test_detail_of_responses_may_be_that_of_the_original() -> None:
    assert responses(responses_body(detail="original")).media[0].detail == "high"


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (chat, chat_body() | OPTIONS),
        (responses, responses_body() | OPTIONS),
        (messages, {"messages": [MESSAGE]} | OPTIONS),
        (
            ollama_chat,
            {
                "model": "m",
                "messages": [{"role": "user", "content": "?", "images": [URL]}],
                "options": LIMITS,
            },
        ),
        (generate, generate_body() | OPTIONS),
        (nats, nats_body(detail="low") | LIMITS),
    ],
    ids=["chat", "responses", "messages", "ollama", "generate", "nats"],
)
def test_sizes_of_images_are_limited_in_every_api(parse: Parse, body: dict[str, Any]) -> None:
    gen_request = parse(body)
    assert len(gen_request.media) == 1
    assert gen_request.pixel_limits == PixelLimits(least=5000, most=9000)
    if parse is nats:
        assert gen_request.media[0].detail == "low"
        return
    group: dict[str, Any] = dict(LIMITS, fps=2)
    place = "options" if parse is ollama_chat else "mm_processor_kwargs"
    body = {**body, place: group}
    if parse is ollama_chat:
        with pytest.raises(Unsupported, match="only videos have frames") as caught:
            parse(body)
        assert caught.value.param == f"{place}.fps"
        del group["fps"]
    else:
        assert parse(body).pixel_limits == PixelLimits(least=5000, most=9000, fps=2)
    group |= {"max_pixels": 0}
    with pytest.raises(InvalidRequest) as refused:
        parse(body)
    assert refused.value.param == f"{place}.max_pixels"


ROWS = [[1.0, 2.5], [3.0, -4.0], [0.0, 0.5]]
ROW_BYTES = array("f", chain.from_iterable(ROWS)).tobytes()


def embeds_body(**embeds: object) -> dict[str, Any]:
    part = {"type": "image_embeds", "image_embeds": embeds}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}


def precomputed_body(**embeds: object) -> dict[str, Any]:
    return generate_body(url="", format="precomputed_embedding", **embeds)


@pytest.mark.parametrize(
    ("parse", "body", "at"),
    [
        (chat, embeds_body, "messages[0].content[0].image_embeds"),
        (generate, precomputed_body, "image_data[0]"),
    ],
    ids=["chat", "generate"],
)
def test_embeddings_are_lists_of_numbers_or_bytes(
    parse: Parse, body: Callable[..., dict[str, Any]], at: str
) -> None:
    listed = parse(body(feature=ROWS, image_grid_thw=[[1, 2, 6]])).media[0]
    form = EmbeddingForm(rows=3, width=2, patches=(2, 6))
    assert listed == MediumSource(ROW_BYTES, at, embedding=form)
    data = {"data": "AAAA", "shape": [3, 2], "dtype": "bfloat16"}
    packed = parse(body(feature=data, image_sizes=[[30, 40]])).media[0]
    form = EmbeddingForm(rows=3, width=2, dtype="bfloat16", size=(40, 30))
    assert packed == MediumSource("AAAA", at, embedding=form)
    for wrong, field in (
        ({}, "feature"),
        ({"feature": []}, "feature"),
        ({"feature": [[1.0], [1.0, 2.0]]}, "feature"),
        ({"feature": [["a"]]}, "feature[0][0]"),
        ({"feature": {"data": "", "shape": [1]}}, "feature.shape"),
        ({"feature": {"data": "", "shape": [1, 1], "dtype": "int8"}}, "feature.dtype"),
        ({"feature": ROWS, "image_grid_thw": [[2, 2, 6]]}, "image_grid_thw"),
        ({"feature": ROWS, "image_sizes": [[1, 2, 3]]}, "image_sizes"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse(body(**wrong))
        assert caught.value.param == f"{at}.{field}"


def test_pixels_of_a_clients_processor_are_refused() -> None:
    with pytest.raises(Unsupported, match="must be precomputed_embedding") as caught:
        generate(generate_body(format="processor_output", feature=ROWS))
    assert caught.value.param == "image_data[0].format"
    with pytest.raises(InvalidRequest) as refused:
        chat({"messages": [{"role": "user", "content": [{"type": "image_embeds"}]}]})
    assert refused.value.param == "messages[0].content[0].image_embeds"


def test_media_of_nats_clients_have_one_source() -> None:
    form = {"rows": 3, "width": 2}
    claim = {"address": "10.0.0.1:4", "token": "00", "size_bytes": 24, "expires_unix_ms": 0}
    claim["digest"] = bytes(32)
    medium = nats({"prompt": "<image>", "media": [{"claim": claim, "embedding": form}]}).media[0]
    assert medium.source == msgspec.convert(claim, Claim)
    assert medium.embedding == EmbeddingForm(rows=3, width=2)
    for sources in ({}, {"url": URL, "claim": claim}):
        with pytest.raises(InvalidRequest, match="either data, url or claim") as caught:
            nats({"prompt": "<image>", "media": [sources]})
        assert caught.value.param == "media[0]"


def audio_part(kind: str, value: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (
            chat,
            audio_part("input_audio", {"data": "AAAA", "format": "wav"}),
            "messages[0].content[0].input_audio",
        ),
        (chat, audio_part("audio_url", {"url": URL}), "messages[0].content[0].audio_url"),
        (generate, {"text": "<a>", "audio_data": "AAAA"}, "audio_data"),
        (generate, {"text": "<a>", "audio_data": [{"url": URL}]}, "audio_data[0]"),
        (nats, {"prompt": "<a>", "media": [{"url": URL, "audio": True}]}, "media[0]"),
    ],
)
def test_audio_is_a_medium(parse: Parse, body: dict[str, Any], param: str) -> None:
    (medium,) = parse(body).media
    assert (medium.sound, medium.video, medium.param) == (True, False, param)
    assert medium.kind == "audio"
    assert medium.source in ("AAAA", URL)


def test_audio_that_is_not_there_is_refused() -> None:
    for value in ({}, {"input_audio": {"data": ""}}):
        part = {"type": "input_audio", **value}
        with pytest.raises(InvalidRequest, match="requires input_audio") as caught:
            chat({"messages": [{"role": "user", "content": [part]}]})
        assert caught.value.param == "messages[0].content[0].input_audio"
    with pytest.raises(InvalidRequest, match="audio requires url"):
        generate({"text": "<a>", "audio_data": ""})
    with pytest.raises(InvalidRequest, match="either a video or audio"):
        nats({"prompt": "<a>", "media": [{"url": URL, "audio": True, "video": True}]})
