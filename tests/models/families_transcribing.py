"""Models that transcribe, as in `families`; `test_cross_attention` compares their text model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers
from tests.models.families import Row

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE = 50
"""Tokens of the encoder."""
SIZES: Mapping[str, object] = {
    "vocab_size": 101,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 8,
    "max_source_positions": SOURCE,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
ROWS = (Row("whisper", transformers.WhisperForConditionalGeneration, sizes=SIZES),)
