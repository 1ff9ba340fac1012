"""The encoders whose vectors are measured: common shapes, random weights, a WordPiece vocabulary.

Folders as sentence-transformers writes them: mean pooling, and vectors of length 1.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import msgspec
from tests.bench.models import CACHE, SEED, standard_library
from tests.bench.prose import PROSE
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 30_522
CONTEXT_TOKENS = 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class EncoderShape(msgspec.Struct, frozen=True):
    """What decides the cost of a token."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int


MINILM = EncoderShape("minilm-l6", 384, 6, 12, 1536)
BERT_BASE = EncoderShape("bert-base", 768, 12, 12, 3072)
ENCODERS = {shape.name: shape for shape in (MINILM, BERT_BASE)}


def made_encoder(shape: EncoderShape, cache: Path = CACHE) -> Path:
    """The folder of a model of this shape, written first if it is not there."""
    folder = cache / "models" / shape.name
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_tokenizer(folder)
        _write_weights(shape, folder)
        _write_pooling(folder)
        (folder / "ready").touch()
    return folder


def train_wordpiece(size: int) -> Tokenizer:
    """Train a tokenizer as BERT's on the standard library and the prose of the benchmarks."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator([PROSE.read_text(), *standard_library()], trainer)
    ends = [(token, SPECIAL.index(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def _write_tokenizer(folder: Path) -> None:
    tokenizer = train_wordpiece(VOCABULARY)
    assert tokenizer.get_vocab_size() == VOCABULARY, "the text has too few words"
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": CONTEXT_TOKENS, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(shape: EncoderShape, folder: Path) -> None:
    # Only here: a run over models that exist needs none of it.
    import torch  # noqa: PLC0415
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=CONTEXT_TOKENS,
    )
    torch.manual_seed(SEED)
    BertModel(config, add_pooling_layer=False).bfloat16().save_pretrained(folder)


def _write_pooling(folder: Path) -> None:
    names = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": index, "path": f"{index}_{name}" if index else "", "type": f"st.models.{name}"}
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    mean = json.dumps({"pooling_mode_mean_tokens": True})
    (folder / "1_Pooling" / "config.json").write_text(mean)
