"""The relay passes on all but the end of the server's side."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from widemesh.sharding.relay import Relay
from widemesh.sharding.ticket.addresses import free_port

WAIT_S = 10.0


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def relay(port: int) -> Iterator[Relay]:
    with contextlib.closing(Relay(f"127.0.0.1:{port}", timeout_s=WAIT_S)) as relay:
        yield relay


def meet(relay: Relay, port: int) -> tuple[socket.socket, socket.socket]:
    """Client and server of one connection; the server listens only after the client has connected."""
    host, _, near = relay.address.rpartition(":")
    client = socket.create_connection((host, int(near)), WAIT_S)
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(WAIT_S)
        server, _ = listener.accept()
    server.settimeout(WAIT_S)
    return client, server


def receive(sock: socket.socket, count: int) -> bytes:
    with sock.makefile("rb") as file:
        return file.read(count)


def test_bytes_go_both_ways(relay: Relay, port: int) -> None:
    client, server = meet(relay, port)
    with client, server:
        client.sendall(b"question")
        assert receive(server, 8) == b"question"
        server.sendall(b"answer" * 50_000)
        assert receive(client, 300_000) == b"answer" * 50_000


def test_a_lost_server_is_only_silent(relay: Relay, port: int) -> None:
    client, server = meet(relay, port)
    with client:
        server.close()
        client.settimeout(0.3)
        for _ in range(2):
            client.sendall(b"are you there?")
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_a_client_that_hangs_up_is_gone_for_the_server(relay: Relay, port: int) -> None:
    client, server = meet(relay, port)
    with server:
        client.sendall(b"bye")
        client.close()
        assert receive(server, 100) == b"bye"


def test_a_closed_relay_hangs_up_on_both(relay: Relay, port: int) -> None:
    client, server = meet(relay, port)
    with client, server:
        client.sendall(b"1")
        assert receive(server, 1) == b"1"
        relay.close()
        assert client.recv(1) == b"" and server.recv(1) == b""
