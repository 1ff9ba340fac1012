from __future__ import annotations


class ConfigError(Exception):
    """Invalid settings or model files; whatever reads them raises it.

    The message is one line: the source, the path, the value and the bound.
    """
