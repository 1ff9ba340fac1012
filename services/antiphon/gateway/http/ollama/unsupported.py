"""Fields of Ollama's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

_CUT = UnsupportedField("whether prompts are truncated is the operator's to say", (False,))

COMMON: Mapping[str, UnsupportedField] = {
    "truncate": _CUT,
    "shift": _CUT,
    "_debug_render_only": UnsupportedField(
        "/v1/tokenize tells the tokens of a conversation", (False,)
    ),
}

CHAT: Mapping[str, UnsupportedField] = COMMON

GENERATE: Mapping[str, UnsupportedField] = {
    **COMMON,
    "template": UnsupportedField("the chat template is the operator's to say", ("",)),
    "context": UnsupportedField("send the messages of a conversation to /api/chat", ([],)),
    "images": UnsupportedField("this model reads text only", ([],)),
    "width": UnsupportedField("this model answers in text", (0,)),
    "height": UnsupportedField("this model answers in text", (0,)),
    "steps": UnsupportedField("this model answers in text", (0,)),
}

EMBED: Mapping[str, UnsupportedField] = {"truncate": _CUT}

OPTIONS: Mapping[str, UnsupportedField] = {
    "repeat_last_n": UnsupportedField("penalties are of the whole answer", (-1, 64)),
    "typical_p": UnsupportedField("typical sampling is not built", (1,)),
    "tfs_z": UnsupportedField("tail-free sampling is not built", (1,)),
    "mirostat": UnsupportedField("mirostat is not built", (0,)),
    "penalize_newline": UnsupportedField("a newline is penalised as any token", (True,)),
}
