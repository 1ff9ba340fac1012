"""Messages that the detokenizer's state machine returns to its service for publishing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.command import ResendTokens, StopChoice
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.text import TextBatch


@dataclass(frozen=True, slots=True)
class SendText:
    """Publish text to a gateway."""

    batch: TextBatch


@dataclass(frozen=True, slots=True)
class SendStop:
    """Stop a choice at its worker: tokens from an offset on are not wanted."""

    worker: InstanceId
    stop: StopChoice


@dataclass(frozen=True, slots=True)
class SendResend:
    """Request missed tokens from a worker."""

    worker: InstanceId
    resend: ResendTokens


Action = SendText | SendStop | SendResend
