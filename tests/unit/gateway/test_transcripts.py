"""Transcripts: segments between timestamps, subtitles, and forms that are no such requests."""

from __future__ import annotations

import asyncio
import json
import math
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pydantic
import pytest
from openai.types.audio import Transcription, TranscriptionStreamEvent, TranscriptionVerbose
from tests.support.services import QUICK
from tests.support.wait import until
from tests.support.whisper import tones, wav
from tests.unit.gateway.cluster import SCRIPT, house

from antiphon.config.gateway import MediaConfig
from antiphon.gateway.http.core import receive
from antiphon.gateway.http.openai import transcription_job
from antiphon.gateway.http.openai.segments import (
    Segment,
    TimedTokens,
    subtitles,
    timed_tokens,
)
from antiphon.gateway.http.openai.transcription_job import TAIL_S, TEMPERATURES
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import Overloaded, WorkerLost
from antiphon.wire.tokenize import TranscriptionCard

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.unit.gateway.cluster import House

CARD = TranscriptionCard(window_s=30.0, end_id=100, first_timestamp_id=200, timestamp_s=0.02)
PATH = "/v1/audio/transcriptions"


@pytest.mark.parametrize(
    ("ids", "segments", "following_s"),
    [
        ([], [], 60.0),
        ([200, 100], [], 60.0),
        ([200, 5, 6, 250], [(30.0, 31.0, (5, 6))], 60.0),
        ([200, 5, 250, 250, 6, 300, 100], [(30.0, 31.0, (5,)), (31.0, 32.0, (6,))], 60.0),
        ([200, 5, 300, 300, 100], [(30.0, 32.0, (5,))], 32.0),  # more is to come
        ([210, 5, 250, 260, 6], [(30.2, 31.0, (5,))], 31.0),  # the part may end within 6
        ([200, 5, 220, 220, 6, 100], [(30.0, 30.4, (5,)), (30.4, 40.0, (6,))], 60.0),  # too short
        ([5, 150, 6], [(30.0, 40.0, (5, 6))], 60.0),
        ([200, 5, 1200], [(30.0, 40.0, (5,))], 60.0),  # a timestamp beyond the end of the file
    ],
)
def test_segments_lie_between_timestamps(
    ids: list[int], segments: list[Any], following_s: float
) -> None:
    found, following = timed_tokens(ids, CARD, start_s=30.0, end_s=40.0)
    assert [(round(s.start, 2), round(s.end, 2), s.ids) for s in found] == segments
    assert all(isinstance(each, TimedTokens) for each in found)
    assert [tuple(ids[place] for place in each.places) for each in found] == [
        each.ids for each in found
    ]
    assert round(following, 6) == following_s


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
        no_speech_prob=0.0,
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


