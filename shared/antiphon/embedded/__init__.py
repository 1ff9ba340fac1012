"""The small chat model that ships with Antiphon, in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

SERVED_NAME = "antiphon-small"


def path() -> Path:
    """Return the folder with config.json, the tokenizer and the weights."""
    return Path(__file__).parent / "model"
