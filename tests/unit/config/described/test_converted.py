"""GGUF, SentencePiece and Mistral files become the folders that services read."""

from __future__ import annotations

import base64
import functools
import json
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.arguments import settings_of
from tests.unit.config.described.gguf_files import SHAPE, byte_level, gguf_letters, pieces, write
from transformers import AutoTokenizer
from transformers.utils import sentencepiece_model_pb2_new as pb2

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.model_card.card import read_card
from antiphon.model_card.converted.folder import gguf_folder, tokenizer_files_folder
from antiphon.model_card.files import find_files
from antiphon.model_card.served_model import model_files, tokenizer_folder
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.wire.tokenize import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Tokenizer


def config_of(file: Path, cache: Path) -> dict[str, Any]:
    return json.loads((gguf_folder([file], cache) / "config.json").read_text())


def tokenizer_of(file: Path, cache: Path) -> Tokenizer:
    return open_tokenizer(gguf_folder([file], cache))


def texts(letters: str, shortest: int = 0, longest: int = 40) -> list[str]:
    rng = random.Random(0)
    lengths = (rng.randrange(shortest, longest) for _ in range(300))
    return ["".join(rng.choices(letters, k=length)) for length in lengths]


def test_config_says_what_the_settings_say(tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "a.gguf", tokenizer=byte_level()), tmp_path)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        "vocab_size": 261,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 258,
        "pad_token_id": 259,
        "eos_token_id": [259],
    }


def test_lone_file_is_a_model_to_every_service(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", tokenizer=byte_level())
    settings = settings_of("--model-path", str(file), "--download-dir", str(tmp_path / "cache"))
    card = read_card(model_files(settings))
    assert (card.vocabulary_size, card.eos_ids, card.dtype) == (261, (259,), Dtype.FLOAT32)
    folder = tokenizer_folder(settings)
    assert folder == model_files(settings).folder
    template = vocabulary.read_model_tokenizer(folder).template
    assert template is not None
    turns = (ChatMessage(role="user", content="hi"),)
    assert template.render(turns, continue_final=False) == "<|im_start|><user>hi"
    assert read_vocabulary(folder).tokens[257] == b" he"


def test_folder_is_made_once_and_another_file_gets_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = gguf_folder([write(tmp_path / "a.gguf", tokenizer=byte_level())], cache)
    made = (first / "tokenizer.json").stat().st_mtime_ns
    again = gguf_folder([write(tmp_path / "b.gguf", tokenizer=byte_level())], cache)
    assert again == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == made
    other = write(tmp_path / "c.gguf", tokenizer=byte_level(**{"ggml.pre": "qwen2"}))
    assert gguf_folder([other], cache) != first
    assert [path.name[0] for path in first.parent.iterdir()].count(".") == 0


def test_cache_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", tokenizer=byte_level())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory; load\.download_folder names"):
        gguf_folder([file], tmp_path / "file")


