"""The network of leases that belong together: a namespace of its own that passes packets from one slot to another.

Each slot has a device in it beside those that it had, with an address of its own. So two of them may listen on one
port, and the loopback is each one's own. No other slot has a device in that namespace, and nothing leads on from there
(docs/decisions/0029). What is sent between two that are to be apart isn't passed on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from atropos.errors import BackendUnavailable, LeaseExpired, NotSupported
from atropos.sandbox.contract import Sandbox
from atropos.sandbox.host.slot import SlotSandbox
from atropos.sandbox.linux import host_limits, netlink, syscalls
from atropos.sandbox.linux.sysctl import tell_kernel

DEVICE = "eth1"
PREFIX = "172.31.240."
"""Of addresses here: private ones, as those of Docker's networks are."""
_INDEX = 1000
"""Of the device in a slot, and of the first one's other end: after those that the kernel has in every namespace."""
_ROUTER, _FIRST, _BITS = 1, 10, 24
# Bit 1 of the first byte marks an address as locally administered (IEEE 802).
_OWN_MAC, _FAR_MAC = b"\x02atrp", b"\x02atrq"
"""Of the devices in slots, and of their other ends, without the number of the slot."""


@dataclass(frozen=True)
class _NetworkMember:
    """One that is connected: its number, its names, and the networks that it is on; without any, on all."""

    number: int
    names: tuple[str, ...]
    networks: frozenset[str]

    @property
    def addresses(self) -> dict[str, str]:
        """Its address, by each of its names."""
        return dict.fromkeys(self.names, _text(_FIRST + self.number))

    def reaches(self, other: _NetworkMember) -> bool:
        """Whether they reach each other."""
        return not (self.networks and other.networks and self.networks.isdisjoint(other.networks))


class GroupNetwork:
    """The network of one lease and of those that joined it."""

    def __init__(self) -> None:
        self._namespace = -1
        self._closed = False
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()
        self._members: dict[SlotSandbox, _NetworkMember] = {}

    async def join(self, sandbox: Sandbox, names: Sequence[str], networks: Sequence[str] = ()) -> None:
        """Connect a sandbox; see `contract.PrivateNetwork.join`."""
        assert isinstance(sandbox, SlotSandbox)
        async with self._turn:
            try:
                await self._join(sandbox, _NetworkMember(next(self._numbers), tuple(names), frozenset(networks)))
            finally:
                if self._closed:
                    self._give_up()

    async def _join(self, sandbox: SlotSandbox, new: _NetworkMember) -> None:
        if self._closed:
            raise LeaseExpired("joins: the group is over")
        namespace = os.dup(sandbox.network.namespace)  # its end closes its own
        apart = [each.number for each in self._members.values() if not each.reaches(new)]
        try:
            await _in_thread(lambda: self._connect(namespace, new.number, apart))
        except OSError as error:
            if error.errno in host_limits.USED_UP:
                raise BackendUnavailable(f"joins: {error}{host_limits.named()}") from error
            raise NotSupported(f"this machine can make no network between slots: {error}") from error
        finally:
            os.close(namespace)
        known = self._known_by(new)
        await sandbox.know_hosts(known, known)  # first: where it fails, the others were not told of it
        others = [(other, each) for other, each in self._members.items() if each.reaches(new)]
        await asyncio.gather(
            *(other.know_hosts(new.addresses, self._known_by(each) | new.addresses) for other, each in others)
        )
        self._members[sandbox] = new

    def _known_by(self, one: _NetworkMember) -> dict[str, str]:
        """The addresses of all that one reaches, itself among them, by their names."""
        reached = (each for each in (*self._members.values(), one) if each.reaches(one))
        return {name: address for each in reached for name, address in each.addresses.items()}

    def leave(self, sandbox: Sandbox) -> None:
        """Tell those that join later nothing of a sandbox; see `contract.PrivateNetwork.leave`."""
        assert isinstance(sandbox, SlotSandbox)
        self._members.pop(sandbox, None)

    def _connect(self, namespace: int, number: int, apart: Sequence[int]) -> None:
        """Give a slot's namespace a device here; in a thread that ends then, since it enters other namespaces.

        `apart` are the numbers of those that it is not to reach.
        """
        # Made with the first member: most leases never have a group.
        if self._namespace < 0:
            syscalls.unshare(syscalls.CLONE_NEWNET)
            tell_kernel("/proc/sys/net/ipv4/ip_forward", "1")
            # The descriptor alone keeps the namespace alive once this thread has left it; no process is in it.
            self._namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        syscalls.setns(self._namespace, syscalls.CLONE_NEWNET)
        # A netlink socket stays in the namespace in which it was made, so that one thread can speak to both.
        far = netlink.LinkRequests()
        syscalls.setns(namespace, syscalls.CLONE_NEWNET)
        index, own, router = _INDEX + number, _packed(_FIRST + number), _packed(_ROUTER)
        mac, far_mac = _OWN_MAC + bytes([number]), _FAR_MAC + bytes([number])
        netlink.LinkRequests().change(
            # One request makes both ends, each in its namespace: neither is ever in the server's own.
            netlink.veth(_INDEX, DEVICE, mac, (index, f"slot{number}", far_mac), self._namespace)
            + netlink.up(_INDEX)
            # /32: slots reach each other through the router alone. Neighbours are fixed, since learned ones count
            # towards a bound of the host.
            + netlink.address(_INDEX, socket.AF_INET, own, 32)
            + netlink.neighbour(_INDEX, socket.AF_INET, router, far_mac)
            + netlink.route(_INDEX, socket.AF_INET, router, 32, scope=netlink.LINK)
            + netlink.route(_INDEX, socket.AF_INET, _packed(0), _BITS, router)
        )
        far.change(
            netlink.up(index)
            + netlink.address(index, socket.AF_INET, router, 32)
            + netlink.neighbour(index, socket.AF_INET, own, mac)
            + netlink.route(index, socket.AF_INET, own, 32, scope=netlink.LINK)
            + b"".join(
                netlink.prohibit(socket.AF_INET, f"slot{source}", _packed(_FIRST + to), 32)
                for other in apart
                # Both directions: one alone would still let datagrams through the other way.
                for source, to in ((number, other), (other, number))
            )
        )

    def close(self) -> None:
        """Give the namespace up, which ends with its devices; see `contract.PrivateNetwork.close`."""
        self._closed = True
        if not self._turn.locked():  # else at the end of that
            self._give_up()

    def _give_up(self) -> None:
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


async def _in_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1, "network") as thread:
        await asyncio.get_running_loop().run_in_executor(thread, work)


def _text(number: int) -> str:
    return f"{PREFIX}{number}"


def _packed(number: int) -> bytes:
    return socket.inet_pton(socket.AF_INET, _text(number))
