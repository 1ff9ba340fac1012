"""EOS token ids from a tokenizer's files, read without loading the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

_ALSO = frozenset({"<|eom_id|>"})
"""Ends a tool-call message of Llama 3.1; SGLang stops at it for every model that has it."""


class _Written(msgspec.Struct):
    content: str


class _EosFields(msgspec.Struct):
    eos_token: str | _Written | None = None


class _EosToken(msgspec.Struct):
    id: int
    content: str


class _EosTokenizer(msgspec.Struct):
    added_tokens: tuple[_EosToken, ...] = ()


def tokenizer_eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids of the tokens that end an answer, by a folder's tokenizer files; empty without files.

    Raises:
        ConfigError: A file is malformed.
    """
    card = _read(folder / "tokenizer_config.json", _EosFields)
    tokenizer = _read(folder / "tokenizer.json", _EosTokenizer)
    if tokenizer is None:
        return ()
    end = card.eos_token if card is not None else None
    names = _ALSO | {end.content if isinstance(end, _Written) else end}
    return tuple(sorted(token.id for token in tokenizer.added_tokens if token.content in names))


def _read(file: Path, kind: type[T]) -> T | None:
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
