"""A way to a server whose end is not passed on: a client that would take it for fatal hears nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from widemesh.sharding.ticket.addresses import split_address

_HERE = "127.0.0.1"
_RETRY_S = 0.05


class Relay:
    """Listens on this machine and passes connections on to a server, on daemon threads, until `close`.

    When the client hangs up, so does the relay. When the server does, or is lost, the client's connection stays open
    and silent. `timeout_s`: how long a server is tried that is not there yet.
    """

    def __init__(self, server: str, timeout_s: float):
        self._server, self._timeout_s = split_address(server), timeout_s
        self._listener = socket.create_server((_HERE, 0))
        self.address = f"{_HERE}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets = [self._listener]
        self._is_closed = False
        self._start(self._listen)

    def close(self) -> None:
        """Hang up on everybody."""
        with self._lock:
            self._is_closed = True
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            _hang_up(sock)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        far = self._dial()
        if far is None or not self._keep(near, far):
            near.close()
            return
        self._start(_pass_on, far, near)
        _pass_on(near, far)
        _hang_up(far)

    def _dial(self) -> socket.socket | None:
        until_s = time.monotonic() + self._timeout_s
        while not self._is_closed and (left_s := until_s - time.monotonic()) > 0:
            try:
                far = socket.create_connection(self._server, left_s)
            except OSError:
                time.sleep(_RETRY_S)
            else:
                far.settimeout(None)
                return far
        return None

    def _keep(self, *sockets: socket.socket) -> bool:
        """False if the relay has been closed meanwhile."""
        with self._lock:
            self._sockets += sockets
            is_closed = self._is_closed
        if is_closed:
            self.close()
        return not is_closed

    def _start(self, function: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(target=function, args=args, name="relay", daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


def _hang_up(sock: socket.socket) -> None:
    """Also where another thread waits in it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
