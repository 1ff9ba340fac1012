"""Reads how a model takes images: its placeholder, and what stands in a prompt for an image.

Read by the tokenizer, which writes markers and repeats placeholders, and by the encoder, which must
come to the same number of rows; without torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import parse_json, read_json
from antiphon.model_card.image_grids import (
    GridImages,
    GridSizes,
    GridVideos,
    RowImages,
    RowSizes,
)
from antiphon.model_card.image_tiles import (
    AnyresTiling,
    AspectTiling,
    Packing,
    PaddedTiles,
    StackedTiles,
    TiledImages,
    Tiling,
)
from antiphon.model_card.images import Size, SquareImages
from antiphon.model_card.videos import PAIR, FrameSampling

PROCESSOR, NESTING = "preprocessor_config.json", "processor_config.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"


T = TypeVar("T")


class _Nesting(msgspec.Struct, frozen=True):
    image_processor: msgspec.Raw = msgspec.Raw(b"null")
    video_processor: msgspec.Raw = msgspec.Raw(b"null")


class ImageProcessorFile(msgspec.Struct, frozen=True):
    """The settings of a model's image processor, as JSON, and the file that has them.

    They are part of processor_config.json, or preprocessor_config.json, or there are none. Those of
    videos have a file of their own beside these, before preprocessor_config.json.
    """

    file: Path
    content: bytes = b""

    def read(self, type_: type[T]) -> T:
        """Decode what is needed of them; without any it is all by default.

        Raises:
            ConfigError: They are malformed.
        """
        return parse_json(self.content or b"{}", type_, self.file)


def image_processor_file(folder: Path) -> ImageProcessorFile:
    """Find the settings of a model's image processor, where transformers does."""
    nesting, file = folder / NESTING, folder / PROCESSOR
    if nesting.is_file():
        nested = bytes(read_json(nesting, _Nesting).image_processor)
        if nested != b"null":
            return ImageProcessorFile(nesting, nested)
    return ImageProcessorFile(file, file.read_bytes() if file.is_file() else b"")


def video_processor_file(folder: Path) -> ImageProcessorFile:
    """Find the settings of a model's video processor, where transformers does."""
    nesting, file = folder / NESTING, folder / VIDEO_PROCESSOR
    if nesting.is_file():
        nested = bytes(read_json(nesting, _Nesting).video_processor)
        if nested != b"null":
            return ImageProcessorFile(nesting, nested)
    if not file.is_file():
        file = folder / PROCESSOR
    return ImageProcessorFile(file, file.read_bytes() if file.is_file() else b"")


VisionCard = SquareImages | TiledImages | StackedTiles | PaddedTiles | GridImages | RowImages
"""How a model takes images."""


def videos_of(card: VisionCard | None) -> GridVideos | None:
    """How a model takes videos; None if it takes none."""
    return card.videos if isinstance(card, GridImages) else None


class FeatureFields(msgspec.Struct, frozen=True):
    """LLaVA's and InternVL's fields about what they take of their towers."""

    image_token_id: int | None = None
    image_token_index: int = 32000
    vision_feature_layer: int | list[int] = -2
    vision_feature_select_strategy: str = "default"

    def check(self, file: Path) -> None:
        if self.vision_feature_select_strategy not in ("default", "full"):
            raise ConfigError(
                f"{file}: vision_feature_select_strategy = "
                f"{self.vision_feature_select_strategy!r}: must be default or full"
            )
        if not isinstance(self.vision_feature_layer, int):
            raise ConfigError(f"{file}: vision_feature_layer: only a single layer is supported")

    @property
    def drops_first(self) -> bool:
        """Whether the class token of the tower is left out."""
        return self.vision_feature_select_strategy == "default"


class SquareTower(msgspec.Struct, frozen=True):
    """A tower whose sizes may be written for both edges.

    A bounded number or a tuple of a fixed length crashes msgspec 0.22.
    """

    image_size: Size | tuple[Size, ...] = 448
    patch_size: Size | tuple[Size, ...] = 14

    def edges(self, file: Path) -> tuple[int, int]:
        """Edge of an image, and of a patch.

        Raises:
            ConfigError: They are no squares.
        """
        return _edge(file, "image_size", self.image_size), _edge(
            file, "patch_size", self.patch_size
        )


