"""Listening sockets."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from atropos.errors import ConfigError

BACKLOG = 1024
"""Connections that wait in the kernel to be accepted."""
LOOPBACK = ("127.0.0.0/8", "::1/128")
"""Networks of this machine alone."""


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is reached from this machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int, *, setting: str = "host, port") -> socket.socket:
    """A listening socket.

    Args:
        host: a name or address of this machine.
        port: 0: any free one.
        setting: what the error names.

    Raises:
        ConfigError: in one line, why not.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, number)
        try:
            # A restarted server gets its port while connections of the last one are in TIME_WAIT (socket(7)).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # its connections have it too: one whose client's machine is gone ends, also where nothing is sent to it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "it is in use; set another port, or 0 for any free one"
        raise ConfigError(f"{setting}: can't listen on {host}:{port}: {why}") from None
    sock.setblocking(False)
    return sock
