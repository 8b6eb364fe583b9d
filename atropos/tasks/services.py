"""The services beside a task's machine, as `docker compose up --wait` starts them: each in a slot of its own.

All are slots of one group (`SlotPool.join`): they know each other by name, and end together. A volume is a folder of
the first service that mounts it, which the others see. What a service does is the task's: one that ends, or never
becomes healthy, breaks the task. What its slot does is the infrastructure's.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shlex
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from atropos.tasks.shortage import check_room
from atropos.wire import HealthConfig, OpError, WriteFile

POLL_S = 1.0
"""Longest pause between two checks of a service's health: it is waited for more closely than watched."""
INTERVAL_S, TIMEOUT_S, RETRIES = 30.0, 30.0, 3
"""Of a health check that says none, as Docker has them."""
_AGAIN = {"on-failure": 'until "$@"; do sleep 1; done', "always": 'while :; do "$@"; sleep 1; done'}
"""The lines that start a command again, by `Service.restart`."""
_APART = "/.volumes"
"""Where a slot keeps the volumes that don't lie in their own places."""


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

    @contextlib.contextmanager
    def blamed(self, volume: ServiceVolume) -> Generator[None]:
        """Within, errors name the volume: the task's fault, where it isn't the infrastructure's."""
        try:
            yield
        except (SlotFileError, TaskBroken) as error:
            why = error.strerror if isinstance(error, SlotFileError) else error
            raise self.broken(f"can't have volume {volume.name} at {volume.target}: {why}") from error

    @property
    def check(self) -> HealthConfig | None:
        """By what it is known to be healthy, if by anything."""
        return self.machine.recipe.settings.healthcheck

    async def output(self) -> str:
        """The last that its main process printed."""
        return "" if self.process is None else (await self.process.read()).decode(errors="replace")


_Place = tuple[_Part, str]
"""Where what a volume shows is kept: the service in whose slot it is, and the path there."""


async def start(
    slot: Slot, task: Task, images: TaskImages, env: Mapping[str, str] | None = None, *, network: bool
) -> None:
    """Start what a container of the machine would start, with its volumes and the services beside it.

    Args:
        slot: with the machine; leased with the task's `limits`, which keep room for the others.
        task: whose machine it is.
        images: where the others' images are built.
        env: variables of its main process, beside those of its image.
        network: whether services have the pool's network where the compose file leaves the agent's slot alone offline.

    Raises:
        TaskBroken: a service can't be started, ended, or did not become healthy.
        NotSupported: it did so by a limit of its slot that is lower than the task asks for.
        SandboxError: the infrastructure failed.
    """
    if task.service is None:
        await workspace.start_main_process(slot, task, env)
        return
    try:
        await _start_all(slot, task, task.service, images, env, network)
    except TaskBroken:
        await check_room(task, [slot])
        raise


async def _start_all(
    slot: Slot, task: Task, own: Service, images: TaskImages, env: Mapping[str, str] | None, network: bool
) -> None:
    parts = {own.name: _Part(own, task, slot)}
    with_own = (None if network else False) if own.offline else slot.network  # None: as the pool has it
    for machine in task.beside:
        assert machine.service is not None
        parts[machine.service.name] = await _joined(slot, own, machine, images, with_own)
    ordered = [parts[each.name] for each in start_order((own, *own.beside), task.name)]
    for part in ordered:
        await _know_hosts(part)
        # Before the volumes, which may be mounted in it.
        for folder, mode in part.service.tmpfs.items():
            await _make_empty(part, folder, mode)
    await _mount_volumes(ordered)
    for part in ordered:
        for name, condition in part.service.depends_on.items():
            await _meet(parts[name], condition)
        if part.slot is slot:
            part.process = await workspace.start_main_process(slot, task, env)
        else:
            await _start(part)
    for part in ordered:  # the HEALTHCHECK of the agent's own image may be of its CMD, which isn't started
        await _check(part, awaited=part.slot is not slot or own.healthcheck is not None)


