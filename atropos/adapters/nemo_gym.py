"""Slots as sandboxes of NeMo Gym: the provider `atropos` of its entry-point group `nemo_gym.sandbox_providers`."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atropos.adapters.extras import extra

with extra("nemo-gym"):
    from nemo_gym.sandbox.providers.base import (
        SandboxCreateError,
        SandboxExecResult,
        SandboxHandle,
        SandboxResources,
        SandboxSpec,
        SandboxStatus,
    )

from atropos.adapters.sharing import (
    HeldSlot,
    SandboxGoneError,
    SlotRequest,
    give,
    infrastructure,
    shell_code,
    upload_file,
)
from atropos.errors import SandboxError

if TYPE_CHECKING:  # of later versions than 0.4
    from nemo_gym.sandbox.providers.base import SandboxEndpoint, SandboxPtySession, SandboxPtySpec

DID_NOT_RUN = 125
"""`return_code` beside an `error_type`, as NeMo Gym's own providers have it."""


@dataclass
class _Sandbox:
    held: HeldSlot
    env: dict[str, str]
    closed: bool = False


class AtroposProvider:
    """One slot a sandbox; sandboxes of an event loop with the same settings share a pool.

    Args:
        settings: fields of `SlotRequest`; a spec's image comes before its `image`.
    """

    name = "atropos"

    def __init__(self, **settings: Any) -> None:
        self._request = SlotRequest(**settings)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Lease a slot.

        Raises:
            SandboxCreateError: there is none, or the spec asks for what a slot can't have.
        """
        request = self._requested(spec)
        try:
            async with asyncio.timeout(spec.ready_timeout_s):
                with infrastructure(SandboxCreateError):
                    held = await HeldSlot.lease(request, "nemo-gym")
        except TimeoutError as error:
            raise SandboxCreateError(f"no slot within ready_timeout_s ({spec.ready_timeout_s:g} s)") from error
        sandbox = _Sandbox(held, _texts(spec.env))
        handle = SandboxHandle(sandbox_id=held.slot.lease.lease_id, provider_name=self.name, raw=sandbox)
        try:
            with infrastructure(SandboxCreateError):
                if spec.workdir is not None:
                    await held.slot.exec(["mkdir", "-p", held.path(spec.workdir)], user="0:0")
                    await self._give(held, held.path(spec.workdir))
                if spec.entrypoint:
                    await held.slot.start(spec.entrypoint, env=sandbox.env, user=held.user, workdir=held.folder)
        except BaseException as error:
            await self.close(handle)
            if isinstance(error, OSError):
                raise SandboxCreateError(f"entrypoint: {error}") from error
            raise
        return handle

    def _requested(self, spec: SandboxSpec) -> SlotRequest:
        """The slot for a spec; what it can't have is refused."""
        resources = cast("SandboxResources", spec.resources)
        request = self._request if spec.image is None else self._request.model_copy(update={"image": spec.image})
        request = request.with_gpus(resources.gpu or 0)
        refused = request.refusal(resources.memory_mib, (resources.disk_gib or 0) * 1024)
        if refused is not None:
            raise SandboxCreateError(f"resources: {refused}")
        return request

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a line for the shell; `error_type` is `timeout` where it took too long, `sandbox` where it couldn't run.

        Raises:
            SandboxGoneError: the slot or its container failed.
        """
        held = self._held(handle)
        with infrastructure():
            result = await held.slot.exec(
                command,
                timeout_s=timeout_s,
                workdir=held.path(cwd or "."),
                env=_sandbox(handle).env | _texts(env or {}),
                user=held.user if user is None else str(user),
                split=True,
                concurrent=True,
            )
        if result.timed_out:
            return SandboxExecResult(result.stdout, result.stderr, DID_NOT_RUN, error_type="timeout")
        if result.exit_code is None:
            return SandboxExecResult(result.stdout, result.error, DID_NOT_RUN, error_type="sandbox")
        return SandboxExecResult(result.stdout, result.stderr, shell_code(result.exit_code))

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy a file into the slot, with its mode, making its parents; as root, or to the settings' `user`.

        Raises:
            OSError: it can't be read here or written there.
            SandboxGoneError: the slot or its container failed.
        """
        held = self._held(handle)
        with infrastructure():
            await self._give(
                held, await upload_file(held.slot, Path(source_path), posixpath.join(held.folder, target_path))
            )

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a file out of the slot as root, making its parents. Raises as `upload_file`."""
        held = self._held(handle)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        with infrastructure():
            await held.slot.read_file_to(held.path(source_path), target_path)

    async def _give(self, held: HeldSlot, path: str) -> None:
        """Let a path belong to the user that the settings name; an image's own finds root's files, as on Docker."""
        if self._request.user is not None:
            await give(held.slot, self._request.user, path)

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint:
        """A service of the slot at a port of this machine's loopback, whether or not `ports` declared it.

        Raises:
            SandboxGoneError: the slot or its container failed.
        """
        from nemo_gym.sandbox.providers.base import SandboxEndpoint

        held = self._held(handle)
        with infrastructure():
            return SandboxEndpoint(f"http://127.0.0.1:{await held.expose(port)}")

    async def create_pty(self, handle: SandboxHandle, spec: SandboxPtySpec) -> SandboxPtySession:
        """A terminal of the slot, or pipes.

        Raises:
            SandboxPtyError: it can't be started, or the slot failed.
        """
        from atropos.adapters.nemo_gym_terminal import Terminal

        held = self._held(handle)
        return await Terminal.start(held, spec, _sandbox(handle).env | _texts(spec.env or {}))

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """`error` once the slot or its container is gone."""
        sandbox = _sandbox(handle)
        if sandbox.closed:
            return SandboxStatus.STOPPED
        with contextlib.suppress(SandboxError):
            await sandbox.held.slot.processes()
            return SandboxStatus.RUNNING
        return SandboxStatus.ERROR

    async def close(self, handle: SandboxHandle) -> None:
        """Give the slot back, with all that runs in it. Idempotent."""
        sandbox = _sandbox(handle)
        sandbox.closed = True
        await sandbox.held.release()

    async def aclose(self) -> None:
        """Nothing: the pool ends with the last of its sandboxes."""

    def _held(self, handle: SandboxHandle) -> HeldSlot:
        sandbox = _sandbox(handle)
        if sandbox.closed:
            raise SandboxGoneError(f"sandbox {handle.sandbox_id} was closed")
        return sandbox.held


def _texts(env: Mapping[str, object]) -> dict[str, str]:
    """Variables as text: a number of a YAML file is one, and NeMo Gym leaves it so."""
    return {name: str(value) for name, value in env.items()}


def _sandbox(handle: SandboxHandle) -> _Sandbox:
    return cast("_Sandbox", handle.raw)
