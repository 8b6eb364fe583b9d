"""The filtering proxy of a container: a process of its own, with a user of its own, that slots reach by their loopback.

The server hands it one listening socket a slot, made inside that slot's network namespace; so it knows which slot asks
by the socket alone, and no program in a slot can reach another's. Requests are judged by `egress_policy` and relayed by
`relay`; bytes and connections are bounded per slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from atropos.net.egress_policy import Address, EgressRefused, Narrowed, Policy, literal, own_addresses
from atropos.net.relay import CHUNK_BYTES, CONNECT_S, OutOfBytes, connect, look_up, relay
from atropos.sandbox.linux import syscalls

LOOKUPS = 4
"""Names that one slot may have looked up at once; its further requests wait."""
_MAX_RESOLVERS = 512
"""Threads that look names up, at most."""
_DENIED_S = 30.0
"""How often the addresses of denied names are looked up, in seconds."""
ORDER_BYTES = 1 << 17
"""Longest order of the server: a list of hosts is nearly all of it."""
_SPARE_FILES = 64
"""Descriptors of the proxy that aren't for connections; the others are shared out among the slots."""


@dataclass
class SlotTraffic:
    """One slot's use of the network. `left`: bytes it may still move, both ways together."""

    server: asyncio.Server
    left: int
    connections: int
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    lookups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOKUPS))

    def spend(self, count: int) -> None:
        """Count bytes.

        Raises:
            OutOfBytes: there are none left.
        """
        self.left -= count
        if self.left < 0:
            raise OutOfBytes("this slot has sent or received as many bytes as it may (egress_mib)")

    def cut(self) -> None:
        """End all connections, those included that are just being made."""
        for task in list(self.tasks):
            task.cancel()

    def admit(self) -> None:
        """Let a connection in.

        Raises:
            EgressRefused: too many are open, this one included.
            OutOfBytes: there are none left.
        """
        if len(self.tasks) > self.connections:
            raise EgressRefused(f"this slot has {self.connections} connections open already; close some first")
        self.spend(0 if self.left else 1)


class Proxy:
    """Serves the slots' listening sockets."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy = policy
        self._accounts: dict[int, SlotTraffic] = {}
        self._rules: dict[int, Policy | Narrowed] = {}
        self._denied: dict[str, frozenset[Address]] = {}
        # as many threads as all slots together may use: one with a dead name server leaves the others theirs
        self._resolvers = ThreadPoolExecutor(min(_MAX_RESOLVERS, LOOKUPS * (slots + 1)), "resolve")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unbounded = files == resource.RLIM_INFINITY
        self._most = sys.maxsize if unbounded else max(1, (files - _SPARE_FILES) // (2 * slots + 2))

    async def add(self, number: int, listener: socket.socket, budget: int, connections: int) -> None:
        """Serve a slot from now on."""
        listener.setblocking(False)

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(number, reader, writer))
            account = self._accounts.get(number)
            if account is not None:
                account.tasks.add(task)
                task.add_done_callback(account.tasks.discard)

        server = await asyncio.start_server(accepted, sock=listener, limit=CHUNK_BYTES, backlog=16)
        if number not in self._rules:  # dropped meanwhile
            server.close()
            return
        most = min(connections, self._most)
        listener.listen(most)  # else a burst of them waits for the kernel's next try, a second and more
        self._accounts[number] = SlotTraffic(server, budget, most)

    def narrow(self, number: int, hosts: Sequence[str] | None) -> None:
        """From now on a slot reaches these hosts of what the policy allows (None: all of it); its connections are cut."""
        self._rules[number] = self.policy if hosts is None else Narrowed.to(self.policy, hosts)
        account = self._accounts.get(number)
        if account is not None:
            account.cut()

    def drop(self, number: int) -> None:
        """A slot has ended."""
        self._rules.pop(number, None)
        account = self._accounts.pop(number, None)
        if account is not None:
            account.server.close()
            account.cut()

    async def watch_denied(self) -> None:
        """Know the addresses of denied names, so that no other name leads there. A failed look-up keeps the last ones."""
        places = asyncio.Semaphore(LOOKUPS)
        while names := self.policy.denied_names():
            for name in names:
                with contextlib.suppress(OSError):
                    self._denied[name] = frozenset(await self._resolve(places, name, 443))
            await asyncio.sleep(_DENIED_S)

    async def _resolve(self, places: asyncio.Semaphore, name: str, port: int) -> list[Address]:
        """A name's addresses. It counts towards the slot's lookups until its thread ends, even when it is cancelled."""
        address = literal(name)
        if address is not None:
            return [address]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            await places.acquire()
            try:
                work = self._resolvers.submit(look_up, name, port)
            except RuntimeError as error:  # the host has no room for another thread
                places.release()
                raise OSError(f"{name} can't be looked up now ({error})") from None
            work.add_done_callback(lambda _: loop.call_soon_threadsafe(places.release))
            try:
                return await asyncio.wrap_future(work)
            except socket.gaierror as error:  # no rule's refusal, so that programs which try a 502 again do
                raise OSError(f"{name} has no address ({error.strerror})") from None

    # ------------------------------------------------------------------------------------------------------ one client

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        account, rules = self._accounts.get(number), self._rules.get(number)
        if account is None or rules is None:
            writer.transport.abort()
            return

        async def dial(host: str, port: int) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
            name = rules.judge_name(host, port)
            found = await self._resolve(account.lookups, name, port)
            denied = (self._denied.get(each, ()) for each in self.policy.denied_names(port))
            own = own_addresses().union(*denied)
            return name, *await connect(name, rules.judge_addresses(name, port, found, own), port)

        await relay(reader, writer, dial, spend=account.spend, admit=account.admit)


# ------------------------------------------------------------------------------------------------------------ process


async def serve(server: socket.socket, allow: list[str], deny: list[str], slots: int) -> None:
    """Take listening sockets from the server until it goes."""
    proxy = Proxy(Policy.of_slots(allow, deny), slots)
    loop = asyncio.get_running_loop()
    denied = loop.create_task(proxy.watch_denied())
    gone = asyncio.Event()
    adding: set[asyncio.Task[None]] = set()

    def readable() -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(server, ORDER_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                loop.remove_reader(server)
                gone.set()
                return
            order = json.loads(data)
            if "drop" in order:
                proxy.drop(order["drop"])
            elif "narrow" in order:
                proxy.narrow(order["narrow"], order["hosts"])
                with contextlib.suppress(OSError):
                    server.send(json.dumps({"done": order["serial"]}).encode())
            elif fds:
                proxy.narrow(order["add"], order["hosts"])
                listener = socket.socket(fileno=fds[0])
                task = loop.create_task(proxy.add(order["add"], listener, order["budget"], order["connections"]))
                adding.add(task)
                task.add_done_callback(adding.discard)

    server.setblocking(False)
    loop.add_reader(server, readable)
    await gone.wait()
    denied.cancel()


def main() -> None:
    """Leave every privilege, then serve. Started by the server: standard input is the socket to it."""
    parent = int(sys.argv[1])
    with contextlib.suppress(OSError):
        syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.set_capabilities(frozenset())
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=os.dup(0))
    asyncio.run(serve(control, **json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
