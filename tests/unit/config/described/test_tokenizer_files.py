"""SentencePiece's and Mistral's own files become tokenizers that cut as these do."""

from __future__ import annotations

import base64
import functools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.arguments import settings_of
from tests.unit.config.described.gguf_files import gguf_letters
from transformers.utils import sentencepiece_model_pb2_new as pb2

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.model_card.converted.folder import tokenizer_files_folder
from antiphon.model_card.served_model import tokenizer_folder
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.tokenizer import model_tokenizer as vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

WORDS = ("▁h", "▁he", "he", "el", "ll", "lo", "hel", "▁hello", "▁▁", "o▁")
LETTERS = sorted({letter for word in WORDS for letter in word})
SPECIAL = ("<unk>", "<s>", "</s>")


def write_model(folder: Path, kind: str, **trainer: object) -> list[str]:
    """A tokenizer.model; its pieces are of random scores if they are likelihoods."""
    rng = random.Random(1)
    model: Any = pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    texts = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "<own>", *WORDS, *LETTERS]
    for index, text in enumerate(texts):
        piece = model.pieces.add()
        piece.piece = text
        kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<own>": 4}
        piece.type = kinds.get(text, 6 if text.startswith("<0x") else 1)
        piece.score = -rng.random() * 5 if kind == "unigram" else -float(index)
    model.trainer_spec.model_type = {"unigram": 1, "bpe": 2, "word": 3}[kind]
    model.trainer_spec.byte_fallback = True
    for name, value in trainer.items():
        setattr(model.trainer_spec, name, value)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    return texts


def converted(folder: Path) -> Path | None:
    return tokenizer_files_folder(folder, folder / "cache")


def tokenizer_of(folder: Path) -> Tokenizer:
    made = converted(folder)
    assert made is not None
    return open_tokenizer(made)


def merged(text: str, ranks: dict[str, int]) -> list[str]:
    """As SentencePiece does: the best pair, the first of these in the text, until none is left."""
    pieces = list(text)
    while True:
        pairs = [
            (ranks[pieces[at] + pieces[at + 1]], at)
            for at in range(len(pieces) - 1)
            if pieces[at] + pieces[at + 1] in ranks
        ]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def likeliest(text: str, scores: dict[str, float]) -> float:
    """The best sum of scores of any way to cut a text."""

    @functools.cache
    def best(end: int) -> float:
        if end == 0:
            return 0.0
        starts = (start for start in range(end) if text[start:end] in scores)
        return max((best(start) + scores[text[start:end]] for start in starts), default=-1e9)

    return best(len(text))


def texts() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("hello ", k=rng.randrange(1, 24))) for _ in range(300)]


def spelled(text: str) -> str:
    return ("" if text.startswith(" ") else "▁") + text.replace(" ", "▁")


def test_pairs_are_merged_as_sentence_piece_merges_them(tmp_path: Path) -> None:
    write_model(tmp_path, "bpe")
    tokenizer = tokenizer_of(tmp_path)
    ranks = {word: index for index, word in enumerate(WORDS)}
    for text in texts():
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert tokens == merged(spelled(text), ranks), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.removeprefix(" ")


def test_a_text_is_cut_the_likeliest_way(tmp_path: Path) -> None:
    names = write_model(tmp_path, "unigram")
    tokenizer = tokenizer_of(tmp_path)
    model = json.loads(tokenizer.to_str())["model"]
    scores = {text: score for text, score in model["vocab"] if text in (*WORDS, *LETTERS)}
    assert [text for text, _ in model["vocab"]] == names
    for text in texts():
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert "".join(tokens) == spelled(text)
        found = sum(scores[token] for token in tokens)
        assert found == pytest.approx(likeliest(spelled(text), scores)), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_what_is_no_piece_becomes_bytes_and_special_tokens_stay_whole(
    tmp_path: Path, kind: str
) -> None:
    write_model(tmp_path, kind)
    tokenizer = tokenizer_of(tmp_path)
    encoding = tokenizer.encode("é</s><own>h")
    assert encoding.tokens[0] == "<s>"
    assert [token for token in encoding.tokens if token.startswith("<0x")] == ["<0xC3>", "<0xA9>"]
    assert "<own>" in encoding.tokens
    assert tokenizer.decode(encoding.ids).startswith("é<own>")
    tokens = read_vocabulary(converted(tmp_path) or tmp_path)
    assert b" hello" in tokens.tokens


