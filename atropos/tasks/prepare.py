"""Prepares tasks: pulls their images, builds their Dockerfiles step by step, and keeps each step as an image.

The image store of the host keeps a step's result under its key (`builder.plan`), so that a step runs once a host, also
for other tasks and other runs; a build that is there already is one look-up. Every trajectory then leases the last
step's image.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fnmatch
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from atropos.errors import ConfigError, ImageUnavailable, SandboxError
from atropos.images.manifests import MACHINE
from atropos.images.reference import POOL_BASE
from atropos.slots import Share, Slot, SlotPool
from atropos.slots.slot.results import SlotFileError
from atropos.tasks.builder import steps
from atropos.tasks.builder.plan import LAST, RULES, Plan, PlannedStep, StageImages, describe, key_of, plan_of, text_of
from atropos.tasks.builder.transfer import PackedFiles, pack_files
from atropos.tasks.errors import TaskBroken
from atropos.tasks.fit import STAND_INS
from atropos.tasks.format.recipe import (
    SHELL,
    BuildInputs,
    Copy,
    Download,
    Folder,
    Mount,
    Run,
    Step,
    StepSettings,
    copies,
)
from atropos.tasks.format.task import Task
from atropos.tasks.shortage import check_room
from atropos.wire import ImageInfo, ImageSettings, ImageState

Progress = Callable[[ImageState], None]


@dataclass(frozen=True)
class Prepared:
    """A task whose slots can be leased.

    Attributes:
        task: the task, with what its images set.
        image: source of its slots' image.
        bytes: what was built on the image that the task names.
    """

    task: Task
    image: str
    bytes: int


@dataclass(frozen=True)
class _PreparedBefore:
    """A task that was prepared once, what it became, and the key of its last step."""

    original: Task
    task: Task
    key: str


@dataclass
class _Build:
    """One task's build: its stages by number, and what has been done of them."""

    task: Task
    plan: Plan
    progress: Progress
    steps: int
    end: float
    done: set[str] = field(default_factory=set[str])

    def left(self) -> float:
        remaining_s = self.end - time.monotonic()
        if remaining_s <= 0:
            raise TaskBroken(f"{self.task.name}: its build took longer than environment.build_timeout_sec")
        return remaining_s

    @contextlib.asynccontextmanager
    async def lease(self, lease: AbstractAsyncContextManager[Slot]) -> AsyncGenerator[Slot]:
        """A slot of the build; the time until one is free is not the task's."""
        asked = time.monotonic()
        async with lease as slot:
            self.end += time.monotonic() - asked
            yield slot

    @contextlib.asynccontextmanager
    async def turn(self, pool: SlotPool, planned: PlannedStep) -> AsyncGenerator[ImageInfo | None]:
        """A step's turn, and its image if it exists; the time for which another builder works on it is not the task's.

        Raises:
            ImageUnavailable: another one works on it for longer than it may.
        """
        asked = time.monotonic()
        most_s = self.task.config.environment.build_timeout_sec + pool.config.acquire_timeout_s

        def waiting() -> None:
            if time.monotonic() - asked > most_s:
                raise ImageUnavailable(
                    f"{self.task.name}: {text_of(planned.step)}: another builder on this machine is not done after "
                    f"{most_s:g} s"
                )
            self.progress(ImageState(source=self.task.name, phase="waiting"))

        async with pool.building(planned.key, waiting) as image:
            self.end += time.monotonic() - asked
            yield image


