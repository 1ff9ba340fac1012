"""The initial state of a response, built from its request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.openai.responses.replies import (
    ResponseReasoning,
    ResponseReply,
    ResponseText,
)
from antiphon.gateway.http.openai.responses.schema import ReasoningOptions, TextFormat, TextOptions

if TYPE_CHECKING:
    from antiphon.gateway.http.core.sampling import Json
    from antiphon.gateway.http.openai.responses.parse import ParsedResponsesRequest
    from antiphon.wire.ids import ModelName
    from antiphon.wire.sampling import SamplingParams


def draft(
    parsed: ParsedResponsesRequest,
    sampling: SamplingParams,
    *,
    model: ModelName,
    now: int,
    store: bool,
) -> ResponseReply:
    """Build the initial response.

    Args:
        parsed: The prepared request.
        sampling: Resolved sampling parameters.
        model: Name of the model.
        now: Unix time.
        store: Whether it is stored.
    """
    body = parsed.body
    return ResponseReply(
        id=parsed.id,
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
        reasoning=ResponseReasoning(effort=(body.reasoning or ReasoningOptions()).effort),
        safety_identifier=body.safety_identifier,
        store=store,
        temperature=sampling.temperature,
        text=ResponseText(
            format=_format(body.text),
            verbosity=(body.text or TextOptions()).verbosity or "medium",
        ),
        tool_choice=body.tool_choice or "auto",
        tools=list(parsed.tools.response_tools),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _format(text: TextOptions | None) -> Json:
    """Return the text format as sent, without unset fields."""
    format_ = (text or TextOptions()).format or TextFormat()
    given = {"name": format_.name, "description": format_.description, "strict": format_.strict}
    fields: dict[str, object] = {"type": format_.type}
    if format_.type == "json_schema":
        fields |= {name: value for name, value in given.items() if value is not None}
        fields["schema"] = format_.schema
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])
