"""Llama 2 to 4, and families that are Llama with a few changes, Mistral and Mixtral among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.rotary import Temperature
from antiphon.layers.attention import AttentionNames, AttentionSpec
from antiphon.layers.moe import MoeSpec, SeparateExperts, StackedExperts
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.errors import ModelLoadError, UnsupportedVariant
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    gated,
    layers,
    model,
    rms_norm,
    rotary_with_axes,
)
from antiphon.model_worker.model.spec import (
    POST,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
    Norms,
)

if TYPE_CHECKING:
    from antiphon.layers.mlp import GatedMlpSpec
    from antiphon.model_worker.model.config_file import ConfigFile

QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
GLM4_NORMS = Norms(
    before_mixer="input_layernorm",
    after_mixer="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)
CHUNKED, FULL = "chunked_attention", "full_attention"
MIXTRAL_EXPERTS = SeparateExperts(
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def declare_llama(config: ConfigFile) -> ModelSpec:
    """Llama 2, 3, 3.1, 3.2, and the many models of the same shape."""
    layer = LayerSpec(
        mixer=attention(config, bias=config.attention_bias),
        feed_forward=gated(config, bias=config.mlp_bias),
        norm=rms_norm(config),
    )
    return model(config, layer)


def declare_mistral(config: ConfigFile) -> ModelSpec:
    """Mistral: Llama's shape, with a window in every layer in its first versions."""
    mixer = attention(config, window=config.sliding_window)
    layer = LayerSpec(mixer=mixer, feed_forward=gated(config), norm=rms_norm(config))
    return model(config, layer)


def declare_llava(config: ConfigFile) -> ModelSpec:
    """LLaVA 1.5: the text model is Llama, or Mistral; embeddings of images come from outside."""
    match config.model_type:
        case "llama" | "":
            return declare_llama(config)
        case "mistral":
            return declare_mistral(config)
        case other:
            raise UnsupportedVariant(
                f"config.json: text_config: model_type {other!r} is not supported in LLaVA: there"
                " are llama, mistral"
            )


class _ErnieFields(msgspec.Struct, frozen=True):
    use_bias: bool = False


def declare_paddleocr_vl(config: ConfigFile) -> ModelSpec:
    """PaddleOCR-VL: ERNIE 4.5, Llama whose positions have axes; its images come from outside."""
    bias = config.family_fields(_ErnieFields).use_bias
    layer = LayerSpec(
        mixer=attention(config, bias=bias, rotary=rotary_with_axes(config)),
        feed_forward=gated(config, bias=bias),
        norm=rms_norm(config),
    )
    return model(config, layer)


def declare_idefics3(config: ConfigFile) -> ModelSpec:
    """Idefics3, SmolVLM: the text model is Llama; embeddings of tiles come from outside."""
    if config.model_type not in ("llama", ""):
        raise UnsupportedVariant(
            f"config.json: text_config: model_type {config.model_type!r} is not supported in"
            " Idefics3: there is llama"
        )
    return declare_llama(config)


class _MixtralFields(ExpertFields, frozen=True, kw_only=True):
    num_experts_per_tok: Count = 2


def declare_mixtral(config: ConfigFile) -> ModelSpec:
    """Mixtral: Mistral with experts in place of each feed-forward block."""
    fields = config.family_fields(_MixtralFields)
    layer = LayerSpec(
        mixer=attention(config, window=config.sliding_window),
        feed_forward=MoeSpec(
            routing=fields.routing(renormalised=True),
            experts=fields.experts(config, config.width, names=MIXTRAL_EXPERTS),
            router="block_sparse_moe.gate",
        ),
        norm=rms_norm(config),
    )
    return model(config, layer)


class _SmolLm3Fields(msgspec.Struct, frozen=True):
    no_rope_layers: tuple[int, ...] | None = None
    """Despite the name, 1 marks a layer with RoPE."""
    no_rope_layer_interval: int = 4


