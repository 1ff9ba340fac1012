"""Fields of Ollama's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.fields import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

_CUT = Refused("whether prompts are truncated is the operator's to say", (False,))

COMMON: Mapping[str, Refused] = {
    "truncate": _CUT,
    "shift": _CUT,
    "_debug_render_only": Refused("/v1/tokenize tells the tokens of a conversation", (False,)),
}

CHAT: Mapping[str, Refused] = COMMON

GENERATE: Mapping[str, Refused] = {
    **COMMON,
    "template": Refused("the chat template is the operator's to say", ("",)),
    "context": Refused("send the messages of a conversation to /api/chat", ([],)),
    "images": Refused("this model reads text only", ([],)),
    "width": Refused("this model answers in text", (0,)),
    "height": Refused("this model answers in text", (0,)),
    "steps": Refused("this model answers in text", (0,)),
}

EMBED: Mapping[str, Refused] = {"truncate": _CUT}

OPTIONS: Mapping[str, Refused] = {
    "repeat_last_n": Refused("penalties are of the whole answer", (-1, 64)),
    "typical_p": Refused("typical sampling is not built", (1,)),
    "tfs_z": Refused("tail-free sampling is not built", (1,)),
    "mirostat": Refused("mirostat is not built", (0,)),
    "penalize_newline": Refused("a newline is penalised as any token", (True,)),
}
