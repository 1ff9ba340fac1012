"""The vision transformers of CLIP, SigLIP, InternVL and Llama 4.

Axes: B images, T tokens (patches, and a class token), C hidden, N heads, D of each head.

Source: Dosovitskiy et al. 2020, arXiv:2010.11929; Radford et al. 2021, arXiv:2103.00020 (CLIP);
Zhai et al. 2023, arXiv:2303.15343 (SigLIP); Chen et al. 2023, arXiv:2312.14238 (InternVL);
Agrawal et al. 2024, arXiv:2410.07073 (rotation by column and row).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from antiphon.config.model import Dtype
from antiphon.encoder.activations import ACTIVATIONS
from antiphon.encoder.cache import CachedEmbedding
from antiphon.encoder.connectors import Connector, PackedTiles, read_connector, read_packed
from antiphon.encoder.grid_configs import read_grid_spec
from antiphon.encoder.grid_tower import GridTower, GridTowerSpec, MergerWeights
from antiphon.encoder.grid_tower_files import read_grid_weights
from antiphon.encoder.hd_rows import HdRows, read_hd_rows
from antiphon.encoder.linear import Affine, Linear, by_halves
from antiphon.encoder.preprocess import DecodedImage, Preprocessor
from antiphon.encoder.preprocessor_files import (
    read_frame_config,
    read_grid_config,
    read_preprocessor_config,
    read_video_config,
)
from antiphon.encoder.tensor_files import TensorFiles, weight_files
from antiphon.encoder.tower_layers import TowerLayer, TowerLayers
from antiphon.encoder.tower_spec import VisionFamily, VisionTowerSpec, read_spec
from antiphon.encoder.videos import VideoPreprocessor
from antiphon.model_card.vision.areas import AreaImages
from antiphon.model_card.vision.frame_videos import FrameVideos
from antiphon.model_card.vision.grids import GridImages
from antiphon.model_card.vision.hd_tiles import HdImages, HdTiling
from antiphon.model_card.vision.padded_grids import PaddedImages
from antiphon.model_card.vision.rows import RowImages
from antiphon.model_card.vision.slices import SlicedImages, SliceTiling
from antiphon.model_card.vision.vision_card import read_vision, videos_of
from antiphon.resolve.device import detect_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from antiphon.config.settings import Settings
    from antiphon.encoder.audio import DecodedAudio


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names of tensors; those of a layer's parts are relative to it.

    The name of the patches shows the prefix of all in models that have more than a tower.
    """

    patch: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding.weight"
    class_embedding: str = "embeddings.class_embedding"
    norm_before: str = "pre_layrnorm"  # the misspelling is in every CLIP checkpoint
    norm_after: str = "post_layernorm"
    layer: str = "encoder.layers.{}"
    attention: str = "self_attn"
    out: str = "out_proj"
    norm1: str = "layer_norm1"
    norm2: str = "layer_norm2"


NAMES = {
    VisionFamily.CLIP: TowerNames(),
    VisionFamily.SIGLIP: TowerNames(),
    VisionFamily.INTERN: TowerNames(
        patch="embeddings.patch_embeddings.projection",
        positions="embeddings.position_embeddings",
        class_embedding="embeddings.cls_token",
        norm_after="layernorm",
        layer="encoder.layer.{}",
        attention="attention",
        out="projection_layer",
        norm1="layernorm_before",
        norm2="layernorm_after",
    ),
    VisionFamily.LLAMA4: TowerNames(
        patch="patch_embedding.linear",
        positions="positional_embedding_vlm",
        class_embedding="class_embedding",
        norm_before="layernorm_pre",
        norm_after="layernorm_post",
        layer="model.layers.{}",
        out="o_proj",
        norm1="input_layernorm",
        norm2="post_attention_layernorm",
    ),
}


