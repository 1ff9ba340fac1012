"""What keeps a model from being loaded."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model folder cannot be served; the message names the file or field, and what would do."""
