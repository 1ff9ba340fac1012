"""Converts SentencePiece's `tokenizer.model` and Mistral's `tekken.json` to tokenizer.json.

The first is one protobuf message with few fields, so it is parsed here: the packages that parse it
would add large dependencies or a C++ library to services that need neither. Source:
sentencepiece_model.proto of the sentencepiece project.

The vocabulary of the second is in tiktoken's form: byte strings by rank. The special tokens come
first, and the vocabulary fills the remaining ids.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

import antiphon.model_card.converted.tokenizer_json as parts
from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.converted.tokenizer_json import Added, Json

if TYPE_CHECKING:
    from pathlib import Path

FILE_BYTES_MAX = 1 << 28

_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _OWN, _BYTE = 1, 3, 4, 6
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES_MAX = 10
_NO_ID = (1 << 64) - 1
"""-1: the model has no such token."""


class SentencePieceToken(msgspec.Struct, frozen=True):
    text: str
    score: float
    kind: int


class SentencePieceModel(msgspec.Struct, frozen=True):
    """The contents of the file, with the defaults of its format."""

    pieces: Sequence[SentencePieceToken]
    model: int = _UNIGRAM
    unknown: int = 0
    begin: int = 1
    end: int = 2
    padding: int = -1
    byte_fallback: bool = False
    adds_space: bool = True
    characters: bytes = b""
    """The character normalization map, in SentencePiece's own format."""


def piece_tokenizer(file: Path) -> tuple[Json, Json]:
    parsed = read_pieces(file)
    texts = [piece.text for piece in parsed.pieces]
    ids = {text: index for index, text in enumerate(texts)}
    if parsed.model == _BPE:
        # User-defined tokens are matched as a whole and take no part in merges.
        whole = frozenset(piece.text for piece in parsed.pieces if piece.kind != _NORMAL)
        merges = parts.merges_by_rank(ids, lambda text: -parsed.pieces[ids[text]].score, whole)
        unknown, fallback = texts[parsed.unknown], parsed.byte_fallback
        model = parts.bpe(ids, merges, unknown=unknown, bytes_for_unknown=fallback)
    elif parsed.model == _UNIGRAM:
        scores = [(piece.text, piece.score) for piece in parsed.pieces]
        model = parts.unigram(scores, parsed.unknown, bytes_for_unknown=parsed.byte_fallback)
    else:
        raise ConfigError(f"{file}: SentencePiece type {parsed.model}; only unigram and BPE")
    begin = parsed.begin
    tokenizer = parts.tokenizer_json(
        model=model,
        added=_added(parsed),
        normalizer=_normalizer(parsed),
        pre_tokenizer=parts.metaspace() if parsed.adds_space else None,
        decoder=parts.pieces_decoder(drops_first_space=parsed.adds_space),
        before=[Added(begin, texts[begin], special=True)] if begin >= 0 else [],
    )
    named = {"unk": parsed.unknown, "bos": begin, "eos": parsed.end, "pad": parsed.padding}
    return tokenizer, {f"{name}_token": texts[index] for name, index in named.items() if index >= 0}


def _normalizer(parsed: SentencePieceModel) -> Json | None:
    steps: list[Json] = []
    if parsed.characters:
        encoded = base64.b64encode(parsed.characters).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if not parsed.adds_space:
        steps.append(parts.replaced_spaces())
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _added(parsed: SentencePieceModel) -> list[Added]:
    return [
        Added(index, piece.text, special=piece.kind != _OWN)
        for index, piece in enumerate(parsed.pieces)
        if piece.kind in (_CONTROL, _OWN) or index == parsed.unknown
    ]


def read_pieces(file: Path) -> SentencePieceModel:
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{file}: larger than {FILE_BYTES_MAX} bytes")
        return _pieces(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, struct.error, IndexError) as error:
        raise ConfigError(f"{file}: not a SentencePiece model: {error}") from error


