"""The rules of the door, for HTTP and NATS alike: who calls, what they may do, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.tenants import TenantConfig
from antiphon.gateway.access.keys import AccessLevel, Caller, Keyring, digest_of
from antiphon.gateway.access.limits import Limit, LimitReached, QuotaReservation, Tenant
from antiphon.wire.digests import tenant_salt
from antiphon.wire.errors import Forbidden, InvalidRequest, RateLimited, Unauthorized
from antiphon.wire.ids import DEFAULT_TENANT, TenantId

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.access import AccessConfig
    from antiphon.config.tenants import Tenants
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.ids import ModelName

ANONYMOUS = Caller(DEFAULT_TENANT, AccessLevel.OPERATOR)
"""Who calls where no key is asked for."""
PROBE_CALLER = Caller(TenantId("$probe"), AccessLevel.TENANT)
"""Who asks how the server is. It has no limits, or a busy tenant would make the server look ill."""

_UNITS = {
    Limit.REQUESTS: "requests a minute",
    Limit.TOKENS: "tokens a minute",
    Limit.CONCURRENCY: "requests at the same time",
}


class Access:
    """One a gateway: what a tenant uses at another one is not known here."""

    def __init__(self, config: AccessConfig, tenants: Tenants, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self._tenants: dict[TenantId, Tenant] = {}
        self.reload(tenants)

    @property
    def guarded(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._config.api_key or self._config.keys_file)

    @property
    def admin_guarded(self) -> bool:
        """Whether a key is asked for where an operator's call is made."""
        return self.guarded or bool(self._config.admin_api_key)

    @property
    def names(self) -> tuple[TenantId, ...]:
        """The tenants that are known, in the order of the file."""
        return tuple(self._tenants)

    def reload(self, tenants: Tenants) -> None:
        """Take another file. Requests that run go on, whatever it says of their tenants."""
        found = {TenantId(name): config for name, config in tenants.tenants.items()}
        configs = {DEFAULT_TENANT: TenantConfig()} | found | {PROBE_CALLER.tenant: TenantConfig()}
        old, self._tenants = self._tenants, {}
        for name, config in configs.items():
            tenant = old.get(name)
            if tenant is None:
                tenant = Tenant(name, config, self._now())
            else:
                tenant.reload(config, self._now())
            self._tenants[name] = tenant
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
        """Return who shows a key, for a call that is an operator's if `admin`.

        Raises:
            Unauthorized: A key is needed, and this is none that is known.
            Forbidden: It is known, and not an operator's.
        """
        known = self._ring.owner(key) if key is not None else None
        closed = self.admin_guarded if admin else self.guarded
        if known is None and closed:
            text = "this key is not known" if key else "show a key: Authorization: Bearer <key>"
            raise Unauthorized(text)
        found = known or ANONYMOUS
        needed = AccessLevel.ADMIN if self._config.admin_api_key else AccessLevel.OPERATOR
        if admin and found.level < needed:
            raise Forbidden("this is an operator's: this key may not do it")
        return found

    def authenticate_tenant(self, key: str | None, tenant: TenantId) -> TenantId:
        """Return the tenant that somebody claims to be of, if the key says so.

        Raises:
            Unauthorized: A key is needed, and this is none that is known.
            Forbidden: It is another tenant's.
        """
        if not self.guarded:
            return tenant
        if self.authenticate(key).tenant != tenant:
            raise Forbidden(f"this key is not of the tenant '{tenant}'")
        return tenant

    def may_use_model(self, tenant: TenantId, model: str) -> bool:
        """Whether a tenant may use a model."""
        return self._tenant(tenant).serves(model)

    def count_request(self, tenant: TenantId) -> None:
        """Count one call.

        Raises:
            RateLimited: There were too many of late.
        """
        refused = self._tenant(tenant).count_request(self._now())
        if refused is not None:
            raise _rate_limited(refused)

    def check_concurrency(self, tenant: TenantId, prompts: int) -> None:
        """Check that so many prompts can be answered together at all.

        Raises:
            InvalidRequest: There are more than may ever be open.
        """
        most = self._tenant(tenant).config.concurrency
        if most is not None and prompts > most:
            raise InvalidRequest(
                f"{prompts} prompts are answered together; this key may have {most} at a time"
            )

    def max_concurrent(self, tenant: TenantId, most: int) -> int:
        """How many of its prompts may be under way at once, of at most so many."""
        places = self._tenant(tenant).config.concurrency
        return most if places is None else min(most, places)

    def admit(self, gen_request: GenerationRequest, model: ModelName) -> QuotaReservation:
        """Let a request begin; whoever gets a hold ends it.

        Raises:
            Forbidden: The tenant may not use the model.
            InvalidRequest: It may not name this priority.
            RateLimited: As many of its requests are open as may be.
        """
        tenant = self._tenant(gen_request.tenant)
        if not tenant.serves(model):
            raise Forbidden(f"this key may not use the model '{model}'", param="model")
        if tenant.priority(gen_request.priority) is None:
            most = tenant.config.priority_max
            text = f"priority: {gen_request.priority} is above {most}, the highest of this key"
            raise InvalidRequest(text, param="priority")
        hold = tenant.admit()
        if isinstance(hold, LimitReached):
            raise _rate_limited(hold)
        return hold

    def cache_salt(self, gen_request: GenerationRequest) -> bytes:
        """Who may share a request's cached prefixes: its tenant, unless all tenants share them.

        The tenant `default`, which holds the keys of the command line, has the cache of a server
        without keys: no other tenant finds that.
        """
        shared = self._config.share_prefix_cache or gen_request.tenant == DEFAULT_TENANT
        if shared or not self.guarded:
            return gen_request.cache_salt
        return tenant_salt(gen_request.tenant, gen_request.cache_salt)

    def reserve(
        self,
        hold: QuotaReservation,
        gen_request: GenerationRequest,
        *,
        prompt_tokens: int,
        tokens_max: int,
    ) -> int:
        """Charge all that a request may need; return how many tokens each answer may have.

        That is less than `tokens_max` where the client named no number, and a full bucket would
        not hold so many.

        Raises:
            InvalidRequest: More than a full bucket holds is asked for.
            RateLimited: More than it holds now.
        """
        room = hold.tenant.output_tokens_max(prompt_tokens, gen_request.choices)
        if room is not None and room < tokens_max:
            least = max(1, gen_request.sampling.tokens_min)
            if gen_request.tokens_max is not None or room < least:
                raise _over_token_limit(
                    hold, gen_request, prompt_tokens, gen_request.tokens_max or least
                )
            tokens_max = room
        refused = hold.reserve(prompt_tokens + gen_request.choices * tokens_max, self._now())
        if refused is not None:
            raise _rate_limited(refused)
        return tokens_max

    def _tenant(self, name: TenantId) -> Tenant:
        """Find a tenant. Where no key is asked for, one that nobody has named has no limits."""
        tenant = self._tenants.get(name)
        if tenant is None and self.guarded:
            raise Unauthorized("this key is not known any more")
        return tenant or Tenant(name, TenantConfig(), self._now())


def _rate_limited(refused: LimitReached) -> RateLimited:
    return RateLimited(
        f"the limit of this key is reached: {refused.most} {_UNITS[refused.limit]}",
        retry_after_s=refused.after_s,
        details={"limit": str(refused.limit)},
    )


def _over_token_limit(
    hold: QuotaReservation, gen_request: GenerationRequest, prompt_tokens: int, tokens: int
) -> InvalidRequest:
    burst = hold.tenant.tokens.burst if hold.tenant.tokens is not None else 0
    return InvalidRequest(
        f"the prompt has {prompt_tokens} tokens, and {gen_request.choices} x {tokens} may be "
        f"answered; this key may use {burst:.0f} at once",
        param=gen_request.tokens_field if gen_request.tokens_max is not None else None,
    )
