"""Converts the vocabulary and chat template of a GGUF file to tokenizer.json and its config.

Two kinds are supported: byte-level BPE (`gpt2`), split by `tokenizer.ggml.pre`, and SentencePiece
BPE (`llama`), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

import antiphon.model_card.converted.tokenizer_json as parts
from antiphon.config.errors import ConfigError
from antiphon.model_card.converted.tokenizer_json import Added, Json
from antiphon.model_card.weight_headers import GgufHeader

if TYPE_CHECKING:
    from antiphon.model_card.weight_headers import Value

_PREFIX = "tokenizer.ggml."
_CONTROL, _OWN = 3, 4
"""Token types: control tokens and user-defined ones."""
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Names of special tokens in the metadata, in the specification's own spelling."""
_BY_POSITION = ("gemma", "gemma2", "gemma3")
"""Architectures whose merge order is the order of tokens, not of scores."""


class _GgufVocabulary(msgspec.Struct, frozen=True):
    path: Path
    header: GgufHeader
    tokens: Sequence[str]
    kinds: Sequence[int]

    def setting(self, name: str) -> Value | None:
        return self.header.settings.get(_PREFIX + name)

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {why}; name a folder or a model of the hub with its tokenizer.json as "
            "model.tokenizer_path"
        )

    def named(self, name: str) -> Added | None:
        index = self.setting(f"{name}_token_id")
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            return None
        return Added(index, self.tokens[index], special=True)

    def adds(self, name: str, *, otherwise: bool) -> Sequence[Added]:
        """The token that is added before or after plain text, if any."""
        configured = self.setting(f"add_{name}_token")
        token = self.named(name)
        return (token,) if token and (otherwise if configured is None else configured) else ()


def gguf_tokenizer(path: Path, header: GgufHeader) -> tuple[Json, Json]:
    """Build a tokenizer.json and a tokenizer_config.json from a file's header, with lists."""
    tokens = header.lists.get(_PREFIX + "tokens", ())
    kinds = header.lists.get(_PREFIX + "token_type", (1,) * len(tokens))
    words = _GgufVocabulary(
        path, header, cast("Sequence[str]", tokens), cast("Sequence[int]", kinds)
    )
    model = words.setting("model")
    if not tokens or len(kinds) != len(tokens):
        raise words.refuse("the file has no tokenizer")
    if model not in _MODELS:
        raise words.refuse(f"tokenizer type {model!r} is not supported, only {', '.join(_MODELS)}")
    return _MODELS[str(model)](words), _card(words)


def _byte_level(words: _GgufVocabulary) -> Json:
    cut = str(words.setting("pre") or "")
    if cut not in _SPLITS:
        raise words.refuse(
            f"{_PREFIX}pre = {cut!r}: unknown pre-tokenizer, must be one of {', '.join(_SPLITS)}"
        )
    merges = cast("Sequence[str]", words.header.lists.get(_PREFIX + "merges", ()))
    whole = cut in _WHOLE_WORDS
    return parts.tokenizer_json(
        model=parts.bpe(
            {token: index for index, token in enumerate(words.tokens)},
            # A token may contain the separating space, but never as its first character.
            [_pair(merge) for merge in merges],
            whole_words=whole,
        ),
        added=_added(words, words.tokens),
        normalizer={"type": "NFC"} if cut == "qwen2" else None,
        pre_tokenizer=parts.byte_level_split(_SPLITS[cut]),
        decoder=parts.BYTE_LEVEL,
        before=words.adds("bos", otherwise=whole),
        after=words.adds("eos", otherwise=False),
    )


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentence_pieces(words: _GgufVocabulary) -> Json:
    by_position = words.header.settings.get("general.architecture") in _BY_POSITION
    tokens = [_respelled(token) if by_position else token for token in words.tokens]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = cast("Sequence[float]", words.header.lists.get(_PREFIX + "scores", ()))
    merges = [
        _pair(merge)
        for merge in cast("Sequence[str]", words.header.lists.get(_PREFIX + "merges", ()))
    ]
    if not merges and not by_position and len(scores) != len(tokens):
        raise words.refuse("its tokenizer has neither merges nor scores")
    if not merges:
        ranks = range(len(tokens)) if by_position else [-score for score in scores]
        merges = parts.merges_by_rank(ids, lambda token: ranks[ids[token]])
    adds_space = words.setting("add_space_prefix")
    adds_space = not by_position if adds_space is None else bool(adds_space)
    unknown = words.named("unknown")
    return parts.tokenizer_json(
        model=parts.bpe(
            ids,
            merges,
            unknown=None if unknown is None else unknown.content,
            bytes_for_unknown=True,
        ),
        added=_added(words, tokens),
        normalizer=None if adds_space else parts.replaced_spaces(),
        pre_tokenizer=parts.metaspace() if adds_space else None,
        decoder=parts.pieces_decoder(drops_first_space=adds_space),
        before=words.adds("bos", otherwise=True),
        after=words.adds("eos", otherwise=False),
    )


def _respelled(token: str) -> str:
    """Write tokens that consist of spaces with spaces, and others with SentencePiece's marker."""
    return token if token.strip(" ") else parts.SPACE * len(token)


def _added(words: _GgufVocabulary, tokens: Sequence[str]) -> list[Added]:
    return [
        Added(index, token, special=kind == _CONTROL)
        for index, (token, kind) in enumerate(zip(words.tokens, words.kinds, strict=True))
        if kind in (_CONTROL, _OWN) and token and token == tokens[index]
    ]


def _card(words: _GgufVocabulary) -> Json:
    card: Json = {}
    for name, own in _NAMES.items():
        token = words.named(own)
        if token is not None:
            card[f"{name}_token"] = token.content
    settings = words.header.settings
    template = settings.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    others = {
        key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)
    }
    named = {"default": template, **others} if template is not None else others
    if others:
        card["chat_template"] = [{"name": name, "template": each} for name, each in named.items()]
    elif template is not None:
        card["chat_template"] = template
    return card


_MODELS = {"gpt2": _byte_level, "llama": _sentence_pieces}
"""Builders by `tokenizer.ggml.model`."""

# Pre-tokenization patterns, taken from the published tokenizers and llama.cpp's `llama-vocab.cpp`.
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT: Final = r"\p{N}"
_REST: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3: Final = _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_QWEN2: Final = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O: Final = (
    f"{_UPPER}*{_LOWER}+{_ENDINGS}|{_UPPER}+{_LOWER}*{_ENDINGS}"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _REST
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST,
)

_BY_PATTERNS: Final = {
    (_GPT2,): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    (_DIGIT, _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (_LLAMA3,): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "dbrx", "smaug-bpe"),
    ),
    (_QWEN2,): ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"),
    (_TEKKEN,): ("tekken",),
    (_GPT4O,): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    _DEEPSEEK_V3: ("deepseek-v3", "hunyuan-dense"),
}
_SPLITS: Final = {name: patterns for patterns, names in _BY_PATTERNS.items() for name in names}
"""Patterns by `tokenizer.ggml.pre`: each one splits the pieces that earlier ones left."""

_WHOLE_WORDS: Final = {*_BY_PATTERNS[(_LLAMA3,)], "gpt-4o", "llama4", "tekken"}
"""tiktoken vocabularies: a word that is a token stays one token, regardless of the merges."""
