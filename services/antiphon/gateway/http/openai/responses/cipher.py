"""Encrypted reasoning that clients send back unchanged."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.config.gateway import AccessConfig
    from antiphon.wire.ids import TenantId

_PURPOSE = b"antiphon reasoning content v1"
_TAG_BYTES = 32
_NONCE_BYTES = 16


class _EncryptedReasoning(msgspec.Struct, frozen=True):
    text: str


class ReasoningCipher:
    """Encrypts reasoning to an opaque text, and decrypts texts of this deployment's gateways.

    The text is masked with a keystream of SHAKE-256 under a fresh nonce and authenticated by
    HMAC-SHA-256, each under its own key. It is bound to its tenant.
    """

    def __init__(self, access: AccessConfig) -> None:
        """Derive the keys from the deployment's secret; without one, make keys for this process."""
        secret = access.reasoning_key or access.admin_api_key
        root = secret.encode() or secrets.token_bytes(_TAG_BYTES)
        self._mask_key = hmac.digest(root, _PURPOSE + b" mask", "sha256")
        self._tag_key = hmac.digest(root, _PURPOSE + b" tag", "sha256")

    def encrypt(self, tenant: TenantId, text: str) -> str:
        plain = msgspec.msgpack.encode(_EncryptedReasoning(text))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        masked = self._masked(plain, nonce)
        tag = self._tag(nonce + masked, tenant)
        return base64.urlsafe_b64encode(nonce + tag + masked).decode()

    def decrypt(self, tenant: TenantId, encrypted: str, at: str) -> str:
        try:
            raw = base64.b64decode(encrypted.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        nonce, rest = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:]
        tag, masked = rest[:_TAG_BYTES], rest[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(nonce + masked, tenant)):
            raise InvalidRequest.at(
                at, "the encrypted content was modified, or was created by another server"
            )
        return msgspec.msgpack.decode(self._masked(masked, nonce), type=_EncryptedReasoning).text

    def _masked(self, text: bytes, nonce: bytes) -> bytes:
        """Mask or unmask, which is the same operation."""
        stream = hashlib.shake_256(self._mask_key + nonce).digest(len(text))
        mask, value = int.from_bytes(stream, "big"), int.from_bytes(text, "big")
        return (mask ^ value).to_bytes(len(text), "big")

    def _tag(self, masked: bytes, tenant: TenantId) -> bytes:
        return hmac.digest(self._tag_key, tenant.encode() + b"\0" + masked, "sha256")
