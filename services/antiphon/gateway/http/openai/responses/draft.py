"""A response before anything was said: all that is known of it from what was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.openai.responses.replies import (
    ReasoningSaid,
    ResponseReply,
    TextSaid,
)
from antiphon.gateway.http.openai.responses.schema import ReasoningOptions, TextFormat, TextOptions

if TYPE_CHECKING:
    from antiphon.gateway.http.openai.responses.parse import ParsedResponsesRequest
    from antiphon.gateway.http.openai.schema import Json
    from antiphon.wire.ids import ModelName
    from antiphon.wire.sampling import SamplingParams


def draft(
    said: ParsedResponsesRequest,
    sampling: SamplingParams,
    *,
    model: ModelName,
    now: int,
    store: bool,
) -> ResponseReply:
    """Begin a response.

    Args:
        said: What was asked.
        sampling: What its tokens are drawn from.
        model: The one that answers.
        now: Seconds since 1970.
        store: Whether it is kept.
    """
    body = said.body
    return ResponseReply(
        id=said.id,
        created_at=now,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningSaid(effort=(body.reasoning or ReasoningOptions()).effort),
        safety_identifier=body.safety_identifier,
        store=store,
        temperature=sampling.temperature,
        text=TextSaid(
            format=_format(body.text),
            verbosity=(body.text or TextOptions()).verbosity or "medium",
        ),
        tool_choice=body.tool_choice or "auto",
        tools=list(said.tools.told),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _format(text: TextOptions | None) -> Json:
    """As it was sent, without what was left out."""
    said = (text or TextOptions()).format or TextFormat()
    given = {"name": said.name, "description": said.description, "strict": said.strict}
    whole: dict[str, object] = {"type": said.type}
    if said.type == "json_schema":
        whole |= {name: value for name, value in given.items() if value is not None}
        whole["schema"] = said.schema
    return msgspec.json.decode(msgspec.json.encode(whole), type=dict[str, msgspec.Raw])
