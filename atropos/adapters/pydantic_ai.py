"""Slots as workspaces of pydantic-ai: `agent.run(…, workspace=AtroposWorkspace())`."""

from __future__ import annotations

import errno
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from atropos.adapters.extras import extra

with extra("pydantic-ai"):
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )

from typing_extensions import override

from atropos.adapters import folders
from atropos.adapters.process_slots import LazySlot, held_by_lease, release_and_wait
from atropos.adapters.sharing import (
    HeldSlot,
    SandboxGoneError,
    SlotRequest,
    not_started,
    shell_code,
    time_limit,
)
from atropos.errors import SandboxError
from atropos.event_loop import in_event_loop

PROVIDER = "atropos"
"""Of the refs of these workspaces."""


class AtroposWorkspace(WorkspaceBackend, SupportsCommands, SupportsFilesystem):
    """One slot, from its first use until `aclose`, or the end of the process.

    Args:
        ref: of a workspace of this process, whose slot this one uses too; None: a slot of its own.
        settings: fields of `SlotRequest`.
    """

    def __init__(self, ref: WorkspaceRef | None = None, **settings: Any) -> None:
        self._attached = ref
        self._slot = LazySlot(SlotRequest(**settings), "pydantic-ai")

    @property
    @override
    def ref(self) -> WorkspaceRef | None:
        lease_id = self._slot.lease_id
        return self._attached if lease_id is None else WorkspaceRef(provider=PROVIDER, id=lease_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @in_event_loop
    async def aclose(self) -> None:
        """Give the slot back, with all that runs in it, also where another workspace has its ref. Idempotent."""
        await self._slot.close()
        if self._attached is not None and (held := held_by_lease(self._attached.id)) is not None:
            await release_and_wait(held)

    async def _held(self) -> HeldSlot:
        if self._attached is None:
            try:
                return await self._slot.get()
            except SandboxGoneError as error:
                raise WorkspaceUnavailableError(str(error)) from error
        held = held_by_lease(self._attached.id) if self._attached.provider == PROVIDER else None
        if held is None:
            raise WorkspaceUnavailableError(f"{self._attached}: no slot of this process, or it is gone")
        return held

    @override
    @in_event_loop
    async def working_dir(self) -> str:
        held = await self._held()
        with unavailable(held):
            result = await held.slot.exec(
                ["/bin/sh", "-c", "pwd -P"], workdir=held.folder, user=held.user, concurrent=True
            )
        return result.output.removesuffix("\n") if result.ok else held.folder

    @override
    @in_event_loop
    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if isinstance(command, str) != shell:
            raise TypeError("a string needs shell=True, a list of arguments shell=False")
        held = await self._held()
        with unavailable(held):
            result = await held.slot.exec(
                ["/bin/sh", "-c", command] if isinstance(command, str) else [*command],
                timeout_s=timeout,
                workdir=held.folder,
                env=env,
                user=held.user,
                split=True,
                concurrent=True,
            )
        stdout, stderr = result.stdout or "", result.stderr or ""
        if result.timed_out:
            raise WorkspaceTimeoutError(
                f"it took longer than {time_limit(result, timeout)}", stdout=stdout, stderr=stderr
            )
        if result.truncated:
            limit = len(result.output_bytes)
            raise WorkspaceOutputLimitError(
                f"it printed {result.dropped_bytes} bytes more than the {limit} that are kept",
                limit=limit,
                stdout=stdout,
                stderr=stderr,
            )
        if result.exit_code is None:
            code, error = not_started(result)
            return CommandResult(exit_code=code, stdout="", stderr=error)
        return CommandResult(exit_code=shell_code(result.exit_code), stdout=stdout, stderr=stderr)

    # -------------------------------------------------------------------------------------------------------- files

    @override
    @in_event_loop
    async def read_bytes(self, path: str) -> bytes:
        held = await self._held()
        with unavailable(held):
            return await held.slot.read_file(path, user=held.user)

    @override
    @in_event_loop
    async def write_bytes(self, path: str, data: bytes) -> None:
        held = await self._held()
        with unavailable(held):
            await held.slot.write_file(path, data, user=held.user)

    @override
    @in_event_loop
    async def stat(self, path: str) -> FileEntry:
        held = await self._held()
        with unavailable(held):
            return file_entry(await folders.stat(held, path))

    @override
    @in_event_loop
    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        held = await self._held()
        with unavailable(held):
            return [file_entry(entry) for entry in await folders.list_folder(held, path)]

    @override
    @in_event_loop
    async def make_dir(self, path: str) -> None:
        held = await self._held()
        with unavailable(held):
            await folders.make_folder(held, path)

    @override
    @in_event_loop
    async def remove(self, path: str) -> None:
        held = await self._held()
        with unavailable(held):
            try:
                await folders.remove(held, path)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise ValueError(f"{path}: the working directory is in it") from None
                raise

    @override
    @in_event_loop
    async def exists(self, path: str) -> bool:
        held = await self._held()
        with unavailable(held):
            return await folders.exists(held, path)


def file_entry(entry: folders.Entry) -> FileEntry:
    """The same as pydantic-ai has it."""
    return FileEntry(name=entry.name, path=entry.path, is_dir=entry.is_dir, size=entry.size)


@contextmanager
def unavailable(held: HeldSlot) -> Generator[None]:
    """A lost slot as pydantic-ai's own error; any other failure as it is: the next call may well succeed."""
    try:
        yield
    except SandboxError as error:
        if held.slot.lost is None:
            raise
        raise WorkspaceUnavailableError(f"{error.code}: {error}") from error
