"""The transformers backend: modules of transformers over our paged KV cache.

transformers calls the function registered for an attention implementation in place of its own
attention. Ours writes keys and values to the KV cache of the forward pass and attends over the
pages of each row, so that such a model is batched, chunked and cached like all others. What its
layers cache and their attention windows are not declared anywhere: one token is run through the
model before it serves, and attention features that we do not support are refused then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from antiphon.layers.attention import AttentionSpec
from antiphon.layers.context import AttentionParams, ForwardContext, HiddenStates
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.decoder_layer import NotStackable
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.spec import HeadSpec, LayerSpec, ModelSpec, Norms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from antiphon.kernels.cpu.fused_decoder import FusedDecoder, UncachedHeads
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.recurrent import LayerStates
    from antiphon.model_worker.model.decoder_layer import PositionSpec

    Forward = Callable[..., Tensor | tuple[Tensor, ...]]


IMPLEMENTATION = "antiphon"
"""The name under which our attention is registered."""
HARMLESS = frozenset(
    {
        *("dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "return_dict", "layer_idx", "training"),
        *("past_key_values", "past_key_value", "position_embeddings", "attention_mask"),
        *("logits_to_keep", "num_items_in_batch", "head_mask"),
    }
)
"""Attention arguments without effect here: the KV cache, the mask and the plan cover them."""


class TransformersConfig(Protocol):
    """The fields that every text model's config of transformers has."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention. Axes: T tokens, Q query heads, H kv heads, D head size.

    Attributes:
        query, key, value: (1, Q or H, T, D), rotated as the model does it.
        mask: The result of our mask function; None in a forward pass.
        kwargs: All other arguments.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    kwargs: Mapping[str, object]


_ATTEND: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("attend")
_PROBED: ContextVar[int] = ContextVar("probed", default=0)
"""The context length of the model that is being probed; 0 in a forward pass."""


@dataclass
class LayersOutput(BaseModelOutputWithPastAndCrossAttentions):
    """The output of layers, with every field that some head reads; most heads only pass them on."""

    router_logits: tuple[Tensor, ...] | None = None
    shared_kv_states: None = None


