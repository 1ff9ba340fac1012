"""Small random checkpoints of Llama's shape and its kin, as Hugging Face writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

VOCABULARY = 301
"""Not a multiple of anything, so that padding shows."""

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QWEN2: Mapping[str, object] = {
    **{field: CONFIG[field] for field in CONFIG if not field.endswith("_bias")},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "head_dim": 12,  # what Qwen2 divides its hidden size into; it has no such field
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 2,
}


def write_llama(
    folder: Path,
    fields: Mapping[str, object] = CONFIG,
    *,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Write a random model of four narrow layers; `fields` replace those of its config.

    No parameter is trivial: norms and biases are drawn too, since a weight of one or a bias of
    zero hides that it is not used. The layers lie in two files under one index.
    """
    config = {**CONFIG, **fields, "dtype": dtype}
    return _write(folder, config, _sizes(config), seed)


def write_qwen2(
    folder: Path,
    fields: Mapping[str, object] = QWEN2,
    *,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """The same shape as Qwen2 has it: biases on queries, keys and values, and nowhere else."""
    config = {**QWEN2, **fields, "dtype": dtype}
    sizes = _sizes({**config, "attention_bias": True, "mlp_bias": False})
    return _write(folder, config, ((n, s) for n, s in sizes if "o_proj.bias" not in n), seed)


def _write(
    folder: Path,
    config: Mapping[str, object],
    sizes: Iterable[tuple[str, tuple[int, ...]]],
    seed: int,
) -> Path:
    dtype = getattr(torch, str(config["dtype"]))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, size in sizes:
        drawn = torch.randn(size, generator=generator)
        tensor = 1 + 0.3 * drawn if "norm" in name else 0.2 * drawn
        tensors[name] = tensor.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        (folder / file).write_bytes(save(part, metadata={"format": "pt"}))
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _sizes(config: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint and its size."""

    def size(field: str) -> int:
        value = config[field]
        assert isinstance(value, int)
        return value

    hidden, width = size("hidden_size"), size("intermediate_size")
    query = size("num_attention_heads") * size("head_dim")
    kv = size("num_key_value_heads") * size("head_dim")
    linears = {
        "self_attn.q_proj": (query, hidden, "attention_bias"),
        "self_attn.k_proj": (kv, hidden, "attention_bias"),
        "self_attn.v_proj": (kv, hidden, "attention_bias"),
        "self_attn.o_proj": (hidden, query, "attention_bias"),
        "mlp.gate_proj": (width, hidden, "mlp_bias"),
        "mlp.up_proj": (width, hidden, "mlp_bias"),
        "mlp.down_proj": (hidden, width, "mlp_bias"),
    }
    yield "model.embed_tokens.weight", (size("vocab_size"), hidden)
    for layer in range(size("num_hidden_layers")):
        for name, (outputs, inputs, bias) in linears.items():
            yield f"model.layers.{layer}.{name}.weight", (outputs, inputs)
            if config[bias]:
                yield f"model.layers.{layer}.{name}.bias", (outputs,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (size("vocab_size"), hidden)
