"""Videos of InternVL and LLaVA-OneVision against transformers: frames, pixels, prompts and rows.

Its processors of videos need torchvision, which is not there: their rules are computed again.
"""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.internvl import PLACEHOLDER, write_internvl
from tests.support.llava import picture
from tests.support.llava_next import write_llava_onevision
from tests.support.towers import check_rows, opened
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.frame_videos import FrameVideos
from antiphon.model_card.vision.videos import EvenSampling
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
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZE = 60, 44
IMAGE = MediumHeader(digest=bytes(32), width=40, height=33)
VIDEO = MediumHeader(digest=bytes(32), width=60, height=44, video=VideoHeader(frames=50, fps=12.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_internvl(tmp_path_factory.mktemp("internvl"))


def card_of(folder: Path) -> FrameVideos:
    card = videos_of(read_vision(folder))
    assert isinstance(card, FrameVideos)
    return card


def prompt(folder: Path, media: Sequence[MediumHeader], text: str) -> EncodedPrompt:
    words = read_model_tokenizer(folder, vision=read_vision(folder))
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=10**6)
    request = EncodeRequest(
        request_id=RequestId("1"),
        model=ModelName("m"),
        prompt=text,
        media=tuple(media),
        deadline_unix_ms=0,
    )
    (result,) = encoder.encode([request])
    if isinstance(result, Exception):
        raise result
    return result


def test_frames_are_the_middle_ones_of_equal_parts() -> None:
    """By the rule of transformers' processor, with its shift by half a part.

    It computes places in float32, with roundings that depend on the length of a machine's vectors.
    """

    def spread(total: int, count: int) -> list[int]:
        places = (np.arange(count) + 0.5) * (total / count)
        return places.astype(np.float32).astype(int).tolist()

    drawn, ours = np.random.default_rng(5), EvenSampling()
    for frames in [1, 2, 7, 8, 9, *drawn.integers(10, 50_000, 60).tolist()]:
        video = VideoHeader(frames=frames, fps=float(drawn.choice([1, 12.5, 24, 29.97, 60])))
        for count in (8, 13, 32):
            found = msgspec.structs.replace(ours, frames=count).indices(video)
            assert found == spread(frames, min(count, frames)), video
        count = min(max(1, int(frames / video.fps * 1.5)), frames, ours.most)
        assert ours.within(PixelLimits(fps=1.5)).indices(video) == spread(frames, count), video
        assert ours.within(PixelLimits(frames=3)).indices(video) == spread(frames, min(3, frames))


def test_pixels_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """A frame is what an image of one tile is."""
    pictures = [picture(number, *SIZE) for number in range(3)]
    theirs: Any = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=False)
    images = [Image.open(io.BytesIO(each)) for each in pictures]
    expected = np.asarray(theirs(images, return_tensors="np")["pixel_values"])
    model, video = opened(folder), VideoHeader(frames=3, fps=2, chosen=True)
    assert model.videos is not None
    decoded = model.videos.decoded(pack_frames(pictures), *SIZE, video)
    pixels = model.videos.normalized(decoded.pixels)
    np.testing.assert_allclose(pixels, expected, rtol=0, atol=2e-6)
    *turns, made = model.steps(decoded)
    assert turns == [None, None], "other media have their turns between frames"
    assert made is not None
    reference: Any = transformers.InternVLForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        right = reference.model.get_image_features(torch.as_tensor(pixels)).pooler_output
    rows = np.frombuffer(made.data, "<f4").reshape(made.tokens, made.hidden)
    check_rows(rows, right.flatten(0, 1))
    assert len(rows) == model.videos.tokens(*SIZE, video, None) == 3 * card_of(folder).frame_tokens


def test_pooled_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    """LLaVA-OneVision halves the grid of a frame, and has one row more behind all of them."""
    folder = write_llava_onevision(tmp_path)
    pictures = [picture(number, *SIZE) for number in range(3)]
    model, video = opened(folder), VideoHeader(frames=3, fps=2, chosen=True)
    assert model.videos is not None
    decoded = model.videos.decoded(pack_frames(pictures), *SIZE, video)
    images = [Image.open(io.BytesIO(each)).resize((28, 28), 3) for each in pictures]
    expected = (np.stack([np.asarray(each) for each in images]) / 255 - 0.5) / 0.5
    pixels = model.videos.normalized(decoded.pixels)
    np.testing.assert_allclose(pixels, expected.transpose(0, 3, 1, 2), rtol=0, atol=2e-6)
    *turns, made = model.steps(decoded)
    assert turns == [None, None]
    assert made is not None
    reference: Any = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    with torch.inference_mode():
        right = reference.eval().model.get_video_features(
            torch.as_tensor(pixels)[None],
            vision_feature_layer=reference.config.vision_feature_layer,
            vision_feature_select_strategy=reference.config.vision_feature_select_strategy,
        )
    rows = np.frombuffer(made.data, "<f4").reshape(made.tokens, made.hidden)
    check_rows(rows, right.pooler_output[0])
    card = card_of(folder)
    assert len(rows) == model.videos.tokens(*SIZE, video, None) == card.rows(3)
    # The prompt, of as many frames as are seen of a file.
    seen = len(card.sampling.indices(cast("VideoHeader", VIDEO.video)))
    theirs: Any = SimpleNamespace(num_image_tokens=16, video_token="<video>")
    inputs: Any = {"pixel_values_videos": [np.zeros((seen, 3, 28, 28))]}
    text = LlavaOnevisionProcessor.replace_video_token(theirs, inputs, 0)
    encoded = prompt(folder, [VIDEO], "Look <video> now")
    assert [*unpack_ids(encoded.token_ids)] == read_model_tokenizer(folder).tokenizer.encode(
        f"Look {text} now", add_special_tokens=False
    ).ids
    assert [span.rows for span in encoded.media] == [card.rows(32)]


