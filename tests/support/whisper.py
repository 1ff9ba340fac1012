"""A tiny Whisper with random weights, whose tokenizer is the embedded model's with its tokens."""

from __future__ import annotations

import io
import json
import struct
import wave
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from tests.support.llava import write_random, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

RATE = 16_000
WINDOW_S = 2
SOURCE_TOKENS = WINDOW_S * RATE // 160 // 2
CONTEXT_TOKENS = 48
SIZES: Mapping[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 16,
    "max_source_positions": SOURCE_TOKENS,
    "max_target_positions": CONTEXT_TOKENS,
}
MARKS = (
    *("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev"),
    *("nospeech", "notimestamps"),
)


def timestamp(step: int) -> str:
    return f"{step * WINDOW_S / SOURCE_TOKENS:.2f}"


def write_whisper(folder: Path, **generation: Any) -> Path:
    """Write a model of two languages; `generation` are fields of generation_config.json."""
    special = [f"<|{name}|>" for name in (*MARKS, *map(timestamp, range(SOURCE_TOKENS + 1)))]
    tokenizer = write_tokenizer(folder, special, "")
    (folder / "tokenizer_config.json").write_text("{}")
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") or 0 for name in MARKS}
    ends: dict[str, Any] = {
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["endoftext"],
        "pad_token_id": ids["endoftext"],
        "decoder_start_token_id": ids["startoftranscript"],
    }
    config = transformers.WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=False, **SIZES, **ends
    )
    model = transformers.WhisperForConditionalGeneration(config)
    write_random(folder, model, spread=0.2)
    with torch.no_grad():  # else it repeats one word, whatever it has been given
        for name, parameter in model.named_parameters():
            if name.endswith("norm.bias"):
                parameter.sub_(1)
            if name.endswith(("decoder.embed_positions.weight", "encoder_attn.out_proj.weight")):
                parameter.mul_(3)
        model.proj_out.weight.mul_(8)  # else its texts are guesses, and are sampled again
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(
        feature_size=SIZES["num_mel_bins"], chunk_length=WINDOW_S
    ).save_pretrained(folder)
    marks = [ids[name] for name in MARKS if name != "endoftext"]
    fields = {
        **ends,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[code] for code in ("en", "de")},
        "task_to_id": {name: ids[name] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["notimestamps"],
        "prev_sot_token_id": ids["startofprev"],
        "max_length": CONTEXT_TOKENS,
        "suppress_tokens": [5, 6, *marks],
        "begin_suppress_tokens": [7, ids["endoftext"]],
        "max_initial_timestamp_index": SOURCE_TOKENS // 4,
        **generation,
    }
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def tones(seconds: float, seed: int = 0, rate: int = RATE) -> NDArray[np.float32]:
    """Samples of some tones and noise, from -1 to 1."""
    random = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    waves = [np.sin(2 * np.pi * hertz * times) for hertz in random.uniform(100, 3000, 3)]
    noise = random.normal(0, 0.1, len(times))
    return (0.2 * (np.sum(waves, axis=0) * (1 + np.sin(7 * times)) / 2 + noise)).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV file of 16 bits; the samples (N,) are in all channels."""
    numbers = np.round(np.clip(samples, -1, 1) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.repeat(numbers, channels).tobytes())
    return file.getvalue()


def as_read(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a decoder reads of the samples of a WAV file."""
    return (np.round(samples * 32767) / 32768).astype(np.float32)


def encoded(
    samples: NDArray[np.float32],
    kind: str,
    codec: str,
    rate: int = RATE,
    *,
    container: Mapping[str, str] | None = None,
    **options: str,
) -> bytes:
    """A file of another format, in one channel; FFmpeg's own encoder of Vorbis knows only two.

    The options are those of the encoder, and of the `container`.
    """
    import av  # noqa: PLC0415

    library: Any = av
    file = io.BytesIO()
    with library.open(file, "w", format=kind, options=dict(container or {})) as out:
        layout = "stereo" if codec == "vorbis" else "mono"
        stream = out.add_stream(codec, rate=rate, layout=layout)
        stream.codec_context.options = {"strict": "experimental", **options}
        resampler = library.AudioResampler(
            format=stream.codec_context.format or "s16", layout=layout, rate=rate
        )
        numbers = np.round(samples * 32767).astype(np.int16)[None]
        frame = library.AudioFrame.from_ndarray(numbers, format="s16", layout="mono")
        frame.sample_rate = rate
        fifo = library.AudioFifo()
        for made in (*resampler.resample(frame), *resampler.resample(None)):
            made.pts = None
            fifo.write(made)
        size = stream.codec_context.frame_size or 1024
        while (piece := fifo.read(size, True)) is not None:
            for packet in stream.encode(piece):
                out.mux(packet)
        for packet in stream.encode(None):
            if packet.size or kind != "ogg":  # FLAC's last one has no samples, and no time
                out.mux(packet)
    return file.getvalue()


def uncounted(flac: bytes) -> bytes:
    """A file whose encoder did not know the number of samples when it wrote the header."""
    (packed,) = struct.unpack_from(">Q", flac, 18)
    return flac[:18] + struct.pack(">Q", packed >> 36 << 36) + flac[26:]