def _edge(file: Path, name: str, size: int | tuple[int, ...]) -> int:
    edges = {size} if isinstance(size, int) else set(size)
    if len(edges) != 1:
        raise ConfigError(f"{file}: vision_config: {name} = {size}: must be a square")
    return edges.pop()


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = "clip_vision_model"
    image_size: Size = 224
    patch_size: Size = 32


class _Llava(FeatureFields, frozen=True):
    vision_config: _Tower = field(default_factory=_Tower)


class _LongestEdge(msgspec.Struct, frozen=True):
    longest_edge: Size


class _TilingFile(msgspec.Struct, frozen=True):
    """Idefics3's preprocessor_config.json: what decides the tiles."""

    size: _LongestEdge = field(default_factory=lambda: _LongestEdge(4 * 364))
    max_image_size: _LongestEdge = field(default_factory=lambda: _LongestEdge(364))
    do_image_splitting: bool = True


def read_tiling(folder: Path) -> Tiling:
    """Read how the preprocessor of an Idefics3 model cuts images.

    Raises:
        ConfigError: preprocessor_config.json is malformed.
    """
    read = image_processor_file(folder).read(_TilingFile)
    return Tiling(
        longest_edge=read.size.longest_edge,
        tile=read.max_image_size.longest_edge,
        splits=read.do_image_splitting,
    )


class _IdeficsTower(msgspec.Struct, frozen=True):
    image_size: Size = 224
    patch_size: Size = 32


class _Idefics(msgspec.Struct, frozen=True):
    image_token_id: int = 128257
    scale_factor: Size = 2
    vision_config: _IdeficsTower = field(default_factory=_IdeficsTower)


class _GridTower(msgspec.Struct, frozen=True):
    patch_size: Size | None = None
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    tokens_per_second: float = 4
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class _Grid(msgspec.Struct, frozen=True):
    model_type: str
    image_token_id: int | None = None
    video_token_id: int = 151656
    vision_config: _GridTower = field(default_factory=_GridTower)

    @property
    def placeholder(self) -> int:
        if self.image_token_id is not None:
            return self.image_token_id
        return {"glm4v": 151343, "glm4v_moe": 151363}.get(self.model_type, 151655)

    @property
    def deepstack(self) -> int:
        stacked = self.model_type in DEEPSTACKS
        return len(self.vision_config.deepstack_visual_indexes) if stacked else 0

    @property
    def patch(self) -> int:
        return self.vision_config.patch_size or (16 if self.model_type in DEEPSTACKS else 14)


class _GlmEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels of all frames, of which an image is two."""

    shortest_edge: Size = 112 * 112
    longest_edge: Size = 28 * 28 * 15000


class _GridEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels, whatever their names say."""

    shortest_edge: Size = 56 * 56
    longest_edge: Size = 28 * 28 * 1280


class PixelFields(msgspec.Struct, frozen=True):
    """What becomes of pixels, in a preprocessor_config.json, with CLIP's defaults."""

    resample: Annotated[int, Meta(ge=0, le=5)] = 3
    do_resize: bool = True
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)


class GridFile(PixelFields, frozen=True):
    """The preprocessor_config.json of Qwen2-VL, with the defaults of its class."""

    size: _GridEdges = field(default_factory=_GridEdges)
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    patch_size: Size = 14
    merge_size: Size = 2

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=self.min_pixels or self.size.shortest_edge,
            pixels_max=self.max_pixels or self.size.longest_edge,
        )


class _FrameEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels; None: by the model's class."""

    shortest_edge: Size | None = None
    longest_edge: Size | None = None


