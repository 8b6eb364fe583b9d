"""Whether a slot has what a task asks for: sizes, the base image, the network.

A pure decision, made before anything runs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from atropos.config import SandboxSettings
from atropos.errors import ConfigError
from atropos.net import egress_policy
from atropos.net.egress_policy import WEB_PORTS, EgressRefused, Rule, parse
from atropos.resources import NOTHING, Resources
from atropos.slots import SlotPoolConfig
from atropos.tasks.format.config import OLD_MEMORY_MB, OLD_STORAGE_MB
from atropos.tasks.format.service import Service
from atropos.tasks.format.task import Task
from atropos.wire import MAX_HOSTS, LeaseLimits, Limit

STAND_INS = ("debian*", "ubuntu*", "python:3*", "buildpack-deps*", "ghcr.io/laude-institute/*", "*t-bench/*")
"""Images whose place a slot's own base takes, a Debian-like system with bash, Python 3, git and a C compiler. All
others are pulled."""
Policy = Literal["old", "clamp", "refuse"]
"""What becomes of a wish beyond a slot's size: sizes that an old schema wrote out as its defaults are lowered to what
there is (`old`), every size is, or none, when these defaults count as wishes like any other."""


@dataclass(frozen=True)
class Note:
    """What is different in a slot, and may matter. `setting`: what changes it; None: nothing does."""

    text: str
    setting: Literal["images", "network", "egress"] | None = None


@dataclass(frozen=True)
class Room:
    """What a slot has, and what a lease may ask for beyond that.

    Attributes:
        slot: of a plain slot; no cores: a share of the machine's.
        most_mib: memory of the largest lease, a whole container's; None: a slot's.
        gpu_refusal: of the pool's settings.
        volume: where its files live; in memory they count against that, and `auto` keeps on disk what doesn't fit.
        largest_disk_mib: with `auto`: most files of a lease on disk; None: as many as are wanted.
        network: whether programs have egress at all.
        egress: hosts that they may reach.
    """

    slot: Resources
    volume: Literal["auto", "memory", "disk"] = "auto"
    largest_disk_mib: int | None = None
    network: bool = True
    egress: tuple[str, ...] = ("public",)
    most_mib: int | None = None
    gpu_refusal: Callable[[int, Sequence[str]], str] = SandboxSettings().gpu_refusal

    @classmethod
    def of(cls, pool: SlotPoolConfig) -> Self:
        """What the slots of a pool have."""
        return cls(
            pool.limits.resources,
            volume=pool.volume,
            largest_disk_mib=pool.largest_disk_mib,
            network=pool.allow_network,
            egress=tuple(pool.egress_allow),
            most_mib=(pool.slot_room * pool.slots_per_container).memory_mib,
            gpu_refusal=pool.gpu_refusal,
        )

    @property
    def most(self) -> int:
        """Memory of the largest lease, in MiB."""
        return self.most_mib or self.slot.memory_mib

    def beyond(self, wanted: Resources, gpu_types: Sequence[str] = ()) -> LeaseLimits | None:
        """What a lease asks for that wants so much, and GPUs of one of these types; None: a plain slot has it."""
        slot = self.slot
        limits = LeaseLimits(
            memory_mib=wanted.memory_mib if wanted.memory_mib > slot.memory_mib else None,
            disk_mib=wanted.disk_mib if wanted.disk_mib > slot.disk_mib else None,
            cpu_quota=wanted.cpus if wanted.cpus > (slot.cpus or 1) else None,
            gpus=wanted.gpus or None,
            gpu_types=tuple(gpu_types) if wanted.gpus else (),
        )
        return None if limits == LeaseLimits() else limits

    def memory_of(self, limits: LeaseLimits | None) -> int:
        """What a lease takes of its container's memory, with those that join it, in MiB."""
        if limits is None:
            return self.slot.memory_mib
        return max(limits.memory_mib or 0, self.slot.memory_mib) + sum(map(self.memory_of, limits.members))

    def on_disk(self, limits: LeaseLimits | None) -> int:
        """Files of a lease that are kept on disk, in MiB; 0: they are in memory."""
        files = 0 if limits is None or self.volume != "auto" else limits.disk_mib or 0
        memory = None if limits is None else limits.memory_mib
        return files if files > (memory or self.slot.memory_mib) else 0


