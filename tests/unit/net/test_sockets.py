"""Listening sockets of servers."""

from __future__ import annotations

import socket

from atropos.net.sockets import listen


def test_gone_clients_are_noticed() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        with listening.accept()[0] as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
