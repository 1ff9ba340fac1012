"""Parses the body of /generate into one request per prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from antiphon.gateway.http.core.chat import ParsedPrompts
from antiphon.gateway.http.core.image_options import pixel_limits
from antiphon.gateway.http.core.meta_info import FULL, GenerateResponseOptions
from antiphon.gateway.http.core.sampling_fields import (
    NAME,
    processor_of,
    schema_grammar,
    single_grammar,
)
from antiphon.gateway.http.native.schema import (
    ANSWER_TOKENS,
    AudioData,
    GenerateBody,
    ImageData,
    SamplingBody,
    VideoData,
)
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    MediumSource,
    media_fields,
)
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ClientKey
from antiphon.wire.namespaces import cache_salt
from antiphon.wire.sampling import NAMED_MAX, Grammar, GrammarKind, LogitProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.gateway.requests.pooling import Prompt

T = TypeVar("T")
D = TypeVar("D", ImageData, VideoData, AudioData)

_PREFIX = "sampling_params."
_PARAMS = f"{_PREFIX}custom_params"
_CLIENT_FIELDS = {
    "max_tokens": "max_new_tokens",
    "details.ids": "sampling_params.n",  # always returned
    "details.logprobs": "return_logprob",
    "details.top": "top_logprobs_num",
    "details.named_ids": "token_ids_logprob",
    "details.hidden": "return_hidden_states",
    "details.prompt_start": "logprob_start_len",
    "min_tokens": "sampling_params.min_new_tokens",
    "max_new_tokens": "sampling_params.max_new_tokens",
    "processors": _PARAMS,
    "logit_bias": "sampling_params.logit_bias",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "stop_regex": "sampling_params.stop_regex",
}
"""Field names of /generate that differ from the internal ones."""
_FALSE = False


class ParsedGenerateRequest(ParsedPrompts, frozen=True, kw_only=True):
    all_reply_options: tuple[GenerateResponseOptions, ...]
    batch: bool
    """Whether the response is a list."""


def parse_generate(body: GenerateBody) -> ParsedGenerateRequest:
    prompts, batch = prompts_of(body.text, body.input_ids)
    count = len(prompts)
    samplings = _per_prompt(body.sampling_params, SamplingBody(), count, "sampling_params")
    choices = {sampling.n or 1 for sampling in samplings}
    if len(choices) > 1:
        raise InvalidRequest.at("sampling_params.n", "must be the same for all prompts of a batch")
    named_ids = _named_ids(body, count, batch=batch)
    all_reply_options = _response_options(
        body, named_ids, [one.stream_interval or 1 for one in samplings]
    )
    names = _names(body.rid, count)
    media = _media(body, count, batch=batch)
    if body.session_params is not None and body.session_id is not None:
        text = "session_id and session_params cannot be combined"
        raise InvalidRequest(text, param="session_id")
    if body.session_params is not None and any(media):
        given = {"image_data": body.image_data, "video_data": body.video_data}
        field = next((name for name, each in given.items() if each), "audio_data")
        raise Unsupported.at(field, "media cannot be part of a session")
    if body.session_params is not None and (batch or choices != {1}):
        raise InvalidRequest.at("session_params", "only one prompt is allowed")
    salts = map(
        cache_salt,
        _per_prompt(body.cache_salt, "", count, "cache_salt"),
        _per_prompt(body.extra_key, "", count, "extra_key"),
    )
    processors = _processors(body, samplings)
    each = zip(prompts, media, samplings, processors, all_reply_options, names, salts, strict=True)
    return ParsedGenerateRequest(
        gen_requests=tuple(_request(body, *parts) for parts in each),
        all_reply_options=all_reply_options,
        stream=bool(body.stream),
        batch=batch or choices != {1},
        budget=body.max_thinking_tokens,
    )


def prompts_of(
    text: str | list[str] | None, input_ids: list[int | list[int]] | None
) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether the body has a list."""
    if (text is None) == (input_ids is None):
        raise InvalidRequest("exactly one of text and input_ids is required", param="text")
    if text is not None:
        return ([text], False) if isinstance(text, str) else (list(text), True)
    ids = input_ids or []
    rows = [tuple(row) for row in ids if isinstance(row, list)]
    if not rows:
        return [tuple(each for each in ids if isinstance(each, int))], False
    if len(rows) != len(ids):
        raise InvalidRequest.at(
            "input_ids", "must be a list of token ids or a list of token id lists, not a mix"
        )
    return list(rows), True


