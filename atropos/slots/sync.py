"""The pool for programs without an event loop: the same names, as calls that block.

    with SlotPool(SlotPoolConfig(backend="local")) as pool, pool.lease("trajectory-1") as slot:
        print(slot.exec("echo hi").output)

The pools of a process run in one event loop, in a thread of its own (`atropos.event_loop`); any thread may use them and
their slots. An interrupted call (Ctrl-C) is cancelled, which kills what it started. A pool that is still open when the
process ends is stopped. Coroutines use `atropos.slots`: a call of this module would block their event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack

from atropos import slots
from atropos.errors import SandboxError
from atropos.event_loop import event_loop, release
from atropos.metrics import Family
from atropos.slots import EgressSecret, LeaseLimits, PoolStats, Share, SlotPoolConfig
from atropos.slots.slot.profile import Profile
from atropos.wire import ImageInfo

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

Method = Callable[Concatenate[A, P], Coroutine[Any, Any, T]]


class Blocking(Generic[A]):
    """An object of the event loop, with methods that block.

    Attributes:
        awaited: the object itself, whose methods are coroutines of the event loop.
    """

    def __init__(self, awaited: A) -> None:
        self.awaited = awaited

    def __repr__(self) -> str:
        return repr(self.awaited)


def blocking(method: Method[A, P, T]) -> Callable[Concatenate[Blocking[A], P], T]:
    """A method that waits for a coroutine method."""
    return giving(lambda result: result, method)


def giving(wrapper: Callable[[T], W], method: Method[A, P, T]) -> Callable[Concatenate[Blocking[A], P], W]:
    """As `blocking`, of a method whose result has methods to wait for."""

    @wraps(method)
    def waiting(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> W:
        return wrapper(event_loop().run(method(self.awaited, *args, **kwargs)))

    return waiting


class Process(Blocking[slots.Process]):
    """A background process of a slot; see `atropos.slots.Process`."""

    poll = blocking(slots.Process.poll)
    wait = blocking(slots.Process.wait)
    read = blocking(slots.Process.read)
    write = blocking(slots.Process.write)
    close_stdin = blocking(slots.Process.close_stdin)
    resize = blocking(slots.Process.resize)
    kill = blocking(slots.Process.kill)

    @property
    def id(self) -> str:
        """Its name in the slot."""
        return self.awaited.id

    @property
    def pid(self) -> int:
        """Its process id in the slot."""
        return self.awaited.pid

    @property
    def exit_code(self) -> int | None:
        """As last seen: None while it runs, -N when signal N ended it."""
        return self.awaited.exit_code

    @property
    def dropped_bytes(self) -> int:
        """Output that fell out of the buffer before it was read."""
        return self.awaited.dropped_bytes

    @property
    def errors(self) -> Process | None:
        """What it prints as errors, where that is kept apart."""
        return None if self.awaited.errors is None else Process(self.awaited.errors)

    @property
    def over(self) -> bool:
        """Whether it has ended, and all that it printed was read."""
        return self.awaited.over

    def output(self) -> Iterator[bytes]:
        """Its output as it comes, until it has ended and all is read."""
        pieces = self.awaited.output()
        while (piece := event_loop().run(_next(pieces))) is not None:
            yield piece


async def _next(pieces: AsyncIterator[T]) -> T | None:
    return await anext(pieces, None)


class Snapshot(Blocking[slots.Snapshot]):
    """A frozen workspace that slots start from; see `atropos.slots.Snapshot`."""

    drop = blocking(slots.Snapshot.drop)

    @property
    def id(self) -> str:
        """Its name on the servers."""
        return self.awaited.id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class PortForward(Blocking[slots.PortForward]):
    """Connections to one port go through to another; see `atropos.slots.PortForward`."""

    aclose = blocking(slots.PortForward.aclose)

    @property
    def port(self) -> int:
        """The listening one, on a loopback."""
        return self.awaited.port

    @classmethod
    def to_slot(cls, slot: Slot, port: int, *, listen: int = 0) -> Self:
        """Forward a port of this machine's loopback to the slot's; see `atropos.slots.PortForward.to_slot`."""
        return cls(event_loop().run(slots.PortForward.to_slot(slot.awaited, port, listen=listen)))

    @classmethod
    def from_slot(cls, slot: Slot, port: int, target: int) -> Self:
        """Forward a port of the slot's loopback to this machine's; see `atropos.slots.PortForward.from_slot`."""
        return cls(event_loop().run(slots.PortForward.from_slot(slot.awaited, port, target)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.aclose()


class Slot(Blocking[slots.Slot]):
    """A private machine-like workspace for one trajectory; see `atropos.slots.Slot`."""

    capabilities = blocking(slots.Slot.capabilities)
    check_alive = blocking(slots.Slot.check_alive)
    download = blocking(slots.Slot.download)
    download_to = blocking(slots.Slot.download_to)
    exec = blocking(slots.Slot.exec)
    keep = blocking(slots.Slot.keep)
    processes = giving(lambda found: [Process(one) for one in found], slots.Slot.processes)
    quiesce = blocking(slots.Slot.quiesce)
    read_file = blocking(slots.Slot.read_file)
    read_file_to = blocking(slots.Slot.read_file_to)
    release = blocking(slots.Slot.release)
    run = blocking(slots.Slot.run)
    set_network = blocking(slots.Slot.set_network)
    settle = blocking(slots.Slot.settle)
    snapshot = giving(Snapshot, slots.Slot.snapshot)
    start = giving(Process, slots.Slot.start)
    upload = blocking(slots.Slot.upload)
    view = blocking(slots.Slot.view)
    write_file = blocking(slots.Slot.write_file)

    def mount(self, source: str, path: str, *, of: Slot | None = None, read_only: bool = False) -> None:
        """Have a folder or file of another slot of the group at a path here; see `atropos.slots.Slot.mount`."""
        other = None if of is None else of.awaited
        event_loop().run(self.awaited.mount(source, path, of=other, read_only=read_only))

    @property
    def group(self) -> list[Slot]:
        """Those that share its network and end with it, itself among them."""
        return [Slot(each) for each in self.awaited.group]

    @property
    def name(self) -> str:
        """The slot's name on its server."""
        return self.awaited.name

    @property
    def image(self) -> ImageInfo | None:
        """Its image; None: the pool's base, or a snapshot's."""
        return self.awaited.image

    @property
    def container(self) -> str:
        """The backend's id of the container that the slot is in."""
        return self.awaited.container

    @property
    def lost(self) -> SandboxError | None:
        """Why the slot can't be used any more; None while it can."""
        return self.awaited.lost

    @property
    def profile(self) -> Profile:
        """What later operations start with where they don't say: folder, variables, user."""
        return self.awaited.profile

    @profile.setter
    def profile(self, profile: Profile) -> None:
        self.awaited.profile = profile

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LeaseOptions(TypedDict, total=False):
    """What a lease asks for; see `atropos.slots.SlotPool.acquire`."""

    base: str | None
    network: bool | None
    image: str | None
    limits: LeaseLimits | None
    share: Share | None
    secrets: Sequence[EgressSecret]
    timeout_s: float | None


