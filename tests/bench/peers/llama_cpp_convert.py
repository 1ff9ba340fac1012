"""Runs llama.cpp's converter on a tokenizer that it does not know.

The converter knows tokenizers by the hash of what they make of one text, and refuses others. Ours
is GPT-2's in all but the merges, so we answer for it. That also saves the package that it would
look for sentencepiece models with.

    python -P llama_cpp_convert.py SOURCE [ARGUMENT ...]
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    source = sys.argv.pop(1)
    sys.path.insert(0, source)
    converter = importlib.import_module("convert_hf_to_gguf")
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    base.TextModel._set_vocab_sentencepiece = base.TextModel._set_vocab_gpt2
    converter.main()


if __name__ == "__main__":
    main()
