"""Converts a GGUF file: metadata to config.json, vocabulary and template to a tokenizer's files.

Source of the keys: docs/gguf.md of the ggml project, and its converter from Hugging Face folders.
Two kinds of vocabulary are supported: byte-level BPE (`gpt2`), split by `tokenizer.ggml.pre`, and
SentencePiece BPE (`llama`), whose merges follow from the scores.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

import antiphon.model_card.converted.tokenizer_json as parts
from antiphon.config.errors import ConfigError
from antiphon.model_card.converted.tokenizer_json import Added, Json
from antiphon.model_card.weight_headers import GgufHeader, GgufTensor, Value

_TABLE, _HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a turn, for files that name only the end of a text."""
_PLAIN = {0: "float32", 1: "float16"}
_LLAMA3_SCALING = (1.0, 4.0, 8192)
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
        name = f"{self.architecture}.{key}"
        value = self.header.settings.get(name)
        if name in self.header.lists:
            value, *others = set(self.header.lists[name]) or {None}
            if others:
                raise self.refuse(f"{key} differs from layer to layer")
        if isinstance(value, str):
            raise self.refuse(f"{name} = {value!r}")
        return value

    def whole(self, key: str) -> int:
        value = self.number(key)
        if value is None or value != int(value) or value < 0:
            raise self.refuse(f"{self.architecture}.{key} is missing")
        return int(value)


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
        # A 32-bit float in its shortest decimal form: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(f"{file.number('attention.layer_norm_rms_epsilon') or 1e-6:.6g}"),
        "rope_theta": file.number("rope.freq_base") or 10_000.0,
        "vocab_size": file.tensors[_TABLE][1].shape[0],
        "tie_word_embeddings": _HEAD not in file.tensors,
        "torch_dtype": _dtype(file),
        **_ids(file),
        **_scaling(file),
    }


def _dtype(file: _GgufParts) -> str:
    """The dtype of the first matrix of a layer, or else of the embedding."""
    matrices = (name for name, (_, tensor) in file.tensors.items() if len(tensor.shape) > 1)
    chosen = next((name for name in matrices if name.startswith("blk.")), _TABLE)
    return _PLAIN.get(file.tensors[chosen][1].kind, "bfloat16")


