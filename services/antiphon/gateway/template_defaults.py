"""Variables of the chat template that the operator sets for requests that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.template_kwargs import read_template_kwargs

if TYPE_CHECKING:
    from antiphon.gateway.ask import Ask


class TemplateDefaults:
    """Fills in what a conversation's request leaves open; its own variables win key by key.

    Args:
        text: The JSON object of `gateway.chat_template_kwargs`.
    """

    def __init__(self, text: str) -> None:
        self._kwargs = read_template_kwargs(text)

    def filled(self, ask: Ask) -> Ask:
        """Add the defaults to the template's variables, for a request of any API."""
        said = self._said(ask)
        if said is None:
            return ask
        options = msgspec.json.encode(self._kwargs | said).decode()
        template = msgspec.structs.replace(ask.template, options=options)
        return msgspec.structs.replace(ask, template=template)

    def switched(self, ask: Ask) -> Ask:
        """Let a default that turns thinking on or off count as if the request had set it."""
        thinks, said = ask.thinking, self._said(ask)
        if thinks is None or said is None or thinks.switched is not None:
            return ask
        switch = thinks.format.switch
        default = None if switch is None or switch in said else self._kwargs.get(switch)
        if not isinstance(default, bool):
            return ask
        return msgspec.structs.replace(
            ask, thinking=msgspec.structs.replace(thinks, switched=default)
        )

    def _said(self, ask: Ask) -> dict[str, msgspec.Raw] | None:
        """The request's own variables; None where no default can apply."""
        if not self._kwargs or ask.messages is None:
            return None
        try:
            return msgspec.json.decode(ask.template.options or "{}", type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return None  # the tokenizer refuses it, and names the field