@asynccontextmanager
async def posting(at: House, **fields: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The reply to a form; bytes are files."""
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, bytes):
            form.add_field(name, value, filename="a.wav")
        else:
            form.add_field(name.replace("__", "[]"), value)
    async with aiohttp.ClientSession() as session, session.post(at.url + PATH, data=form) as reply:
        yield reply


async def posted(at: House, **fields: Any) -> tuple[int, Any]:
    """The status and the body of the reply to a form."""
    async with posting(at, **fields) as reply:
        return reply.status, await reply.json()


SOUND = wav(tones(0.2))
WORDS = {"response_format": "verbose_json", "timestamp_granularities__": "word"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"file": SOUND}, "model", "does not transcribe audio"),
        ({"file": SOUND, "model": "other"}, "model", "other"),
        ({"language": "en"}, "file", "the form has no file"),
        ({"file": SOUND, "temperature": "hot"}, "temperature", "temperature"),
        ({"file": SOUND, "temperature": "-1"}, "temperature", "temperature"),
        (
            {"file": SOUND, "timestamp_granularities__": "word"},
            "timestamp_granularities",
            "verbose_json",
        ),
        ({"file": SOUND, "stream": "true", "response_format": "srt"}, "stream", "as a whole"),
        ({"file": SOUND, "include__": "times"}, "include[0]", "times"),
        (
            {"file": SOUND, "include__": "logprobs", "response_format": "verbose_json"},
            "include",
            "requires the response_format json",
        ),
        ({"file": SOUND, "languages__": "de"}, "languages", "one language"),
        ({"file": SOUND, "known_speaker_names__": "a"}, "known_speaker_names", "speakers"),
        (
            {"file": SOUND, "chunking_strategy[type]": "server_vad"},
            "chunking_strategy",
            "parts of equal length",
        ),
        ({"file": SOUND, "language": "x" * 2000}, "language", "2000 characters; the limit is 100"),
        ({"file": SOUND, "temperature": "1" * 5000}, "temperature", "temperature"),
        ({"file": SOUND, "temperature": "1e999"}, "temperature", "temperature"),
    ],
)
async def test_a_wrong_form_is_refused_by_its_field(
    at: House, fields: dict[str, Any], param: str, message: str
) -> None:
    status, body = await posted(at, **fields)
    error = body["error"]
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
        (
            "multipart/form-data; boundary=a",
            b'--a\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--a--\r\n',
        ),
        (
            "multipart/form-data; boundary=a",
            b'--a\r\nContent-Disposition: form-data; name="[]"\r\n\r\nx\r\n--a--\r\n',
        ),
    ):
        headers = {"Content-Type": kind}
        async with (
            aiohttp.ClientSession() as session,
            session.post(at.url + PATH, data=body, headers=headers) as reply,
        ):
            assert reply.status == 400, (kind, body, await reply.text())


async def test_headers_of_parts_are_not_remembered(at: House) -> None:
    """Each text of a warning is, and a client could send as many as it likes."""
    body = b'--a\r\nContent-Disposition: form-data; na"%d\r\n\r\nx\r\n--a--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=a"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        receive.ignore_warnings()
        for number in range(3):
            async with (
                aiohttp.ClientSession() as session,
                session.post(at.url + PATH, data=body % number, headers=headers) as reply,
            ):
                assert reply.status == 400
    assert [str(each.message) for each in warned] == []


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


LONG = wav(tones(5.0))  # three parts
WHOLE = "".join(SCRIPT)
TIMED = "ABCD"
"""The same tokens decoded between timestamps, as those of a file of several parts are."""


@pytest.fixture
def transcribing(at: House) -> House:
    """A gateway whose model takes two seconds at once, and knows English alone."""
    at.cluster.transcription = TranscriptionCard(
        window_s=2.0, end_id=100, first_timestamp_id=200, timestamp_s=0.02, no_speech_id=99
    )
    at.cluster.logprob, at.cluster.first_id = -0.1, ord(TIMED[0])
    return at


def temperatures(at: House) -> list[float]:
    """Those of all texts that were asked for."""
    texts = [each.sampling for each in at.cluster.submits if each.sampling.max_new_tokens]
    return [each.temperature for each in texts]


async def nothing_is_held(at: House) -> None:
    await until(lambda: not at.open_count and "antiphon_media_bytes 0.0" in at.metrics_text)


def events_of(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


async def test_events_are_of_the_types_of_the_client(transcribing: House) -> None:
    async with posting(transcribing, file=LONG, stream="true") as reply:
        events = events_of(await reply.text())
    kind: Any = pydantic.TypeAdapter(TranscriptionStreamEvent)
    *deltas, end = [kind.validate_python(event, strict=True) for event in events]
    assert "".join(delta.delta for delta in deltas) == end.text == 3 * WHOLE
    status, whole = await posted(transcribing, file=SOUND)
    assert (status, whole["text"]) == (200, WHOLE)
    status, whole = await posted(transcribing, file=LONG)
    assert (status, whole["text"]) == (200, 3 * TIMED)
    await nothing_is_held(transcribing)


async def test_logprobs_are_those_of_the_tokens_of_the_text(transcribing: House) -> None:
    part = [
        {"token": text, "logprob": pytest.approx(-0.1 * number), "bytes": list(text.encode())}
        for number, text in enumerate(SCRIPT, start=1)
    ]
    wanted = {"include__": "logprobs"}
    assert (await posted(transcribing, file=SOUND, **wanted))[1]["logprobs"] == part
    _, whole = await posted(transcribing, file=LONG, **wanted)
    assert (whole["text"], whole["logprobs"]) == (3 * TIMED, 3 * part)
    Transcription.model_validate(whole, strict=True)
    async with posting(transcribing, file=LONG, stream="true", **wanted) as reply:
        events = events_of(await reply.text())
    kind: Any = pydantic.TypeAdapter(TranscriptionStreamEvent)
    for event in events:
        kind.validate_python(event, strict=True)
    *deltas, end = events
    assert end["logprobs"] == 3 * part
    assert [each["logprobs"] for each in deltas] == [[one] for one in 3 * part]
    # The last two tokens are no text.
    transcribing.cluster.first_id = 98
    assert (await posted(transcribing, file=SOUND, **wanted))[1]["logprobs"] == part[:2]
    assert "logprobs" not in (await posted(transcribing, file=SOUND))[1]


async def test_prompt_has_the_text_so_far(transcribing: House) -> None:
    await posted(transcribing, file=LONG, prompt="Names.")
    found = [each.prompt for each in transcribing.cluster.encodes if each.transcription]
    assert [each and each.strip() for each in found] == [
        "Names.",
        f"Names. {TIMED}",
        f"Names. {TIMED}{TIMED}",
    ]


async def test_segments_are_of_the_type_of_the_client(transcribing: House) -> None:
    async with posting(transcribing, file=LONG, response_format="verbose_json") as reply:
        whole = TranscriptionVerbose.model_validate_json(await reply.text(), strict=True)
    assert whole.segments is not None
    assert [(each.seek, each.start, each.end) for each in whole.segments] == [
        *((0, 0.0, 2.0), (200, 2.0, 4.0), (400, 4.0, 5.0)),
    ]
    assert [each.no_speech_prob for each in whole.segments] == [pytest.approx(math.exp(-0.25))] * 3
    assert temperatures(transcribing) == [0.0] * 3


async def test_words_are_refused_where_a_tokenizer_knows_no_heads(transcribing: House) -> None:
    status, body = await posted(transcribing, file=LONG, **WORDS)
    assert (status, body["error"]["param"]) == (400, "timestamp_granularities")


@pytest.fixture
def aligning(transcribing: House) -> House:
    """Its model has heads that say where a token is in the audio."""
    card = transcribing.cluster.transcription
    assert card is not None
    transcribing.cluster.transcription = msgspec.structs.replace(card, alignment_heads=((1, 2),))
    return transcribing


async def test_words_have_the_times_of_their_tokens(aligning: House) -> None:
    cluster = aligning.cluster
    async with posting(aligning, file=LONG, **WORDS) as reply:
        whole = TranscriptionVerbose.model_validate_json(await reply.text(), strict=True)
    assert whole.segments is None
    assert [(each.word, each.start, each.end) for each in whole.words or ()] == [
        *((WHOLE, 0.0, 0.6), (WHOLE, 2.0, 2.6), (WHOLE, 4.0, 4.6)),
    ]
    asked = [each.sampling.alignment for each in cluster.submits if each.sampling.alignment]
    assert [(each.tokens, each.source_tokens, each.heads) for each in asked] == [
        *((4, 100, ((1, 2),)), (4, 100, ((1, 2),)), (4, 50, ((1, 2),))),
    ]
    prompts = [each for each in cluster.encodes if each.transcription]
    again = [each for each in prompts if each.transcription and each.transcription.output]
    assert {each.transcription.output for each in again if each.transcription} == {
        pack_ids(TIMED.encode())
    }
    # Behind the same text as the output.
    assert [(each.prompt or "").strip() for each in again] == ["", TIMED, 2 * TIMED]
    await nothing_is_held(aligning)


async def test_words_have_no_times_where_a_tokenizer_leaves_out_the_output(aligning: House) -> None:
    """It is of an earlier version: times would be those of other tokens."""
    cluster = aligning.cluster
    cluster.appends_output = False
    status, body = await posted(aligning, file=LONG, **WORDS)
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert "a tokenizer of an earlier version" in body["error"]["message"]
    assert not [each for each in cluster.submits if each.sampling.alignment]
    await nothing_is_held(aligning)


@pytest.mark.parametrize("why", ["a guess", "it repeats itself"])
async def test_a_text_that_is_not_accepted_is_sampled_at_higher_temperatures(
    transcribing: House, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was sampled at a high one is not the beginning of the next part."""
    cluster = transcribing.cluster
    if why == "a guess":
        cluster.logprob = -2.0
    else:
        monkeypatch.setattr(transcription_job, "COMPRESSION_MAX", 0.1)
    monkeypatch.setattr(transcription_job, "NO_SPEECH_MAX", 0.9)
    status, whole = await posted(transcribing, file=LONG)
    assert (status, whole["text"]) == (200, 3 * TIMED)
    assert temperatures(transcribing) == [*TEMPERATURES] * 3
    assert {(each.prompt or "").strip() for each in cluster.encodes if each.transcription} == {""}
    cluster.submits.clear()
    await posted(transcribing, file=LONG, temperature="0.3")
    assert temperatures(transcribing) == [0.3] * 3
    await nothing_is_held(transcribing)


async def test_a_guess_of_silence_is_left_out(transcribing: House) -> None:
    transcribing.cluster.logprob = -2.0
    status, whole = await posted(transcribing, file=LONG, response_format="verbose_json")
    assert (status, whole["text"], whole["segments"]) == (200, "", [])
    assert temperatures(transcribing) == [0.0] * 3


@pytest.mark.parametrize(("seconds", "parts"), [(2.0 + TAIL_S / 2, 1), (2.0 + 2 * TAIL_S, 2)])
async def test_padding_behind_the_last_part_is_no_part(
    transcribing: House, seconds: float, parts: int
) -> None:
    await posted(transcribing, file=wav(tones(seconds)))
    assert len(transcribing.cluster.submits) == parts


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_part_that_is_refused_for_load_is_submitted_again(
    transcribing: House, stream: str
) -> None:
    cluster = transcribing.cluster
    cluster.hold_at = 0
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_read(transcribing, stream))
        await until(lambda: len(cluster.submits) == 1)
        cluster.submit_error = Overloaded("full", retry_after_s=0.01)
        cluster.go.set()
        await until(lambda: len(cluster.submits) == 3)
        cluster.submit_error = None
    status, text = task.result()
    found = text.count("wörld") if stream == "true" else text.count(TIMED)
    assert (status, found) == (200, 6 if stream == "true" else 3)
    await nothing_is_held(transcribing)


