"""Templates of a key: images that are built of instructions, with names, tags and the builds under way."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from atropos.aio import Tasks
from atropos.api.accounts.account import Account
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.messages import NewTemplate, StartBuild
from atropos.api.e2b.recipes import BuildPlan, SandboxStart, plan_of, task_of
from atropos.api.e2b.roots import Root, is_base, root_of
from atropos.api.e2b.sandbox import iso
from atropos.api.e2b.uploads import MAX_UPLOAD_BYTES, Uploads
from atropos.errors import ConfigError, SandboxError
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import TaskImages
from atropos.wire import ImageState, LeaseLimits

if TYPE_CHECKING:
    from atropos.slots import SlotPool

MAX_TEMPLATES = 1000
MAX_BUILDS = 20
"""Builds of a key that are under way, or asked for and not started."""
WAITING_S = 3600.0
"""How long a build that is asked for may take to be started."""
KEPT_BUILDS = 50
"""Builds of a template that are remembered though no tag names them."""
MAX_LOGS = 1000
LOG_PAGE = 100
"""Most log entries of one answer."""
_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,127}$")
_UPLOADED = re.compile(r"\b[0-9a-f]{64}/")
"""The folder of an upload, which its client doesn't know."""
_DEFAULT_TAG = "default"


@dataclass(eq=False)
class Build:
    """One build of a template.

    Attributes:
        image: source of the image that it made.
        reason: why it failed.
        step: the instruction at which it failed, or `base`.
        limits: of its slots, and its sandboxes'.
    """

    template: Template
    limits: LeaseLimits | None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: Literal["waiting", "building", "ready", "error"] = "waiting"
    image: str = ""
    start: SandboxStart = field(default_factory=SandboxStart)
    reason: str = ""
    step: str = "base"
    logs: list[Json] = field(default_factory=list[Json])
    task: asyncio.Task[None] | None = None
    asked: float = field(default_factory=time.monotonic)

    @property
    def pending(self) -> bool:
        """Whether it needs its files yet: it is under way, or its client has time to start it."""
        waits = self.status == "waiting" and time.monotonic() < self.asked + WAITING_S
        return waits or self.status == "building"

    def log(self, message: str, level: str = "info") -> None:
        """Add an entry, if it says anything new."""
        entry = {"message": message, "level": level, "step": self.step}
        if len(self.logs) < MAX_LOGS and (not self.logs or self.logs[-1]["message"] != message):
            self.logs.append({"timestamp": iso(time.time()), **entry})

    def info(self, offset: int, limit: int) -> Json:
        """As clients see it."""
        failed: Json = {"reason": {"message": self.reason, "step": self.step}} if self.status == "error" else {}
        return {
            "templateID": self.template.id,
            "buildID": self.id,
            "status": self.status,
            "logs": [],
            "logEntries": self.logs[offset : offset + min(limit, LOG_PAGE)],
            **failed,
        }


@dataclass(eq=False)
class Template:
    """A template.

    Attributes:
        tags: (build, when it was tagged) by tag.
        uploads: of its pending builds.
    """

    name: str
    id: str = field(default_factory=lambda: secrets.token_hex(10))
    builds: dict[str, Build] = field(default_factory=dict[str, Build])
    tags: dict[str, tuple[Build, float]] = field(default_factory=dict[str, tuple[Build, float]])
    uploads: Uploads | None = None

    def tag(self, build: Build, tags: Iterable[str]) -> None:
        """Have tags name a build, as long as no other is tagged so."""
        self.tags.update(dict.fromkeys(tags, (build, time.time())))
        tagged = {each for each, _ in self.tags.values()}
        loose = [each for each in self.builds.values() if each not in tagged and not each.pending]
        for old in loose[:-KEPT_BUILDS]:
            del self.builds[old.id]

    async def tidy(self) -> None:
        """Remove files that no build needs any more."""
        uploads = self.uploads
        if uploads is not None and not any(build.pending for build in self.builds.values()):
            self.uploads = None
            await asyncio.to_thread(uploads.remove)

    def find(self, reference: str) -> Build | None:
        """A build by its id or a tag."""
        tagged = self.tags.get(reference)
        return self.builds.get(reference) if tagged is None else tagged[0]


