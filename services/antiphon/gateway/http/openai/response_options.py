"""What is told beside the text of chat and text completions, as their bodies ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.output_parser import OutputParserOptions
from antiphon.gateway.http.native import parse as native
from antiphon.gateway.http.openai.schema import CompletionBody, StreamOptions
from antiphon.gateway.requests.generation_request import TokenOutputFields
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from antiphon.gateway.http.openai.schema import Body

CHAT_FIELDS = TokenOutputFields(
    ids="return_token_ids",
    logprobs="logprobs",
    top="top_logprobs",
    named_ids="logprobs",
    hidden="return_hidden_states",
)
TEXT_FIELDS = msgspec.structs.replace(CHAT_FIELDS, top="logprobs")


class OpenAiResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to be told beside the text.

    Attributes:
        choices: Answers to each prompt that it wants.
        name: Its own for the answer.
        logprobs: Whether log-probabilities are told.
        usage_last: Whether a stream ends with a chunk of the tokens; None: as the server does.
        usage_always: Whether each chunk of it has them.
        hidden: Whether hidden states are told.
        ids: Whether ids of the answer are told.
        prompt_ids: Whether ids of the prompt are told.
        cached_details: Whether it is told where the cached tokens were.
        meta_info: Whether each choice tells what /generate would of it.
        input_ids: Whether ids of the prompts are told beside the choices.
        output_ids: Whether those of the answers are.
        recorded: What `meta_info` tells of tokens.
        echo: Whether the text begins with the prompt.
        hearing: How a chat's answer is taken apart.
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
    recorded: native.GenerateResponseOptions = native.GenerateResponseOptions()
    echo: bool = False
    parser_options: OutputParserOptions = OutputParserOptions()

    @property
    def bare(self) -> bool:
        """Whether a chunk in the middle of an answer tells nothing beside the text."""
        return not (self.logprobs or self.usage_always or self.hidden or self.ids)


def response_options(
    body: Body, *, logprobs: bool, top: int, prompt_ids: bool, echo: bool = False
) -> OpenAiResponseOptions:
    """What a body wants to be told.

    Args:
        body: What was sent.
        logprobs: Whether that is log-probabilities.
        top: And of how many of the likeliest.
        prompt_ids: Whether it is the ids of the prompt.
        echo: Whether the text begins with the prompt.
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
        recorded=native.GenerateResponseOptions(
            logprobs=logprobs,
            start=0 if echo and logprobs else -1,
            top=top,
            texts=True,
            hidden="last" if body.return_hidden_states else "",
        ),
        echo=echo,
    )


def with_id_field(fields: TokenOutputFields, body: Body) -> TokenOutputFields:
    """Call ids of the answer by the field that wants them."""
    wanting = [name for name, wants in _fields_needing_ids(body).items() if wants]
    return msgspec.structs.replace(fields, ids=wanting[0]) if wanting else fields


def token_outputs_wanted(
    body: Body, *, logprobs: bool, top: int, prompt_too: bool = False
) -> TokenOutputParams | None:
    """What the engine is asked for, of the answer and perhaps of the prompt; None: text alone."""
    hidden, ids = bool(body.return_hidden_states), any(_fields_needing_ids(body).values())
    if not (logprobs or hidden or ids):
        return None
    return TokenOutputParams(
        ids=ids, logprobs=logprobs, top=top, hidden=hidden, prompt_start=0 if prompt_too else -1
    )


def _fields_needing_ids(body: Body) -> dict[str, bool | None]:
    """The fields for which ids of the answer have to be known: `meta_info` counts them."""
    return {
        "return_token_ids": body.return_token_ids,
        "return_output_ids_in_sglext": body.return_output_ids_in_sglext,
        "return_meta_info": body.return_meta_info,
        "session_params": isinstance(body, CompletionBody) and body.session_params is not None,
    }
