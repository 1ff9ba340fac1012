"""Taking a port, or saying in one line why not."""

from __future__ import annotations

import os
import socket


class CannotStart(Exception):
    """An operating condition that keeps a process from starting: one line, for an operator."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 takes any.

    Raises:
        CannotStart: Names the address and what is wrong with it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotStart(f"{host}: {error.strerror or error}") from error
    try:
        # A port that only lingers after our last life is free; one that is listened to is not.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise CannotStart(f"port {host}:{port}: {os.strerror(error.errno or 0)}") from error
    listening.setblocking(False)  # noqa: FBT003
    return listening


def address_for_others(listening: socket.socket, host: str, advertise_host: str) -> str:
    """Say where other machines reach a listening socket, as `host:port`.

    Unless told by `advertise_host`, they use the host that is listened on; where that means all
    addresses, this machine's name: a container's is known to the others on its network.
    """
    everywhere = host in {"0.0.0.0", "::"}  # noqa: S104  # compared, not bound
    name = advertise_host or (socket.gethostname() if everywhere else host)
    return f"{name}:{listening.getsockname()[1]}"


_BACKLOG = 1024
