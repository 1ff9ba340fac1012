"""What a vision tower takes: its shape, by config.json, and images, decoded and preprocessed."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta, field
from PIL import Image, ImageOps

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import parse_json, read_json
from antiphon.model_card.grid_files import GRIDS, read_grid_file, read_video_file
from antiphon.model_card.image_grids import (
    GridSizes,  # noqa: TC001  # msgspec reads the fields of structs
    RowSizes,  # noqa: TC001  # likewise
)
from antiphon.model_card.image_tiles import AnyresTiling, AspectTiling, Tiling
from antiphon.model_card.images import check_unscaled
from antiphon.model_card.processor_files import (
    ModelKind,
    PixelFields,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.videos import Sampling  # noqa: TC001  # as above
from antiphon.model_card.vision import (
    ANYRES,
    FRAME_SAMPLINGS,
    GEMMA3,
    IDEFICS,
    INTERN,
    FeatureFields,
    SquareTower,
    has_rows,
    read_anyres,
    read_anyres_fields,
    read_aspect_tiling,
    read_frame_sampling,
    read_rows,
    read_tiling,
)
from antiphon.wire.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from antiphon.wire.claim import PixelLimits

Size = Annotated[int, Meta(ge=1)]
Channels = tuple[float, float, float]
"""One value each for red, green and blue."""


LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Filters, by Pillow's numbers."""


class VisionFamily(StrEnum):
    CLIP = "clip"
    SIGLIP = "siglip"
    INTERN = "internvl"


class VisionActivation(StrEnum):
    """Activation of the feed-forward layers, by its name in config.json."""

    QUICK_GELU = "quick_gelu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    SILU = "silu"


class VisionTowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a tower, as in config.json. Missing fields have CLIP's defaults.

    `mean`, `std`, `filter` and `crops` (to a square) are the family's defaults for preprocessing.
    `read_tiling` reads how images are cut to many frames.
    """

    family: ClassVar = VisionFamily.CLIP
    mean: ClassVar[Channels] = (0.48145466, 0.4578275, 0.40821073)
    std: ClassVar[Channels] = (0.26862954, 0.26130258, 0.27577711)
    crops: ClassVar = True
    has_class: ClassVar = True
    patch_bias: ClassVar = False
    norm_before: ClassVar = True
    scales: ClassVar = False
    by_place: ClassVar = False
    filter: ClassVar = BICUBIC
    hidden: Size = field(name="hidden_size", default=768)
    intermediate: Size = field(name="intermediate_size", default=3072)
    layers: Size = field(name="num_hidden_layers", default=12)
    heads: Size = field(name="num_attention_heads", default=12)
    image_size: Size = 224
    patch_size: Size = 32
    num_channels: Annotated[int, Meta(ge=3, le=3)] = 3
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.QUICK_GELU)
    norm_eps: float = field(name="layer_norm_eps", default=1e-5)
    feature_layer: int | None = None
    """LLaVA's `vision_feature_layer`: which of the states before, between and after the layers is
    the output; None: what the original model returns."""

    @property
    def computed(self) -> int:
        """Number of layers to compute."""
        if self.feature_layer is None:
            return self.layers
        return self.feature_layer + (self.layers + 1 if self.feature_layer < 0 else 0)

    @property
    def inner(self) -> bool:
        """Whether the output is that of a layer, without a norm after it."""
        return self.feature_layer is not None

    @property
    def norm_after(self) -> bool:
        """Whether the original model returns what a norm makes of the last layer's output."""
        return False

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have a norm over all heads."""
        return False

    @property
    def rms(self) -> bool:
        """Whether the layers have RMS norms, without a bias."""
        return False

    @staticmethod
    def read_tiling(folder: Path) -> Tiling | AspectTiling | AnyresTiling | None:
        """Read how images are cut to many frames; None: they are not."""
        del folder
        return None

    @property
    def tokens(self) -> int:
        """Rows of the embedding: the complete patches, preceded by the class token for CLIP."""
        return (self.image_size // self.patch_size) ** 2 + self.has_class


class SiglipSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """Missing fields have SigLIP's defaults."""

    family: ClassVar = VisionFamily.SIGLIP
    mean: ClassVar[Channels] = (0.5, 0.5, 0.5)
    std: ClassVar[Channels] = (0.5, 0.5, 0.5)
    crops: ClassVar = False
    has_class: ClassVar = False
    patch_bias: ClassVar = True
    norm_before: ClassVar = False
    patch_size: Size = 16
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.GELU_TANH)
    norm_eps: float = field(name="layer_norm_eps", default=1e-6)

    @property
    def norm_after(self) -> bool:
        return not self.inner


class PaddedClipSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """CLIP, of images that are padded to a grid of tiles."""

    @staticmethod
    def read_tiling(folder: Path) -> AnyresTiling:
        return _padded_tiling(folder)


class PaddedSiglipSpec(SiglipSpec, frozen=True, kw_only=True):
    """SigLIP, of images that are padded to a grid of tiles."""

    @staticmethod
    def read_tiling(folder: Path) -> AnyresTiling:
        return _padded_tiling(folder)


def _padded_tiling(folder: Path) -> AnyresTiling:
    kind = read_json(folder / "config.json", _Kind).model_type
    return read_anyres(folder, kind)[0]


class Gemma3Spec(SiglipSpec, frozen=True, kw_only=True):
    """SigLIP, before Gemma 3's preprocessor, whose filter is another one."""

    filter: ClassVar = BILINEAR


class IdeficsSpec(SiglipSpec, frozen=True, kw_only=True):
    """SigLIP, with Idefics3's defaults."""

    by_place: ClassVar = True
    filter: ClassVar = LANCZOS
    hidden: Size = field(name="hidden_size", default=1152)
    heads: Size = field(name="num_attention_heads", default=16)
    patch_size: Size = 32

    @staticmethod
    def read_tiling(folder: Path) -> Tiling:
        return read_tiling(folder)


class InternSpec(VisionTowerSpec, frozen=True, kw_only=True):
    """InternVL's tower, an InternViT: class token, and outputs of blocks that are scaled."""

    family: ClassVar = VisionFamily.INTERN
    crops: ClassVar = False
    patch_bias: ClassVar = True
    norm_before: ClassVar = False
    scales: ClassVar = True
    hidden: Size = field(name="hidden_size", default=1024)
    intermediate: Size = field(name="intermediate_size", default=4096)
    layers: Size = field(name="num_hidden_layers", default=24)
    heads: Size = field(name="num_attention_heads", default=16)
    activation: VisionActivation = field(name="hidden_act", default=VisionActivation.GELU)
    norm_eps: float = field(name="layer_norm_eps", default=1e-6)
    attention_bias: bool = False
    use_qk_norm: bool = False
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    use_mean_pooling: bool = True

    @property
    def norm_after(self) -> bool:
        return not self.use_mean_pooling and not self.inner

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        return self.use_qk_norm

    @property
    def rms(self) -> bool:
        return self.norm_type == "rms_norm"

    @staticmethod
    def read_tiling(folder: Path) -> AspectTiling:
        return read_aspect_tiling(folder)


def read_spec(folder: Path) -> VisionTowerSpec:
    """Read the config.json of a vision model, or of a model with a text and a vision tower.

    Raises:
        ConfigError: It is missing or malformed, or the tower is not supported.
    """
    file = folder / "config.json"
    kind = read_json(file, _Kind).model_type
    if kind not in _KINDS:
        raise ConfigError(f"{file}: model_type = {kind!r}: must be one of {', '.join(_KINDS)}")
    spec_type, nested = _KINDS[kind]
    if nested:
        tower = read_json(file, _Both).vision_config
        if kind in ("llava", *ANYRES):
            inner = parse_json(tower, _Kind, file).model_type
            if inner not in LLAVA_TOWERS:
                raise ConfigError(
                    f"{file}: vision_config: model_type = {inner!r}: must be one of "
                    f"{', '.join(LLAVA_TOWERS)}"
                )
            spec_type = (_PADDED if kind in ANYRES else LLAVA_TOWERS)[inner]
        if kind == INTERN:
            tower = _squared(tower, file)
        spec = parse_json(tower, spec_type, file)
    else:
        spec = read_json(file, spec_type)
    if spec.hidden % spec.heads:
        raise ConfigError(
            f"{file}: hidden_size = {spec.hidden} is not a multiple of "
            f"num_attention_heads = {spec.heads}"
        )
    if spec.patch_size > spec.image_size:
        raise ConfigError(
            f"{file}: patch_size = {spec.patch_size} exceeds image_size = {spec.image_size}"
        )
    if (features := read_features(folder)) is not None:
        assert isinstance(features.vision_feature_layer, int), "it was checked"
        layer: int | None = features.vision_feature_layer
        if kind == INTERN and layer in (-1, spec.layers):
            layer = None
        spec = msgspec.structs.replace(spec, feature_layer=layer)
        if not 0 <= spec.computed <= spec.layers:
            raise ConfigError(
                f"{file}: vision_feature_layer = {features.vision_feature_layer}: must be one of "
                f"{spec.layers} layers"
            )
    return spec


