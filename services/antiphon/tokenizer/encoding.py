"""The work of the tokenizer's threads: batch, render, encode, and compute block digests."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec

from antiphon.model_card.vision.base import Pieces
from antiphon.model_card.vision.compared import ComparedImages
from antiphon.model_card.vision.frame_videos import FrameVideos
from antiphon.tokenizer.template import MediumMarker
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import (
    EngineError,
    Internal,
    InvalidRequest,
    PromptTooLong,
    RequestTooLarge,
    Unsupported,
)
from antiphon.wire.media import MediumSpan
from antiphon.wire.namespaces import (
    PageOrigin,
    key_ids,
    medium_key,
    prompt_digests,
    source_salt,
)
from antiphon.wire.tokenize import DecodeRequest, EncodeRequest, characters_max

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from tokenizers import Encoding

    from antiphon.model_card.audio import PromptAudio
    from antiphon.model_card.vision.vision_card import VideosCard, VisionCard
    from antiphon.tokenizer.model_tokenizer import ModelTokenizer
    from antiphon.tokenizer.transcription import Transcriber
    from antiphon.wire.claim import AudioWindow, VideoHeader
    from antiphon.wire.media import MediumHeader
    from antiphon.wire.tokenize import TranscriptionCard, TranscriptionPrompt

MediumKind = Literal["image", "video", "audio"]
T = TypeVar("T")
R = TypeVar("R")


log = logging.getLogger(__name__)

_LIGHT_CHARACTERS = 16 * 1024
_LIGHT_MESSAGES = 64
"""Tool calls count as messages."""
EMBEDDED = b"embedding\0"
"""What stands in place of the digest of a processing in keys of embeddings that clients make."""
TEXT_END = 64
"""How many characters of a rendered prompt's end are returned: every reasoning marker fits."""


def character_count(request: EncodeRequest) -> int:
    """The length of a request's text, without the markers of a template."""
    content = sum(len(message.content) for message in request.messages or ())
    return content + sum(len(text or "") for text in (request.prompt, request.pair, request.suffix))


def is_heavy(request: EncodeRequest) -> bool:
    """Whether encoding it would hold the interpreter for more than about 10 ms."""
    messages = request.messages or ()
    calls = [call for message in messages for call in message.tool_calls]
    if len(messages) + len(calls) > _LIGHT_MESSAGES:
        return True
    beside = [request.template.tools, request.template.options]
    for call in calls:
        beside += call.id, call.name, call.arguments
    for each in messages:
        beside += each.role, each.name, each.reasoning_content, each.tool_call_id
    return character_count(request) + sum(len(text or "") for text in beside) > _LIGHT_CHARACTERS


