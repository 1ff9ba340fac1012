"""One short name for everything that a cluster must agree on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.config.cluster import ClusterConfig


def digest(cluster: ClusterConfig) -> str:
    """Equal for equal settings, on every machine and in every release: SHA-256 in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(cluster, order="sorted")).hexdigest()
