"""Chooses between a longrope model's two lists of factors, once, by the served context.

transformers uses the short factors for a text up to the trained length, and the long ones for all
of a longer text. But a cached key is rotated already, and a text may grow: here the served context
length decides for all texts, so that a key is the same in every text.
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
    """The factors of a model; None if it has no two lists, or the config is malformed.

    Args:
        config: Its config.json, completed.
        context_tokens: The served context length; None: the model's maximum.
    """
    try:
        fields = msgspec.json.decode(msgspec.json.encode(config), type=_LongRopeFields)
    except msgspec.DecodeError:
        return None  # the reader of the fields reports the malformed one
    rope = fields.rope_parameters or fields.rope_scaling
    if rope is None or (rope.rope_type or rope.type) not in _KINDS:
        return None
    longest = fields.max_position_embeddings
    if longest is None:
        return None
    trained = rope.original_max_position_embeddings or fields.original_max_position_embeddings
    served = longest if context_tokens is None else min(context_tokens, longest)
    return "long" if served > (trained or longest) else "short"


def with_factors(config: Fields, factors: Factors | None) -> Fields:
    """The config with both lists set to those factors; without factors, the config itself."""
    if factors is None:
        return config
    place = next(name for name in _ROPE_KEYS if bytes(config.get(name, b"null")) != b"null")
    rope = msgspec.json.decode(config[place], type=dict[str, msgspec.Raw])
    chosen = rope.get(f"{factors}_factor", msgspec.Raw(b"[]"))  # none: refused where it is read
    rope |= {"short_factor": chosen, "long_factor": chosen}
    return config | {place: msgspec.Raw(msgspec.json.encode(rope))}