class TaskImages:
    """The images of tasks on one pool.

    Args:
        pool: where they are built and leased.
        stand_ins: patterns of images in whose place the pool's own base is used.
        share: whose leases the steps are; None: the pool's own.
        owner: whose images they are: a step may have had what only its owner reaches, so that no other finds it. Not
            to be guessed where others may name `atropos-build:KEY`.
    """

    def __init__(
        self, pool: SlotPool, stand_ins: Sequence[str] = STAND_INS, *, share: Share | None = None, owner: str = ""
    ) -> None:
        self.pool = pool
        self._share = share
        self._owner = owner
        self._stand_ins = tuple(stand_ins)
        self._scratch = ""
        self._scratch_turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._before: dict[int, _PreparedBefore] = {}
        """By the identity of the task that was given: for each trajectory on it, nothing is read and no file hashed
        again."""
        self.counters: Counter[str] = Counter()
        """`steps`: carried out; `hits`: tasks that were there already."""

    async def prepare(self, task: Task, progress: Progress = lambda _: None) -> Prepared:
        """Pull what a task names and build its workspace, unless that is done.

        Of one `Task`, files that change after the first time are read again only where its image is gone.

        Raises:
            TaskBroken: a step failed, or no image has such a name; says which, with the last lines of its output.
            ConfigError: a file of the task can't be packed.
            ImageUnavailable: an image that the task names can't be had, which may be the registry's or the host's
                fault.
            SandboxError: the infrastructure failed otherwise.
        """
        prepared, image = await self._reported(task, progress, self._prepare)
        return Prepared(prepared, image.source, image.bytes)

    async def build(self, task: Task, progress: Progress = lambda _: None) -> ImageInfo:
        """As `prepare`, to an image that carries the task's environment, folder and user for any lease on it.

        Raises:
            TaskBroken, ConfigError, SandboxError: as `prepare`.
        """
        return (await self._reported(task, progress, self._with_settings))[1]

    async def _reported(
        self, task: Task, report: Progress, work: Callable[[Task, Progress], Awaitable[tuple[Task, ImageInfo]]]
    ) -> tuple[Task, ImageInfo]:
        report(ImageState(source=task.name, phase="queued"))
        try:
            try:
                prepared, image = await work(task, report)
            except OSError as error:  # of this machine, as of the disk with the task's files
                raise SandboxError(f"{task.name}: {error}") from error
        except (TaskBroken, SandboxError) as error:
            report(ImageState(source=task.name, phase="failed", error=str(error)))
            raise
        report(ImageState(source=image.source, phase="ready", done=1.0, image=image))
        return prepared, image

    async def _with_settings(self, task: Task, report: Progress) -> tuple[Task, ImageInfo]:
        prepared, image = await self._prepare(task, report)
        of = prepared.agent_settings
        settings = ImageSettings(env=dict(of.env), workdir=of.workdir, user=of.user)
        key = key_of(RULES, image.id, "settings", settings.model_dump())
        # Only one builder of a key at a time; the others find what it made.
        async with self.pool.building(key, lambda: None) as existing:
            if existing is not None:
                return prepared, existing
            async with self._lease(task, image.source) as slot:
                return prepared, await slot.keep(key, settings)

    async def pull(self, task: Task) -> Task:
        """Pull the images that a task names, unless that is done. Returns the task with what they set.

        Raises:
            TaskBroken: it can't be built, or no image has such a name.
            ImageUnavailable: an image can't be had; says why.
        """
        pulled, _ = await self._pulled(task, lambda _: None)
        return await _with_machines(pulled, self.pull)

    async def _pulled(self, task: Task, report: Progress) -> tuple[Task, StageImages]:
        prebuilt = task.config.environment.docker_image
        prebuilt = None if prebuilt is None or self._stands_in(prebuilt) else prebuilt
        if prebuilt is None and task.unbuildable is not None:
            raise TaskBroken(f"{task.name}: {task.unbuildable}")
        # A set: several stages may stand on the same image.
        built_from = {task.recipe.image, *(stage.image for stage in task.recipe.stages)}
        names = built_from if prebuilt is None else {prebuilt}
        images = dict(zip(names, await asyncio.gather(*(self._image(task, n, report) for n in names)), strict=True))
        pulled = {name: image for name, (image, _) in images.items() if name is not None and not self._stands_in(name)}
        settings = {name: _settings(image) for name, image in pulled.items()}
        if settings or self.pool.architecture != MACHINE:
            task = task.on(BuildInputs(settings, self.pool.architecture), prebuilt=prebuilt is not None)
        return task, images

    async def _prepare(self, original: Task, report: Progress) -> tuple[Task, ImageInfo]:
        # By identity, as comparing tasks would read all of their texts; `_PreparedBefore` keeps the task, so its id
        # stays taken.
        before = self._before.get(id(original))
        if before is not None and (image := await self.pool.find_built(before.key)) is not None:
            await _with_machines(original, lambda machine: self._ready(machine, report))
            self.counters["hits"] += 1
            return before.task, image
        task, images = await self._pulled(original, report)
        task = await _with_machines(task, lambda machine: self._ready(machine, report))
        # In a thread: it reads and hashes every file that is copied.
        plan = await asyncio.to_thread(plan_of, task.recipe, task.build_context, images, self._owner)
        key = plan[LAST].steps[-1].key
        image = await self.pool.find_built(key)
        if image is None:
            count = sum(len(stage.steps) for stage in plan.values())
            end = time.monotonic() + task.config.environment.build_timeout_sec
            image = await self._stage(_Build(task, plan, report, count, end), LAST)
        else:
            self.counters["hits"] += 1
        self._before[id(original)] = _PreparedBefore(original, task, key)
        return task, image

    async def _ready(self, machine: Task, report: Progress) -> Task:
        return (await self._prepare(machine, report))[0]

    # ---------------------------------------------------------------------------------------------------------- images

    def _stands_in(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self._stand_ins)

    async def _image(self, task: Task, name: str | None, report: Progress) -> tuple[ImageInfo, str]:
        """What a FROM means here, and the source that a lease names."""
        if name is not None and name.startswith("dir:") and not self._stands_in(name):
            folder = Path(name.removeprefix("dir:"))
            if not os.path.lexists(folder / "bin/sh") or folder.samefile("/"):
                raise TaskBroken(
                    f"{task.name}: {name}: a task takes no folder of this machine, unless it is another root file "
                    "system, with /bin/sh; COPY from the build context"
                )
        if name != "scratch":
            source = POOL_BASE if name is None or self._stands_in(name) else name
            return await self._prepare_source(task, source, name, report)
        async with self._scratch_turn:  # the folder is there until the pool has read it, and keeps what it read
            with tempfile.TemporaryDirectory(prefix="atropos-scratch-") as empty:
                self._scratch = self._scratch or f"dir:{empty}"
                return await self._prepare_source(task, self._scratch, name, report)

    async def _prepare_source(
        self, task: Task, source: str, name: str | None, report: Progress
    ) -> tuple[ImageInfo, str]:
        def seen(_: str, state: ImageState) -> None:
            if state.phase not in {"ready", "failed"}:
                report(state.model_copy(update={"source": name or source}))

        try:
            image = await self.prepare_when_up(source, seen)
        except ConfigError as error:
            raise TaskBroken(f"{task.name}: {error}") from error
        except ImageUnavailable as error:
            raise ImageUnavailable(f"{task.name}: {error}") from error
        return image, source

    async def prepare_when_up(
        self, source: str, progress: Callable[[str, ImageState], None] | None = None
    ) -> ImageInfo:
        """What a source is, prepared in one container at least, which is started if none is up.

        Raises:
            ImageUnavailable, ConfigError: it is unavailable.
            AcquireTimeout: no container came up.
        """
        while (image := await self.pool.prepare(source, progress=progress, everywhere=False)) is None:
            # One lease at a time: many tasks that begin at once should start one container, and not each its own.
            async with self._starting, self.pool.lease("prepare", share=self._share):
                pass  # containers are started only for leases
        return image

    # ----------------------------------------------------------------------------------------------------------- steps

    def _lease(
        self, task: Task, source: str, what: str = "", *, offline: bool = False
    ) -> AbstractAsyncContextManager[Slot]:
        limits = task.limits and task.limits.model_copy(update={"members": ()})
        network = False if offline else None
        return self.pool.lease(
            f"build-{task.name}{what}", image=source, limits=limits, network=network, share=self._share
        )

    async def _stage(self, build: _Build, number: int) -> ImageInfo:
        """A stage's last image: from the last step that is there already."""
        stage = build.plan[number]
        current, source, there = stage.parent, stage.source, 0
        for count in range(len(stage.steps), 0, -1):
            image = await self.pool.find_built(stage.steps[count - 1].key)
            if image is not None:
                current, source, there = image, image.source, count
                break
        build.done.update(planned.key for planned in stage.steps[:there])
        for planned in stage.steps[there:]:
            async with build.turn(self.pool, planned) as existing:
                current = existing or await self._step(build, planned, source)
            build.done.add(planned.key)
            source = current.source
        return current

    async def _step(self, build: _Build, planned: PlannedStep, source: str) -> ImageInfo:
        step = planned.step
        archives = {copy: await self._taken(build, copy.stage, copy) for copy in copies(step) if copy.stage is not None}
        fetched = await self._fetched(build, step) if isinstance(step, Download) else b""
        number = len(build.done) + 1
        build.progress(ImageState(source=text_of(step), phase="building", step=number, steps=build.steps))
        self.counters["steps"] += 1
        try:
            offline = isinstance(step, Run) and step.offline
            async with build.lease(self._lease(build.task, source, offline=offline)) as slot:
                try:
                    await self._carry_out(build, slot, step, archives, fetched)
                except TaskBroken as error:
                    await check_room(build.task, [slot], str(error))
                    raise
                await self._check_unchanged(build, planned)
                return await slot.keep(planned.key)
        except TaskBroken as error:
            raise TaskBroken(f"{build.task.name}: step {number}/{build.steps}: {error}") from None
        except SlotFileError as error:
            refused = os.strerror(errno.EINVAL) in str(error)  # the kernel's id for an owner that has no number here
            ids = "; slots have the owners 0 to 65535, and where an ordinary user started the server, root alone"
            raise TaskBroken(
                f"{build.task.name}: step {number}/{build.steps} ({text_of(step)}): {error}{ids if refused else ''}"
            ) from error

    async def _check_unchanged(self, build: _Build, planned: PlannedStep) -> None:
        """Raise `TaskBroken` where a step copied other files than its key says."""
        context = build.task.build_context
        if await asyncio.to_thread(describe, planned.step, context, build.plan) != planned.described:
            raise TaskBroken(f"{text_of(planned.step)}: a file of the build context changed meanwhile; build again")

    async def _carry_out(
        self, build: _Build, slot: Slot, step: Step, taken: Mapping[Copy, Sequence[PackedFiles]], fetched: bytes
    ) -> None:
        if isinstance(step, Run):
            covered: list[tuple[Mount, tuple[str, ...]]] = []
            for mount in step.mounts:
                covered.append((mount, await steps.begin_mount(slot, mount)))
                if mount.content is not None:
                    await self._carry_out(build, slot, mount.content, taken, b"")
            await steps.run(slot, step, build.left())
            # The other way round, as a mount may lie in an earlier one.
            for mount, folders in reversed(covered):
                await steps.end_mount(slot, mount, folders)
        elif isinstance(step, Folder):
            await steps.make_workdir(slot, step)
        elif isinstance(step, Download):
            await steps.add_download(slot, step, fetched)
        elif step in taken:
            await steps.copy_from_stage(slot, step, taken[step])
        elif step.unpack:
            await steps.unpack(slot, step, build.task.build_context)
        else:
            await steps.copy(slot, step, build.task.build_context)

    async def _taken(self, build: _Build, stage: int, step: Copy) -> list[PackedFiles]:
        planned = build.plan[stage]
        image = await self._stage(build, stage)
        # A stage of FROM alone builds nothing.
        source = image.source if planned.steps else planned.source
        async with build.lease(self._lease(build.task, source, "-from")) as slot:
            try:
                return await pack_files(slot, step.sources, parents=step.parents)
            except TaskBroken as error:
                raise TaskBroken(f"{build.task.name}: COPY --from: {error}") from None

    async def _fetched(self, build: _Build, step: Download) -> bytes:
        async with build.lease(self.pool.lease(f"build-{build.task.name}-add", share=self._share)) as slot:
            try:
                return await steps.fetch(slot, step, build.left())
            except TaskBroken as error:
                raise TaskBroken(f"{build.task.name}: {error}") from None


async def build_task(task: Task, pool: SlotPool, progress: Progress) -> ImageInfo:
    """`TaskImages.build` with its defaults, for `SlotPool.prepare`."""
    return await TaskImages(pool).build(task, progress)


async def _with_machines(task: Task, ready: Callable[[Task], Awaitable[Task]]) -> Task:
    """A task with the machines of its services and separate verifiers made ready as well."""
    verifier = None if task.verifier is None else await ready(task.verifier)
    beside = tuple([await ready(each) for each in task.beside])
    steps = [await _with_machines(replace(step, beside=()), ready) for step in task.steps]
    return replace(task, verifier=verifier, beside=beside, steps=tuple(replace(step, beside=beside) for step in steps))


def _settings(image: ImageInfo) -> StepSettings:
    """What an image's configuration gives the instructions after FROM."""
    return StepSettings(
        workdir=image.workdir or "/",
        env=image.env,
        user=image.user,
        onbuild=image.onbuild,
        entrypoint=image.entrypoint,
        cmd=image.cmd,
        shell=image.shell or SHELL,
        healthcheck=image.healthcheck,
        volumes=image.volumes,
    )