def _ids(file: _GgufParts) -> Json:
    settings = file.header.settings
    tokens = file.header.lists.get("tokenizer.ggml.tokens", ())
    named = {"bos_token_id": "bos", "pad_token_id": "padding", "eos_token_id": "eos"}
    ids: Json = {}
    for name, own in named.items():
        value = settings.get(f"tokenizer.ggml.{own}_token_id")
        if isinstance(value, int):
            ids[name] = value
    turns = (settings.get(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom"))
    ends = {ids.get("eos_token_id"), *turns}
    if "tokenizer.ggml.eot_token_id" not in settings:
        ends |= {index for index, token in enumerate(tokens) if token in _ENDS}
    if known := sorted(end for end in ends if isinstance(end, int)):
        ids["eos_token_id"] = known
    return ids


def _scaling(file: _GgufParts) -> Json:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file)
    kind = file.header.settings.get(f"{file.architecture}.rope.scaling.type")
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
    low, high, trained = _LLAMA3_SCALING
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
    low, high, trained = _LLAMA3_SCALING
    if wavelength < trained / high:
        return 1.0
    if wavelength > trained / low:
        return factor
    smooth = (trained / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _silu(architecture: str, model_type: str) -> Json:
    return {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu"}


def _gelu(architecture: str, model_type: str) -> Json:
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    return {"architectures": [architecture], "model_type": model_type, **activation}


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
    own = _silu("Qwen3MoeForCausalLM", "qwen3_moe")
    return own | {"norm_topk_prob": True} | _experts(file)


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


_PREFIX = "tokenizer.ggml."
_CONTROL, _OWN = 3, 4
"""Token types: control tokens and user-defined ones."""
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Names of special tokens in the metadata, in the specification's own spelling."""
_BY_POSITION = ("gemma", "gemma2", "gemma3")
"""Architectures whose merge order is the order of tokens, not of scores."""


class _GgufVocabulary(msgspec.Struct, frozen=True):
    path: Path
    header: GgufHeader
    tokens: Sequence[str]
    kinds: Sequence[int]

    def setting(self, name: str) -> Value | None:
        return self.header.settings.get(_PREFIX + name)

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {why}; name a folder or a model of the hub with its tokenizer.json as "
            "model.tokenizer_path"
        )

    @property
    def merges(self) -> list[tuple[str, str]]:
        # A token may contain the separating space, but never as its first character.
        merges = cast("Sequence[str]", self.header.lists.get(_PREFIX + "merges", ()))
        return [(merge[:at], merge[at + 1 :]) for merge in merges for at in (merge.find(" ", 1),)]

    def named(self, name: str) -> Added | None:
        index = self.setting(f"{name}_token_id")
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            return None
        return Added(index, self.tokens[index], special=True)

    def adds(self, name: str, *, otherwise: bool) -> Sequence[Added]:
        """The token that is added before or after plain text, if any."""
        configured = self.setting(f"add_{name}_token")
        token = self.named(name)
        return (token,) if token and (otherwise if configured is None else configured) else ()


def gguf_tokenizer(path: Path, header: GgufHeader) -> tuple[Json, Json]:
    """Build a tokenizer.json and a tokenizer_config.json from a file's header, with lists."""
    tokens = header.lists.get(_PREFIX + "tokens", ())
    kinds = header.lists.get(_PREFIX + "token_type", (1,) * len(tokens))
    words = _GgufVocabulary(
        path, header, cast("Sequence[str]", tokens), cast("Sequence[int]", kinds)
    )
    model = words.setting("model")
    if not tokens or len(kinds) != len(tokens):
        raise words.refuse("the file has no tokenizer")
    if model not in _MODELS:
        raise words.refuse(f"tokenizer type {model!r} is not supported, only {', '.join(_MODELS)}")
    return _MODELS[str(model)](words), _card(words)


def _byte_level(words: _GgufVocabulary) -> Json:
    cut = str(words.setting("pre") or "")
    if cut not in _SPLITS:
        raise words.refuse(
            f"{_PREFIX}pre = {cut!r}: unknown pre-tokenizer, must be one of {', '.join(_SPLITS)}"
        )
    whole = cut in _WHOLE_WORDS
    ids = {token: index for index, token in enumerate(words.tokens)}
    return parts.tokenizer_json(
        model=parts.bpe(ids, words.merges, whole_words=whole),
        added=_added(words, words.tokens),
        normalizer={"type": "NFC"} if cut == "qwen2" else None,
        pre_tokenizer=parts.byte_level_split(_SPLITS[cut]),
        decoder=parts.BYTE_LEVEL,
        before=words.adds("bos", otherwise=whole),
        after=words.adds("eos", otherwise=False),
    )


def _sentence_pieces(words: _GgufVocabulary) -> Json:
    by_position = words.header.settings.get("general.architecture") in _BY_POSITION
    tokens = words.tokens
    if by_position:  # tokens that consist of spaces are written so, not with SentencePiece's marker
        tokens = [token if token.strip(" ") else parts.SPACE * len(token) for token in tokens]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = cast("Sequence[float]", words.header.lists.get(_PREFIX + "scores", ()))
    merges = words.merges
    if not merges and not by_position and len(scores) != len(tokens):
        raise words.refuse("its tokenizer has neither merges nor scores")
    if not merges:
        ranks = range(len(tokens)) if by_position else [-score for score in scores]
        merges = parts.merges_by_rank(ids, lambda token: ranks[ids[token]])
    configured = words.setting("add_space_prefix")
    adds_space = not by_position if configured is None else bool(configured)
    named = words.named("unknown")
    unknown = None if named is None else named.content
    return parts.tokenizer_json(
        model=parts.bpe(ids, merges, unknown=unknown, bytes_for_unknown=True),
        added=_added(words, tokens),
        normalizer=None if adds_space else parts.replaced_spaces(),
        pre_tokenizer=parts.metaspace() if adds_space else None,
        decoder=parts.pieces_decoder(drops_first_space=adds_space),
        before=words.adds("bos", otherwise=True),
        after=words.adds("eos", otherwise=False),
    )


def _added(words: _GgufVocabulary, tokens: Sequence[str]) -> list[Added]:
    return [
        Added(index, token, special=kind == _CONTROL)
        for index, (token, kind) in enumerate(zip(words.tokens, words.kinds, strict=True))
        if kind in (_CONTROL, _OWN) and token and token == tokens[index]
    ]


def _card(words: _GgufVocabulary) -> Json:
    card: Json = {}
    for name, own in _NAMES.items():
        if (token := words.named(own)) is not None:
            card[f"{name}_token"] = token.content
    settings = words.header.settings
    template = settings.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    others = {
        key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)
    }
    named = {"default": template, **others} if template is not None else others
    if others:
        card["chat_template"] = [{"name": name, "template": each} for name, each in named.items()]
    elif template is not None:
        card["chat_template"] = template
    return card


_MODELS = {"gpt2": _byte_level, "llama": _sentence_pieces}
"""Builders by `tokenizer.ggml.model`."""

# Pre-tokenization patterns, taken from the published tokenizers and llama.cpp's `llama-vocab.cpp`.
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT: Final = r"\p{N}"
_REST: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3: Final = _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_QWEN2: Final = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O: Final = (
    f"{_UPPER}*{_LOWER}+{_ENDINGS}|{_UPPER}+{_LOWER}*{_ENDINGS}"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _REST
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST,
)

_BY_PATTERNS: Final = {
    (_GPT2,): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    (_DIGIT, _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (_LLAMA3,): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "dbrx", "smaug-bpe"),
    ),
    (_QWEN2,): ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"),
    (_TEKKEN,): ("tekken",),
    (_GPT4O,): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    _DEEPSEEK_V3: ("deepseek-v3", "hunyuan-dense"),
}
_SPLITS: Final = {name: patterns for patterns, names in _BY_PATTERNS.items() for name in names}
"""Patterns by `tokenizer.ggml.pre`: each one splits the pieces that earlier ones left."""

_WHOLE_WORDS: Final = {*_BY_PATTERNS[(_LLAMA3,)], "gpt-4o", "llama4", "tekken"}
"""tiktoken vocabularies: a word that is a token stays one token, regardless of the merges."""