def declare_smollm3(config: ConfigFile) -> ModelSpec:
    """SmolLM3: Llama's shape with every fourth layer without RoPE (NoPE)."""
    fields, norm = config.family_fields(_SmolLm3Fields), rms_norm(config)
    rotated = fields.no_rope_layers or tuple(
        int((index + 1) % fields.no_rope_layer_interval != 0)
        for index in range(config.num_hidden_layers)
    )

    def layer(kind: tuple[int | None, int]) -> LayerSpec:
        window, rotates = kind
        changes = {} if rotates else {"rotary": None}
        return LayerSpec(
            mixer=attention(config, window=window, bias=config.attention_bias, **changes),
            feed_forward=gated(config, bias=config.mlp_bias),
            norm=norm,
        )

    kinds = tuple(zip(config.windows(), rotated, strict=True))
    return model(config, layers(kinds, layer))


class _GraniteFields(msgspec.Struct, frozen=True):
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


def declare_granite(config: ConfigFile) -> ModelSpec:
    """Granite 3: Llama's shape with four multipliers."""
    by = config.family_fields(_GraniteFields)
    layer = LayerSpec(
        mixer=attention(config, bias=config.attention_bias, scale=by.attention_multiplier),
        feed_forward=gated(config, bias=config.mlp_bias),
        norm=rms_norm(config),
        multiplier=by.residual_multiplier,
    )
    return model(
        config,
        layer,
        embedding=EmbeddingSpec(scale=by.embedding_multiplier),
        head=HeadSpec(tied=config.tie_word_embeddings, scale=1 / by.logits_scaling),
    )


def declare_olmo2(config: ConfigFile) -> ModelSpec:
    """OLMo 2: norms only after both blocks, and QK norms over all heads of a token at once."""
    bias, norm = config.attention_bias, NormSpec(kind="rms_wide", eps=config.rms_norm_eps)
    layer = LayerSpec(
        mixer=attention(config, bias=bias, qk_norm=norm, qk_norm_over="token"),
        feed_forward=gated(config),
        norm=norm,
        norms=POST,
    )
    return model(config, layer)


def declare_phi3(config: ConfigFile) -> ModelSpec:
    """Phi 3, 3.5 and 4: Llama's shape with fused linears and LongRoPE."""
    names = AttentionNames(query=QKV, key=QKV, value=QKV)
    layer = LayerSpec(
        mixer=attention(config, window=config.sliding_window, names=names),
        feed_forward=gated(config, gate=GATE_UP, up=GATE_UP),
        norm=rms_norm(config),
    )
    return model(config, layer)


def declare_glm4(config: ConfigFile) -> ModelSpec:
    """GLM-4 (0414): norms around both blocks, and interleaved RoPE on half of each head."""
    return _glm4(config, attention(config, qkv_bias=config.attention_bias, interleaved_rope=True))


def declare_glm4v(config: ConfigFile) -> ModelSpec:
    """GLM-4.1V: GLM-4 whose positions have axes; its images come from outside."""
    rotary = rotary_with_axes(config)
    return _glm4(config, attention(config, qkv_bias=True, interleaved_rope=True, rotary=rotary))


def _glm4(config: ConfigFile, mixer: AttentionSpec) -> ModelSpec:
    layer = LayerSpec(
        mixer=mixer,
        feed_forward=gated(config, gate=GATE_UP, up=GATE_UP),
        norm=rms_norm(config),
        norms=GLM4_NORMS,
    )
    return model(config, layer)


class _Llama4Fields(ExpertFields, frozen=True, kw_only=True):
    intermediate_size_mlp: Count
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: Count = 1
    no_rope_layers: tuple[int, ...] | None = None
    """Despite the name, 1 marks a layer with RoPE."""
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None = None
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True
    """Published configs have 4, which means enabled."""
    floor_scale: Count = 8192
    attn_scale: float = 0.1


