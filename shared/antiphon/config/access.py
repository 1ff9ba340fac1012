"""Access control: API keys, the tenants file, and allowed origins of web pages."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Config, Secret

Key = Annotated[str, Meta(pattern="^[!-~]*$")]
"""Valid in a header: no spaces, ASCII only."""

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+")


class AccessConfig(Config):
    """API keys, tenants and CORS; see docs/access.md."""

    api_key: Annotated[Key, Secret()] = ""
    """API key required for all calls except probes, unless the call has another known key; empty:
    no key is required without a keys file."""
    admin_api_key: Annotated[Key, Secret()] = ""
    """API key of operators. If it is set, only calls with this key may flush, pause or abort."""
    reasoning_key: Annotated[Key, Secret()] = ""
    """Secret that encrypts the reasoning items clients of /v1/responses send back, identical at all
    gateways; empty: derived from admin_api_key, else random for each process."""
    keys_file: str = ""
    """TOML or JSON file with tenants, the hashes of their keys and their limits; reloaded when it
    changes. Empty: no tenants."""
    share_prefix_cache: bool = False
    """Whether tenants share cached prefixes. Otherwise each tenant only uses its own and cannot
    detect what others have sent by measuring latency."""
    allowed_origins: str = ""
    """Origins that may call the API from web pages (CORS), such as `https://a.example`,
    comma-separated, or `*`; empty: none."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} is not an origin; expected https://host:port or *"
                )

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(part.strip() for part in self.allowed_origins.split(",") if part.strip())
