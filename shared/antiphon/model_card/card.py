"""The model card: shape and defaults of a model from its files, read without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, LoadFormat
from antiphon.config.quantization import QuantizationConfig
from antiphon.model_card.config_json import (
    CROSS_ATTENTION,
    LEARNED_POSITIONS,
    PADDED_POSITIONS,
    REPEATED_KV,
    UNGATED_MLP,
    Factors,
    Task,
    check_shape,
    head_parameters,
    is_bidirectional,
    parse_json,
    read_json,
    task_of,
    unused_prefixes,
)
from antiphon.model_card.files import ModelFiles, ModelLocation, files_at
from antiphon.model_card.layer_heads import HeadFields, LayerHeads, unread_keys
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_card.weight_headers import Weights, read_weights
from antiphon.wire.sampling import SamplingDefaults

if TYPE_CHECKING:
    from pathlib import Path


class ExpertsCard(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a model: `chosen` of `count` per token, each `width` wide."""

    layers: int
    """Number of layers with experts; the others have dense blocks."""
    count: int
    chosen: int
    width: int
    shared_width: int
    """Width of the shared experts; 0 without any."""
    shared_gated: bool
    """Whether the shared experts have a gate of their own."""

    def layer_parameters(self, hidden: int) -> int:
        """Parameters of one layer's feed-forward matrices and router."""
        blocks = 3 * (self.count * self.width + self.shared_width)
        return hidden * (blocks + self.count + int(self.shared_gated))


