"""The body of /generate, checked into asks: one for each prompt of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from antiphon.gateway.http.core.processors import NAME, processor_of
from antiphon.gateway.http.core.structured_output import (
    schema_text,
    sglang_grammars,
    single_grammar,
)
from antiphon.gateway.http.native.schema import ANSWER_TOKENS, GenerateBody, SamplingBody
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    SamplingOptions,
    TokenOutputFields,
)
from antiphon.wire.digests import cache_salt
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.grammar import Grammar, GrammarKind
from antiphon.wire.ids import ClientKey
from antiphon.wire.sampling import NAMED_MAX, StopStrings, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.core.structured_output import RequestedGrammar
    from antiphon.wire.processors import LogitProcessor

T = TypeVar("T")

FULL = "full"
"""Hidden states of the prompt, too."""
_FIELDS = TokenOutputFields(
    ids="sampling_params.n",  # they are always told
    logprobs="return_logprob",
    top="top_logprobs_num",
    named_ids="token_ids_logprob",
    hidden="return_hidden_states",
    start="logprob_start_len",
)
_PARAMS = "sampling_params.custom_params"
_CLIENT_FIELDS = {
    "min_tokens": "sampling_params.min_new_tokens",
    "max_new_tokens": "sampling_params.max_new_tokens",
    "processors": _PARAMS,
    "logit_bias": "sampling_params.logit_bias",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "stop_regex": "sampling_params.stop_regex",
}
"""What /generate calls fields that others call otherwise."""
_FALSE = False


class GenerateResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one prompt's answers beside their text and ids.

    Attributes:
        logprobs: Whether log-probabilities are told.
        start: From which token of the prompt on; -1: of the answer only.
        top: Of how many of the likeliest.
        named_ids: And of these.
        texts: Whether the text of each token is named.
        hidden: `full`, `last`, or nothing.
        prompt_ids: Whether the ids of the prompt are told.
        interval: How many tokens are worth an event of a stream, after the first.
    """

    logprobs: bool = False
    start: int = -1
    top: int = 0
    named_ids: tuple[int, ...] = ()
    texts: bool = False
    hidden: str = ""
    prompt_ids: bool = False
    interval: int = 1

    @property
    def needs_first_text(self) -> bool:
        """Whether the text of the prompt's first token is told, which no detail has."""
        return self.logprobs and self.texts and self.start == 0

    @property
    def token_outputs(self) -> TokenOutputParams:
        """What the engine is asked for; ids always are."""
        full = self.hidden == FULL
        return TokenOutputParams(
            ids=True,
            logprobs=self.logprobs,
            top=self.top,
            named_ids=self.named_ids,
            hidden=bool(self.hidden),
            prompt_start=0 if full else self.start,
        )


class ParsedGenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was read.

    Attributes:
        batch: Whether the reply is a list.
        budget: After how many tokens thinking is ended; None: never.
    """

    gen_requests: tuple[GenerationRequest, ...]
    all_reply_options: tuple[GenerateResponseOptions, ...]
    stream: bool
    batch: bool
    budget: int | None


def parse_generate(body: GenerateBody) -> ParsedGenerateRequest:
    """Read a body.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    prompts, batch = _prompts(body)
    count = len(prompts)
    samplings = _per_prompt(body.sampling_params, SamplingBody(), count, "sampling_params")
    choices = {sampling.n or 1 for sampling in samplings}
    if len(choices) > 1:
        raise InvalidRequest("all of a batch have the same n", param="sampling_params.n")
    named_ids = _named_ids(body, count, batch=batch)
    all_reply_options = _response_options(
        body, named_ids, [one.stream_interval or 1 for one in samplings]
    )
    names = _names(body.rid, count)
    if body.session_params is not None and body.session_id is not None:
        text = "give either session_id or session_params"
        raise InvalidRequest(text, param="session_id")
    if body.session_params is not None and (batch or choices != {1}):
        raise InvalidRequest("a session takes one prompt at a time", param="session_params")
    salts = map(
        cache_salt,
        _per_prompt(body.cache_salt, "", count, "cache_salt"),
        _per_prompt(body.extra_key, "", count, "extra_key"),
    )
    processors = _processors(body, samplings)
    each = zip(prompts, samplings, processors, all_reply_options, names, salts, strict=True)
    return ParsedGenerateRequest(
        gen_requests=tuple(_ask(body, *parts) for parts in each),
        all_reply_options=all_reply_options,
        stream=bool(body.stream),
        batch=batch or choices != {1},
        budget=body.max_thinking_tokens,
    )


