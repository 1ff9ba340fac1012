"""Converts the metadata of a GGUF file back to config.json.

Source of the keys: docs/gguf.md of the ggml project, and its converter from Hugging Face folders.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.weight_headers import GgufHeader, GgufTensor

if TYPE_CHECKING:
    from collections.abc import Callable


Json = dict[str, object]

_TABLE, _HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a turn, for files that name only the end of a text."""
_PLAIN = {0: "float32", 1: "float16"}
_LLAMA3 = (1.0, 4.0, 8192)
"""Low and high factor and trained length of all Llama models whose factors are in a tensor."""
_CLOSE = 1e-3


class _GgufParts(msgspec.Struct, frozen=True):
    """Headers of a model's parts; the first one has the metadata."""

    path: Path
    header: GgufHeader
    tensors: Mapping[str, tuple[Path, GgufTensor]]

    @property
    def architecture(self) -> str:
        return str(self.header.settings.get("general.architecture"))

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {why}; name the model it was made from, a folder or a model of the "
            "hub, as model.tokenizer_path"
        )

    def number(self, key: str) -> float | None:
        value = self.header.settings.get(f"{self.architecture}.{key}")
        if f"{self.architecture}.{key}" in self.header.lists:
            several = set(self.header.lists[f"{self.architecture}.{key}"])
            if len(several) != 1:
                raise self.refuse(f"{key} differs from layer to layer")
            (value,) = several
        if isinstance(value, str):
            raise self.refuse(f"{self.architecture}.{key} = {value!r}")
        return value

    def whole(self, key: str) -> int:
        value = self.number(key)
        if value is None or value != int(value) or value < 0:
            raise self.refuse(f"{self.architecture}.{key} is missing")
        return int(value)

    def text(self, key: str) -> str | None:
        value = self.header.settings.get(f"{self.architecture}.{key}")
        return value if isinstance(value, str) else None


def gguf_config(parts: Mapping[Path, GgufHeader]) -> Json:
    """Build a config.json from the headers of a model's files, with lists, in order."""
    path, header = next(iter(parts.items()))
    tensors = {
        name: (file, tensor)
        for file, part in parts.items()
        for name, tensor in part.tensors.items()
    }
    file = _GgufParts(path, header, tensors)
    if file.architecture not in _ARCHITECTURES:
        raise file.refuse(
            f"architecture {file.architecture!r} cannot be read from a GGUF file alone, only "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if file.number("expert_count") and file.architecture not in _WITH_EXPERTS:
        raise file.refuse(
            f"architecture {file.architecture!r} with experts cannot be read from a GGUF file "
            f"alone, only {', '.join(_WITH_EXPERTS)}"
        )
    return _common(file) | _ARCHITECTURES[file.architecture](file)


def _common(file: _GgufParts) -> Json:
    heads, hidden = file.whole("attention.head_count"), file.whole("embedding_length")
    kv_heads = file.number("attention.head_count_kv")
    head_dim = file.number("attention.key_length") or hidden // heads
    if (rotated := file.number("rope.dimension_count")) not in (None, head_dim):
        raise file.refuse(
            f"rope.dimension_count = {rotated:g}: must be the head size, {head_dim:g}"
        )
    if file.number("attention.value_length") not in (None, head_dim):
        raise file.refuse("attention.value_length must be equal to attention.key_length")
    if _TABLE not in file.tensors:
        raise file.refuse(f"tensor {_TABLE} is missing")
    return {
        "hidden_size": hidden,
        "intermediate_size": file.whole("feed_forward_length"),
        "num_hidden_layers": file.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else int(kv_heads),
        "head_dim": int(head_dim),
        "max_position_embeddings": file.whole("context_length"),
        "rms_norm_eps": _rounded(file.number("attention.layer_norm_rms_epsilon") or 1e-6),
        "rope_theta": file.number("rope.freq_base") or 10_000.0,
        "vocab_size": file.tensors[_TABLE][1].shape[0],
        "tie_word_embeddings": _HEAD not in file.tensors,
        "torch_dtype": _dtype(file),
        **_ids(file),
        **_scaling(file),
    }


def _rounded(number: float) -> float:
    """A 32-bit float in its shortest decimal form: 1e-05, not 9.999999747378752e-06."""
    return float(f"{number:.6g}")


def _dtype(file: _GgufParts) -> str:
    return _PLAIN.get(file.tensors[_layer_weight(file)][1].kind, "bfloat16")


def _layer_weight(file: _GgufParts) -> str:
    matrices = (name for name, (_, tensor) in file.tensors.items() if len(tensor.shape) > 1)
    return next((name for name in matrices if name.startswith("blk.")), _TABLE)


def _ids(file: _GgufParts) -> Json:
    settings = file.header.settings
    tokens = file.header.lists.get("tokenizer.ggml.tokens", ())
    named = {"bos_token_id": "bos", "pad_token_id": "padding", "eos_token_id": "eos"}
    ids: Json = {}
    for name, own in named.items():
        value = settings.get(f"tokenizer.ggml.{own}_token_id")
        if isinstance(value, int):
            ids[name] = value
    ends = {ids.get("eos_token_id"), *(settings.get(f"tokenizer.ggml.{end}") for end in _TURNS)}
    if "tokenizer.ggml.eot_token_id" not in settings:
        ends |= {index for index, token in enumerate(tokens) if token in _ENDS}
    if known := sorted(end for end in ends if isinstance(end, int)):
        ids["eos_token_id"] = known
    return ids


_TURNS = ("eot_token_id", "eom_token_id")


def _scaling(file: _GgufParts) -> Json:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file)
    kind = file.text("rope.scaling.type")
    factor = file.number("rope.scaling.factor")
    if kind in (None, "none"):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and factor is not None:
        trained = file.number("rope.scaling.original_context_length")
        scaling: Json = {"rope_type": "yarn", "factor": factor}
        if trained is not None:
            scaling["original_max_position_embeddings"] = int(trained)
        return {"rope_scaling": scaling}
    raise file.refuse(f"rope.scaling.type = {kind!r}")