def _per_prompt(given: T | list[T] | None, default: T, count: int, field: str) -> list[T]:
    if isinstance(given, list):
        values = cast("list[T]", given)
        if len(values) != count:
            text = f"{field} has {len(values)} entries for {count} prompts"
            raise InvalidRequest(text, param=field)
        return values
    return [default if given is None else given] * count


def _media(body: GenerateBody, count: int, *, batch: bool) -> list[tuple[MediumSource, ...]]:
    """Return the media of each prompt: images, videos behind them, and audio behind these."""
    images = _of_prompts(body.image_data, "image_data", _source, count, batch=batch)
    videos = _of_prompts(body.video_data, "video_data", _video, count, batch=batch)
    audios = _of_prompts(body.audio_data, "audio_data", _audio, count, batch=batch)
    return [
        of_images + of_videos + of_audios
        for of_images, of_videos, of_audios in zip(images, videos, audios, strict=True)
    ]


def _of_prompts(
    given: str | D | list[str | D | list[str | D | None] | None] | None,
    field: str,
    source: Callable[[str | D, str], MediumSource],
    count: int,
    *,
    batch: bool,
) -> list[tuple[MediumSource, ...]]:
    """Return the media of each prompt. One without a list is a medium of every prompt."""

    def sources(media: Sequence[str | D | None], paths: Sequence[str]) -> tuple[MediumSource, ...]:
        pairs = zip(media, paths, strict=True)
        return tuple(source(each, path) for each, path in pairs if each is not None)

    if not isinstance(given, list):
        return [sources([given], [field])] * count
    if not given:
        return [()] * count
    paths = [f"{field}[{index}]" for index in range(len(given))]
    if not batch and not any(isinstance(each, list) for each in given):
        return [sources([each for each in given if not isinstance(each, list)], paths)]
    rows = _per_prompt(given, None, count, field)
    return [
        sources(row, [f"{path}[{index}]" for index in range(len(row))])
        if isinstance(row, list)
        else sources([row], [path])
        for row, path in zip(rows, paths, strict=True)
    ]


def _source(image: str | ImageData, path: str) -> MediumSource:
    if isinstance(image, str):
        return MediumSource(image, path)
    match image.format:
        case None:
            if not image.url:
                raise InvalidRequest.at(f"{path}.url", "an image requires url")
            return MediumSource(image.url, path, detail=image.detail)
        case "precomputed_embedding" | "PRECOMPUTED_EMBEDDING":
            return image.source(path)
        case _:
            text = "must be precomputed_embedding, or send the image: encoders preprocess it"
            raise Unsupported.at(f"{path}.format", text)


def _video(video: str | VideoData, path: str) -> MediumSource:
    url = video if isinstance(video, str) else video.url
    if not url:
        raise InvalidRequest.at(path, "a video requires url")
    return MediumSource(url, path, video=True)


def _audio(audio: str | AudioData, path: str) -> MediumSource:
    url = audio if isinstance(audio, str) else audio.url
    if not url:
        raise InvalidRequest.at(path, "audio requires url")
    return MediumSource(url, path, sound=True)


def _names(rid: str | list[str] | None, count: int) -> list[str | None]:
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    names = _per_prompt(rid, "", count, "rid")
    given = [name for name in names if name]
    if len(set(given)) < len(given):
        raise InvalidRequest("Duplicate request IDs", param="rid")
    return [name or None for name in names]


