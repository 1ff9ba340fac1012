"""Path prefix of a proxy: `gateway.root_path`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.http_parser import RawRequestMessage


def prefix_of(root_path: str, paths: Iterable[str]) -> str:
    """Return the prefix without a trailing slash; empty if there is none.

    Args:
        root_path: The configured value.
        paths: All paths of the API.

    Raises:
        ConfigError: A path of the API starts with it, so paths would be ambiguous.
    """
    prefix = root_path.rstrip("/")
    for path in paths:
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            raise ConfigError(
                f"gateway.root_path (--fastapi-root-path): the API's own path {path} "
                f"starts with {prefix}; choose another prefix, or let the proxy strip it "
                "and leave root_path unset"
            )
    return prefix


def without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Remove the prefix from a request's path, if the proxy has not."""
    path = message.url.raw_path
    if path != prefix and not path.startswith(f"{prefix}/"):
        return message
    rest = path.removeprefix(prefix) or "/"
    url = message.url.with_path(rest, encoded=True, keep_query=True, keep_fragment=True)
    return message._replace(path=str(url), url=url)
