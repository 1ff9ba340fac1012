"""Documented fields of the Ollama API that this server rejects, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

_CUT = UnsupportedField("truncation of prompts is configured by the operator", (False,))

COMMON: Mapping[str, UnsupportedField] = {
    "truncate": _CUT,
    "shift": _CUT,
    "_debug_render_only": UnsupportedField(
        "use /v1/tokenize to see the tokens of a conversation", (False,)
    ),
}

CHAT: Mapping[str, UnsupportedField] = COMMON

GENERATE: Mapping[str, UnsupportedField] = {
    **COMMON,
    "template": UnsupportedField("the chat template is configured by the operator", ("",)),
    "context": UnsupportedField("send the messages of the conversation to /api/chat", ([],)),
    "images": UnsupportedField("this model accepts text only", ([],)),
    "width": UnsupportedField("this model generates text only", (0,)),
    "height": UnsupportedField("this model generates text only", (0,)),
    "steps": UnsupportedField("this model generates text only", (0,)),
}

EMBED: Mapping[str, UnsupportedField] = {"truncate": _CUT}

OPTIONS: Mapping[str, UnsupportedField] = {
    "repeat_last_n": UnsupportedField("penalties always cover the whole output", (-1, 64)),
    "typical_p": UnsupportedField("typical sampling is not supported", (1,)),
    "tfs_z": UnsupportedField("tail-free sampling is not supported", (1,)),
    "mirostat": UnsupportedField("mirostat sampling is not supported", (0,)),
    "penalize_newline": UnsupportedField("newlines are penalized as any other token", (True,)),
}