class Templates:
    """All templates of a key. They are forgotten with the server; their images stay: building again is quick."""

    def __init__(self, pool: SlotPool, account: Account) -> None:
        self._pool = pool
        self._account = account
        self._all: dict[str, Template] = {}
        self._tasks = Tasks("template builds")

    def all(self) -> Iterable[Template]:
        """In the order in which they were made."""
        return self._all.values()

    def find(self, reference: str) -> Template | None:
        """A template by its id or name."""
        return self._all.get(reference) or next((each for each in self._all.values() if each.name == reference), None)

    def get(self, reference: str) -> Template:
        """As `find`.

        Raises:
            RpcError: there is none.
        """
        template = self.find(reference)
        if template is None:
            raise RpcError("not_found", f"template {reference[:200]!r} was not found")
        return template

    def build_of(self, reference: str) -> Build | None:
        """The build that `NAME[:TAG]` or `NAME:BUILD` means; None: no template is called so.

        Raises:
            RpcError: the template has no such build, or none that is ready.
        """
        name, _, tag = reference.partition(":")
        template = self.find(name)
        if template is None:
            return None
        build = template.find(tag or _DEFAULT_TAG)
        if build is None or build.status != "ready":
            text = f"tag {tag or _DEFAULT_TAG!r} does not exist for template {name!r}"
            raise RpcError("not_found", text if build is None else f"{text}: its build is {_STATES[build.status]}")
        return build

    def root_of(self, name: str) -> tuple[Root, SandboxStart]:
        """What a name means for a sandbox, as a template, a base or an image, and how the sandbox starts.

        Raises:
            ConfigError: nothing that clients may name.
            RpcError: the template is not built.
        """
        if (build := self.build_of(name)) is not None:
            return Root(image=build.image, limits=build.limits), build.start
        if name.startswith("code-interpreter") and not is_base(name, self._pool.config.bases):
            raise ConfigError(
                f"template {name!r}: it has a Jupyter server of E2B's, which slots lack; use `Sandbox` of "
                "the package e2b, or build a template of this name that has one (clients reach it by `e2b_domain`)"
            )
        return root_of(name, self._pool.config.bases, "template"), SandboxStart()

    # ------------------------------------------------------------------------------------------------------- builds

    async def request(self, wanted: NewTemplate) -> tuple[Build, tuple[str, ...]]:
        """Make a template, unless there is one of this name, and a build of it that is to be started.

        Returns:
            The build, and the tags that name it.

        Raises:
            ConfigError: the name or a size is wrong.
            RpcError: there are too many.
        """
        name, _, tag = (wanted.name or wanted.alias or "").partition(":")
        with self._account.noting_refusals("template", name[:128]):
            build = await self._requested(name, wanted)
        tags = tuple(dict.fromkeys([*filter(None, [tag]), *wanted.tags])) or (_DEFAULT_TAG,)
        build.template.tag(build, tags)
        return build, tags

    async def _requested(self, name: str, wanted: NewTemplate) -> Build:
        if not _NAME.match(name) or is_base(name, self._pool.config.bases):
            raise ConfigError(
                f"name: {name[:200]!r} is no name of a template of one's own: write a-z, 0-9, '.', '_' and '-', "
                "and no base of the server"
            )
        limits = self._limits(wanted)
        await asyncio.gather(*(each.tidy() for each in self._all.values()))
        template = self.find(name)
        if template is None:
            if len(self._all) >= MAX_TEMPLATES:
                raise RpcError("resource_exhausted", f"{MAX_TEMPLATES} templates exist: delete some")
            template = Template(name)
            self._all[template.id] = template
        pending = sum(build.pending for each in self._all.values() for build in each.builds.values())
        if pending >= MAX_BUILDS:
            raise RpcError(
                "resource_exhausted", f"the maximum number of concurrent template builds is {MAX_BUILDS}: wait for one"
            )
        build = Build(template, limits)
        template.builds[build.id] = build
        return build

    def _limits(self, wanted: NewTemplate) -> LeaseLimits | None:
        """What its slots have beyond the key's own.

        Raises:
            ConfigError: no slot of the key's has so much.
        """
        own, config = self._account.key.limits, self._pool.config
        usual = config.limits if own is None else config.limits_of(own)
        memory, cores = wanted.memory_mb or 0, wanted.cpu_count or 0
        if memory <= usual.memory_mib and (usual.cpu_quota is None or cores <= usual.cpu_quota):
            return own
        if own is not None:
            raise ConfigError(
                f"memoryMB: {memory}, cpuCount: {cores}: slots of this key have {usual.memory_mib} MiB and "
                f"{usual.cpu_quota or 'any number of'} cores"
            )
        larger = LeaseLimits(
            memory_mib=memory if memory > usual.memory_mib else None,
            cpu_quota=cores if usual.cpu_quota is not None and cores > usual.cpu_quota else None,
        )
        config.check_room(larger, config.slots_per_container)
        return larger

    def uploads_of(self, template: Template) -> Uploads:
        """Where the files of a template's builds are.

        Raises:
            RpcError: no build waits for any.
        """
        if template.uploads is None:
            if not any(build.pending for build in template.builds.values()):
                raise RpcError("not_found", f"no build of template {template.name!r} waits for files")
            quota = self._account.key.disk_mib
            template.uploads = Uploads(MAX_UPLOAD_BYTES if quota is None else min(MAX_UPLOAD_BYTES, quota << 20))
        return template.uploads

    def start(self, build: Build, wanted: StartBuild) -> None:
        """Start a build.

        Raises:
            ConfigError: an instruction is wrong, or what it builds on can't be.
            RpcError: files are missing, or it was started before.
        """
        if build.task is not None:
            raise RpcError("already_exists", f"build {build.id} was started before")
        if wanted.from_image_registry is not None:
            raise ConfigError("fromImageRegistry: this server pulls with its own credentials; leave them out")
        image, start = self._from(wanted)
        plan = plan_of(wanted, start, {})
        uploads = self.uploads_of(build.template)
        for number, step in enumerate(wanted.steps, 1):
            if step.files_hash is not None and step.files_hash not in uploads:
                raise RpcError("invalid_argument", f"steps.{number}: its files were not uploaded")
        task = task_of(build.template.name, wanted, image, start, uploads.folder, build.limits)
        self._account.note("template.build", build.template.id, name=build.template.name, image=image or "base")
        build.status = "building"
        build.task = self._tasks.spawn(self._run(build, task, wanted, plan), build.template.name)

    async def _run(self, build: Build, task: Task, wanted: StartBuild, plan: BuildPlan) -> None:
        def report(state: ImageState) -> None:
            if state.phase == "building" and (number := plan.origins[state.step - 1]):
                step = wanted.steps[number - 1]
                build.step = str(number)
                build.log(f"[{number}/{len(wanted.steps)}] {step.type} {' '.join(filter(None, step.args))}")
            elif state.phase in {"waiting", "pulling", "unpacking"}:
                build.log(f"{state.phase} {state.source}")

        again = secrets.token_hex(8) if wanted.force or any(step.force for step in wanted.steps) else ""
        share, owner = self._account.share, f"{self._account.key.sha256[0]} {again}"  # a name could be guessed
        try:
            if task.recipe.image is not None:
                share.use_image(task.recipe.image)
            prepared = await TaskImages(self._pool, (), share=share, owner=owner).prepare(task, report)
        except (TaskBroken, ConfigError, SandboxError) as error:
            build.reason = _UPLOADED.sub("", str(error).replace(f"{task.context}/", ""))
            build.log(build.reason, "error")
        else:
            build.image = prepared.image
            build.start = replace(plan.start, env=prepared.task.recipe.settings.env)
            build.status = "ready"
        finally:
            if build.status == "building":
                build.status = "error"
            await build.template.tidy()
            self._account.note("template.end", build.template.id, outcome=build.status)

    def _from(self, wanted: StartBuild) -> tuple[str | None, SandboxStart]:
        """What a build starts from, as a source of an image (None: the pool's base), and how its sandboxes start."""
        bases, template = self._pool.config.bases, wanted.from_template
        if template:
            if (build := self.build_of(template)) is not None:
                return build.image, replace(build.start, command="", ready="")
            if not is_base(template, bases):
                raise ConfigError(
                    f"fromTemplate: {template!r} is neither a template of this key nor a base of the server"
                )
        name = template or wanted.from_image
        if not name:
            raise ConfigError("fromImage: missing; name an image, or a template")
        root = root_of(name, bases, "fromImage")
        return root.image or (root.base and f"atropos-base:{root.base}"), SandboxStart()

    # --------------------------------------------------------------------------------------------------------- end

    async def drop(self, template: Template) -> None:
        """Forget a template, and end its builds."""
        del self._all[template.id]
        for build in template.builds.values():
            if build.task is not None:
                build.task.cancel()
        if template.uploads is not None:
            await asyncio.to_thread(template.uploads.remove)
        self._account.note("template.drop", template.id, name=template.name)

    async def aclose(self) -> None:
        """End all builds, and remove their files."""
        await self._tasks.cancel()
        for template in [*self._all.values()]:
            await self.drop(template)


_STATES = {"waiting": "not started", "building": "under way", "error": "broken"}
