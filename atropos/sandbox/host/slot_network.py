"""A slot's network namespace, its sockets in the egress proxy, and the hosts that it may reach."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from atropos.errors import NotSupported
from atropos.sandbox.host.egress_supervisor import EgressSupervisor
from atropos.sandbox.programs.gateway import SOCKETS
from atropos.wire import EgressSecret


class SlotNetwork:
    """One slot's network namespace, which its views share.

    Attributes:
        has_egress: whether programs reach anything but the loopback.
        namespace: a descriptor of it, from `open` to `close`.
        hosts: the allowed hosts that its programs may reach; None: all of them.
        authority: the certificate (PEM) by which they know hosts whose TLS the proxy ends; None: it ends none.
    """

    def __init__(self, egress: EgressSupervisor | None) -> None:
        self._egress = egress
        self.has_egress = egress is not None
        self.namespace = -1
        self._number: int | None = None
        self.hosts: tuple[str, ...] | None = None
        self.authority: str | None = None

    async def open(self, near: socket.socket) -> None:
        """Receive the namespace, and pass the sockets that listen in it and its gateway to the proxy.

        Raises:
            OSError: none arrived.
        """
        loop = asyncio.get_running_loop()
        # A thread would have to be ended where the start is cancelled; the loop just stops watching.
        near.setblocking(False)
        arrived = asyncio.Event()
        loop.add_reader(near, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(near)
        # The namespace, then the sockets made in it: PID 1 hands them over before it runs anything of the slot.
        _, fds, _, _ = socket.recv_fds(near, 1, 1 + SOCKETS)
        if not fds:
            raise OSError("its PID 1 ended before it had made the network")
        self.namespace = fds[0]
        if self._egress is not None:
            self._number = self._egress.add([socket.socket(fileno=fd) for fd in fds[1:]])

    async def narrow(self, hosts: tuple[str, ...] | None) -> None:
        """Change `hosts`; see `contract.Sandbox.set_network`."""
        if self._number is None or self._egress is None:
            # An empty list or None leaves what there is: nothing can be reached either way.
            if hosts:
                raise NotSupported("network: this lease has none; request it with network=True")
            return
        await self._egress.narrow(self._number, hosts)
        self.hosts = hosts

    async def entrust(self, secrets: Sequence[EgressSecret]) -> None:
        """Have requests carry secrets; see `contract.Sandbox.add_secrets`."""
        if self._number is None or self._egress is None:
            raise NotSupported("secrets: this lease has no network; request it with network=True")
        self.authority = await self._egress.entrust(self._number, secrets)

    def close(self) -> asyncio.Future[int] | None:
        """Close the slot's connections and the namespace; returns how many bytes they moved, once the proxy tells."""
        if self.namespace >= 0:
            os.close(self.namespace)
            self.namespace = -1
        if self._number is not None and self._egress is not None:
            number, self._number = self._number, None
            return self._egress.drop(number)
        return None
