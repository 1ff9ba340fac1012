"""A tokenizer of the kind that the benchmarks make, trained on a little."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.bench.serving.load import Vocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    names = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "lmnrst"]
    tokenizer.train_from_iterator([" ".join(names)] * 3, trainer)
    where = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(where / "tokenizer.json"))
    return where


@pytest.fixture(scope="session")
def words(folder: Path) -> Vocabulary:
    return Vocabulary(folder)