class EncodedPrompt(msgspec.Struct, frozen=True, tag=True):
    """A prompt's ids (int32, little-endian), its block digests, and the end of its rendered text.

    `second_from` is where the second text of a pair begins, if the tokenizer has type ids for it.
    `untruncated_tokens` is the length of the full prompt, if these ids were truncated. `media` are
    the places of the request's media.
    """

    token_ids: bytes
    block_digests: bytes
    text_end: str = ""
    second_from: int | None = None
    untruncated_tokens: int | None = None
    media: tuple[MediumSpan, ...] = ()


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """Encodes batches of texts. Called in threads; has no mutable state."""

    vocabulary: ModelTokenizer
    origin: PageOrigin
    text_bytes_max: int
    context_tokens: int
    transcriber: Transcriber | None = None

    @property
    def transcription(self) -> TranscriptionCard | None:
        """How the model transcribes audio; None: it does not."""
        return None if self.transcriber is None else self.transcriber.card

    def encode(self, texts: Sequence[EncodeRequest]) -> list[EncodedPrompt | EngineError]:
        """Encode each text; an error in one is its result and does not affect the others."""
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: EncodeRequest) -> EncodedPrompt | EngineError:
        try:
            return self._encoded(text)
        except EngineError as error:
            return error
        except UnicodeEncodeError as error:
            return InvalidRequest(f"the text is not valid Unicode: {error}")
        except BaseException:  # a panic in the tokenizer's Rust code is not an Exception
            log.exception("encoding failed")
            return Internal("internal error")

    def _encoded(self, text: EncodeRequest) -> EncodedPrompt:
        rendered = self._render(text)
        size = len(rendered.encode()) + len((text.pair or "").encode())
        if size > self.text_bytes_max:
            raise RequestTooLarge.of(size_bytes=size, bytes_max=self.text_bytes_max)
        self.check_length(text, len(rendered) + len(text.pair or ""))
        # A template writes the special tokens itself; plain text gets them from the tokenizer.
        plain = text.messages is None and text.special_tokens
        if text.transcription is not None:
            return self._transcribing(text, rendered, text.transcription)
        if text.media:
            return self._with_media(text, rendered, plain=plain)
        encoding = self.vocabulary.tokenizer.encode(rendered, text.pair, add_special_tokens=plain)
        kept = self._tokens_kept(text, encoding)
        ids = encoding.ids if kept is None else self._truncated(text, rendered, encoding, kept)
        token_ids = pack_ids(ids)
        text_end = "" if text.messages is None or kept is not None else rendered[-TEXT_END:]
        paired = text.pair is not None and 1 in encoding.type_ids
        second_from = encoding.type_ids.index(1) if paired else None
        digests = prompt_digests(self.origin, text.cache_salt, token_ids)
        untruncated = None if kept is None else len(encoding.ids)
        return EncodedPrompt(token_ids, digests, text_end, second_from, untruncated)

    def _transcribing(
        self, text: EncodeRequest, before: str, asked: TranscriptionPrompt
    ) -> EncodedPrompt:
        """The prompt of a transcription. No token stands for the audio: its key is in the salt.

        Raises:
            Unsupported: The model does not transcribe, or not so.
            InvalidRequest: There is not one part of an audio file.
        """
        if self.transcriber is None:
            raise Unsupported("this model does not transcribe audio", param="media.0")
        if len(text.media) != 1 or text.media[0].audio is None:
            raise InvalidRequest("a transcription has one audio file", param="media")
        token_ids = pack_ids(self.transcriber.prompt(before, asked, self.context_tokens))
        span = self.transcriber.span(text.media[0])
        salt = source_salt(text.cache_salt, span.key)
        digests = prompt_digests(self.origin, salt, token_ids)
        return EncodedPrompt(token_ids, digests, media=(span,))

    def _with_media(self, text: EncodeRequest, rendered: str, *, plain: bool) -> EncodedPrompt:
        if isinstance(self.vocabulary.vision, ComparedImages):
            ids, media = self._alone(text, rendered)
        else:
            ids, media = self._expanded(text, rendered, plain=plain)
        token_ids = pack_ids(ids)
        keys = key_ids(token_ids, [(each.start, each.tokens, each.key) for each in media])
        digests = prompt_digests(self.origin, text.cache_salt, keys)
        text_end = "" if text.messages is None else rendered[-TEXT_END:]
        return EncodedPrompt(token_ids, digests, text_end, media=media)

    def _alone(
        self, text: EncodeRequest, rendered: str
    ) -> tuple[list[int], tuple[MediumSpan, ...]]:
        """The prompt of an image whose vector is compared with those of texts: one placeholder.

        Raises:
            InvalidRequest: There is something beside it.
        """
        if len(text.media) != 1 or rendered:
            what = "this model makes a vector of a text or of an image, and of no more at once"
            raise InvalidRequest(what, param="media.0")
        (shown,) = self._shown(text.media)
        return [shown.placeholder], (shown.span(0, 1),)

    def _expanded(
        self, text: EncodeRequest, rendered: str, *, plain: bool
    ) -> tuple[list[int], tuple[MediumSpan, ...]]:
        """Encode a text with what stands for each medium in place of its marker.

        Placeholders are repeated as ids: a text with one in place of many is encoded sooner.

        Raises:
            InvalidRequest: There are not as many markers as media, or other placeholders, or the
                model scales images otherwise.
            PromptTooLong: The prompt exceeds the context.
        """
        media, field = text.media, "prompt" if text.messages is None else "messages"
        texts, kinds = self._divided(rendered, media)
        if len(kinds) != len(media):
            marker = self.vocabulary.image_marker or self.vocabulary.audio_marker
            raise _other_placeholders(len(kinds), len(media), marker, field)
        if kinds != [_kind(each) for each in media]:
            raise InvalidRequest("media are not in the order of their placeholders")
        shown = self._shown(media)
        written = [texts[0]]
        for each, after in zip(shown, texts[1:], strict=True):
            placeholder = self.vocabulary.tokenizer.id_to_token(each.placeholder) or ""
            written += [placeholder if isinstance(piece, int) else piece for piece in each.pieces]
            written.append(after)
        encoded = self.vocabulary.tokenizer.encode("".join(written), add_special_tokens=plain).ids
        places = [at for at, token_id in enumerate(encoded) if token_id in self._placeholders]
        expected = [each.placeholder for each in shown for _ in each.runs]
        if [encoded[at] for at in places] != expected:
            count = len(media) + len(places) - len(expected)
            marker = self.vocabulary.placeholder or self.vocabulary.audio_marker
            raise _other_placeholders(count, len(media), marker, field)
        ids, spans, rest, before = list[int](), list[MediumSpan](), iter(places), 0
        for each in shown:
            start = -1
            for length, at in zip(each.runs, rest, strict=False):
                ids += encoded[before:at]
                start = len(ids) if start < 0 else start
                ids += [each.placeholder] * length
                before = at + 1
            if len(ids) > self.context_tokens:
                raise PromptTooLong.of(
                    prompt_tokens=len(ids), tokens_max=self.context_tokens, param=field
                )
            spans.append(each.span(start, len(ids) - start))
        return [*ids, *encoded[before:]], tuple(spans)

    @property
    def _placeholders(self) -> frozenset[int]:
        cards = self.vocabulary.vision, self.vocabulary.videos, self.vocabulary.audio
        return frozenset(card.placeholder for card in cards if card is not None)

    def _divided(
        self, rendered: str, media: Sequence[MediumHeader]
    ) -> tuple[list[str], list[MediumKind]]:
        """The texts between markers, and of which kind of media each of these is.

        Those of videos are only looked for if there is one.
        """
        words, videos = self.vocabulary, self.vocabulary.videos
        kinds: dict[str, MediumKind] = {}
        if videos is not None and any(each.video for each in media):
            kinds = dict.fromkeys(videos.markers, "video")
        if words.image_marker:
            kinds[words.image_marker] = "image"
        if words.audio_marker:
            kinds[words.audio_marker] = "audio"
        # Of two that begin at one place the longer one: Python takes the first that matches.
        markers = sorted(kinds, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, markers))})", rendered)
        return parts[::2], [kinds[marker] for marker in parts[1::2]]

    def _shown(self, media: Sequence[MediumHeader]) -> list[_ShownMedium]:
        """What stands for each medium.

        Raises:
            InvalidRequest: It cannot be scaled as the request says, or has other rows.
        """
        shown: list[_ShownMedium] = []
        images = 0
        for index, medium in enumerate(media):
            try:
                shown.append(self._shown_one(medium, images))
            except InvalidRequest as error:
                error.param = error.param or f"media.{index}"
                raise
            images += _kind(medium) == "image"
        return shown

    def _shown_one(self, medium: MediumHeader, images: int) -> _ShownMedium:
        """What stands for a medium that has so many images before it."""
        words = self.vocabulary
        if medium.audio is not None:
            assert words.audio is not None, "checked by _render"
            return _shown_audio(words.audio, medium, medium.audio)
        if medium.video is not None:
            assert words.videos is not None, "checked by _render"
            return _shown_video(words.videos, medium, medium.video)
        assert words.vision is not None, "checked by _render"
        shown = _shown_image(words.vision, medium)
        if not words.vision.counted:
            return shown
        before = words.vision.counted.format(images)
        return msgspec.structs.replace(shown, pieces=(before, *shown.pieces))

    def _tokens_kept(self, text: EncodeRequest, encoding: Encoding) -> int | None:
        """Return how many ids a text is truncated to; None: it is not truncated."""
        most = self.context_tokens
        if not text.truncate or len(encoding.ids) <= most:
            return None
        if text.pair is not None and 1 not in encoding.sequence_ids[:most]:
            return None  # nothing would be left of the second text: it fails as too long
        return most

    def _truncated(
        self, text: EncodeRequest, rendered: str, encoding: Encoding, kept: int
    ) -> list[int]:
        """The first ids of a text; a plain one keeps the special tokens that end it.

        A model may pool these: CLIP's vectors are those of the end token.
        """
        if text.messages is not None or text.pair is not None or not text.special_tokens:
            return encoding.ids[:kept]
        tokenizer = self.vocabulary.tokenizer
        bare = tokenizer.encode(rendered, add_special_tokens=False)
        bare.truncate(max(0, kept - tokenizer.num_special_tokens_to_add(is_pair=False)))
        return tokenizer.post_process(bare).ids[:kept]

    def check_length(self, text: EncodeRequest, characters: int) -> None:
        """Reject a text that cannot fit before it is encoded, which may take seconds.

        Raises:
            PromptTooLong: The text has more characters than a context of the longest tokens; if it
                may be truncated, more than the limit for truncated texts as well.
        """
        tokens, each = self.context_tokens, self.vocabulary.token_characters
        most = characters_max(tokens, each, truncate=text.truncate)
        if characters > most:
            raise PromptTooLong.of_characters(
                characters=characters,
                context_tokens=tokens,
                token_characters=each,
                truncated_max=most if text.truncate else None,
                param="prompt" if text.messages is None else "messages",
            )

    def _render(self, text: EncodeRequest) -> str:
        if text.transcription is not None:
            return text.prompt or ""
        for index, medium in enumerate(text.media):
            if not self._takes(kind := _kind(medium)):
                named = "audio in a prompt" if kind == "audio" else f"{kind}s"
                raise Unsupported(f"this model takes no {named}", param=f"media.{index}")
        if text.messages is None:
            if text.prompt is None:
                raise InvalidRequest("neither messages nor a prompt is given")
            if text.suffix is None:
                return text.prompt
            return self._render_fill_in_middle(text.prompt, text.suffix)
        if text.suffix is not None:
            raise InvalidRequest("suffix: a conversation has no gap to fill", param="suffix")
        if text.prompt is not None:
            raise InvalidRequest("both messages and a prompt are given", param="prompt")
        if not text.messages:
            raise InvalidRequest("messages are empty", param="messages")
        template = self.vocabulary.template
        if template is None:
            raise Unsupported(
                "this model has no chat template; send a prompt, or set model.chat_template",
                param="messages",
            )
        return template.render(
            text.messages,
            text.template,
            continue_final=text.continue_final_message,
            markers=[self._marker(each) for each in text.media],
        )

    def _takes(self, kind: MediumKind) -> bool:
        words = self.vocabulary
        cards = {"image": words.vision, "video": words.videos, "audio": words.audio}
        return cards[kind] is not None

    def _marker(self, medium: MediumHeader) -> MediumMarker:
        if medium.audio is not None:
            return MediumMarker("audio", self.vocabulary.audio_marker)
        videos = self.vocabulary.videos
        if medium.video is None or videos is None:
            return MediumMarker("image", self.vocabulary.image_marker)
        known = not isinstance(videos, FrameVideos) or videos.in_templates
        return MediumMarker("video" if known else "text", videos.markers[0])

    def _render_fill_in_middle(self, prompt: str, suffix: str) -> str:
        template = self.vocabulary.completion
        if template is None:
            raise Unsupported(
                "suffix: the tokenizer does not show how this model takes text with a gap to fill; "
                "the server's --completion-template says it",
                param="suffix",
            )
        return template.write(prompt, suffix)


