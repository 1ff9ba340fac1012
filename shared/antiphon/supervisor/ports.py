"""Ports, looked at before anything is started on them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FIRST = 32_768
"""Linux's default, where it cannot be read."""
_TRIES = 100


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """Name a port that nobody has now, and that nobody gets by chance before it is bound.

    The kernel's own choice would come from the range that it gives to every outgoing connection
    and to every server on port 0, and our services open a dozen of each while they start.
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
