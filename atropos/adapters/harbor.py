"""Slots as environments of Harbor: `--environment-import-path atropos.adapters.harbor:AtroposEnvironment`."""

from __future__ import annotations

import asyncio
import inspect
import tarfile
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from atropos.adapters.extras import extra
from atropos.archives import WholeTar

with extra("harbor"):
    from typing import override

    from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter

from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import should_use_prebuilt_docker_image
from harbor.models.task.config import NetworkMode, NetworkPolicy

from atropos.adapters.sharing import (
    CANNOT_EXECUTE,
    SharedPool,
    pool_config,
    shared_pool,
    shell_code,
    time_limit,
    upload_file,
)
from atropos.errors import ConfigError
from atropos.resources import Resources
from atropos.slots import LeaseLimits, Slot, SlotPoolConfig
from atropos.tasks import services
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.fit import STAND_INS, Room
from atropos.tasks.format import machines
from atropos.tasks.format.beside import services_of
from atropos.tasks.format.compose import read_compose
from atropos.tasks.format.config import OLD_MEMORY_MB, OLD_STORAGE_MB, EnvironmentSection, TaskConfig
from atropos.tasks.format.recipe import BuildInputs
from atropos.tasks.format.service import Service
from atropos.tasks.format.task import Task, first_recipe
from atropos.tasks.prepare import TaskImages

LONGEST_BUILD_S = 24 * 3600.0
"""Harbor itself ends a start that takes too long."""
KNOWN = frozenset(inspect.signature(BaseEnvironment.__init__).parameters)
"""Arguments that Harbor's environments take; it drops all others in silence."""


