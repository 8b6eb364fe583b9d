"""The filtering proxy of a container: a process and a user of its own; all connections of slots pass through it.

The server hands it the listening sockets of each slot, made inside that slot's network namespaces; so it knows which
slot asks by the socket alone, and no program in a slot can reach another's. One is a proxy's, on the slot's loopback;
at the others, in its `gateway`, names are asked for and connections to any address accepted. All is judged by
`egress_policy` and relayed by `relay`; bytes and connections are bounded per slot.
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
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atropos.aio import Tasks
from atropos.net.authority import Authority
from atropos.net.egress_policy import Address, EgressRefused, Narrowed, Policy, literal, own_addresses
from atropos.net.exchange import CHUNK_BYTES, OutOfBytes
from atropos.net.insertion import NO_SECRETS, SlotSecrets
from atropos.net.relay import CONNECT_S, Streams, connect, hold, look_up, relay, tunnel
from atropos.net.secrets import HostSecret
from atropos.sandbox.linux import syscalls
from atropos.sandbox.programs.gateway import SOCKETS
from atropos.sandbox.programs.slot_names import Resolver

LOOKUPS = 4
"""Names that one slot may have looked up at once; its further requests wait."""
_MAX_RESOLVERS = 512
"""Threads that look names up, at most."""
_DENIED_S = 30.0
"""How often the addresses of denied names are looked up, in seconds."""
ORDER_BYTES = 1 << 18
"""Longest order of the server: lists of hosts and secrets are nearly all of it."""
_SPARE_FILES = 64
"""Descriptors of the proxy that aren't for connections; the others are shared out among the slots."""


@dataclass(eq=False)
class SlotTraffic:
    """One slot's use of the network. `budget`: bytes it may still move, both ways together; `moved`: so far."""

    rules: Policy | Narrowed
    budget: int
    connections: int
    moved: int = 0
    closed: bool = False
    servers: list[asyncio.Server] = field(default_factory=list[asyncio.Server])
    resolver: Resolver | None = None
    secrets: SlotSecrets = NO_SECRETS
    tasks: Tasks = field(default_factory=lambda: Tasks("egress of a slot"))
    lookups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOKUPS))

    def spend(self, count: int) -> None:
        """Count bytes.

        Raises:
            OutOfBytes: there are none left.
        """
        self.budget -= count
        self.moved += count
        if self.budget < 0:
            raise OutOfBytes("this slot has sent or received as many bytes as it may (egress_mib)")

    def cut(self) -> None:
        """End all connections, those included that are just being made, and answers about names."""
        # Not awaited: connections end in the next turn of the loop, and nothing is relayed before it.
        self.tasks.stop()
        if self.resolver is not None:
            self.resolver.forget()

    def close(self) -> None:
        """End all, for good."""
        self.closed = True
        self.cut()
        for server in self.servers:
            server.close()
        if self.resolver is not None:
            self.resolver.close()

    def admit(self) -> None:
        """Let a connection in.

        Raises:
            EgressRefused: too many are open, this one included.
            OutOfBytes: there are none left.
        """
        # `>`: the task that asks is among them.
        if len(self.tasks) > self.connections:
            raise EgressRefused(f"this slot has {self.connections} connections open already; close some first")
        # A budget of exactly 0 is used up, but only spending shows it.
        self.spend(0 if self.budget else 1)


