"""/v1/tokenize and /v1/detokenize: conversion between text and token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.fields import model_of
from antiphon.gateway.http.core.image_options import ImageOptions, pixel_limits
from antiphon.gateway.http.core.limits import Json, Messages, Tools
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.openai.schema import (
    PROMPTS_MAX,
    ChatMessageParam,
    begins_answer,
    conversation,
    images,
)
from antiphon.gateway.requests.generation_request import GenerationRequest, media_fields
from antiphon.service.tasks import gather
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import new_request_id
from antiphon.wire.sampling import TokenId
from antiphon.wire.tokenize import TemplateParams

if TYPE_CHECKING:
    from aiohttp import web


_IDS_MAX = 131_072
_TIMEOUT_S = 30.0
_Rows = Meta(min_length=1, max_length=PROMPTS_MAX)


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Convert text, several texts, or a conversation to token ids."""

    model: str | None = None
    prompt: str | Annotated[list[str], _Rows] | None = None
    """Text to tokenize, or a list of texts."""
    messages: Annotated[Messages[ChatMessageParam], Meta(min_length=1)] | None = None
    """Conversation to tokenize, instead of `prompt`."""
    tools: Tools[Json] | None = None
    """Tools, passed to the chat template."""
    chat_template_kwargs: Json | None = None
    """Additional variables for the chat template."""
    mm_processor_kwargs: ImageOptions | None = None
    """Numbers of pixels between which images are scaled."""
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens to a text. Defaults to true."""
    add_generation_prompt: bool | None = None
    """Whether to append the start of the assistant's reply. Defaults to true."""


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids and their number; lists of both for several texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Convert token ids, or several lists of token ids, to text."""

    model: str | None = None
    tokens: Annotated[
        list[TokenId | Annotated[list[TokenId], Meta(max_length=_IDS_MAX)]],
        Meta(max_length=_IDS_MAX),
    ]
    """Token ids, or a list of token id lists."""
    skip_special_tokens: bool | None = None
    """Whether to omit special tokens. Defaults to true."""


class DetokenizeReply(msgspec.Struct, frozen=True):
    """The text, or one text per list of token ids."""

    text: str | list[str]


class TokenizeEndpoints(Endpoints):
    @operation(
        "POST",
        "/v1/tokenize /tokenize",
        "Convert text or a conversation to token ids.",
        body=TokenizeBody,
        reply=TokenizeReply,
        examples=(
            {"prompt": "Hello"},
            {"prompt": ["One", "Two"], "add_special_tokens": False},
            {"messages": [{"role": "user", "content": "Hello"}]},
        ),
    )
    async def _tokenize(self, request: web.Request) -> web.Response:
        read = await self.response_handler.parse_body(request, TokenizeBody, self._requests)
        gen_requests = [
            msgspec.structs.replace(gen_request, tenant=tenant_of(request)) for gen_request in read
        ]
        replies = await gather(
            [
                self.response_handler.tokenize(gen_request, new_request_id(), _TIMEOUT_S)
                for gen_request in gen_requests
            ]
        )
        rows = [list(unpack_ids(reply.token_ids)) for reply in replies]
        counts = [len(row) for row in rows]
        batch = gen_requests[0].api == "tokenize_batch"
        return json_reply(
            TokenizeReply(
                tokens=[*rows] if batch else [*rows[0]],
                count=counts if batch else counts[0],
                max_model_len=replies[0].context_tokens,
            )
        )

    def _requests(self, body: TokenizeBody) -> list[GenerationRequest]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        self.check_model(model_of(body.model))
        if body.messages is not None:
            media = images(body.messages)
            template = TemplateParams(
                generation_prompt=body.add_generation_prompt is not False,
                tools=_text(body.tools),
                options=_text(body.chat_template_kwargs),
            )
            return [
                GenerationRequest(
                    api="tokenize",
                    model=None,
                    messages=conversation(body.messages),
                    media=media,
                    pixel_limits=pixel_limits(body.mm_processor_kwargs),
                    fields=media_fields(media),
                    continue_final_message=begins_answer(body.messages),
                    template=template,
                )
            ]
        several = isinstance(body.prompt, list)
        prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        return [
            GenerationRequest(
                api="tokenize_batch" if several else "tokenize",
                model=None,
                prompt=prompt,
                special_tokens=body.add_special_tokens is not False,
            )
            for prompt in prompts
        ]

    @operation(
        "POST",
        "/v1/detokenize /detokenize",
        "Convert token ids to text.",
        body=DetokenizeBody,
        reply=DetokenizeReply,
        examples=({"tokens": [5, 6, 7]}, {"tokens": [[5], [6, 7]]}),
    )
    async def _detokenize(self, request: web.Request) -> web.Response:
        rows, several, skips = await self.response_handler.parse_body(
            request, DetokenizeBody, self._rows
        )
        texts = await self.tokenizers.decode(rows, skip_special_tokens=skips)
        return json_reply(DetokenizeReply(list(texts) if several else texts[0]))

    def _rows(self, body: DetokenizeBody) -> tuple[list[list[int]], bool, bool]:
        self.check_model(model_of(body.model))
        skips = body.skip_special_tokens is not False
        lists = [row for row in body.tokens if isinstance(row, list)]
        if not lists:
            return [[token for token in body.tokens if isinstance(token, int)]], False, skips
        if len(lists) != len(body.tokens):
            raise InvalidRequest.at(
                "tokens", "must be a list of token ids or a list of token id lists, not a mix"
            )
        if len(lists) > PROMPTS_MAX:
            raise InvalidRequest.at("tokens", f"{len(lists)} lists; the limit is {PROMPTS_MAX}")
        count = sum(map(len, lists))
        if count > _IDS_MAX:
            raise InvalidRequest.at("tokens", f"{count} ids; the limit is {_IDS_MAX}")
        return lists, True, skips


def _text(value: list[Json] | Json | None) -> str | None:
    return None if not value else msgspec.json.encode(value).decode()
