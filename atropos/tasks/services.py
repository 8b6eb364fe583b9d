"""The services beside a task's machine, as `docker compose up --wait` starts them: each in a slot of its own.

All are slots of one group (`SlotPool.join`): they know each other by name, and end together. A volume is a folder of
the first service that mounts it, which the others see. What a service does is the task's: one that ends, or never
becomes healthy, breaks the task. What its slot does is the infrastructure's.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from atropos.errors import SandboxError
from atropos.slots import Slot
from atropos.slots.slot.processes import Process
from atropos.slots.slot.results import SlotFileError
from atropos.tasks import workspace
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.builder.transfer import command_failure, exec_plain, upload
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.service import Condition, Service, ServiceVolume, start_order
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import TaskImages

POLL_S = 1.0
"""Longest pause between two checks of a service's health: it is waited for more closely than watched."""
_AGAIN = {"on-failure": 'until "$@"; do sleep 1; done', "always": 'while :; do "$@"; sleep 1; done'}
"""The lines that start a command again, by `Service.restart`."""


@dataclass
class _Part:
    """A service, and the slot that it is in."""

    service: Service
    machine: Task
    slot: Slot
    process: Process | None = None
    healthy: bool = False

    def broken(self, why: str, output: str = "") -> TaskBroken:
        printed = f": {output[-300:].strip()}" if output else ""
        return TaskBroken(f"{self.machine.path.name}: service {self.service.name} {why}{printed}")

    async def output(self) -> str:
        """The last that its main process printed."""
        return "" if self.process is None else (await self.process.read()).decode(errors="replace")


_Place = tuple[_Part, str]


async def start(slot: Slot, task: Task, images: TaskImages, env: Mapping[str, str] | None = None) -> None:
    """Start what a container of the machine would start, with its volumes and the services beside it.

    Args:
        slot: with the machine; leased with the task's `limits`, which keep room for the others.
        task: whose machine it is.
        images: where the others' images are built.
        env: variables of its main process, beside those of its image.

    Raises:
        TaskBroken: a service can't be started, ended, or did not become healthy.
        SandboxError: the infrastructure failed.
    """
    if task.service is None:
        await workspace.start_main_process(slot, task, env)
        return
    own = task.service
    parts = {own.name: _Part(own, task, slot)}
    for machine in task.beside:
        assert machine.service is not None
        parts[machine.service.name] = await _joined(slot, own, machine, images)
    ordered = [parts[each.name] for each in start_order((own, *own.beside), task.name)]
    try:
        await _mount_volumes(ordered)
    except SlotFileError as error:
        raise TaskBroken(f"{task.name}: its volumes can't be made: {error}") from error
    for part in ordered:
        for name, condition in part.service.depends_on.items():
            await _meet(parts[name], condition)
        if part.slot is slot:
            part.process = await workspace.start_main_process(slot, task, env)
        else:
            await _start(part)
    for part in ordered:
        await _check(part)


async def _joined(slot: Slot, own: Service, machine: Task, images: TaskImages) -> _Part:
    """A slot for a service, in the group of the task's own."""
    assert machine.service is not None
    prepared = await images.prepare(machine)
    joined = await images.pool.join(
        slot,
        machine.service.names,
        its_names=own.names,
        image=prepared.image,
        limits=machine.limits,
        network=slot.network and not machine.offline,
    )
    if joined.network:
        await joined.set_network(machine.agent_hosts)
    joined.profile = await profile_of(joined, prepared.task, prepared.task.container_settings)
    return _Part(machine.service, prepared.task, joined)


async def _start(part: _Part) -> None:
    settings = part.machine.recipe.settings
    words: Sequence[str] = (*settings.entrypoint, *(settings.command or settings.cmd))
    if not words:
        raise part.broken("has nothing to start: its image has no CMD here; write command")
    if part.service.restart != "no":
        words = ("/bin/sh", "-c", _AGAIN[part.service.restart], "sh", *words)
    try:
        part.process = await part.slot.start(words)
    except SlotFileError as error:
        raise part.broken(f"can't start {words[0]}: {error}") from error


# ---------------------------------------------------------------------------------------------------------- conditions


async def _meet(part: _Part, condition: Condition) -> None:
    """Wait until a service is what another one depends on."""
    if condition == "service_healthy":
        await _become_healthy(part)
    elif condition == "service_completed_successfully":
        if part.process is None:
            raise part.broken("is the agent's own, and doesn't end before it begins")
        code = await part.process.wait(part.machine.config.environment.build_timeout_sec)
        if code != 0:
            how = "did not end within environment.build_timeout_sec" if code is None else f"ended with {code}"
            raise part.broken(how, await part.output())


async def _check(part: _Part) -> None:
    """Once all are started: each is healthy, or has not failed, before the agent begins."""
    if part.service.healthcheck is not None:
        await _become_healthy(part)
    elif part.process is not None and await part.process.poll():
        raise part.broken(f"ended with {part.process.exit_code}", await part.output())


