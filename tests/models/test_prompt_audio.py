"""Audio in prompts: its tokens, the tower and the projector, against transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.models import change_config
from tests.support.qwen_audio import PLACEHOLDER, WINDOW_S, inputs, write_qwen_audio
from tests.support.services import QUICK, client_bus, running
from tests.support.whisper import RATE, as_read, tones

from antiphon.config.errors import ConfigError
from antiphon.config.settings import EncoderConfig
from antiphon.encoder.audio import AudioPreprocessor, DecodedAudio
from antiphon.encoder.audio_model import AudioModel, open_audio_model
from antiphon.encoder.service import EncoderService
from antiphon.model_card.audio import PromptAudio, read_audio, read_prompt_audio
from antiphon.model_card.card import read_card
from antiphon.service.clock import SystemClock, deadline_in
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.claim import AudioWindow, EncodeImage
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import EngineError, InvalidRequest, Unsupported
from antiphon.wire.ids import InstanceId, ModelName, RequestId, new_request_id
from antiphon.wire.media import MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.routes import ENCODE_IMAGE
from antiphon.wire.tokenize import ChatMessage, EncodeRequest, MessagePart

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

SECONDS = (0.04, 0.5, 1.7, 2.345, WINDOW_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_audio(tmp_path_factory.mktemp("qwen2-audio"))


@pytest.fixture(scope="module")
def card(folder: Path) -> PromptAudio:
    found = read_prompt_audio(folder)
    assert found is not None
    assert read_audio(folder) is None, "it does not transcribe"
    return found


@pytest.fixture(scope="module")
def model(folder: Path, card: PromptAudio) -> AudioModel:
    return open_audio_model(folder, card)


@torch.inference_mode()
def spliced(folder: Path, samples: NDArray[np.float32], rows: int, placeholder: int) -> Tensor:
    """The rows that transformers puts in place of so many placeholders: (rows, hidden)."""
    reference: Any = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder)
    seen: list[Tensor] = []

    def look(_: object, arguments: object, named: dict[str, Tensor]) -> None:
        seen.append(named["inputs_embeds"][0])

    text = reference.eval().model.language_model
    text.register_forward_pre_hook(look, with_kwargs=True)
    ids = torch.tensor([[5, *[placeholder] * rows, 6]])
    reference(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs([samples]))
    return seen[0][1:-1]


def embedded(model: AudioModel, samples: NDArray[np.float32]) -> NDArray[np.float32]:
    features = AudioPreprocessor(model.audio.features).features(as_read(samples))
    frames = model.audio.features.frames_of(len(samples) / RATE)
    (made,) = model.steps(DecodedAudio(features, frames))
    assert made is not None
    assert len(made.data) <= model.embedding_bytes
    return np.frombuffer(made.data, np.float32).reshape(made.tokens, made.hidden)


@pytest.mark.parametrize("seconds", SECONDS)
def test_rows_are_those_of_transformers(
    folder: Path, model: AudioModel, card: PromptAudio, seconds: float
) -> None:
    samples = tones(seconds, seed=round(seconds * 10))
    mask = inputs([samples])["feature_attention_mask"].sum(-1)
    lengths: Any = transformers.Qwen2AudioEncoder._get_feat_extract_output_lengths
    rows = card.rows(seconds)
    assert rows == int(lengths(None, mask)[1])
    ours, theirs = embedded(model, samples), spliced(folder, samples, rows, card.placeholder)
    assert ours.shape == (rows, model.width)
    assert np.abs(ours - theirs.numpy()).max() < 2e-5 * float(theirs.std())


def test_silence_behind_audio_is_not_attended_to(model: AudioModel) -> None:
    samples = tones(1.0)
    features = AudioPreprocessor(model.audio.features).features(samples)
    short, long = (
        model.tower(torch.as_tensor(features), model.audio.features.frames_of(seconds))
        for seconds in (1.0, 2.0)
    )
    assert len(short) == 25
    assert (short - long[:25]).abs().max() > 0.01 * short.std()


def encode(
    folder: Path, seconds: Sequence[float], *, messages: bool = True, audio: bool = True
) -> EncodedPrompt:
    words = read_model_tokenizer(folder, audio=read_prompt_audio(folder) if audio else None)
    headers = tuple(
        MediumHeader(
            digest=bytes([index]) * 32,
            width=0,
            height=0,
            audio=AudioWindow(format="wav", seconds=each),
        )
        for index, each in enumerate(seconds)
    )
    parts = [part for i in range(len(seconds)) for part in (MessagePart(medium=i), _text(i))]
    turn = ChatMessage(role="user", content="", parts=tuple(parts))
    request = EncodeRequest(
        request_id=RequestId("1"),
        model=ModelName("m"),
        messages=(turn,) if messages else None,
        prompt=None if messages else f"Listen {PLACEHOLDER} now",
        media=headers,
        deadline_unix_ms=0,
    )
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=1000)
    (made,) = encoder.encode([request])
    if isinstance(made, EngineError):
        raise made
    return made


def _text(index: int) -> MessagePart:
    return MessagePart(text=f"What is {index}?")


def test_placeholders_follow_from_durations(folder: Path, card: PromptAudio) -> None:
    made = encode(folder, (0.5, 1.7))
    words = read_model_tokenizer(folder).tokenizer
    text = (
        f"<|im_start|>user\nAudio 1: <|audio_bos|>{PLACEHOLDER * card.rows(0.5)}<|audio_eos|>\n"
        f"What is 0?Audio 2: <|audio_bos|>{PLACEHOLDER * card.rows(1.7)}<|audio_eos|>\n"
        "What is 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = list(unpack_ids(made.token_ids))
    assert ids == words.encode(text, add_special_tokens=False).ids
    for span, rows in zip(made.media, (12, 42), strict=True):
        assert ids[span.start : span.start + span.tokens] == [card.placeholder] * rows
        assert span.rows == rows
    assert made.media[0].key != encode(folder, (0.51,)).media[0].key
    assert encode(folder, (0.5,), messages=False).media[0].rows == 12


@pytest.mark.parametrize(
    ("seconds", "complaint"),
    [
        ((1.0, WINDOW_S + 0.1), rf"takes {WINDOW_S + 0.1:g} s; this model takes {WINDOW_S} s"),
        ((1.0, 0.01), r"takes 0\.01 s, which is too short"),
    ],
)
def test_audio_of_other_durations_is_refused(
    folder: Path, seconds: tuple[float, ...], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        encode(folder, seconds)
    assert caught.value.param == "media.1"


def test_a_model_without_audio_refuses_it(folder: Path) -> None:
    with pytest.raises(Unsupported, match="takes no audio in a prompt") as caught:
        encode(folder, (1.0,), audio=False)
    assert caught.value.param == "media.0"
    with pytest.raises(InvalidRequest, match="the text has 1 placeholders"):
        encode(folder, (1.0, 1.0), messages=False)


async def test_encoders_refuse_audio_that_has_no_rows_or_too_many(folder: Path) -> None:
    broker = MemoryBroker()
    chosen = replace(QUICK, encoder=replace(EncoderConfig(), model_path=str(folder)))
    async with (
        running(EncoderService, MemoryTransport(broker), settings=chosen),
        client_bus(MemoryTransport(broker)) as bus,
    ):
        for start_s, seconds, complaint in (
            (0.0, 1e-9, "too short"),
            (2.0, 1.0, "too short"),
            (0.0, WINDOW_S + 0.1, f"this model takes {WINDOW_S} s"),
        ):
            request = EncodeImage(
                request_id=new_request_id(),
                model=ModelName("antiphon-small"),
                image=b"not read",
                audio=AudioWindow(format="wav", start_s=start_s, seconds=seconds),
                deadline_unix_ms=deadline_in(10.0, SystemClock()),
            )
            with pytest.raises(InvalidRequest, match=complaint):
                await bus.call(ENCODE_IMAGE, request, timeout_s=10, encoder=InstanceId("encoder-0"))


def test_the_config_of_qwen2_audio_7b_is_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "audio_config": {
            "activation_function": "gelu",
            "d_model": 1280,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "max_source_positions": 1500,
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 128,
        },
        "audio_token_index": 151646,
        "model_type": "qwen2_audio",
        "text_config": {
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "intermediate_size": 11008,
            "max_position_embeddings": 8192,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-5,
            "sliding_window": 32768,
            "torch_dtype": "bfloat16",
            "vocab_size": 156032,
        },
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    features = {"feature_size": 128, "hop_length": 160, "n_fft": 400, "sampling_rate": 16000}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(features))
    card, audio = read_card(tmp_path), read_prompt_audio(tmp_path)
    assert (card.hidden_size, card.layers, card.kv_heads, card.vocabulary_size) == (
        *(4096, 32, 32),
        156032,
    )
    assert audio is not None
    assert (audio.placeholder, audio.rows(30.0)) == (151646, 750)
    change_config(tmp_path, audio_config={"num_mel_bins": 80})
    with pytest.raises(ConfigError, match="num_mel_bins = 80, and feature_size = 128"):
        read_prompt_audio(tmp_path)
