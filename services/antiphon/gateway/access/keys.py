"""API keys: hashed at once, looked up in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.ids import TenantId


class AccessLevel(IntEnum):
    """Privilege level of a caller."""

    TENANT = 0
    OPERATOR = 1
    """May use operator commands, if no admin key is set."""
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request."""

    tenant: TenantId
    level: AccessLevel


class Keyring:
    """Finds the owner of a key. `owners` is by SHA-256.

    The table is keyed by a hash with a secret of this process, so that look-up times reveal nothing
    useful. A match is compared in constant time.
    """

    def __init__(self, owners: Mapping[bytes, Caller]) -> None:
        self._salt = secrets.token_bytes(32)
        self._owners = {self._place(digest): (digest, who) for digest, who in owners.items()}

    def owner(self, key: str) -> Caller | None:
        """Return the owner of a key, or None."""
        shown = digest_of(key)
        digest, who = self._owners.get(self._place(shown), (b"", None))
        return who if hmac.compare_digest(digest, shown) else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._salt, digest_size=16).digest()


def digest_of(key: str) -> bytes:
    """Hash a key as in the keys file. Header values may contain bytes that are not text."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
