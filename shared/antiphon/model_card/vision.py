"""Reads how a model takes images: its placeholder, and what stands in a prompt for an image.

Read by the tokenizer, which writes markers and repeats placeholders, and by the encoder, which must
come to the same number of rows; without torch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.area_images import GEMMA4, AreaImages, read_area
from antiphon.model_card.config_json import read_json
from antiphon.model_card.frame_videos import WORDS_MAX, FrameVideos
from antiphon.model_card.grid_files import GRIDS, KIMI_K25, read_grid, read_padded
from antiphon.model_card.image_grids import (
    GridImages,
    GridVideos,
    PaddedImages,
    RowImages,
    RowSizes,
)
from antiphon.model_card.image_tiles import (
    AnyresTiling,
    AspectTiling,
    CanvasTiling,
    Packing,
    PaddedTiles,
    SeparatedTiles,
    SlicedImages,
    SliceTiling,
    StackedTiles,
    TiledImages,
    Tiling,
)
from antiphon.model_card.images import ComparedImages, Size, SquareImages
from antiphon.model_card.processor_files import (
    ModelKind,
    PixelFields,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.videos import EvenSampling, SkippingSampling

if TYPE_CHECKING:
    from pathlib import Path

IDEFICS = ("idefics3", "smolvlm")
GEMMA3 = "gemma3"
INTERN = "internvl"
PIXTRAL, MISTRAL3 = "pixtral", "mistral3"
NEXT, ONEVISION = "llava_next", "llava_onevision"
ANYRES = (NEXT, ONEVISION)
LLAMA4 = "llama4"
MINICPM = "minicpmv4_6"
CLIP, SIGLIP = "clip", "siglip"
TWO_TOWERS = (CLIP, SIGLIP)

VisionCard = (
    SquareImages
    | TiledImages
    | StackedTiles
    | PaddedTiles
    | SeparatedTiles
    | SlicedImages
    | GridImages
    | RowImages
    | AreaImages
    | PaddedImages
    | ComparedImages
)
"""How a model takes images."""


VideosCard = GridVideos | FrameVideos
"""How a model takes videos."""


def videos_of(card: VisionCard | None) -> VideosCard | None:
    """How a model takes videos; None if it takes none."""
    takes = isinstance(card, GridImages | TiledImages | StackedTiles | PaddedTiles)
    return card.videos if takes else None


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


class _VideoSampling(msgspec.Struct, frozen=True):
    fps: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    max_frames: Annotated[int, Meta(ge=1, le=WORDS_MAX)] = 64
    video_size: _LongestEdge = field(default_factory=lambda: _LongestEdge(4 * 364))


class _SmolVideoFile(msgspec.Struct, frozen=True):
    """SmolVLM's settings of videos, which are beside those of its images.

    The size of images, if it is there, wins over that of videos, as in transformers.
    """

    size: _LongestEdge | None = None
    max_image_size: _LongestEdge = field(default_factory=lambda: _LongestEdge(364))
    video_sampling: _VideoSampling | None = None


def read_smol_videos(folder: Path) -> tuple[Tiling, SkippingSampling] | None:
    """Read how a SmolVLM model scales frames, and which ones it sees; None: it takes no videos.

    Raises:
        ConfigError: The file is malformed.
    """
    if read_json(folder / "config.json", ModelKind).model_type != "smolvlm":
        return None
    read = video_processor_file(folder).read(_SmolVideoFile)
    if (sampling := read.video_sampling) is None:
        return None
    tiling = Tiling(
        longest_edge=(read.size or sampling.video_size).longest_edge,
        tile=read.max_image_size.longest_edge,
        splits=False,
    )
    return tiling, SkippingSampling(fps=sampling.fps, most=sampling.max_frames)


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


class Llama4Tower(msgspec.Struct, frozen=True):
    """What of Llama 4's vision_config decides the number of rows of a tile."""

    image_size: Size = 448
    patch_size: Size = 14
    pixel_shuffle_ratio: float = 0.5

    def factor(self, file: Path) -> int:
        """Edge of the squares of patches that become one row.

        Raises:
            ConfigError: It is no whole number, or patches are left over.
        """
        factor = shuffle_factor(file, self.pixel_shuffle_ratio, "pixel_shuffle_ratio")
        if (side := self.image_size // self.patch_size) % factor:
            raise ConfigError(f"{file}: pixel_shuffle_ratio: {factor} patches must divide {side}")
        return factor


class _Llama4(msgspec.Struct, frozen=True):
    image_token_index: int = 200092
    vision_config: Llama4Tower = field(default_factory=Llama4Tower)


class _CanvasFile(msgspec.Struct, frozen=True):
    """Llama 4's preprocessor_config.json."""

    size: _SquareEdges = field(default_factory=lambda: _SquareEdges(336, 336))
    max_patches: Annotated[int, Meta(ge=1, le=256)] = 16
    resize_to_max_canvas: bool = False


def read_canvas_tiling(folder: Path) -> CanvasTiling:
    """Read how the preprocessor of a Llama 4 model cuts images.

    Raises:
        ConfigError: The file is malformed, or its tiles are no squares.
    """
    found = image_processor_file(folder)
    read = found.read(_CanvasFile)
    if read.size.height != read.size.width:
        raise ConfigError(f"{found.file}: size must be a square")
    return CanvasTiling(
        tile=read.size.height, most=read.max_patches, largest=read.resize_to_max_canvas
    )


def read_llama4_tower(file: Path) -> Llama4Tower:
    """Read what of config.json decides the number of rows of a tile.

    Raises:
        ConfigError: It is malformed.
    """
    return read_json(file, _Llama4).vision_config


class MiniCpmTower(SquareTower, frozen=True):
    """What of MiniCPM-V's vision_config decides the number of rows of an image."""

    image_size: Size | tuple[Size, ...] = 224
    patch_size: Size | tuple[Size, ...] = 16


class MiniCpmFields(msgspec.Struct, frozen=True):
    """What of MiniCPM-V's config.json decides the number of rows of an image."""

    image_token_id: int | None = None
    downsample_mode: Literal["4x", "16x"] = "16x"
    merge_kernel_size: tuple[Size, ...] = (2, 2)
    merger_times: Size = 1
    vision_config: MiniCpmTower = field(default_factory=MiniCpmTower)

    @property
    def merge(self) -> int:
        """Edge of the square of patches that becomes a token."""
        return 4 if self.downsample_mode == "16x" else 2


class _SliceFile(PixelFields, frozen=True):
    """The preprocessor_config.json of MiniCPM-V, with the defaults of its class."""

    max_slice_nums: Annotated[int, Meta(ge=1, le=256)] = 9
    scale_resolution: Size = 448
    patch_size: Size = 14
    slice_mode: bool = True
    downsample_mode: Literal["4x", "16x"] = "16x"
    use_image_id: bool = True
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def read_slices(folder: Path) -> tuple[PixelFields, SliceTiling]:
    """Read how the preprocessor of a MiniCPM-V model scales and cuts images.

    Raises:
        ConfigError: A file is malformed, not supported, or does not fit the other one.
    """
    config, file, read = _slices(folder)
    return read, _slice_tiling(config, file, read)


def _slices(folder: Path) -> tuple[MiniCpmFields, Path, _SliceFile]:
    found = image_processor_file(folder)
    return read_json(folder / "config.json", MiniCpmFields), found.file, found.read(_SliceFile)


def _slice_tiling(config: MiniCpmFields, file: Path, read: _SliceFile) -> SliceTiling:
    _, patch = config.vision_config.edges(file.parent / "config.json")
    found, taken = (read.patch_size, read.downsample_mode), (patch, config.downsample_mode)
    if found != taken:
        raise ConfigError(
            f"{file}: patch_size = {found[0]}, downsample_mode = {found[1]!r}: those of "
            f"config.json are {taken[0]} and {taken[1]!r}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    return SliceTiling(
        resolution=read.scale_resolution,
        edge=read.patch_size * config.merge,
        most=read.max_slice_nums if read.slice_mode else 1,
    )


class _FrameFile(msgspec.Struct, frozen=True):
    """The settings of InternVL's or LLaVA-OneVision's video processor.

    Whether it says to choose frames, all of a long video would be more than a context.
    """

    num_frames: Size | None = None
    initial_shift: bool | float = True
    """InternVL's: whether frames are the middle ones of their parts."""


FRAME_SAMPLINGS = {INTERN: EvenSampling(), ONEVISION: EvenSampling(frames=32, middle=False)}
"""As in InternVL's own examples, and as LLaVA-OneVision was trained (arXiv:2408.03326)."""


def read_frame_sampling(folder: Path) -> EvenSampling:
    """Read which frames the video processor of such a model chooses.

    Raises:
        ConfigError: The file is malformed, or not supported.
    """
    default = FRAME_SAMPLINGS[read_json(folder / "config.json", ModelKind).model_type]
    found = video_processor_file(folder)
    read = found.read(_FrameFile)
    frames, shift = read.num_frames or default.frames, read.initial_shift
    if default.middle and not isinstance(shift, bool) and shift:
        raise ConfigError(f"{found.file}: initial_shift = {shift}: must be true or false")
    middle = default.middle and bool(shift)
    most = max(frames, default.most)
    return msgspec.structs.replace(default, frames=frames, middle=middle, most=most)


class _PanAndScan(msgspec.Struct, frozen=True):
    do_pan_and_scan: bool | None = None


SEEING = (
    *("llava", MISTRAL3, *ANYRES, GEMMA3, GEMMA4, INTERN, LLAMA4),
    *(*IDEFICS, *GRIDS, KIMI_K25, MINICPM, *TWO_TOWERS),
)
"""Types of models whose images are served."""


def read_vision(folder: Path) -> VisionCard | None:
    """Read how a model takes images; None if it does not, or only its text part is served.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    if not file.is_file() or (kind := read_json(file, ModelKind).model_type) not in SEEING:
        return None
    if kind in GRIDS:
        return read_grid(folder)
    if kind == KIMI_K25:
        return read_padded(folder)
    if has_rows(folder):
        return _read_rows(folder)
    if kind == GEMMA3:
        return _read_gemma3(folder)
    if kind == GEMMA4:
        return read_area(folder)
    if kind == INTERN:
        return _read_internvl(folder)
    if kind in ANYRES:
        return _read_anyres(folder, kind)
    if kind == LLAMA4:
        return _read_llama4(folder)
    if kind == MINICPM:
        return _read_minicpm(folder)
    if kind in TWO_TOWERS:
        return _read_clip(folder) if kind == CLIP else _read_siglip(folder)
    return _read_idefics(folder) if kind in IDEFICS else _read_llava(folder)


def has_rows(folder: Path) -> bool:
    """Whether a model has Pixtral's tower.

    Raises:
        ConfigError: It should have, and has not.
    """
    file = folder / "config.json"
    kind = read_json(file, ModelKind).model_type
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
    tokens, videos = (tower.image_size // tower.patch_size) ** 2 // config.scale_factor**2, None
    if (seen := read_smol_videos(folder)) is not None:
        mark = "<fake_token_around_image>"
        videos = FrameVideos(
            placeholder=config.image_token_id,
            markers=("<video>",),
            in_templates=False,
            sampling=seen[1],
            frame_tokens=tokens,
            intro="You are provided the following series of {} frames from a {} [H:MM:SS] video.\n",
            before=f"\nFrame from {{1}}:{mark}<global-img>",
            after=mark,
            end="\n\n",
            processing=_video_processing(folder, config),
        )
    return TiledImages(
        placeholder=config.image_token_id,
        tiling=read_tiling(folder),
        tile_tokens=tokens,
        videos=videos,
        processing=_processing(folder, config),
    )


def _read_llama4(folder: Path) -> SeparatedTiles:
    file = folder / "config.json"
    config = read_json(file, _Llama4)
    tower = config.vision_config
    side = tower.image_size // tower.patch_size // tower.factor(file)
    return SeparatedTiles(
        placeholder=config.image_token_index,
        marker="<|image|>",
        tiling=read_canvas_tiling(folder),
        tile_tokens=side**2,
        processing=_processing(folder, config),
    )


def _read_minicpm(folder: Path) -> SlicedImages:
    config, file, read = _slices(folder)
    if config.image_token_id is None:
        raise ConfigError(f"{folder / 'config.json'}: image_token_id is missing")
    return SlicedImages(
        placeholder=config.image_token_id,
        counted="<image_id>{}</image_id>" if read.use_image_id else "",
        tiling=_slice_tiling(config, file, read),
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
    video_token_id: int | None = None
    video_token_index: int = 151647
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
    placeholder, videos = config.image_token_id, None
    if isinstance(config, _Onevision):
        of_video = config.video_token_id
        videos = FrameVideos(
            placeholder=config.video_token_index if of_video is None else of_video,
            markers=("<video>",),
            sampling=read_frame_sampling(folder),
            frame_tokens=packing.pooled_side**2,
            end_tokens=1,
            processing=_video_processing(folder, config),
        )
    return PaddedTiles(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        tiling=tiling,
        packing=packing,
        videos=videos,
        processing=_processing(folder, config),
    )


def _read_internvl(folder: Path) -> StackedTiles:
    file = folder / "config.json"
    config = read_json(file, _InternVl)
    image, patch = config.vision_config.edges(file)
    by = shuffle_factor(file, config.downsample_ratio)
    tile_tokens = (image // patch // by) ** 2
    videos = FrameVideos(
        placeholder=config.image_token_id,
        markers=("<video>",),
        sampling=read_frame_sampling(folder),
        frame_tokens=tile_tokens,
        before="Frame{}: <img>",
        after="</img>",
        between="\n",
        processing=_video_processing(folder, config),
    )
    return StackedTiles(
        placeholder=config.image_token_id,
        tiling=read_aspect_tiling(folder),
        tile_tokens=tile_tokens,
        videos=videos,
        before="<img>",
        after="</img>",
        processing=_processing(folder, config),
    )


class _Clip(msgspec.Struct, frozen=True):
    projection_dim: Size = 512


def _read_clip(folder: Path) -> ComparedImages:
    config = read_json(folder / "config.json", _Clip)
    return ComparedImages(
        placeholder=0, width=config.projection_dim, processing=_processing(folder, config)
    )


class _SiglipText(msgspec.Struct, frozen=True):
    hidden_size: Size = 768
    projection_size: Size | None = None
    max_position_embeddings: Size = 64


class _SiglipVision(msgspec.Struct, frozen=True):
    hidden_size: Size = 768
    vision_use_head: bool = True


class _Siglip(msgspec.Struct, frozen=True):
    text_config: _SiglipText = field(default_factory=_SiglipText)
    vision_config: _SiglipVision = field(default_factory=_SiglipVision)


def _read_siglip(folder: Path) -> ComparedImages:
    file = folder / "config.json"
    config = read_json(file, _Siglip)
    text, vision = config.text_config, config.vision_config
    if not vision.vision_use_head:
        raise ConfigError(f"{file}: vision_config: vision_use_head = false is not supported")
    if (width := text.projection_size or text.hidden_size) != vision.hidden_size:
        raise ConfigError(
            f"{file}: vectors of texts have {width} numbers, and those of images "
            f"{vision.hidden_size}: they cannot be compared"
        )
    return ComparedImages(
        placeholder=0,
        width=width,
        # It was trained on padded texts, whose padding is attended to.
        text_tokens=text.max_position_embeddings,
        processing=_processing(folder, config),
    )


def shuffle_factor(file: Path, ratio: float, name: str = "downsample_ratio") -> int:
    """Edge of the squares of patches that become one row.

    Raises:
        ConfigError: It is no whole number.
    """
    by = round(1 / ratio) if ratio > 0 else 0
    if by < 1 or 1 / by != ratio:
        raise ConfigError(f"{file}: {name} = {ratio}: must be 1 by a whole number")
    return by


def _processing(folder: Path, config: msgspec.Struct) -> bytes:
    recipe = image_processor_file(folder).content
    return hashlib.sha256(msgspec.json.encode(config) + b"\0" + recipe).digest()


def _video_processing(folder: Path, config: msgspec.Struct) -> bytes:
    recipe = video_processor_file(folder).content
    return hashlib.sha256(msgspec.json.encode(config) + b"\0" + recipe).digest()