class _ShownMedium(msgspec.Struct, frozen=True):
    """What stands for a medium, and what its span says beside its place."""

    placeholder: int
    pieces: Pieces
    key: bytes
    columns: int
    times: int = 0
    step: float = 1.0

    @property
    def runs(self) -> list[int]:
        return [piece for piece in self.pieces if isinstance(piece, int)]

    def span(self, start: int, tokens: int) -> MediumSpan:
        rows = sum(self.runs)
        return MediumSpan(
            start=start,
            tokens=tokens,
            key=self.key,
            placeholders=0 if rows == tokens else rows,
            columns=self.columns,
            times=self.times,
            step=self.step,
        )


def _shown_image(vision: VisionCard, medium: MediumHeader) -> _ShownMedium:
    card = vision if medium.limits is None else vision.within(medium.limits)
    size = _size(card, medium)
    pieces, columns = card.pieces(*size), card.columns(*size)
    _check_rows(medium, pieces)
    processing = card.processing
    if medium.rows:
        # What a client has embedded was not processed here. The same rows may stand in other lines
        # or tiles, with other texts between them.
        processing = EMBEDDED + msgspec.msgpack.encode((pieces, columns))
    return _ShownMedium(card.placeholder, pieces, medium_key(medium.digest, processing), columns)


