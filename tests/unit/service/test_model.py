"""Where a model is, what it is called, and what is said when it is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadFormat
from antiphon.config.settings import Settings
from antiphon.model_card.served_model import model_files, served_name, tokenizer_folder

if TYPE_CHECKING:
    from pathlib import Path


def settings(path: object, **fields: str) -> Settings:
    base = Settings()
    return replace(base, model=replace(base.model, path=str(path), **fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_the_embedded_model_is_in_the_package() -> None:
    files = model_files(Settings())
    assert (files.folder, files.format) == (embedded.path(), LoadFormat.SAFETENSORS)
    assert served_name(Settings()) == embedded.SERVED_NAME


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/small", "small"),
        ("/models/small/", "small"),
        ("owner/small", "owner/small"),
        ("gpt2", "gpt2"),
        ("/models/small-Q8_0.gguf", "small-Q8_0"),
    ],
)
def test_a_model_is_called_by_its_path_alone(path: str, name: str) -> None:
    assert served_name(settings(path)) == name


def test_a_gguf_file_is_described_beside_it_or_by_the_tokenizers_folder(
    folder: Path, tmp_path: Path
) -> None:
    beside, apart = folder / "a.gguf", tmp_path / "b.gguf"
    for file in (beside, apart):
        file.write_bytes(b"")
    assert model_files(settings(beside)).folder == folder
    assert tokenizer_folder(settings(beside)) == folder
    described = settings(apart, tokenizer_path=str(folder))
    assert model_files(described).folder == folder
    assert model_files(described).weights == (apart,)
    with pytest.raises(ConfigError, match=r"b\.gguf: not a GGUF file"):
        model_files(settings(apart))


def test_what_is_missing_is_named_with_its_setting(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* has no config\.json"):
        model_files(settings(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path: .*gone\.gguf: no such file"):
        model_files(settings(folder / "gone.gguf"))
    with pytest.raises(ConfigError, match=r"model\.path: .*gone: no such folder"):
        model_files(settings(folder / "gone"))
    with pytest.raises(ConfigError, match=r"config\.json is neither a folder nor a \.gguf file"):
        model_files(settings(folder / "config.json"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: .* has no tokenizer\.json"):
        tokenizer_folder(settings(folder, tokenizer_path=str(tmp_path)))


def test_loading_follows_the_settings(folder: Path) -> None:
    said = settings(folder)
    load = replace(said.load, format=LoadFormat.DUMMY, mmap=False, config_overrides='{"a": 1}')
    files = model_files(replace(said, load=load))
    assert (files.format, files.mapped, files.config()) == (LoadFormat.DUMMY, False, b'{"a":1}')
