"""Images that keep their shape and are scaled to an area: Gemma 4.

Every image has about as many tokens, however large it is, and a text around them.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import PixelFields, image_processor_file
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, check_unscaled, rescaled
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

GEMMA4 = "gemma4"
TOKENS = (70, 140, 280, 560, 1120)
"""The numbers of tokens to which the processor of Gemma 4 scales images, at most."""


class AreaSizes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To which sizes Gemma 4's preprocessor scales images: whole tokens, up or down.

    Attributes:
        patch: Edge of a patch, in pixels.
        merge: Edge of the square of patches that becomes a token, in patches.
        tokens_max: Tokens of an image, at most; it has as many of them as its shape allows.
    """

    patch: Size
    merge: Size
    tokens_max: Size

    @property
    def edge(self) -> int:
        """Edge of a token, in pixels."""
        return self.patch * self.merge

    def within(self, limits: PixelLimits) -> AreaSizes:
        """These sizes within the limits of a request: those of low detail have the fewest tokens.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        tokens = min(self.tokens_max, TOKENS[0]) if limits.low else self.tokens_max
        return msgspec.structs.replace(self, tokens_max=tokens)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the scaled image: whole tokens.

        An image that would be narrower than a token has one row or column of them.

        Raises:
            InvalidRequest: Rounding leaves nothing of both edges, or too much.
        """
        edge, area = self.edge, self.tokens_max * self.edge**2
        # In this order, as transformers computes it: the last bit may decide.
        factor = math.sqrt(area / (height * width))
        down, across = (math.floor(factor * each / edge) for each in (height, width))
        if not across and down:
            across, down = 1, min(height // width, self.tokens_max)
        elif not down and across:
            across, down = min(width // height, self.tokens_max), 1
        if not 0 < across * down <= self.tokens_max:
            raise InvalidRequest(
                f"an image of {width} x {height} pixels cannot be scaled to {self.tokens_max} "
                f"tokens of {edge} x {edge}"
            )
        return across * edge, down * edge


class AreaImages(VisionBase, frozen=True, kw_only=True):
    """An image has as many tokens as its shape allows, between texts.

    With `span_tokens` those of an image attend to each other in both directions, where a layer's
    attention is local.
    """

    sizes: AreaSizes
    before: str
    after: str

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        across, down = self.sizes.scaled(width, height)
        return (self.before, across * down // self.sizes.edge**2, self.after)

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, sizes=self.sizes.within(limits))


class _AreaTower(msgspec.Struct, frozen=True):
    patch_size: Size = 16
    pooling_kernel_size: Size = 3
    position_embedding_size: Size = 10 * 1024


class _AreaText(msgspec.Struct, frozen=True):
    sliding_window: int = 512
    use_bidirectional_attention: str | None = None


class _Area(msgspec.Struct, frozen=True):
    image_token_id: int = 258_880
    vision_config: _AreaTower | None = None
    text_config: _AreaText = field(default_factory=_AreaText)


class _AreaFile(PixelFields, frozen=True):
    """Gemma 4's preprocessor_config.json, with the defaults of its class."""

    do_normalize: bool = False
    image_mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    image_std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    patch_size: Size = 16
    pooling_kernel_size: Size = 3
    max_soft_tokens: int = 280


class _Token(msgspec.Struct, frozen=True):
    content: str


class _Ends(msgspec.Struct, frozen=True):
    """What tokenizer_config.json says of the tokens around an image."""

    before: str | _Token = field(name="boi_token", default="<|image>")
    after: str | _Token = field(name="eoi_token", default="<image|>")

    @property
    def texts(self) -> list[str]:
        both = (self.before, self.after)
        return [each if isinstance(each, str) else each.content for each in both]


def read_area_file(folder: Path) -> tuple[PixelFields, AreaSizes]:
    """Read how the preprocessor of a Gemma 4 model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, read = found.file, found.read(_AreaFile)
    tower = read_json(folder / "config.json", _Area).vision_config or _AreaTower()
    made, taken = (
        (read.patch_size, read.pooling_kernel_size),
        (tower.patch_size, tower.pooling_kernel_size),
    )
    if made != taken:
        raise ConfigError(
            f"{file}: makes patches of {made[0]} pixels, {made[1]} an edge of a token; the tower "
            f"takes {taken[0]} and {taken[1]}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    if (tokens := read.max_soft_tokens) not in TOKENS:
        raise ConfigError(
            f"{file}: max_soft_tokens = {tokens}: must be one of {', '.join(map(str, TOKENS))}"
        )
    if tokens * read.pooling_kernel_size > tower.position_embedding_size:
        raise ConfigError(
            f"{file}: max_soft_tokens = {tokens}: the tower has positions of "
            f"{tower.position_embedding_size} patches an edge"
        )
    sizes = AreaSizes(patch=read.patch_size, merge=read.pooling_kernel_size, tokens_max=tokens)
    return read, sizes


def read_area(folder: Path) -> AreaImages | None:
    """Read how a Gemma 4 model takes images; None: it has no tower for them.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _Area)
    if config.vision_config is None:
        return None
    read, sizes = read_area_file(folder)
    text, span = config.text_config, None
    if text.use_bidirectional_attention == "vision":
        span = sizes.tokens_max
        if text.sliding_window < span:
            raise ConfigError(
                f"{file}: sliding_window = {text.sliding_window}: must be at least max_soft_tokens "
                f"= {span}, so that each token of an image sees all others"
            )
    tokens = folder / "tokenizer_config.json"
    before, after = (read_json(tokens, _Ends) if tokens.is_file() else _Ends()).texts
    settings = msgspec.json.encode([read, sizes, config.vision_config])
    return AreaImages(
        placeholder=config.image_token_id,
        sizes=sizes,
        before=before,
        after=after,
        span_tokens=span,
        processing=hashlib.sha256(b"area\0" + settings).digest(),
    )
