"""Asks a server over HTTP as OpenAI clients do, and writes down when which bytes came.

While answers come in, nothing is done but to take the time: the load generator shares the cores
with what it measures. The events are read when the stream has ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, Self

import aiohttp
import msgspec
from msgspec.structs import replace

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from antiphon.client import Client
    from antiphon.wire.base import Usage
    from antiphon.wire.generate import CompleteOptions

TIMEOUT_S = 900.0
_DATA = b"data:"
_DONE = b"[DONE]"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Text that arrived together.

    Attributes:
        tokens: Output tokens so far, if the server reports them with each piece.
    """

    at_s: float
    text: str
    tokens: int | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in seconds of one monotonic clock.

    Attributes:
        due_s: When the arrival process wanted it sent; `sent_s` is later where the client was slow.
        ended_s: When the stream had ended, the last event included.
        output_tokens: As the server reports them; else as requested.
        cached_tokens: Prompt tokens from the cache; None if the server does not report them.
        error: Why there is no answer. Such a request counts in nothing but `failed`.
    """

    due_s: float
    sent_s: float
    ended_s: float
    pieces: tuple[Piece, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Target(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def ask(self, said: Sequence[str], output_tokens: int, due_s: float) -> Timeline:
        """Send messages of user and assistant in turn, and read the answer to its end.

        `due_s` is when the request was to be sent, by `time.perf_counter`. An error that the server
        answered, or a broken connection, is in the timeline.
        """
        ...


class _Text(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text = _Text()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class HttpTarget:
    """An OpenAI server.

    Args:
        url: Without the `/v1`.
        chat: Ask `/v1/chat/completions`, through the model's template, instead of
            `/v1/completions`, which takes the text as it is. Needed for more than one turn.
        ignore_eos: Set it in the request; a server that rejects the field may end early.
        more: Further fields of each request, or others in the place of ours.

    Attributes:
        answering: Answers of which something has come, and not the end.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        chat: bool = False,
        ignore_eos: bool = True,
        more: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = f"{url}/v1/{'chat/completions' if chat else 'completions'}"
        self._model = model
        self._chat = chat
        self._ignore_eos = ignore_eos
        self._more = dict(more or {})
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self.answering = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # A connection a request: llama-server drops kept ones under the next request.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(self, said: Sequence[str], output_tokens: int, due_s: float) -> Timeline:
        body = msgspec.json.encode(self._body(said, output_tokens))
        reads: list[tuple[float, bytes]] = []
        error: str | None = None
        sent_s = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body) as answer:
                async for data in answer.content.iter_any():
                    self.answering += not reads
                    reads.append((time.perf_counter(), data))
                if answer.status != 200:
                    error = f"{answer.status}: {b''.join(data for _, data in reads)[:500]!r}"
        except (aiohttp.ClientError, OSError, TimeoutError) as broken:
            error = f"{type(broken).__name__}: {broken}"
        finally:
            self.answering -= bool(reads)
        ended_s = time.perf_counter()
        timeline = Timeline(due_s=due_s, sent_s=sent_s, ended_s=ended_s, error=error)
        return read_stream(reads, timeline) if error is None else timeline

    def _body(self, said: Sequence[str], output_tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            **self._prompt(said),
            "max_tokens": output_tokens,
            "temperature": 0,
            **({"ignore_eos": True} if self._ignore_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }

    def _prompt(self, said: Sequence[str]) -> dict[str, object]:
        if self._chat:
            return {"messages": [{"role": role, "content": text} for role, text in _turns(said)]}
        (prompt,) = said  # conversations need the chat endpoint
        return {"prompt": prompt}


def read_stream(reads: Iterable[tuple[float, bytes]], timeline: Timeline) -> Timeline:
    """Complete a timeline by what was read from the socket.

    An event has the time of its last byte.
    """
    pieces: list[Piece] = []
    usage = _Usage()
    for at_s, data in _events(reads):
        event = msgspec.json.decode(data, type=_Event)
        if bytes(event.error) != b"null":
            return replace(timeline, error=bytes(event.error).decode(errors="replace"))
        usage = event.usage or usage
        if text := "".join(choice.text or choice.delta.content or "" for choice in event.choices):
            pieces.append(Piece(at_s, text, event.usage and event.usage.completion_tokens))
    details = usage.prompt_tokens_details
    return replace(
        timeline,
        pieces=tuple(pieces),
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=details.cached_tokens if details else None,
    )


def _events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    rest = b""
    for at_s, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            said = line.removeprefix(_DATA).strip()
            if line.startswith(_DATA) and said and said != _DONE:
                yield at_s, said


class NatsTarget:
    """The gateways behind a broker.

    Args:
        whole: Ask for whole answers: no times within one, but all that the server counts. Else
            outputs have the requested length, and prompts are not counted.
    """

    def __init__(self, client: Client, model: str, *, whole: bool = False) -> None:
        self._client = client
        self._model = model
        self._whole = whole

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    async def ask(self, said: Sequence[str], output_tokens: int, due_s: float) -> Timeline:
        model, turns = self._model, _turns(said)
        options: CompleteOptions = {
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        pieces: list[Piece] = []
        usage: Usage | None = None
        error: str | None = None
        sent_s = time.perf_counter()
        try:
            if self._whole:
                answer = await self._client.complete(model, turns, **options)
                pieces.append(Piece(time.perf_counter(), answer.text))
                usage = answer.usage
            else:
                async for piece in self._client.generate(model, turns, **options):
                    pieces.append(Piece(time.perf_counter(), piece.text))  # noqa: PERF401
        except EngineError as refused:
            error = f"{refused.code}: {refused.message}"
        return Timeline(
            due_s=due_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            pieces=tuple(pieces),
            prompt_tokens=usage.prompt_tokens if usage else 0,
            output_tokens=usage.completion_tokens if usage else output_tokens,
            cached_tokens=usage.cached_tokens if usage else None,
            error=error,
        )


def _turns(said: Sequence[str]) -> list[tuple[str, str]]:
    return [("assistant" if n % 2 else "user", text) for n, text in enumerate(said)]
