"""The bytes of each token and the EOS tokens, from a folder's files: no tokenizer is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_card.config_json import read_json
from antiphon.model_card.converted.tokenizer_json import byte_letters
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class TokenVocabulary(msgspec.Struct, frozen=True):
    tokens: tuple[bytes, ...]
    """Bytes by token id. Empty for special tokens, which the detokenizer may leave out of the text,
    and for ids that the tokenizer does not have. Grammars allow these only as the end of the
    output."""


def read_vocabulary(folder: Path, size: int | None = None) -> TokenVocabulary:
    """Read the tokens of a tokenizer: `size` of them (the model's logits), or all."""
    file = folder / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_VocabularyFile)
    except (OSError, msgspec.DecodeError) as error:
        text = f"reading the bytes of tokens requires a tokenizer.json: {error}"
        raise Unsupported(text) from error
    token_bytes, vocab = _token_bytes(tokenizer.decoder), tokenizer.model.vocab
    if not isinstance(vocab, dict):  # a unigram model: each token with its score
        vocab = {text: token for token, (text, _) in enumerate(vocab)}
    if size is None:
        ids = [*vocab.values(), *(added.id for added in tokenizer.added_tokens)]
        size = max(ids, default=-1) + 1
    tokens = [b""] * size
    for text, token in vocab.items():
        if token < size:
            tokens[token] = token_bytes(text)
    for added in tokenizer.added_tokens:
        if added.id < size:
            tokens[added.id] = b"" if added.special else added.content.encode()
    return TokenVocabulary(tuple(tokens))


_EOM = "<|eom_id|>"
"""Ends a tool-call message of Llama 3.1; SGLang stops at it for every model that has it."""


def tokenizer_eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids of the tokens that end an answer; empty without a tokenizer.json."""
    card, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    end = read_json(card, _EosFields).eos_token if card.is_file() else None
    if not tokenizer.is_file():
        return ()
    names = {_EOM, end.content if isinstance(end, _Written) else end}
    added = read_json(tokenizer, _AddedTokens).added_tokens
    return tuple(sorted(token.id for token in added if token.content in names))


class _Written(msgspec.Struct):
    content: str


class _EosFields(msgspec.Struct):
    eos_token: str | _Written | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _VocabularyModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Decoder(msgspec.Struct):
    type: str
    decoders: tuple[_Decoder, ...] = ()


class _AddedTokens(msgspec.Struct, kw_only=True):
    added_tokens: tuple[_AddedToken, ...] = ()


class _VocabularyFile(_AddedTokens):
    model: _VocabularyModel
    decoder: _Decoder | None = None


def _token_bytes(decoder: _Decoder | None) -> Callable[[str], bytes]:
    kinds = set(_kinds(decoder)) if decoder is not None else set[str]()
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentence_piece
    raise Unsupported("unsupported decoder of the tokenizer: the bytes of tokens are unknown")


def _kinds(decoder: _Decoder) -> Iterator[str]:
    yield decoder.type
    for inner in decoder.decoders:
        yield from _kinds(inner)


def _byte_level(text: str) -> bytes:
    """Map each character to a byte; a token with a character outside the alphabet is plain text."""
    if not _ALPHABET.keys() >= set(text):
        return text.encode()
    return bytes(_ALPHABET[character] for character in text)


def _sentence_piece(text: str) -> bytes:
    """Replace lower blocks by spaces; a token like `<0x0A>` is a byte."""
    if match := _BYTE.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ALPHABET = {letter: byte for byte, letter in enumerate(byte_letters())}
