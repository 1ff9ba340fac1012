"""Variables of the chat template that the operator sets for requests that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.template_kwargs import read_template_kwargs

if TYPE_CHECKING:
    from antiphon.gateway.requests.generation_request import GenerationRequest


class TemplateDefaults:
    """Fills in what a conversation's request leaves open; its own variables win key by key.

    Args:
        text: The JSON object of `gateway.chat_template_kwargs`.
    """

    def __init__(self, text: str) -> None:
        self._kwargs = read_template_kwargs(text)

    def filled(self, gen_request: GenerationRequest) -> GenerationRequest:
        """Add the defaults to the template's variables, for a request of any API."""
        said = self._said(gen_request)
        if said is None:
            return gen_request
        options = msgspec.json.encode(self._kwargs | said).decode()
        template = msgspec.structs.replace(gen_request.template, options=options)
        return msgspec.structs.replace(gen_request, template=template)

    def switched(self, gen_request: GenerationRequest) -> GenerationRequest:
        """Let a default that turns thinking on or off count as if the request had set it."""
        thinks, said = gen_request.thinking, self._said(gen_request)
        if thinks is None or said is None or thinks.switched is not None:
            return gen_request
        switch = thinks.format.switch
        default = None if switch is None or switch in said else self._kwargs.get(switch)
        if not isinstance(default, bool):
            return gen_request
        return msgspec.structs.replace(
            gen_request, thinking=msgspec.structs.replace(thinks, switched=default)
        )

    def _said(self, gen_request: GenerationRequest) -> dict[str, msgspec.Raw] | None:
        """The request's own variables; None where no default can apply."""
        if not self._kwargs or gen_request.messages is None:
            return None
        try:
            return msgspec.json.decode(
                gen_request.template.options or "{}", type=dict[str, msgspec.Raw]
            )
        except msgspec.DecodeError:
            return None  # the tokenizer refuses it, and names the field
