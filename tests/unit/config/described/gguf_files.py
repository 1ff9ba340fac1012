"""GGUF files of small models, written with the public package, vocabularies and all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONTROL, OWN, NORMAL = 3, 4, 1
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SHAPE = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50_000.0,
}


def write(
    file: Path,
    *,
    architecture: str = "llama",
    shape: Mapping[str, object] | None = None,
    tokenizer: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (SHAPE if shape is None else shape).items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    vocabulary: Any = (tokenizer or {}).get("ggml.tokens", ())
    table = np.zeros((len(vocabulary), 64), np.float32)
    for name, content in ({"token_embd.weight": table} | dict(tensors or {})).items():
        writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def byte_level(**more: object) -> dict[str, object]:
    """All bytes, two merges, and tokens of both kinds that are added."""
    letters = gguf_letters()
    tokens = [*letters, "he", "Ġhe", "<|im_start|>", "<|im_end|>", "<think>"]
    kinds = [*[NORMAL] * 258, CONTROL, CONTROL, OWN]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": ["h e", "Ġ he"],
        "ggml.bos_token_id": 258,
        "ggml.eos_token_id": 259,
        "ggml.padding_token_id": 259,
        "chat_template": TEMPLATE,
        **more,
    }


def pieces(words: Sequence[str] = ("▁h", "▁he", "he", "el", "ll", "lo", "hello", "▁hello")) -> Any:
    """SentencePiece's pairs, the first of the words best, and the bytes."""
    letters = sorted({letter for word in words for letter in word})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, CONTROL, CONTROL, *[6] * 256]
    scores = [0.0] * len(tokens)
    tokens += [*words, *letters]
    kinds += [NORMAL] * (len(words) + len(letters))
    scores += [float(-index) for index in range(len(words) + len(letters))]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def gguf_letters() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    spelled: dict[int, str] = bytes_to_unicode()
    return [spelled[byte] for byte in range(256)]
