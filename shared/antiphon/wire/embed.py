"""Client and gateway over NATS: texts become vectors, or scores.

A client requests `embed.<model>` with an inbox `client.<tenant>.<id>` as its reply subject, and is
answered there once: with `EmbedReply`, or with an `ErrorReply`. Nothing of it is kept: asked again,
it is computed again, and comes to the same.
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
"""Most texts of one request. Their vectors have to fit into one message, too."""
Texts = Annotated[tuple[str, ...], Meta(min_length=1, max_length=TEXTS_MAX)]
Rows = Annotated[
    tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=IDS_MAX)], ...],
    Meta(min_length=1, max_length=TEXTS_MAX),
]


class EmbedRequest(Message):
    """Texts that become vectors, of a model that embeds, or scores, of one that judges.

    Attributes:
        texts: Exactly one of `texts` and `prompt_ids` is given.
        pairs: A second text for each, which is read together with it.
        prompt_ids: Token ids in place of texts.
        dimensions: So many of each vector's first numbers, of a model made for that.
        cache_salt: Cached prefixes are shared only with requests that say the same.
        priority: The higher goes first, where the operator goes by priorities.
        api_key: The tenant's, where the gateways ask for one.
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
    """What each text became, in their order.

    Attributes:
        vectors: float32, little-endian; scores as they leave the model, one for each label.
        labels: What the numbers are scores of; empty, where they are a vector.
    """

    model: ModelName
    vectors: tuple[bytes, ...]
    labels: tuple[str, ...] = ()
    usage: Usage
