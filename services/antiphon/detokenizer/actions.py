"""What the detokenizer's machine asks its service to publish."""

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
    """Tell a worker that tokens from an offset on are not wanted."""

    worker: InstanceId
    stop: StopChoice


@dataclass(frozen=True, slots=True)
class SendResend:
    """Ask a worker for what was missed."""

    worker: InstanceId
    resend: ResendTokens


Action = SendText | SendStop | SendResend