@dataclass(frozen=True)
class TaskFit:
    """How a task fits into a slot.

    Attributes:
        refused: what the slot doesn't give, each as `field: reason; cure`.
        clamped: wishes that were lowered to what there is.
        limits: what its leases ask for, with the services beside it; None: a plain slot will do.
        verifier: likewise, of machines of separate verifiers.
        lowered: for each limit below what the task asks for, why, and the cure.
        beside: likewise, of each of the services beside it.
    """

    refused: tuple[str, ...] = ()
    clamped: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    limits: LeaseLimits | None = None
    verifier: LeaseLimits | None = None
    lowered: Mapping[Limit, str] = field(default_factory=dict["Limit", str])
    beside: tuple[Mapping[Limit, str], ...] = ()

    def sized(self, task: Task) -> Task:
        """The task with these sizes."""
        verifier = None if task.verifier is None else replace(task.verifier, limits=self.verifier)
        steps = tuple(self.sized(step) for step in task.steps)
        members = self.limits.members if self.limits is not None else ()
        beside = tuple(
            replace(each, limits=limits, lowered=lowered)
            for each, limits, lowered in zip(task.beside, members, self.beside, strict=True)
        )
        return replace(task, limits=self.limits, verifier=verifier, beside=beside, steps=steps, lowered=self.lowered)


def fit(task: Task, room: Room, *, images: Sequence[str] = STAND_INS, policy: Policy = "old") -> TaskFit:
    """Compare what a task asks for with what a lease can have.

    Args:
        task: a checked task.
        room: of the pool.
        images: patterns of images that the slots' base stands in for.
        policy: what becomes of sizes that don't fit.
    """
    sizes = _Sizes(room, policy)
    limits = room.beyond(sizes.wanted(task, "environment"), task.config.environment.gpu_types)
    others = [(one, replace(sizes, lowered={})) for one in task.beside]  # what is refused is the task's
    if others:
        members = tuple(room.beyond(each.wanted(one, _table(one))) or LeaseLimits() for one, each in others)
        limits = (limits or LeaseLimits()).model_copy(update={"members": members})
    refused, clamped, notes = sizes.refused, sizes.clamped, list[Note]()
    together = room.memory_of(limits)
    if task.beside and room.most_mib is not None and together > room.most_mib:
        refused.append(
            f"services: {len(task.beside) + 1} slots take {together} MiB of memory together, a container has "
            f"{room.most_mib}; raise slots_per_container, or slot_memory_mib, for {together}"
        )
    verifier = room.beyond(
        NOTHING.most(*(sizes.wanted(one, "verifier.environment") for one in task.verifiers)),
        sorted({each for one in task.verifiers for each in one.config.environment.gpu_types}),
    )
    _stand_in(task, images, refused, notes)
    if servers := task.config.environment.mcp_servers:
        names = ", ".join(server.name for server in servers)
        notes.append(Note(f"environment.mcp_servers: the prompt names {names}; nothing starts or connects to them"))
    for one in task.steps or (task,):
        _network(one, room, refused, notes)
    return TaskFit(
        tuple(dict.fromkeys(refused)),
        tuple(dict.fromkeys(clamped)),
        tuple(dict.fromkeys(notes)),
        limits,
        verifier,
        sizes.lowered,
        tuple(each.lowered for _, each in others),
    )


def _stand_in(task: Task, images: Sequence[str], refused: list[str], notes: list[Note]) -> None:
    """Add what is to be said of images in whose place slots have their base."""
    for one in task.machines:
        image = one.image
        if image is None or not any(fnmatch.fnmatch(image, pattern) for pattern in images):
            continue
        table = "" if one is task else "verifier." if one in task.verifiers else f"{_table(one)}."
        field = f"{table}environment.docker_image" if one.config.environment.docker_image else f"{table}FROM"
        notes.append(Note(f"{field}: the slots' base stands in for {image}", "images"))
        if one.unbuildable is not None:
            refused.append(f"{one.unbuildable}; or pull {image}, which `task_images` has the slots' base stand in for")


def largest_on_disk(tasks: Iterable[Task], room: Room) -> int | None:
    """Most files that a lease of these tasks has on disk, which come with their sizes; None: all are in memory."""
    machines = [one for task in tasks for one in (task, *task.verifiers)]
    return max((room.on_disk(one.limits) for one in machines), default=0) or None


def _table(machine: Task) -> str:
    """Where the compose file speaks of a service's machine."""
    return f"services.{machine.service.name}" if machine.service is not None else "services"


