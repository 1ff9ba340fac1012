"""The fields of the OpenAI API: which are read, which only refuse what is not their default.

A field that is documented and not built yet is refused by name, unless its value asks for nothing.
A field that nobody documents is ignored, as in SGLang, and counted.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

Values = tuple[object, ...]

_AT = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")

_OFF: Values = (False,)
_ZERO: Values = (0,)
_ONE: Values = (1,)
_EMPTY: Values = ("",)
_NOTHING: Values = ({}, [], "")

_UNBUILT: dict[str, Values] = {
    # Sampling and constraints.
    "best_of": _ONE,
    "beam_width": _ONE,
    "stop_regex": _NOTHING,
    "regex": _EMPTY,
    "ebnf": _EMPTY,
    "json_schema": _EMPTY,
    "structural_tag": _EMPTY,
    "response_format": ({"type": "text"},),
    "custom_params": _NOTHING,
    "custom_logit_processor": _EMPTY,
    "watermark": _NOTHING,
    "max_thinking_tokens": (),
    # What else a reply could hold.
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "return_cached_tokens_details": _OFF,
    "return_spec_tokens_details": _OFF,
    "return_token_ids": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_meta_info": _OFF,
    "return_input_ids_in_sglext": _OFF,
    "return_output_ids_in_sglext": _OFF,
    # Adapters, sessions, placement.
    "lora_path": _NOTHING,
    "session_id": _EMPTY,
    "session_params": _NOTHING,
    "extra_key": _EMPTY,
    "cache_salt": _EMPTY,
    "priority": _ZERO,
    "custom_labels": _NOTHING,
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "bootstrap_pair_key": (),
    "disagg_prefill_dp_rank": (),
    "routed_dp_rank": (),
    "data_parallel_rank": (),
}

_UNBUILT_CHAT: dict[str, Values] = _UNBUILT | {
    "tools": _NOTHING,
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": _NOTHING,
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "chat_template_kwargs": _NOTHING,
    "input_ids": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": _OFF,
    "service_tier": ("auto", "default"),
}

_UNBUILT_COMPLETION: dict[str, Values] = _UNBUILT | {
    "echo": _OFF,
    "suffix": _EMPTY,
}

_NO_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Labels and hints: accepted, since leaving them out changes no answer."""

CHAT = _UNBUILT_CHAT
COMPLETION = _UNBUILT_COMPLETION


def read(body: bytes, kind: type[B], unbuilt: Mapping[str, Values]) -> tuple[B, int]:
    """Decode a body; count the fields that nobody documents.

    Raises:
        InvalidRequest: Not JSON, or a field has a wrong type or value; `param` names it.
        Unsupported: A field asks for what is not built.
    """
    fields = _decode(body, dict[str, msgspec.Raw])
    for name, allowed in unbuilt.items():
        if name in fields:
            _check_unbuilt(name, fields[name], allowed)
    known = kind.__struct_encode_fields__
    unknown = sum(
        name not in known and name not in unbuilt and name not in _NO_EFFECT for name in fields
    )
    return _decode(body, kind), unknown


def _decode(json: bytes | msgspec.Raw, kind: type[T], field: str = "") -> T:
    """Decode a body, or the value of one field of it."""
    try:
        return _decoder(kind).decode(json)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), field) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # Bytes that are not UTF-8 and numbers of thousands of digits are a ValueError.
        text = f"{field or 'the body'} is not valid JSON: {error}"
        raise InvalidRequest(text, param=field or None) from error


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def _invalid(text: str, field: str) -> InvalidRequest:
    """Name the field: msgspec puts its path at the end of the text."""
    at = _AT.search(text)
    path = field or (at[1] if at else "")
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    what = _AT.sub("", text)
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _check_unbuilt(name: str, raw: msgspec.Raw, allowed: Values) -> None:
    value: object = _decode(raw, object, name)
    if value is not None and not any(_same(value, each) for each in allowed):
        raise Unsupported(f"{name} is not supported with this value", param=name)


def _same(value: object, allowed: object) -> bool:
    """Whether they are equal as JSON: there, true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
