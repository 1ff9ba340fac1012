"""Whisper's encoder, and Qwen2-Audio's with its projector.

Axes: M bands of the mel scale, F frames, T tokens (half as many), C hidden, N heads, D of each.

Source: Radford et al. 2022, arXiv:2212.04356, section 2.2; Chu et al. 2024, arXiv:2407.10759.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.encoder.activations import ACTIVATIONS, VisionActivation
from antiphon.encoder.audio import DecodedAudio
from antiphon.encoder.cache import CachedEmbedding
from antiphon.encoder.tensor_files import TensorFiles, weight_files
from antiphon.encoder.tower_layers import TowerLayer, TowerLayers
from antiphon.model_card.audio import DOWNSAMPLED, PromptAudio, halved
from antiphon.model_card.config_json import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.linear import Affine, Linear
    from antiphon.encoder.preprocess import DecodedImage
    from antiphon.model_card.audio import AudioCard

_Size = Annotated[int, Meta(ge=1, le=2**20)]
_EPS = 1e-5


class AudioTowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an encoder, as in config.json."""

    hidden: _Size = field(name="d_model", default=384)
    intermediate: _Size = field(name="encoder_ffn_dim", default=1536)
    layers: _Size = field(name="encoder_layers", default=4)
    heads: _Size = field(name="encoder_attention_heads", default=6)
    bands: _Size = field(name="num_mel_bins", default=80)
    tokens: _Size = field(name="max_source_positions", default=1500)
    activation: VisionActivation = field(name="activation_function", default=VisionActivation.GELU)


class PromptTowerSpec(AudioTowerSpec, frozen=True, kw_only=True):
    """Missing fields have the defaults of Qwen2-Audio's."""

    hidden: _Size = field(name="d_model", default=1280)
    intermediate: _Size = field(name="encoder_ffn_dim", default=5120)
    layers: _Size = field(name="encoder_layers", default=32)
    heads: _Size = field(name="encoder_attention_heads", default=20)
    bands: _Size = field(name="num_mel_bins", default=128)


class _Nested(msgspec.Struct, frozen=True):
    audio_config: PromptTowerSpec = field(default_factory=PromptTowerSpec)


@dataclass(frozen=True, slots=True)
class AudioTowerWeights:
    """All weights. The convolutions are (C, M, 3) and (C, C, 3), `positions` (T, C)."""

    first: Affine
    second: Affine
    positions: Tensor
    layers: tuple[TowerLayer, ...]
    norm: Affine


