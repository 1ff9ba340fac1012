"""Client and gateway over NATS: embeddings or scores of texts.

A client sends a request to `embed.<model>` with an inbox `client.<tenant>.<id>` as its reply
subject and gets one reply there: `EmbedReply` or `ErrorReply`. Nothing is stored: a repeated
request is computed again, with the same result.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Usage
from antiphon.wire.digests import CacheSaltText
from antiphon.wire.generate import IDS_MAX
from antiphon.wire.ids import ModelName
from antiphon.wire.processors import TokenId
from antiphon.wire.sampling import Dimensions, Priority

TEXTS_MAX = 256
"""Maximum texts of one request. Their vectors must fit into one message, too."""
Texts = Annotated[tuple[str, ...], Meta(min_length=1, max_length=TEXTS_MAX)]
Rows = Annotated[
    tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=IDS_MAX)], ...],
    Meta(min_length=1, max_length=TEXTS_MAX),
]


class EmbedRequest(Message):
    """Embed texts with an embedding model, or score them with a classifier or reward model.

    Attributes:
        texts: Exactly one of `texts` and `prompt_ids` is given.
        pairs: A second text for each, encoded together with it.
        prompt_ids: Token ids in place of texts.
        dimensions: Truncate each vector to this length (Matryoshka models only).
        cache_salt: Cached prefixes are shared only with requests of the same salt.
        priority: Higher runs first, where priority scheduling is enabled.
        api_key: The tenant's API key, where the gateways require one.
    """

    model: ModelName
    texts: Texts | None = None
    pairs: Texts | None = None
    prompt_ids: Rows | None = None
    dimensions: Dimensions | None = None
    cache_salt: CacheSaltText = ""
    priority: Priority | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    traceparent: str | None = None
    api_key: Annotated[str, Meta(max_length=4096)] | None = None


class EmbedReply(Message):
    """The vectors or scores of the texts, in the order of the request.

    Attributes:
        vectors: float32, little-endian; raw scores of the model, one for each label.
        labels: Labels of the scores; empty for embeddings.
    """

    model: ModelName
    vectors: tuple[bytes, ...]
    labels: tuple[str, ...] = ()
    usage: Usage
