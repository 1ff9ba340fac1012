"""Videos of SmolVLM against transformers: frames, pixels, prompts and rows.

Its processor of videos needs torchvision, which is not there: of it the rules for frames and
prompts are called, and pixels are compared with those of its processor of images.
"""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.models.test_frame_videos import card_of, prompt
from tests.support.llava import picture
from tests.support.smolvlm import (
    FAKE,
    PLACEHOLDER,
    PROCESSOR,
    TEMPLATE,
    TILE_TOKENS,
    WHOLE,
    write_smolvlm,
)
from tests.support.towers import check_rows, opened
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.video_utils import VideoMetadata

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.frame_videos import in_words
from antiphon.model_card.vision.videos import SkippingSampling
from antiphon.model_card.vision.vision_card import read_vision, videos_of
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.claim import PixelLimits, VideoHeader
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.frames import pack_frames
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import ChatMessage, EncodeRequest, MessagePart

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 60, 44
SAMPLING = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 42}}
SEEN = VideoHeader(frames=2500, fps=25.0)
VIDEO = MediumHeader(digest=bytes(32), width=60, height=44, video=SEEN)
IMAGE = MediumHeader(digest=bytes(32), width=20, height=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_smolvlm(tmp_path_factory.mktemp("smolvlm"))
    settings = {**PROCESSOR, "video_sampling": SAMPLING}
    (made / "preprocessor_config.json").write_text(json.dumps(settings))
    return made


def spread(video: VideoHeader, most: int = 64, fps: float = 1.0) -> list[int]:
    """The frames that transformers' processor chooses."""
    metadata = VideoMetadata(video.frames, fps=video.fps, duration=video.frames / video.fps)
    chosen: Any = SmolVLMVideoProcessor.sample_frames(
        cast("Any", None), metadata, num_frames=most, fps=fps
    )
    return chosen.tolist()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> str:
    """What transformers' processor writes for `SEEN`. Its package for numbers is not there."""
    monkeypatch.setattr(processing_smolvlm, "num2words", in_words)
    indices = spread(SEEN)
    seconds = SEEN.frames / SEEN.fps
    metadata = VideoMetadata(SEEN.frames, fps=SEEN.fps, duration=seconds, frames_indices=indices)
    theirs: Any = SimpleNamespace(
        image_seq_len=TILE_TOKENS,
        image_token=PLACEHOLDER,
        fake_image_token=FAKE,
        global_image_token=WHOLE,
    )
    inputs: Any = {"pixel_values": np.zeros((1, len(indices))), "video_metadata": [metadata]}
    return processing_smolvlm.SmolVLMProcessor.replace_video_token(theirs, inputs, 0)


def test_frames_are_those_of_transformers() -> None:
    drawn, ours = np.random.default_rng(5), SkippingSampling()
    for frames in [1, 2, 7, 8, 9, *drawn.integers(10, 50_000, 100).tolist()]:
        video = VideoHeader(frames=frames, fps=float(drawn.choice([1, 12.5, 24, 29.97, 60])))
        assert ours.indices(video) == spread(video), video
        limited = ours.within(PixelLimits(fps=2.0, frames=7))
        assert limited.indices(video) == spread(video, 7, 2.0), video


def test_pixels_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """A frame is scaled in its own shape, and then to a tile, as an image that is not cut."""
    pictures = [picture(number, *SIZE) for number in range(3)]
    theirs: Any = SmolVLMImageProcessorPil(
        size=PROCESSOR["size"],  # which wins over that of videos
        max_image_size=PROCESSOR["max_image_size"],
        do_image_splitting=False,
    )
    images = [[Image.open(io.BytesIO(each)) for each in pictures]]
    expected = np.asarray(theirs(images, return_tensors="np")["pixel_values"])[0]
    model, video = opened(folder), VideoHeader(frames=3, fps=2, chosen=True)
    assert model.videos is not None
    decoded = model.videos.decoded(pack_frames(pictures), *SIZE, video)
    pixels = model.videos.normalized(decoded.pixels)
    np.testing.assert_allclose(pixels, expected, rtol=0, atol=2e-6)
    *turns, made = model.steps(decoded)
    assert turns == [None, None], "other media have their turns between frames"
    assert made is not None
    reference: Any = transformers.SmolVLMForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        right = reference.model.get_image_features(torch.as_tensor(pixels)[None]).pooler_output
    rows = np.frombuffer(made.data, "<f4").reshape(made.tokens, made.hidden)
    check_rows(rows, torch.cat([*right]).flatten(0, -2))
    assert len(rows) == model.videos.tokens(*SIZE, video, None) == 3 * TILE_TOKENS


def test_a_prompt_is_that_of_transformers(folder: Path, written: str) -> None:
    assert "sixty-four frames from a 0:01:40 [H:MM:SS] video" in written
    made = prompt(folder, [VIDEO], "Look: <video>And?")
    words = read_model_tokenizer(folder).tokenizer
    assert list(unpack_ids(made.token_ids)) == words.encode(f"Look: {written}And?").ids
    assert made.media[0].rows == 64 * TILE_TOKENS


@pytest.mark.parametrize("template", [TEMPLATE, processing_smolvlm.DEFAULT_CHAT_TEMPLATE])
@pytest.mark.parametrize("first", [True, False])
def test_a_chat_is_that_of_transformers_default_template(
    folder: Path, tmp_path: Path, written: str, template: str, first: bool
) -> None:
    """Also if the model's own template knows no videos."""
    (file := tmp_path / "template.jinja").write_text(template)
    words = read_model_tokenizer(folder, str(file), vision=read_vision(folder))
    kinds = ("video", "image") if first else ("image", "video")
    media = (VIDEO, IMAGE) if first else (IMAGE, VIDEO)
    parts = MessagePart(medium=0), MessagePart(text="Look"), MessagePart(medium=1)
    request = EncodeRequest(
        request_id=RequestId("1"),
        model=ModelName("m"),
        messages=(ChatMessage(role="user", content="Look", parts=parts),),
        media=media,
        deadline_unix_ms=0,
    )
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=10**6)
    (made,) = encoder.encode([request])
    assert isinstance(made, EncodedPrompt)
    shown = [{"type": kinds[0]}, {"type": "text", "text": "Look"}, {"type": kinds[1]}]
    (rendered,), _ = render_jinja_template(
        conversations=[[{"role": "user", "content": shown}]],
        chat_template=processing_smolvlm.DEFAULT_CHAT_TEMPLATE,
        add_generation_prompt=True,
    )
    tiles = processing_smolvlm.get_image_prompt_string(
        3, 3, TILE_TOKENS, FAKE, image_token=PLACEHOLDER, global_image_token=WHOLE
    )
    before, after = (text.replace("<image>", tiles) for text in rendered.split("<video>"))
    expected = f"{before}{written}{after}"
    right = words.tokenizer.encode(expected, add_special_tokens=False).ids
    assert list(unpack_ids(made.token_ids)) == right


