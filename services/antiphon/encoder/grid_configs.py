"""Reads the shapes of the towers of `grid_tower.py` from config.json."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.encoder.activations import VisionActivation
from antiphon.encoder.area_tower import AreaConfig
from antiphon.encoder.early_merger import EARLY
from antiphon.encoder.grid_tower import GridNames, GridTowerSpec, ProjectorSpec
from antiphon.encoder.hd_rows import HdConfig
from antiphon.encoder.tower_config import SIGLIP_NAMES, BlockFields, computed_layers
from antiphon.encoder.tower_spec import Size
from antiphon.model_card.config_json import parse_json, read_json
from antiphon.model_card.vision.areas import GEMMA4
from antiphon.model_card.vision.grid_fields import DEEPSTACKS, GLMS, PADDLEOCR, QWEN35S
from antiphon.model_card.vision.hd_tiles import PHI4
from antiphon.model_card.vision.padded_grids import KIMI_K25
from antiphon.model_card.vision.rows import MISTRAL3
from antiphon.model_card.vision.slices import MINICPM, MiniCpmFields, MiniCpmTower

if TYPE_CHECKING:
    from pathlib import Path


class _Rope(msgspec.Struct):
    rope_theta: float = 10000.0


class _TowerFields(msgspec.Struct):
    """What the towers' configs have in common."""

    depth: Size = 32
    num_heads: Size = 16
    patch_size: Size = 14
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    rope_parameters: _Rope | None = None

    @property
    def base(self) -> float:
        return (self.rope_parameters or _Rope()).rope_theta


class _Qwen25Tower(_TowerFields):
    hidden_size: Size = 3584
    intermediate_size: Size = 3420
    out_hidden_size: Size = 3584
    hidden_act: Literal["silu"] = "silu"
    window_size: Size = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    def spec(self) -> GridTowerSpec:
        return GridTowerSpec(
            width=self.hidden_size,
            intermediate=self.intermediate_size,
            hidden=self.out_hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=VisionActivation.SILU,
            gated=True,
            names=GridNames(up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj"),
            window=self.window_size // self.spatial_merge_size // self.patch_size,
            whole_layers=frozenset(self.fullatt_block_indexes),
        )


class _Qwen2Tower(_TowerFields):
    embed_dim: Size = 1280
    hidden_size: Size = 3584
    mlp_ratio: float = 4
    hidden_act: VisionActivation = VisionActivation.QUICK_GELU

    def spec(self) -> GridTowerSpec:
        return GridTowerSpec(
            width=self.embed_dim,
            intermediate=int(self.embed_dim * self.mlp_ratio),
            hidden=self.hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=self.hidden_act,
            gated=False,
        )


class _Qwen3Tower(_TowerFields):
    depth: Size = 27
    patch_size: Size = 16
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    out_hidden_size: Size = 3584
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    num_position_embeddings: Size = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def spec(self) -> GridTowerSpec:
        return GridTowerSpec(
            width=self.hidden_size,
            intermediate=self.intermediate_size,
            hidden=self.out_hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=self.hidden_act,
            gated=False,
            side=math.isqrt(self.num_position_embeddings),
            patch_bias=True,
            taps=self.deepstack_visual_indexes,
            names=GridNames(
                up=("mlp.linear_fc1",),
                down="mlp.linear_fc2",
                norm_after="norm",
                first="linear_fc1",
                second="linear_fc2",
            ),
        )


class _Qwen35Tower(_Qwen3Tower):
    """Qwen3-VL's without rows of inner layers, whatever the file says of them."""

    def spec(self) -> GridTowerSpec:
        return msgspec.structs.replace(super().spec(), taps=())


class _GlmTower(_TowerFields):
    depth: Size = 24
    num_heads: Size = 12
    hidden_size: Size = 1536
    intermediate_size: Size = 13696
    out_hidden_size: Size = 4096
    hidden_act: Literal["silu"] = "silu"
    image_size: Size = 336
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def spec(self) -> GridTowerSpec:
        if self.attention_bias:
            raise ConfigError("vision_config: attention_bias = true is not supported")
        return GridTowerSpec(
            width=self.hidden_size,
            intermediate=self.out_hidden_size,  # the other one is the merger's
            hidden=self.out_hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=VisionActivation.SILU,
            gated=True,
            biases=False,
            eps=self.rms_norm_eps,
            side=self.image_size // self.patch_size,
            sampled="bicubic",
            patch_bias=True,
            gated_merger=self.intermediate_size,
            names=GridNames(
                norm_before="post_conv_layernorm",
                positions="embeddings.position_embedding.weight",
                up=("mlp.gate_proj", "mlp.up_proj"),
                down="mlp.down_proj",
            ),
        )


class _PixtralTower(BlockFields, frozen=True):
    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    patch_size: Size = 16
    hidden_act: VisionActivation = VisionActivation.GELU
    rope_theta: float = 10000.0
    rope_parameters: _Rope | None = None


class _RowText(msgspec.Struct):
    hidden_size: Size = 4096
    rms_norm_eps: float = 1e-6


class _RowConfig(msgspec.Struct):
    vision_config: _PixtralTower
    text_config: _RowText
    model_type: str
    spatial_merge_size: Size = 2
    multimodal_projector_bias: bool | None = None
    projector_hidden_act: Literal["gelu"] = "gelu"
    vision_feature_layer: int | list[int] | None = None
    vision_feature_select_strategy: str = "full"

    def spec(self, file: Path) -> GridTowerSpec:
        tower, merges = self.vision_config, self.model_type == MISTRAL3
        layer = self.vision_feature_layer
        if layer is None:
            layer = -1 if merges else -2
        if not isinstance(layer, int) or self.vision_feature_select_strategy != "full":
            raise ConfigError(
                f"{file}: vision_feature_layer, vision_feature_select_strategy: of Pixtral's tower "
                "one layer is supported, and full"
            )
        layers = computed_layers(file, "vision_feature_layer", layer, tower.num_hidden_layers)
        bias = self.multimodal_projector_bias
        return GridTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=self.text_config.hidden_size,
            layers=layers,
            heads=tower.num_attention_heads,
            patch=tower.patch_size,
            merge=self.spatial_merge_size if merges else 1,
            frames=0,
            base=tower.rope_parameters.rope_theta if tower.rope_parameters else tower.rope_theta,
            activation=tower.hidden_act,
            gated=True,
            biases=False,
            eps=1e-5,
            alternating=True,
            names=PIXTRAL_NAMES,
            projector=ProjectorSpec(
                eps=self.text_config.rms_norm_eps if merges else None,
                bias=not merges if bias is None else bias,
            ),
        )


