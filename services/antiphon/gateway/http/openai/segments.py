"""Segments of a transcript: text between timestamps, and subtitles of it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.tokenize import TranscriptionCard

MS = 1000
ADVANCE_MIN_S = 1.0
"""How far behind a part's beginning the next one begins, at least: else as if no segment had ended.
"""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a transcript between two timestamps, in seconds.

    `seek` is where the part of the file begins that the model had at once, in steps of 10 ms.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    """Average logprob of the tokens of that part of the file."""
    compression_ratio: float
    """Length of that part's text relative to its compressed length."""
    no_speech_prob: float
    """Probability that that part is silent."""


class TimedTokens(msgspec.Struct, frozen=True):
    """Text tokens between two timestamps, in seconds from the beginning of the file.

    `places` are their indices in the output.
    """

    start: float
    end: float
    ids: tuple[int, ...]
    places: tuple[int, ...]


def timed_tokens(
    ids: Sequence[int], card: TranscriptionCard, start_s: float, end_s: float
) -> tuple[list[TimedTokens], float]:
    """Cut the output of a part of a file, from `start_s` to `end_s`, at its timestamps.

    Also where the next part begins: behind this one; but if the output goes on behind a pair of
    timestamps, which are the end of a segment and the beginning of the next, there, and what
    follows is left out: this part may end within it. Special tokens are left out.

    Source: Radford et al. 2022, arXiv:2212.04356, section 3.8.
    """
    first = card.first_timestamp_id
    known = [token < card.end_id or token >= first for token in ids]
    places = [place for place, kept in enumerate(known) if kept]
    timed = [ids[place] >= first for place in places]

    def time_of(token: int) -> float:
        return min(start_s + (token - first) * card.timestamp_s, end_s)

    following_s = start_s + card.window_s
    pairs = [at for at in range(1, len(places)) if timed[at - 1] and timed[at]]
    if pairs and timed[-2:] != [False, True]:
        ended_s = time_of(ids[places[pairs[-1] - 1]])
        if ended_s >= start_s + ADVANCE_MIN_S:
            places, following_s = places[: pairs[-1]], ended_s
    found, begin_s, text = list[TimedTokens](), start_s, list[int]()

    def end(until_s: float) -> None:
        if text:
            between = tuple(ids[place] for place in text)
            found.append(TimedTokens(begin_s, until_s, between, tuple(text)))
            text.clear()

    for place in places:
        if ids[place] < first:
            text.append(place)
            continue
        end(time_of(ids[place]))
        begin_s = time_of(ids[place])
    end(end_s)
    return found, following_s


def compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def subtitles(segments: Sequence[Segment], form: Literal["srt", "vtt"]) -> str:
    """Segments as SubRip or WebVTT."""
    blocks = ["WEBVTT\n"] if form == "vtt" else []
    mark = "." if form == "vtt" else ","
    for number, each in enumerate(segments, start=1):
        times = f"{_clock(each.start, mark)} --> {_clock(each.end, mark)}"
        # Both formats end a block at an empty line, and mark times by an arrow.
        text = " ".join(each.text.split()).replace("-->", "->")
        blocks.append(f"{number}\n{times}\n{text}\n" if form == "srt" else f"{times}\n{text}\n")
    return "\n".join(blocks)


def _clock(seconds: float, mark: str) -> str:
    whole, ms = divmod(round(seconds * MS), MS)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{mark}{ms:03}"