class SlotPool(Blocking[slots.SlotPool]):
    """Leases slots; see `atropos.slots.SlotPool`.

    Args:
        config: what it is made of.

    Raises:
        ConfigError: the backend can't be made.
    """

    def __init__(self, config: SlotPoolConfig | None = None) -> None:
        super().__init__(slots.SlotPool(config))

    prepare = blocking(slots.SlotPool.prepare)
    find_built = blocking(slots.SlotPool.find_built)
    wait_for_engine = blocking(slots.SlotPool.wait_for_engine)

    @property
    def config(self) -> SlotPoolConfig:
        """What it was made of."""
        return self.awaited.config

    def start(self) -> None:
        """Start the backend and wait for `min_containers`; see `atropos.slots.SlotPool.start`."""
        event_loop().hold(self, self.awaited.stop)
        try:
            event_loop().run(self.awaited.start())
        except BaseException:
            release(self)
            raise

    def stop(self, *, purge_job: bool | None = None) -> None:
        """End all leases and the containers, or leave them; see `atropos.slots.SlotPool.stop`."""
        event_loop().run(self.awaited.stop(purge_job=purge_job))
        release(self)

    def acquire(self, trajectory_id: str, *, snapshot: Snapshot | None = None, **options: Unpack[LeaseOptions]) -> Slot:
        """Lease a slot; first come, first served. See `atropos.slots.SlotPool.acquire`."""
        frozen = None if snapshot is None else snapshot.awaited
        return Slot(event_loop().run(self.awaited.acquire(trajectory_id, frozen, **options)))

    @contextmanager
    def lease(
        self, trajectory_id: str, *, snapshot: Snapshot | None = None, **options: Unpack[LeaseOptions]
    ) -> Generator[Slot]:
        """A slot for the length of a `with` block. Arguments and errors as `acquire`."""
        with self.acquire(trajectory_id, snapshot=snapshot, **options) as slot:
            yield slot

    def join(
        self,
        slot: Slot,
        names: Sequence[str],
        *,
        its_names: Sequence[str] = (),
        networks: Sequence[str] = (),
        its_networks: Sequence[str] = (),
        image: str | None = None,
        limits: LeaseLimits | None = None,
        network: bool | None = None,
    ) -> Slot:
        """Lease another slot beside one, on a network of their own; see `atropos.slots.SlotPool.join`."""
        work = self.awaited.join(
            slot.awaited,
            names,
            its_names=its_names,
            networks=networks,
            its_networks=its_networks,
            image=image,
            limits=limits,
            network=network,
        )
        return Slot(event_loop().run(work))

    def stats(self) -> PoolStats:
        """One consistent count of everything."""
        return event_loop().run(_called(self.awaited.stats))

    def metrics(self) -> list[Family]:
        """The pool's metrics; `atropos.metrics.exposition` writes them for Prometheus."""
        return event_loop().run(_called(self.awaited.metrics))

    def trouble(self) -> str:
        """Why containers are not coming; empty when all is well."""
        return event_loop().run(_called(self.awaited.trouble))

    def outage(self) -> str:
        """Why the engine doesn't answer, while no container can be leased from; empty otherwise."""
        return event_loop().run(_called(self.awaited.outage))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


async def _called(function: Callable[[], T]) -> T:
    """What a plain function returns that must be called in the event loop."""
    return function()