def _prompts(body: GenerateBody) -> tuple[list[str | tuple[int, ...]], bool]:
    """The prompts, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return list(body.text), True
    ids = body.input_ids or []
    rows = [tuple(row) for row in ids if isinstance(row, list)]
    if not rows:
        return [tuple(each for each in ids if isinstance(each, int))], False
    if len(rows) != len(ids):
        raise InvalidRequest("token ids, or lists of them; not both", param="input_ids")
    return list(rows), True


def _per_prompt(given: T | list[T] | None, default: T, count: int, field: str) -> list[T]:
    """One value for each prompt."""
    if isinstance(given, list):
        values = cast("list[T]", given)
        if len(values) != count:
            text = f"{field} has {len(values)} entries for {count} prompts"
            raise InvalidRequest(text, param=field)
        return values
    return [default if given is None else given] * count


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
    """The ids that are told of, for each prompt: the same, or a list of its own."""
    given = body.token_ids_logprob or []
    flat = tuple(each for each in given if isinstance(each, int))
    rows = [tuple(row) for row in given if isinstance(row, list)]
    field = "token_ids_logprob"
    if len(flat) > NAMED_MAX:
        raise InvalidRequest(f"{field}: at most {NAMED_MAX} ids", param=field)
    if not rows:
        return [flat] * count
    if flat or not batch:
        raise InvalidRequest(f"{field} is a flat list of integers", param=field)
    return _per_prompt(rows, (), count, field)


def _ask(
    body: GenerateBody,
    prompt: str | tuple[int, ...],
    said: SamplingBody,
    processors: tuple[LogitProcessor, ...],
    reply_options: GenerateResponseOptions,
    name: str | None,
    salt: bytes,
) -> GenerationRequest:
    _check_served(said)
    form = _form(said)
    return GenerationRequest(
        door="native",
        model=None,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else prompt,
        prompt_field="text" if isinstance(prompt, str) else "input_ids",
        fields=_CLIENT_FIELDS,
        tokens_max=said.max_new_tokens,
        tokens_field="max_new_tokens",
        tokens_default=ANSWER_TOKENS,
        choices=said.n or 1,
        sampling=_sampling(said, processors, reply_options, form),
        grammar_field=form.field if form else "grammar",
        detail_fields=_FIELDS,
        stop=StopStrings(
            strings=_as_tuple(said.stop),
            patterns=_as_tuple(said.stop_regex),
            include=bool(said.no_stop_trim),
            skip_special_tokens=said.skip_special_tokens is not False,
            token_texts=reply_options.texts,
        ),
        priority=body.priority,
        cache_salt=salt,
        key=None if name is None else ClientKey(name),
        private=bool(body.no_logs),
    )


def _check_served(said: SamplingBody) -> None:
    if said.spaces_between_special_tokens is False:
        field = "sampling_params.spaces_between_special_tokens"
        raise Unsupported(f"{field}: the tokenizer decides", param=field)
    if said.watermark is not None and said.watermark.enabled:
        field = "sampling_params.watermark"
        raise Unsupported(f"{field}: watermarks are not built", param=field)


def _processors(
    body: GenerateBody, samplings: Sequence[SamplingBody]
) -> list[tuple[LogitProcessor, ...]]:
    named = _per_prompt(body.custom_logit_processor, None, len(samplings), NAME)
    return [
        processor_of(name, said.custom_params, field=_PARAMS)
        for name, said in zip(named, samplings, strict=True)
    ]


def _sampling(
    said: SamplingBody,
    processors: tuple[LogitProcessor, ...],
    reply_options: GenerateResponseOptions,
    form: RequestedGrammar | None,
) -> SamplingOptions:
    if said.top_k == 0:
        raise InvalidRequest(
            "top_k: -1 keeps every token, else it is 1 or more", param="sampling_params.top_k"
        )
    return SamplingOptions(
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
        min_p=said.min_p,
        frequency_penalty=said.frequency_penalty or 0.0,
        presence_penalty=said.presence_penalty or 0.0,
        repetition_penalty=said.repetition_penalty,
        tokens_min=said.min_new_tokens or 0,
        logit_bias=said.logit_bias or {},
        processors=processors,
        grammar=form.grammar if form else None,
        seed=said.sampling_seed,
        stop_token_ids=tuple(said.stop_token_ids or ()),
        ignore_eos=bool(said.ignore_eos),
        details=reply_options.token_outputs,
    )


def _form(said: SamplingBody) -> RequestedGrammar | None:
    plain = sglang_grammars(regex=said.regex, ebnf=said.ebnf, json_schema=said.json_schema)
    tag = schema_text(said.structural_tag)
    tagged = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=tag) if tag else None
    forms = plain | {"structural_tag": tagged}
    return single_grammar({f"sampling_params.{name}": form for name, form in forms.items()})


def _as_tuple(stops: str | list[str] | None) -> tuple[str, ...]:
    return (stops,) if isinstance(stops, str) else tuple(stops or ())
