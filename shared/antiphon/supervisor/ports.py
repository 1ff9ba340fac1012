"""Check and choose ports before processes are started on them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FIRST = 32_768
"""Linux's default, if the file cannot be read."""
_TRIES = 100
_RANGE = 1000
"""Number of ports to try, starting from the first one."""
_LAST = 65_535


def is_free(host: str, port: int) -> bool:
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class PortRange:
    """Assigns free ports to names, in ascending order from a first one.

    A process binds its port some time after its start, so a port assigned to another name counts as
    taken even if it is still free.
    """

    def __init__(self, host: str, first: int) -> None:
        self._host = host
        self._first = first
        self._allocated: dict[str, int] = {}

    def allocate(self, name: str) -> int:
        """A port for a name: its previous one if that is free; 0: any. OSError: none is free."""
        if not self._first:
            return 0
        taken = {port for other, port in self._allocated.items() if other != name}
        previous = [self._allocated[name]] if name in self._allocated else []
        for port in (*previous, *range(self._first, min(self._first + _RANGE, _LAST + 1))):
            if port not in taken and is_free(self._host, port):
                self._allocated[name] = port
                return port
        raise OSError(f"no free port from {self._first} to {self._first + _RANGE - 1}")


def free_port(host: str) -> int:
    """Return a free port that is unlikely to be taken before it is bound.

    A port chosen by the kernel would be from the ephemeral range, which outgoing connections and
    servers on port 0 use as well, and our services open a dozen of each while they start.
    """
    below = range(_FIRST, max(_ephemeral_first(), _FIRST + 1))
    for port in random.sample(below, min(_TRIES, len(below))):
        if is_free(host, port):
            return port
    with _socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _ephemeral_first() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_FIRST
