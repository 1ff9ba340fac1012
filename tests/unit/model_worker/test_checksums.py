"""A model whose files are not those that were published is not loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadConfig
from antiphon.config.settings import Settings
from antiphon.model_card.files import find_files
from antiphon.model_card.hub import PublishedFile
from antiphon.model_worker.startup import checksums
from antiphon.model_worker.startup.checksums import HUB, content_digest, verify
from antiphon.model_worker.startup.engine import open_engine
from antiphon.service.startup import CannotStart

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTENT = {"config.json": b"{}", "a.safetensors": b"weights", "README.md": b"words"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def newer(sums: dict[str, str]) -> dict[str, object]:
    return {"files": {name: {"sha256": digest, "size": 1} for name, digest in sums.items()}}


def older(sums: dict[str, str]) -> dict[str, object]:
    return {"checksums": sums}


def check(folder: Path, listed: object) -> None:
    file = folder / "sums.json"
    file.write_text(json.dumps(listed))
    verify(find_files(folder), replace(LoadConfig(), checksum=str(file)), str(folder))


@pytest.mark.parametrize("form", [newer, older])
def test_listed_files_must_be_there_and_the_same(
    folder: Path, form: Callable[[dict[str, str]], dict[str, object]]
) -> None:
    sums = {name: sha256(content) for name, content in CONTENT.items()}
    check(folder, form(sums))
    wrong = sums | {"a.safetensors": sha256(b"others"), "gone.json": "0" * 64}
    with pytest.raises(ConfigError) as caught:
        check(folder, form(wrong))
    said = str(caught.value)
    assert f"a.safetensors is {sha256(b'weights')[:16]}…, not {sha256(b'others')[:16]}…" in said
    assert "gone.json: No such file or directory" in said


@pytest.mark.parametrize("listed", [{}, [], {"files": {"a": 1}}])
def test_a_list_that_lists_nothing_is_refused(folder: Path, listed: object) -> None:
    with pytest.raises(ConfigError, match=r"sums\.json"):
        check(folder, listed)


def known_to_the_hub() -> dict[str, PublishedFile]:
    blob = hashlib.sha1(b"blob 2\0{}").hexdigest()
    return {
        "config.json": PublishedFile(2, None, blob),
        "a.safetensors": PublishedFile(7, sha256(b"weights"), ""),
        "README.md": PublishedFile(9, None, "0" * 40),
        "b.bin": PublishedFile(9, "0" * 64, ""),
    }


def check_with_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, known: dict[str, PublishedFile]
) -> list[str]:
    asked: list[str] = []

    def published(repo: str, _: LoadConfig) -> dict[str, PublishedFile]:
        asked.append(repo)
        return known

    monkeypatch.setattr(checksums, "list_published_files", published)
    verify(find_files(folder), replace(LoadConfig(), checksum=HUB), "somebody/small")
    return asked


def test_files_are_compared_with_those_of_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not fetched is not missed, and words about a model are not the model."""
    assert check_with_hub(monkeypatch, folder, known_to_the_hub()) == ["somebody/small"]
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ConfigError, match=r"config\.json is .*, not "):
        check_with_hub(monkeypatch, folder, known_to_the_hub())


def test_weights_that_the_hub_does_not_know_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_to_the_hub()
    del known["a.safetensors"]
    with pytest.raises(ConfigError, match=r"on the hub has no a\.safetensors"):
        check_with_hub(monkeypatch, folder, known)


def test_a_worker_compares_before_it_loads(tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    file.write_text(json.dumps(older({"config.json": "0" * 64})))
    settings = replace(Settings(), load=replace(LoadConfig(), checksum=str(file)))
    with pytest.raises(CannotStart, match=r"load\.checksum = .*: config\.json is "):
        open_engine(settings)


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded.path(), folder)
    digests = [content_digest(folder)]
    assert digests == [content_digest(embedded.path())]
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_N"}
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": part}
        for kind, part in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for kind in ("Pooling", "Dense"):
        (folder / kinds[kind]).mkdir()
    written = {
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"weights",
        "README.md": b"",
    }
    for name, content in written.items():
        digests.append(content_digest(folder))
        (folder / name).write_bytes(content)
    assert content_digest(folder) == digests[-1], "README.md is no part of it"
    (folder / "2_Dense/model.safetensors").write_bytes(b"other weights")
    digests.append(content_digest(folder))
    assert len(set(digests)) == len(digests)
    (folder / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        content_digest(folder)


def test_a_config_that_is_overridden_is_another_model() -> None:
    plain = find_files(embedded.path())
    other = replace(plain, overrides='{"rope_theta": 1.0}')
    assert content_digest(plain) == content_digest(embedded.path())
    assert content_digest(other) != content_digest(plain)