@dataclass
class _Sizes:
    """Memory, files, cores and GPUs of one task, and what its requests led to."""

    room: Room
    policy: Policy
    refused: list[str] = field(default_factory=list[str])
    clamped: list[str] = field(default_factory=list[str])
    lowered: dict[Limit, str] = field(default_factory=dict["Limit", str])

    def wanted(self, task: Task, table: str) -> Resources:
        """What a lease for the task needs. `table`: where task.toml says so."""
        wants, room = task.config.environment, self.room
        old = task.config.old and self.policy != "refuse"
        memory, storage = wants.memory_mb or 0, wants.storage_mb or 0
        service = task.service or Service()
        # a default of the schema, not a request of the author
        written_out = old and memory == OLD_MEMORY_MB != service.memory_mib
        if memory > room.most:
            text = f"{table}.memory_mb: {memory} wanted, slots have at most {room.most}"
            cure = f"raise slot_memory_mib or slots_per_container for {memory}"
            self._lower(text, cure, "memory", old=written_out)
            memory = room.slot.memory_mib if written_out else room.most
        own = 0 if written_out else memory
        files, needed = self._files(storage, own, memory, f"{table}.storage_mb", old=old and storage == OLD_STORAGE_MB)
        if (shared := service.shm_mib or 0) > max(files, room.slot.disk_mib):  # in Docker it is part of the memory
            files, least = self._files(shared, 0, memory, f"{_table(task)}.shm_size", old=False)
            needed = max(needed, least)
        if refused := room.gpu_refusal(wants.wanted_gpus, wants.gpu_types):
            self.refused.append(f"{table}.{refused}")
        return Resources(memory_mib=max(memory, needed), disk_mib=files, cpus=wants.cpus or 0, gpus=wants.wanted_gpus)

    def _files(self, storage: int, own: int, memory: int, field: str, *, old: bool) -> tuple[int, int]:
        """Room for files, and the memory of a lease that has it beside what programs have of their own.

        Files on disk need no memory, and those of a lowered wish lie in what the lease has.
        """
        room = self.room
        if storage > room.slot.disk_mib and (room.volume == "disk" or old):  # a default doesn't justify a larger lease
            there = room.slot.disk_mib
            if room.volume != "disk":
                there = max(there, min(storage, memory or room.slot.memory_mib))
            text = f"{field}: {storage} wanted, slots have {there}"
            self._lower(text, f"raise slot_disk_mib to {storage}", "disk", old=old)
            return there, 0
        if room.volume == "auto" and own + storage > room.most:
            # more files than memory are what a lease has on disk
            files = max(storage, max(memory, room.slot.memory_mib, room.slot.disk_mib) + 1)
            most = files if room.largest_disk_mib is None else room.largest_disk_mib
            if files > most:
                text = f"{field}: {storage} wanted, more than fits in memory, and leases have {most} on disk"
                self._lower(text, f"raise largest_disk_mib to {files}", "disk", old=old)
            return min(files, most), 0
        if room.volume == "memory" and own + storage > room.most:
            text = (
                f"{field}: {storage} of files in memory beside {own} for programs wanted, slots have at "
                f"most {room.most} for both"
            )
            cure = f"raise slot_memory_mib or slots_per_container for {own + storage}, or keep slots' files on disk"
            self._lower(text, cure, "disk", old=old)
            return max(room.slot.disk_mib, min(storage, memory or room.slot.memory_mib)), 0
        return storage, 0 if room.volume == "disk" else own + storage

    def _lower(self, text: str, cure: str, limit: Limit, *, old: bool) -> None:
        if self.policy == "clamp" or (self.policy == "old" and old):
            self.clamped.append(text)
            self.lowered[limit] = f"{text}; {cure}"
        else:
            self.refused.append(f"{text}; {cure}")


def _network(task: Task, room: Room, refused: list[str], notes: list[Note]) -> None:
    """What the phases ask for; the pool's own list bounds them all."""
    pool = egress_policy.Policy.of_slots(room.egress)
    for table, hosts in (("agent", task.agent_hosts), ("verifier", task.verifier_hosts)):
        if not room.network:
            if hosts != ():
                notes.append(Note(f"{table}.network_mode: slots have no network", "network"))
            continue
        if hosts is not None and len(hosts) > MAX_HOSTS:
            refused.append(
                f"{table}.allowed_hosts: {len(hosts)} hosts; at most {MAX_HOSTS}, networks and *.suffixes name many"
            )
        for host in hosts or ():
            try:
                rule = parse(host, field=f"{table}.allowed_hosts")
            except ConfigError as error:
                refused.append(str(error))
                continue
            if not _reached(rule, pool):
                text = f"{table}.allowed_hosts: {host} is not reached; the pool's egress_allow leaves it out"
                notes.append(Note(text, "egress"))


def _reached(rule: Rule, pool: egress_policy.Policy) -> bool:
    """Whether the pool's list has some of what a rule is about."""
    host = str(rule.network.network_address) if rule.network is not None else rule.host.replace("*", "any")
    for port in rule.ports or WEB_PORTS:
        try:
            pool.judge_name(host, port)
        except EgressRefused:
            continue
        return True
    return False
