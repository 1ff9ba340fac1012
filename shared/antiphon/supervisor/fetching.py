"""Has a model of the hub on this machine before any process asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon.service.model import hub_models, model_files, tokenizer_place

if TYPE_CHECKING:
    from rich.console import Console

    from antiphon.config.settings import Settings


def fetched(settings: Settings, console: Console) -> Settings:
    """Fetch what the settings name; return settings with which processes only look it up.

    Each would fetch for itself otherwise, and if a branch moved meanwhile they would disagree.
    The hub's own bars show the bytes and the time left, in a terminal.

    Raises:
        ConfigError: It cannot be had; says why.
    """
    named = hub_models(settings)
    if not named:
        return settings
    console.print(f"looking for {', '.join(named)}", highlight=False)
    model_files(settings)
    tokenizer_place(settings)
    return replace(settings, load=replace(settings.load, offline=True))
