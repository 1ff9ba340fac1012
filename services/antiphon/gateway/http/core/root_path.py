"""The path prefix under which a proxy serves the API: `gateway.root_path`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.http_parser import RawRequestMessage


def prefix_of(root_path: str, paths: Iterable[str]) -> str:
    """Return the prefix without a slash at its end; empty: there is none.

    Args:
        root_path: As configured.
        paths: All paths that are served.

    Raises:
        ConfigError: Paths of the API begin with it, so that a path could mean two things.
    """
    prefix = root_path.rstrip("/")
    for path in paths:
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            raise ConfigError(
                f"gateway.root_path (--fastapi-root-path): {path} is a path of the API itself and "
                f"begins with {prefix}; choose another prefix, or let the proxy strip this one and "
                "leave root_path out"
            )
    return prefix


def without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Remove the prefix from the path of a request, if the proxy has left it there."""
    path = message.url.raw_path
    if path != prefix and not path.startswith(f"{prefix}/"):
        return message
    rest = path.removeprefix(prefix) or "/"
    url = message.url.with_path(rest, encoded=True, keep_query=True, keep_fragment=True)
    return message._replace(path=str(url), url=url)
