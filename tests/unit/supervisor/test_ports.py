"""Ports that are named before they are bound."""

import socket
from pathlib import Path

from antiphon.supervisor.ports import PortRange, free_port, is_free


def test_a_named_port_is_free_and_not_one_that_connections_are_given():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(50):
        port = free_port("127.0.0.1")
        assert is_free("127.0.0.1", port)
        assert not low <= port <= high


def test_a_port_with_a_server_on_it_is_not_free():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free("127.0.0.1", server.getsockname()[1])


def test_names_get_the_next_free_port_and_keep_theirs() -> None:
    first = free_port("127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        ports = PortRange("127.0.0.1", first)
        a, b = ports.allocate("a"), ports.allocate("b")
        assert first < a < b, "one is bound, and the other was given away but not bound yet"
        assert (ports.allocate("a"), ports.allocate("b")) == (a, b)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", a))
            taken.listen()
            assert ports.allocate("a") not in (first, a, b)
    assert PortRange("127.0.0.1", 0).allocate("a") == 0