class VideoFile(PixelFields, frozen=True):
    """The settings of Qwen2-VL's video processor, with the defaults of its class.

    A rate of frames it has none by default; 2 is that of the models' own tools.
    """

    size: _FrameEdges = field(default_factory=_FrameEdges)
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    patch_size: Size = 14
    merge_size: Size = 2
    temporal_patch_size: Size = 2
    fps: float | None = None
    num_frames: Size | None = None
    min_frames: Size = 4
    max_frames: Size = 768
    cap_pixels_per_frame: bool | None = None

    def check(self, file: Path, config: _Grid) -> None:
        tower = config.vision_config
        found = self.patch_size, self.merge_size, self.temporal_patch_size
        wanted = config.patch, tower.spatial_merge_size, tower.temporal_patch_size
        if found != wanted or found[-1] != PAIR:
            raise ConfigError(
                f"{file}: videos have patches of {found[0]} pixels, {found[1]} an edge of a token, "
                f"in {found[2]} frames; the tower takes {wanted}, and {PAIR} frames are supported"
            )
        if not self.do_resize or self.num_frames or self.cap_pixels_per_frame:
            raise ConfigError(
                f"{file}: do_resize = false, num_frames and cap_pixels_per_frame are not supported"
            )
        if (self.fps or 2.0) <= 0 or not PAIR <= self.min_frames <= self.max_frames:
            raise ConfigError(f"{file}: fps must be above 0, min_frames from {PAIR} to max_frames")

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(fps=self.fps or 2.0, least=self.min_frames, most=self.max_frames)

    @property
    def sizes(self) -> GridSizes:
        least, most = self.min_pixels, self.max_pixels
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=least or self.size.shortest_edge or 128 * 28 * 28,
            pixels_max=most or self.size.longest_edge or 768 * 28 * 28,
        )


class _StampedVideoFile(VideoFile, frozen=True):
    """Likewise of Qwen3-VL's, whose numbers of pixels are those of all frames."""

    patch_size: Size = 16
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def sampling(self) -> FrameSampling:
        return msgspec.structs.replace(super().sampling, ends=True)

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=self.size.shortest_edge or 128 * 32 * 32,
            pixels_max=self.size.longest_edge or 768 * 32 * 32,
            grows=True,
            joint=True,
        )


def read_video_file(folder: Path) -> VideoFile | None:
    """Read how the preprocessor of a Qwen-VL model scales videos; None: it takes none.

    Raises:
        ConfigError: The file is malformed, does not fit the tower, or says what is not supported.
    """
    file = folder / "config.json"
    if read_json(file, _ModelKind).model_type not in VIDEOS:
        return None
    config, found = read_json(file, _Grid), video_processor_file(folder)
    read = found.read(_StampedVideoFile if config.model_type in DEEPSTACKS else VideoFile)
    read.check(found.file, config)
    if read.sizes.pixels_min > read.sizes.pixels_max:
        raise ConfigError(f"{found.file}: the minimum of pixels exceeds the maximum")
    return read