def _shown_video(videos: VideosCard, medium: MediumHeader, video: VideoHeader) -> _ShownMedium:
    card = videos if medium.limits is None else videos.within(medium.limits)
    seen = card.seen(medium.width, medium.height, video)
    key = medium_key(medium.digest, card.processed(video))
    times = 0 if seen.times == 1 else seen.times
    return _ShownMedium(card.placeholder, seen.pieces, key, seen.columns, times, seen.step)


def _shown_audio(card: PromptAudio, medium: MediumHeader, audio: AudioWindow) -> _ShownMedium:
    where = msgspec.msgpack.encode(audio)
    key = medium_key(medium.digest, card.processing + where)
    return _ShownMedium(card.placeholder, (card.rows(audio.seconds),), key, columns=0)


def _kind(medium: MediumHeader) -> MediumKind:
    if medium.audio is not None:
        return "audio"
    return "image" if medium.video is None else "video"


def _size(card: VisionCard, medium: MediumHeader) -> tuple[int, int]:
    """Width and height of an image, or of what a client has embedded.

    Raises:
        InvalidRequest: The client has not given what that goes by.
    """
    if medium.patches is not None:
        return card.pixels(medium.patches)
    if medium.rows and card.SIZED and not medium.width:
        text = "an embedding requires image_grid_thw or image_sizes: its tokens go by the size"
        raise InvalidRequest(text)
    return medium.width, medium.height


