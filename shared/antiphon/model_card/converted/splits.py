"""Pre-tokenization patterns of byte-level vocabularies, by llama.cpp's names.

Taken from the published tokenizers' files and from llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import Final

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT: Final = r"\p{N}"
_REST: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3: Final = _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
QWEN2: Final = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN: Final = (
    f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O: Final = (
    f"{_UPPER}*{_LOWER}+{_ENDINGS}|{_UPPER}+{_LOWER}*{_ENDINGS}"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _REST
)
DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST,
)

_BY_PATTERNS: Final = {
    (GPT2,): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    (DIGIT, GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (LLAMA3,): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "dbrx", "smaug-bpe"),
    ),
    (QWEN2,): ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"),
    (TEKKEN,): ("tekken",),
    (GPT4O,): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    DEEPSEEK_V3: ("deepseek-v3", "hunyuan-dense"),
}
SPLITS: Final = {name: patterns for patterns, names in _BY_PATTERNS.items() for name in names}
"""Patterns by `tokenizer.ggml.pre`: each one splits the pieces that earlier ones left."""

WHOLE_WORDS: Final = frozenset(_BY_PATTERNS[(LLAMA3,)]) | frozenset({"gpt-4o", "llama4", "tekken"})
"""tiktoken vocabularies: a word that is a token stays one token, regardless of the merges."""
