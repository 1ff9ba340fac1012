"""The error for invalid settings."""

from __future__ import annotations


class ConfigError(Exception):
    """Invalid settings. The message is one line: the source, the path, the value and the bound."""
