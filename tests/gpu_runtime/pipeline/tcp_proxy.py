"""A link that can be cut and stalled: forwards TCP connections to one port."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Listens on `address`. While `refusing`, new connections are reset; while stalled, nothing is forwarded."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.refusing = False
        self.num_connections = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, refusing: bool = False) -> None:
        """Reset every connection, and new ones as well when `refusing`."""
        self.refusing = refusing
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.cut(refusing=True)
        self.flow()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                if self.refusing:
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    near.close()
                    continue
                far = socket.create_connection(self._target)
            except OSError:
                continue
            self.num_connections += 1
            with self._lock:
                self._sockets |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