class AtroposEnvironment(BaseEnvironment):
    """A slot, and one for each service beside it.

    All trials of a job's process share a pool; `--ek NAME=VALUE` sets a field of `SlotPoolConfig`. Of the adapter's
    own is `task_images`: patterns of images that the pool's base stands in for, all others are pulled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # `--ek` puts all into one set of arguments: the pool's are picked out by their names.
        settings = {name: kwargs.pop(name) for name in [*kwargs] if name in SlotPoolConfig.model_fields}
        stand_ins = kwargs.pop("task_images", STAND_INS) or ()
        if isinstance(stand_ins, str):
            raise ConfigError("""--ek task_images: a list of patterns is wanted, as '["debian*"]', or None""")
        if unknown := kwargs.keys() - KNOWN:
            raise ConfigError(
                f"--ek {min(unknown)}: no field of SlotPoolConfig, and no argument of Harbor's environments"
            )
        self._config = pool_config(settings, network=True)
        self._stand_ins = stand_ins
        self._shared: SharedPool | None = None
        self._slot: Slot | None = None
        self._beside: dict[str, Slot] = {}
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "atropos"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            docker_compose=True,
            gpus=self._config.gpus > 0,
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities | None:
        """A slot is no smaller than the pool's `limits`, so that none is exact."""
        return EnvironmentResourceCapabilities(fractional_cpus=True)

    @override
    def _validate_definition(self) -> None:
        if not self.environment_dir.is_dir() and not self.task_env_config.docker_image:
            raise FileNotFoundError(f"{self.environment_dir}: no such folder, and no docker_image in its place")
        if self.extra_docker_compose_paths:
            raise ConfigError("--extra-docker-compose: is not laid over a task's file here; write it there")
        for target in self._mount_targets():
            if not target.removeprefix("C:").startswith("/logs/"):  # which are Harbor's own
                raise ConfigError(f"--mounts: {target}: a slot has no mounts; put the files into the task's image")

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
        # At once: `stop` leaves the pool that was entered, whatever fails below.
        self._shared = shared
        try:
            images = TaskImages(pool, self._stand_ins)
            self._slot, machine = await self._lease(images, force_build=force_build)
            # Before anything of the task's runs.
            await self._apply_network_policy(self._network_policy)
            if workdir := self.task_env_config.workdir:
                await self._held.exec(["mkdir", "-p", workdir], user="0:0")
            await services.start(self._slot, machine, images, self._startup_env(), network=self._wants_network)
            for each, slot in zip(machine.beside, self._slot.group[1:], strict=True):
                assert each.service is not None
                self._beside[each.service.name] = slot
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    @property
    def _wants_network(self) -> bool:
        policies = (self._network_policy, *self._phase_network_policies)
        return any(policy.network_mode != NetworkMode.NO_NETWORK for policy in policies)

    async def _lease(self, images: TaskImages, *, force_build: bool) -> tuple[Slot, Task]:
        """A slot, and the machine in it."""
        pool = images.pool
        inputs = BuildInputs(architecture=pool.architecture)
        machine = await asyncio.to_thread(self._machine, inputs, force_build=force_build)
        offline = machine.config.environment.network_mode == "no-network"  # its compose file says so
        network = self._wants_network and not offline
        prepared = await images.prepare(machine)
        slot = await pool.acquire(self.session_id, network=network, image=prepared.image, limits=machine.limits)
        try:
            slot.profile = await profile_of(slot, prepared.task, prepared.task.recipe.settings)
        except BaseException:
            await slot.release()
            raise
        return slot, prepared.task

    def _machine(self, inputs: BuildInputs, *, force_build: bool) -> Task:
        """What the folder says how to make: the task's, or that of a separate verifier, whose image holds its tests.

        Raises:
            ConfigError: names the file, the line and the cure.
        """
        wants, folder = self.task_env_config, self.environment_dir
        image = wants.docker_image
        if not should_use_prebuilt_docker_image(folder, docker_image=image, force_build=force_build):
            image = None
        memory, storage = self._effective_memory_mb, self._effective_storage_mb
        own = EnvironmentSection(
            docker_image=image,
            workdir=wants.workdir,
            cpus=self._effective_cpus,
            # what older schemas wrote into every task.toml is no wish
            memory_mb=memory if memory != OLD_MEMORY_MB else None,
            storage_mb=storage if storage != OLD_STORAGE_MB else None,
            build_timeout_sec=LONGEST_BUILD_S,
            gpus=self._effective_gpus,
            gpu_types=tuple(wants.gpu_types or ()),
        )
        service = read_compose(folder, made=image is not None or (folder / "Dockerfile").is_file())
        section = machines.with_compose(service, own)
        # where something is built or pulled, the folder's other files are Harbor's to bring
        defined = wants.docker_image or machines.is_machine(folder)
        make = partial(machines.machine if defined else machines.workspace, folder, service, section)
        recipe, unbuildable = first_recipe(make, inputs, section)
        task = Task(
            name=self.environment_name,
            path=folder,
            instruction="",
            config=TaskConfig(environment=section),
            context=folder,
            recipe=recipe,
            tests=(),
            solution=None,
            limits=self._limits(section, service),
            unbuildable=unbuildable,
            make=make,
            service=service,
        )
        return task if service is None or not service.beside else self._with_services(task, own, inputs)

    def _with_services(self, task: Task, own: EnvironmentSection, inputs: BuildInputs) -> Task:
        """The task with the services beside it, which reach what the environment's own policy says."""
        policy = self._network_policy
        network = {"network_mode": policy.network_mode.value, "allowed_hosts": tuple(policy.allowed_hosts)}
        reached = own.model_copy(update=network)
        beside = tuple(
            replace(each, limits=self._limits(each.config.environment, each.service))
            for each in services_of(task, reached, self.environment_dir, inputs)
        )
        members = tuple(each.limits or LeaseLimits() for each in beside)
        limits = (task.limits or LeaseLimits()).model_copy(update={"members": members})
        return replace(task, beside=beside, limits=limits)

    def _limits(self, wants: EnvironmentSection, service: Service | None) -> LeaseLimits | None:
        """What the task, or a service, asks for beyond a slot."""
        slot = self._config.limits
        shared = 0 if service is None else service.shm_mib or 0
        memory, storage = wants.memory_mb or 0, max(wants.storage_mb or 0, shared)
        if shared > max(slot.disk_mib, self._config.place_mib) and self._config.volume != "disk":
            memory = max(memory, shared)
        room = max(memory, slot.memory_mib, self._config.place_mib)
        files = min(storage, room) if self._config.volume != "disk" else 0
        resources = Resources(memory_mib=memory, disk_mib=files, cpus=wants.cpus or 0, gpus=wants.wanted_gpus)
        return Room(slot.resources).beyond(resources, wants.gpu_types)

    @override
    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        """Of what the pool allows (`egress_allow`), let the slot reach what the policy names, or all."""
        public = network_policy.network_mode == NetworkMode.PUBLIC
        if self._held.network:
            await self._held.set_network(None if public else network_policy.allowed_hosts)

    @override
    async def stop(self, delete: bool) -> None:
        """Release the slot and its workspace, whatever `delete` is."""
        slot, self._slot = self._slot, None
        self._beside.clear()
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
            RuntimeError: it took longer than `timeout_sec` (0: as None), as on Docker.
        """
        workdir, user = cwd or self.task_env_config.workdir, self._resolve_user(user)
        return await _run(self._held, command, workdir, self._merge_env(env), timeout_sec, user)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await upload_file(self._held, Path(source_path), target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if not Path(source_dir).is_dir():
            raise ConfigError(f"upload_dir: {source_dir} is no folder")
        await self._held.upload(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.service_download_file(source_path, target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.service_download_dir(source_dir, target_dir)

    # ---------------------------------------------------------------------------------------------------- services

    def _of(self, service: str | None) -> Slot:
        if service is None or self.is_main_service(service):
            return self._held
        if service not in self._beside:
            others = ", ".join(self._beside) or "none beside main"
            raise ConfigError(f"service {service!r}: the compose file has {others}")
        return self._beside[service]

    @override
    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """As `exec`; in another service with that one's folder, variables and user."""
        if self.is_main_service(service):
            return await self.exec(command, cwd, env, timeout_sec, user)
        return await _run(self._of(service), ["sh", "-c", command], cwd, env, timeout_sec, user)

    @override
    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self._of(service).read_file_to(source_path, target_path)

    @override
    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "archive.tar"
            await self._of(service).download_to(source_dir, archive)
            left_out = await asyncio.to_thread(_extract, archive, Path(target_dir))
        if left_out:
            self.logger.warning("%s: %d files left out, as %s", source_dir, len(left_out), left_out[0])

    @override
    async def stop_service(self, service: str) -> None:
        """End its programs; its files stay, and so does its group."""
        await self._of(service).quiesce()


async def _run(
    slot: Slot,
    command: str | list[str],
    workdir: str | None,
    env: dict[str, str] | None,
    timeout_sec: int | None,
    user: str | int | None,
) -> ExecResult:
    timeout_s = timeout_sec or None
    result = await slot.exec(
        command,
        timeout_s=timeout_s,
        workdir=workdir,
        env=env,
        user=None if user is None else str(user),
        split=True,
        concurrent=True,
    )
    if result.timed_out:
        raise RuntimeError(f"Command timed out after {time_limit(result, timeout_s)}")
    if result.exit_code is None:
        return ExecResult(stdout="", stderr=result.output, return_code=CANNOT_EXECUTE)
    return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=shell_code(result.exit_code))


def _extract(archive: Path, target: Path) -> list[str]:
    """Unpack an archive.

    Returns why files were left out: links that lead out of the folder, one of which an agent may have made.
    """
    left_out: list[str] = []

    def kept(member: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
        try:
            return transfer_tar_filter(member, where)
        except tarfile.FilterError as error:
            left_out.append(str(error))
            return None

    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, mode="r:", tarinfo=WholeTar) as opened:
        opened.extractall(target, filter=kept)  # noqa: S202
    return left_out
