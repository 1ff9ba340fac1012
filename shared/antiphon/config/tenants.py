"""The keys file: tenants, the hashes of their keys, and their limits.

    [tenants.acme]
    keys = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    requests_per_minute = 600
    tokens_per_minute = 100_000

A key is stored as its SHA-256 in hexadecimal, so that the file does not disclose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.config.schema import FrozenMeta

BYTES_MAX = 1024 * 1024

TenantName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
"""Its name in subjects, logs and metrics."""
KeyHash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=1, le=2**53)]
Rank = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

_DEFAULT_TENANT = "default"
"""The tenant of requests that need no key of the file, so it needs no key there."""


class TenantConfig(msgspec.Struct, metaclass=FrozenMeta, kw_only=True, forbid_unknown_fields=True):
    """One tenant. Unset limits do not apply."""

    keys: tuple[KeyHash, ...] = ()
    """SHA-256 of each of its keys."""
    requests_per_minute: Count | None = None
    """HTTP calls except GETs and control commands, and requests over NATS."""
    requests_burst: Count | None = None
    """How many of them may arrive at once after a pause; unset: one minute's."""
    tokens_per_minute: Count | None = None
    """Prompt and output tokens."""
    tokens_burst: Count | None = None
    """Tokens at once; also the maximum of one request."""
    concurrency: Count | None = None
    """Prompts that are answered at the same time."""
    priority: Rank = 0
    """The priority of a request without one."""
    priority_max: Rank | None = None
    """The highest priority that a request may set."""
    models: tuple[str, ...] | None = None
    """Served names that it may use; unset: all."""

    def __post_init__(self) -> None:
        if self.requests_burst is not None and self.requests_per_minute is None:
            raise ValueError("requests_burst requires requests_per_minute")
        if self.tokens_burst is not None and self.tokens_per_minute is None:
            raise ValueError("tokens_burst requires tokens_per_minute")
        if self.priority_max is not None and self.priority > self.priority_max:
            raise ValueError("priority must not exceed priority_max")


class Tenants(msgspec.Struct, metaclass=FrozenMeta, forbid_unknown_fields=True):
    tenants: Mapping[TenantName, TenantConfig] = {}

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            if not tenant.keys and name != _DEFAULT_TENANT:
                raise ValueError(f"tenant {name} has no key; add one to keys")
            for key in tenant.keys:
                if (other := owners.setdefault(key, name)) != name:
                    raise ValueError(f"tenants {other} and {name} have the same key")


def keys_file_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"access.keys_file: {path}: {error.strerror}") from error
    if len(data) > BYTES_MAX:
        raise ConfigError(f"access.keys_file: {path}: larger than {BYTES_MAX} bytes")
    return data


def tenants_of(data: bytes, path: Path) -> Tenants:
    kind = path.suffix.removeprefix(".")
    if kind not in _KINDS:
        raise ConfigError(f"access.keys_file: {path}: must end in .toml or .json")
    try:
        return _KINDS[kind](data)
    except msgspec.ValidationError as error:
        raise ConfigError(f"access.keys_file: {path}: {error}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"access.keys_file: {path}: not valid {kind.upper()}: {error}") from error


def read_tenants(file: str) -> Tenants:
    """Read a keys file; an empty name means no tenants."""
    if not file:
        return Tenants()
    path = Path(file).expanduser()
    return tenants_of(keys_file_bytes(path), path)


_KINDS = {
    "json": partial(msgspec.json.decode, type=Tenants),
    "toml": partial(msgspec.toml.decode, type=Tenants),
}
