"""Number of processes per service, and their shares of the machine's cores and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.wire.base import Role
from antiphon.wire.ids import InstanceId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.config.settings import Settings
    from antiphon.resolve.device import HostDevice

_FLAGS = {
    "workers": "--dp-size",
    "tokenizers": "--tokenizer-worker-num",
    "detokenizers": "--detokenizer-worker-num",
}


def instances(settings: Settings, role: Role) -> Sequence[InstanceId]:
    """Return the names of a service's processes."""
    return tuple(InstanceId(f"{role}-{number}") for number in range(_count(settings, role)))


def check_counts(settings: Settings, device: HostDevice) -> None:
    """Check that the resources suffice for the numbers of processes.

    Raises:
        ConfigError: There are more processes than cores or running requests; has both numbers.
    """
    supervisor, running_max = settings.supervisor, settings.batching.running_max
    for name, flag in _FLAGS.items():
        count = getattr(supervisor, name)
        if count > device.cores:
            raise ConfigError(
                f"supervisor.{name} = {count} ({flag}): must be at most {device.cores}, "
                "the number of cores"
            )
    if supervisor.workers > running_max:
        raise ConfigError(
            f"batching.running_max = {running_max} (--max-running-requests): must be at least "
            f"supervisor.workers = {supervisor.workers} (--dp-size), since workers share it"
        )


def share(settings: Settings, role: Role, device: HostDevice) -> Mapping[str, str]:
    """Return the environment variables of a process's share, if its service has several processes.

    Memory is that of `device`, measured before any process was started: a restarted process finds
    less free memory but may use as much as before.
    """
    count = _count(settings, role)
    if count == 1:
        return {}
    values: dict[str, int] = {}
    if role is Role.WORKER:
        model = settings.model
        values = {
            "model.cores": model.cores or device.cores // count,
            "model.memory_bytes": model.memory_bytes or device.memory_bytes // count,
            "cache.bytes_max": max(settings.cache.bytes_max // count, 1),
            "batching.running_max": settings.batching.running_max // count,
        }
    elif role is Role.TOKENIZER:
        values = {"tokenizer.threads": min(settings.tokenizer.threads, device.cores // count)}
    return {fields()[path].variable: str(value) for path, value in values.items()}


def _count(settings: Settings, role: Role) -> int:
    supervisor = settings.supervisor
    match role:
        case Role.WORKER:
            return supervisor.workers
        case Role.TOKENIZER:
            return supervisor.tokenizers
        case Role.DETOKENIZER:
            return supervisor.detokenizers
        case _:
            return 1
