"""Converts Mistral's `tekken.json` to tokenizer.json.

Its vocabulary is in tiktoken's form: byte strings by rank. The special tokens come first, and the
vocabulary fills the remaining ids.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.converted.tokenizer_json import (
    BYTE_LEVEL,
    Added,
    Json,
    bpe,
    byte_letters,
    byte_level_split,
    merges_by_rank,
    tokenizer_json,
)

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN, _END, _UNKNOWN, _PADDING = "<s>", "</s>", "<unk>", "<pad>"
_OLDER = (
    *(_UNKNOWN, _BEGIN, _END, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", _PADDING, "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""The special tokens of files that do not list them."""


class _Token(msgspec.Struct, frozen=True):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class _TekkenFields(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct, frozen=True):
    config: _TekkenFields
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def tekken_tokenizer(file: Path) -> tuple[Json, Json]:
    try:
        parsed = msgspec.json.decode(file.read_bytes(), type=_Tekken)
        plain = _plain(parsed)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (msgspec.DecodeError, binascii.Error) as error:
        raise ConfigError(f"{file}: {error}") from error
    special = _special(parsed)
    first = parsed.config.default_num_special_tokens
    ranks = {text: rank for rank, text in enumerate(plain)}
    tokens = special | {text: first + rank for text, rank in ranks.items()}
    begin = [Added(special[_BEGIN], _BEGIN, special=True)] if _BEGIN in special else []
    tokenizer = tokenizer_json(
        model=bpe(tokens, merges_by_rank(ranks, ranks.__getitem__), whole_words=True),
        added=[Added(index, text, special=True) for text, index in special.items()],
        normalizer=None,
        pre_tokenizer=byte_level_split([parsed.config.pattern]),
        decoder=BYTE_LEVEL,
        before=begin,
    )
    names = {"bos": _BEGIN, "eos": _END, "unk": _UNKNOWN, "pad": _PADDING}
    return tokenizer, {f"{name}_token": text for name, text in names.items() if text in special}


def _special(parsed: _Tekken) -> dict[str, int]:
    count = parsed.config.default_num_special_tokens
    named = (
        dict(enumerate(_OLDER))
        if parsed.special_tokens is None
        else {token.rank: token.token_str for token in parsed.special_tokens}
    )
    return {named.get(index, f"<SPECIAL_{index}>"): index for index in range(count)}


def _plain(parsed: _Tekken) -> list[str]:
    """The tokens by rank, with one character per byte."""
    count = parsed.config.default_vocab_size - parsed.config.default_num_special_tokens
    in_order = sorted(parsed.vocab, key=lambda token: token.rank)[:count]
    letters = byte_letters()
    return [
        "".join(letters[byte] for byte in base64.b64decode(token.token_bytes, validate=True))
        for token in in_order
    ]