async def _joined(slot: Slot, own: Service, machine: Task, images: TaskImages, network: bool | None) -> _Part:
    """A slot for a service, in the group of the task's own."""
    assert machine.service is not None
    prepared = await images.prepare(machine)
    joined = await images.pool.join(
        slot,
        machine.service.names,
        its_names=own.names,
        networks=machine.service.networks,
        its_networks=own.networks,
        image=prepared.image,
        limits=machine.limits,
        network=False if machine.offline else network,
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
        # By a shell within the slot: it restarts the command without a call, also while the pool is busy.
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


async def _check(part: _Part, *, awaited: bool) -> None:
    """Once all are started: each is healthy, if that is awaited, or has not failed, before the agent begins."""
    if part.check is not None and awaited:
        await _become_healthy(part)
    elif part.process is not None and await part.process.poll():
        raise part.broken(f"ended with {part.process.exit_code}", await part.output())


async def _become_healthy(part: _Part) -> None:
    """Wait for as long as Docker would until it calls the service unhealthy."""
    check = part.check
    if check is None:
        raise part.broken("has no healthcheck, and its health is waited for; write one")
    if part.healthy:
        return
    kind, *words = check.test
    command = words if kind == "CMD" else (*part.machine.recipe.settings.shell, *words)
    interval_s, timeout_s = check.interval_s or INTERVAL_S, check.timeout_s or TIMEOUT_S
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        result = await part.slot.exec(command, timeout_s=timeout_s)
        # One success is enough, as with Docker.
        if result.exit_code == 0:
            part.healthy = True
            return
        # Nothing that has ended becomes healthy: no need to wait for the retries.
        if part.process is not None and await part.process.poll() is not None:
            raise part.broken(f"ended with {part.process.exit_code}", await part.output())
        now = time.monotonic()
        # Docker checks after each interval, and each check takes its time; failures within the start period don't
        # count.
        if now - began >= check.start_period_s + (check.retries or RETRIES) * (interval_s + now - asked):
            failure = command_failure("its healthcheck", result)
            raise part.broken(f"did not become healthy: {failure}", await part.output())
        # More often than Docker, so that the agent begins sooner; for as long as Docker.
        await asyncio.sleep(min(POLL_S, interval_s))


# ------------------------------------------------------------------------------------------------------------- volumes


async def _mount_volumes(parts: Sequence[_Part]) -> None:
    """Have the services see what they share, before any of them is started."""
    mounts = [(part, volume) for part in parts for volume in part.service.volumes]
    mounts.sort(key=lambda each: _depth(each[1]))  # the outer ones first
    shared: dict[str, list[tuple[_Part, ServiceVolume]]] = {}
    for part, volume in mounts:
        shared.setdefault(volume.name, []).append((part, volume))
    places: dict[str, _Place] = {}
    sources: dict[Path, _Place] = {}
    filled: list[tuple[_Part, ServiceVolume, str]] = []
    missing: list[tuple[_Part, ServiceVolume, str]] = []
    for name, users in shared.items():
        source = users[0][1].source
        place = _place_of(source, sources)
        if place is None:
            part, volume = await _owner(users)
            # In its own place nothing has to be mounted. But others may write to what is read-only here.
            path = f"{_APART}/{len(places)}" if volume.read_only or _lies_in_another(part, volume) else volume.target
            place = part, path
            filled.append((part, volume, path))
        elif source is not None and not source.exists():  # Docker makes it, too
            missing.append((place[0], users[0][1], place[1]))
        places[name] = place
        if source is not None:
            sources.setdefault(source, place)
    filled.sort(key=lambda each: _depth(each[1]), reverse=True)  # the inner ones first: they hold what is there yet
    for part, volume, path in (*filled, *missing):
        with part.blamed(volume):
            await _fill(part.slot, volume, path)
    for part, volume in mounts:
        owner, path = places[volume.name]
        if owner is not part or path != volume.target:
            with part.blamed(volume):
                await part.slot.mount(path, volume.target, of=owner.slot, read_only=volume.read_only)


def _depth(volume: ServiceVolume) -> tuple[int, int]:
    return volume.target.count("/"), 0 if volume.source is None else len(volume.source.parts)


def _lies_in_another(part: _Part, volume: ServiceVolume) -> bool:
    """Whether a volume is mounted in another one, which others may see without it."""
    around = PurePosixPath(volume.target).parents
    return any(PurePosixPath(other.target) in around for other in part.service.volumes)


def _place_of(source: Path | None, sources: Mapping[Path, _Place]) -> _Place | None:
    """The place of a path of the task's folder, if it is in a slot already."""
    if source is None:
        return None
    for folder, (part, path) in sources.items():
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


async def _know_hosts(part: _Part) -> None:
    """Have programs know the names that the service has beside those of the others."""
    hosts = part.service.extra_hosts.items()
    lines = "".join(f"\n{address}\t{name}" for name, addresses in hosts for address in addresses)
    if lines:
        written = await part.slot.run(WriteFile(path="/etc/hosts", data=f"{lines}\n".encode(), append=True, mode=0o644))
        if isinstance(written, OpError):
            raise part.broken(f"can't have extra_hosts: {written.message}")


async def _make_empty(part: _Part, folder: str, mode: str) -> None:
    """What a new file system in memory would be: nothing of the image's is there, and anyone writes there."""
    path = shlex.quote(folder)
    result = await exec_plain(
        part.slot, f"mkdir -p {path} && find {path}/ -mindepth 1 -delete && chmod {mode} {path}", user="0"
    )
    if result.exit_code != 0:
        raise part.broken(f"can't have tmpfs at {folder}", result.output)


async def _fill(slot: Slot, volume: ServiceVolume, place: str) -> None:
    """Make what a volume holds at first, in its place."""
    path, target, source = shlex.quote(place), shlex.quote(volume.target), volume.source
    script = f"mkdir -p {path}" if source is None else f"rm -rf {path} && mkdir -p {path}"
    if source is None and place != volume.target:
        script += f" && if [ -d {target} ]; then cp -a {target}/. {path}; fi"
    if source is not None and source.is_file():
        script = f"mkdir -p {shlex.quote(posixpath.dirname(place))}"
    result = await exec_plain(slot, script, user="0")
    if result.exit_code != 0:
        raise command_failure("mkdir", result)
    if source is None or not source.exists():
        return
    if source.is_dir():
        await upload(slot, source, place)
        return
    try:
        data = await asyncio.to_thread(source.read_bytes)
    except OSError as error:
        raise SandboxError(str(error)) from error
    await slot.write_file(place, data, source.stat().st_mode & 0o777)