async def test_words_that_are_refused_for_load_are_asked_for_again(aligning: House) -> None:
    """The text of the file is there: of a file of one part, too."""
    cluster = aligning.cluster
    cluster.hold_at = 0
    async with asyncio.TaskGroup() as group:
        task = group.create_task(posted(aligning, file=SOUND, **WORDS))
        await until(lambda: len(cluster.submits) == 1)
        cluster.submit_error = Overloaded("full", retry_after_s=0.01)
        cluster.go.set()
        await until(lambda: len(cluster.submits) == 3)
        cluster.submit_error = None
    status, body = task.result()
    assert (status, len(body["words"])) == (200, 1)
    await nothing_is_held(aligning)


async def _read(at: House, stream: str) -> tuple[int, str]:
    async with posting(at, file=LONG, stream=stream) as reply:
        return reply.status, await reply.text()


async def test_a_file_that_is_refused_for_load_at_first_is_refused(transcribing: House) -> None:
    transcribing.cluster.submit_error = Overloaded("full", retry_after_s=0.01)
    status, body = await posted(transcribing, file=LONG)
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert len(transcribing.cluster.submits) == 1
    await nothing_is_held(transcribing)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_gateway_that_leaves_finishes_the_file(transcribing: House, stream: str) -> None:
    cluster = transcribing.cluster
    cluster.hold_at = len(SCRIPT) - 1
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_read(transcribing, stream))
        await until(lambda: len(cluster.submits) == 1)
        leaving = group.create_task(transcribing.gateway.ended())
        await until(lambda: transcribing.gateway.health.state == "draining")
        status, body = await posted(transcribing, file=SOUND)
        cluster.go.set()
        await leaving
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert (task.result()[0], len(cluster.submits)) == (200, 3)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_an_error_within_a_file_ends_it(transcribing: House, stream: str) -> None:
    cluster = transcribing.cluster
    cluster.hold_at = len(SCRIPT) - 1
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_read(transcribing, stream))
        await until(lambda: len(cluster.submits) == 1)
        cluster.row_error = WorkerLost("lost")
        cluster.go.set()
    status, text = task.result()
    if stream == "true":
        assert status == 200
        assert events_of(text)[-1]["error"]["code"] == "worker_lost"
    else:
        assert (status, json.loads(text)["error"]["code"]) == (503, "worker_lost")
    await nothing_is_held(transcribing)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_client_that_leaves_within_a_file_leaves_nothing(
    transcribing: House, stream: str
) -> None:
    cluster = transcribing.cluster
    cluster.hold_at = 2
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_read(transcribing, stream))
        await until(lambda: len(cluster.submits) == 1)
        task.cancel()
    await until(lambda: cluster.cancelled == [cluster.submits[0].request_id])
    await nothing_is_held(transcribing)
    assert len(cluster.submits) == 1


async def test_no_audio_may_be_sent_where_there_is_no_room_for_one() -> None:
    media = MediaConfig(audios_max=0)
    async with house(base=msgspec.structs.replace(QUICK, media=media)) as at:
        at.cluster.transcription = CARD
        status, body = await posted(at, file=SOUND)
        assert (status, body["error"]["param"]) == (400, "file")
        assert "the limit is 0" in body["error"]["message"]
