"""Videos of Qwen-VL and GLM-4V against transformers: frames, sizes, prompts, rows.

Its processors of videos need torchvision, which is not there: of Qwen3-VL's and GLM-4V's the parts
that do not are called; of Qwen2-VL's the documented algorithm is computed again.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import groupby
from math import floor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.support.llava import picture
from tests.support.qwen_vl import (
    GLM_SPECIAL,
    PLACEHOLDER_ID,
    VIDEO_PROCESSOR,
    video_patches,
    write_glm4v,
    write_qwen2_vl,
    write_qwen3_vl,
    write_qwen25_vl,
    write_qwen35,
)
from tests.support.smolvlm import write_smolvlm
from tests.support.towers import check_rows, opened
from tests.support.worker import limits
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm4v.video_processing_glm4v import smart_resize as smart_resize_glm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    smart_resize as smart_resize_image,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.grid_videos import GridVideos
from antiphon.model_card.vision.videos import FrameSampling, SecondSampling
from antiphon.model_card.vision.vision_card import read_vision, videos_of
from antiphon.model_worker.batching.media import check_media
from antiphon.model_worker.batching.positions import media_positions
from antiphon.model_worker.batching.state import placeholders
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.claim import Claim, PixelLimits, VideoHeader
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.frames import pack_frames
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import Medium, MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.encoder.model import VisionModel

WRITERS = {
    "qwen2.5-vl": write_qwen25_vl,
    "qwen2-vl": write_qwen2_vl,
    "qwen3-vl": write_qwen3_vl,
    "qwen3.5": write_qwen35,
    "glm4v": write_glm4v,
}
CLAIM = Claim(address="a:1", token="00", size_bytes=1, digest=bytes(32), expires_unix_ms=0)
SIZE = 60, 44


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("videos"))


def card_of(folder: Path) -> GridVideos:
    card = videos_of(read_vision(folder))
    assert isinstance(card, GridVideos)
    return card


def frames(count: int, size: tuple[int, int] = SIZE) -> bytes:
    return pack_frames([picture(number, *size) for number in range(count)])


def headers() -> list[VideoHeader]:
    drawn = np.random.default_rng(5)
    lengths = [2, 3, 4, 5, 7, *drawn.integers(8, 5000, 60).tolist()]
    return [
        VideoHeader(frames=each, fps=float(drawn.choice([1, 12.5, 24, 29.97, 60])))
        for each in lengths
    ]


def test_frames_of_qwen3_are_those_of_transformers() -> None:
    ours = FrameSampling(ends=True, most=64)
    theirs: Any = SimpleNamespace(fps=2, min_frames=4, max_frames=64)
    for video in headers():
        metadata = SimpleNamespace(total_num_frames=video.frames, fps=video.fps)
        right = cast("Any", Qwen3VLVideoProcessor.sample_frames)(theirs, metadata)
        assert ours.indices(video) == right.tolist(), video


@pytest.mark.parametrize("fps", [2, 0.3, 1.7, 0.03])
def test_frames_of_glm_are_those_of_transformers(fps: float) -> None:
    ours = SecondSampling(fps=fps, seconds=40, most=1000)
    theirs: Any = SimpleNamespace(fps=fps, max_duration=40)
    for video in headers():
        metadata = SimpleNamespace(
            total_num_frames=video.frames, fps=video.fps, duration=video.frames / video.fps
        )
        right = cast("Any", Glm4vVideoProcessor.sample_frames)(theirs, metadata).tolist()
        found = ours.indices(video)
        assert found + found[-1:] * (len(found) % 2) == right, video
        assert ours.counted(found) == len(right)
        # Fewer frames than the model's own are spread as in a longer video.
        few = ours.within(PixelLimits(frames=2)).indices(video)
        assert few in ([0, video.frames - 1], found), video


def test_frames_of_qwen2_are_spread_as_documented() -> None:
    """As many as `fps` says, within limits, in pairs; each begins an equal part of the video."""
    ours = FrameSampling(most=65)
    for video in headers():
        wanted = min(max(video.frames / video.fps * 2, 4), 64, video.frames)
        count = floor(wanted / 2) * 2
        right = np.arange(count) * (np.float64(video.frames) / count)
        assert ours.indices(video) == right.astype(np.float32).astype(int).tolist(), video
    assert ours.indices(VideoHeader(frames=1, fps=1)) == [0]


def test_sizes_of_qwen3_and_glm_are_those_of_transformers() -> None:
    sizes = GridSizes(
        patch=16, merge=2, pixels_min=4096, pixels_max=25_165_824, grows=True, joint=True
    )
    drawn = np.random.default_rng(3).integers((2, 5, 5), (768, 900, 900), (60, 3)).tolist()
    for count, width, height in [*drawn, (2, 20, 20), (5, 10, 300)]:
        if max(width, height) > 200 * min(width, height):
            continue
        down, across = smart_resize(
            count, height, width, factor=32, min_pixels=4096, max_pixels=25_165_824
        )
        assert sizes.scaled(width, height, count) == (across, down), (count, width, height)
        down, across = smart_resize_glm(
            count, height, width, factor=32, min_pixels=4096, max_pixels=25_165_824
        )
        assert sizes.scaled(width, height, count) == (across, down), (count, width, height)


def test_videos_without_settings_of_their_own_have_a_number_of_tokens(tmp_path: Path) -> None:
    """As in Qwen's tools, whose limit of all frames they divide by the number of pairs."""
    folder = write_qwen2_vl(tmp_path)
    (folder / "video_preprocessor_config.json").unlink()
    videos, token = card_of(folder), 64
    for seconds in (2, 30, 60, 120, 384, 3600):
        video = VideoHeader(frames=25 * seconds, fps=25.0)
        (tokens,) = videos.seen(1920, 1080, video).pieces
        count = len(videos.sampling.indices(video))
        assert count == min(2 * seconds, 768)
        most = max(min(768, 24_576 * 2 / count), 1)
        assert 0.8 * most * count / 2 < int(tokens) <= most * count / 2, seconds
        if most > 1.05 * 128:
            across, down = videos.sizes.scaled(1920, 1080, count)
            size = smart_resize_image(
                1080, 1920, factor=8, min_pixels=128 * token, max_pixels=floor(most * token)
            )
            assert (down, across) == size
    # A request's own numbers are those of each frame.
    asked = videos.within(PixelLimits(least=140 * token, most=500 * token))
    (tokens,) = asked.seen(1920, 1080, VideoHeader(frames=25 * 384, fps=25.0)).pieces
    assert int(tokens) > 384 * 400