def _squared(tower: msgspec.Raw, file: Path) -> msgspec.Raw:
    """The config of a tower with one number for both edges."""
    image, patch = parse_json(tower, SquareTower, f"{file}: vision_config").edges(file)
    fields = parse_json(tower, dict[str, msgspec.Raw], file)
    sizes = {"image_size": image, "patch_size": patch}
    return msgspec.Raw(msgspec.json.encode(fields | sizes))


def read_features(folder: Path) -> FeatureFields | None:
    """What a LLaVA or InternVL model takes of its tower; None for other models."""
    file = folder / "config.json"
    if (kind := read_json(file, _Kind).model_type) in ANYRES:
        return read_anyres_fields(folder, kind)
    if kind not in ("llava", INTERN):
        return None
    features = read_json(file, _LastFeature if kind == INTERN else FeatureFields)
    features.check(file)
    return features


class _LastFeature(FeatureFields, frozen=True):
    vision_feature_layer: int | list[int] = -1


class _Kind(msgspec.Struct):
    model_type: str = ""


class _Both(msgspec.Struct):
    vision_config: msgspec.Raw
    model_type: str = ""


_KINDS: dict[str, tuple[type[VisionTowerSpec], bool]] = {
    "clip_vision_model": (VisionTowerSpec, False),
    "clip": (VisionTowerSpec, True),
    "siglip_vision_model": (SiglipSpec, False),
    "siglip": (SiglipSpec, True),
    **dict.fromkeys(("llava", *ANYRES), (VisionTowerSpec, True)),
    GEMMA3: (Gemma3Spec, True),
    INTERN: (InternSpec, True),
    **dict.fromkeys(IDEFICS, (IdeficsSpec, True)),
}
"""By `model_type`: the spec, and whether the tower is in `vision_config`."""
LLAVA_TOWERS: dict[str, type[VisionTowerSpec]] = {
    "clip_vision_model": VisionTowerSpec,
    "siglip_vision_model": SiglipSpec,
}
_PADDED: dict[str, type[VisionTowerSpec]] = {
    "clip_vision_model": PaddedClipSpec,
    "siglip_vision_model": PaddedSiglipSpec,
}


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The usual web formats. Pillow's other decoders are not exposed to untrusted data."""

