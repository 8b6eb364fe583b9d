"""A model of containers and sandbox servers in memory: real timing and failures, no processes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from atropos import wire
from atropos.errors import BackendUnavailable, ImageUnavailable, LeaseExpired, PoolFull, SandboxError, SlotLost
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container

SLOT = SlotPoolConfig().slot_room


@dataclass
class ModelServer:
    """Grants leases as a sandbox server does, and remembers every breach of a promise."""

    name: str
    slots: int
    leases: dict[str, wire.Lease] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)
    epoch: int = 0
    peak: int = 0
    grants: int = 0
    alive: bool = True
    delay_s: float = 0.0
    jitter: random.Random | None = None
    lose_answers: int = 0
    refuse: Exception | None = None
    unclean: bool = False
    takes_none: bool = False
    refuses_snapshots: SandboxError | None = None
    hangs: bool = False
    prepares: asyncio.Event | None = None
    preparing: int = 0
    silent: bool = False
    built: dict[str, wire.ImageInfo] = field(default_factory=dict)
    taken_in: int = 0
    draining: bool = False
    foreign: int = 0
    requests: list[wire.LeaseRequest] = field(default_factory=list)
    clients: list[ModelClient] = field(default_factory=list)
    snapshot_store: set[str] = field(default_factory=set)
    architecture: str = "amd64"

    @property
    def free(self) -> int:
        return self.slots - len(self.holder) - len(self.retired) - self.foreign

    async def pause(self) -> None:
        delay = self.delay_s * (self.jitter.random() * 2 if self.jitter else 1)
        await asyncio.sleep(delay)
        if not self.alive:
            raise SlotLost(f"server {self.name} is dead")

    def grant(self, request: wire.LeaseRequest) -> wire.Lease:
        if request.lease_id in self.leases:
            return self.leases[request.lease_id]
        if self.refuse:
            raise self.refuse
        if request.snapshot is not None and request.snapshot not in self.snapshot_store:
            raise SandboxError("no such snapshot")
        if self.free <= 0 or self.draining:
            raise PoolFull("full")
        slot = next(f"s{n}" for n in range(self.slots) if f"s{n}" not in self.holder and f"s{n}" not in self.retired)
        self.epoch += 1
        self.grants += 1
        lease = wire.Lease(lease_id=request.lease_id, slot=slot, epoch=self.epoch, boot_id=self.name, ttl_s=60)
        self.leases[request.lease_id] = lease
        self.holder[slot] = request.lease_id
        self.requests.append(request)
        self.peak = max(self.peak, len(self.holder))
        return lease

    def end(self, lease: wire.Lease) -> wire.ReleaseResult:
        if self.leases.pop(lease.lease_id, None) is None:
            raise LeaseExpired("no such lease")
        assert self.holder.pop(lease.slot) == lease.lease_id, "two held one slot"
        if self.unclean:
            self.retired.add(lease.slot)
        return wire.ReleaseResult(released=True, clean=not self.unclean, reset_s=0.001)

    def kill(self) -> None:
        self.alive = False
        for client in self.clients:
            client.lost.set()

    def tell(self, lease_id: str, code: str) -> None:
        """End a lease on the server's own account."""
        lease = self.leases.pop(lease_id)
        del self.holder[lease.slot]
        for client in self.clients:
            client.on_lease_ended(
                wire.LeaseEnded(lease_id=lease_id, epoch=lease.epoch, code=code, message="the server ended it")
            )