class TransformersDecoder:
    """Modules of transformers in place of a `Decoder`."""

    invariant = False
    """torch's matmuls are not batch-invariant."""

    def __init__(self, model: PreTrainedModel, context_tokens: int) -> None:
        patch_dynamic_rotary(model)
        self._base = cast("Callable[..., LayersOutput]", model.base_model)
        self._given = _FixedLayers()
        self._head = _headed(model, self._given)
        config = cast("TransformersConfig", model.config)
        self.spec, self._params = _probe_layers(model, config, self._base, self.logits)
        _refuse_hidden_state(self._base, config)
        _refuse_token_mixing(self._base, config)
        self.spec = msgspec.structs.replace(self.spec, context_tokens=context_tokens)
        self.operations = frozenset({"attention.heads", "attention.paged"})
        """Names of the kernels that its layers call."""

    def forward(
        self, ctx: ForwardContext, tokens: Tensor, splices: tuple[Tensor, Tensor] | None = None
    ) -> HiddenStates:
        """As `Decoder.forward`."""
        assert ctx.positions is not None
        assert splices is None, "models that see run on our own decoder"

        def attend(call: AttentionCall) -> Tensor:
            mixed = ctx.attend(call.layer, _pad_heads(call), self._params[call.layer])
            return mixed[..., : call.value.shape[-1]]

        hidden = _run_layers(self._base, attend, tokens, ctx.positions.long())
        return HiddenStates(hidden, ctx.ops.finite_rows(hidden))

    def logits(self, _: ForwardContext | None, hidden: Tensor) -> Tensor:
        """Logits of hidden states (L, hidden)  ->  (L, V) float32."""
        self._given.hidden = hidden
        return self._head(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits[0].float()

    def stack(
        self,
        caches: Mapping[int, LayerKvCache | UncachedHeads],
        states: Mapping[int, LayerStates],
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[FusedDecoder, tuple[PositionSpec, ...]]:
        raise NotStackable("the model uses the transformers backend")


def _pad_heads(call: AttentionCall) -> Tensor:
    """Pad heads to one size, (T, Q + 2 H, D): the KV cache has one for keys and values.

    Latent attention (MLA) has keys and values of different sizes. Zeros behind a key and its query
    add nothing to a score, and those behind a value are cut off from the result.
    """
    size = max(call.key.shape[-1], call.value.shape[-1])
    parts = (call.query, call.key, call.value)
    padded = [torch.nn.functional.pad(part, (0, size - part.shape[-1])) for part in parts]
    return torch.cat(padded, dim=1)[0].transpose(0, 1)


class _FixedLayers(torch.nn.Module):
    """Replaces a model's layers, so that its head runs alone."""

    hidden: Tensor

    @property
    def decoder(self) -> _FixedLayers:
        return self  # some heads access the layers through this attribute

    def forward(self, *_: object, **__: object) -> LayersOutput:
        """The hidden states that the layers computed before."""
        left = cast("torch.FloatTensor", self.hidden[None])
        return LayersOutput(last_hidden_state=left)


class _Scores(Protocol):
    logits: Tensor


def _headed(model: PreTrainedModel, given: _FixedLayers) -> Callable[..., _Scores]:
    """The model with `given` as its layers, so that all its own logits processing still runs."""
    head = copy.copy(model)
    parts = {**dict(model.named_children()), model.base_model_prefix: given}
    head.__dict__["_modules"] = parts
    return cast("Callable[..., _Scores]", head)


@contextmanager
def _attention_function(
    attend: Callable[[AttentionCall], Tensor], probed: int = 0
) -> Generator[None]:
    attending, probing = _ATTEND.set(attend), _PROBED.set(probed)
    try:
        yield
    finally:
        _ATTEND.reset(attending)
        _PROBED.reset(probing)


def _run_layers(
    base: Callable[..., LayersOutput],
    attend: Callable[[AttentionCall], Tensor],
    tokens: Tensor,
    positions: Tensor,
    probed: int = 0,
) -> Tensor:
    """Run tokens at positions, (T,) both, with this attention  ->  (T, hidden)."""
    with _attention_function(attend, probed):
        left = base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
    assert left.last_hidden_state is not None
    return left.last_hidden_state[0]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls for each layer: (1, Q, T, D)  ->  (1, T, Q, D)."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelLoadError(f"{type(module).__name__} has no layer_idx")
    kwargs = {**kwargs, "is_causal": kwargs.get("is_causal", getattr(module, "is_causal", True))}
    call = AttentionCall(layer, query, key, value, attention_mask, kwargs)
    return _ATTEND.get()(call)[None], None


def _mask(
    *, mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], **_: object
) -> Tensor | None:
    """None in a forward pass, whose cache has the mask; in a probe the window, (1, 1, 1, 1)."""
    if not (context_tokens := _PROBED.get()):
        return None
    zero, keys = torch.tensor(0), torch.arange(context_tokens)

    def seen(query: int) -> Tensor:
        return mask_function(zero, zero, torch.tensor(query), keys).expand(context_tokens)

    window = int(seen(context_tokens - 1).sum())
    for query in {0, window // 2, window - 1, window, window + 1, context_tokens - 1}:
        if not 0 <= query < context_tokens:
            continue
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(seen(query), expected):
            raise ModelLoadError("its mask is neither causal nor a window")
    return torch.full((1, 1, 1, 1), 0 if window == context_tokens else window)


_Register = Callable[[str, Callable[..., object]], None]
cast("_Register", AttentionInterface.register)(IMPLEMENTATION, _attention)  # pyright: ignore[reportUnknownMemberType]
cast("_Register", AttentionMaskInterface.register)(IMPLEMENTATION, _mask)  # pyright: ignore[reportUnknownMemberType]


@torch.inference_mode()
def _probe_layers(
    model: PreTrainedModel,
    config: TransformersConfig,
    base: Callable[..., LayersOutput],
    logits: Callable[[None, Tensor], Tensor],
) -> tuple[ModelSpec, tuple[AttentionParams, ...]]:
    found: dict[int, tuple[AttentionSpec, AttentionParams]] = {}

    def attend(call: AttentionCall) -> Tensor:
        if call.layer in found:
            raise ModelLoadError(f"layer {call.layer} attends twice")
        found[call.layer] = _parse_call(call)
        return _nothing(call)

    token = torch.zeros(1, dtype=torch.int64)
    hidden = _run_layers(base, attend, token, token, probed=config.max_position_embeddings)
    layers = config.num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise ModelLoadError(f"{len(found)} of its {layers} layers use standard attention")
    run = cast("Callable[..., _Scores]", model)
    with _attention_function(_nothing):
        scored = run(input_ids=token[None], position_ids=token[None], use_cache=False)
    if not torch.equal(scored.logits[0].float(), logits(None, hidden)):
        raise ModelLoadError("its head cannot be separated from its layers")
    mixers = [found[layer] for layer in range(layers)]
    return _spec(config, [spec for spec, _ in mixers]), tuple(manner for _, manner in mixers)


def _nothing(call: AttentionCall) -> Tensor:
    """Zeros in the shape of an attention output: (T, Q, D) of the values' size."""
    _, heads, tokens, _ = call.query.shape
    return call.query.new_zeros(tokens, heads, call.value.shape[-1])


@torch.inference_mode()
def _refuse_token_mixing(base: Callable[..., LayersOutput], config: TransformersConfig) -> None:
    """Run a prompt forwards and backwards: without attention no token may depend on another.

    What a layer caches beside keys and values (a convolution's last inputs, a recurrent state) is
    lost between two passes, and the output would be wrong without an error. Both passes have one
    size and each token its own position, so that rounding hides nothing in any dtype. A fourth of
    the tokens may differ, which still catches sums over all of them.
    """
    places = torch.arange(_PROBE_TOKENS)
    tokens, unchanged = places % config.vocab_size, places % 4 > 0
    others = torch.where(unchanged, tokens, (tokens + config.vocab_size // 2) % config.vocab_size)
    forwards = _alone(base, tokens, places)
    backwards = _alone(base, others.flip(0), places.flip(0))
    for one, other in zip(forwards, backwards, strict=True):
        # A few tokens may differ: a mixture of experts may route differently on a near tie.
        apart = float(_distances(other.flip(0), one)[unchanged].quantile(0.75))
        if not apart <= max(1e-4, 4 * torch.finfo(one.dtype).eps):
            raise ModelLoadError(
                "it keeps state beside keys and values, which would be lost between the chunks of "
                f"a prompt: other neighbours change {apart:.2g} of a token where no token attends "
                "to another"
            )


def _alone(base: Callable[..., LayersOutput], tokens: Tensor, places: Tensor) -> list[Tensor]:
    """Run tokens (T,), each attending only to itself; return all hidden states, (T, ...)."""
    seen: list[Tensor] = []

    def attend(call: AttentionCall) -> Tensor:
        by_token = [part[0].transpose(0, 1) for part in (call.query, call.key, call.value)]
        seen.extend(part.flatten(1) for part in by_token)
        query, _, value = by_token
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    hidden = _run_layers(base, attend, tokens, places)
    return [*seen, hidden]


_PROBE_TOKENS, _PROBE_FIRST = 160, 144
"""Tokens of the prompt that is run in one pass and in two, and of the first of the two: some
models compress what is over 128 tokens back."""
_NOISE_MAX = 8.0
"""Maximum difference of the second pass, relative to the effect of rounding."""


@torch.inference_mode()
def _refuse_hidden_state(base: Callable[..., LayersOutput], config: TransformersConfig) -> None:
    """Run a short prompt in one pass and in two: keys and values must be all that they share.

    What a layer caches beside them (a convolution's last inputs, a recurrent state) is lost
    between two passes, and the output would be wrong without an error.
    """
    tokens = torch.arange(1, _PROBE_TOKENS + 1) % config.vocab_size
    whole = _run(base, tokens, [_PROBE_TOKENS])
    # The same tokens in a shorter pass: causal layers differ by rounding alone.
    rounding = _distance(_run(base, tokens[:_PROBE_FIRST], [_PROBE_FIRST]), whole[:_PROBE_FIRST])
    eps = torch.finfo(whole.dtype).eps
    if not rounding <= min(1000 * eps, 0.1):
        raise ModelLoadError(
            "what follows in a pass changes the tokens before it: the hidden state of the same "
            f"tokens differs by {rounding:.2g} in a longer pass"
        )
    second = slice(_PROBE_FIRST, _PROBE_TOKENS)
    parts = _run(base, tokens, [_PROBE_FIRST, _PROBE_TOKENS - _PROBE_FIRST])
    distance = _distance(parts[second], whole[second])
    if not distance <= max(_NOISE_MAX * rounding, 10 * eps):
        raise ModelLoadError(
            "it keeps state beside keys and values, which would be lost between the chunks of a "
            f"prompt: two passes differ from one by {distance:.2g} of the hidden state"
        )


def _run(base: Callable[..., LayersOutput], tokens: Tensor, lengths: list[int]) -> Tensor:
    """Run tokens (T,) in passes of these lengths, with dense attention  ->  (T, hidden).

    Windows, caps and sinks are left out: both sides of a comparison lack them.
    """
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(call: AttentionCall) -> Tensor:
        key, value = call.key[0], call.value[0]  # (H, T, D)
        if key.shape[1] != call.query.shape[2]:
            raise ModelLoadError(
                f"layer {call.layer} has {key.shape[1]} keys for {call.query.shape[2]} tokens"
            )
        if call.layer in cache:
            pairs = zip(cache[call.layer], (key, value), strict=True)
            key, value = (torch.cat(pair, dim=1) for pair in pairs)
        cache[call.layer] = key, value
        queries, keys = call.query.shape[2], key.shape[1]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        heads = torch.nn.functional.scaled_dot_product_attention(
            call.query, key[None], value[None], attn_mask=seen, enable_gqa=True
        )
        return heads[0].transpose(0, 1)  # (T, Q, D)

    places = torch.split(torch.arange(len(tokens)), lengths)
    return torch.cat([_run_layers(base, attend, tokens[at], at) for at in places])


def _distance(one: Tensor, other: Tensor) -> float:
    """The mean relative distance of tokens of two hidden states (T, hidden)."""
    return float(_distances(one, other).mean())


def _distances(one: Tensor, other: Tensor) -> Tensor:
    """The relative distance of each token of two hidden states (T, hidden): (T,)."""
    apart = (one.float() - other.float()).square().sum(-1).sqrt()
    return apart / other.float().square().sum(-1).sqrt().clamp(min=1e-30)


def _parse_call(call: AttentionCall) -> tuple[AttentionSpec, AttentionParams]:
    kwargs = dict(call.kwargs)
    scale, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    if kwargs.pop("is_causal") is False:
        raise ModelLoadError("its attention is not causal")
    if unknown := [name for name in kwargs if name not in HARMLESS and kwargs[name] is not None]:
        raise ModelLoadError(f"its attention needs {', '.join(unknown)}")
    if call.mask is None or call.mask.numel() != 1:
        raise ModelLoadError("its attention has a mask of its own")
    if call.value.shape[:-1] != call.key.shape[:-1]:
        raise ModelLoadError("it has values for other heads than keys")
    if call.key.shape[-1] != call.query.shape[-1]:
        raise ModelLoadError("its queries and keys are of different sizes")
    assert scale is None or isinstance(scale, float | int)
    assert softcap is None or isinstance(softcap, float | int)
    assert sinks is None or isinstance(sinks, Tensor)
    size = call.query.shape[-1]
    spec = AttentionSpec(
        query_heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        head_size=max(size, call.value.shape[-1]),
        scale=size**-0.5 if scale is None else scale,
        rotary=None,
        window=int(call.mask) or None,
        softcap=softcap,
        sinks=sinks is not None,
    )
    return spec, AttentionParams(scale=spec.scale, rotary=None, softcap=softcap, sinks=sinks)


def _spec(config: TransformersConfig, mixers: list[AttentionSpec]) -> ModelSpec:
    norm = NormSpec(eps=0.0)
    shared = partial(LayerSpec, feed_forward=None, norm=norm, norms=Norms())
    return ModelSpec(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=tuple(shared(mixer=mixer) for mixer in mixers),
        context_tokens=config.max_position_embeddings,
        norm=norm,
        head=HeadSpec(tied=False),
    )


class _Rotation(Protocol):
    """The attributes of transformers' RoPE modules; `inv_freq` is what they change."""

    forward: Forward
    rope_type: object
    original_max_seq_len: int
    max_seq_len_cached: int
    original_inv_freq: Tensor
    inv_freq: Tensor


def patch_dynamic_rotary(model: PreTrainedModel) -> None:
    """Make the dynamic RoPE of transformers' modules a function of the position alone.

    Such a module changes its frequencies by the longest text of a call, and rotates all tokens of
    the call by them. Our calls batch many texts and cache keys for later requests: here each token
    beyond the trained context is rotated by a call of its own, as if it were the last of its text.
    """
    for module in model.modules():
        kind: object = getattr(module, "rope_type", None)
        by_layer = cast("dict[str, object]", kind) if isinstance(kind, dict) else {}
        for name in ("dynamic", "longrope"):  # both depend on the longest text of a call
            if name in by_layer.values():
                raise ModelLoadError(f"only some types of layers have {name} RoPE")
        if kind == "dynamic":
            rotation = cast("_Rotation", module)
            rotation.forward = _by_position(rotation, rotation.forward)


def _by_position(rotation: _Rotation, forward: Forward) -> Forward:
    """Call `forward` separately for each position beyond the trained context.

    Axes: T tokens. position_ids (1, T)  ->  the result of `forward`, (1, T, ...)
    """
    trained = rotation.original_max_seq_len

    def part(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        rotation.max_seq_len_cached = trained
        rotation.inv_freq = rotation.original_inv_freq
        given = forward(x, positions[None])
        return (given,) if isinstance(given, Tensor) else given

    def rotated(x: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        row = cast("list[int]", position_ids[0].tolist())  # pyright: ignore[reportUnknownMemberType]
        near = sorted({at for at in row if at < trained})
        far = sorted({at for at in row if at >= trained})
        pieces = [*([near] if near else []), *([at] for at in far)]
        parts = [part(x, position_ids.new_tensor(piece)) for piece in pieces]
        order = {at: place for place, at in enumerate(near + far)}
        places = position_ids.new_tensor([order[at] for at in row])
        joined = tuple(torch.cat(same, dim=1)[:, places] for same in zip(*parts, strict=True))
        return joined[0] if len(joined) == 1 else joined

    return rotated
