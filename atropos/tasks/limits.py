"""Whether a slot has what a task asks for: sizes, the base image, the network. A pure decision, made before anything runs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atropos.tasks.config import OLD_MEMORY_MB, OLD_STORAGE_MB
from atropos.tasks.folder import Task

STAND_INS = ("debian*", "ubuntu*", "python:3*", "buildpack-deps*", "ghcr.io/laude-institute/*", "*t-bench/*")
"""Images whose place a slot's own base takes, a Debian-like system with bash, Python 3, git and a C compiler. All others
are pulled."""
Policy = Literal["old", "clamp", "refuse"]
"""What becomes of a wish beyond a slot's size: sizes that an old schema wrote out as its defaults are lowered to what
there is (`old`), every size is, or none."""


@dataclass(frozen=True)
class Room:
    """What a slot has.

    Attributes:
        cpus: None: no limit.
        volume: where its files live; in memory they count against `memory_mib`.
        network: whether programs have egress at all.
        egress: hosts that they may reach.
    """

    memory_mib: int
    disk_mib: int
    cpus: float | None = None
    volume: Literal["memory", "disk"] = "memory"
    network: bool = True
    egress: tuple[str, ...] = ("public",)


@dataclass(frozen=True)
class Fit:
    """How a task fits into a slot.

    Attributes:
        refused: what the slot doesn't give, each as `field: reason; cure`.
        clamped: wishes that were lowered to what the slot has.
        notes: what is different here and may matter.
    """

    refused: tuple[str, ...] = ()
    clamped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Wish:
    field: str
    text: str
    fits: bool
    cure: str
    old: bool = False
    """Written out by an old schema, and no wish of the author's."""


def fit(task: Task, room: Room, *, images: Sequence[str] = STAND_INS, policy: Policy = "old") -> Fit:
    """Compare what a task asks for with what a slot has.

    Args:
        task: a checked task.
        room: of every slot of the pool.
        images: patterns of images that the slots' base stands in for.
        policy: what becomes of sizes that don't fit.
    """
    refused, clamped, notes = list[str](), list[str](), list[str]()
    for wish in _wishes(task, room):
        if wish.fits:
            continue
        if policy == "clamp" or (policy == "old" and wish.old):
            clamped.append(f"{wish.field}: {wish.text}")
        else:
            refused.append(f"{wish.field}: {wish.text}; {wish.cure}")
    image = task.image
    if image is not None:
        field = "environment.docker_image" if task.config.environment.docker_image else "FROM"
        if any(fnmatch.fnmatch(image, pattern) for pattern in images):
            notes.append(f"{field}: the slots' base stands in for {image}")
    for one in task.steps or (task,):
        _network(one, room, refused, notes)
    return Fit(tuple(dict.fromkeys(refused)), tuple(clamped), tuple(dict.fromkeys(notes)))


def _wishes(task: Task, room: Room) -> list[_Wish]:
    wants, old = task.config.environment, task.config.old
    found: list[_Wish] = []
    old_memory = old and wants.memory_mb == OLD_MEMORY_MB
    if wants.memory_mb is not None:
        found.append(
            _Wish(
                "environment.memory_mb",
                f"{wants.memory_mb} wanted, slots have {room.memory_mib}",
                wants.memory_mb <= room.memory_mib,
                f"raise slot_memory_mib to {wants.memory_mb}",
                old_memory,
            )
        )
    if wants.storage_mb is not None:
        found.append(_storage(wants.storage_mb, 0 if old_memory else wants.memory_mb or 0, room, old=old))
    if wants.cpus is not None and room.cpus is not None:
        text = f"{wants.cpus:g} wanted, slots have {room.cpus:g}"
        found.append(_Wish("environment.cpus", text, wants.cpus <= room.cpus, "raise slot_cpu_quota"))
    return found


def _storage(storage: int, memory: int, room: Room, *, old: bool) -> _Wish:
    """Files in memory need room beside what the programs use."""
    is_default = old and storage == OLD_STORAGE_MB
    if storage > room.disk_mib:
        text, cure = f"{storage} wanted, slots have {room.disk_mib}", f"raise slot_disk_mib to {storage}"
        return _Wish("environment.storage_mb", text, False, cure, is_default)
    fits = room.volume == "disk" or memory + storage <= room.memory_mib
    text = f"{storage} of files in memory beside {memory} for programs wanted, slots have {room.memory_mib} for both"
    cure = f"raise slot_memory_mib to {memory + storage}, or keep slots' files on disk"
    return _Wish("environment.storage_mb", text, fits, cure, is_default)


def _network(task: Task, room: Room, refused: list[str], notes: list[str]) -> None:
    config = task.config
    table = "agent" if config.agent.network_mode else "environment"
    if task.network == "allowlist" and room.network and set(task.allowed_hosts) != set(room.egress):
        refused.append(
            f"{table}.allowed_hosts: {', '.join(task.allowed_hosts) or 'none'}: a pool has one allow-list for all slots; "
            "set egress_allow to these hosts, or allow no network"
        )
    if task.network == "public" and not room.network:
        notes.append(f"{table}.network_mode: slots have no network")
    if config.agent.network_mode == "no-network" and config.environment.network_mode != "no-network":
        notes.append("agent.network_mode: the workspace is built without network as well")
    verifier = config.verifier.network_mode
    if verifier is not None and verifier != task.network:
        if task.network == "public":
            notes.append(f"verifier.network_mode: {verifier}: tests have the agent's network")
        elif config.verifier.mode == "shared":
            refused.append(
                f"verifier.network_mode: {verifier}: tests in the agent's slot have the agent's network; "
                "set environment_mode to separate"
            )


def needed(tasks: Sequence[Task], least: Room, *, most_mib: int) -> Room:
    """The smallest room in which all these tasks fit, old defaults aside.

    Args:
        tasks: checked tasks.
        least: no less than this.
        most_mib: more memory than this is given to no slot.
    """
    memory, disk = least.memory_mib, least.disk_mib
    for task in tasks:
        wants, old = task.config.environment, task.config.old
        own = 0 if wants.memory_mb is None or (old and wants.memory_mb == OLD_MEMORY_MB) else wants.memory_mb
        files = 0 if wants.storage_mb is None or (old and wants.storage_mb == OLD_STORAGE_MB) else wants.storage_mb
        both = own + (files if least.volume == "memory" else 0)
        if both <= most_mib:
            memory, disk = max(memory, both), max(disk, files)
    return Room(memory, disk, least.cpus, least.volume, least.network, least.egress)