class Proxy:
    """Serves the slots' listening sockets."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy = policy
        self._accounts: dict[int, SlotTraffic] = {}
        self._denied: dict[str, frozenset[Address]] = {}
        # as many threads as all slots together may use: one with a dead name server leaves the others theirs
        self._resolvers = ThreadPoolExecutor(min(_MAX_RESOLVERS, LOOKUPS * (slots + 1)), "resolve")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unbounded = files == resource.RLIM_INFINITY
        listening = 3 + len(policy.ports)
        # Two descriptors a connection, for all slots and one more (the probe's): no slot can take what others need.
        self._most = sys.maxsize if unbounded else max(1, (files - _SPARE_FILES) // (2 * slots + 2) - listening)

    def add(
        self,
        number: int,
        budget: int,
        connections: int,
        hosts: Sequence[str] | None = None,
        secrets: Sequence[dict[str, Any]] = (),
        authority: str | None = None,
    ) -> SlotTraffic:
        """A slot that is to be served; see `narrow`, and `entrust`, whose answer the authority is."""
        account = self._accounts[number] = SlotTraffic(self._within(hosts), budget, min(connections, self._most))
        signer = None if authority is None else Authority(authority)
        # After a restart of the proxy the authority is the earlier one, which the slot knows already.
        account.secrets = SlotSecrets([HostSecret.of(**each) for each in secrets], signer)
        return account

    async def serve(self, account: SlotTraffic, listeners: Sequence[socket.socket]) -> None:
        """Serve a slot from now on: its proxy's socket, and those of its gateway, if any (`gateway.enter_network`)."""
        if account.closed:
            return
        proxied, *more = listeners
        served = [(proxied, self._serve_proxy)]
        if more:
            asked, asked_by_tcp, *connections = more
            account.resolver = Resolver(asked, partial(self._find, account))
            served += [(asked_by_tcp, self._serve_names), *((each, self._serve_taken) for each in connections)]
        for listener, handle in served:
            listener.setblocking(False)
            accepted = partial(self._accepted, account, handle)
            # asyncio accepts as many connections in one turn of its loop as the backlog has, slot after slot.
            server = await asyncio.start_server(accepted, sock=listener, limit=CHUNK_BYTES, backlog=16)
            if account.closed:  # meanwhile
                server.close()
                return
            account.servers.append(server)
            # else a burst of connections waits for the kernel's next try, a second and more
            listener.listen(account.connections)

    def _accepted(
        self,
        account: SlotTraffic,
        handle: Callable[[SlotTraffic, Streams], Coroutine[Any, Any, None]],
        *streams: *Streams,
    ) -> None:
        if account.closed:
            # Accepted in the same turn in which the slot was dropped.
            streams[1].transport.abort()
            return
        account.tasks.spawn(handle(account, streams), "connection")

    def _within(self, hosts: Sequence[str] | None) -> Policy | Narrowed:
        return self.policy if hosts is None else Narrowed.to(self.policy, hosts)

    def narrow(self, number: int, hosts: Sequence[str] | None) -> None:
        """Restrict a slot to these of the hosts that the policy allows (None: all of them); its connections are cut."""
        account = self._accounts.get(number)
        if account is not None:
            account.rules = self._within(hosts)
            # Connections that are open were judged by the old rules.
            account.cut()

    async def entrust(self, number: int, secrets: Sequence[dict[str, Any]]) -> str | None:
        """From now on a slot's requests carry these secrets (as `HostSecret.of` has them).

        Returns:
            The authority in PEM that the slot has to know; None: TLS is ended for none of the hosts.

        Raises:
            OSError: there can't be one.
        """
        host_secrets = [HostSecret.of(**each) for each in secrets]
        ended = [rule for each in host_secrets if each.tls for rule in each.rules]
        # OpenSSL is a process that takes tens of milliseconds; the loop serves all slots.
        signer = await asyncio.to_thread(Authority.make, ended) if ended else None
        if (account := self._accounts.get(number)) is not None:
            account.secrets = SlotSecrets(host_secrets, signer)
        return None if signer is None else signer.pem

    def drop(self, number: int) -> int:
        """A slot has ended; how many bytes it moved."""
        account = self._accounts.pop(number, None)
        if account is None:
            return 0
        account.close()
        return account.moved

    async def watch_denied(self) -> None:
        """Know the addresses of denied names, so that no other name leads there.

        A failed look-up keeps the last ones.
        """
        places = asyncio.Semaphore(LOOKUPS)
        while names := self.policy.denied_names():
            for name in names:
                with contextlib.suppress(OSError):
                    self._denied[name] = frozenset(await self._resolve(places, name, 443))
            await asyncio.sleep(_DENIED_S)

    async def _resolve(self, places: asyncio.Semaphore, name: str, port: int) -> list[Address]:
        """A name's addresses. It counts towards the slot's lookups until its thread ends, even when it is cancelled."""
        # An address needs no look-up, and so no place among them.
        address = literal(name)
        if address is not None:
            return [address]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            # Before the thread is asked for: the pool's own queue would mix all slots' names.
            await places.acquire()
            try:
                work = self._resolvers.submit(look_up, name, port)
            except RuntimeError as error:  # the host has no room for another thread
                places.release()
                raise OSError(f"{name} can't be looked up now ({error})") from None
            # When the thread ends, not when the caller does: getaddrinfo can't be cancelled and may take a minute.
            work.add_done_callback(lambda _: loop.call_soon_threadsafe(places.release))
            try:
                return await asyncio.wrap_future(work)
            except socket.gaierror as error:  # not a policy refusal, so that programs that retry a 502 do so
                raise OSError(error.errno, f"{name} has no address ({error.strerror})") from None

    async def _find(self, account: SlotTraffic, host: str) -> str:
        """The canonical form of a name that a slot may reach on one port at least.

        Raises:
            EgressRefused: on none.
            OSError: its addresses can't be found.
        """
        rules, refusal = account.rules, EgressRefused("no port is allowed")
        addresses: list[Address] = []
        for port in rules.ports:
            try:
                name = rules.judge_name(host, port)
                # Once for all ports: getaddrinfo's answer doesn't depend on them.
                addresses = addresses or await self._resolve(account.lookups, name, port)
                rules.judge_addresses(name, port, addresses, self._own(port))
            except EgressRefused as error:
                refusal = error
            else:
                return name
        raise refusal

    def _own(self, port: int) -> frozenset[Address]:
        """This machine's addresses, and those of names denied on a port."""
        # Asked each time: a host's addresses change while the proxy runs.
        return own_addresses().union(*(self._denied.get(each, ()) for each in self.policy.denied_names(port)))

    async def _dial(self, account: SlotTraffic, host: str, port: int) -> tuple[str, *Streams]:
        """Connect to a name, or to an address, which may stand for a name."""
        rules, address = account.rules, literal(host)
        if address is not None and account.resolver is not None:
            # The resolver gave the slot this address for a name: the name is what the policy knows.
            host = account.resolver.addresses.name_of(address) or host
        name = rules.judge_name(host, port)
        addresses = await self._resolve(account.lookups, name, port)
        return name, *await connect(name, rules.judge_addresses(name, port, addresses, self._own(port)), port)

    # ------------------------------------------------------------------------------------------------------ one client

    async def _serve_proxy(self, account: SlotTraffic, streams: Streams) -> None:
        dial = partial(self._dial, account)
        await relay(*streams, dial, spend=account.spend, admit=account.admit, secrets=account.secrets)

    async def _serve_taken(self, account: SlotTraffic, streams: Streams) -> None:
        """Serve a connection that a program made without the proxy."""
        # Before anything is awaited: what the program sends is not read until the far end is connected.
        hold(streams[1])
        address, port = streams[1].get_extra_info("sockname")[:2]
        dial = partial(self._dial, account)
        await tunnel(*streams, dial, address, port, spend=account.spend, admit=account.admit, secrets=account.secrets)

    async def _serve_names(self, account: SlotTraffic, streams: Streams) -> None:
        writer = streams[1]
        assert account.resolver is not None
        try:
            account.admit()
            await account.resolver.serve(*streams)
        except (EgressRefused, OutOfBytes):
            pass
        finally:
            writer.transport.abort()


