"""The server's side of `programs/egress_proxy`: starts it, passes it slots' sockets, and replaces it if it dies."""

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
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from atropos.aio import Tasks
from atropos.config import ServerConfig
from atropos.errors import IsolationUnavailable, NotSupported, SandboxError
from atropos.net.egress_policy import Narrowed, Policy
from atropos.sandbox.programs import gateway
from atropos.wire import EgressSecret

log = logging.getLogger(__name__)

PORT = 3128
"""Where a slot finds its proxy on its own loopback; the usual port of HTTP proxies."""
_RESTART_S = 0.5
_KEY = "-----BEGIN PRIVATE KEY"
"""Where the certificate of an authority ends and its key begins."""
_ANSWER_BYTES = 1 << 16
CONFIRM_S = 10.0
"""Longest that the proxy may take to confirm a change, its restart included, in seconds."""


def environment() -> dict[str, str]:
    """Variables that point programs to the proxy, in upper and lower case: curl reads only `http_proxy`."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {**dict.fromkeys(names, f"http://127.0.0.1:{PORT}"), **direct()}


def direct(hosts: Iterable[str] = ()) -> dict[str, str]:
    """Variables by which programs ask the proxy neither for their own machine nor for these hosts."""
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(("localhost", "127.0.0.1", "::1", *hosts)))


def _trusted() -> dict[str, str]:
    """The variable by which hosts are known to the proxy that ends TLS for them, where this process has it."""
    return {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}


@dataclass
class Listener:
    """The sockets that listen in a slot's network namespace and its gateway, kept for a restart of the proxy.

    Attributes:
        hosts: the allowed hosts that the slot may reach; None: all of them.
        secrets: of the slot's hosts, as `HostSecret.of` has them.
        authority: certificate and key (PEM) by which the slot knows the hosts whose TLS is ended for them.
        unconfirmed: the latest change, until the proxy has confirmed it.
    """

    number: int
    socks: list[socket.socket]
    hosts: tuple[str, ...] | None = None
    secrets: Sequence[dict[str, object]] = ()
    authority: str | None = None
    unconfirmed: int | None = None


class EgressSupervisor:
    """One proxy process for all slots of a server."""

    def __init__(self, config: ServerConfig, uid: int | None) -> None:
        self._config = config
        self._uid = uid
        self._numbers = itertools.count(1)
        self._listeners: dict[int, Listener] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._orders: deque[tuple[bytes, Listener | None]] = deque()
        """What the proxy is still to be sent, each perhaps with sockets."""
        self._tasks = Tasks("egress proxy")
        self._serials = itertools.count(1)
        self._unconfirmed: dict[int, asyncio.Future[dict[str, object]]] = {}
        """Of changes, by their serial, until the proxy has confirmed them."""
        self._counting: dict[int, asyncio.Future[int]] = {}
        """Of dropped listeners, until the proxy has said what they moved."""
        self._policy = Policy.of_slots(config.egress_allow, config.egress_deny)

    @property
    def ports(self) -> list[int]:
        """Those that connections of slots are accepted on, at any address."""
        return [port for port in self._policy.ports if port != gateway.DNS_PORT]

    def start(self) -> None:
        """Start the proxy.

        Raises:
            IsolationUnavailable: what it needs isn't installed.
        """
        # Not imported: the server itself never parses HTTP of a slot (decision 3), and would keep the module in memory.
        if find_spec("h11") is None:
            raise IsolationUnavailable("allow_network: the Python package h11 is missing (python3-h11)")
        self._spawn()
        self._tasks.spawn(self._keep_running(), "restarts")

    def _spawn(self) -> None:
        # SEQPACKET keeps the borders of orders, and descriptors with the order that they belong to (unix(7)).
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = self._config
        settings = {"allow": list(config.egress_allow), "deny": list(config.egress_deny), "slots": config.slots}
        paths = os.pathsep.join(path for path in sys.path if path)
        program = [
            sys.executable,
            "-m",
            "atropos.sandbox.programs.egress_proxy",
            # So that it notices where this process ended before it could ask to end with it (`die_with`).
            str(os.getpid()),
            json.dumps(settings),
        ]
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                program,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                # Nothing else of the server's environment: the most attacked process shall have least to give away.
                env={"PYTHONPATH": paths, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", **_trusted()},
                user=self._uid,
                group=self._uid,
                # Without this it would keep the supplementary groups of the server.
                extra_groups=None if self._uid is None else [],
            )
            undo.pop_all()
        ours.setblocking(False)
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours, self._read_confirmation, ours)
        for listener in self._listeners.values():
            # The sockets outlived the proxy, with connections that waited in their backlog: no slot notices more than a
            # delay.
            # The sockets outlived the proxy, with the connections in their backlog: a slot notices a delay, and no
            # more.
            self._send_listener(listener)
        for future in self._unconfirmed.values():  # the new proxy started with the latest settings
            if not future.done():
                future.set_result({})

    def _read_confirmation(self, sock: socket.socket) -> None:
        """Complete the change that the proxy has applied, or the count of a slot that it has dropped."""
        try:
            data = sock.recv(_ANSWER_BYTES)
        except OSError:
            data = b""
        # It has ended. `_keep_running` waits for the process itself, and replaces it.
        if not data:
            asyncio.get_running_loop().remove_reader(sock)
            return
        message = json.loads(data)
        if "dropped" in message:
            self._counted(message["dropped"], message["moved"])
            return
        future = self._unconfirmed.get(message["done"])
        if future is not None and not future.done():
            future.set_result(message)

    def _counted(self, number: int, moved: int) -> None:
        future = self._counting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(moved)

    async def _keep_running(self) -> None:
        while True:
            process = self._process
            assert process is not None
            code = await asyncio.to_thread(process.wait)
            log.warning("the egress proxy ended (%d); it is restarted", code)
            self._close()
            # Every attempt, not only the first, is paused: a proxy that fails at once must not take a CPU.
            while self._sock is None:
                await asyncio.sleep(_RESTART_S)
                try:
                    self._spawn()
                except OSError as error:  # for example, the host is out of processes
                    log.warning("the egress proxy can't be started, and is tried again: %s", error)

    def _send_listener(self, listener: Listener) -> None:
        order: dict[str, object] = {
            "add": listener.number,
            "budget": self._config.egress_mib << 20,
            "connections": self._config.egress_connections,
            "hosts": listener.hosts,
            "secrets": listener.secrets,
            "authority": listener.authority,
        }
        self._send(order, listener)

    def _send(self, order: dict[str, object], listener: Listener | None = None) -> None:
        """Send an order after those before it, as soon as the proxy takes it; a new proxy gets all listeners anew."""
        # Between two proxies; `_spawn` sends what holds then.
        if self._sock is None:
            return
        self._orders.append((json.dumps(order).encode(), listener))
        if len(self._orders) == 1:
            self._flush()

    def _flush(self) -> None:
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._sock)
        while self._orders:
            data, listener = order = self._orders.popleft()
            try:
                if listener is None:
                    self._sock.send(data)
                # A slot that ended while its order waited has closed its sockets, and their numbers may be others' by
                # now.
                elif listener.number in self._listeners:
                    socket.send_fds(self._sock, [data], [sock.fileno() for sock in listener.socks])
            except BlockingIOError:
                # Back to the front: a narrowing must never reach the proxy before the listener that it narrows.
                self._orders.appendleft(order)
                loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                # EPIPE of a proxy that has ended: its successor gets all listeners anew.
                log.info("the egress proxy did not take an order: %s", error)

    def add(self, socks: list[socket.socket]) -> int:
        """Serve a slot's listening sockets; returns the number to `drop` them by."""
        listener = Listener(next(self._numbers), socks)
        self._listeners[listener.number] = listener
        self._send_listener(listener)
        return listener.number

    async def narrow(self, number: int, hosts: tuple[str, ...] | None) -> None:
        """Restrict a slot to these allowed hosts; returns when the proxy has applied that and cut open connections.

        Raises:
            ConfigError: an entry can't be read; nothing has changed.
            SandboxError: the proxy did not confirm it.
        """
        if hosts is not None:
            # Parsed here first, so that a wrong entry is refused before anything of the slot has changed.
            Narrowed.to(self._policy, hosts)
        listener = self._listeners[number]
        if listener.hosts == hosts and listener.unconfirmed is None:
            return
        # Before it is confirmed: a proxy that is started meanwhile must not open what was to be closed.
        listener.hosts = hosts
        serial = listener.unconfirmed = next(self._serials)
        await self._confirmed(serial, {"narrow": number, "hosts": hosts})
        # A later change may be under way; it alone may say that all is confirmed.
        if listener.unconfirmed == serial:
            listener.unconfirmed = None

    async def entrust(self, number: int, secrets: Sequence[EgressSecret]) -> str | None:
        """Give the proxy the secrets of a slot's hosts.

        Returns:
            The certificate (PEM) by which the slot has to know hosts whose TLS is ended for them; None: there are none.

        Raises:
            NotSupported: TLS can't be ended here.
            SandboxError: the proxy did not confirm it.
        """
        listener = self._listeners[number]
        listener.secrets = [each.model_dump(mode="json") for each in secrets]
        done = await self._confirmed(next(self._serials), {"entrust": number, "secrets": listener.secrets})
        if "refused" in done:
            raise NotSupported(f"secrets: tls needs OpenSSL 3.0 or later where slots run: {done['refused']}")
        # Its successor has the secrets but has made another authority, which the slot does not know.
        if "authority" not in done:
            raise SandboxError("the egress proxy was replaced while it was given a slot's secrets")
        listener.authority = cast("str | None", done["authority"])
        return None if listener.authority is None else listener.authority.partition(_KEY)[0]

    async def _confirmed(self, serial: int, order: dict[str, object]) -> dict[str, object]:
        """Send a change; the proxy's answer, empty from a new proxy, which has started with it.

        Raises:
            SandboxError: there is none in time.
        """
        done = self._unconfirmed[serial] = asyncio.get_running_loop().create_future()
        try:
            self._send({**order, "serial": serial})
            async with asyncio.timeout(CONFIRM_S):
                return await done
        except TimeoutError as error:
            raise SandboxError(f"the egress proxy did not confirm a slot's network: {error!r}") from error
        finally:
            del self._unconfirmed[serial]

    def _close(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            asyncio.get_running_loop().remove_writer(self._sock)
            self._sock.close()
            self._sock = None
            self._orders.clear()
            for number in list(self._counting):  # its counts were lost with the proxy
                self._counted(number, 0)

    def drop(self, number: int) -> asyncio.Future[int]:
        """Stop serving a slot and cut its connections; how many bytes they moved, as soon as the proxy has said so."""
        # Closed here as well as in the proxy: a socket listens as long as anyone has it open.
        for sock in self._listeners.pop(number).socks:
            sock.close()
        moved = self._counting[number] = asyncio.get_running_loop().create_future()
        if self._sock is None:
            self._counted(number, 0)
        self._send({"drop": number})
        return moved

    async def aclose(self) -> None:
        """End the proxy."""
        await self._tasks.cancel()
        for number in list(self._listeners):
            self.drop(number)
        self._close()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