def _llama3_scaling(file: _GgufParts) -> Json:
    """Find the parameters that yield the factors in the tensor."""
    path, tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != 0:
        raise file.refuse(f"{ROPE_FACTORS} is not in float32")
    with path.open("rb") as stream:
        stream.seek(tensor.start)
        factors = struct.unpack(f"<{tensor.count}f", stream.read(4 * tensor.count))
    if set(factors) == {1.0}:
        return {}
    low, high, trained = _LLAMA3
    base = file.number("rope.freq_base") or 10_000.0
    expected = [
        _llama3_factor(2 * math.pi * base ** (index / len(factors)), max(factors))
        for index in range(len(factors))
    ]
    if any(abs(ours / factor - 1) > _CLOSE for ours, factor in zip(expected, factors, strict=True)):
        raise file.refuse(f"{ROPE_FACTORS} is not the scaling of Llama 3")
    scaling: Json = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
    return {"rope_scaling": scaling}


def _llama3_factor(wavelength: float, factor: float) -> float:
    low, high, trained = _LLAMA3
    if wavelength < trained / high:
        return 1.0
    if wavelength > trained / low:
        return factor
    smooth = (trained / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _silu(architecture: str, model_type: str) -> Json:
    return {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu"}


def _gelu(architecture: str, model_type: str) -> Json:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _llama(file: _GgufParts) -> Json:
    if file.number("expert_count"):
        return _silu("MixtralForCausalLM", "mixtral") | {"sliding_window": None} | _experts(file)
    return _silu("LlamaForCausalLM", "llama") | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _experts(file: _GgufParts) -> Json:
    """Experts per layer and per token; their width follows from their tensors."""
    if _EXPERTS not in file.tensors:
        raise file.refuse(f"tensor {_EXPERTS} is missing: unstacked experts are not supported")
    return {
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "moe_intermediate_size": file.tensors[_EXPERTS][1].shape[1],
    }


def _qwen2moe(file: _GgufParts) -> Json:
    if _SHARED not in file.tensors:
        raise file.refuse(f"tensor {_SHARED} is missing")
    shared = {"shared_expert_intermediate_size": file.tensors[_SHARED][1].shape[0]}
    own = _silu("Qwen2MoeForCausalLM", "qwen2_moe") | {"norm_topk_prob": False}
    return own | shared | _experts(file)


def _qwen3moe(file: _GgufParts) -> Json:
    own = _silu("Qwen3MoeForCausalLM", "qwen3_moe") | {"norm_topk_prob": True}
    return own | _experts(file)


def _gemma2(file: _GgufParts) -> Json:
    """Older files lack some keys; the values of the published models are used for them."""
    window = file.number("attention.sliding_window")
    return _gelu("Gemma2ForCausalLM", "gemma2") | {
        "query_pre_attn_scalar": _query_scalar(file, _GEMMA2_27B_LAYERS),
        "sliding_window": 4096 if window is None else int(window),
        "attn_logit_softcapping": file.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": file.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(file: _GgufParts) -> Json:
    return _gelu("Gemma3ForCausalLM", "gemma3_text") | {
        "query_pre_attn_scalar": _query_scalar(file, _GEMMA3_27B_LAYERS),
        "sliding_window": file.whole("attention.sliding_window"),
        "sliding_window_pattern": int(file.number("attention.sliding_window_pattern") or 6),
        "rope_local_base_freq": file.number("rope.freq_base_swa") or 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _query_scalar(file: _GgufParts, largest: int) -> int:
    """Only the largest model scales attention scores by something else than the head size."""
    hidden, heads = file.whole("embedding_length"), file.whole("attention.head_count")
    if file.whole("block_count") == largest:
        return hidden // heads
    return int(file.number("attention.key_length") or hidden // heads)


_EXPERTS, _SHARED = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_shexp.weight"
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62

_ARCHITECTURES: Mapping[str, Callable[[_GgufParts], Json]] = {
    "llama": _llama,
    "qwen2": lambda _: _silu("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": _qwen2moe,
    "qwen3": lambda _: _silu("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _qwen3moe,
    "gemma": lambda _: _gelu("GemmaForCausalLM", "gemma"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""Supported architectures, by `general.architecture`."""
_WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe")