def test_numbers_are_written_in_words() -> None:
    known = {0: "zero", 7: "seven", 12: "twelve", 20: "twenty", 64: "sixty-four", 90: "ninety"}
    assert {number: in_words(number) for number in known} == known
    assert len({in_words(number) for number in range(100)}) == 100


def test_what_cannot_be_seen_is_refused(folder: Path, tmp_path: Path) -> None:
    card = card_of(folder)
    with pytest.raises(InvalidRequest, match="max_frames = 65: must be from 2 to 64"):
        card.within(PixelLimits(frames=65))
    with pytest.raises(InvalidRequest, match="no min_pixels and max_pixels"):
        card.within(PixelLimits(most=500))
    with pytest.raises(InvalidRequest, match="the video has 65 frames; the limit is 64"):
        card.seen(*SIZE, VideoHeader(frames=65, fps=1, chosen=True))
    plain = write_smolvlm(tmp_path)
    assert videos_of(read_vision(plain)) is None, "its processor takes no videos"
    for settings, complaint in (
        ({**SAMPLING, "max_frames": 100}, "max_frames"),
        ({**SAMPLING, "fps": 0}, "fps"),
        ({**SAMPLING, "video_size": {}}, "video_size"),
    ):
        file = plain / "preprocessor_config.json"
        file.write_text(json.dumps({**PROCESSOR, "video_sampling": settings}))
        with pytest.raises(ConfigError, match=complaint):
            read_vision(plain)
