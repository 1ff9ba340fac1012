"""The rules of the door, for HTTP and NATS alike: who calls, what they may do, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.tenants import TenantConfig
from antiphon.gateway.access.keys import Caller, Keyring, Rank, digest_of
from antiphon.gateway.access.tenant import Hold, Limit, Refused, Tenant
from antiphon.wire.digests import tenant_salt
from antiphon.wire.errors import Forbidden, InvalidRequest, RateLimited, Unauthorized
from antiphon.wire.ids import DEFAULT_TENANT, TenantId

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.access import AccessConfig
    from antiphon.config.tenants import Tenants
    from antiphon.gateway.ask import Ask
    from antiphon.wire.ids import ModelName

ANYBODY = Caller(DEFAULT_TENANT, Rank.OPERATOR)
"""Who calls where no key is asked for."""
PROBE = Caller(TenantId("$probe"), Rank.TENANT)
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
        self.renew(tenants)

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

    def renew(self, tenants: Tenants) -> None:
        """Take another file. Requests that run go on, whatever it says of their tenants."""
        found = {TenantId(name): config for name, config in tenants.tenants.items()}
        configs = {DEFAULT_TENANT: TenantConfig()} | found | {PROBE.tenant: TenantConfig()}
        old, self._tenants = self._tenants, {}
        for name, config in configs.items():
            tenant = old.get(name)
            if tenant is None:
                tenant = Tenant(name, config, self._now())
            else:
                tenant.renew(config, self._now())
            self._tenants[name] = tenant
        owners = {
            bytes.fromhex(key): Caller(name, Rank.TENANT)
            for name, config in found.items()
            for key in config.keys
        }
        for key, rank in (
            (self._config.api_key, Rank.OPERATOR),
            (self._config.admin_api_key, Rank.ADMIN),
        ):
            if key:
                owners[digest_of(key)] = Caller(DEFAULT_TENANT, rank)
        self._ring = Keyring(owners)

    def caller(self, key: str | None, *, admin: bool = False) -> Caller:
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
        found = known or ANYBODY
        needed = Rank.ADMIN if self._config.admin_api_key else Rank.OPERATOR
        if admin and found.rank < needed:
            raise Forbidden("this is an operator's: this key may not do it")
        return found

    def member(self, key: str | None, tenant: TenantId) -> TenantId:
        """Return the tenant that somebody claims to be of, if the key says so.

        Raises:
            Unauthorized: A key is needed, and this is none that is known.
            Forbidden: It is another tenant's.
        """
        if not self.guarded:
            return tenant
        if self.caller(key).tenant != tenant:
            raise Forbidden(f"this key is not of the tenant '{tenant}'")
        return tenant

    def serves(self, tenant: TenantId, model: str) -> bool:
        """Whether a tenant may use a model."""
        return self._tenant(tenant).serves(model)

    def knock(self, tenant: TenantId) -> None:
        """Count one call.

        Raises:
            RateLimited: There were too many of late.
        """
        refused = self._tenant(tenant).knock(self._now())
        if refused is not None:
            raise _limited(refused)

    def fits(self, tenant: TenantId, prompts: int) -> None:
        """Check that so many prompts can be answered together at all.

        Raises:
            InvalidRequest: There are more than may ever be open.
        """
        most = self._tenant(tenant).config.concurrency
        if most is not None and prompts > most:
            raise InvalidRequest(
                f"{prompts} prompts are answered together; this key may have {most} at a time"
            )

    def together(self, tenant: TenantId, most: int) -> int:
        """How many of its prompts may be under way at once, of at most so many."""
        places = self._tenant(tenant).config.concurrency
        return most if places is None else min(most, places)

    def begin(self, ask: Ask, model: ModelName) -> Hold:
        """Let a request begin; whoever gets a hold ends it.

        Raises:
            Forbidden: The tenant may not use the model.
            InvalidRequest: It may not name this priority.
            RateLimited: As many of its requests are open as may be.
        """
        tenant = self._tenant(ask.tenant)
        if not tenant.serves(model):
            raise Forbidden(f"this key may not use the model '{model}'", param="model")
        if tenant.priority(ask.priority) is None:
            most = tenant.config.priority_max
            text = f"priority: {ask.priority} is above {most}, the highest of this key"
            raise InvalidRequest(text, param="priority")
        hold = tenant.begin()
        if isinstance(hold, Refused):
            raise _limited(hold)
        return hold

    def cache_salt(self, ask: Ask) -> bytes:
        """Who may share a request's cached prefixes: its tenant, unless all tenants share them.

        The tenant `default`, which holds the keys of the command line, has the cache of a server
        without keys: no other tenant finds that.
        """
        shared = self._config.share_prefix_cache or ask.tenant == DEFAULT_TENANT
        if shared or not self.guarded:
            return ask.cache_salt
        return tenant_salt(ask.tenant, ask.cache_salt)

    def reserve(self, hold: Hold, ask: Ask, *, prompt_tokens: int, tokens_max: int) -> int:
        """Charge all that a request may need; return how many tokens each answer may have.

        That is less than `tokens_max` where the client named no number, and a full bucket would
        not hold so many.

        Raises:
            InvalidRequest: More than a full bucket holds is asked for.
            RateLimited: More than it holds now.
        """
        room = hold.tenant.answer_room(prompt_tokens, ask.choices)
        if room is not None and room < tokens_max:
            least = max(1, ask.sampling.tokens_min)
            if ask.tokens_max is not None or room < least:
                raise _too_much(hold, ask, prompt_tokens, ask.tokens_max or least)
            tokens_max = room
        refused = hold.reserve(prompt_tokens + ask.choices * tokens_max, self._now())
        if refused is not None:
            raise _limited(refused)
        return tokens_max

    def _tenant(self, name: TenantId) -> Tenant:
        """Find a tenant. Where no key is asked for, one that nobody has named has no limits."""
        tenant = self._tenants.get(name)
        if tenant is None and self.guarded:
            raise Unauthorized("this key is not known any more")
        return tenant or Tenant(name, TenantConfig(), self._now())


def _limited(refused: Refused) -> RateLimited:
    return RateLimited(
        f"the limit of this key is reached: {refused.most} {_UNITS[refused.limit]}",
        retry_after_s=refused.after_s,
        details={"limit": str(refused.limit)},
    )


def _too_much(hold: Hold, ask: Ask, prompt_tokens: int, tokens: int) -> InvalidRequest:
    burst = hold.tenant.tokens.burst if hold.tenant.tokens is not None else 0
    return InvalidRequest(
        f"the prompt has {prompt_tokens} tokens, and {ask.choices} x {tokens} may be answered; "
        f"this key may use {burst:.0f} at once",
        param=ask.tokens_field if ask.tokens_max is not None else None,
    )