def _response_options(
    body: GenerateBody, named: list[tuple[int, ...]], intervals: list[int]
) -> tuple[GenerateResponseOptions, ...]:
    count = len(intervals)
    return tuple(
        GenerateResponseOptions(
            logprobs=logprobs,
            start=max(-1, start) if logprobs else -1,
            top=top if logprobs else 0,
            named_ids=named_ids if logprobs else (),
            texts=bool(body.return_text_in_logprobs),
            hidden=hidden if isinstance(hidden, str) else FULL if hidden else "",
            prompt_ids=bool(body.return_prompt_token_ids),
            interval=interval,
        )
        for interval, named_ids, hidden, logprobs, start, top in zip(
            intervals,
            named,
            _per_prompt(body.return_hidden_states, _FALSE, count, "return_hidden_states"),
            _per_prompt(body.return_logprob, _FALSE, count, "return_logprob"),
            _per_prompt(body.logprob_start_len, -1, count, "logprob_start_len"),
            _per_prompt(body.top_logprobs_num, 0, count, "top_logprobs_num"),
            strict=True,
        )
    )


def _named_ids(body: GenerateBody, count: int, *, batch: bool) -> list[tuple[int, ...]]:
    """Return the token ids to report for each prompt: the same, or one list each."""
    given = body.token_ids_logprob or []
    flat = tuple(each for each in given if isinstance(each, int))
    rows = [tuple(row) for row in given if isinstance(row, list)]
    field = "token_ids_logprob"
    if len(flat) > NAMED_MAX:
        raise InvalidRequest.at(field, f"at most {NAMED_MAX} ids are allowed")
    if not rows:
        return [flat] * count
    if flat or not batch:
        raise InvalidRequest.at(field, "must be a flat list of integers")
    return _per_prompt(rows, (), count, field)


def _request(
    body: GenerateBody,
    prompt: str | tuple[int, ...],
    media: tuple[MediumSource, ...],
    sampling: SamplingBody,
    processors: tuple[LogitProcessor, ...],
    reply_options: GenerateResponseOptions,
    name: str | None,
    salt: bytes,
) -> GenerationRequest:
    _check_served(sampling)
    field, grammar = _output_constraint(sampling)
    return GenerationRequest(
        api="native",
        model=None,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else prompt,
        fields={
            **_CLIENT_FIELDS,
            "prompt": "text" if isinstance(prompt, str) else "input_ids",
            "grammar": field,
            **media_fields(media),
        },
        media=media,
        pixel_limits=pixel_limits(body.mm_processor_kwargs),
        tokens_max=sampling.max_new_tokens,
        tokens_default=ANSWER_TOKENS,
        choices=sampling.n or 1,
        sampling=sampling.options(
            processors=processors,
            grammar=grammar,
            outputs=reply_options.token_outputs,
            prefix=_PREFIX,
        ),
        stop=sampling.stop_strings(token_texts=reply_options.texts),
        priority=body.priority,
        cache_salt=salt,
        key=None if name is None else ClientKey(name),
        private=bool(body.no_logs),
    )


def _check_served(sampling: SamplingBody) -> None:
    if sampling.spaces_between_special_tokens is False:
        raise Unsupported.at(f"{_PREFIX}spaces_between_special_tokens", "only true is supported")
    if sampling.watermark is not None and sampling.watermark.enabled:
        raise Unsupported.at(f"{_PREFIX}watermark", "watermarks are not supported")


def _processors(
    body: GenerateBody, samplings: Sequence[SamplingBody]
) -> list[tuple[LogitProcessor, ...]]:
    named = _per_prompt(body.custom_logit_processor, None, len(samplings), NAME)
    return [
        processor_of(name, sampling.custom_params, field=_PARAMS)
        for name, sampling in zip(named, samplings, strict=True)
    ]


def _output_constraint(sampling: SamplingBody) -> tuple[str, Grammar | None]:
    tag = schema_grammar(GrammarKind.STRUCTURAL_TAG, sampling.structural_tag)
    forms = sampling.grammars() | {"structural_tag": tag}
    return single_grammar({f"{_PREFIX}{name}": form for name, form in forms.items()})
