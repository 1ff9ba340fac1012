"""Which worker and detokenizer serve a request, read from the commands that the link passes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.wire.codec import MalformedMessage, decode
from antiphon.wire.command import Admit, Rebind
from antiphon.wire.routes import COMMAND

if TYPE_CHECKING:
    from tests.support.nats_link import LinkMessage

    from antiphon.wire.base import Message
    from antiphon.wire.command import Command
    from antiphon.wire.routes import Route

M = TypeVar("M", bound="Message")


class Placements:
    """Watches a link for the commands that workers are sent."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}

    def of(self, request_id: str) -> tuple[str, ...]:
        """The worker and the detokenizer of a request; empty before it is bound."""
        return self._of.get(request_id, ())

    def detokenizer_of(self, worker: str) -> str | None:
        """The detokenizer of the request that a worker was sent last, if it was sent any."""
        return next((each for at, each in reversed(self._of.values()) if at == worker), None)

    def __call__(self, message: LinkMessage) -> None:
        if message.sent:
            return
        for command in commands_in(message):
            if isinstance(command, Admit | Rebind):
                self._of[command.request_id] = (message.client, command.detokenizer)


def commands_in(message: LinkMessage) -> tuple[Command, ...]:
    """The commands to a worker, if the message has any."""
    batch = read_message(COMMAND, message)
    return () if batch is None else batch.commands


def read_message(route: Route[M], message: LinkMessage) -> M | None:
    """Decode a message, if it is of this route."""
    words, pattern = message.subject.split("."), route.subject.split(".")
    named = zip(words[-len(pattern) :], pattern, strict=False)
    if not all(part.startswith("{") or word == part for word, part in named):
        return None
    try:
        return decode(message.payload, route.carries)
    except (MalformedMessage, msgspec.DecodeError):
        return None
