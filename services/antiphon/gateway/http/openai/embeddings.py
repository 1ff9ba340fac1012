"""/v1/embeddings and /v1/classify: a vector, or the probabilities of labels, per input."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.endpoints import operation
from antiphon.gateway.http.core.fields import EMBEDDING
from antiphon.gateway.http.core.limits import Ids, PromptIds, Rid
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.pooling import (
    INPUTS_MAX,
    PoolingEndpoints,
    check_not_blank,
    pooling_requests,
    sigmoid,
    softmax,
)
from antiphon.gateway.http.core.writer import total_usage
from antiphon.gateway.http.openai.schema import UsageBody, usage_body
from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.gateway.requests.pooling import Pooled, PooledInput, pool_params
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import new_request_id
from antiphon.wire.namespaces import CacheSaltText, cache_salt
from antiphon.wire.sampling import Dimensions, PoolParams, Priority, TokenId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.tokenize import PoolingCard


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A text or an image, in the format of multimodal models."""

    text: str | None = None
    image: str | None = None
    """URL, `data:` URL or base64 of an image, for models that embed images."""
    video: str | None = None
    """Not supported."""


Input = str | Annotated[Ids[str | TokenId | PromptIds | InputPart], Meta(min_length=1)]


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to embedding, classification and reranking."""

    model: str | None = None
    """Name of the served model. Optional."""
    rid: Rid | None = None
    """Request id, unique among running requests."""
    cache_salt: CacheSaltText | None = None
    """Restricts prefix cache sharing to requests with the same salt."""
    extra_key: CacheSaltText | None = None
    """Like `cache_salt`; both must match."""

    def requests(
        self,
        prompts: Sequence[PooledInput],
        *,
        api: str,
        field: str,
        pool: PoolParams | None,
        priority: int | None = None,
    ) -> list[GenerationRequest]:
        return pooling_requests(
            prompts,
            api=api,
            field=field,
            model=self.model,
            pool=pool,
            rid=self.rid,
            priority=priority,
            salt=cache_salt(self.cache_salt, self.extra_key),
        )

    UNSUPPORTED: ClassVar = EMBEDDING


class EmbeddingBody(PoolingBody, frozen=True, kw_only=True):
    """Create an embedding vector for each input."""

    input: Input
    """Text or token ids to process, or a list of up to 2048 of either. Models that embed images
    take `{"image": ...}` in such a list, and the `data:` URL of an image in place of a text."""
    encoding_format: Literal["float", "base64"] | None = None
    """Format of the vectors: `float` (default), or `base64` of little-endian float32."""
    dimensions: Dimensions | None = None
    """Number of leading dimensions to return, for Matryoshka models."""
    priority: Priority | None = None
    """Scheduling priority; higher runs first. Requires --enable-priority-scheduling."""


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding vector of one input."""

    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str
    index: int


