"""Bind TCP ports, with one-line errors."""

from __future__ import annotations

import os
import socket


class CannotStart(Exception):
    """An operating condition that prevents startup; the message is one line for an operator."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0: any free port. Raises `CannotStart`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotStart(f"{host}: {error.strerror or error}") from error
    try:
        # Reuses a port in TIME_WAIT after a restart, but not one with a listener.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise CannotStart(f"port {host}:{port}: {os.strerror(error.errno or 0)}") from error
    listening.setblocking(False)  # noqa: FBT003
    return listening


def address_for_others(listening: socket.socket, host: str, advertise_host: str) -> str:
    """Return the `host:port` at which other machines reach a listening socket.

    The host is `advertise_host`, else the bound host. If that means all addresses, it is this
    machine's name, which other containers on the same network can resolve.
    """
    everywhere = host in {"0.0.0.0", "::"}  # noqa: S104  # compared, not bound
    name = advertise_host or (socket.gethostname() if everywhere else host)
    return f"{name}:{listening.getsockname()[1]}"


_BACKLOG = 1024
