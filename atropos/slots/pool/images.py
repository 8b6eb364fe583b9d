"""Images in the pool's containers: prepared in all of them.

A lease waits until all have its image, or one that has room.

A lease that finds its image missing in one container (it came later, or the image was removed there) prepares it then,
in `SandboxClient.acquire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import stat
import tempfile
from asyncio import ALL_COMPLETED, FIRST_COMPLETED
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from atropos.aio import Tasks
from atropos.errors import ConfigError, ImageUnavailable, SandboxError, SlotLost
from atropos.images.locks import locked
from atropos.images.reference import SERVERS_OWN, ImageSource, is_built
from atropos.resources import Resources
from atropos.slots.backends.docker.settings import DockerSettings
from atropos.slots.client.server_images import Archive
from atropos.slots.containers.link import ContainerLink
from atropos.slots.containers.seats import Seat
from atropos.slots.containers.state import SharedState
from atropos.slots.pool.image_pulls import Pulls
from atropos.slots.pool.image_sources import LocalImage, local_image
from atropos.wire import ImageInfo, ImageState

log = logging.getLogger("atropos.slots")
ARCHIVES = 4
"""Archives of local images that are on this machine's disk at once: a server unpacks three images at a time."""
ASK_AGAIN_S = 60.0
"""Pause before a container is asked again for an image that it could not prepare, while others have it: it may be of an
architecture that the image lacks."""
Progress = Callable[[str, ImageState], None]
"""Called with a container's id and how far the image is prepared there; of a build, with no id."""


