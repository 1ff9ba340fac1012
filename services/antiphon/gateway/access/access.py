"""Access rules for HTTP and NATS: who calls, what is permitted, and how much."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.tenants import TenantConfig, Tenants, keys_file_bytes, tenants_of
from antiphon.gateway.access.limits import QuotaReservation, Tenant
from antiphon.wire.errors import Forbidden, InvalidRequest, Unauthorized
from antiphon.wire.ids import DEFAULT_TENANT, ModelName, TenantId
from antiphon.wire.namespaces import tenant_salt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from antiphon.config.gateway import AccessConfig
    from antiphon.gateway.request_metrics import GatewayMetrics
    from antiphon.gateway.requests.generation_request import GenerationRequest

log = logging.getLogger(__name__)


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


POLL_S = 1.0  # the whole file is compared: timestamps of files are too coarse
ANONYMOUS = Caller(DEFAULT_TENANT, AccessLevel.OPERATOR)  # the caller if no key is required
PROBE_CALLER = Caller(TenantId("$probe"), AccessLevel.TENANT)
"""The caller of health checks. It has no limits, so that a busy tenant cannot fail them."""


class Access:
    """One per gateway; usage at other gateways is not known here."""

    def __init__(self, config: AccessConfig, tenants: Tenants, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self._tenants: dict[TenantId, Tenant] = {}
        self.reload(tenants)

    @property
    def guarded(self) -> bool:
        return bool(self._config.api_key or self._config.keys_file)

    @property
    def admin_guarded(self) -> bool:
        return self.guarded or bool(self._config.admin_api_key)

    @property
    def names(self) -> tuple[TenantId, ...]:
        return tuple(self._tenants)

    def reload(self, tenants: Tenants) -> None:
        """Apply a new keys file. Running requests continue, whatever it contains."""
        found = {TenantId(name): config for name, config in tenants.tenants.items()}
        configs = {DEFAULT_TENANT: TenantConfig()} | found | {PROBE_CALLER.tenant: TenantConfig()}
        old, self._tenants = self._tenants, {}
        for name, config in configs.items():
            tenant = self._tenants[name] = old.get(name) or Tenant(config, self._now())
            tenant.reload(config, self._now())
        owners = {
            bytes.fromhex(key): Caller(name, AccessLevel.TENANT)
            for name, config in found.items()
            for key in config.keys
        }
        for key, rank in (
            (self._config.api_key, AccessLevel.OPERATOR),
            (self._config.admin_api_key, AccessLevel.ADMIN),
        ):
            if key:
                owners[digest_of(key)] = Caller(DEFAULT_TENANT, rank)
        self._ring = Keyring(owners)

    def authenticate(self, key: str | None, *, admin: bool = False) -> Caller:
        """Return the caller of a key; `admin` for operator calls."""
        known = self._ring.owner(key) if key is not None else None
        closed = self.admin_guarded if admin else self.guarded
        if known is None and closed:
            text = (
                "the API key is not valid"
                if key
                else "an API key is required; send Authorization: Bearer <key>"
            )
            raise Unauthorized(text)
        found = known or ANONYMOUS
        needed = AccessLevel.ADMIN if self._config.admin_api_key else AccessLevel.OPERATOR
        if admin and found.level < needed:
            raise Forbidden("this operation requires an operator's key")
        return found

    def authenticate_tenant(self, key: str | None, tenant: TenantId) -> TenantId:
        if not self.guarded:
            return tenant
        if self.authenticate(key).tenant != tenant:
            raise Forbidden(f"this key does not belong to the tenant '{tenant}'")
        return tenant

    def may_use_model(self, tenant: TenantId, model: str) -> bool:
        return self._tenant(tenant).serves(model)

    def count_request(self, tenant: TenantId) -> None:
        self._tenant(tenant).count_request(self._now())

    def check_concurrency(self, tenant: TenantId, prompts: int) -> None:
        most = self._tenant(tenant).config.concurrency
        if most is not None and prompts > most:
            raise InvalidRequest(
                f"{prompts} prompts run concurrently; the limit of this key is {most}"
            )

    def max_concurrent(self, tenant: TenantId, most: int) -> int:
        slots = self._tenant(tenant).config.concurrency
        return most if slots is None else min(most, slots)

    def admit(self, gen_request: GenerationRequest, model: ModelName) -> QuotaReservation:
        """Admit a request; the caller must end the returned reservation."""
        tenant = self._tenant(gen_request.tenant)
        if not tenant.serves(model):
            raise Forbidden(f"this key has no access to the model '{model}'", param="model")
        if tenant.priority(gen_request.priority) is None:
            most = tenant.config.priority_max
            text = f"priority: {gen_request.priority} exceeds {most}, the maximum of this key"
            raise InvalidRequest(text, param="priority")
        return tenant.admit()

    def cache_salt(self, gen_request: GenerationRequest) -> bytes:
        """Scope of prefix cache sharing: the tenant, unless all tenants share.

        The tenant `default`, which has the keys of the command line, shares the cache of a server
        without keys; no other tenant does.
        """
        shared = self._config.share_prefix_cache or gen_request.tenant == DEFAULT_TENANT
        if shared or not self.guarded:
            return gen_request.cache_salt
        return tenant_salt(gen_request.tenant, gen_request.cache_salt)

    def reserve(
        self,
        reservation: QuotaReservation,
        gen_request: GenerationRequest,
        *,
        prompt_tokens: int,
        tokens_max: int,
    ) -> int:
        """Charge the maximum cost of a request; return the output token limit of each choice.

        The limit is below `tokens_max` if the client set none and a full bucket would not allow it.
        """
        allowed = reservation.tenant.output_tokens_max(prompt_tokens, gen_request.choices)
        if allowed is not None and allowed < tokens_max:
            least = max(1, gen_request.sampling.min_tokens)
            if gen_request.tokens_max is not None or allowed < least:
                raise _over_token_limit(
                    reservation, gen_request, prompt_tokens, gen_request.tokens_max or least
                )
            tokens_max = allowed
        reservation.reserve(prompt_tokens + gen_request.choices * tokens_max, self._now())
        return tokens_max

    async def follow(self, keys: KeysFile, metrics: GatewayMetrics) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            news = await asyncio.to_thread(keys.reload_if_changed)
            if isinstance(news, Tenants):
                self.reload(news)
                metrics.tenants.add(self.names)
                metrics.keys_read.labels("read").inc()
                log.info("keys file reloaded", extra={"tenants": len(news.tenants)})
            elif news is not None:
                metrics.keys_read.labels("refused").inc()
                log.error("keys file not reloaded", extra={"reason": str(news)})

    def _tenant(self, name: TenantId) -> Tenant:
        """Return a tenant. If no key is required, an unknown tenant has no limits."""
        tenant = self._tenants.get(name)
        if tenant is None and self.guarded:
            raise Unauthorized("the API key is no longer valid")
        return tenant or Tenant(TenantConfig(), self._now())


def _over_token_limit(
    reservation: QuotaReservation, gen_request: GenerationRequest, prompt_tokens: int, tokens: int
) -> InvalidRequest:
    burst = reservation.tenant.tokens.burst if reservation.tenant.tokens is not None else 0
    return InvalidRequest(
        f"the prompt has {prompt_tokens} tokens, and {gen_request.choices} x {tokens} "
        f"tokens may be generated; the limit of this key is {burst:.0f} tokens at once",
        param=gen_request.field("max_tokens") if gen_request.tokens_max is not None else None,
    )