@pytest.mark.parametrize("count", [1, 2, 5])
def test_embeddings_are_those_of_transformers(count: int, folder: Path) -> None:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    reference = getattr(transformers, architecture).from_pretrained(folder).eval()
    model, video = opened(folder), VideoHeader(frames=count, fps=2, chosen=True)
    rows, decoded = embedded(model, frames(count), SIZE, video)
    assert model.videos is not None
    pixels = torch.as_tensor(model.videos.normalized(decoded))
    with torch.inference_mode():
        features = reference.model.get_video_features(**video_patches(pixels))
    stacked = getattr(features, "deepstack_features", ())
    parts = [torch.cat([*each]) if isinstance(each, tuple) else each for each in stacked]
    parts.insert(0, torch.cat([*features.pooler_output]))
    check_rows(rows, torch.cat(parts, dim=-1))
    assert len(rows) == model.videos.tokens(*SIZE, video, None)
    if count > 2:  # each pair of frames is embedded alone
        pair = embedded(model, frames(2), SIZE, VideoHeader(frames=2, fps=2, chosen=True))[0]
        same = card_of(folder).sizes.scaled(*SIZE, 5) == card_of(folder).sizes.scaled(*SIZE, 2)
        assert not same or np.array_equal(rows[: len(pair)], pair)


def embedded(
    model: VisionModel, data: bytes, size: tuple[int, int], video: VideoHeader
) -> tuple[np.ndarray, np.ndarray]:
    assert model.videos is not None
    decoded = model.videos.decoded(data, *size, video)
    *_, made = model.steps(decoded)
    assert made is not None
    return np.frombuffer(made.data, "<f4").reshape(made.tokens, made.hidden), decoded.pixels


def prompt(folder: Path, media: Sequence[MediumHeader], text: str) -> EncodedPrompt:
    words = read_model_tokenizer(folder, vision=read_vision(folder))
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=10**6)
    (result,) = encoder.encode(
        [
            EncodeRequest(
                request_id=RequestId("1"),
                model=ModelName("m"),
                prompt=text,
                media=tuple(media),
                deadline_unix_ms=0,
            )
        ]
    )
    if isinstance(result, Exception):
        raise result
    return result


def plain(folder: Path, *kinds: str) -> tuple[str, ...]:
    """What stands in a text for media of these kinds."""
    glm = "glm4v" in (folder / "config.json").read_text()
    text = "<|begin_of_{0}|><|{0}|><|end_of_{0}|>" if glm else PLAIN
    return tuple(map(text.format, kinds))


