"""Builders for the parts of a tokenizer.json, in the format of the `tokenizers` package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Json = dict[str, object]
Merge = tuple[str, str]

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's marker for a space."""


_PLAIN_BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BYTE_LEVEL: Json = {"type": "ByteLevel", **_PLAIN_BYTES}
"""Maps every byte to a character; as a decoder, every character to its byte."""


class Added(msgspec.Struct, frozen=True):
    """An added token: text is never split within it."""

    id: int
    content: str
    special: bool


def tokenizer_json(
    *,
    model: Json,
    added: Iterable[Added],
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    decoder: Json,
    before: Sequence[Added] = (),
    after: Sequence[Added] = (),
) -> Json:
    """Assemble a tokenizer; `before` and `after` are added around plain text."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token.id,
                "content": token.content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token.special,
            }
            for token in sorted(added, key=lambda token: token.id)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _around(before, after),
        "decoder": decoder,
        "model": model,
    }


def bpe(
    tokens: Mapping[str, int],
    merges: Sequence[Merge],
    *,
    whole_words: bool = False,
    unknown: str | None = None,
    bytes_for_unknown: bool = False,
) -> Json:
    """A BPE model; earlier merges take precedence."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bytes_for_unknown,
        "byte_fallback": bytes_for_unknown,
        "ignore_merges": whole_words,
        "vocab": tokens,
        "merges": merges,
    }


def unigram(
    pieces: Sequence[tuple[str, float]], unknown: int, *, bytes_for_unknown: bool = False
) -> Json:
    model: Json = {"type": "Unigram", "unk_id": unknown, "vocab": pieces}
    return model | {"byte_fallback": bytes_for_unknown}


def byte_level_split(patterns: Sequence[str]) -> Json:
    """Split by each pattern in turn, then map every byte to a character."""
    split: Json = {"type": "Split", "behavior": "Isolated", "invert": False}
    cuts = [split | {"pattern": {"Regex": pattern}} for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*cuts, BYTE_LEVEL]}


def pieces_decoder(*, drops_first_space: bool) -> Json:
    """SentencePiece's decoder: its marker is a space, `<0x0A>` a byte."""
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if drops_first_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def metaspace() -> Json:
    """Replace spaces by SentencePiece's marker, and add one before a text that lacks one."""
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


def replaced_spaces() -> Json:
    """A normalizer that replaces spaces by SentencePiece's marker, without adding one."""
    return {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def merges_by_rank(
    tokens: Mapping[str, int], rank: Callable[[str], float], skipped: frozenset[str] = frozenset()
) -> list[Merge]:
    """The pairs of tokens that merge to a token, lowest rank first.

    For vocabularies without merges: SentencePiece merges the pair whose token has the best score,
    tiktoken the one whose token comes first.
    """
    found: list[tuple[float, int, int, Merge]] = []
    whole = tokens.keys() - skipped
    for token in whole:
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in whole and right in whole:
                found.append((rank(token), tokens[left], tokens[right], (left, right)))
    found.sort(key=lambda each: each[:3])
    return [merge for *_, merge in found]


def byte_letters() -> list[str]:
    """The character that byte-level tokenizers use for each byte.

    A byte that is printable in Latin-1 is its own character; the others follow from U+0100 on, in
    order. Source: Radford et al. 2019, the tokenizer of GPT-2.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def _around(before: Sequence[Added], after: Sequence[Added]) -> Json | None:
    if not before and not after:
        return None

    def text(name: str, kind: int) -> list[Json]:
        starts, ends = (
            [Json(SpecialToken={"id": token.content, "type_id": kind}) for token in tokens]
            for tokens in (before, after)
        )
        return [*starts, Json(Sequence={"id": name, "type_id": kind}), *ends]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            token.content: {"id": token.content, "ids": [token.id], "tokens": [token.content]}
            for token in (*before, *after)
        },
    }