# ------------------------------------------------------------------------------------------------------------ process


async def serve(server: socket.socket, allow: list[str], deny: list[str], slots: int) -> None:
    """Take listening sockets from the server until it goes."""
    proxy = Proxy(Policy.of_slots(allow, deny), slots)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    tasks = Tasks("egress proxy")
    tasks.spawn(proxy.watch_denied(), "denied names")

    async def entrust(order: dict[str, Any]) -> None:
        try:
            answer = {"authority": await proxy.entrust(order["entrust"], order["secrets"])}
        except OSError as error:
            answer = {"refused": str(error)}
        with contextlib.suppress(OSError):
            server.send(json.dumps({"done": order["serial"], **answer}).encode())

    def readable() -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(server, ORDER_BYTES, SOCKETS)
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
                moved = proxy.drop(order["drop"])
                with contextlib.suppress(OSError):
                    server.send(json.dumps({"dropped": order["drop"], "moved": moved}).encode())
            elif "narrow" in order:
                # Applied before it is confirmed: whoever waits for the answer relies on it.
                proxy.narrow(order["narrow"], order["hosts"])
                with contextlib.suppress(OSError):
                    server.send(json.dumps({"done": order["serial"]}).encode())
            elif "entrust" in order:
                # A task, as it may take a while; other orders go on, those of this slot too.
                tasks.spawn(entrust(order), "secrets")
            elif fds:
                account = proxy.add(order.pop("add"), **order)
                tasks.spawn(proxy.serve(account, [socket.socket(fileno=fd) for fd in fds]), "a slot's sockets")

    server.setblocking(False)
    loop.add_reader(server, readable)
    await gone.wait()
    await tasks.cancel()


def main() -> None:
    """Leave every privilege, then serve. Started by the server: standard input is the socket to it."""
    parent = int(sys.argv[1])
    with contextlib.suppress(OSError):
        # Ambient capabilities would come back with an exec (capabilities(7)).
        syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.set_capabilities(frozenset())
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # The soft limit is often 1,024, for the sake of programs that use select(2).
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=os.dup(0))
    asyncio.run(serve(control, **json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