@pytest.mark.parametrize("cut", ["llama-bpe", "qwen2", "gpt-2", "gpt-4o", "tekken"])
def test_byte_level_text_becomes_the_ids_of_transformers(tmp_path: Path, cut: str) -> None:
    file = write(tmp_path / "a.gguf", tokenizer=byte_level(**{"ggml.pre": cut}))
    ours = tokenizer_of(file, tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in ["<|im_end|>he <think>", *texts("he  \n12'tlé日🙂<|_>")]:
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(found, skip_special_tokens=False) == text


def test_digits_of_smollm_stand_alone(tmp_path: Path) -> None:
    """As in its own tokenizer.json; transformers' reading of the GGUF file does not cut so."""
    letters = byte_level()
    tokens, kinds = letters["ggml.tokens"], letters["ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    more = {
        "ggml.tokens": [*tokens, "Ċ Ċ".replace(" ", ""), "12"],
        "ggml.token_type": [*kinds, 1, 1],
        "ggml.merges": ["Ċ Ċ", "1 2"],
    }
    tokenizer = tokenizer_of(write(tmp_path / "a.gguf", tokenizer=letters | more), tmp_path)
    assert tokenizer.encode("\n\n12").tokens == ["ĊĊ", "1", "2"]


@pytest.mark.parametrize("space", [True, False])
def test_pieces_become_the_ids_of_transformers(tmp_path: Path, space: bool) -> None:
    said = pieces() | {"ggml.add_space_prefix": space}
    architecture = "llama" if space else "gemma3"
    shape = dict(SHAPE) | ({} if space else {"attention.sliding_window": 16})
    file = write(tmp_path / "a.gguf", architecture=architecture, shape=shape, tokenizer=said)
    ours = tokenizer_of(file, tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in ["hello hello", " hello", "</s>hello", *texts("hello   \té🙂")]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        found = theirs(text)["input_ids"]
        assert ours.decode(found) == theirs.decode(found, skip_special_tokens=True), text


@pytest.mark.parametrize(
    ("settings", "added"), [({}, [1]), ({"ggml.add_bos_token": False}, []),
                            ({"ggml.add_eos_token": True}, [1, 2])],
)  # fmt: skip
def test_plain_text_gets_the_special_tokens_of_the_file(
    tmp_path: Path, settings: dict[str, object], added: list[int]
) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "a.gguf", tokenizer=pieces() | settings), tmp_path)
    ids = tokenizer.encode("hello").ids
    assert [token for token in ids if token in (1, 2)] == added
    assert ids[0] == (added or ids)[0]


def test_ends_of_turns_end_an_answer(tmp_path: Path) -> None:
    named = write(tmp_path / "a.gguf", tokenizer=byte_level(**{"ggml.eot_token_id": 258}))
    assert config_of(named, tmp_path)["eos_token_id"] == [258, 259]
    found = write(tmp_path / "b.gguf", tokenizer=byte_level(**{"ggml.eos_token_id": 0}))
    assert config_of(found, tmp_path)["eos_token_id"] == [0, 259]


def test_template_for_tools_stands_beside_the_default(tmp_path: Path) -> None:
    said = byte_level(**{"chat_template.tool_use": "tools"})
    folder = gguf_folder([write(tmp_path / "a.gguf", tokenizer=said)], tmp_path)
    card = json.loads((folder / "tokenizer_config.json").read_text())
    assert [each["name"] for each in card["chat_template"]] == ["default", "tool_use"]
    assert vocabulary.read_model_tokenizer(folder).template is not None


def llama3_factors(factor: float) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    factors: list[float] = []
    for index in range(8):
        wavelength = 2 * math.pi * 50_000.0 ** (2 * index / 16)
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        middle = factor if wavelength > 8192 else between
        factors.append(1.0 if wavelength < 2048 else middle)
    return np.array(factors, np.float32)


