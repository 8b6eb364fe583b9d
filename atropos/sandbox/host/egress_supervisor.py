"""The server's side of the egress proxy (`programs/egress_proxy`): starts it, gives it the slots' sockets, and replaces it if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from atropos.config import ServerConfig
from atropos.errors import IsolationUnavailable
from atropos.net.egress_policy import Policy

log = logging.getLogger(__name__)

PORT = 3128
"""Where a slot finds its proxy on its own loopback; the usual port of HTTP proxies."""
_RESTART_S = 0.5


def environment() -> dict[str, str]:
    """What tells programs in a slot of the proxy. Both spellings: curl reads only the lower one of HTTP_PROXY."""
    proxy = f"http://127.0.0.1:{PORT}"
    nowhere = "localhost,127.0.0.1,::1"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {**dict.fromkeys(names, proxy), "NO_PROXY": nowhere, "no_proxy": nowhere}


@dataclass(frozen=True)
class Listener:
    """A socket that listens in a slot's network namespace, kept for a proxy that has to be started again."""

    number: int
    sock: socket.socket


class EgressSupervisor:
    """One proxy process for all slots of a server."""

    def __init__(self, config: ServerConfig, uid: int | None) -> None:
        self._config = config
        self._uid = uid
        self._numbers = itertools.count(1)
        self._listeners: dict[int, Listener] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None
        Policy.of_slots(config.egress_allow, config.egress_deny)

    def start(self) -> None:
        """Start the proxy.

        Raises:
            IsolationUnavailable: what it needs isn't installed.
        """
        try:
            import h11  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:
            raise IsolationUnavailable("allow_network: the Python package h11 is missing (python3-h11)") from None
        self._spawn()
        self._watch = asyncio.get_running_loop().create_task(self._replace(), name="egress proxy")

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = self._config
        settings = {"allow": list(config.egress_allow), "deny": list(config.egress_deny), "slots": config.slots}
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atropos.sandbox.programs.egress_proxy", str(os.getpid()), json.dumps(settings)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={"PYTHONPATH": paths, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"},
            user=self._uid,
            group=self._uid,
            extra_groups=None if self._uid is None else [],
        )
        theirs.close()
        ours.setblocking(False)
        self._sock = ours
        for listener in self._listeners.values():
            self._give(listener)

    async def _replace(self) -> None:
        while True:
            process = self._process
            assert process is not None
            code = await asyncio.to_thread(process.wait)
            log.warning("the egress proxy ended (%d); it is started again", code)
            if self._sock is not None:
                self._sock.close()
            await asyncio.sleep(_RESTART_S)
            self._spawn()

    def _give(self, listener: Listener) -> None:
        order = {
            "add": listener.number,
            "budget": self._config.egress_mib << 20,
            "connections": self._config.egress_connections,
        }
        # a proxy that is just dying gets it again from its successor's start
        with contextlib.suppress(OSError):
            if self._sock is not None:
                socket.send_fds(self._sock, [json.dumps(order).encode()], [listener.sock.fileno()])

    def add(self, sock: socket.socket) -> int:
        """Serve a slot's listening socket; returns the number to `drop` it by."""
        listener = Listener(next(self._numbers), sock)
        self._listeners[listener.number] = listener
        self._give(listener)
        return listener.number

    def drop(self, number: int) -> None:
        """A slot has ended: its connections are cut."""
        listener = self._listeners.pop(number, None)
        if listener is None:
            return
        listener.sock.close()
        with contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.send(json.dumps({"drop": number}).encode())

    async def aclose(self) -> None:
        """End the proxy."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for number in list(self._listeners):
            self.drop(number)
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
