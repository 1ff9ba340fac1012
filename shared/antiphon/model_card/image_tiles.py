"""Images that are cut into tiles: which tiles, and what stands for them."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from antiphon.model_card.frame_videos import (
    FrameVideos,  # noqa: TC001  # msgspec reads the fields of structs
)
from antiphon.model_card.images import Pieces, Size, VisionBase, check_unscaled, single

if TYPE_CHECKING:
    from antiphon.wire.claim import PixelLimits

EDGE_MAX = 4096
"""Edge beyond which Idefics3 scales no image, whatever its preprocessor says."""


class Tiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How Idefics3 cuts images into tiles, as its preprocessor does.

    Attributes:
        longest_edge: What the longer edge of an image is scaled to first.
        tile: Edge of a tile.
        splits: Whether images are cut; else each is one tile.
    """

    longest_edge: Size
    tile: Size
    splits: bool

    def within(self, limits: PixelLimits) -> Tiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, splits=self.splits and not limits.low)

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        if not self.splits:
            return 1
        return math.ceil(min(self.longest_edge, EDGE_MAX) / self.tile) ** 2 + 1

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is scaled first, in its aspect ratio, about."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > EDGE_MAX:
            width, height = EDGE_MAX, int(EDGE_MAX / ratio)
        elif height > width and height > EDGE_MAX:
            width, height = int(EDGE_MAX * ratio), EDGE_MAX
        return max(width, 1), max(height, 1)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles that an image is scaled to next; 1 and 1: it is not cut."""
        if not self.splits:
            return 1, 1
        width, height = self.scaled(width, height)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            return columns, math.ceil(int(columns * self.tile / ratio) / self.tile)
        rows = math.ceil(height / self.tile)
        return math.ceil(int(rows * self.tile * ratio) / self.tile), rows


class TiledImages(VisionBase, frozen=True, kw_only=True):
    """An image has a row of `tile_tokens` for each of its tiles, and for all of it: Idefics3."""

    tiling: Tiling
    tile_tokens: int
    videos: FrameVideos | None = None

    def within(self, limits: PixelLimits) -> Self:
        return _cut_within(self, limits)

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        columns, rows = self.tiling.grid(width, height)
        whole = "<fake_token_around_image><global-img>"
        ends: Pieces = (self.tile_tokens, "<fake_token_around_image>")
        if (columns, rows) == (1, 1):
            return (whole, *ends)
        pieces: list[str | int] = []
        after = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                mark = f"<fake_token_around_image><row_{row}_col_{column}>"
                pieces += [after + mark, self.tile_tokens]
                after = ""
            after = "\n"
        return (*pieces, f"\n\n{whole}", *ends)


class AspectTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How InternVL cuts images: to the grid of tiles whose shape is nearest to theirs.

    Attributes:
        tile: Edge of a tile, in pixels.
        least: Tiles of an image, without that which shows all of it.
        most: Likewise.
    """

    tile: Size
    least: Size = 1
    most: Size = 12

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return self.most + (self.most > 1)

    def within(self, limits: PixelLimits) -> AspectTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, least=1, most=1) if limits.low else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles that an image is scaled to."""
        ratio, nearest, best = width / height, math.inf, (1, 1)
        edges = range(1, self.most + 1)
        grids = [(x, y) for x in edges for y in edges if self.least <= x * y <= self.most]
        for columns, rows in sorted(grids, key=math.prod):
            distance = abs(ratio - columns / rows)
            # As near: more tiles only for an image of over half of their pixels.
            larger = width * height > 0.5 * self.tile**2 * columns * rows
            if distance < nearest or (distance == nearest and larger):
                nearest, best = distance, (columns, rows)
        return best

    def frames(self, width: int, height: int) -> int:
        """Tiles of an image, and all of it where there are several."""
        count = math.prod(self.grid(width, height))
        return count + (count > 1)


class StackedTiles(VisionBase, frozen=True, kw_only=True):
    """An image has a row of `tile_tokens` for each tile and all of it, behind each other: InternVL.

    `before` and `after` are texts around them.
    """

    tiling: AspectTiling
    tile_tokens: int
    before: str
    after: str
    videos: FrameVideos | None = None

    def within(self, limits: PixelLimits) -> Self:
        return _cut_within(self, limits)

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        return (self.before, self.tiling.frames(width, height) * self.tile_tokens, self.after)


class AnyresTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How LLaVA-NeXT cuts images: padded to one of several sizes, without changing their shape.

    All of the image comes first, as a tile.

    Attributes:
        tile: Edge of a tile, in pixels.
        sizes: Widths and heights of the grids; none: an image is one tile.
    """

    tile: Size
    sizes: tuple[tuple[Size, Size], ...]

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return 1 + max((math.prod(size) // self.tile**2 for size in self.sizes), default=0)

    def within(self, limits: PixelLimits) -> AnyresTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, sizes=()) if limits.low else self

    def target(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is padded to: which shows most of its pixels, and pads least."""
        best, shown, wasted = self.sizes[0], 0, math.inf
        for size in self.sizes:
            scale = min(size[0] / width, size[1] / height)
            showing = min(int(width * scale) * int(height * scale), width * height)
            wasting = math.prod(size) - showing
            if showing > shown or (showing == shown and wasting < wasted):
                best, shown, wasted = size, showing, wasting
        return best

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles, apart from that which shows all of an image."""
        across, down = self.target(width, height)
        return across // self.tile, down // self.tile

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image within the grid, in its shape."""
        across, down = self.target(width, height)
        by_width, by_height = across / width, down / height
        if by_width < by_height:
            return across, min(math.ceil(height * by_width), down)
        return min(math.ceil(width * by_height), across), down

    def margins(self, width: int, height: int, side: int) -> tuple[int, int]:
        """Columns and rows of patches at each edge that are padding, with `side` of them a tile."""
        columns, rows = (count * side for count in self.grid(width, height))
        if width / height > columns / rows:
            return 0, (rows - int(round(height * (columns / width), 7))) // 2
        return (columns - int(round(width * (rows / height), 7))) // 2, 0


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """How LLaVA-NeXT and LLaVA-OneVision make rows of tiles' patches.

    Attributes:
        side: Patches of a tile's edge.
        tiles_max: A grid of patches that exceeds so many tiles by a fifth is scaled down; None: it
            never is.
    """

    side: Size
    tiles_max: Size | None = None

    @property
    def pooled_side(self) -> int:
        """Edge of the grid of a frame of a video."""
        return -(-self.side // 2)

    def grid(self, tiling: AnyresTiling, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of an image's grid of patches, as it is packed."""
        across, down = tiling.margins(width, height, self.side)
        columns, rows = (count * self.side for count in tiling.grid(width, height))
        columns, rows = columns - 2 * across, rows - 2 * down
        if self.tiles_max is None:
            return columns, rows
        ratio = math.sqrt(columns * rows / (self.tiles_max * self.side**2))
        return (int(columns // ratio), int(rows // ratio)) if ratio > 1.1 else (columns, rows)


class PaddedTiles(VisionBase, frozen=True, kw_only=True):
    """An image has the rows of all of it in a tile, and of its grid of tiles: LLaVA-NeXT.

    Behind each row of the grid is one for a new line, and behind an image of one tile.
    """

    tiling: AnyresTiling
    packing: Packing
    videos: FrameVideos | None = None

    def within(self, limits: PixelLimits) -> Self:
        return _cut_within(self, limits)

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        whole = self.packing.side**2
        if not self.tiling.sizes:
            return (whole + 1,)
        columns, rows = self.packing.grid(self.tiling, width, height)
        return (whole + rows * (columns + 1),)


class CanvasTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How Llama 4 cuts images: at the top left of a canvas of tiles, without changing their shape.

    Some sizes are computed in float32, as in transformers: which one is nearest depends on it.

    Attributes:
        tile: Edge of a tile, in pixels.
        most: Tiles of an image, without that which shows all of it.
        largest: Whether an image is scaled up to a canvas; else it is to a tile, at most.
    """

    tile: Size
    most: Size = 16
    largest: bool = False

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return self.most + (self.most > 1)

    def within(self, limits: PixelLimits) -> CanvasTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, most=1) if limits.low else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of the canvas: on which an image grows least, or else shrinks least."""
        scales = {
            (columns, rows): min(
                single(self.tile * columns / width), single(self.tile * rows / height)
            )
            for columns, rows in _canvases(self.most)
        }
        growing = [scale for scale in scales.values() if scale >= 1]
        if growing:
            scale = max(growing) if self.largest else min(growing)
        else:
            scale = max(scales.values())
        return min((size for size, each in scales.items() if each == scale), key=math.prod)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image within the canvas, in its shape."""
        across, down = (self.tile * count for count in self.grid(width, height))
        most_across, most_down = max(width, self.tile), max(height, self.tile)
        # What the canvas limits is a tensor in transformers.
        in_single = self.largest or across < most_across, self.largest or down < most_down
        if not self.largest:
            across, down = min(most_across, across), min(most_down, down)
        by_width, by_height = across / width, down / height
        by_both = (single(by_width), single(by_height)) if any(in_single) else (by_width, by_height)
        if by_both[0] < by_both[1]:
            rest = single(height * single(by_width)) if in_single[0] else height * by_width
            return across, max(1, min(math.floor(rest), down))
        rest = single(width * single(by_height)) if in_single[1] else width * by_height
        return max(1, min(math.floor(rest), across)), down


@lru_cache(maxsize=8)
def _canvases(most: int) -> tuple[tuple[int, int], ...]:
    """Columns and rows of all canvases, by their shapes: of equals the first one is taken."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                columns = tiles // rows
                by_shape.setdefault(rows / columns, []).append((columns, rows))
    return tuple(chain.from_iterable(by_shape.values()))


class SeparatedTiles(VisionBase, frozen=True, kw_only=True):
    """An image has `tile_tokens` rows for each of its tiles, and for all of it behind: Llama 4.

    There are separators between tiles. An image of one tile has that alone.
    """

    tiling: CanvasTiling
    tile_tokens: int

    def within(self, limits: PixelLimits) -> Self:
        return _cut_within(self, limits)

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        columns, rows = self.tiling.grid(width, height)
        pieces, before, tiles = list[str | int](), "<|image_start|>", columns * rows
        for number in range(1, tiles + 1 if tiles > 1 else 1):
            pieces += [before, self.tile_tokens]
            before = "<|tile_x_separator|>" if number % columns else "<|tile_y_separator|>"
        return (*pieces, f"{before}<|image|>", self.tile_tokens, "<|image_end|>")


class SliceTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How MiniCPM-V cuts images: to slices of about one number of pixels, in about their shape.

    All of the image comes first, in another size. Both are whole tokens.

    Attributes:
        resolution: Edge of a square of as many pixels as an image or a slice has.
        edge: Of a token, in pixels.
        most: Slices of an image; 1: it is not cut.
    """

    resolution: Size
    edge: Size
    most: Size

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most, or nearly so: sizes are rounded, and narrow ones are up."""
        return self.frames_max * math.ceil(self.resolution / self.edge) ** 2

    @property
    def frames_max(self) -> int:
        """Slices of an image, at most, and all of it."""
        return 1 + (self.most if self.most > 1 else 0)

    def within(self, limits: PixelLimits) -> SliceTiling:
        """This tiling within the limits of a request: all of an image is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, most=1) if limits.low else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of slices: the shape that is nearest to the image's; 1 and 1: none."""
        wanted = min(math.ceil(width * height / self.resolution**2), self.most)
        best, least, shape = (1, 1), math.inf, math.log(width / height)
        if wanted <= 1:
            return best
        for slices in (wanted - 1, wanted, wanted + 1):
            if not 1 < slices <= self.most:
                continue
            for rows in (each for each in range(1, slices + 1) if slices % each == 0):
                columns = slices // rows
                distance = abs(shape - math.log(columns / rows))
                if distance < least or (distance == least and rows > best[1]):
                    best, least = (columns, rows), distance
        return best

    def whole(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of all of an image, scaled."""
        return self._scaled(width, height)

    def slices(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of all slices of an image together, side by side."""
        columns, rows = self.grid(width, height)
        across, down = (
            max(round(edge / count) * count, count) / count
            for edge, count in ((width, columns), (height, rows))
        )
        across, down = self._scaled(across, down)
        return across * columns, down * rows

    def _scaled(self, width: float, height: float) -> tuple[int, int]:
        ratio = width / height
        down = int(self.resolution / math.sqrt(ratio))
        across = int(down * ratio)
        edge = self.edge
        return max(round(across / edge) * edge, edge), max(round(down / edge) * edge, edge)


class SlicedImages(VisionBase, frozen=True, kw_only=True):
    """All of an image has its rows, and each of its slices, between marks: MiniCPM-V."""

    tiling: SliceTiling

    def within(self, limits: PixelLimits) -> Self:
        return _cut_within(self, limits)

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        tiling = self.tiling
        pieces: list[str | int] = ["<image>", self._tokens(*tiling.whole(width, height))]
        columns, rows = tiling.grid(width, height)
        before = "</image>"
        if columns * rows > 1:
            tokens = self._tokens(*tiling.slices(width, height)) // (columns * rows)
            for number in range(columns * rows):
                pieces += [f"{before}<slice>", tokens]
                before = "</slice>" if (number + 1) % columns else "</slice>\n"
            before = "</slice>"
        return (*pieces, before)

    def _tokens(self, width: int, height: int) -> int:
        return width // self.tiling.edge * (height // self.tiling.edge)


Cut = TypeVar("Cut", TiledImages, StackedTiles, PaddedTiles, SeparatedTiles, SlicedImages)


def _cut_within(card: Cut, limits: PixelLimits) -> Cut:
    tiling = card.tiling.within(limits)
    if tiling == card.tiling:
        return card
    processing = hashlib.sha256(card.processing + msgspec.json.encode(tiling)).digest()
    return msgspec.structs.replace(card, tiling=tiling, processing=processing)
