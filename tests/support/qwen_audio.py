"""A tiny Qwen2-Audio with random weights, and the embedded model's tokenizer with its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.support.llava import TEXT, write_random, write_tokenizer
from tests.support.whisper import RATE, as_read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

WINDOW_S = 4
BANDS = 16
PLACEHOLDER = "<|AUDIO|>"
SPECIAL = (PLACEHOLDER, "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% set audio = namespace(count=0) %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if 'audio' in part or 'audio_url' in part %}"
    "{% set audio.count = audio.count + 1 %}"
    "Audio {{ audio.count }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the model's own: it looks for the field of audio, and not at the type of a part."""
TOWER: Mapping[str, int] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": BANDS,
    "max_source_positions": WINDOW_S * RATE // 160 // 2,
}


def write_qwen_audio(folder: Path) -> Path:
    """Write a model that takes 4 s of audio at once, and has 25 tokens a second."""
    tokenizer = write_tokenizer(folder, SPECIAL, TEMPLATE)
    text = {**TEXT, "model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size()}
    fields: dict[str, Any] = {
        "audio_config": {"model_type": "qwen2_audio_encoder", **TOWER},
        "text_config": text,
        "audio_token_index": tokenizer.token_to_id(PLACEHOLDER) or 0,
        "tie_word_embeddings": False,
    }
    config = transformers.Qwen2AudioConfig(**fields)
    extractor().save_pretrained(folder)
    return write_random(folder, transformers.Qwen2AudioForConditionalGeneration(config))


def extractor() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=BANDS, chunk_length=WINDOW_S)


def inputs(audios: Sequence[NDArray[np.float32]]) -> dict[str, Tensor]:
    """What transformers' model is given beside ids: features of samples in WAV files."""
    made = extractor()(
        [as_read(samples) for samples in audios],
        sampling_rate=RATE,
        return_attention_mask=True,
        padding="max_length",
        return_tensors="np",
    )
    return {
        "input_features": torch.as_tensor(made["input_features"]),
        "feature_attention_mask": torch.as_tensor(made["attention_mask"]),
    }
