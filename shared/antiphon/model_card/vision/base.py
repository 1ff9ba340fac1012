"""What stands in a prompt for an image, and what all ways to take images have in common."""

from __future__ import annotations

import hashlib
import struct
from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

import msgspec
from msgspec import Meta

from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.claim import PixelLimits

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Pieces = tuple[str | int, ...]
"""What stands in a prompt for an image: texts, and numbers of placeholders in a row."""
LIMITS = "mm_processor_kwargs"
"""The API's name of the limits of pixels."""
LOW_PIXELS = 512 * 512
"""Maximum of an image of low detail, as in OpenAI's API."""


class AbstractMeta(msgspec.StructMeta, ABCMeta):
    """Of structs with abstract methods: one that lacks such a method cannot be made."""


class VisionBase(msgspec.Struct, metaclass=AbstractMeta, frozen=True, kw_only=True, tag=True):
    """What the ways to take images have in common.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        marker: What chat templates write for an image; empty: the placeholder.
        counted: What stands before an image, with a place for the number of those before it in the
            prompt; empty: nothing.
        processing: Digest of all that decides the embedding beside the image and the weights.
        span_tokens: Set: the tokens of an image, so many at most, attend to each other in both
            directions.
        deepstack: Number of the first layers behind each of which a token of an image has something
            added: the parts of an embedding beside that which stands in place of the token.
    """

    SIZED: ClassVar = True
    """Whether the tokens of an image go by its size."""

    placeholder: int
    marker: str = ""
    counted: str = ""
    processing: bytes
    span_tokens: int | None = None
    deepstack: int = 0

    def row_width(self, hidden: int) -> int:
        """Numbers of a row of an embedding, in a model of this hidden size."""
        return (1 + self.deepstack) * hidden

    @abstractmethod
    def pieces(self, width: int, height: int) -> Pieces:
        """What stands in a prompt for an image of this size in pixels.

        Raises:
            InvalidRequest: It is too narrow.
        """

    def columns(self, width: int, height: int) -> int:
        """Columns of tokens of an image of this size in pixels; 0: it is no grid."""
        del width, height
        return 0

    def within(self, limits: PixelLimits) -> Self:
        """The card of images whose scaled size is limited by their request.

        Raises:
            InvalidRequest: Images are not scaled by such limits, or to no size within these.
        """
        check_unscaled(limits)
        return self

    def pixels(self, patches: tuple[int, int]) -> tuple[int, int]:
        """Width and height of an image that has so many rows and columns of patches.

        Raises:
            InvalidRequest: Images have none that the size follows from.
        """
        del patches
        raise InvalidRequest("this model's images have no grid of patches: give image_sizes")


Card = TypeVar("Card", bound=VisionBase)


def rescaled(card: Card, **sizes: msgspec.Struct) -> Card:
    """The card with another field of how images are scaled or cut.

    What a request repeats changes no key.
    """
    if all(getattr(card, name) == each for name, each in sizes.items()):
        return card
    settings = b"".join(map(msgspec.json.encode, sizes.values()))
    processing = hashlib.sha256(card.processing + settings).digest()
    return msgspec.structs.replace(card, processing=processing, **sizes)


def single(value: float) -> float:
    """Round a number to float32."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return rounded


def check_unscaled(limits: PixelLimits) -> None:
    """Check the limits of a request for a model that scales no image by numbers of pixels.

    Raises:
        InvalidRequest: It sets such a number.
    """
    if limits.least or limits.most:
        raise InvalidRequest.at(LIMITS, "this model has no min_pixels and max_pixels of images")