class _GlmFile(PixelFields, frozen=True):
    """The preprocessor_config.json of GLM-4V, with the defaults of its class."""

    size: _GlmEdges = field(default_factory=_GlmEdges)
    patch_size: Size = 14
    merge_size: Size = 2
    temporal_patch_size: Size = 2

    @property
    def sizes(self) -> GridSizes:
        frames = self.temporal_patch_size
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=max(1, self.size.shortest_edge // frames),
            pixels_max=max(1, self.size.longest_edge // frames),
            grows=True,
        )

    @property
    def divides(self) -> bool:
        edges = self.size.shortest_edge, self.size.longest_edge
        return not any(edge % self.temporal_patch_size for edge in edges)


def read_grid_file(folder: Path) -> GridFile | _GlmFile:
    """Read how the preprocessor of a Qwen2-VL or GLM-4V model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, config = found.file, read_json(folder / "config.json", _Grid)
    read = found.read(_GlmFile if config.model_type in GLMS else GridFile)
    if isinstance(read, _GlmFile) and not read.divides:
        raise ConfigError(
            f"{file}: size: must be multiples of temporal_patch_size = {read.temporal_patch_size}"
        )
    patch, merge = config.patch, config.vision_config.spatial_merge_size
    if (read.patch_size, read.merge_size) != (patch, merge):
        raise ConfigError(
            f"{file}: makes patches of {read.patch_size} pixels, {read.merge_size} an edge of a "
            f"token; the tower takes {patch} and {merge}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    if read.sizes.pixels_min > read.sizes.pixels_max:
        raise ConfigError(
            f"{file}: min_pixels = {read.sizes.pixels_min} exceeds "
            f"max_pixels = {read.sizes.pixels_max}"
        )
    return read


class _Longest(msgspec.Struct, frozen=True):
    longest_edge: Size = 1024


class _RowFile(PixelFields, frozen=True):
    """Pixtral's preprocessor_config.json. The size of a patch is that of its model."""

    size: _Longest = field(default_factory=_Longest)


class PatchTower(msgspec.Struct, frozen=True):
    """The vision_config of a model that may have Pixtral's tower."""

    model_type: str = "clip_vision_model"
    patch_size: Size = 16


class _Rows(msgspec.Struct, frozen=True):
    model_type: str
    image_token_id: int | None = None
    image_token_index: int = 10
    spatial_merge_size: Size = 2
    vision_config: PatchTower = field(default_factory=PatchTower)

    @property
    def merge(self) -> int:
        """Edge of the square of patches that becomes a token."""
        return self.spatial_merge_size if self.model_type == MISTRAL3 else 1


def read_rows(folder: Path) -> tuple[PixelFields, RowSizes]:
    """Read how the preprocessor of a Pixtral or Mistral 3 model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, read = found.file, found.read(_RowFile)
    config = read_json(folder / "config.json", _Rows)
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    edge = config.vision_config.patch_size * config.merge
    return read, RowSizes(edge=edge, longest=read.size.longest_edge)


class _Windows(msgspec.Struct, frozen=True):
    sliding_window: int | None = 4096


class _Gemma3(msgspec.Struct, frozen=True):
    image_token_id: int | None = None
    image_token_index: int = 262144
    mm_tokens_per_image: Size = 256
    text_config: _Windows = field(default_factory=_Windows)


class _InternVl(msgspec.Struct, frozen=True):
    image_token_id: int = 151667
    downsample_ratio: float = 0.5
    vision_config: SquareTower = field(default_factory=SquareTower)


class _SquareEdges(msgspec.Struct, frozen=True):
    height: Size = 384
    width: Size = 384


class _AspectFile(msgspec.Struct, frozen=True):
    """InternVL's preprocessor_config.json. Whether it says to cut images, its processor does."""

    size: _SquareEdges = field(default_factory=_SquareEdges)
    min_patches: Size = 1
    max_patches: Size = 12


def read_aspect_tiling(folder: Path) -> AspectTiling:
    """Read how the preprocessor of an InternVL model cuts images.

    Raises:
        ConfigError: The file is malformed, or says nothing that can be done.
    """
    found = image_processor_file(folder)
    read = found.read(_AspectFile)
    if read.size.height != read.size.width or read.min_patches > read.max_patches:
        raise ConfigError(
            f"{found.file}: size must be a square, and min_patches not exceed max_patches"
        )
    return AspectTiling(tile=read.size.height, least=read.min_patches, most=read.max_patches)


class _PanAndScan(msgspec.Struct, frozen=True):
    do_pan_and_scan: bool | None = None


class _ModelKind(msgspec.Struct, frozen=True):
    model_type: str = ""


IDEFICS = ("idefics3", "smolvlm")
GEMMA3 = "gemma3"
INTERN = "internvl"
PIXTRAL, MISTRAL3 = "pixtral", "mistral3"
NEXT, ONEVISION = "llava_next", "llava_onevision"
ANYRES = (NEXT, ONEVISION)
DEEPSTACKS = ("qwen3_vl", "qwen3_vl_moe")
GLMS = ("glm4v", "glm4v_moe")
VIDEOS = ("qwen2_5_vl", "qwen2_vl", *DEEPSTACKS)
"""Those that take videos, too."""
GRIDS = (*VIDEOS, *GLMS)
SEEING = ("llava", MISTRAL3, *ANYRES, GEMMA3, INTERN, *IDEFICS, *GRIDS)
"""Types of models whose images are served."""


def read_vision(folder: Path) -> VisionCard | None:
    """Read how a model takes images; None if it does not, or only its text part is served.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    if not file.is_file() or (kind := read_json(file, _ModelKind).model_type) not in SEEING:
        return None
    if kind in GRIDS:
        return _read_grid(folder)
    if has_rows(folder):
        return _read_rows(folder)
    if kind == GEMMA3:
        return _read_gemma3(folder)
    if kind == INTERN:
        return _read_internvl(folder)
    if kind in ANYRES:
        return _read_anyres(folder, kind)
    return _read_idefics(folder) if kind in IDEFICS else _read_llava(folder)


def has_rows(folder: Path) -> bool:
    """Whether a model has Pixtral's tower.

    Raises:
        ConfigError: It should have, and has not.
    """
    file = folder / "config.json"
    kind = read_json(file, _ModelKind).model_type
    if kind not in ("llava", MISTRAL3):
        return False
    tower = read_json(file, _Rows).vision_config.model_type
    if kind == MISTRAL3 and tower != PIXTRAL:
        raise ConfigError(f"{file}: vision_config: model_type = {tower!r}: must be {PIXTRAL}")
    return tower == PIXTRAL


def _read_rows(folder: Path) -> RowImages:
    config, (_, sizes) = read_json(folder / "config.json", _Rows), read_rows(folder)
    placeholder = config.image_token_id
    return RowImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        sizes=sizes,
        processing=_processing(folder, config),
    )


def _read_llava(folder: Path) -> SquareImages:
    file = folder / "config.json"
    config = read_json(file, _Llava)
    config.check(file)
    tower = config.vision_config
    has_class = tower.model_type == "clip_vision_model"
    dropped = int(config.drops_first)
    placeholder = config.image_token_id
    return SquareImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        image_tokens=(tower.image_size // tower.patch_size) ** 2 + has_class - dropped,
        processing=_processing(folder, config),
    )


def _read_idefics(folder: Path) -> TiledImages:
    config = read_json(folder / "config.json", _Idefics)
    tower = config.vision_config
    return TiledImages(
        placeholder=config.image_token_id,
        tiling=read_tiling(folder),
        tile_tokens=(tower.image_size // tower.patch_size) ** 2 // config.scale_factor**2,
        processing=_processing(folder, config),
    )


def _read_gemma3(folder: Path) -> SquareImages:
    config = read_json(folder / "config.json", _Gemma3)
    found = image_processor_file(folder)
    if found.read(_PanAndScan).do_pan_and_scan:
        raise ConfigError(f"{found.file}: do_pan_and_scan = true is not supported")
    placeholder, tokens = config.image_token_id, config.mm_tokens_per_image
    window = config.text_config.sliding_window
    if window is not None and window < tokens:
        raise ConfigError(
            f"{folder / 'config.json'}: sliding_window = {window}: must be at least "
            f"mm_tokens_per_image = {tokens}, so that each token of an image sees all others"
        )
    return SquareImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        marker="<start_of_image>",
        image_tokens=tokens,
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        span_tokens=tokens,
        processing=_processing(folder, config),
    )


_NEXT_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_EDGES = range(384, 2305, 384)
_ONEVISION_SIZES = tuple((height, width) for height in _EDGES for width in _EDGES)


class _Next(FeatureFields, frozen=True):
    vision_config: _Tower = field(default_factory=_Tower)
    image_grid_pinpoints: tuple[tuple[Size, Size], ...] = _NEXT_SIZES
    vision_aspect_ratio: str = ""


class _Onevision(_Next, frozen=True):
    image_token_index: int = 151646
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: str = "full"
    image_grid_pinpoints: tuple[tuple[Size, Size], ...] = _ONEVISION_SIZES
    vision_aspect_ratio: str = "anyres_max_9"


class _AnyresFile(msgspec.Struct, frozen=True):
    image_grid_pinpoints: tuple[tuple[Size, Size], ...] | None = None


def read_anyres_fields(folder: Path, kind: str) -> FeatureFields:
    """Read what a LLaVA-NeXT or LLaVA-OneVision model takes of its tower.

    Raises:
        ConfigError: config.json is malformed, or not supported.
    """
    file = folder / "config.json"
    fields = _anyres_config(folder, kind)
    fields.check(file)
    if fields.drops_first != (fields.vision_config.model_type == "clip_vision_model"):
        raise ConfigError(
            f"{file}: vision_feature_select_strategy = {fields.vision_feature_select_strategy!r}: "
            "must leave only the patches, in their grid"
        )
    return fields


def _anyres_config(folder: Path, kind: str) -> _Next:
    return read_json(folder / "config.json", _Onevision if kind == ONEVISION else _Next)


def read_anyres(folder: Path, kind: str) -> tuple[AnyresTiling, Packing]:
    """Read how such a model's images are cut, and their patches packed.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, not supported, or they differ.
    """
    file, config = folder / "config.json", _anyres_config(folder, kind)
    found = image_processor_file(folder)
    default = _ONEVISION_SIZES if kind == ONEVISION else _NEXT_SIZES
    sizes, tower = config.image_grid_pinpoints, config.vision_config
    if (found.read(_AnyresFile).image_grid_pinpoints or default) != sizes:
        raise ConfigError(f"{found.file}: image_grid_pinpoints: must be those of {file}")
    if not sizes or any(edge % tower.image_size for size in sizes for edge in size):
        raise ConfigError(
            f"{file}: image_grid_pinpoints: must be multiples of image_size = {tower.image_size}"
        )
    most, name = None, config.vision_aspect_ratio
    if kind == ONEVISION:
        number = name.removeprefix("anyres_max_")
        if not number.isdecimal() or not 0 < int(number) < 1000 or number == name:
            raise ConfigError(f"{file}: vision_aspect_ratio = {name!r}: must be anyres_max_N")
        most = int(number)
    tiling = AnyresTiling(
        tile=tower.image_size, sizes=tuple((width, height) for height, width in sizes)
    )
    return tiling, Packing(side=tower.image_size // tower.patch_size, tiles_max=most)


def _read_anyres(folder: Path, kind: str) -> PaddedTiles:
    read_anyres_fields(folder, kind)
    config = _anyres_config(folder, kind)
    tiling, packing = read_anyres(folder, kind)
    placeholder = config.image_token_id
    return PaddedTiles(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        tiling=tiling,
        packing=packing,
        processing=_processing(folder, config),
    )


def _read_internvl(folder: Path) -> StackedTiles:
    file = folder / "config.json"
    config = read_json(file, _InternVl)
    image, patch = config.vision_config.edges(file)
    by = shuffle_factor(file, config.downsample_ratio)
    return StackedTiles(
        placeholder=config.image_token_id,
        tiling=read_aspect_tiling(folder),
        tile_tokens=(image // patch // by) ** 2,
        before="<img>",
        after="</img>",
        processing=_processing(folder, config),
    )


def shuffle_factor(file: Path, ratio: float) -> int:
    """Edge of the squares of patches that become one row.

    Raises:
        ConfigError: It is no whole number.
    """
    by = round(1 / ratio) if ratio > 0 else 0
    if by < 1 or 1 / by != ratio:
        raise ConfigError(f"{file}: downsample_ratio = {ratio}: must be 1 by a whole number")
    return by


def _processing(folder: Path, config: msgspec.Struct) -> bytes:
    recipe = image_processor_file(folder).content
    return hashlib.sha256(msgspec.json.encode(config) + b"\0" + recipe).digest()


def _read_grid(folder: Path) -> GridImages:
    file = read_grid_file(folder)
    # As resolved: a default that is written down changes no key.
    plain = (
        msgspec.structs.replace(file, size=_GlmEdges())
        if isinstance(file, _GlmFile)
        else msgspec.structs.replace(file, size=_GridEdges(), min_pixels=None, max_pixels=None)
    )
    settings = msgspec.json.encode([plain, file.sizes])
    config = read_json(folder / "config.json", _Grid)
    return GridImages(
        placeholder=config.placeholder,
        deepstack=config.deepstack,
        sizes=file.sizes,
        videos=_read_videos(folder, config),
        processing=hashlib.sha256(b"grid\0" + settings).digest(),
    )


def _read_videos(folder: Path, config: _Grid) -> GridVideos | None:
    if (file := read_video_file(folder)) is None:
        return None
    stamped = config.model_type in DEEPSTACKS
    pad = "<|video_pad|>"
    seconds = config.vision_config.tokens_per_second
    pixels = [getattr(file, name) for name in PixelFields.__struct_fields__]
    return GridVideos(
        placeholder=config.video_token_id,
        # With stamps each grid has ends of its own, in place of those that templates write.
        markers=(f"<|vision_start|>{pad}<|vision_end|>", pad) if stamped else (pad,),
        sampling=file.sampling,
        sizes=file.sizes,
        stamped=stamped,
        tokens_per_second=seconds if config.model_type == "qwen2_5_vl" else None,
        processing=hashlib.sha256(msgspec.json.encode(pixels)).digest(),
    )