def _check_rows(medium: MediumHeader, pieces: Pieces) -> None:
    """Check that what a client has embedded has a row for each placeholder."""
    expected = sum(piece for piece in pieces if isinstance(piece, int))
    if medium.rows and medium.rows != expected:
        raise InvalidRequest(
            f"the embedding has {medium.rows} rows; in this model such an image has {expected}"
        )


def _other_placeholders(found: int, media: int, marker: str, field: str) -> InvalidRequest:
    if field == "prompt":
        text = f"the text has {found} placeholders {marker} for {media} media"
        return InvalidRequest(text, param=field)
    return InvalidRequest(
        f"the rendered prompt has {found} placeholders for {media} media: texts must not contain "
        "the model's placeholder, and the chat template must show media",
        param=field,
    )


def decode(vocabulary: ModelTokenizer, request: DecodeRequest) -> tuple[str, ...]:
    """Decode each row of ids, in a thread.

    Raises:
        InvalidRequest: An id is not in the vocabulary.
    """
    rows = [list(unpack_ids(row)) for row in request.token_ids]
    highest = max((token_id for row in rows for token_id in row), default=0)
    if highest >= vocabulary.size:
        raise InvalidRequest(
            f"there is no token {highest}; the vocabulary ends at {vocabulary.size - 1}",
            param="tokens",
        )
    return tuple(
        vocabulary.tokenizer.decode_batch(rows, skip_special_tokens=request.skip_special_tokens)
    )


class Batcher(Generic[T, R]):
    """Runs `work` over batches, each in the executor.

    A batch does not wait to fill: it takes the items that are there, and the next batch collects
    while it runs. The number of callers bounds the queue: each waits for its own item.

    `work` returns a result for each item, in order; an exception in place of a result is raised to
    that item's caller. An exception raised by `work` itself is a bug, and is raised to all callers
    of that batch; the next batch continues, since one text must not end the process.
    """

    def __init__(
        self,
        work: Callable[[Sequence[T]], Sequence[R | Exception]],
        executor: Executor,
        batch_max: int,
    ) -> None:
        self._work = work
        self._executor = executor
        self._batch_max = batch_max
        self._jobs: list[tuple[T, asyncio.Future[R]]] = []
        self._arrived = asyncio.Event()

    async def submit(self, item: T) -> R:
        """Return the result of one item. An item whose caller was cancelled is skipped."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._jobs.append((item, result))
        self._arrived.set()
        return await result

    async def run(self) -> None:
        """Process batches until cancelled; several may run concurrently, one per thread."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            jobs = [job for job in self._jobs[: self._batch_max] if not job[1].done()]
            del self._jobs[: self._batch_max]
            if not self._jobs:
                self._arrived.clear()
            if not jobs:
                continue
            try:
                items = [item for item, _ in jobs]
                (done,) = await asyncio.gather(
                    loop.run_in_executor(self._executor, self._work, items), return_exceptions=True
                )
            except asyncio.CancelledError:
                for _, result in jobs:
                    result.cancel()
                raise
            outcomes = [done] * len(jobs) if isinstance(done, BaseException) else done
            for (_, result), outcome in zip(jobs, outcomes, strict=True):
                if result.done():
                    continue
                if isinstance(outcome, BaseException):
                    result.set_exception(outcome)
                else:
                    result.set_result(outcome)
