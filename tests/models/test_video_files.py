"""Files of videos: their frames are those that FFmpeg decodes, upright, and no others are taken."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from tests.support.qwen_vl import write_qwen3_vl
from tests.support.towers import opened
from tests.support.video_files import FPS, FRAMES, HEIGHT, WIDTH, av, written
from tests.support.wait import until

from antiphon.config.settings import EncoderConfig
from antiphon.encoder.cache import DecodeJob
from antiphon.encoder.decode_process import DecodeProcesses, DecodeSettings
from antiphon.encoder.preprocess import BICUBIC, PreprocessorConfig
from antiphon.encoder.videos import file_frames
from antiphon.gateway.media.video_header import read_video_header
from antiphon.wire.claim import VideoHeader
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

VIDEO = written()


@pytest.mark.parametrize("form", ["mp4", "mov"])
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_chosen_frames_are_those_of_the_file(codec: str, form: str) -> None:
    check_frames(written(codec, form))


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libsvtav1", "libx265"])
def test_frames_of_newer_codecs_are_decoded(codec: str) -> None:
    # SVT-AV1 gives the thread that calls it the priority of real time, if root does.
    before = os.sched_getscheduler(0)
    with ThreadPoolExecutor(1) as thread:
        check_frames(thread.submit(written, codec).result())
    assert os.sched_getscheduler(0) == before


def check_frames(data: bytes) -> None:
    header = read_video_header(data, 100)
    assert header == (WIDTH, HEIGHT, FRAMES, FRAMES / FPS)
    with av.open(io.BytesIO(data)) as container:
        right = [each.to_ndarray(format="rgb24") for each in container.decode(video=0)]
    indices = [0, 5, 6, 29]
    found = [np.asarray(each) for each in file_frames(data, indices)]
    np.testing.assert_array_equal(found, [right[index] for index in indices])


def test_frames_that_an_edit_list_hides_are_seen() -> None:
    data, cut = written("libx264"), io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(cut, "w", format="mp4") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is None:  # the last one, which has no data
                continue
            shift = round(1 / packet.time_base)  # a second
            packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
            container.mux(packet)
    with av.open(io.BytesIO(cut.getvalue())) as container:
        assert len([*container.decode(video=0)]) == FRAMES - FPS
    header = read_video_header(cut.getvalue(), 100)
    assert header.frames == FRAMES
    found = file_frames(cut.getvalue(), range(FRAMES))
    np.testing.assert_array_equal([*found], [*file_frames(data, range(FRAMES))])


def test_a_video_that_is_shown_turned_is_upright() -> None:
    data = bytearray(VIDEO)
    quarter = (0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # clockwise
    struct.pack_into(">9i", data, data.index(b"tkhd") + 4 + 40, *quarter)
    assert read_video_header(bytes(data), 100)[:2] == (HEIGHT, WIDTH)
    (plain,), (found,) = file_frames(VIDEO, [20]), file_frames(data, [20])
    np.testing.assert_array_equal(found, plain.transpose(Image.Transpose.ROTATE_270))


def test_frames_are_chosen_and_scaled_by_the_header(tmp_path: Path) -> None:
    videos = opened(write_qwen3_vl(tmp_path)).videos
    assert videos is not None
    header = VideoHeader(frames=FRAMES, fps=FPS)
    found = videos.decoded(VIDEO, WIDTH, HEIGHT, header)
    indices = [round(index * 29 / 5) for index in range(6)]  # two a second
    size = found.pixels.shape[2], found.pixels.shape[1]
    right = [each.resize(size, 3) for each in file_frames(VIDEO, indices)]
    np.testing.assert_array_equal(found.pixels, [np.asarray(each) for each in right])
    for wrong, size, reason in (
        (VideoHeader(frames=FRAMES + 1, fps=FPS), (WIDTH, HEIGHT), "fewer frames"),
        (header, (WIDTH + 2, HEIGHT), "64 x 48 pixels, and 66 x 48 by the header"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            videos.decoded(VIDEO, *size, wrong)


async def test_videos_are_decoded_beside_images() -> None:
    channels = (1.0, 1.0, 1.0)
    recipe = PreprocessorConfig(8, None, BICUBIC, 1.0, mean=channels, std=channels)
    processes = DecodeProcesses(DecodeSettings(recipe, 10**6), EncoderConfig(decode_processes=1))
    job = DecodeJob(WIDTH, HEIGHT, video=VideoHeader(frames=FRAMES, fps=FPS))
    async with processes.images, processes.videos, asyncio.TaskGroup() as group:
        asked = group.create_task(refused(processes.decode(VIDEO, job, timeout_s=60)))
        await until(lambda: bool(processes.videos.pids))
        assert not processes.images.pids
        os.kill(processes.videos.pids[0], signal.SIGKILL)
    assert asked.result() == "the video could not be decoded"


async def refused(decoding: Awaitable[object]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await decoding
    return caught.value.message


def test_other_formats_and_codecs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        list(file_frames(written("mpeg4", "avi"), [0]))
    with pytest.raises(InvalidRequest, match="has the codec prores; known are av1, h264"):
        list(file_frames(written_prores(), [0]))


def test_no_other_decoder_looks_into_a_file_when_it_is_opened() -> None:
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as lines, pytest.raises(InvalidRequest):
            list(file_frames(written_prores(), [0]))
    finally:
        av.logging.set_level(None)
    assert "Codec (prores) not on whitelist" in "".join(text for _, _, text in lines)


def test_the_sound_of_a_video_is_passed_over() -> None:
    file, silent = io.BytesIO(), io.BytesIO(VIDEO)
    with av.open(silent) as source, av.open(file, "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=48_000, layout="mono")
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:  # the last one has no data
                packet.stream = stream
                container.mux(packet)
        tone = np.zeros((1, 48_000), np.float32)
        frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
        frame.sample_rate = 48_000
        container.mux(sound.encode(frame))
        container.mux(sound.encode())
    assert read_video_header(file.getvalue(), 100) == read_video_header(VIDEO, 100)
    found = file_frames(file.getvalue(), range(FRAMES))
    np.testing.assert_array_equal([*found], [*file_frames(VIDEO, range(FRAMES))])


def written_prores() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream("prores_ks", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv422p10le"
        pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def test_no_malformed_file_raises_anything_else() -> None:
    drawn, refused = random.Random(3), 0
    for _ in range(100):
        data = bytearray(VIDEO)
        for _ in range(drawn.randint(1, 30)):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        try:
            list(file_frames(data[: drawn.randint(8, len(data))], [0, 10, 29]))
        except InvalidRequest:
            refused += 1
    assert refused
