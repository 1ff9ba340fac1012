"""A GGUF file with nothing beside it is served as the folder that it was made of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import pytest
from tests.models.test_load_formats import rotated_as_llama_cpp_does, tensors_of
from tests.system.stack import Stack, serving

from antiphon import embedded

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ASKED = {"messages": [{"role": "user", "content": "What colour is the sky?"}], "temperature": 0}


def write_embedded(file: Path) -> None:
    """The embedded model, vocabulary and template too, as llama.cpp's converter would write it."""
    folder = embedded.path()
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    _add_tokenizer(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in tensors_of(folder).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        data = tensor
        if ".q_proj" in name or ".k_proj" in name:
            data = rotated_as_llama_cpp_does(tensor, heads if ".q_proj" in name else kv_heads)
        kind = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(own, gguf.quantize(data.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    tokenizer = json.loads((embedded.path() / "tokenizer.json").read_text())
    card = json.loads((embedded.path() / "tokenizer_config.json").read_text())
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [5] * size
    for text, index in tokenizer["model"]["vocab"].items():
        tokens[index], kinds[index] = text, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(card["chat_template"])


def answers(stack: Stack) -> tuple[str, list[int], list[int]]:
    chat = stack.post("/v1/chat/completions", ASKED)
    body = {
        "input_ids": [1, 40, 41, 42],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    }
    ids = stack.post("/generate", body)["output_ids"]
    tokens = stack.post("/tokenize", {"prompt": "The sky is blue. é", "model": stack.model})
    return chat["choices"][0]["message"]["content"], ids, tokens["tokens"]


def test_a_lone_gguf_file_answers_as_its_folder(stack: Stack, tmp_path: Path) -> None:
    write_embedded(tmp_path / "lone.gguf")
    cache = ("--download-dir", str(tmp_path / "cache"))
    with serving("--model-path", str(tmp_path / "lone.gguf"), *cache) as lone:
        assert lone.model == "lone"
        assert answers(lone) == answers(stack)
