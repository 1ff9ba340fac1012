"""Reasoning formats by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reasoning import (
    apertus,
    cohere_command4,
    gpt_oss,
    kimi,
    kimi_k3,
    minimax_m3,
    mistral,
    think,
)
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    apertus.FORMAT,
    cohere_command4.FORMAT,
    gpt_oss.FORMAT,
    kimi.FORMAT,
    kimi_k3.FORMAT,
    minimax_m3.FORMAT,
    mistral.FORMAT,
    think.ALWAYS,
    think.APPENDED,
    think.ASKED,
    think.MARKED,
    think.SWITCHED,
)

_BY_NAME = {name: format_ for format_ in REASONING_FORMATS for name in format_.names}


def reasoning_format(name: str) -> ReasoningFormat:
    """Return a format by name.

    Raises:
        InvalidRequest: It is unknown; the message lists the known ones.
    """
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        message = f"unknown reasoning parser {name!r}; available are {known}"
        raise InvalidRequest(message, param="reasoning_parser")
    return _BY_NAME[name]
