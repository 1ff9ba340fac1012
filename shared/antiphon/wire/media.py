"""Media of a prompt: what the gateway knows of them, where they are in it, and their claims.

The gateway owns a medium until the request's terminal, and reads its size from the header. The
tokenizer decides how many tokens it has; the worker lets an encoder embed it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.wire.base import Value
from antiphon.wire.bounds import Count, Sha256, TokenCount
from antiphon.wire.claim import AudioWindow, Claim, PixelLimits, VideoHeader

MEDIA_MAX = 256
"""Maximum media of one request."""
MEDIUM_BYTES = 1536
"""Size of a medium in a message: an upper bound."""


Detail = Literal["auto", "low", "high"]
"""In how much detail an image is seen, by OpenAI's names."""


class MediumHeader(Value):
    """A medium that a prompt has: the SHA-256 of its bytes, and its size in pixels, upright.

    Attributes:
        limits: Of its scaled size, if the request has any.
        rows: Of an embedding that the client has made: then the digest is that of its numbers, and
            the size may be 0; 0: it is an image.
        patches: Rows and columns of the patches of the image that the client has embedded.
        video: Set: it is a video, and the size that of its frames.
        audio: Set: it is this part of an audio file, and the size is 0.
    """

    digest: Sha256
    width: Count
    height: Count
    limits: PixelLimits | None = None
    rows: TokenCount = 0
    patches: tuple[Count, Count] | None = None
    video: VideoHeader | None = None
    audio: AudioWindow | None = None


NumberType = Literal["float32", "float16", "bfloat16"]
Edge = Annotated[int, Meta(ge=1, le=2**20)]


class EmbeddingForm(Value):
    """What the bytes of an embedding are: numbers, row by row, little-endian.

    Attributes:
        rows: As many as the image has placeholders.
        width: Numbers of a row: the model's hidden size, and with deepstack that of each part.
        patches: Rows and columns of the patches of its image, of models that take grids of them.
        size: Width and height of its image in pixels, of models whose tokens go by it.
    """

    rows: Edge
    width: Edge
    dtype: NumberType = "float32"
    patches: tuple[Edge, Edge] | None = None
    size: tuple[Edge, Edge] | None = None


class MediumInput(Value):
    """A medium of a NATS client: its bytes, a URL, or a claim to fetch them from. One is set.

    Attributes:
        claim: Names bytes that the client serves itself, at an IP address.
        embedding: Set: the bytes are the embedding of the image, and not the image.
        url: As in the HTTP APIs: an http, https, `data:` or file URL.
        detail: As in the HTTP APIs: `low` limits its tokens.
        video: It is a video, and not an image.
        audio: It is an audio file, and not an image.
    """

    data: bytes | None = None
    url: str | None = None
    claim: Claim | None = None
    embedding: EmbeddingForm | None = None
    detail: Detail | None = None
    video: bool = False
    audio: bool = False


class MediumSpan(Value):
    """The placeholders of a medium in a prompt, from the first to the last.

    Attributes:
        start: Index of the first one.
        tokens: Up to the last one, and markers between them; 0: the model attends to the medium
            beside the prompt, and `placeholders` are the rows of its embedding.
        key: What stands in place of these tokens in keys: see `namespaces.key_ids`.
        placeholders: How many of the tokens are placeholders; 0: all.
        columns: Width of the grid of the placeholders, of models whose positions have axes; 0: they
            are in a line, as text. With other tokens among them each run is a grid of its own.
        times: Depth of each grid; 0: 1.
        step: From one time of a grid to the next, in positions.
    """

    start: TokenCount
    tokens: TokenCount
    key: Sha256
    placeholders: TokenCount = 0
    columns: TokenCount = 0
    times: TokenCount = 0
    step: Annotated[float, Meta(ge=0, le=1e6)] = 1.0

    @property
    def rows(self) -> int:
        """Rows of the embedding: one for each placeholder."""
        return self.placeholders or self.tokens


class Medium(Value):
    """A medium of a request. `claim` names its bytes, at its owner.

    Attributes:
        embedded: The claim names an embedding that the client has made, as encoders make theirs.
        video: Set: it is a video, with this header.
        audio: Set: it is this part of an audio file.
    """

    span: MediumSpan
    width: Count
    height: Count
    claim: Claim
    limits: PixelLimits | None = None
    embedded: bool = False
    video: VideoHeader | None = None
    audio: AudioWindow | None = None


Sources = Annotated[tuple[MediumInput, ...], Meta(max_length=MEDIA_MAX)]
Headers = Annotated[tuple[MediumHeader, ...], Meta(max_length=MEDIA_MAX)]
Spans = Annotated[tuple[MediumSpan, ...], Meta(max_length=MEDIA_MAX)]
Media = Annotated[tuple[Medium, ...], Meta(max_length=MEDIA_MAX)]
