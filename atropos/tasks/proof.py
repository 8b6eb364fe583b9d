"""Proofs that tasks can be solved where they are played: each by its own solution, kept by task and base.

A base without a program that a task needs makes every attempt fail, which says nothing about the agent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Literal

from atropos.errors import SandboxError
from atropos.slots import SlotFileError
from atropos.tasks.attempt import TaskRun
from atropos.tasks.builder.archive import digest_of
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.format.context import Context
from atropos.tasks.format.recipe import Copy
from atropos.tasks.format.task import Task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Mode

_log = logging.getLogger(__name__)
MOST_KEPT = 10_000
"""Proofs on this machine; the oldest go first."""
UNPREPARED = "it can't be prepared"


class Proofs:
    """Which tasks are solved by their own solutions.

    Args:
        layers: what is laid over the machine where tests run.
        mode: where tests run.
        network: whether tasks that want a network get the pool's.
        folder: where proofs are kept for later runs; None: ~/.cache/atropos/proofs.

    Attributes:
        found: by a task's name, why its solution doesn't score 1; None: it does.
    """

    def __init__(
        self, layers: VerifierLayers, *, mode: Literal["task"] | Mode, network: bool, folder: Path | None = None
    ) -> None:
        self._layers = layers
        self._mode: Literal["task"] | Mode = mode
        self._network = network
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder or cache / "atropos" / "proofs"
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._unkept = False
        self.found: dict[str, str | None] = {}

    async def solve(self, images: TaskImages, task: Task) -> None:
        """Find out whether a task's solution scores 1, unless it has none.

        Raises:
            ConfigError: a file of the task can't be packed.
            SandboxError: the infrastructure failed, which proves nothing.
        """
        if any(one.solution is None for one in task.steps or (task,)):
            return
        async with self._turns[task.name]:
            if task.name not in self.found:
                try:
                    await self._try(images, task)
                except OSError as error:  # of this machine, as of the disk with the task's files
                    raise SandboxError(f"{task.name}: {error}") from error

    async def _try(self, images: TaskImages, task: Task) -> None:
        key = ""
        for last in (False, True):
            try:
                key = await self._key(images, task)
                break
            except TaskBroken as error:
                if last:  # what a build fetches may come the second time
                    self.found[task.name] = f"{UNPREPARED}: {error}"
                    return
        file = self._folder / key
        if file.exists():
            self.found[task.name] = None
            return
        run = TaskRun(images, self._layers, task, "oracle", network=self._network, mode=self._mode)
        try:
            reason = (await run.play()).unsolved
        except (TaskBroken, VerifierFailed, SlotFileError) as error:
            what = UNPREPARED if run.so_far.prepared_s is None else "its solution gets no reward"
            reason = f"{what}: {error}"
        finally:
            await run.end()
        self.found[task.name] = reason
        if reason is None:
            await asyncio.to_thread(self._keep, file)

    async def _key(self, images: TaskImages, task: Task) -> str:
        """A digest of all that a proof depends on: what slots start from, the task's files, and how it is judged."""
        machines = [(await images.prepare(one)).image for one in task.machines]
        files = await asyncio.to_thread(_digests, task)
        layers = await asyncio.to_thread(self._layers.digest)
        models = (task.limits, *(one for each in (task, *task.steps) for one in (each.config, each.step)))
        settings = [None if one is None else one.model_dump_json() for one in models]
        services = [repr(one.service) for one in (task, *task.beside)]
        parts = [machines, files, layers, settings, services, dict(task.variables), self._mode, self._network]
        return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def _keep(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            oldest = sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in oldest[:-MOST_KEPT]:
                path.unlink(missing_ok=True)
        except OSError as error:
            if not self._unkept:
                _log.warning("what is proven is not kept for later runs: %s", error)
            self._unkept = True


def _digests(task: Task) -> list[str]:
    """Of the files of a task that its image doesn't hold."""
    paths = [path for one in (task, *task.steps) for path in (*one.tests, one.solution, one.files) if path is not None]
    services = [one.service for one in (task, *task.beside) if one.service is not None]
    sources = {volume.source for service in services for volume in service.volumes}
    paths += sorted(path for path in sources if path is not None and path.exists())
    return [digest_of(Context(path.parent), Copy((path.name,), "/")) for path in paths]