def test_scaling_of_llama_3_is_found_in_its_factors(tmp_path: Path) -> None:
    def scaled(factors: np.ndarray) -> dict[str, Any]:
        tensors = {"rope_freqs.weight": factors}
        return config_of(write(file, tokenizer=byte_level(), tensors=tensors), tmp_path)

    file = tmp_path / "a.gguf"
    assert scaled(llama3_factors(32.0))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_scaling" not in scaled(np.ones(8, np.float32))
    with pytest.raises(ConfigError, match="is not the scaling of Llama 3"):
        scaled(llama3_factors(32.0) * 1.1)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_scaling_is_what_the_file_says(
    tmp_path: Path, more: dict[str, object], expected: dict[str, object] | None
) -> None:
    file = write(tmp_path / "a.gguf", shape=SHAPE | more, tokenizer=byte_level())
    assert config_of(file, tmp_path).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "mamba"}, r"architecture 'mamba' cannot be read from a GGUF file alone"),
        (
            {"shape": SHAPE | {"expert_count": 8}},
            r"blk\.0\.ffn_gate_exps\.weight is missing: unstacked experts are not supported",
        ),
        (
            {"shape": SHAPE | {"rope.dimension_count": 8}},
            "rope.dimension_count = 8: must be the head size, 16",
        ),
        ({"shape": {"embedding_length": 64}}, "llama.attention.head_count is missing"),
        ({"shape": SHAPE | {"attention.head_count_kv": [1, 2]}}, "differs from layer to layer"),
        ({"shape": SHAPE | {"rope.scaling.type": "longrope"}}, "rope.scaling.type = 'longrope'"),
        ({"tokenizer": {}}, "the file has no tokenizer"),
        ({"tokenizer": byte_level(**{"ggml.model": "rwkv"})}, "type 'rwkv' is not supported"),
        (
            {"tokenizer": byte_level(**{"ggml.pre": "odd"})},
            "tokenizer.ggml.pre = 'odd': unknown pre-tokenizer",
        ),
    ],
)
def test_unread_file_is_refused_with_advice(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"tokenizer": byte_level(), **fields}
    file = write(tmp_path / "a.gguf", **given)
    with pytest.raises(ConfigError, match=message) as caught:
        gguf_folder([file], tmp_path)
    assert str(file) in str(caught.value)
    assert "model.tokenizer_path" in str(caught.value)


def test_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="cut short"):
        gguf_folder([tmp_path / "a.gguf"], tmp_path)
    assert find_files(tmp_path / "a.gguf").weights == (tmp_path / "a.gguf",)


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


def converted_tokenizer(folder: Path) -> Tokenizer:
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


def spelled(text: str) -> str:
    return ("" if text.startswith(" ") else "▁") + text.replace(" ", "▁")


def test_pairs_are_merged_as_sentence_piece_merges_them(tmp_path: Path) -> None:
    write_model(tmp_path, "bpe")
    tokenizer = converted_tokenizer(tmp_path)
    ranks = {word: index for index, word in enumerate(WORDS)}
    for text in texts("hello ", 1, 24):
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert tokens == merged(spelled(text), ranks), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.removeprefix(" ")


def test_text_is_cut_the_likeliest_way(tmp_path: Path) -> None:
    names = write_model(tmp_path, "unigram")
    tokenizer = converted_tokenizer(tmp_path)
    model = json.loads(tokenizer.to_str())["model"]
    scores = {text: score for text, score in model["vocab"] if text in (*WORDS, *LETTERS)}
    assert [text for text, _ in model["vocab"]] == names
    for text in texts("hello ", 1, 24):
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert "".join(tokens) == spelled(text)
        found = sum(scores[token] for token in tokens)
        assert found == pytest.approx(likeliest(spelled(text), scores)), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_unknown_text_becomes_bytes_and_special_tokens_stay_whole(
    tmp_path: Path, kind: str
) -> None:
    write_model(tmp_path, kind)
    tokenizer = converted_tokenizer(tmp_path)
    encoding = tokenizer.encode("é</s><own>h")
    assert encoding.tokens[0] == "<s>"
    assert [token for token in encoding.tokens if token.startswith("<0x")] == ["<0xC3>", "<0xA9>"]
    assert "<own>" in encoding.tokens
    assert tokenizer.decode(encoding.ids).startswith("é<own>")
    tokens = read_vocabulary(converted(tmp_path) or tmp_path)
    assert b" hello" in tokens.tokens


def test_model_folder_with_pieces_is_served_whole(tmp_path: Path) -> None:
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
def test_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
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
    tokenizer = converted_tokenizer(tmp_path)
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


def test_letters_of_bytes_are_those_of_gpt2() -> None:
    from antiphon.model_card.converted.tokenizer_json import byte_letters  # noqa: PLC0415

    assert byte_letters() == gguf_letters()


def test_folder_with_neither_has_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_files_folder(embedded.path(), tmp_path) is None
