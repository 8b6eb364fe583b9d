"""Slots as environments of Harbor: `--environment-import-path atropos.adapters.harbor:AtroposEnvironment`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import Any

from atropos.adapters.extras import Extra

with Extra("harbor"):
    from typing import override

    from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter

from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from atropos.adapters.sharing import WAIT_FOR_SLOT_S, SharedPool, shared_pool
from atropos.errors import ConfigError
from atropos.slots import Slot, SlotPool, SlotPoolConfig
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages

MAX_DOWNLOAD_BYTES = 2 << 30
"""Longest archive of a folder that is downloaded."""
KNOWN = frozenset(inspect.signature(BaseEnvironment.__init__).parameters)
"""Arguments that Harbor's environments take; it drops all others in silence."""


class AtroposEnvironment(BaseEnvironment):
    """One slot. All trials of a job's process share a pool; `--ek NAME=VALUE` sets a field of `SlotPoolConfig`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in [*kwargs] if name in SlotPoolConfig.model_fields}
        if unknown := kwargs.keys() - KNOWN:
            raise ConfigError(
                f"--ek {min(unknown)}: no field of SlotPoolConfig, and no argument of Harbor's environments"
            )
        self._config = SlotPoolConfig(**{"acquire_timeout_s": WAIT_FOR_SLOT_S, "allow_network": True, **settings})
        self._shared: SharedPool | None = None
        self._slot: Slot | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "atropos"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities | None:
        """None can be promised for one trial: the pool's `limits` hold for all."""
        return EnvironmentResourceCapabilities()

    @override
    def _validate_definition(self) -> None:
        if (self.environment_dir.parent / "task.toml").is_file() or self.task_env_config.docker_image:
            return
        raise FileNotFoundError(f"{self.environment_dir.parent}: no task.toml, and no docker_image in its place")

    # -------------------------------------------------------------------------------------------------------- life

    @override
    async def start(self, force_build: bool) -> None:
        """Build the task's workspace, each step once a host, and lease a slot on it.

        Raises:
            SandboxError: the infrastructure failed; the trial has an exception and no reward.
            TaskBroken: the workspace can't be built.
        """
        if self._slot is not None:
            raise RuntimeError("the environment was started already")
        shared = shared_pool(self._config)
        pool = await shared.enter()
        self._shared = shared
        try:
            self._slot = await self._lease(pool)
            if workdir := self.task_env_config.workdir:
                await self._held.exec(["mkdir", "-p", workdir], user="root")
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def _lease(self, pool: SlotPool) -> Slot:
        network = not self._network_disabled
        if not (self.environment_dir.parent / "task.toml").is_file():
            return await pool.acquire(self.session_id, network=network, image=self.task_env_config.docker_image)
        task = await asyncio.to_thread(load_task, self.environment_dir.parent)
        prepared = await TaskImages(pool).prepare(task)
        slot = await pool.acquire(self.session_id, network=network, image=prepared.image)
        try:
            slot.profile = await profile_of(slot, prepared.task, prepared.task.recipe.settings)
        except BaseException:
            await slot.release()
            raise
        return slot

    @override
    async def stop(self, delete: bool) -> None:
        """Release the slot and its workspace, whatever `delete` is."""
        slot, self._slot = self._slot, None
        shared, self._shared = self._shared, None
        try:
            if slot is not None:
                await slot.release()
        finally:
            if shared is not None:
                await shared.leave()

    @property
    def _held(self) -> Slot:
        if self._slot is None:
            raise RuntimeError("the environment is not running: start it first")
        return self._slot

    # -------------------------------------------------------------------------------------------------- operations

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command line.

        Raises:
            SandboxError: the infrastructure failed.
            RuntimeError: it took longer than `timeout_sec`, as on Docker.
        """
        user = self._resolve_user(user)
        result = await self._held.exec(
            command,
            timeout_s=timeout_sec,
            workdir=cwd or self.task_env_config.workdir,
            env=self._merge_env(env),
            user=None if user is None else str(user),
            split=True,
            concurrent=True,
        )
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        if result.exit_code is None:
            return ExecResult(stdout="", stderr=result.output, return_code=126)
        code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._held.upload(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if not Path(source_dir).is_dir():
            raise ConfigError(f"upload_dir: {source_dir} is no folder")
        await self._held.upload(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._held.read_file(source_path, max_bytes=MAX_DOWNLOAD_BYTES)
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        archive = f"/tmp/.atropos-{uuid.uuid4().hex}.tar"
        packed = await self._held.exec(["tar", "-C", source_dir, "-cf", archive, "."], user="root")
        try:
            if packed.exit_code != 0:
                raise RuntimeError(f"{source_dir} can't be packed: {packed.output.strip()}")
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / "archive.tar"
                await self.download_file(archive, local)
                await asyncio.to_thread(_extract, local, Path(target_dir))
        finally:
            with contextlib.suppress(OSError):
                await self._held.exec(["rm", "-f", archive], user="root")


def _extract(archive: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as opened:
        opened.extractall(target, filter=transfer_tar_filter)  # noqa: S202
