"""A keys file for tests: tenants with one key each, `sk-<tenant>`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.gateway import AccessConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Limits = Mapping[str, object]


def key_of(tenant: str) -> str:
    """The key of a tenant."""
    return f"sk-{tenant}"


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}


def write_keys(file: Path, tenants: Mapping[str, Limits]) -> None:
    """Write a keys file in JSON."""
    entries = {
        name: {"keys": [hashlib.sha256(key_of(name).encode()).hexdigest()], **limits}
        for name, limits in tenants.items()
    }
    file.write_bytes(msgspec.json.encode({"tenants": entries}))


def keyed(
    folder: Path,
    tenants: Mapping[str, Limits],
    *,
    share_prefix_cache: bool = False,
    **config: str,
) -> AccessConfig:
    """Settings with a keys file in a folder."""
    file = folder / "keys.json"
    write_keys(file, tenants)
    return AccessConfig(keys_file=str(file), share_prefix_cache=share_prefix_cache, **config)