class EmbeddingReply(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: UsageBody


class ClassifyBody(PoolingBody, frozen=True, kw_only=True):
    """Classify each input."""

    input: Input
    """Text or token ids to process, or a list of up to 2048 of either."""


class ClassifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The most likely label of an input, and the probability of every label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct, frozen=True, kw_only=True):
    """Labels, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyResult]
    usage: UsageBody


class EmbeddingsEndpoints(PoolingEndpoints):
    @operation(
        "POST",
        "/v1/embeddings",
        "Create embedding vectors. Requires an embedding model.",
        body=EmbeddingBody,
        reply=EmbeddingReply,
        examples=(
            {"input": "Hello"},
            {"input": ["One", "Two"], "encoding_format": "base64"},
            {"input": [[1, 2], [3]]},
        ),
    )
    async def _embed(self, request: web.Request) -> web.Response:
        card = await self.card("embed", scores=False)
        body, gen_requests = await self.response_handler.parse_body(
            request, EmbeddingBody, lambda body: (body, _embedding_requests(body, card))
        )
        pooled = await self.pooled(request, gen_requests)
        as_text = body.encoding_format == "base64"
        return json_reply(
            EmbeddingReply(
                data=[
                    EmbeddingObject(
                        embedding=base64.b64encode(one.vector).decode() if as_text else one.numbers,
                        index=index,
                    )
                    for index, one in enumerate(pooled)
                ],
                model=self.model,
                usage=usage_body(total_usage([one.usage for one in pooled])),
            )
        )

    @operation(
        "POST",
        "/v1/classify",
        "Classify texts. Requires a classification model.",
        body=ClassifyBody,
        reply=ClassifyReply,
        examples=({"input": "Good!"}, {"input": ["Good!", "Bad!"]}),
    )
    async def _classify(self, request: web.Request) -> web.Response:
        card = await self.card("classify", scores=True)
        gen_requests = await self.response_handler.parse_body(
            request,
            ClassifyBody,
            lambda body: body.requests(
                prompts_of(body.input, "input"), api="classify", field="input", pool=PoolParams()
            ),
        )
        scored = await self.pooled(request, gen_requests)
        return json_reply(
            ClassifyReply(
                id=f"classify-{new_request_id()}",
                created=int(time.time()),
                model=self.model,
                data=[_classified(index, one, card) for index, one in enumerate(scored)],
                usage=usage_body(total_usage([one.usage for one in scored])),
            )
        )


def prompts_of(given: Input, field: str, *, images: bool = False) -> list[PooledInput]:
    """Return the inputs in order; `images` are among those of models that embed them.

    Raises:
        InvalidRequest: There are too many, or one is empty, or two things at once.
        Unsupported: One is an image or a video, which the model does not take.
    """
    listed = [given] if isinstance(given, str) else given
    ids = [each for each in listed if isinstance(each, int)]
    if ids and len(ids) < len(listed):
        raise InvalidRequest.at(field, "must be texts or token ids, not both")
    parts = [tuple(ids)] if ids else listed
    prompts = [_prompt(each, f"{field}[{n}]", images=images) for n, each in enumerate(parts)]
    if len(prompts) > INPUTS_MAX:
        raise InvalidRequest.at(field, f"more than {INPUTS_MAX} inputs")
    check_not_blank(prompts, field)
    return prompts


_IMAGE_URL = "data:image/"


def _prompt(
    given: str | int | Sequence[int] | InputPart, field: str, *, images: bool
) -> PooledInput:
    if isinstance(given, InputPart):
        return _part(given, field, images=images)
    if not isinstance(given, str | int):
        return tuple(given)
    text = str(given)
    is_image = images and text[: len(_IMAGE_URL)].lower() == _IMAGE_URL
    return MediumSource(text, field) if is_image else text


def _part(given: InputPart, field: str, *, images: bool) -> PooledInput:
    if given.video is not None:
        raise Unsupported.at(f"{field}.video", "this model takes no videos")
    if given.image is None:
        return given.text or ""
    if not images:
        raise Unsupported.at(f"{field}.image", "this model accepts text only")
    if given.text is not None:
        text = "this model makes a vector of a text or of an image: send them as two inputs"
        raise InvalidRequest.at(field, text)
    if not given.image:
        raise InvalidRequest.at(f"{field}.image", "empty")
    return MediumSource(given.image, f"{field}.image")


def _embedding_requests(body: EmbeddingBody, card: PoolingCard) -> list[GenerationRequest]:
    return body.requests(
        prompts_of(body.input, "input", images=card.images),
        api="embeddings",
        field="input",
        pool=pool_params(card, body.dimensions),
        priority=body.priority,
    )


def probabilities(scores: list[float], *, several: bool) -> list[float]:
    """Label probabilities: softmax, or sigmoid per label for multi-label models."""
    if several or len(scores) == 1:
        return [sigmoid(score) for score in scores]
    return softmax(scores)


def _classified(index: int, scored: Pooled, card: PoolingCard) -> ClassifyResult:
    probs = probabilities(scored.numbers, several=card.several)
    label = card.labels[probs.index(max(probs))]
    return ClassifyResult(index=index, label=label, probs=probs, num_classes=len(probs))