def test_frames_of_llava_onevision_begin_equal_parts(tmp_path: Path) -> None:
    sampling = card_of(write_llava_onevision(tmp_path)).sampling
    for frames in (1, 31, 32, 33, 500, 7001):
        found = sampling.indices(VideoHeader(frames=frames, fps=25))
        count = min(frames, 32)
        right = (np.arange(count) * (frames / count)).astype(np.float32).astype(int)
        assert found == right.tolist()


def test_a_prompt_is_that_of_transformers(folder: Path) -> None:
    text = f"Look {PLACEHOLDER} then <video> now, what is {PLACEHOLDER}?"
    encoded = prompt(folder, [IMAGE, VIDEO, IMAGE], text)
    theirs: Any = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token=PLACEHOLDER,
        image_seq_length=4,
    )
    inputs: Any = {"pixel_values_videos": [np.zeros((8, 3, 28, 28))], "num_patches": [3]}
    vision = read_vision(folder)
    assert vision is not None
    tiles = cast("int", vision.pieces(40, 33)[1]) // 4
    image = InternVLProcessor.replace_image_token(theirs, {"num_patches": [tiles]}, 0)
    video = InternVLProcessor.replace_video_token(theirs, inputs, 0)
    right = f"Look {image} then {video} now, what is {image}?"
    tokenizer = read_model_tokenizer(folder).tokenizer
    assert [*unpack_ids(encoded.token_ids)] == tokenizer.encode(right, add_special_tokens=False).ids
    spans = encoded.media
    assert [span.rows for span in spans] == [4 * tiles, 32, 4 * tiles]
    assert [span.columns for span in spans] == [0, 0, 0]


def test_keys_tell_selections_apart(folder: Path) -> None:
    def key(limits: PixelLimits | None = None, **fields: Any) -> bytes:
        assert VIDEO.video is not None
        video = msgspec.structs.replace(VIDEO.video, **fields)
        header = msgspec.structs.replace(VIDEO, video=video, limits=limits)
        return prompt(folder, [header], "<video>").media[0].key

    keys = [key(), key(PixelLimits(fps=1.0)), key(PixelLimits(frames=4)), key(frames=49)]
    assert len(set(keys)) == len(keys)
    assert key(PixelLimits(frames=128)) == key(), "the model's own"


@pytest.mark.parametrize(
    ("limits", "frames", "reason"),
    [
        (PixelLimits(frames=129), 50, "max_frames = 129: must be from 2 to 128, the model's"),
        (PixelLimits(most=10**6), 50, "no min_pixels and max_pixels"),
        (None, 129, "has 129 frames; the limit is 128"),
    ],
)
def test_what_cannot_be_seen_is_named(
    limits: PixelLimits | None, frames: int, reason: str, folder: Path
) -> None:
    video = VideoHeader(frames=frames, fps=2, chosen=limits is None)
    header = msgspec.structs.replace(VIDEO, video=video, limits=limits)
    with pytest.raises(InvalidRequest, match=reason):
        prompt(folder, [header], "<video>")


def test_settings_of_videos_are_those_of_their_file(tmp_path: Path) -> None:
    write_internvl(tmp_path)
    file, size = tmp_path / "video_preprocessor_config.json", {"height": 28, "width": 28}
    plain = opened(tmp_path).videos
    file.write_text(json.dumps({"size": size, "num_frames": 12, "image_mean": [0.1, 0.2, 0.3]}))
    assert card_of(tmp_path).sampling == EvenSampling(frames=12)
    found = opened(tmp_path).videos
    assert plain is not None
    assert found is not None
    assert found.recipe.sampling == EvenSampling(frames=12)
    assert (found.recipe.mean, plain.recipe.mean[0]) == ((0.1, 0.2, 0.3), 0.48145466)
    for shift, middle in ((True, True), (False, False), (0, False)):
        file.write_text(json.dumps({"size": size, "initial_shift": shift}))
        assert card_of(tmp_path).sampling == EvenSampling(middle=middle)
    file.write_text(json.dumps({"size": size, "initial_shift": 0.5}))
    with pytest.raises(ConfigError, match=r"initial_shift = 0\.5: must be true or false"):
        opened(tmp_path)
    file.write_text(json.dumps({"size": {"height": 30, "width": 30}}))
    with pytest.raises(ConfigError, match="makes images of 30 x 30 pixels"):
        opened(tmp_path)
