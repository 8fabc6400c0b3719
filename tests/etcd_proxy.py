"""A TCP proxy before etcd that loses replies and cuts connections when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class CuttingProxy:
    """Forwards ``endpoint`` (host:port) until told otherwise. ``with CuttingProxy(e) as p``."""

    def __init__(
        self, endpoint: str, listen: str = "127.0.0.1", *, handshake_s: float = 0.0
    ) -> None:
        host, port = endpoint.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((listen, 0))
        self.endpoint = f"{listen}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._handshake_s = handshake_s  # the first bytes of a connection arrive so much later
        self._mute = False  # drop what the server says
        self._closed_door = False  # cut whoever connects

    def lose_replies(self) -> None:
        """From now on requests arrive at etcd and its replies are lost."""
        self._mute = True

    def cut(self) -> None:
        """Cut all connections, and whoever connects, until :meth:`restore`."""
        with self._lock:
            self._closed_door = True
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _shut(pair)

    def restore(self) -> None:
        """Forward again; connections that lost replies are cut."""
        self.cut()
        with self._lock:
            self._mute = self._closed_door = False

    def __enter__(self) -> CuttingProxy:
        self._spawn(self._accept)
        return self

    def __exit__(self, *unused: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _spawn(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                open_door = not self._closed_door
                if open_door:
                    self._pairs.append((client, server))
            if not open_door:
                _shut((client, server))
                client.close()
                server.close()
                continue
            self._spawn(self._forward, client, server, False)
            self._spawn(self._forward, server, client, True)

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        if is_reply:
            time.sleep(self._handshake_s)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (is_reply and self._mute):
                    sink.sendall(data)
        _shut((source, sink))


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