class _OcrTower(BlockFields, frozen=True):
    image_size: Size = 384
    spatial_merge_size: Size = 2
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    layer_norm_eps: float = 1e-6
    rope_parameters: _Rope | None = None


class _OcrText(msgspec.Struct):
    hidden_size: Size = 1024


class _OcrConfig(_OcrText):
    """Published files have the fields of the text model beside all others."""

    vision_config: _OcrTower = msgspec.field(default_factory=_OcrTower)
    text_config: _OcrText | None = None

    def spec(self) -> GridTowerSpec:
        tower = self.vision_config
        return GridTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=(self.text_config or self).hidden_size,
            layers=tower.num_hidden_layers,
            heads=tower.num_attention_heads,
            patch=tower.patch_size,
            merge=tower.spatial_merge_size,
            frames=0,
            base=(tower.rope_parameters or _Rope()).rope_theta,
            activation=tower.hidden_act,
            gated=False,
            eps=tower.layer_norm_eps,
            side=tower.image_size // tower.patch_size,
            sampled="bilinear",
            patch_bias=True,
            second_eps=1e-5,
            names=SIGLIP_NAMES,
        )


class _KimiTower(BlockFields, frozen=True):
    merge_kernel_size: tuple[Size, ...] = (2, 2)
    pos_emb_height: Size = 64
    pos_emb_width: Size = 64
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    rope_parameters: _Rope | None = None


class _KimiText(msgspec.Struct):
    hidden_size: Size = 7168


class _KimiConfig(msgspec.Struct):
    vision_config: _KimiTower = msgspec.field(default_factory=_KimiTower)
    text_config: _KimiText = msgspec.field(default_factory=_KimiText)
    projection_layer_norm_eps: float = 1e-5

    def spec(self, file: Path) -> GridTowerSpec:
        tower = self.vision_config
        if tower.pos_emb_height != tower.pos_emb_width or len(set(tower.merge_kernel_size)) != 1:
            raise ConfigError(
                f"{file}: vision_config: pos_emb_height and pos_emb_width must be equal, and "
                "merge_kernel_size a square"
            )
        return GridTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=self.text_config.hidden_size,
            layers=tower.num_hidden_layers,
            heads=tower.num_attention_heads,
            patch=tower.patch_size,
            merge=tower.merge_kernel_size[0],
            frames=0,
            base=(tower.rope_parameters or _Rope()).rope_theta,
            activation=tower.hidden_act,
            gated=False,
            eps=1e-5,
            side=tower.pos_emb_height,
            sampled="bicubic",
            patch_bias=True,
            by_turns=True,
            second_eps=self.projection_layer_norm_eps,
            names=GridNames(
                positions="patch_embed.pos_emb.position_embeddings",
                layer="layers.{}",
                qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
                norm_after="final_layernorm",
                first="in_proj",
                second="out_proj",
                square=True,
            ),
            published=GridNames(
                positions="patch_embed.pos_emb.weight",
                layer="encoder.blocks.{}",
                norm1="norm0",
                qkv=("wqkv",),
                out="wo",
                norm2="norm1",
                up=("mlp.fc0",),
                down="mlp.fc1",
                norm_after="encoder.final_layernorm",
                first="proj.0",
                second="proj.2",
                pairs=True,
                square=True,
            ),
        )


