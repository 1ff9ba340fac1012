"""Keys: hashed at once, looked up in a time that says nothing of them."""

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
    """What a caller may do beside asking."""

    TENANT = 0
    OPERATOR = 1
    """Orders to the server, where no admin key is set."""
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is."""

    tenant: TenantId
    level: AccessLevel


class Keyring:
    """Finds the owner of a key. `owners` is by SHA-256.

    The table is keyed by a hash with a secret of this process: how long a look-up takes says
    nothing that a caller could use. What is found is compared in constant time.
    """

    def __init__(self, owners: Mapping[bytes, Caller]) -> None:
        self._salt = secrets.token_bytes(32)
        self._owners = {self._place(digest): (digest, who) for digest, who in owners.items()}

    def owner(self, key: str) -> Caller | None:
        """Return whose key it is; None: nobody's."""
        shown = digest_of(key)
        digest, who = self._owners.get(self._place(shown), (b"", None))
        return who if hmac.compare_digest(digest, shown) else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._salt, digest_size=16).digest()


def digest_of(key: str) -> bytes:
    """Hash a key as the keys file has it. Headers may hold bytes that are no text."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