async def _become_healthy(part: _Part) -> None:
    """Wait for as long as Docker would until it calls the service unhealthy."""
    check = part.service.healthcheck
    if check is None or part.healthy:
        return
    left_s = check.start_period_sec + check.retries * check.interval_sec
    while True:
        result = await part.slot.exec(check.command, timeout_s=check.timeout_sec)
        if result.exit_code == 0:
            part.healthy = True
            return
        if part.process is not None and await part.process.poll() is not None:
            raise part.broken(f"ended with {part.process.exit_code}", await part.output())
        if left_s <= 0:
            failure = command_failure("its healthcheck", result)
            raise part.broken(f"did not become healthy: {failure}", await part.output())
        pause_s = min(POLL_S, check.interval_sec)
        left_s -= pause_s
        await asyncio.sleep(pause_s)


# ------------------------------------------------------------------------------------------------------------- volumes


async def _mount_volumes(parts: Sequence[_Part]) -> None:
    """Have the services see what they share, before any of them is started."""
    shared: dict[str, list[tuple[_Part, ServiceVolume]]] = {}
    mounts = ((part, volume) for part in parts for volume in part.service.volumes)
    for part, volume in sorted(mounts, key=lambda each: _depth(each[1])):  # the outer ones first
        shared.setdefault(volume.name, []).append((part, volume))
    places = _Places()
    later: list[tuple[_Part, ServiceVolume, _Place]] = []
    for users in sorted(shared.values(), key=lambda users: _depth(users[0][1])):
        place, owner = places.of_source(users[0][1].source), None
        if place is None:
            owner = await _owner(users)
            await _fill(owner[0].slot, owner[1])
            place = places.of_path(owner[0], owner[1].target)
        for part, volume in users:
            places.add(part, volume, place)
            if (part, volume) != owner:
                await _mount(part, volume, place)
            elif volume.read_only:
                later.append((part, volume, place))
    for part, volume, place in later:  # last, since others may still be filled there
        await _mount(part, volume, place)


async def _mount(part: _Part, volume: ServiceVolume, place: _Place) -> None:
    await part.slot.mount(place[1], volume.target, of=place[0].slot, read_only=volume.read_only)


def _depth(volume: ServiceVolume) -> tuple[int, int]:
    return volume.target.count("/"), 0 if volume.source is None else len(volume.source.parts)


@dataclass
class _Places:
    """Where what volumes show is kept: of each the service that has it as a folder of its own, and the path there."""

    mounted: dict[tuple[str, str], _Place] = field(default_factory=dict[tuple[str, str], "_Place"])
    """By service and target."""
    sources: dict[Path, _Place] = field(default_factory=dict[Path, "_Place"])

    def add(self, part: _Part, volume: ServiceVolume, place: _Place) -> None:
        """A service mounts what is in a place."""
        self.mounted[part.service.name, volume.target] = place
        if volume.source is not None:
            self.sources.setdefault(volume.source, place)

    def of_path(self, part: _Part, path: str) -> _Place:
        """The place of a path, which may lie in what the service mounts."""
        for folder in PurePosixPath(path).parents:
            if (place := self.mounted.get((part.service.name, str(folder)))) is not None:
                return place[0], posixpath.join(place[1], PurePosixPath(path).relative_to(folder).as_posix())
        return part, path

    def of_source(self, source: Path | None) -> _Place | None:
        """The place of a path of the task's folder, if it is in a slot already."""
        if source is None:
            return None
        for folder, (part, path) in self.sources.items():
            if source == folder or folder in source.parents:
                return part, posixpath.normpath(posixpath.join(path, source.relative_to(folder).as_posix()))
        return None


async def _owner(users: Iterable[tuple[_Part, ServiceVolume]]) -> tuple[_Part, ServiceVolume]:
    """The first whose image has something in a volume's place, which a new volume of Docker's holds, too."""
    first, *others = users
    for part, volume in (first, *others) if others and first[1].source is None else ():
        path = shlex.quote(volume.target)
        if (await exec_plain(part.slot, f'[ -d {path} ] && [ -n "$(ls -A {path})" ]', user="0")).exit_code == 0:
            return part, volume
    return first


async def _fill(slot: Slot, volume: ServiceVolume) -> None:
    """Make what a volume holds at first."""
    path, source = shlex.quote(volume.target), volume.source
    script = f"mkdir -p {path}" if source is None else f"rm -rf {path} && mkdir -p {path}"
    if source is not None and source.is_file():
        script = f"mkdir -p {shlex.quote(posixpath.dirname(volume.target))}"
    made = await exec_plain(slot, script, user="0")
    if made.exit_code != 0:
        raise command_failure(f"the volume at {volume.target}", made)
    if source is None or not source.exists():
        return
    if source.is_dir():
        await upload(slot, source, volume.target)
        return
    try:
        data = await asyncio.to_thread(source.read_bytes)
    except OSError as error:
        raise SandboxError(str(error)) from error
    await slot.write_file(volume.target, data, source.stat().st_mode & 0o777)
