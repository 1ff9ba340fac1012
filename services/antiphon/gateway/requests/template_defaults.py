"""Operator defaults for chat template variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.gateway import read_template_kwargs

if TYPE_CHECKING:
    from antiphon.gateway.requests.generation_request import GenerationRequest


class TemplateDefaults:
    """Fills in variables that a request does not set; the request's take precedence key by key.

    Args:
        text: JSON object of `gateway.chat_template_kwargs`.
    """

    def __init__(self, text: str) -> None:
        self._kwargs = read_template_kwargs(text)

    def filled(self, gen_request: GenerationRequest) -> GenerationRequest:
        """Add the defaults to the template variables of a request."""
        variables = self._own_variables(gen_request)
        if variables is None:
            return gen_request
        options = msgspec.json.encode(self._kwargs | variables).decode()
        template = msgspec.structs.replace(gen_request.template, options=options)
        return msgspec.structs.replace(gen_request, template=template)

    def with_reasoning_default(self, gen_request: GenerationRequest) -> GenerationRequest:
        """Apply a default that turns reasoning on or off as if the request had set it."""
        reasoning, variables = gen_request.reasoning, self._own_variables(gen_request)
        if reasoning is None or variables is None or reasoning.enabled is not None:
            return gen_request
        switch = reasoning.format.switch
        default = None if switch is None or switch in variables else self._kwargs.get(switch)
        if not isinstance(default, bool):
            return gen_request
        return msgspec.structs.replace(
            gen_request, reasoning=msgspec.structs.replace(reasoning, enabled=default)
        )

    def _own_variables(self, gen_request: GenerationRequest) -> dict[str, msgspec.Raw] | None:
        """Return the request's variables, or None if no default can apply."""
        if not self._kwargs or gen_request.messages is None:
            return None
        try:
            return msgspec.json.decode(
                gen_request.template.options or "{}", type=dict[str, msgspec.Raw]
            )
        except msgspec.DecodeError:
            return None  # the tokenizer rejects it and names the field