PLAIN = "<|vision_start|><|{}_pad|><|vision_end|>"
IMAGE = MediumHeader(digest=bytes(32), width=40, height=33)
VIDEO = MediumHeader(digest=bytes(32), width=60, height=44, video=VideoHeader(frames=50, fps=12.5))
MIXED = "Look {} then {} now, what is {}?"


def test_prompts_and_positions_are_those_of_transformers(folder: Path) -> None:
    """Images around a video; text behind it goes on behind the largest position, as published.

    This version of transformers leaves out the times of Qwen2-VL's and Qwen2.5-VL's videos there,
    which its earlier ones and the paper do not: of these the positions of media are compared.
    """
    text = MIXED.format(*plain(folder, "image", "video", "image"))
    encoded = prompt(folder, [IMAGE, VIDEO, IMAGE], text)
    ids = np.array(unpack_ids(encoded.token_ids), np.int32)
    media = tuple(Medium(span=span, width=1, height=1, claim=CLAIM) for span in encoded.media)
    check_media(media, ids, limits(media_width=1, media_grids=True))
    places = [placeholders(each, ids) for each in media]
    found, offset = media_positions(zip(encoded.media, places, strict=True))
    rest = np.tile(np.arange(found.shape[1], len(ids)) + offset, (3, 1))
    found = np.concatenate([found, rest], axis=1)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder).model
    card, vision = card_of(folder), read_vision(folder)
    assert vision is not None
    assert VIDEO.video is not None
    indices = card.sampling.indices(VIDEO.video)
    across, down = card.sizes.scaled(60, 44, len(indices))
    grid = [len(indices) // 2, down // card.sizes.patch, across // card.sizes.patch]
    columns, (tokens,) = vision.columns(40, 33), vision.pieces(40, 33)
    of_image = [1, 2 * int(tokens) // columns, 2 * columns]
    kinds = kinds_of(ids, glm="Glm4v" in architecture)
    more = {}
    if card.tokens_per_second is not None:
        rate = len(indices) / VIDEO.video.frames * VIDEO.video.fps
        more = {"second_per_grid_ts": torch.tensor([2 / rate])}
    right, _ = model.get_rope_index(
        torch.as_tensor(ids)[None].long(),
        torch.as_tensor(kinds)[None],
        torch.tensor([of_image, of_image]),
        torch.tensor([grid]),
        **more,
    )
    expected = right[:, 0].numpy()
    if card.stamp is None:
        end = encoded.media[1].start + encoded.media[1].tokens
        found, expected = found[:, :end], expected[:, :end]
    np.testing.assert_array_equal(found, expected)
    if card.stamp is not None:
        # One grid for each pair of frames, with its seconds.
        shown = read_model_tokenizer(folder).tokenizer.decode(
            ids.tolist(), skip_special_tokens=False
        )
        write = written_by_glm if "Glm4v" in architecture else written_by_qwen3
        assert f" then {write(indices, 12.5, grid)} now" in shown
        runs = [key for key, _ in groupby(kinds.tolist()) if key]
        assert runs == [1, *[2] * grid[0], 1]


def kinds_of(ids: np.ndarray, *, glm: bool) -> np.ndarray:
    """Which tokens are those of images (1) and videos (2), as transformers says."""
    if not glm:
        return np.select([ids == PLACEHOLDER_ID, ids == PLACEHOLDER_ID + 1], [1, 2], 0)
    start, end = (1024 + GLM_SPECIAL.index(f"<|{each}_of_video|>") for each in ("begin", "end"))
    theirs: Any = SimpleNamespace(
        image_token_id=PLACEHOLDER_ID, video_start_id=start, video_end_id=end
    )
    (kinds,) = Glm4vProcessor.create_mm_token_type_ids(theirs, [ids.tolist()])
    return np.array(kinds)


def written_by_qwen3(indices: list[int], fps: float, grid: list[int]) -> str:
    times = cast("Any", Qwen3VLProcessor._calculate_timestamps)(None, indices, fps)
    pad = "<|video_pad|>" * (grid[1] * grid[2] // 4)
    return "".join(f"<{each:.1f} seconds><|vision_start|>{pad}<|vision_end|>" for each in times)


def written_by_glm(indices: list[int], fps: float, grid: list[int]) -> str:
    theirs: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2), image_token="<|image|>"
    )
    theirs.replace_frame_token_id = partial(Glm4vProcessor.replace_frame_token_id, theirs)
    metadata = SimpleNamespace(fps=fps, timestamps=[each / fps for each in indices])
    inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}
    written = Glm4vProcessor.replace_video_token(theirs, inputs, 0)
    return f"<|begin_of_video|>{written}<|end_of_video|>"


