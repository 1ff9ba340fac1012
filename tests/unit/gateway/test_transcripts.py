"""Transcripts: segments between timestamps, subtitles, and forms that are no such requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.whisper import tones, wav

from antiphon.config.gateway import MediaConfig
from antiphon.gateway.http.openai.transcriptions import (
    Segment,
    TimedTokens,
    subtitles,
    timed_tokens,
)
from antiphon.wire.tokenize import TranscriptionCard

if TYPE_CHECKING:
    from tests.unit.gateway.cluster import House

CARD = TranscriptionCard(window_s=30.0, end_id=100, first_timestamp_id=200, timestamp_s=0.02)
PATH = "/v1/audio/transcriptions"


@pytest.mark.parametrize(
    ("ids", "segments"),
    [
        ([], []),
        ([200, 100], []),
        ([200, 5, 6, 250], [(30.0, 31.0, (5, 6))]),
        ([200, 5, 250, 250, 6, 300, 100], [(30.0, 31.0, (5,)), (31.0, 32.0, (6,))]),
        ([210, 5, 250, 260, 6], [(30.2, 31.0, (5,)), (31.2, 40.0, (6,))]),
        ([5, 150, 6], [(30.0, 40.0, (5, 6))]),
        ([200, 5, 1200], [(30.0, 40.0, (5,))]),  # a timestamp beyond the end of the file
    ],
)
def test_segments_lie_between_timestamps(ids: list[int], segments: list[Any]) -> None:
    found = timed_tokens(ids, CARD, start_s=30.0, end_s=40.0)
    assert [(round(s.start, 2), round(s.end, 2), s.ids) for s in found] == segments
    assert all(isinstance(each, TimedTokens) for each in found)


def segment(number: int, start: float, end: float, text: str) -> Segment:
    return Segment(
        id=number,
        seek=0,
        start=start,
        end=end,
        text=text,
        tokens=[],
        temperature=0.0,
        avg_logprob=0.0,
        compression_ratio=1.0,
    )


def test_subtitles_have_times_and_no_empty_lines() -> None:
    segments = [segment(0, 0.0, 1.25, " One\n\n--> two"), segment(1, 3661.0, 3662.5, "three")]
    assert subtitles(segments, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,250\nOne -> two\n\n2\n01:01:01,000 --> 01:01:02,500\nthree\n"
    )
    assert subtitles(segments, "vtt").splitlines()[:3] == [
        "WEBVTT",
        "",
        "00:00:00.000 --> 00:00:01.250",
    ]


async def posted(at: House, **fields: Any) -> tuple[int, Any]:
    """The status and the error of a form; bytes are files."""
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, bytes):
            form.add_field(name, value, filename="a.wav")
        else:
            form.add_field(name.replace("__", "[]"), value)
    async with aiohttp.ClientSession() as session, session.post(at.url + PATH, data=form) as reply:
        return reply.status, (await reply.json())["error"]


SOUND = wav(tones(0.2))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"file": SOUND}, "model", "does not transcribe audio"),
        ({"file": SOUND, "model": "other"}, "model", "other"),
        ({"language": "en"}, "file", "the form has no file"),
        ({"file": SOUND, "temperature": "hot"}, "temperature", "temperature"),
        ({"file": SOUND, "temperature": "-1"}, "temperature", "temperature"),
        ({"file": SOUND, "response_format": "pdf"}, "response_format", "pdf"),
        (
            {"file": SOUND, "response_format": "verbose_json", "timestamp_granularities__": "word"},
            "timestamp_granularities",
            "only segments have timestamps",
        ),
        (
            {"file": SOUND, "timestamp_granularities__": "segment"},
            "timestamp_granularities",
            "verbose_json",
        ),
        ({"file": SOUND, "stream": "true", "response_format": "srt"}, "stream", "as a whole"),
        ({"file": SOUND, "include__": "logprobs"}, "include", "logprobs are not returned"),
    ],
)
async def test_a_wrong_form_is_refused_by_its_field(
    at: House, fields: dict[str, Any], param: str, message: str
) -> None:
    status, error = await posted(at, **fields)
    assert (status in (400, 404), error["param"]) == (True, param), error
    assert message in error["message"]


async def test_a_body_that_is_no_form_is_refused(at: House) -> None:
    for kind, body in (
        ("application/json", b"{}"),
        ("multipart/form-data", b"--a--"),
        ("multipart/form-data; boundary=a", b""),
        ("multipart/form-data; boundary=a", b"--b\r\n\r\n"),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\nx\r\n--a--\r\n"),
        (
            "multipart/form-data; boundary=a",
            b'--a\r\nContent-Disposition: form-data; name="file"\r\n'
            b"Content-Transfer-Encoding: base64\r\n\r\neA==\r\n--a--\r\n",
        ),
        (
            "multipart/form-data; boundary=a",
            b'--a\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\xff\r\n--a--\r\n',
        ),
    ):
        headers = {"Content-Type": kind}
        async with (
            aiohttp.ClientSession() as session,
            session.post(at.url + PATH, data=body, headers=headers) as reply,
        ):
            assert reply.status == 400, (kind, body, await reply.text())


async def test_a_file_beyond_the_limit_is_refused_before_it_has_come(at: House) -> None:
    most = MediaConfig().file_bytes_max
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        yield b'--a\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        while True:
            sent += 2**20
            yield bytes(2**20)

    headers = {"Content-Type": "multipart/form-data; boundary=a"}
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(at.url + PATH, data=endless(), headers=headers) as reply:
                assert reply.status == 413
        except aiohttp.ClientConnectionError:
            pass  # it was closed while this was still sending
    assert most <= sent < 2 * most
