"""A GGUF file alone says what a folder would: config, tokenizer and template."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.arguments import settings_of
from tests.unit.config.described.gguf_files import SHAPE, byte_level, pieces, write
from transformers import AutoTokenizer

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.model_card.card import read_card
from antiphon.model_card.converted.folder import gguf_folder
from antiphon.model_card.files import find_files
from antiphon.model_card.served_model import model_files, tokenizer_folder
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.wire.tokenize import ChatMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer


def config_of(file: Path, cache: Path) -> dict[str, Any]:
    return json.loads((gguf_folder([file], cache) / "config.json").read_text())


def tokenizer_of(file: Path, cache: Path) -> Tokenizer:
    return open_tokenizer(gguf_folder([file], cache))


def texts(letters: str, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(300)]


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


def test_a_lone_file_is_a_model_to_every_service(tmp_path: Path) -> None:
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


def test_a_folder_is_made_once_and_another_file_gets_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = gguf_folder([write(tmp_path / "a.gguf", tokenizer=byte_level())], cache)
    made = (first / "tokenizer.json").stat().st_mtime_ns
    again = gguf_folder([write(tmp_path / "b.gguf", tokenizer=byte_level())], cache)
    assert again == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == made
    other = write(tmp_path / "c.gguf", tokenizer=byte_level(**{"ggml.pre": "qwen2"}))
    assert gguf_folder([other], cache) != first
    assert [path.name[0] for path in first.parent.iterdir()].count(".") == 0


def test_a_cache_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
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


def test_the_template_for_tools_stands_beside_the_default(tmp_path: Path) -> None:
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
def test_what_is_not_read_is_refused_with_a_way_out(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"tokenizer": byte_level(), **fields}
    file = write(tmp_path / "a.gguf", **given)
    with pytest.raises(ConfigError, match=message) as caught:
        gguf_folder([file], tmp_path)
    assert str(file) in str(caught.value)
    assert "model.tokenizer_path" in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="cut short"):
        gguf_folder([tmp_path / "a.gguf"], tmp_path)
    assert find_files(tmp_path / "a.gguf").weights == (tmp_path / "a.gguf",)