def test_text_goes_on_behind_the_last_time_of_a_video(tmp_path: Path) -> None:
    folder = write_qwen25_vl(tmp_path)
    video = VideoHeader(frames=24, fps=4.0)  # six seconds, of which two frames each are seen
    header = msgspec.structs.replace(VIDEO, video=video)
    encoded = prompt(folder, [header], f"{PLAIN.format('video')} why")
    (span,) = encoded.media
    assert (span.times, span.step) == (6, 4.0)
    places = np.arange(span.start, span.start + span.tokens, dtype=np.int32)
    positions, offset = media_positions([(span, places)])
    assert positions[0, -1] == span.start + 20
    assert span.start + span.tokens + offset == span.start + 21


def test_keys_tell_selections_apart(folder: Path) -> None:
    (text,) = plain(folder, "video")

    def key(limits: PixelLimits | None = None, **fields: Any) -> bytes:
        assert VIDEO.video is not None
        video = msgspec.structs.replace(VIDEO.video, **fields)
        header = msgspec.structs.replace(VIDEO, video=video, limits=limits)
        return prompt(folder, [header], text).media[0].key

    keys = [
        key(),
        key(PixelLimits(fps=1.0)),
        key(PixelLimits(frames=4)),
        key(PixelLimits(most=20 * 64)),
        key(fps=6.25),
        key(frames=49),
    ]
    assert len(set(keys)) == len(keys)
    assert key(PixelLimits(fps=2.0)) == key(), "the model's own"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (PixelLimits(frames=17), "max_frames = 17: must be from 2 to 16, the model's"),
        (PixelLimits(frames=1), "max_frames = 1: must be from 2 to 16"),
        (PixelLimits(most=10**9), "max_pixels = 1000000000: must be at most"),
    ],
)
def test_limits_that_no_video_can_have_are_named(
    limits: PixelLimits, reason: str, folder: Path
) -> None:
    header = msgspec.structs.replace(VIDEO, limits=limits)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        prompt(folder, [header], *plain(folder, "video"))
    assert caught.value.param == "mm_processor_kwargs"


def test_media_in_another_order_than_their_placeholders_are_refused(folder: Path) -> None:
    text = "".join(plain(folder, "image", "video"))
    with pytest.raises(InvalidRequest, match="not in the order of their placeholders"):
        prompt(folder, [VIDEO, IMAGE], text)
    with pytest.raises(InvalidRequest, match="has 1 placeholders"):
        prompt(folder, [VIDEO, VIDEO], *plain(folder, "video"))


def test_a_list_of_more_frames_than_are_seen_is_refused(folder: Path) -> None:
    video = VideoHeader(frames=17, fps=2, chosen=True)
    header = msgspec.structs.replace(VIDEO, video=video)
    with pytest.raises(InvalidRequest, match="has 17 frames; the limit is 16") as caught:
        prompt(folder, [header], *plain(folder, "video"))
    assert caught.value.param == "media.0"


def test_a_model_without_videos_refuses_them(tmp_path: Path) -> None:
    folder = write_smolvlm(tmp_path)
    with pytest.raises(Unsupported, match="takes no videos"):
        prompt(folder, [VIDEO], "<image>")


def test_settings_that_are_not_supported_are_named(tmp_path: Path) -> None:
    folder = write_qwen3_vl(tmp_path)
    for fields, complaint in (
        ({"patch_size": 14}, "videos have patches of 14 pixels"),
        ({"num_frames": 8}, "num_frames"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame"),
        ({"fps": -1.0}, "fps must be above 0"),
        ({"min_frames": 20}, "min_frames"),
    ):
        recipe = json.dumps({**VIDEO_PROCESSOR, **fields})
        (folder / "video_preprocessor_config.json").write_text(recipe)
        with pytest.raises(ConfigError, match=complaint):
            read_vision(folder)


@pytest.mark.parametrize(
    ("data", "video", "reason"),
    [
        (frames(3), VideoHeader(frames=4, fps=2, chosen=True), "fewer frames than its header"),
        (
            frames(2, (61, 44)),
            VideoHeader(frames=2, fps=2, chosen=True),
            "61 x 44 pixels, and 60 x 44",
        ),
        (pack_frames([b"x", b"y"]), VideoHeader(frames=2, fps=2, chosen=True), "not an image"),
        (frames(1)[:40], VideoHeader(frames=2, fps=2, chosen=True), "not a list of frames"),
    ],
)
def test_frames_that_are_not_what_the_header_says_are_refused(
    data: bytes, video: VideoHeader, reason: str, folder: Path
) -> None:
    model = opened(folder)
    assert model.videos is not None
    with pytest.raises(InvalidRequest, match=reason):
        model.videos.decoded(data, *SIZE, video)
