"""API keys: hashed at once and looked up in constant time; their file, reloaded when it changes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.tenants import Tenants, keys_file_bytes, tenants_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.ids import TenantId


class AccessLevel(IntEnum):
    TENANT = 0
    OPERATOR = 1  # may use operator commands, if no admin key is set
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Caller:
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
        shown = digest_of(key)
        digest, who = self._owners.get(self._place(shown), (b"", None))
        return who if hmac.compare_digest(digest, shown) else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._salt, digest_size=16).digest()


def digest_of(key: str) -> bytes:
    """Hash a key as in the keys file. Header values may contain bytes that are not text."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeysFile:
    def __init__(self, file: str) -> None:
        self._path = Path(file).expanduser()
        self._seen: bytes | str | None = None  # the last content, or why it could not be read

    def read(self) -> Tenants:
        self._seen = keys_file_bytes(self._path)
        return tenants_of(self._seen, self._path)

    def reload_if_changed(self) -> Tenants | ConfigError | None:
        """Return the new content, or what is wrong with it; None if it is unchanged."""
        seen: bytes | str
        try:
            seen = data = keys_file_bytes(self._path)
        except ConfigError as error:
            seen, data = str(error), None
        if seen == self._seen:
            return None
        self._seen = seen
        if data is None:
            return ConfigError(seen)
        try:
            return tenants_of(data, self._path)
        except ConfigError as error:
            return error
