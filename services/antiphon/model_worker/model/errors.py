"""Errors of loading a model."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model folder cannot be served; names the file or field, and what is supported."""


class UnsupportedVariant(ModelLoadError):
    """The family does not support this variant; the transformers backend may."""


class UnknownArchitecture(UnsupportedVariant):
    """No family is of this architecture."""
