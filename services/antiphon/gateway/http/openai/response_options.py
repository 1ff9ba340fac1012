"""Optional fields of chat and text completion responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.meta_info import GenerateResponseOptions
from antiphon.gateway.http.core.output_parser import OutputParserOptions
from antiphon.gateway.http.openai.schema import CompletionBody, StreamOptions
from antiphon.gateway.requests.generation_request import TokenOutputFields
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from antiphon.gateway.http.openai.schema import CompletionFields

CHAT_FIELDS = TokenOutputFields(
    ids="return_token_ids",
    logprobs="logprobs",
    top="top_logprobs",
    named_ids="logprobs",
    hidden="return_hidden_states",
)
TEXT_FIELDS = msgspec.structs.replace(CHAT_FIELDS, top="logprobs")


class OpenAiResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which fields the client requested.

    Attributes:
        choices: Number of choices per prompt.
        name: The client's request id.
        logprobs: Whether to return logprobs.
        usage_last: Whether a stream ends with a usage chunk; None for the server's default.
        usage_always: Whether each chunk has usage.
        hidden: Whether to return hidden states.
        ids: Whether to return output token ids.
        prompt_ids: Whether to return prompt token ids.
        cached_details: Whether to return cached tokens by tier.
        meta_info: Whether each choice has the `meta_info` of /generate.
        input_ids: Whether `sglext` has prompt token ids.
        output_ids: Whether `sglext` has output token ids.
        recorded: Token outputs that `meta_info` has.
        echo: Whether the text starts with the prompt.
        parser_options: How to parse the output of a chat.
    """

    choices: int = 1
    name: str | None = None
    logprobs: bool = False
    usage_last: bool | None = None
    usage_always: bool = False
    hidden: bool = False
    ids: bool = False
    prompt_ids: bool = False
    cached_details: bool = False
    meta_info: bool = False
    input_ids: bool = False
    output_ids: bool = False
    recorded: GenerateResponseOptions = GenerateResponseOptions()
    echo: bool = False
    parser_options: OutputParserOptions = OutputParserOptions()

    @property
    def bare(self) -> bool:
        """Whether chunks in the middle of the output have nothing but text."""
        return not (self.logprobs or self.usage_always or self.hidden or self.ids)


def response_options(
    body: CompletionFields, *, logprobs: bool, top: int, prompt_ids: bool, echo: bool = False
) -> OpenAiResponseOptions:
    """Collect the response options of a body.

    Args:
        body: The body.
        logprobs: Whether logprobs are requested.
        top: Number of top logprobs.
        prompt_ids: Whether prompt token ids are requested.
        echo: Whether the text starts with the prompt.
    """
    options = body.stream_options or StreamOptions()
    return OpenAiResponseOptions(
        choices=body.n or 1,
        name=body.rid,
        logprobs=logprobs,
        usage_last=options.include_usage,
        usage_always=bool(options.continuous_usage_stats),
        hidden=bool(body.return_hidden_states),
        ids=bool(body.return_token_ids),
        prompt_ids=prompt_ids,
        cached_details=bool(body.return_cached_tokens_details),
        meta_info=bool(body.return_meta_info),
        input_ids=bool(body.return_input_ids_in_sglext),
        output_ids=bool(body.return_output_ids_in_sglext),
        recorded=GenerateResponseOptions(
            logprobs=logprobs,
            start=0 if echo and logprobs else -1,
            top=top,
            texts=True,
            hidden="last" if body.return_hidden_states else "",
        ),
        echo=echo,
    )


def with_id_field(fields: TokenOutputFields, body: CompletionFields) -> TokenOutputFields:
    """Name the field that requested output token ids."""
    wanting = [name for name, wants in _fields_needing_ids(body).items() if wants]
    return msgspec.structs.replace(fields, ids=wanting[0]) if wanting else fields


def token_outputs_wanted(
    body: CompletionFields, *, logprobs: bool, top: int, prompt_too: bool = False
) -> TokenOutputParams | None:
    """Token outputs to request from the engine, of output and possibly prompt, if any."""
    hidden, ids = bool(body.return_hidden_states), any(_fields_needing_ids(body).values())
    if not (logprobs or hidden or ids):
        return None
    return TokenOutputParams(
        ids=ids, logprobs=logprobs, top=top, hidden=hidden, prompt_start=0 if prompt_too else -1
    )


def _fields_needing_ids(body: CompletionFields) -> dict[str, bool | None]:
    """Fields that need output token ids: `meta_info` counts them."""
    return {
        "return_token_ids": body.return_token_ids,
        "return_output_ids_in_sglext": body.return_output_ids_in_sglext,
        "return_meta_info": body.return_meta_info,
        "session_params": isinstance(body, CompletionBody) and body.session_params is not None,
    }