@dataclass(frozen=True, slots=True)
class VisionTowerWeights:
    """All weights. The optional ones differ between the families.

    Attributes:
        patch: (C, 3 * patch * patch), without a bias in CLIP.
        positions: (T, C).
        class_token: (C,), not of SigLIP.
        norm_before: Before the first layer, of CLIP and Llama 4.
        layers: Those that are computed: the last ones may be left out.
        norm_after: After the last layer; CLIP applies it only to its pooled output.
    """

    patch: Linear
    class_token: Tensor | None
    positions: Tensor
    norm_before: Affine | None
    layers: tuple[TowerLayer, ...]
    norm_after: Affine | None


class VisionTower:
    """Computes one embedding per token, the `last_hidden_state` of the original models."""

    def __init__(self, spec: VisionTowerSpec, weights: VisionTowerWeights) -> None:
        self.spec = spec
        self._weights = weights
        self._layers: TowerLayers | None = None
        if weights.layers:  # else the result is what enters the first one
            self._layers = TowerLayers(
                weights.layers,
                heads=spec.heads,
                activation=ACTIVATIONS[spec.activation],
                eps=spec.norm_eps,
            )
        self._angles = None if spec.rope_base is None else _angles(spec, spec.rope_base)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Embed: pixels (B, 3, image_size, image_size)  ->  (B, T, C)."""
        weights = self._weights
        x = weights.patch(self._patches(pixels))  # (B, patches, C)
        if weights.class_token is not None:
            token = weights.class_token.expand(len(x), 1, -1)
            x = torch.cat((x, token) if self.spec.class_last else (token, x), dim=1)  # (B, T, C)
        x = x + weights.positions
        if weights.norm_before is not None:
            x = self._norm(x, weights.norm_before)
        if self._layers is not None:
            rows = [self.spec.tokens] * len(x)
            turns = None
            if self._angles is not None:
                turns = self._angles[0].repeat(len(x), 1, 1), self._angles[1].repeat(len(x), 1, 1)
            x = self._layers(x.flatten(0, 1), (rows,), turns).last.view(x.shape)
        return x if weights.norm_after is None else self._norm(x, weights.norm_after)

    def _patches(self, pixels: Tensor) -> Tensor:
        """Cut into whole patches: (B, 3, height, width)  ->  (B, patches, 3 * patch * patch)."""
        edge = self.spec.patch_size
        side = self.spec.image_size // edge
        whole = pixels[..., : side * edge, : side * edge]
        cut = whole.reshape(len(pixels), 3, side, edge, side, edge)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(len(pixels), side * side, -1)

    def _norm(self, x: Tensor, norm: Affine) -> Tensor:
        if norm.bias is None:
            return F.rms_norm(x, (self.spec.hidden,), norm.weight, self.spec.norm_eps)
        return F.layer_norm(x, (self.spec.hidden,), norm.weight, norm.bias, self.spec.norm_eps)


def _angles(spec: VisionTowerSpec, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of each token, (T, 1, D): half of the pairs by column, half by row.

    The class token is last, and is not rotated.
    """
    side, size = spec.image_size // spec.patch_size, spec.hidden // spec.heads // 2
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    patches = torch.arange(side**2)
    places = torch.stack((patches % side, patches // side), dim=1) + 1  # (patches, 2)
    angles = (places[..., None] * frequencies).flatten(1)  # (patches, D / 2)
    angles = torch.cat((angles, torch.zeros(1, size)))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def read_weights(
    folder: Path, spec: VisionTowerSpec, dtype: Dtype = Dtype.FLOAT32
) -> VisionTowerWeights:
    """Read a tower; other tensors (text tower, projections, heads) are ignored.

    Raises:
        ConfigError: There are no files, one is broken, or a tensor is missing, has another shape or
            an unsupported dtype.
    """
    with ExitStack() as open_files:
        last = f"{NAMES[spec.family].patch}.weight"
        files = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
        return _read(files, spec)


def _read(checkpoint: TensorFiles, spec: VisionTowerSpec) -> VisionTowerWeights:
    names, hidden, patch = NAMES[spec.family], spec.hidden, spec.patch_size
    take, affine = checkpoint.read, checkpoint.affine
    leading = (1,) if spec.family is VisionFamily.INTERN else ()
    positions = take(names.positions, *leading, spec.tokens, hidden).view(spec.tokens, hidden)
    of_patch = (3 * patch * patch,) if spec.flat_patches else (3, patch, patch)
    return VisionTowerWeights(
        patch=checkpoint.linear(
            Affine(
                take(f"{names.patch}.weight", hidden, *of_patch).flatten(1),
                take(f"{names.patch}.bias", hidden) if spec.patch_bias else None,
            )
        ),
        class_token=(
            take(names.class_embedding, *leading, *leading, hidden).flatten()
            if spec.has_class
            else None
        ),
        positions=_positions(positions, spec),
        norm_before=affine(names.norm_before, hidden) if spec.norm_before else None,
        layers=tuple(_layer(checkpoint, names, i, spec) for i in range(spec.computed)),
        norm_after=affine(names.norm_after, hidden) if spec.norm_after else None,
    )


def _positions(table: Tensor, spec: VisionTowerSpec) -> Tensor:
    """The position embeddings of the patches, (T, C).

    Idefics3 finds them by where a patch lies between 0 and 1, in float32: for some numbers of
    patches two of them get the same one.
    """
    if not spec.by_place:
        return table
    side = spec.image_size // spec.patch_size
    lies = (torch.arange(side) * (1 / torch.tensor(float(side)))).clamp(max=1 - 1e-6)
    at = torch.bucketize(lies, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return table[(side * at[:, None] + at).flatten()]


def _layer(
    checkpoint: TensorFiles, names: TowerNames, index: int, spec: VisionTowerSpec
) -> TowerLayer:
    name, hidden, wide = names.layer.format(index), spec.hidden, spec.intermediate
    take, affine, linear = checkpoint.read, checkpoint.affine, checkpoint.linear
    attention = f"{name}.{names.attention}"

    def scaled(outputs: Affine, scale: str) -> Affine:
        """With what the outputs of a block are multiplied by."""
        if not spec.scales:
            return outputs
        factors, bias = take(f"{name}.{scale}", hidden), outputs.bias
        return Affine(outputs.weight * factors[:, None], None if bias is None else bias * factors)

    q, k, v = (
        affine(f"{attention}.{part}_proj", hidden, hidden, bias=spec.qkv_bias) for part in "qkv"
    )
    if spec.rope_base is not None:
        q, k = by_halves(q, spec.heads), by_halves(k, spec.heads)
    return TowerLayer(
        norm1=affine(f"{name}.{names.norm1}", hidden, bias=not spec.rms),
        qkv=linear(q, k, v),
        out=linear(scaled(affine(f"{attention}.{names.out}", hidden, hidden), "lambda_1")),
        norm2=affine(f"{name}.{names.norm2}", hidden, bias=not spec.rms),
        up=linear(affine(f"{name}.mlp.fc1", wide, hidden)),
        down=linear(scaled(affine(f"{name}.mlp.fc2", hidden, wide), "lambda_2")),
        q_norm=take(f"{attention}.q_norm.weight", hidden) if spec.qk_norm else None,
        k_norm=take(f"{attention}.k_norm.weight", hidden) if spec.qk_norm else None,
    )


@dataclass(frozen=True, eq=False)
class VisionModel:
    """Preprocessor, vision tower and connector. Blocks."""

    audio: ClassVar[None] = None
    preprocess: Preprocessor
    tower: VisionTower | GridTower
    connector: Connector | None = None
    packing: PackedTiles | HdRows | None = None
    videos: VideoPreprocessor | None = None

    @property
    def width(self) -> int:
        """Numbers of a row of an embedding."""
        if isinstance(self.tower.spec, GridTowerSpec):
            return self.tower.spec.rows_width
        return self.tower.spec.hidden if self.connector is None else self.connector.hidden

    @property
    def embedding_bytes(self) -> int:
        """Size of an image's embedding, at most, or nearly so."""
        recipe, spec = self.preprocess.recipe, self.tower.spec
        if self.packing is not None:
            return self.packing.rows_max * self.width * 4
        if isinstance(spec, GridTowerSpec):
            sizes = recipe.tiling if isinstance(recipe.tiling, SliceTiling) else recipe.grid
            assert sizes is not None, "a recipe of this tower"
            return sizes.tokens_max * self.width * 4
        return recipe.frames_max * spec.tokens * self.width * 4

    def embed(self, image: DecodedImage) -> CachedEmbedding:
        """Embed an image that `preprocess` has decoded."""
        parts = self.preprocess.frames(image)
        if isinstance(self.packing, HdRows):
            rows = self.packing(torch.as_tensor(parts[0]), image.width, image.height)
            return CachedEmbedding.of(rows.numpy())
        if isinstance(self.tower, GridTower):
            # Each frame is an image to it: several at once are those of a video.
            parts = [frame[None] for part in parts for frame in part]
        states = [self._states(part) for part in parts]
        if self.packing is None:
            embedding = torch.cat([each.flatten(0, 1) for each in states])  # (rows, C)
        else:
            embedding = self.packing(states[0], image.width, image.height)
        return CachedEmbedding.of(embedding.numpy())

    def steps(self, medium: DecodedImage | DecodedAudio) -> Iterator[CachedEmbedding | None]:
        """Embed an image, or a video that `videos` has decoded, by what its tower sees at once.

        The last step gives the embedding. Other media may be embedded between steps.
        """
        assert isinstance(medium, DecodedImage), "checked by the service"
        if not medium.video:
            yield self.embed(medium)
            return
        assert self.videos is not None, "it has decoded the video"
        assert not isinstance(self.packing, HdRows), "of a model that takes no videos"
        rows: list[Tensor] = []
        for part in np.split(medium.pixels, len(medium.pixels) // self.videos.depth):
            if rows:
                yield None
            states = self._states(self.videos.normalized(part))
            rows.append(states[0] if self.packing is None else self.packing.pooled(states))
        if self.packing is not None:
            rows.append(self.packing.newline[None])
        yield CachedEmbedding.of(torch.cat(rows).numpy())

    def _states(self, frames: NDArray[np.float32]) -> Tensor:
        """What tower and connector make of frames: (F, T, C)."""
        states = self.tower(torch.as_tensor(frames))
        return states if self.connector is None else self.connector(states)


def set_threads(settings: Settings) -> None:
    """Set the threads of the kernels and of torch."""
    torch.set_num_threads(settings.encoder.threads or detect_device().cores)


def open_model(settings: Settings, folder: Path) -> VisionModel:
    """Load the vision model of a folder, and set the threads that compute.

    Raises:
        ConfigError: The folder has no supported vision tower; the message names the file.
    """
    set_threads(settings)
    pixels_max, dtype = settings.encoder.pixels_max, settings.model.dtype
    keeping_shape = GridImages | RowImages | AreaImages | PaddedImages | SlicedImages | HdImages
    if isinstance(read_vision(folder), keeping_shape):
        recipe = read_grid_config(folder)
        preprocessor = Preprocessor(recipe, pixels_max=pixels_max)
        grids = read_grid_spec(folder)
        weights = read_grid_weights(folder, grids, dtype)
        tower, videos = GridTower(grids, weights), None
        if isinstance(recipe.tiling, HdTiling):
            assert isinstance(weights.merger, MergerWeights), "of such a tower"
            rows = read_hd_rows(folder, tower, recipe.tiling, weights.merger)
            return VisionModel(preprocessor, tower, packing=rows)
        if (recipe := read_video_config(folder)) is not None:
            videos = VideoPreprocessor(recipe, pixels_max=pixels_max)
        return VisionModel(preprocessor, tower, videos=videos)
    spec = read_spec(folder)
    recipe = read_preprocessor_config(folder, spec)
    tower = VisionTower(spec, read_weights(folder, spec, dtype))
    preprocessor, videos = Preprocessor(recipe, pixels_max=pixels_max), None
    card = videos_of(read_vision(folder))
    if isinstance(card, FrameVideos) and (frames := read_frame_config(folder, spec)) is not None:
        videos = VideoPreprocessor(frames, pixels_max=pixels_max, card=card)
    connector, packed = read_connector(folder, spec, dtype), read_packed(folder, recipe)
    return VisionModel(preprocessor, tower, connector, packed, videos)