class _MiniCpmTower(MiniCpmTower, frozen=True):
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    layer_norm_eps: float = 1e-6
    window_kernel_size: tuple[Size, ...] = (2, 2)


class _MiniCpmText(msgspec.Struct, frozen=True):
    hidden_size: Size = 4096


class _MiniCpmConfig(MiniCpmFields, frozen=True):
    insert_layer_id: int = 6
    vision_config: _MiniCpmTower = msgspec.field(default_factory=_MiniCpmTower)
    text_config: _MiniCpmText = msgspec.field(default_factory=_MiniCpmText)

    def spec(self, file: Path) -> GridTowerSpec:
        tower = self.vision_config
        image, patch = tower.edges(file)
        windows = (EARLY, EARLY)
        if (self.merge_kernel_size, tower.window_kernel_size) != (windows, windows):
            raise ConfigError(f"{file}: merge_kernel_size, window_kernel_size: must be [2, 2]")
        if self.merger_times != 1:
            raise ConfigError(f"{file}: merger_times = {self.merger_times}: must be 1")
        early = self.insert_layer_id if self.downsample_mode == "16x" else None
        if early is not None and not 0 <= early < tower.num_hidden_layers:
            raise ConfigError(
                f"{file}: insert_layer_id = {early}: must be one of {tower.num_hidden_layers} "
                "layers"
            )
        return GridTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=self.text_config.hidden_size,
            layers=tower.num_hidden_layers,
            heads=tower.num_attention_heads,
            patch=patch,
            merge=self.merge,
            frames=0,
            base=None,
            activation=tower.hidden_act,
            gated=False,
            eps=tower.layer_norm_eps,
            side=image // patch,
            sampled="nearest",
            patch_bias=True,
            early_merge=early,
            row_eps=1e-6,
            names=SIGLIP_NAMES,
        )


PIXTRAL_NAMES = GridNames(
    patch="patch_conv",
    norm_before="ln_pre",
    layer="transformer.layers.{}",
    norm1="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    norm2="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_TOWERS: dict[str, type[_Qwen2Tower | _Qwen25Tower | _Qwen3Tower | _GlmTower]] = {
    **dict.fromkeys(GLMS, _GlmTower),
    "qwen2_vl": _Qwen2Tower,
    "qwen2_5_vl": _Qwen25Tower,
    **dict.fromkeys(DEEPSTACKS, _Qwen3Tower),
    **dict.fromkeys(QWEN35S, _Qwen35Tower),
}


class _Config(msgspec.Struct):
    model_type: str
    vision_config: msgspec.Raw


def read_grid_spec(folder: Path) -> GridTowerSpec:
    """Read the config.json of a model from Qwen2-VL to Gemma 4, or with Pixtral's tower.

    Raises:
        ConfigError: It is missing or malformed, or the tower is not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _Config)
    if config.model_type in _TOWERS:
        kind = _TOWERS[config.model_type]
        spec = parse_json(config.vision_config, kind, f"{file}: vision_config").spec()
    elif config.model_type == PADDLEOCR:
        spec = read_json(file, _OcrConfig).spec()
    elif config.model_type == GEMMA4:
        return read_json(file, AreaConfig).spec(file)
    elif config.model_type == KIMI_K25:
        spec = read_json(file, _KimiConfig).spec(file)
    elif config.model_type == MINICPM:
        spec = read_json(file, _MiniCpmConfig).spec(file)
    elif config.model_type == PHI4:
        spec = read_json(file, HdConfig).spec(file)
    else:
        spec = read_json(file, _RowConfig).spec(file)
    if spec.width % (4 * spec.heads):
        raise ConfigError(
            f"{file}: vision_config: a width of {spec.width} is not a multiple of four times the "
            f"{spec.heads} heads"
        )
    if config.model_type == "qwen2_5_vl" and not spec.window:
        raise ConfigError(f"{file}: vision_config: window_size is less than a token")
    if sorted(set(spec.taps) & set(range(spec.layers))) != list(spec.taps):
        raise ConfigError(
            f"{file}: vision_config: deepstack_visual_indexes = {list(spec.taps)}: must be layers "
            f"of {spec.layers}, rising"
        )
    return spec