class PoolImages:
    """Prepares images, each once a container however many leases ask."""

    def __init__(self, state: SharedState, links: dict[str, ContainerLink]) -> None:
        self._state = state
        self._links = links
        self._tasks: dict[ContainerLink, dict[str, asyncio.Task[ImageInfo]]] = {}
        """Each container's preparations, by the image's name in leases."""
        # Keyed by task, not by name: a second attempt in the same container has a clean record.
        self._failed_at: dict[asyncio.Task[ImageInfo], tuple[ContainerLink, str, float]] = {}
        """Of failed ones the container, the name, and when, on the pool's clock."""
        self._pulls = Pulls(self._tasks_of, state.now)
        self._reads = Tasks("images")
        self._local: dict[str, asyncio.Task[LocalImage]] = {}
        """By their sources."""
        self.archives: dict[str, Archive] = {}
        """Of local images, by their names in leases; of equal ones, the one that was asked for last."""
        self._archive_turns = asyncio.Semaphore(ARCHIVES)
        self._turns = WeakValueDictionary[tuple[str, Resources], asyncio.Lock]()
        """Of leases of one size whose image some containers still prepare."""

    async def prepare(
        self, image: str, progress: Progress | None = None, *, everywhere: bool = True
    ) -> ImageInfo | None:
        """Have every container that can be leased from pull and unpack an image.

        Args:
            image: what `ImageSource` parses.
            progress: called while this waits.
            everywhere: wait for all of them; else for the first.

        Returns:
            What the image is; None where no container is there yet.

        Raises:
            ConfigError: it names no image, or no local one.
            ImageUnavailable: no container could prepare it, or not within `prepare_timeout_s`; says which phase failed.
            SlotLost: the containers ended meanwhile.
        """
        waits = True

        def report(container: str, state: ImageState) -> None:
            if waits and progress is not None:
                progress(container, state)

        try:
            # who wants it in all of them asks all of them, now
            source, name, begun = await self._begin(image, report, at_once=everywhere)
            tasks = [*begun.values()]
            while pending := [task for task in tasks if not task.done()]:
                if not everywhere and (ready := [task for task in tasks if task.done() and not _failed(task)]):
                    return ready[0].result()
                await asyncio.wait(pending, return_when=ALL_COMPLETED if everywhere else FIRST_COMPLETED)
            return _outcome(source, name, tasks)
        finally:
            waits = False

    async def ready(self, image: str, room: Resources) -> str:
        """The image's name in leases, once every container has it, or one that has room for the lease.

        Args:
            image: as for `prepare`.
            room: what the lease takes.

        Raises:
            ConfigError, ImageUnavailable, SlotLost: as `prepare`.
        """
        source, name, begun = await self._begin(image)

        def under_way() -> bool:
            return any(link.seat.open and not task.done() for link, task in begun.items())

        if under_way():
            turns = self._turns.setdefault((name, room), asyncio.Lock())
            with self._in_demand(room):
                async with turns:  # first come, first served; and only the first looks each time there may be room
                    while under_way():
                        if self.pin(name, room) is not None:
                            return name
                        self._state.room.clear()
                        await self._state.room.wait()
                        # A container that came while this waited has begun nothing yet, and may be the first with room.
                        begun |= self._prepare_in(name, [link for link in self._open() if link not in begun])
        _outcome(source, name, [task for task in begun.values() if task.done()])
        return name

    async def ready_in(self, link: ContainerLink, image: str) -> str:
        """The image's name in leases, once this container has it.

        Raises:
            ConfigError, ImageUnavailable, SlotLost: as `prepare`.
        """
        source, name, _ = await self._begin(image)
        # That container's own state decides, however many others have the image.
        task = self._task(link, name)
        await asyncio.wait([task])
        _outcome(source, name, [task])
        return name

    @contextlib.contextmanager
    def _in_demand(self, room: Resources) -> Generator[None]:
        """Around a lease's wait for its image: containers that start for it in the meantime pull the image, too."""
        with self._state.fleet.unprepared(room):
            self._state.replan()
            yield

    def pin(self, name: str, room: Resources) -> Seat | None:
        """The container that a lease on an image must go to, since others don't have it; None: any.

        Args:
            name: the image's name in leases.
            room: what the lease takes.
        """
        tasks = {link.seat: self._tasks.get(link, {}).get(name) for link in self._open()}
        here = [seat for seat, task in tasks.items() if task is not None and task.done() and not _failed(task)]
        # None has it: the request prepares it wherever it goes. All have it: no need to bind the lease.
        if not here or len(here) == len(tasks):
            return None
        if roomy := [seat for seat in here if seat.has_room(room)]:
            return min(roomy, key=lambda seat: seat.index)
        # While one still prepares it, the lease stays in the common line and may go there.
        others_may = any(task is None or not task.done() for task in tasks.values())
        return None if others_may else random.choice(here)  # not all wait for the same one

    async def _begin(
        self, image: str, progress: Progress | None = None, *, at_once: bool = False
    ) -> tuple[ImageSource, str, dict[ContainerLink, asyncio.Task[ImageInfo]]]:
        """An image, its name in leases, and its preparation in each container that can be leased from."""
        source = ImageSource.parse(image)
        name = str(source)
        if source.transport not in SERVERS_OWN:
            local = await self._read(source)
            name = local.name
            self.archives[name] = local.opened
        # Here, where each lease comes by, so that ended containers need no hook of their own.
        self._tasks = {link: tasks for link, tasks in self._tasks.items() if link.gone is None}
        self._forget_failed()
        return source, name, self._prepare_in(name, self._open(), progress, at_once=at_once)

    def _prepare_in(
        self, name: str, links: Sequence[ContainerLink], progress: Progress | None = None, *, at_once: bool = False
    ) -> dict[ContainerLink, asyncio.Task[ImageInfo]]:
        return {link: self._task(link, name, progress, at_once=at_once) for link in links}

    def _open(self) -> list[ContainerLink]:
        """The containers that can be leased from."""
        return [link for link in self._links.values() if link.seat.open]

    async def find(self, source: str) -> ImageInfo | None:
        """The image of a source that only servers know, from the first container that has it."""
        holder = await self._holder(source, self._open())
        return None if holder is None else holder[1]

    async def _holder(self, source: str, links: Sequence[ContainerLink]) -> tuple[ContainerLink, ImageInfo] | None:
        """The first of these containers whose host has an image that only servers know, and the image.

        Raises:
            SandboxError: none has it, and one that may have it could not be asked.
        """
        unknown: SandboxError | None = None
        for link in links:
            try:
                if (info := await link.client.images.find(source)) is not None:
                    return link, info
            except SandboxError as error:
                # A container that ended has no answer to give; one that lives and could not be asked may have the
                # image.
                if link.gone is None and not isinstance(error, SlotLost):
                    unknown = error
        if unknown is not None:
            raise unknown
        return None

    @contextlib.asynccontextmanager
    async def building(self, key: str, waiting: Callable[[], None]) -> AsyncGenerator[ImageInfo | None]:
        """Context in which the image of a key is made: one builder at a time, over all processes of this machine.

        Yields the image if it exists. `waiting` is called while another one builds it.

        Raises:
            ConfigError: another user has taken the name of the locks' folder.
        """
        config, folder = self._state.config, _locks_folder()
        # Hashed: the key is an arbitrary string, and a file name has at most 255 bytes (NAME_MAX).
        place = hashlib.sha256(f"{config.backend} {config.image_store.folder} {key}".encode()).hexdigest()
        with self._state.counters.measure(self._state.counters.build.observe) as outcome:
            async with locked(folder / place, waiting):
                info = await self.find(f"atropos-build:{key}")
                outcome.result = "ok" if info is None else "found"
                yield info

    def _task(
        self, link: ContainerLink, name: str, progress: Progress | None = None, *, at_once: bool = False
    ) -> asyncio.Task[ImageInfo]:
        tasks = self._tasks.setdefault(link, {})
        task = tasks.get(name)
        if task is None or (_failed(task) and (at_once or not self._pausing(link, task, name))):
            work = self._prepare(link, name, progress)
            task = tasks[name] = self._state.tasks.spawn(work, f"prepare {name}", awaited=True)
            task.add_done_callback(lambda task: self._prepared(link, name, task))
        return task

    def _pausing(self, link: ContainerLink, failed: asyncio.Task[ImageInfo], name: str) -> bool:
        """Whether a container that failed waits before it is asked again, since leases go to others.

        Not where one of these can give it a registry's image.
        """
        elsewhere = [each for each, task in self._tasks_of(name).items() if task.done() and not _failed(task)]
        shareable = name.startswith("docker://") and any(each.architecture == link.architecture for each in elsewhere)
        return failed in self._failed_at and bool(elsewhere) and not shareable

    def _prepared(self, link: ContainerLink, name: str, task: asyncio.Task[ImageInfo]) -> None:
        if _failed(task):  # retrieved, since no one may be waiting for it
            self._failed_at[task] = link, name, self._state.now()
        self._state.look_again()

    def _forget_failed(self) -> None:
        """Forget the containers that may be asked again for an image."""
        for task, (link, name, at) in list(self._failed_at.items()):  # the oldest first
            if self._state.now() < at + ASK_AGAIN_S:
                return
            del self._failed_at[task]
            tasks = self._tasks.get(link, {})
            if tasks.get(name) is task:
                del tasks[name]

    async def _prepare(self, link: ContainerLink, name: str, progress: Progress | None) -> ImageInfo:
        seen = "requested"

        def report(state: ImageState) -> None:
            nonlocal seen
            seen = state.phase if state.done is None else f"{state.phase} {state.done:.0%}"
            if progress is not None:
                progress(link.container.id, state)

        within_s = self._state.config.prepare_timeout_s
        # The container counts as used: shrinking would otherwise end it in the middle of a long pull.
        link.seat.pin()
        with self._state.counters.measure(self._state.counters.prepare.observe):
            try:
                # Plain wall time here: the work is the server's, and goes on while this process stalls.
                async with asyncio.timeout(within_s):
                    if is_built(name):
                        return await self._built(link, name)
                    if name.startswith("docker://"):
                        return await self._pulls.bring(link, name, report)
                    return await link.client.images.prepare(name, progress=report)
            except TimeoutError:
                raise ImageUnavailable(f"image {name}: not prepared within {within_s:g} s: {seen}") from None
            except SandboxError as error:
                if link.gone is None:
                    raise
                raise SlotLost(
                    f"image {name}: container {link.container.id} prepares it no more: {link.gone}"
                ) from error
            finally:
                link.seat.unpin(self._state.now())

    async def _built(self, link: ContainerLink, name: str) -> ImageInfo:
        """A built image; copied from another container's host where it is missing, after its parent."""
        here = await link.client.images.find(name)
        if here is not None:
            return here
        machine = link.architecture
        alike = (each for each in self._links.values() if each.architecture == machine)
        others = [each for each in alike if each is not link and each.gone is None]
        if (holder := await self._holder(name, others)) is None:
            of = f" of {machine}" if self._state.fleet.mixed else ""
            raise ImageUnavailable(f"image {name}: no container's host{of} has it")
        giver, image = holder
        below = image.parent_source or ""
        if not below.startswith("atropos-base:"):
            # Layers of a build lie on their parent's: it has to be there first. Shared with others, thus shielded.
            await asyncio.shield(self._task(link, below))
        return await giver.client.images.copy(image, link.client.images)

    def _tasks_of(self, name: str) -> dict[ContainerLink, asyncio.Task[ImageInfo]]:
        """An image's preparations."""
        return {link: task for link, tasks in self._tasks.items() if (task := tasks.get(name)) is not None}

    def forget(self, name: str) -> None:
        """Forget that containers have the image."""
        for tasks in self._tasks.values():
            # One under way stays: the leases that wait for it would never be woken.
            if name in tasks and tasks[name].done():
                del tasks[name]

    async def _read(self, source: ImageSource) -> LocalImage:
        """The image of a local source: concurrent calls share one, which is finished even when they are cancelled."""
        key = str(source)
        reading = self._local.get(key)
        if reading is None or _failed(reading):
            work = asyncio.to_thread(
                local_image, source, self._state.config.of(DockerSettings).docker_host, self._archive_turns
            )
            reading = self._local[key] = self._reads.spawn(work, f"read {key}", awaited=True)
        return await asyncio.shield(reading)

    async def aclose(self) -> None:
        """Give up the archives that were made for good."""
        if self._local:
            await asyncio.wait(self._local.values())
        for reading in self._local.values():
            if not _failed(reading):
                reading.result().close()
        self._local.clear()


def _locks_folder() -> Path:
    """The folder in which builds of this user, in any process, lock each other out."""
    # Below the temporary folder, which all processes of a user share whatever their working folder or pool.
    folder = Path(tempfile.gettempdir(), f"atropos-builds-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # /tmp is everyone's: another user may have made the name first, or a link to a folder of theirs (CWE-377).
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"TMPDIR: {folder} is not a folder of this user's own; remove it, or name another TMPDIR")
    return folder


def _outcome(source: ImageSource, name: str, tasks: Sequence[asyncio.Task[ImageInfo]]) -> ImageInfo | None:
    """What an image is, once its preparations have ended; an error is one only where all failed."""
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors and len(errors) == len(tasks):
        if name != str(source) and isinstance(errors[0], ImageUnavailable):  # servers know it by its digest alone
            raise ImageUnavailable(str(errors[0]).replace(name, str(source))) from errors[0]
        raise errors[0]
    for error in errors:
        log.warning("not every container has the image: %s", error)
    return next((task.result() for task in tasks if task.exception() is None), None)


def _failed(task: asyncio.Task[object]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
