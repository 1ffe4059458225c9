"""Addresses of processes: HOST:PORT, and ports that are free."""

from __future__ import annotations

import socket

from widemesh.sharding.ticket.errors import TicketError


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of an IPv6 one, and port. Raises TicketError for anything else."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise TicketError(f"address={address!r} must be host:port; use for example 10.0.0.1:8476")
    return host, int(port)


def family_of(host: str) -> socket.AddressFamily:
    """IPv4 or IPv6, by the look of an address or by what a name resolves to."""
    return socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
