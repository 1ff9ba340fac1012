"""Models of the hub: fetched once, found again without it, refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from tests.arguments import settings_of
from tests.unit.service.fake_hub import COMMIT, FakeHub

from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadConfig, LoadFormat
from antiphon.model_card.hub import fetch, is_hub_id, list_published_files
from antiphon.model_card.served_model import model_files, served_name, tokenizer_folder

if TYPE_CHECKING:
    from collections.abc import Generator

REPO = "owner/small"
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "README.md": b"# small",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
    "stray.safetensors": b"stray",
    "pytorch_model.bin": b"torch",
    "original/model-1.safetensors": b"again",
}
DESCRIBED = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
WEIGHTS = {"model-1.safetensors", "model-2.safetensors"}


@pytest.fixture
def hub() -> Generator[FakeHub]:
    with FakeHub(REPO, FILES).serving() as hub:
        yield hub


def cached_in(folder: Path, **fields: object) -> LoadConfig:
    return replace(LoadConfig(), download_folder=str(folder), **fields)


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_description_is_fetched_without_the_weights(hub: FakeHub, tmp_path: Path) -> None:
    folder = fetch(REPO, cached_in(tmp_path), weights=False, endpoint=hub.url)
    assert names(folder) == DESCRIBED
    assert (folder / "config.json").read_bytes() == FILES["config.json"]


def test_one_format_of_weights_is_fetched_and_only_once(hub: FakeHub, tmp_path: Path) -> None:
    load = cached_in(tmp_path)
    folder = fetch(REPO, load, weights=True, endpoint=hub.url)
    assert names(folder) == DESCRIBED | WEIGHTS
    before = list(hub.fetched)
    assert fetch(REPO, load, weights=True, endpoint=hub.url) == folder
    assert hub.fetched == before


def test_another_format_is_fetched_when_it_is_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    load = cached_in(tmp_path, format=LoadFormat.PT)
    folder = fetch(REPO, load, weights=True, endpoint=hub.url)
    assert names(folder) == DESCRIBED | {"pytorch_model.bin"}


def test_fetched_model_is_found_by_branch_and_commit_and_offline_without_the_hub(
    tmp_path: Path,
) -> None:
    with FakeHub(REPO, FILES).serving() as hub:
        commit = cached_in(tmp_path, revision=COMMIT)
        folder = fetch(REPO, commit, weights=True, endpoint=hub.url)
        assert fetch(REPO, cached_in(tmp_path), weights=True, endpoint=hub.url) == folder
    assert fetch(REPO, cached_in(tmp_path, offline=True), weights=True) == folder
    assert fetch(REPO, cached_in(tmp_path), weights=True, endpoint=hub.url) == folder
    settings = settings_of("--model-path", REPO, "--download-dir", str(tmp_path), "--load-offline")
    files = model_files(settings)
    assert (files.folder, {file.name for file in files.weights}) == (folder, WEIGHTS)
    assert (tokenizer_folder(settings), served_name(settings)) == (folder, REPO)


@pytest.mark.parametrize(
    ("repo", "fields", "message"),
    [
        ("owner/none", {}, "owner/none: neither a local folder nor a Hugging Face model"),
        (REPO, {"revision": "v9"}, r"load\.revision = v9: no such revision"),
        (REPO, {"offline": True}, r"not completely in the cache, and load\.offline is set"),
        ("a--b/c", {}, "a--b/c: .*--"),
        ("smolm2", {}, r"a Hugging Face model.*; did you mean smollm2\?$"),
        ("smolm2", {"offline": True}, r"offline is set: .*; did you mean smollm2\?$"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_line(
    hub: FakeHub, tmp_path: Path, repo: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        fetch(repo, cached_in(tmp_path, **fields), weights=True, endpoint=hub.url)
    assert "\n" not in str(caught.value)


def test_gated_model_error_has_advice(tmp_path: Path) -> None:
    with (
        FakeHub(REPO, FILES, gated=True).serving() as hub,
        pytest.raises(ConfigError, match=r"request access on its page.*HF_TOKEN"),
    ):
        fetch(REPO, cached_in(tmp_path), weights=True, endpoint=hub.url)


def test_unreachable_hub_is_reported(tmp_path: Path) -> None:
    with FakeHub(REPO, FILES).serving() as hub:
        pass
    with pytest.raises(ConfigError, match=r"neither a local folder nor in the cache, and the hub"):
        fetch(REPO, cached_in(tmp_path), weights=False, endpoint=hub.url)


def test_weights_that_are_missing_are_found_so_offline_and_need_room_on_the_disk(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(REPO, cached_in(tmp_path), weights=False, endpoint=hub.url)
    with pytest.raises(ConfigError, match="2 file"):
        fetch(REPO, cached_in(tmp_path, offline=True), weights=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(ConfigError, match=r"weights need 0\.00 GiB; only 0\.00 GiB free in"):
        fetch(REPO, cached_in(tmp_path), weights=True, endpoint=hub.url)
    assert not WEIGHTS & set(hub.fetched)


def test_hub_lists_published_files(hub: FakeHub) -> None:
    known = list_published_files(REPO, LoadConfig(), endpoint=hub.url)
    assert (known["config.json"].sha256, known["model-1.safetensors"].size_bytes) == (None, 3)
    with pytest.raises(ConfigError, match=r"load\.offline is set"):
        list_published_files(REPO, replace(LoadConfig(), offline=True), endpoint=hub.url)


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        (REPO, True),
        ("gpt2", True),
        ("/models/small", False),
        ("./owner/small", False),
        ("~/small", False),
        ("a/b/c", False),
        ("model.gguf", False),
        ("owner/model.gguf", False),
    ],
)
def test_path_or_an_id(path: str, is_id: bool) -> None:
    assert is_hub_id(path) is is_id


def test_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(REPO).mkdir(parents=True)
    assert not is_hub_id(REPO)
