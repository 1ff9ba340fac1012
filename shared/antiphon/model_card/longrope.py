"""Which of a longrope model's two lists of factors holds: decided once, by the served context.

transformers takes the short factors for a text up to the trained length, and the long ones for all
of a text beyond it. A cached key is rotated already, and a text may grow: here the longest text
that is served decides for all of them, so that a key is the same in every text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Fields = dict[str, msgspec.Raw]
Factors = Literal["short", "long"]

_KINDS = ("longrope", "su")
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


class _LongRopeScaling(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    original_max_position_embeddings: int | None = None


class _LongRopeFields(msgspec.Struct):
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    rope_parameters: _LongRopeScaling | None = None
    rope_scaling: _LongRopeScaling | None = None


def longrope_factors(config: Fields, context_tokens: int | None) -> Factors | None:
    """Which factors rotate a model; None: it has no two lists, or the config is malformed.

    Args:
        config: Its config.json, completed.
        context_tokens: The longest text that is served; unset: the longest that it was made for.
    """
    try:
        said = msgspec.json.decode(msgspec.json.encode(config), type=_LongRopeFields)
    except msgspec.DecodeError:
        return None  # what reads the fields names the one that is wrong
    rope = said.rope_parameters or said.rope_scaling
    if rope is None or (rope.rope_type or rope.type) not in _KINDS:
        return None
    longest = said.max_position_embeddings
    if longest is None:
        return None
    trained = rope.original_max_position_embeddings or said.original_max_position_embeddings
    served = longest if context_tokens is None else min(context_tokens, longest)
    return "long" if served > (trained or longest) else "short"


def with_factors(config: Fields, factors: Factors | None) -> Fields:
    """A config both of whose lists are those factors; without any, the config itself."""
    if factors is None:
        return config
    place = next(name for name in _ROPE_KEYS if bytes(config.get(name, b"null")) != b"null")
    rope = msgspec.json.decode(config[place], type=dict[str, msgspec.Raw])
    chosen = rope.get(f"{factors}_factor", msgspec.Raw(b"[]"))  # none: refused where it is read
    rope |= {"short_factor": chosen, "long_factor": chosen}
    return config | {place: msgspec.Raw(msgspec.json.encode(rope))}