_BROKEN = (
    OSError,  # unknown formats and truncated files too
    SyntaxError,  # a broken PNG
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,  # features that a decoder does not implement too
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises on bytes that are not an image."""

# Pillow's own guard has one limit per process and only warns between that limit and twice as much.
# `pixels_max` is checked against the header, before any pixel is decoded.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """The frames (F, H, W, 3) of an image or a video, and its own size in pixels, upright."""

    pixels: NDArray[np.uint8]
    width: int
    height: int
    video: bool = False


class Preprocessor:
    """Decodes, resizes, crops and normalizes. Called in one thread; has no mutable state.

    `pixels_max` is the maximum of an image, both as received and as resized.
    """

    def __init__(self, recipe: PreprocessorConfig, *, pixels_max: int) -> None:
        self._recipe = recipe
        self._pixels_max = pixels_max
        self._mean = np.array(recipe.mean, dtype=np.float32)
        self._std = np.array(recipe.std, dtype=np.float32)

    def __call__(self, data: bytes | bytearray) -> NDArray[np.float32]:
        """Return the frames of an image as (F, 3, size, size), in RGB order.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`, or it is too narrow.
            RequestTooLarge: The image has too many pixels.
        """
        return self.normalized(self.decoded(data).pixels)

    def decoded(
        self,
        data: bytes | bytearray,
        width: int = 0,
        height: int = 0,
        limits: PixelLimits | None = None,
    ) -> DecodedImage:
        """Return the frames, decoded and resized, but not normalized.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`, it is too narrow, it has
                another size than `width` and `height`, if these are not 0, or it cannot be scaled
                within `limits`.
            RequestTooLarge: The image has too many pixels.
        """
        image = self.image(data)
        if (width or height) and image.size != (width, height):
            raise InvalidRequest(
                f"the image has {image.width} x {image.height} pixels, and {width} x {height} by "
                "its header",
                param="image",
            )
        frames = [np.asarray(frame, dtype=np.uint8) for frame in self._fit(image, limits)]
        return DecodedImage(np.stack(frames), image.width, image.height)

    def normalized(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Scale and normalize: (F, size, size, 3)  ->  (F, 3, size, size)."""
        values = pixels.astype(np.float32) * np.float32(self._recipe.scale)
        return np.ascontiguousarray(((values - self._mean) / self._std).transpose(0, 3, 1, 2))

    @property
    def recipe(self) -> PreprocessorConfig:
        return self._recipe

    def image(self, data: bytes | bytearray) -> Image.Image:
        """Decode an image, upright and opaque.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`.
            RequestTooLarge: The image has too many pixels.
        """
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._check_size(image)
                # Cameras store the orientation in EXIF data.
                return _opaque(ImageOps.exif_transpose(image))
        except Image.UnidentifiedImageError as error:
            raise InvalidRequest(
                f"not an image of a known format ({', '.join(FORMATS)})", param="image"
            ) from error
        except _BROKEN as error:
            raise InvalidRequest(f"the image cannot be decoded: {error}", param="image") from error

    def _check_size(self, image: Image.Image) -> None:
        pixels = image.width * image.height
        if pixels > self._pixels_max:
            raise RequestTooLarge(
                f"The image has {pixels} pixels; the limit is {self._pixels_max} pixels.",
                param="image",
                details={"pixels": str(pixels), "pixels_max": str(self._pixels_max)},
            )

    def _fit(self, image: Image.Image, limits: PixelLimits | None) -> list[Image.Image]:
        """Resize an image to the frames that the tower takes."""
        recipe = self._recipe.within(limits)
        size, short, filter_ = recipe.size, recipe.short_edge, recipe.resample
        match recipe.tiling:
            case Tiling() as tiling:
                return _tiles(image, tiling, filter_)
            case AspectTiling() as tiling:
                return _stacked(image, tiling, filter_)
            case AnyresTiling() as tiling:
                return _padded(image, tiling, filter_)
            case None:
                pass
        if recipe.grid is not None:
            return [image.resize(recipe.grid.scaled(*image.size), filter_)]
        if short is None:
            return [image.resize((size, size), filter_)]
        width, height = (short * edge // min(image.size) for edge in image.size)
        if width * height > self._pixels_max:
            # An image a few pixels wide and millions long would be resized to billions of pixels.
            raise InvalidRequest(
                f"an image of {image.width} x {image.height} pixels is too narrow", param="image"
            )
        left, top = (width - size) // 2, (height - size) // 2
        return [image.resize((width, height), filter_).crop((left, top, left + size, top + size))]


def _tiles(image: Image.Image, tiling: Tiling, filter_: int) -> list[Image.Image]:
    """Cut an image into tiles, row by row, and scale all of it to the last one."""
    columns, rows = tiling.grid(*image.size)
    edge = tiling.tile
    image = image.resize(tiling.scaled(*image.size), filter_)
    if tiling.splits:
        image = image.resize((columns * edge, rows * edge), filter_)
    if (columns, rows) == (1, 1):
        return [image if image.size == (edge, edge) else image.resize((edge, edge), filter_)]
    return [*_cut(image, columns, rows, edge), image.resize((edge, edge), filter_)]


def _stacked(image: Image.Image, tiling: AspectTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to tiles, row by row, and to one where there are several."""
    edge, (columns, rows) = tiling.tile, tiling.grid(*image.size)
    tiles = _cut(image.resize((columns * edge, rows * edge), filter_), columns, rows, edge)
    return tiles if len(tiles) == 1 else [*tiles, image.resize((edge, edge), filter_)]


def _padded(image: Image.Image, tiling: AnyresTiling, filter_: int) -> list[Image.Image]:
    """Scale an image to one tile, and to a grid of tiles, on black, row by row."""
    edge = tiling.tile
    whole = image.resize((edge, edge), filter_)
    if not tiling.sizes:
        return [whole]
    size, scaled = tiling.target(*image.size), tiling.scaled(*image.size)
    canvas = Image.new("RGB", size)
    left, top = ((outer - inner) // 2 for outer, inner in zip(size, scaled, strict=True))
    canvas.paste(image.resize(scaled, filter_), (left, top))
    return [whole, *_cut(canvas, *tiling.grid(*image.size), edge)]


def _cut(image: Image.Image, columns: int, rows: int, edge: int) -> list[Image.Image]:
    corners = [(edge * x, edge * y) for y in range(rows) for x in range(columns)]
    return [image.crop((x, y, x + edge, y + edge)) for x, y in corners]


def _opaque(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparent pixels are blended with white, as most pages show them."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """Preprocessing steps from an image to the pixels of a tower, in this order.

    Attributes:
        size: Edge of the tower's input square.
        short_edge: Resize the shorter edge to this, keeping the aspect ratio, and crop the square
            from the center; unset: resize to the square, ignoring the aspect ratio.
        resample: The filter, by Pillow's number.
        scale: Factor for every value (0 to 255).
        mean: Subtracted after scaling.
        std: Divisor after that.
        tiling: Set: cut the image into tiles of `size`, whatever its aspect ratio.
        grid: Set: scale the image to whole tokens of `size`, and keep its shape.
        sampling: Set: these are the steps of videos, whose frames are chosen so.
    """

    size: int
    short_edge: int | None
    resample: int
    scale: float
    mean: Channels
    std: Channels
    tiling: Tiling | AspectTiling | AnyresTiling | None = None
    grid: GridSizes | RowSizes | None = None
    sampling: Sampling | None = None

    def within(self, limits: PixelLimits | None) -> PreprocessorConfig:
        """These steps for an image whose request has limits.

        Raises:
            InvalidRequest: Images are not scaled by such limits, or to no size within these.
        """
        if limits is None:
            return self
        if self.tiling is not None:
            return replace(self, tiling=self.tiling.within(limits))
        sampling = None if self.sampling is None else self.sampling.within(limits)
        if self.grid is not None:
            return replace(self, grid=self.grid.within(limits), sampling=sampling)
        check_unscaled(limits)
        return replace(self, sampling=sampling)

    @property
    def frames_max(self) -> int:
        """Maximum number of frames of an image."""
        return 1 if self.tiling is None else self.tiling.frames_max


def read_preprocessor_config(folder: Path, spec: VisionTowerSpec) -> PreprocessorConfig:
    """Read a folder's preprocessor config; unset fields get the family's defaults.

    Raises:
        ConfigError: It is malformed, or its image size does not match the tower.
    """
    found = image_processor_file(folder)
    file, card = found.file, found.read(_PreprocessorFile)
    if not card.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes images of one size only")
    tiling = spec.read_tiling(folder)
    if tiling is not None and tiling.tile != spec.image_size:
        raise ConfigError(
            f"{file}: makes tiles of {tiling.tile} pixels; the tower takes {spec.image_size}"
        )
    short = None if isinstance(tiling, Tiling | AspectTiling) else _short_edge(file, card, spec)
    if isinstance(tiling, AnyresTiling) and short not in (None, spec.image_size):
        raise ConfigError(f"{file}: size.shortest_edge must be {spec.image_size}")
    return _of_squares(card, spec, short_edge=short, tiling=tiling)


def read_frame_config(folder: Path, spec: VisionTowerSpec) -> PreprocessorConfig | None:
    """Read how the frames of videos are preprocessed where they are squares; None: it takes none.

    Raises:
        ConfigError: The file is malformed, or its image size does not match the tower.
    """
    if read_json(folder / "config.json", ModelKind).model_type not in FRAME_SAMPLINGS:
        return None
    found = video_processor_file(folder)
    card = found.read(_PreprocessorFile)
    if not card.do_resize or _short_edge(found.file, card, spec) is not None:
        raise ConfigError(f"{found.file}: frames of videos must be scaled to a square")
    return replace(_of_squares(card, spec), sampling=read_frame_sampling(folder))


def _of_squares(
    card: _PreprocessorFile,
    spec: VisionTowerSpec,
    *,
    short_edge: int | None = None,
    tiling: Tiling | AspectTiling | AnyresTiling | None = None,
) -> PreprocessorConfig:
    return PreprocessorConfig(
        size=spec.image_size,
        short_edge=short_edge,
        tiling=tiling,
        resample=spec.filter if card.resample is None else card.resample,
        scale=card.rescale_factor if card.do_rescale else 1.0,
        mean=(card.image_mean or spec.mean) if card.do_normalize else (0.0, 0.0, 0.0),
        std=(card.image_std or spec.std) if card.do_normalize else (1.0, 1.0, 1.0),
    )


def read_grid_config(folder: Path) -> PreprocessorConfig:
    """Read the preprocessor config of a Qwen2-VL or Pixtral model.

    Raises:
        ConfigError: It is malformed, or does not fit the tower.
    """
    if has_rows(folder):
        file, sizes = read_rows(folder)
    else:
        file = read_grid_file(folder)
        sizes = file.sizes
    return _keeping_shape(file, sizes)


def read_video_config(folder: Path) -> PreprocessorConfig | None:
    """Read how a Qwen-VL or GLM-4V model's videos are preprocessed; None: it takes none.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    if read_json(folder / "config.json", ModelKind).model_type not in GRIDS:
        return None
    file = read_video_file(folder)
    return replace(_keeping_shape(file, file.sizes), sampling=file.sampling)


def _keeping_shape(file: PixelFields, sizes: GridSizes | RowSizes) -> PreprocessorConfig:
    return PreprocessorConfig(
        size=sizes.edge,
        short_edge=None,
        resample=file.resample,
        scale=file.rescale_factor if file.do_rescale else 1.0,
        mean=file.image_mean if file.do_normalize else (0.0, 0.0, 0.0),
        std=file.image_std if file.do_normalize else (1.0, 1.0, 1.0),
        grid=sizes,
    )


class _Edges(msgspec.Struct):
    """A size in newer files: both edges, or the shorter one."""

    height: Size | None = None
    width: Size | None = None
    shortest_edge: Size | None = None


class _PreprocessorFile(msgspec.Struct):
    do_resize: bool = True
    size: Size | _Edges | None = None
    resample: Annotated[int, Meta(ge=0, le=5)] | None = None
    do_center_crop: bool | None = None
    crop_size: Size | _Edges | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: Channels | None = None
    image_std: Channels | None = None


def _short_edge(file: Path, card: _PreprocessorFile, spec: VisionTowerSpec) -> int | None:
    """The shorter edge to resize to, or None to resize to a square; checked against the tower."""
    crops = spec.crops if card.do_center_crop is None else card.do_center_crop
    size, crop = card.size or spec.image_size, card.crop_size or spec.image_size
    if isinstance(size, int):
        # Older files have a plain number: CLIP's shorter edge, or the edge of SigLIP's square.
        size = _Edges(shortest_edge=size) if crops else _Edges(height=size, width=size)
    if isinstance(crop, int):
        crop = _Edges(height=crop, width=crop)
    made = crop if crops else size
    if (made.height, made.width) != (spec.image_size, spec.image_size):
        raise ConfigError(
            f"{file}: makes images of {made.height} x {made.width} pixels; the tower takes "
            f"{spec.image_size} x {spec.image_size}"
        )
    if not crops:
        return None
    if size.shortest_edge is None or size.shortest_edge < spec.image_size:
        raise ConfigError(f"{file}: size.shortest_edge must be {spec.image_size} or more")
    return size.shortest_edge
