"""What keeps a model from being loaded."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model folder cannot be served; the message names the file or field, and what would do."""


class UnsupportedVariant(ModelLoadError):
    """The family has no such variant; the modules of transformers may have it."""
