"""A slot's way out: its socket in the egress proxy, and what it reaches through it."""

from __future__ import annotations

import asyncio
import os
import socket

from atropos.errors import NotSupported
from atropos.sandbox.host.egress_supervisor import EgressSupervisor


class SlotNetwork:
    """One slot's network namespace, which its views share.

    Attributes:
        wanted: whether there is a way out of it.
        namespace: a descriptor of it, from `open` to `close`.
        hosts: what its programs reach of what the server allows; None: all of it.
    """

    def __init__(self, egress: EgressSupervisor | None, *, wanted: bool) -> None:
        self._egress = egress
        self.wanted = wanted
        self.namespace = -1
        self._number: int | None = None
        self.hosts: tuple[str, ...] | None = None

    async def open(self, near: socket.socket, timeout_s: float) -> None:
        """Keep the namespace, and give the proxy the socket that was made there.

        Raises:
            OSError: none came.
        """
        loop = asyncio.get_running_loop()
        near.setblocking(False)
        arrived = asyncio.Event()
        loop.add_reader(near, arrived.set)
        try:
            async with asyncio.timeout(timeout_s):
                await arrived.wait()
        finally:
            loop.remove_reader(near)
        _, fds, _, _ = socket.recv_fds(near, 1, 2)
        if not fds:
            raise OSError("it ended")
        self.namespace = fds[0]
        if self.wanted:
            assert self._egress is not None
            self._number = self._egress.add(socket.socket(fileno=fds[1]))

    async def narrow(self, hosts: tuple[str, ...] | None) -> None:
        """Change `hosts`; see `contract.Sandbox.set_network`."""
        if self._number is None or self._egress is None:
            if hosts:
                raise NotSupported("network: this lease has none; request it with network=True")
            return
        await self._egress.narrow(self._number, hosts)
        self.hosts = hosts

    def close(self) -> None:
        """Close the slot's connections and the namespace."""
        if self.namespace >= 0:
            os.close(self.namespace)
            self.namespace = -1
        if self._number is not None and self._egress is not None:
            self._egress.drop(self._number)
            self._number = None
