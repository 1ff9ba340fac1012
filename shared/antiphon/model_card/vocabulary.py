"""What each token writes, in bytes, as a folder's tokenizer.json says."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_card.converted.tokenizer_json import byte_letters
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


class TokenVocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model.

    Attributes:
        tokens: By id. Empty where a token writes nothing: a special one, which the detokenizer may
            leave out of the text, or an id that the tokenizer does not have. No grammar allows
            these, other than as the end of an answer.
    """

    tokens: tuple[bytes, ...]


def read_vocabulary(folder: Path, size: int | None = None) -> TokenVocabulary:
    """Read the tokens of a tokenizer: as many as the model has logits for, or all that there are.

    Raises:
        Unsupported: There is no tokenizer.json, or its tokens do not say which bytes they write.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_VocabularyFile)
    except (OSError, msgspec.DecodeError) as error:
        raise Unsupported(
            f"reading the bytes of tokens requires a tokenizer.json: {error}"
        ) from error
    spelling = _spelling(tokenizer.decoder)
    entries = list(_entries(tokenizer.model))
    if size is None:
        ids = [token for _, token in entries] + [added.id for added in tokenizer.added_tokens]
        size = max(ids, default=-1) + 1
    tokens = [b""] * size
    for text, token in entries:
        if token < size:
            tokens[token] = spelling(text)
    for added in tokenizer.added_tokens:
        if added.id < size:
            tokens[added.id] = b"" if added.special else added.content.encode()
    return TokenVocabulary(tuple(tokens))


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _VocabularyModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Decoder(msgspec.Struct):
    type: str
    decoders: tuple[_Decoder, ...] = ()


class _VocabularyFile(msgspec.Struct):
    model: _VocabularyModel
    decoder: _Decoder | None = None
    added_tokens: tuple[_AddedToken, ...] = ()


def _entries(model: _VocabularyModel) -> Iterator[tuple[str, int]]:
    if isinstance(model.vocab, dict):
        yield from model.vocab.items()
    else:  # a unigram model: each token with its score
        yield from ((text, token) for token, (text, _) in enumerate(model.vocab))


def _spelling(decoder: _Decoder | None) -> Callable[[str], bytes]:
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
    """A character a byte. A token with any other character was never made of bytes."""
    alphabet = _alphabet()
    if any(character not in alphabet for character in text):
        return text.encode()
    return bytes(alphabet[character] for character in text)


def _sentence_piece(text: str) -> bytes:
    """A lower block is a space, and `<0x0A>` a byte."""
    if match := _BYTE.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def _alphabet() -> Mapping[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}