def test_a_model_folder_with_pieces_is_served_whole(tmp_path: Path) -> None:
    write_model(tmp_path, "bpe")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x", "eos_token": "<own>"}')
    cache = str(tmp_path / "cache")
    settings = settings_of("--model-path", str(tmp_path), "--download-dir", cache)
    folder = tokenizer_folder(settings)
    assert folder.parent.parent == tmp_path / "cache"
    assert vocabulary.read_model_tokenizer(folder).template is not None
    card = json.loads((folder / "tokenizer_config.json").read_text())
    assert (card["eos_token"], card["bos_token"], card["unk_token"]) == ("<own>", "<s>", "<unk>")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_folder(settings) != folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a SentencePiece model: 0 pieces"),
        (b"\x0a\xff", "not a SentencePiece model"),
        (b"\x0a\x05ab", "cut short"),
        (b"\x07", "a field of type 7"),
        (b"\xff" * 20, "more than ten bytes"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path)


def test_pieces_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "word")
    with pytest.raises(ConfigError, match="type 3; only unigram and BPE"):
        converted(tmp_path)


def test_random_bytes_are_refused_and_never_read_for_long(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(500):
        (tmp_path / "tokenizer.model").write_bytes(rng.randbytes(rng.randrange(200)))
        with pytest.raises(ConfigError):
            converted(tmp_path)


def write_tekken(folder: Path, words: Sequence[bytes], *, names: bool) -> None:
    vocab = [bytes([byte]) for byte in range(256)] + list(words)
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(vocab)
    ]
    said: dict[str, object] = {
        "config": {
            "pattern": r" ?\p{L}+|\p{N}|[^\p{L}\p{N}]",
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": 20 + len(vocab) - 1,
            "default_num_special_tokens": 20,
            "version": "v7",
        },
        "vocab": entries,
    }
    if names:
        listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}]
        said["special_tokens"] = [*listed, {"rank": 2, "token_str": "</s>", "is_control": True}]
    (folder / "tekken.json").write_text(json.dumps(said))


@pytest.mark.parametrize("names", [True, False])
def test_tekken_cuts_by_rank_behind_its_special_tokens(tmp_path: Path, names: bool) -> None:
    words = [b"he", b"ll", b" he", "é".encode(), b"hello", b"never"]
    write_tekken(tmp_path, words, names=names)
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.get_vocab_size() == 20 + 256 + len(words) - 1
    ids = tokenizer.encode("hello hello é</s>1").ids
    spaced = [20 + 256 + 2, 20 + 256 + 1, 20 + ord("o")]
    assert ids == [1, 20 + 256 + 4, *spaced, 20 + ord(" "), 20 + 256 + 3, 2, 20 + ord("1")]
    assert tokenizer.decode(ids) == "hello hello é1"
    assert tokenizer.decode([10], skip_special_tokens=False) == (
        "<SPECIAL_10>" if names else "[IMG]"
    )


@pytest.mark.parametrize("content", ["", "{}", '{"config": 1}'])
def test_tekken_that_is_broken_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tekken\.json"):
        converted(tmp_path)


def test_the_letters_of_bytes_are_those_of_gpt2() -> None:
    from antiphon.model_card.converted.tokenizer_json import byte_letters  # noqa: PLC0415

    assert byte_letters() == gguf_letters()


def test_a_folder_with_neither_has_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_files_folder(embedded.path(), tmp_path) is None