class LatentCard(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of latent attention (MLA); `latent` is the KV LoRA rank."""

    latent: int
    content: int
    """Size of a head's keys without RoPE, computed from the latent."""
    position: int
    """Size of the keys with RoPE, shared by all heads."""
    value: int
    query: int | None
    """Query LoRA rank, if there is one."""

    @property
    def cached_width(self) -> int:
        return self.latent + self.position

    def layer_parameters(self, hidden: int, heads: int) -> int:
        """Parameters of one layer's attention matrices."""
        key = self.content + self.position
        queries = hidden * heads * key
        if self.query is not None:
            queries = self.query * (hidden + heads * key)
        return (
            queries
            + hidden * self.cached_width
            + self.up_parameters(heads)
            + heads * self.value * hidden
        )

    def up_parameters(self, heads: int) -> int:
        """Parameters of the up-projection, of which a second copy is stored in another layout."""
        return self.latent * heads * (self.content + self.value)

    def token_numbers(self, heads: int) -> int:
        """Approximate elements of a token's queries and attention outputs in one layer."""
        return heads * (2 * self.cached_width + 2 * (self.content + self.position) + 2 * self.value)


class RecurrentStates(msgspec.Struct, frozen=True):
    layers: int
    """Number of layers with a state."""
    attending: int
    """Number of layers with keys and values; the others cache nothing per token."""
    convolved: int
    """Elements of a layer's convolution state, in the model's dtype."""
    matrices: int
    """Elements of its recurrent state, in float32."""
    channels: int
    """Input channels of its convolution."""
    parameters: int
    """Parameters of its projections and its convolution."""
    gated: bool = False
    """Whether attention in the other layers projects output gates with its queries."""

    def state_bytes(self, item_bytes: int, ranks: int = 1) -> int:
        """Bytes of one state in all layers, with `item_bytes` per element of the model's dtype.

        Each of several ranks has the states of its heads.
        """
        return -(-self.layers * (self.convolved * item_bytes + self.matrices * 4) // ranks)

    def activation_bytes(self, tokens: int) -> int:
        """Approximate bytes of one layer in a forward pass, besides its linear layers."""
        return tokens * 16 * self.channels


class ModelCard(msgspec.Struct, frozen=True):
    architecture: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocabulary_size: int
    context_tokens: int
    dtype: Dtype
    """Never `auto`."""
    eos_ids: tuple[int, ...]
    rope_theta: float
    rope_kind: str
    """`default`, or the name of a RoPE scaling."""
    tied: bool
    """Whether input and output embeddings are tied; false for models without logits."""
    sampling: SamplingDefaults
    weights: Weights
    states: RecurrentStates | None = None
    quantization: QuantizationConfig | None = None
    """From config.json; None: linear layers are not quantized, or are in a GGUF file."""
    gguf: bool = False
    experts: ExpertsCard | None = None
    latent: LatentCard | None = None
    layer_heads: tuple[LayerHeads, ...] = ()
    """The heads of each layer, if layers have different ones."""
    per_layer_width: int = 0
    """Elements of the inputs that layers have of a token beside the stream, of all together."""
    per_layer_vocabulary: int = 0
    """Rows of the table of these."""
    streams: int = 0
    """Residual streams of a token, in models in which it has several."""
    rope_factors: Factors | None = None
    """The list of factors that a longrope model uses for the served context."""
    model_type: str = ""
    task: Task = Task.GENERATE
    labels: tuple[str, ...] = ()
    """A classifier's labels, in the order of its scores."""
    causal: bool = True
    """Whether attention is causal. Without causal attention there is no KV cache."""
    target_hidden_size: int | None = None
    """Hidden size of the model that a draft head drafts for."""
    source_tokens: int = 0
    """Tokens of the sequence that cross attention attends to; 0: there is none."""

    @property
    def attention_share(self) -> float:
        """Approximate share of the weights that project to heads and back; of all layers alike."""
        heads = 2 * (self.heads + self.kv_heads)
        numbers = self.layers * self.hidden_size * self.head_size * heads
        return min(1.0, numbers / max(1, self.weights.count))

    @property
    def looked_up(self) -> int:
        """Parameters of tables that are not the head, of which a token reads a row."""
        tables = 0 if self.tied else self.vocabulary_size * self.hidden_size
        return tables + self.per_layer_vocabulary * self.per_layer_width

    def kv_bytes(self, dtype: Dtype | CacheDtype, ranks: int = 1) -> int:
        """KV cache bytes of one token (keys and values, or latents) in all caching layers.

        Each of several ranks has its share of the heads, at least one, and all of the latents.
        """
        if not self.causal:
            return 0
        if self.layer_heads:
            own = (each for each in self.layer_heads if each.cached)
            numbers = (2 * max(1, each.cached // ranks) * each.head_size for each in own)
            return sum(numbers) * item_bytes(dtype)
        heads = max(1, self.kv_heads // ranks)
        layers = self.layers if self.states is None else self.states.attending
        cached, latent = 2 * heads * self.head_size, self.latent
        if latent is not None:
            cached = latent.cached_width
        return layers * cached * item_bytes(dtype)

    def cross_bytes(self, dtype: Dtype | CacheDtype, page_tokens: int) -> int:
        """Bytes of the cross-attention cache of one request, in whole pages; 0: there is none."""
        tokens = -(-self.source_tokens // page_tokens) * page_tokens
        return tokens * self.layers * 2 * self.heads * self.head_size * item_bytes(dtype)

    def with_full_heads(self) -> ModelCard:
        """The card for transformers' modules.

        They cache keys and values in place of latents, and in layers that share them a copy each.
        """
        if self.layer_heads:
            replace = msgspec.structs.replace
            layers = tuple(replace(each, kv_layer=None) for each in self.layer_heads)
            return replace(self, layer_heads=layers)
        if self.latent is None:
            return self
        size = max(self.latent.content + self.latent.position, self.latent.value)
        return msgspec.structs.replace(self, latent=None, kv_heads=self.heads, head_size=size)

    def state_bytes(self, dtype: Dtype, ranks: int = 1) -> int:
        """Bytes of one recurrent state in all layers; 0 if there are none."""
        return 0 if self.states is None else self.states.state_bytes(item_bytes(dtype), ranks)


def item_bytes(dtype: Dtype | CacheDtype) -> int:
    if isinstance(dtype, CacheDtype) and dtype.eight_bits:
        return 1
    return 4 if dtype in (Dtype.FLOAT32, CacheDtype.FLOAT32) else 2


def read_card(location: ModelLocation) -> ModelCard:
    """Read config.json, generation_config.json and the headers of the weights."""
    files = files_at(location)
    raw, file = files.config(), files.folder / "config.json"
    check_shape(raw, file)
    config = parse_json(raw, _CardFields, file)
    generation, generation_file = _Generation(), files.folder / "generation_config.json"
    if generation_file.exists():
        generation = read_json(generation_file, _Generation)
    if not config.architectures:
        raise ConfigError(f"{file}: architectures names none")
    architecture, rope = config.architectures[0], config.rope
    recurrent = _RECURRENT.get(architecture)
    states = None if recurrent is None else parse_json(raw, recurrent, "config.json").states()
    quantization = read_quantization(raw)
    weights = _weights(files, config, quantization, states)
    task = task_of(architecture)
    return ModelCard(
        architecture=architecture,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=_kv_heads(config),
        head_size=_head_size(config),
        mlp_width=config.intermediate_size_mlp or _width(config) * (1 + config.widens),
        vocabulary_size=config.vocab_size,
        context_tokens=_context_tokens(config),
        dtype=_dtype(config, weights, file),
        # Some folders name more EOS ids in one file than in the other; all of them end an answer.
        eos_ids=tuple(sorted({*_ids(config.eos_token_id), *_ids(generation.eos_token_id)})),
        rope_theta=rope.rope_theta or config.rope_theta,
        rope_kind=rope.rope_type or rope.type or "default",
        rope_factors=files.factors(),
        tied=config.tie_word_embeddings and task is Task.GENERATE,
        sampling=msgspec.convert(generation, SamplingDefaults, from_attributes=True),
        weights=weights,
        states=states,
        quantization=quantization,
        gguf=files.format is LoadFormat.GGUF,
        experts=_experts(config),
        latent=_latent(config),
        layer_heads=config.layers() if config.differs else (),
        per_layer_width=config.per_layer_width,
        per_layer_vocabulary=config.vocab_size_per_layer_input if config.per_layer_width else 0,
        streams=config.altup_num_inputs,
        task=task,
        labels=_labels(config) if task is Task.SCORE else (),
        causal=not (is_bidirectional(architecture) or config.bidirectional),
        target_hidden_size=config.target_hidden_size or config.hidden_size
        if task is Task.DRAFT
        else None,
        source_tokens=config.max_source_positions if _attends_across(config) else 0,
    )


def _attends_across(config: _CardFields) -> bool:
    return config.model_type in CROSS_ATTENTION


class _RopeFields(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    full_attention: _RopeFields | None = None

    @property
    def stretch(self) -> float:
        """Context length relative to the trained one."""
        rope = self.full_attention or self
        dynamic = (rope.rope_type or rope.type) == "dynamic"
        return rope.factor or 1.0 if dynamic else 1.0


class _CardFields(HeadFields, kw_only=True):
    vocab_size: int
    max_position_embeddings: int
    intermediate_size: int | tuple[int, ...] | None = None
    intermediate_size_mlp: int | None = None
    """Width of dense blocks, in models whose `intermediate_size` is that of their experts."""
    architectures: tuple[str, ...] = ("",)
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    rope_theta: float = 10000.0
    rope_scaling: _RopeFields | None = None
    rope_parameters: _RopeFields | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    type_vocab_size: int = 0
    use_bidirectional_attention: bool | str = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    use_double_wide_mlp: bool = False
    altup_num_inputs: int = 0
    laurel_rank: int = 0
    enable_moe_block: bool = True
    """Whether models of families with and without experts have some."""
    num_labels: int | None = None
    id2label: dict[str, object] | None = None
    num_experts: int | None = None
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: int = 1
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int | None = None
    target_hidden_size: int | None = None
    max_source_positions: int = 1500
    num_nextn_predict_layers: int = 0
    """Multi-token prediction layers after the last layer, which are not loaded."""

    @property
    def rope(self) -> _RopeFields:
        return self.rope_parameters or self.rope_scaling or _RopeFields()

    @property
    def per_layer_width(self) -> int:
        """Elements of the per-layer inputs of a token, in the models that have them."""
        return self.num_hidden_layers * self.hidden_size_per_layer_input if self.differs else 0

    @property
    def widens(self) -> bool:
        """Whether blocks of layers that share keys and values are twice as wide."""
        return self.differs and self.use_double_wide_mlp and self.num_kv_shared_layers > 0

    @property
    def updates(self) -> int:
        """Parameters of alternating updates, and of learned residuals of low rank."""
        streams, hidden = self.altup_num_inputs, self.hidden_size
        layer = hidden * (streams + 2 * self.laurel_rank) + streams**3 + streams**2
        return self.num_hidden_layers * layer + 2 * max(0, streams - 1) * hidden**2

    @property
    def bidirectional(self) -> bool:
        """Whether text attention is bidirectional; Gemma 4's `vision` is about images only."""
        return self.use_bidirectional_attention in (True, "all")


class _Generation(SamplingDefaults):
    eos_token_id: int | tuple[int, ...] | None = None


def _weights(
    files: ModelFiles,
    config: _CardFields,
    quantization: QuantizationConfig | None,
    states: RecurrentStates | None,
) -> Weights:
    if files.format is LoadFormat.DUMMY:
        return Weights(count=_parameters(config, states), bytes=0, dtype=None)
    if files.format is LoadFormat.PT and quantization is not None:
        # Only torch reads the headers of these files: the number of weights per byte is unknown.
        size_bytes = sum(file.stat().st_size for file in files.weights if file.exists())
        linears = _in_linears(config, states)
        return Weights(_parameters(config, states), size_bytes, None, quantized=linears)
    wide = (config.dtype or config.torch_dtype) in (None, Dtype.FLOAT32)
    of_number = item_bytes(Dtype.FLOAT32 if wide else Dtype.BFLOAT16)
    layers = config.num_hidden_layers
    further = range(layers, layers + config.num_nextn_predict_layers)
    names = [f"{name}.{layer}." for layer in further for name in ("model.layers", "blk")]
    unread = unread_keys(config.layers()) if config.differs else ()
    passed_over = (*names, *unread, *unused_prefixes(config.architectures[0]))
    return read_weights(files, of_number, quantization, passed_over)


def _parameters(config: _CardFields, states: RecurrentStates | None) -> int:
    architecture = config.architectures[0]
    one = config.tie_word_embeddings or task_of(architecture) is not Task.GENERATE
    tables = (1 if one else 2) * config.vocab_size
    if config.model_type in LEARNED_POSITIONS:
        tables += config.max_position_embeddings + config.type_vocab_size
    head = head_parameters(architecture, config.hidden_size, len(_labels(config)))
    inputs = config.vocab_size_per_layer_input * config.per_layer_width
    return _in_linears(config, states) + config.hidden_size * tables + inputs + head


def _in_linears(config: _CardFields, states: RecurrentStates | None) -> int:
    """Parameters in its layers, nearly all of them in linear layers."""
    layers, hidden, width = config.num_hidden_layers, config.hidden_size, _width(config)
    linears = 2 if config.model_type in UNGATED_MLP else 3
    dense = linears * hidden * (config.intermediate_size_mlp or width)
    blocks = layers * dense
    if isinstance(config.intermediate_size, tuple):
        blocks = linears * hidden * sum(config.intermediate_size)
    if config.widens:
        blocks += config.num_kv_shared_layers * dense
    if (experts := _experts(config)) is not None:
        blocks += experts.layers * (experts.layer_parameters(hidden) - dense)
    if config.differs:
        heads = config.num_attention_heads
        numbers = sum((2 * heads + h.projected) * h.head_size for h in config.layers())
        # The projection of all inputs, and in each layer a gate and a way back.
        return hidden * (numbers + 3 * config.per_layer_width) + blocks + config.updates
    attending, recurrent, attention = layers, 0, _attention_parameters(config)
    if states is not None:
        attending, recurrent = states.attending, states.layers * states.parameters
        attention += config.num_attention_heads * _head_size(config) * hidden * states.gated
    return attending * attention + recurrent + blocks


def _attention_parameters(config: _CardFields) -> int:
    """Parameters of one layer's attention matrices, without gates."""
    heads = config.num_attention_heads
    if (latent := _latent(config)) is not None:
        return latent.layer_parameters(config.hidden_size, heads)
    kv_heads = config.num_key_value_heads or heads
    if _attends_across(config):
        return 8 * heads * _head_size(config) * config.hidden_size
    return 2 * (heads + kv_heads) * _head_size(config) * config.hidden_size


def _experts(config: _CardFields) -> ExpertsCard | None:
    if not (config.num_experts and config.enable_moe_block):
        return None
    sparse = [
        layer
        for layer in range(config.first_k_dense_replace, config.num_hidden_layers)
        if layer not in config.mlp_only_layers
        and (layer + 1) % config.decoder_sparse_step == 0
        and (layer + 1) % config.interleave_moe_layer_step == 0
    ]
    width = config.moe_intermediate_size or _width(config)
    shared = config.shared_expert_intermediate_size
    beside = _width(config) if config.differs else config.n_shared_experts * width
    return ExpertsCard(
        layers=len(sparse if config.moe_layers is None else config.moe_layers),
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=width,
        shared_width=shared or beside,
        shared_gated=shared is not None,
    )


def _latent(config: _CardFields) -> LatentCard | None:
    if config.kv_lora_rank is None:
        return None
    return LatentCard(
        latent=config.kv_lora_rank,
        content=config.qk_nope_head_dim,
        position=config.qk_rope_head_dim,
        value=config.v_head_dim or 0,
        query=config.q_lora_rank,
    )


def _context_tokens(config: _CardFields) -> int:
    """Context length; in some models, positions start after that of the padding token."""
    padding = config.pad_token_id if config.model_type in PADDED_POSITIONS else None
    longest = int(config.max_position_embeddings * config.rope.stretch)
    return longest - (0 if padding is None else padding + 1)


def _labels(config: _CardFields) -> tuple[str, ...]:
    if config.architectures[0].endswith("ForRewardModel"):
        return ("reward",)
    named = config.id2label or {}
    count = len(named) or config.num_labels or 2
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))


def _width(config: _CardFields) -> int:
    """Width of the feed-forward block; where layers differ in it, that of the widest."""
    width = config.intermediate_size
    if isinstance(width, tuple):
        width = max(width, default=None)
    return width or 4 * config.hidden_size


def _head_size(config: _CardFields) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _kv_heads(config: _CardFields) -> int:
    if config.model_type in REPEATED_KV:
        return config.num_attention_heads
    return config.num_key_value_heads or config.num_attention_heads


def _dtype(config: _CardFields, weights: Weights, file: Path) -> Dtype:
    named = config.dtype or config.torch_dtype
    if named is None:
        return weights.dtype or Dtype.FLOAT32
    known = {dtype.value: dtype for dtype in sorted(Dtype) if dtype is not Dtype.AUTO}
    if named not in known:
        raise ConfigError(f"{file}: dtype = {named!r}: must be one of {', '.join(known)}")
    return known[named]


def _ids(ids: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids


class _FalconH1(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    mamba_n_heads: int
    mamba_d_head: int
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4

    def states(self) -> RecurrentStates:
        """All layers have attention and a state."""
        width = self.mamba_n_heads * self.mamba_d_head
        channels = width + 2 * self.mamba_n_groups * self.mamba_d_state
        projected = 2 * width + channels + self.mamba_n_heads
        return RecurrentStates(
            layers=self.num_hidden_layers,
            attending=self.num_hidden_layers,
            convolved=(self.mamba_d_conv - 1) * channels,
            matrices=width * self.mamba_d_state,
            channels=channels,
            parameters=self.hidden_size * projected + channels * self.mamba_d_conv,
        )


class _Qwen3Next(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    def states(self) -> RecurrentStates:
        """Each layer has either attention or a state."""
        attending = self.num_hidden_layers // self.full_attention_interval
        if self.layer_types is not None:
            attending = self.layer_types.count("full_attention")
        values = self.linear_num_value_heads * self.linear_value_head_dim
        channels = 2 * self.linear_num_key_heads * self.linear_key_head_dim + values
        projected = channels + 2 * values + 2 * self.linear_num_value_heads
        return RecurrentStates(
            layers=self.num_hidden_layers - attending,
            attending=attending,
            convolved=(self.linear_conv_kernel_dim - 1) * channels,
            matrices=values * self.linear_key_head_dim,
            channels=channels,
            parameters=self.hidden_size * projected + channels * self.linear_conv_kernel_dim,
            gated=True,
        )


_RECURRENT: dict[str, type[_FalconH1 | _Qwen3Next]] = {
    "FalconH1ForCausalLM": _FalconH1,
    "Qwen3NextForCausalLM": _Qwen3Next,
    "Qwen3_5ForCausalLM": _Qwen3Next,
    "Qwen3_5MoeForCausalLM": _Qwen3Next,
    "MiniCPMV4_6ForConditionalGeneration": _Qwen3Next,
    "Qwen3_5ForConditionalGeneration": _Qwen3Next,
    "Qwen3_5MoeForConditionalGeneration": _Qwen3Next,
}
