"""A model of the hub is fetched once, before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.unit.service.fake_hub import FakeHub

from antiphon.config.errors import ConfigError
from antiphon.config.settings import Settings
from antiphon.service.hub import fetch
from antiphon.supervisor.fetching import fetched

if TYPE_CHECKING:
    from pathlib import Path

REPO = "somebody/small"
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def settings(cache: Path, *, offline: bool = False) -> Settings:
    base = Settings()
    return replace(
        base,
        model=replace(base.model, path=REPO),
        load=replace(base.load, download_folder=str(cache), offline=offline),
    )


def test_processes_only_look_up_what_the_supervisor_has_fetched(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    with FakeHub(REPO, FILES).serving() as hub:
        fetch(REPO, settings(tmp_path).load, weights=True, endpoint=hub.url)
    found = fetched(settings(tmp_path, offline=True), console)
    assert found == settings(tmp_path, offline=True)
    assert "looking for somebody/small" in console.export_text()


def test_a_model_that_cannot_be_had_keeps_everything_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"somebody/small: not wholly in the cache"):
        fetched(settings(tmp_path, offline=True), Console(quiet=True))


def test_a_model_on_this_machine_needs_no_fetching() -> None:
    assert fetched(Settings(), Console(quiet=True)) == Settings()