class AudioTower:
    """Computes one embedding per token of audio, or with `pairs` the mean of each two of them.

    In pairs only the audio is embedded, and not the silence behind it.
    """

    def __init__(
        self, spec: AudioTowerSpec, weights: AudioTowerWeights, *, pairs: bool = False
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._layers = TowerLayers(
            weights.layers,
            heads=spec.heads,
            activation=ACTIVATIONS[spec.activation],
            eps=_EPS,
        )
        self._pairs = pairs

    @torch.inference_mode()
    def __call__(self, features: Tensor, frames: int) -> Tensor:
        """Embed: features (M, F), of which `frames` are of audio  ->  (T, C)."""
        weights = self._weights
        x = F.gelu(F.conv1d(features[None], weights.first.weight, weights.first.bias, padding=1))
        second = weights.second
        x = F.gelu(F.conv1d(x, second.weight, second.bias, stride=DOWNSAMPLED, padding=1))
        x = x[0].T + weights.positions  # (T, C)
        if self._pairs:
            x = x[: halved(frames)]  # the silence behind it is not attended to
        x = self._layers(x, ([len(x)],)).last
        if self._pairs:
            whole = len(x) // DOWNSAMPLED * DOWNSAMPLED
            x = x[:whole].view(-1, DOWNSAMPLED, self.spec.hidden).mean(dim=1)
        return F.layer_norm(x, (self.spec.hidden,), weights.norm.weight, weights.norm.bias, _EPS)


def read_audio_weights(folder: Path, spec: AudioTowerSpec, dtype: Dtype) -> AudioTowerWeights:
    """Read an encoder; the text model's tensors are ignored.

    Raises:
        ConfigError: There are no files, one is broken, or a tensor is missing or has another shape.
    """
    with ExitStack() as open_files:
        files = weight_files(folder)
        checkpoint = TensorFiles(files, open_files, last="conv1.weight", dtype=dtype)
        affine, hidden = checkpoint.affine, spec.hidden
        return AudioTowerWeights(
            first=affine("conv1", hidden, spec.bands, 3),
            second=affine("conv2", hidden, hidden, 3),
            positions=checkpoint.read("embed_positions.weight", spec.tokens, hidden),
            layers=tuple(_layer(checkpoint, f"layers.{i}", spec) for i in range(spec.layers)),
            norm=affine("layer_norm", hidden),
        )


def _layer(checkpoint: TensorFiles, name: str, spec: AudioTowerSpec) -> TowerLayer:
    affine, linear = checkpoint.affine, checkpoint.linear
    hidden, wide, attention = spec.hidden, spec.intermediate, f"{name}.self_attn"
    q, k, v = (
        affine(f"{attention}.{part}_proj", hidden, hidden, bias=part != "k") for part in "qkv"
    )
    return TowerLayer(
        norm1=affine(f"{name}.self_attn_layer_norm", hidden),
        qkv=linear(q, k, v),
        out=linear(affine(f"{attention}.out_proj", hidden, hidden)),
        norm2=affine(f"{name}.final_layer_norm", hidden),
        up=linear(affine(f"{name}.fc1", wide, hidden)),
        down=linear(affine(f"{name}.fc2", hidden, wide)),
    )


@dataclass(frozen=True, eq=False)
class AudioModel:
    """What samples become, the encoder, and the projector before a text model, if any. Blocks."""

    preprocess: ClassVar[None] = None
    videos: ClassVar[None] = None
    audio: AudioCard | PromptAudio
    tower: AudioTower
    projector: Linear | None = None

    @property
    def width(self) -> int:
        """Numbers of a row of an embedding."""
        return self.tower.spec.hidden if self.projector is None else self.projector.outputs

    @property
    def embedding_bytes(self) -> int:
        return self.tower.spec.tokens * self.width * 4

    def steps(self, medium: DecodedImage | DecodedAudio) -> Iterator[CachedEmbedding | None]:
        """Embed a part of a file, in one step."""
        assert isinstance(medium, DecodedAudio), "checked by the service"
        rows = self.tower(torch.as_tensor(medium.features), medium.frames)
        if self.projector is not None:
            rows = self.projector(rows)
        yield CachedEmbedding.of(rows.numpy())


def open_audio_model(
    folder: Path, card: AudioCard | PromptAudio, dtype: Dtype = Dtype.FLOAT32
) -> AudioModel:
    """Load the encoder of a folder.

    Raises:
        ConfigError: It is malformed, or its weights are.
    """
    file, in_prompts = folder / "config.json", isinstance(card, PromptAudio)
    spec = read_json(file, _Nested).audio_config if in_prompts else read_json(file, AudioTowerSpec)
    if spec.hidden % (2 * spec.heads):
        raise ConfigError(
            f"{file}: d_model = {spec.hidden} is not a multiple of twice "
            f"encoder_attention_heads = {spec.heads}"
        )
    tower = AudioTower(spec, read_audio_weights(folder, spec, dtype), pairs=in_prompts)
    projector = _read_projector(folder, spec, dtype) if in_prompts else None
    return AudioModel(card, tower, projector)


def _read_projector(folder: Path, spec: AudioTowerSpec, dtype: Dtype) -> Linear:
    name = "multi_modal_projector.linear"
    with ExitStack() as open_files:
        files = weight_files(folder)
        checkpoint = TensorFiles(files, open_files, last=f"{name}.weight", dtype=dtype)
        hidden = checkpoint.length(f"{name}.weight")
        return checkpoint.linear(checkpoint.affine(name, hidden, spec.hidden))
