"""Which files a model is, and what its config says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.unit.config.test_card import CONFIG as BASE

from antiphon.config.errors import ConfigError
from antiphon.config.load import load
from antiphon.config.model import Dtype, LoadFormat
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_card.weight_headers import read_gguf

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {name: BASE[name] for name in BASE if name not in ("torch_dtype", "eos_token_id")} | {
    "intermediate_size": 128,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def write(folder: Path, *names: str, config: dict[str, object] = CONFIG) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def indexed(folder: Path, name: str, *files: str) -> None:
    weight_map = {f"tensor-{n}": file for n, file in enumerate(files)}
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("there", "asked", "format_", "chosen"),
    [
        (["a.safetensors", "a.bin"], "auto", "safetensors", ["a.safetensors"]),
        (["a.safetensors", "a.bin"], "pt", "pt", ["a.bin"]),
        (["b.bin", "a.bin", "c.pt", "training_args.bin"], "auto", "pt", ["a.bin", "b.bin"]),
        (["c.pt", "optimizer.pt"], "auto", "pt", ["c.pt"]),
        (["model.safetensors", "consolidated.safetensors"], "auto", "safetensors", None),
        (["consolidated.safetensors"], "auto", "safetensors", ["consolidated.safetensors"]),
        (["a.gguf"], "auto", "gguf", ["a.gguf"]),
        (["a.gguf", "a.bin"], "gguf", "gguf", ["a.gguf"]),
        (["a.safetensors"], "dummy", "dummy", []),
        ([], "auto", "safetensors", []),
        (["a.bin"], "safetensors", "safetensors", []),
    ],
)
def test_files_of_the_first_format_that_is_there(
    tmp_path: Path, there: list[str], asked: str, format_: str, chosen: list[str] | None
) -> None:
    files = find_files(write(tmp_path, *there), LoadFormat(asked))
    names = [file.name for file in files.weights]
    assert (files.format, names) == (format_, ["model.safetensors"] if chosen is None else chosen)


def test_index_names_files_of_its_folder_whether_they_are_there_or_not(tmp_path: Path) -> None:
    write(tmp_path, "stray.safetensors")
    indexed(tmp_path, "model.safetensors.index.json", "b.safetensors", "a.safetensors")
    names = [file.name for file in find_files(tmp_path).weights]
    assert names == ["a.safetensors", "b.safetensors"]
    indexed(write(tmp_path), "model.safetensors.index.json", "../other.safetensors")
    with pytest.raises(ConfigError, match=r"\.\./other\.safetensors is not in the same folder"):
        find_files(tmp_path)


def test_one_of_several_gguf_files_must_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, "q4.gguf", "q8.gguf")
    with pytest.raises(ConfigError, match=r"use the path of one of q4\.gguf, q8\.gguf$"):
        find_files(tmp_path)
    assert [file.name for file in find_files(tmp_path / "q8.gguf").weights] == ["q8.gguf"]


def test_parts_of_one_gguf_model_need_no_choice(tmp_path: Path) -> None:
    parts = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert [file.name for file in find_files(write(tmp_path, *parts)).weights] == parts


def test_config_is_overridden_field_by_field_of_an_object(tmp_path: Path) -> None:
    overrides = '{"max_position_embeddings": 64, "new": [1]}'
    files = find_files(write(tmp_path), LoadFormat.DUMMY, overrides=overrides)
    said = json.loads(files.config())
    assert said == CONFIG | {"max_position_embeddings": 64, "new": [1]}
    assert read_card(files).context_tokens == 64
    with pytest.raises(ConfigError, match=r"config_overrides: must be a JSON object"):
        load(environ={"ANTIPHON_LOAD__CONFIG_OVERRIDES": "[1]"})


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
        ),
        ({"rope_scaling": None}, {"rope_theta": 10000.0}),
        ({"rope_parameters": {"rope_type": "x"}}, {"rope_type": "x"}),
    ],
)
def test_older_names_of_the_rotation_override_newer_files(
    tmp_path: Path, overrides: dict[str, object], rope: dict[str, object]
) -> None:
    files = find_files(write(tmp_path), overrides=json.dumps(overrides))
    assert json.loads(files.config())["rope_parameters"] == rope


def test_sizes_of_dummy_weights_and_of_torch_files_are_known(tmp_path: Path) -> None:
    card = read_card(find_files(write(tmp_path), LoadFormat.DUMMY))
    attention, mlp, tables = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 2 * 100 * 64
    assert card.weights.count == 2 * (attention + mlp) + tables
    (write(tmp_path) / "a.bin").write_bytes(bytes(2000))
    assert read_card(tmp_path).weights.count == 1000
    write(tmp_path, config=CONFIG | {"dtype": "float32"})
    assert read_card(tmp_path).weights.count == 500


def gguf_string(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def gguf_bytes(kind: int, *, version: int = 3) -> bytes:
    """A header by hand: one setting, a list of two strings, and a tensor of 3 rows of 32."""
    words = [version.to_bytes(4, "little"), (1).to_bytes(8, "little"), (2).to_bytes(8, "little")]
    words += [gguf_string("general.alignment"), (4).to_bytes(4, "little"), b"\x10\0\0\0"]
    words += [gguf_string("tokens"), (9).to_bytes(4, "little"), (8).to_bytes(4, "little")]
    words += [(2).to_bytes(8, "little"), gguf_string("a"), gguf_string("bc")]
    words += [gguf_string("w"), (2).to_bytes(4, "little"), (32).to_bytes(8, "little")]
    words += [(3).to_bytes(8, "little"), kind.to_bytes(4, "little"), (0).to_bytes(8, "little")]
    head = b"GGUF" + b"".join(words)
    return head + bytes(-len(head) % 16) + bytes(96 * 4)


@pytest.mark.parametrize(("kind", "dtype"), [(0, Dtype.FLOAT32), (1, Dtype.FLOAT16), (8, None)])
def test_gguf_header_is_read(tmp_path: Path, kind: int, dtype: Dtype | None) -> None:
    (write(tmp_path) / "a.gguf").write_bytes(gguf_bytes(kind))
    header = read_gguf(tmp_path / "a.gguf")
    assert (header.settings, header.tensors["w"].shape) == ({"general.alignment": 16}, (3, 32))
    assert header.tensors["w"].start % 16 == 0
    weights = read_card(tmp_path).weights
    assert (weights.count, weights.bytes, weights.dtype) == (96, 96 * 4, dtype)


def test_gguf_header_that_is_cut_or_of_another_version_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes(0)
    for length in range(len(whole) - 96 * 4 - 16):
        (tmp_path / "a.gguf").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"a\.gguf: (cut short|not a GGUF file)"):
            read_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(0, version=1))
    with pytest.raises(ConfigError, match="GGUF version 1: only 2 and 3"):
        read_gguf(tmp_path / "a.gguf")