def _pieces(content: bytes) -> SentencePieceModel:
    pieces: list[SentencePieceToken] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _fields(content):
        if field == 1 and isinstance(value, bytes):
            pieces.append(_piece(dict(_fields(value))))
        elif field == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif field == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    characters = normalizer.get(2, b"")
    parsed = SentencePieceModel(
        pieces=pieces,
        model=_number(trainer, 3, _UNIGRAM),
        unknown=_id(trainer, 40, 0),
        begin=_id(trainer, 41, 1),
        end=_id(trainer, 42, 2),
        padding=_id(trainer, 43, -1),
        byte_fallback=bool(_number(trainer, 35, 0)),
        adds_space=bool(_number(normalizer, 3, 1)),
        characters=characters if isinstance(characters, bytes) else b"",
    )
    last = max(parsed.unknown, parsed.begin, parsed.end, parsed.padding)
    if last >= len(pieces) or parsed.unknown < 0:
        raise ValueError(f"{len(pieces)} pieces, and a special one beyond them")
    return parsed


def _piece(fields: dict[int, int | bytes]) -> SentencePieceToken:
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without text")  # noqa: TRY004  # one error for what is no file
    (number,) = struct.unpack("<f", score)
    return SentencePieceToken(text.decode(), number, _number(fields, 3, _NORMAL))


def _number(fields: dict[int, int | bytes], field: int, otherwise: int) -> int:
    value = fields.get(field, otherwise)
    if not isinstance(value, int):
        raise ValueError(f"field {field} is no number")  # noqa: TRY004
    return value


def _id(fields: dict[int, int | bytes], field: int, otherwise: int) -> int:
    value = _number(fields, field, otherwise)
    return -1 if value > _NO_ID >> 1 else value


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: varints as integers, all others as bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field of type {kind}")
        if at + size > len(content):
            raise ValueError("cut short")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        byte = content[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number of more than ten bytes")


_BEGIN, _END, _UNKNOWN, _PADDING = "<s>", "</s>", "<unk>", "<pad>"
_OLDER = (
    *(_UNKNOWN, _BEGIN, _END, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", _PADDING, "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""The special tokens of files that do not list them."""


class _TekkenToken(msgspec.Struct, frozen=True):
    rank: int
    token_bytes: str


class _TekkenSpecial(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class _TekkenFields(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct, frozen=True):
    config: _TekkenFields
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecial] | None = None


def tekken_tokenizer(file: Path) -> tuple[Json, Json]:
    parsed = read_json(file, _Tekken)
    try:
        plain = _tekken_plain(parsed)
    except binascii.Error as error:
        raise ConfigError(f"{file}: {error}") from error
    special = _tekken_special(parsed)
    first = parsed.config.default_num_special_tokens
    ranks = {text: rank for rank, text in enumerate(plain)}
    tokens = special | {text: first + rank for text, rank in ranks.items()}
    begin = [Added(special[_BEGIN], _BEGIN, special=True)] if _BEGIN in special else []
    tokenizer = parts.tokenizer_json(
        model=parts.bpe(tokens, parts.merges_by_rank(ranks, ranks.__getitem__), whole_words=True),
        added=[Added(index, text, special=True) for text, index in special.items()],
        normalizer=None,
        pre_tokenizer=parts.byte_level_split([parsed.config.pattern]),
        decoder=parts.BYTE_LEVEL,
        before=begin,
    )
    names = {"bos": _BEGIN, "eos": _END, "unk": _UNKNOWN, "pad": _PADDING}
    return tokenizer, {f"{name}_token": text for name, text in names.items() if text in special}


def _tekken_special(parsed: _Tekken) -> dict[str, int]:
    count = parsed.config.default_num_special_tokens
    named = dict(enumerate(_OLDER))
    if parsed.special_tokens is not None:
        named = {token.rank: token.token_str for token in parsed.special_tokens}
    return {named.get(index, f"<SPECIAL_{index}>"): index for index in range(count)}


def _tekken_plain(parsed: _Tekken) -> list[str]:
    """The tokens by rank, with one character per byte."""
    count = parsed.config.default_vocab_size - parsed.config.default_num_special_tokens
    in_order = sorted(parsed.vocab, key=lambda token: token.rank)[:count]
    letters = parts.byte_letters()
    texts = (base64.b64decode(token.token_bytes, validate=True) for token in in_order)
    return ["".join(letters[byte] for byte in text) for text in texts]