def declare_llama4(config: ConfigFile) -> ModelSpec:
    """Llama 4 (text): chunked attention in layers with RoPE, full attention without, experts."""
    fields, norm = config.family_fields(_Llama4Fields), rms_norm(config)
    experts = _experts(config, fields)
    dense = _dense(config, fields.intermediate_size_mlp, "feed_forward")

    def layer(kind: tuple[bool, str, bool]) -> LayerSpec:
        rotated, sight, sparse = kind
        return LayerSpec(
            mixer=_mixer(config, fields, sight, rotated=rotated),
            feed_forward=experts if sparse else dense,
            norm=norm,
        )

    return model(config, layers(_kinds(config, fields), layer))


def _kinds(config: ConfigFile, fields: _Llama4Fields) -> list[tuple[bool, str, bool]]:
    """For each layer: whether it has RoPE, its kind of attention, whether it has experts."""
    count, step = config.num_hidden_layers, fields.interleave_moe_layer_step
    rotated = [bool(flag) for flag in fields.no_rope_layers or ()] or [
        (index + 1) % fields.no_rope_layer_interval != 0 for index in range(count)
    ]
    if len(rotated) != count:
        raise ModelLoadError(f"config.json: no_rope_layers names {len(rotated)} of {count} layers")
    sights = config.layer_types or tuple(CHUNKED if has_rope else FULL for has_rope in rotated)
    if unknown := sorted(set(sights) - {CHUNKED, FULL}):
        raise ModelLoadError(f"config.json: layer_types: {unknown[0]!r} is not supported")
    sparse = range(step - 1, count, step) if fields.moe_layers is None else fields.moe_layers
    return [
        (has_rope, sight, index in sparse)
        for index, (has_rope, sight) in enumerate(zip(rotated, sights, strict=True))
    ]


def _mixer(
    config: ConfigFile, fields: _Llama4Fields, sight: str, *, rotated: bool
) -> AttentionSpec:
    norm = temperature = None
    if rotated and fields.use_qk_norm:
        # After RoPE, as in training: for norms without weights the order makes no difference.
        norm = NormSpec(eps=config.rms_norm_eps, affine=False)
    if fields.attn_temperature_tuning and not rotated:
        temperature = Temperature(floor=fields.floor_scale, scale=fields.attn_scale)
    return attention(
        config,
        bias=config.attention_bias,
        interleaved_rope=True,
        rotary=config.rotary() if rotated else None,
        window=fields.attention_chunk_size if sight == CHUNKED else None,
        chunked=sight == CHUNKED,
        qk_norm=norm,
        temperature=temperature,
    )


def _dense(config: ConfigFile, width: int, within: str) -> GatedMlpSpec:
    return gated(
        config,
        width=width,
        gate=f"{within}.gate_proj",
        up=f"{within}.up_proj",
        down=f"{within}.down_proj",
    )


def _experts(config: ConfigFile, fields: _Llama4Fields) -> MoeSpec:
    names = StackedExperts(
        gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
    )
    return MoeSpec(
        routing=fields.routing(scoring="sigmoid"),
        experts=fields.experts(
            config, config.width, apply_router_weight_on_input=True, names=names
        ),
        router="feed_forward.router",
        shared=_dense(config, config.width, "feed_forward.shared_expert"),
    )


LLAMA = ModelFamily("llama", declare_llama)
LLAVA = ModelFamily("llava", declare_llava)
IDEFICS3 = ModelFamily("idefics3", declare_idefics3)
MISTRAL = ModelFamily("mistral", declare_mistral)
MIXTRAL = ModelFamily("mixtral", declare_mixtral)
SMOLLM3 = ModelFamily("smollm3", declare_smollm3)
GRANITE = ModelFamily("granite", declare_granite)
OLMO2 = ModelFamily("olmo2", declare_olmo2)
PHI3 = ModelFamily("phi3", declare_phi3)
GLM4 = ModelFamily("glm4", declare_glm4)
GLM4V = ModelFamily("glm4v", declare_glm4v)
LLAMA4 = ModelFamily("llama4", declare_llama4)
PADDLEOCR_VL = ModelFamily("paddleocr-vl", declare_paddleocr_vl)
