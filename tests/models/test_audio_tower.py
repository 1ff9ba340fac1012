"""Audio as the encoder sees it, against transformers: features, the tower, and decoded files."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from tests.models.parity import draw
from tests.support.whisper import RATE, SIZES, WINDOW_S, as_read, encoded, tones, uncounted, wav

from antiphon.config.errors import ConfigError
from antiphon.encoder.audio import AudioPreprocessor, DecodedAudio, file_samples
from antiphon.encoder.audio_model import open_audio_model
from antiphon.model_card.audio import AudioFeatures, read_audio
from antiphon.wire.claim import AudioWindow
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from antiphon.model_card.audio import AudioCard
    from antiphon.wire.claim import AudioFormat

TINY = AudioFeatures(feature_size=16, chunk_length=WINDOW_S)


@pytest.mark.parametrize(("bands", "seconds"), [(80, 3.3), (128, 30.0), (16, 0.01)])
def test_features_are_those_of_transformers(bands: int, seconds: float) -> None:
    samples = tones(seconds)
    recipe = AudioFeatures(feature_size=bands)
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    theirs = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    ours = AudioPreprocessor(recipe).features(samples)
    assert ours.shape == theirs.shape == (bands, 3000)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_the_tower_is_that_of_transformers(tmp_path: Path) -> None:
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(vocab_size=60, pad_token_id=0, **SIZES)
    ).eval()
    draw(model)
    model.save_pretrained(tmp_path)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S).save_pretrained(
        tmp_path
    )
    card = read_audio(tmp_path)
    assert card is not None
    opened = open_audio_model(tmp_path, card)
    features = AudioPreprocessor(card.features).features(tones(1.5))
    (made,) = opened.steps(DecodedAudio(features, features.shape[1]))
    assert made is not None
    ours = np.frombuffer(made.data, np.float32).reshape(made.tokens, made.hidden)
    with torch.inference_mode():
        theirs = model.model.encoder(torch.as_tensor(features)[None]).last_hidden_state[0]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4 * float(theirs.std()))


def test_heads_that_do_not_divide_the_tower_are_named(tmp_path: Path) -> None:
    named = {"architectures": ["WhisperForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**named, "encoder_attention_heads": 5}))
    card = read_audio(tmp_path)
    assert card is not None
    with pytest.raises(ConfigError, match="d_model = 384 is not a multiple of twice"):
        open_audio_model(tmp_path, card)


RECORDED = {
    "webm": {"live": "1"},
    "mp4": {"movflags": "frag_keyframe+empty_moov", "frag_duration": "500000"},
}
FRAME = 1024
FLAC = encoded(tones(1.9), "flac", "flac")


def window(kind: AudioFormat, start_s: float, seconds: float) -> AudioWindow:
    return AudioWindow(format=kind, start_s=start_s, seconds=seconds)


def floats(value: float) -> bytes:
    """A WAV file of a second, of numbers of 32 bits, one of which is this."""
    samples = np.zeros(RATE, "<f4")
    samples[RATE // 2] = value
    layout = struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32)
    parts = b"WAVE" + b"fmt " + struct.pack("<I", len(layout)) + layout
    parts += b"data" + struct.pack("<I", samples.nbytes) + samples.tobytes()
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def test_what_encoders_pad_is_silence() -> None:
    """A header may say a little more than there is: also where nothing is left behind a part."""
    ours = AudioPreprocessor(TINY)
    behind = ours.decoded(wav(tones(2.0)), window("wav", 2.0, 2.3))
    np.testing.assert_array_equal(behind, ours.features(np.zeros(0, np.float32)))
    shorter = ours.decoded(wav(tones(1.9)), window("wav", 0.0, 2.0))
    np.testing.assert_array_equal(shorter, ours.features(as_read(tones(1.9))))


def test_lists_of_the_generation_config_count_though_they_are_empty(tmp_path: Path) -> None:
    named = {"architectures": ["WhisperForConditionalGeneration"]}
    lists = {"suppress_tokens": [1], "begin_suppress_tokens": [2]}
    (tmp_path / "config.json").write_text(json.dumps({**named, **lists}))
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": []}')
    card = read_audio(tmp_path)
    assert card is not None
    assert (card.suppressed, card.first_suppressed) == ((), (2,))


def test_heads_that_align_are_those_of_the_generation_config(tmp_path: Path) -> None:
    named = {"architectures": ["WhisperForConditionalGeneration"]}
    sizes = {"decoder_layers": 3, "decoder_attention_heads": 2}

    def read(generation: Mapping[str, object], **more: object) -> AudioCard:
        (tmp_path / "config.json").write_text(json.dumps({**named, **sizes, **more}))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        card = read_audio(tmp_path)
        assert card is not None
        return card

    card = read({"alignment_heads": [[0, 1], [2, 0]]}, median_filter_width=5)
    assert (card.alignment_heads, card.filter_width) == (((0, 1), (2, 0)), 5)
    for unnamed in ({}, {"alignment_heads": []}):
        assert read(unnamed).alignment_heads == ((1, 0), (1, 1), (2, 0), (2, 1))
    assert read({}).filter_width == 7
    for generation, more, complaint in (
        ({"alignment_heads": [[3, 0]]}, {}, "of 3 layers with 2 heads"),
        ({"alignment_heads": [[0, 2]]}, {}, "of 3 layers with 2 heads"),
        ({}, {"median_filter_width": 4}, "median_filter_width = 4: must be odd"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read(generation, **more)


def test_a_part_of_a_wav_has_its_samples() -> None:
    samples = tones(5.0)
    ours = AudioPreprocessor(TINY).decoded(wav(samples), window("wav", 2.0, 5.0))
    part = as_read(samples)[2 * RATE : 4 * RATE]
    np.testing.assert_array_equal(ours, AudioPreprocessor(TINY).features(part))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("flac", "flac"),
        ("flac", "flac without a count"),
        ("mp3", "libmp3lame"),
        ("mp3", "libmp3lame at a variable rate"),
        ("ogg", "vorbis"),
        ("ogg", "libopus"),
        ("ogg", "flac"),
        ("webm", "libopus"),
        ("webm", "libopus as a browser records"),
        ("mp4", "aac"),
        ("mp4", "aac as a browser records"),
    ],
)
@pytest.mark.parametrize("start_s", [0.0, 2.0])
def test_other_formats_have_the_same_sound(kind: AudioFormat, codec: str, start_s: float) -> None:
    name, _, how = codec.partition(" ")
    rate = 48_000 if name == "libopus" else RATE
    samples = tones(5.0, rate=rate)
    options = {"q": "4"} if how == "at a variable rate" else {}
    recorded = how == "as a browser records"
    data = encoded(
        samples, kind, name, rate, container=RECORDED[kind] if recorded else {}, **options
    )
    if how == "without a count":
        data = uncounted(data)
    pieces = list(file_samples(data, kind, start_s, RATE))
    ours = np.concatenate(pieces)[: 2 * RATE]
    expected = np.concatenate(list(file_samples(wav(samples, rate), "wav", start_s, RATE)))
    expected = expected[: 2 * RATE]
    if how == "as a browser records" and kind == "mp4":
        # No list of edits says that the first frame is the silence that its encoder begins with.
        ours, expected = ours[FRAME:], expected[:-FRAME]
    if kind == "flac":
        np.testing.assert_array_equal(ours, expected)
    assert np.corrcoef(ours, expected)[0, 1] > 0.97, "it is shifted, or other sound"


def test_channels_are_averaged_and_rates_changed() -> None:
    samples = tones(1.0, rate=44_100)
    one, *others = (
        np.concatenate(list(file_samples(wav(samples, 44_100, channels), "wav", 0.0, RATE)))
        for channels in (1, 2, 3, 8)
    )
    for each in others:
        np.testing.assert_allclose(one, each, atol=1e-6)
    assert abs(len(one) - RATE) <= 2


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        (b"RIFF", window("wav", 0.0, 1.0), "cannot be decoded"),
        (wav(tones(1.0)), window("mp3", 0.0, 1.0), "audio"),
        (wav(tones(1.0)), window("wav", 2.0, 3.0), "ends before its header says"),
        (wav(tones(3.0)), window("wav", 0.0, 1.0), "longer than its header says"),
        (wav(tones(1.9)), window("wav", 0.0, 1.0), "longer than its header says"),
        (wav(tones(1.0)), window("wav", 0.0, 100.0), "ends before its header says"),
        (FLAC[: len(FLAC) // 2], window("flac", 0.0, 1.9), "audio"),
        (
            wav(tones(0.1), rate=400),
            window("wav", 0.0, 4.0),
            "400 samples a second; the limits are",
        ),
        (
            wav(tones(0.1), rate=2_000_000),
            window("wav", 0.0, 0.1),
            "samples a second|cannot be decoded",
        ),
        (floats(np.nan), window("wav", 0.0, 1.0), "not finite"),
        (floats(np.inf), window("wav", 0.0, 1.0), "not finite"),
        (wav(tones(0.1), channels=9), window("wav", 0.0, 0.1), "9 channels; the limit is 8"),
        (encoded(tones(0.5), "wav", "adpcm_ms"), window("wav", 0.0, 0.5), "the codec adpcm_ms"),
    ],
)
def test_what_is_no_such_audio_is_refused(data: bytes, where: AudioWindow, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AudioPreprocessor(TINY).decoded(data, where)
