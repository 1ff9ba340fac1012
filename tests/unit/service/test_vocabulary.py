"""What each token writes is what the tokenizer's own decoder makes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon import embedded
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["Grüße, 世界 👋🏽!\n\tnaïve", "  two  spaces", '{"a": [1, 2.5e-3]}', "\u00ad\u0000\u007f"]


def test_the_embedded_model_writes_what_its_tokenizer_reads() -> None:
    vocabulary = read_vocabulary(embedded.path(), 1024)
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.tokens[id_] for id_ in ids).decode() == text


def test_added_tokens_write_their_text_unless_they_are_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["<tool é>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = read_vocabulary(tmp_path, size + 10).tokens
    assert tokens[size : size + 3] == (b"", "<tool é>".encode(), b"")
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    assert len(tokens) == size + 10
    assert len(read_vocabulary(tmp_path, size).tokens) == size


def write(folder: Path, model: object, decoder: object) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": decoder}))
    return folder


FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def test_sentence_pieces_write_spaces_and_bytes(tmp_path: Path) -> None:
    vocab = {"<0x0A>": 0, "<0xE4>": 1, "▁a▁": 2, "世": 3, "<0x0A": 4}
    folder = write(tmp_path, {"type": "BPE", "vocab": vocab}, FALLBACK)
    expected = (b"\n", b"\xe4", b" a ", "世".encode(), b"<0x0A")
    assert read_vocabulary(folder, 5).tokens == expected


def test_a_unigram_model_lists_its_tokens(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["▁the", -1.5], ["é", -2.0]]}
    folder = write(tmp_path, model, {"type": "Metaspace", "replacement": "▁"})
    assert read_vocabulary(folder, 3).tokens == (b" the", "é".encode(), b"")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}])
def test_tokens_that_do_not_say_their_bytes_have_no_grammars(
    tmp_path: Path, decoder: object
) -> None:
    folder = write(tmp_path, {"type": "WordPiece", "vocab": {"##a": 0}}, decoder)
    with pytest.raises(Unsupported, match="the bytes of tokens are unknown"):
        read_vocabulary(folder, 1)


def test_a_folder_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"requires a tokenizer\.json"):
        read_vocabulary(tmp_path, 1)