class ModelImages:
    """Its host's images: each is there at once, or when `prepares` is set; built ones are those of `built`."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server

    async def prepare(self, source: str, **_) -> wire.ImageInfo:
        self.server.preparing += 1
        if self.server.prepares is not None:
            await self.server.prepares.wait()
        await self.server.pause()
        machine = self.server.architecture
        if "only-for-" in source and not source.endswith(machine):
            raise ImageUnavailable(f"image {source}: it has no image for linux/{machine}")
        return wire.ImageInfo(id="0" * 64, source=source, bytes=1)

    async def find(self, source: str) -> wire.ImageInfo | None:
        await self.server.pause()
        if self.server.silent:
            raise BackendUnavailable(f"{self.server.name} did not answer")
        return self.server.built.get(source)

    async def give(self, image: wire.ImageInfo, source: str, to: ModelImages) -> wire.ImageInfo:
        await self.server.pause()
        await to.server.pause()
        return image

    async def copy(self, image: wire.ImageInfo, to: ModelImages) -> wire.ImageInfo:
        await self.server.pause()
        to.server.built[image.source] = image
        return image


class ModelClient:
    """What the pool holds of a ModelServer."""

    def __init__(self, server: ModelServer, on_lease_ended, on_capacity) -> None:
        self.server = server
        self.images = ModelImages(server)
        self.on_capacity = on_capacity
        self.on_lease_ended = on_lease_ended
        self.lost = asyncio.Event()
        self.closed = False
        server.clients.append(self)

    async def connect(self) -> None:
        if self.server.hangs:
            await asyncio.Event().wait()
        try:
            await self.server.pause()
        except SlotLost as error:
            raise BackendUnavailable(str(error)) from None

    async def close(self, reason: str = "") -> None:
        self.closed = True

    async def acquire(self, request: wire.LeaseRequest) -> wire.Lease:
        await self.server.pause()
        lease = self.server.grant(request)
        if self.server.lose_answers:
            self.server.lose_answers -= 1
            asyncio.get_running_loop().call_later(0.02, self.server.end, lease)  # as the real client gives it back
            raise BackendUnavailable("the connection was cut")
        await self.server.pause()
        return lease

    async def release(self, lease: wire.Lease) -> wire.ReleaseResult:
        await self.server.pause()
        result = self.server.end(lease)
        await self.server.pause()
        return result

    async def call(self, lease: wire.Lease, operation: wire.Operation, *, call_id: str | None = None) -> wire.OpResult:
        await self.server.pause()
        if self.server.holder.get(lease.slot) != lease.lease_id:
            raise LeaseExpired("the slot is somebody else's")
        return wire.CommandResult(exit_code=0, output=lease.slot.encode(), duration_s=0.001)

    async def snapshot(self, lease: wire.Lease, *, beside: bool = False) -> wire.SnapshotInfo:
        await self.server.pause()
        name = f"snap-{len(self.server.snapshot_store)}-{lease.epoch}"
        self.server.snapshot_store.add(name)
        return wire.SnapshotInfo(snapshot_id=name, layers=1, bytes=10)

    async def copy_snapshot(self, snapshot_id: str, to: ModelClient) -> wire.SnapshotInfo:
        await self.server.pause()
        if snapshot_id not in self.server.snapshot_store:
            raise SandboxError("no such snapshot")
        await to.server.pause()
        if to.server.takes_none:
            raise PoolFull("too many snapshots")
        if to.server.refuses_snapshots is not None:
            raise to.server.refuses_snapshots
        to.server.taken_in += 1
        to.server.snapshot_store.add(snapshot_id)
        return wire.SnapshotInfo(snapshot_id=snapshot_id, layers=1, bytes=10)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self.server.snapshot_store.discard(snapshot_id)

    async def capabilities(self) -> wire.Capabilities:
        return wire.Capabilities(
            boot_id=self.server.name,
            kernel="model",
            architecture=self.server.architecture,
            features=(),
            limits={},
            stateful=True,
            isolated=True,
        )

    async def status(self) -> wire.Status:
        await self.server.pause()
        server = self.server
        return wire.Status(
            boot_id=server.name,
            slots=server.slots,
            free=server.free,
            room=SLOT * server.free,
            leased=len(server.holder) + server.foreign,
            warming=0,
            retired=len(server.retired),
            retired_room=SLOT * len(server.retired),
            draining=server.draining,
            clients=1,
            uptime_s=1,
        )


class ModelBackend(Backend):
    """Containers that start after a while, or never."""

    name = "model"

    def __init__(self, slots: int, *, start_s: float = 0.0, architectures: tuple[str, ...] = ("amd64",)) -> None:
        self.slots = slots
        self.architectures = architectures
        self.start_s = start_s
        self.servers: dict[str, ModelServer] = {}
        self.history: list[ModelServer] = []
        self.listed: dict[str, Container] = {}
        self.asked: list[int] = []
        self.retired: list[str] = []
        self.closed: bool | None = None
        self.refuse: Exception | None = None
        self.never = False
        self.sick = ""
        self.fatal: Exception | None = None
        self.away = ""
        self.refuse_retire: Exception | None = None
        self.delay_s = 0.0
        self.jitter: random.Random | None = None
        self.made = 0
        self.reads = 0
        self._news = asyncio.Event()

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def scale(self, count: int) -> None:
        await asyncio.sleep(0)
        self.asked.append(count)
        if self.refuse:
            raise self.refuse
        indices = {container.index for container in self.listed.values()}
        if not self.never:
            for index in set(range(count)) - indices:
                self.open(index)
        for key in [key for key, container in self.listed.items() if container.index >= count]:
            self.vanish(key)
        self._news.set()

    def open(self, index: int) -> ModelServer:
        self.made += 1
        name = f"c{index}-{self.made}"
        machine = self.architectures[index % len(self.architectures)]
        server = ModelServer(name, self.slots, delay_s=self.delay_s, jitter=self.jitter, architecture=machine)
        self.servers[name] = server
        self.history.append(server)
        state = "starting" if self.start_s else "running"
        self.listed[name] = Container(name, index, f"http://{name}", "t", state)
        if self.start_s:
            asyncio.get_running_loop().call_later(self.start_s, self.run, name)
        self._news.set()
        return server

    def run(self, name: str) -> None:
        if name in self.listed:
            old = self.listed[name]
            self.listed[name] = Container(old.id, old.index, old.url, old.token, "running")
            self._news.set()

    def vanish(self, key: str) -> None:
        del self.listed[key]
        self.servers.pop(key).kill()
        self._news.set()

    def containers(self):
        self.reads += 1
        return list(self.listed.values())

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()

    def trouble(self) -> str:
        return self.sick

    def outage(self) -> str:
        return self.away

    def failure(self) -> Exception | None:
        return self.fatal

    def fail(self, error: Exception) -> None:
        self.fatal = error
        self._news.set()

    async def retire(self, container: Container) -> None:
        self.retired.append(container.id)
        if self.refuse_retire:
            raise self.refuse_retire
        if container.id in self.listed:
            self.vanish(container.id)
            self.open(container.index)

    async def aclose(self, *, purge: bool) -> None:
        self.closed = purge

    # ------------------------------------------------------------------------------------------------ for the tests

    @property
    def held(self) -> int:
        return sum(len(server.holder) for server in self.servers.values())

    def make_client(self, container: Container, on_lease_ended, on_capacity) -> ModelClient:
        return ModelClient(self.servers[container.id], on_lease_ended, on_capacity)


def model_pool(
    slots: int = 2,
    containers: int = 2,
    *,
    start_s: float = 0.0,
    architectures: tuple[str, ...] = ("amd64",),
    **settings,
) -> tuple[SlotPool, ModelBackend]:
    """A pool on a fresh model backend; `settings` are SlotPoolConfig's."""
    backend = ModelBackend(slots, start_s=start_s, architectures=architectures)
    values = {"slots_per_container": slots, "max_containers": containers, "acquire_timeout_s": 5.0} | settings
    return SlotPool(SlotPoolConfig(**values), backend=backend, make_client=backend.make_client), backend


LASTING = ("pool: container", "pool: watch", "pool: scale")


def pool_tasks() -> list[asyncio.Task]:
    """The tasks of all pools in this loop."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("pool: ")]


async def settled() -> None:
    """Until no release or other work of the pool is under way."""
    async with asyncio.timeout(10):
        quiet = 0
        while quiet < 2:  # a task that has just ended may start another one in its callback
            await asyncio.sleep(0.002)
            quiet = 0 if any(not task.get_name().startswith(LASTING) for task in pool_tasks()) else quiet + 1
