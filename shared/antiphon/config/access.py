"""Who may ask, from where: keys, the file of tenants, and the origins of web pages."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Config, Help, Secret

Key = Annotated[str, Meta(pattern="^[!-~]*$")]
"""Fit for a header: no spaces, nothing beyond ASCII."""

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+")


class AccessConfig(Config):
    """Keys and tenants; see docs/access.md."""

    api_key: Annotated[
        Key,
        Help(
            "Key that every call but probes must show, unless it shows another that is known; "
            "empty: none is asked for, without a keys file."
        ),
        Secret(),
    ] = ""
    admin_api_key: Annotated[
        Key,
        Help("Key of an operator. Where it is set, no other one flushes, pauses or aborts."),
        Secret(),
    ] = ""
    reasoning_key: Annotated[
        Key,
        Help(
            "Secret that seals reasoning which clients of /v1/responses carry, the same at every "
            "gateway; empty: made from admin_api_key, else one that lasts as long as the process."
        ),
        Secret(),
    ] = ""
    keys_file: Annotated[
        str,
        Help(
            "TOML or JSON file with tenants, the hashes of their keys and their limits; read "
            "again when it changes. Empty: there are no tenants."
        ),
    ] = ""
    share_prefix_cache: Annotated[
        bool,
        Help(
            "Whether tenants find each other's cached prefixes. Otherwise each finds its own only, "
            "and cannot measure what others have asked."
        ),
    ] = False
    allowed_origins: Annotated[
        str,
        Help(
            "Origins whose web pages may call (`https://a.example`), comma-separated, or `*`; "
            "empty: none."
        ),
    ] = ""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} is no origin; one is written https://host:port"
                )

    @property
    def origins(self) -> frozenset[str]:
        """The allowed origins one by one."""
        return frozenset(part.strip() for part in self.allowed_origins.split(",") if part.strip())
