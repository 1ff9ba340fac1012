"""The shape of the embedded model, and its files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save
from tests.training.tokenizer import (
    BOS,
    CONTEXT_TOKENS,
    END,
    PAD,
    save_tokenizer,
    special_id,
    with_marks,
)
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_TOKENS,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

# A low temperature: the alternatives of a model this small are rarely correct.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def new_model(tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Create an untrained model of 2.6 million parameters, in float32."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    settings = {**SHAPE, **_vocabulary(tokenizer), "torch_dtype": "float32"}
    config = LlamaConfig.from_dict(settings)  # pyright: ignore[reportUnknownMemberType]
    model = LlamaForCausalLM(config)
    # On a CPU the backward pass of the fused attention took half of a step (torch 2.13).
    model.set_attn_implementation("eager")  # pyright: ignore[reportUnknownMemberType]
    return model


def trained_model(folder: Path, seed: int) -> tuple[LlamaForCausalLM, Tokenizer]:
    """Load a model that `save_model` wrote, in float32, and add the markers that it lacks.

    The embeddings of new markers start as small random numbers, drawn from the seed.
    """
    before = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = with_marks(before)
    model = new_model(tokenizer, seed)
    weights = load((folder / "model.safetensors").read_bytes())
    rows = weights["model.embed_tokens.weight"]
    drawn = model.model.embed_tokens.weight.detach()
    for token_id in range(tokenizer.get_vocab_size()):
        if tokenizer.id_to_token(token_id) != before.id_to_token(token_id):
            rows[token_id] = drawn[token_id]
    model.load_state_dict(weights, strict=False)
    return model, tokenizer


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder for serving. The weights are converted to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(tokenizer)
    _write(folder / "config.json", {**SHAPE, **vocabulary})
    special = {name: token for name, token in vocabulary.items() if name.endswith("_token_id")}
    _write(folder / "generation_config.json", {**special, **SAMPLING})
    # The head is tied to the embeddings and has no weights of its own.
    weights = {
        name: weight.detach().bfloat16()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    save_tokenizer(tokenizer, folder)


def _vocabulary(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": special_id(tokenizer, BOS),
        "eos_token_id": special_id(tokenizer, END),
        "pad_token_id": special_id(tokenizer, PAD),
    }


def _write(file: Path, settings: dict[str, object]) -> None:
    file.write_text(json.dumps(settings, indent=2) + "\n")
