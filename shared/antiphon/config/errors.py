"""What bad settings end in."""

from __future__ import annotations


class ConfigError(Exception):
    """Settings that cannot be used. One line: the source, the path, the value and the bound."""
