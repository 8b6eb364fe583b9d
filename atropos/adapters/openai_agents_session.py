"""A slot as a session of OpenAI's Agents SDK."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.session import BaseSandboxSession, SandboxSessionState
from agents.sandbox.session.pty_types import PtyExecUpdate
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import safe_extract_tarfile, should_skip_tar_member
from typing_extensions import override

from atropos.adapters.openai_agents_terminal import Terminals
from atropos.adapters.process_slots import held_by_lease, lease_until_exit, release_and_wait
from atropos.adapters.sharing import (
    HeldSlot,
    SlotRequest,
    not_started,
    shell_code,
)
from atropos.archives import WholeTar
from atropos.errors import SandboxError
from atropos.event_loop import in_event_loop


class AtroposSandboxSessionState(SandboxSessionState):
    """A session as it is kept; the pool's settings, which may hold secrets, are the client's.

    Attributes:
        image: the slot's.
        lease_id: of the slot, while there is one.
    """

    type: Literal["atropos"] = "atropos"  # pyright: ignore[reportIncompatibleVariableOverride]
    image: str | None = None
    lease_id: str | None = None


class AtroposSandboxSession(BaseSandboxSession):
    """One slot, from `start` until `shutdown`."""

    state: AtroposSandboxSessionState  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, state: AtroposSandboxSessionState, request: SlotRequest) -> None:
        self.state = state  # pyright: ignore[reportIncompatibleVariableOverride]
        self._request = request
        self._held: HeldSlot | None = None
        self._terminals: Terminals | None = None

    # -------------------------------------------------------------------------------------------------------- life

    @override
    @in_event_loop
    async def _ensure_backend_started(self) -> None:
        if self._held is not None:
            return
        held = held_by_lease(self.state.lease_id)
        self._set_start_state_preserved(held is not None)
        if held is None:
            try:
                held = await lease_until_exit(self._request, f"openai-agents {self.state.session_id}")
            except SandboxError as error:
                raise self._start_error(f"{error.code}: {error}", error, retryable=error.retryable) from error
            self.state.lease_id, self.state.workspace_root_ready = held.slot.lease.lease_id, False
        self._held, self._terminals = held, Terminals(held)

    @override
    @in_event_loop
    async def _prepare_backend_workspace(self) -> None:
        with self._lost("mkdir"):
            refused = await self._slot().make_folder(self.state.manifest.root)
        if refused is not None:
            raise self._start_error(refused)

    def _start_error(self, why: str, cause: Exception | None = None, *, retryable: bool = False) -> WorkspaceStartError:
        root = Path(self.state.manifest.root)
        return WorkspaceStartError(path=root, message=f"{root}: {why}", cause=cause, retryable=retryable)

    @override
    async def _after_start_failed(self) -> None:
        await self._shutdown_backend()

    @override
    @in_event_loop
    async def _shutdown_backend(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self.state.lease_id = None
            await release_and_wait(held)

    @override
    async def running(self) -> bool:
        return self._held is not None and self._held.slot.lost is None

    def _slot(self) -> HeldSlot:
        if self._held is None:
            raise gone(SandboxError("the session was not started, or is shut down"), "use")
        return self._held

    @contextmanager
    def _lost(self, *command: str) -> Generator[None]:
        try:
            yield
        except SandboxError as error:
            raise gone(error, *command) from error

    # ---------------------------------------------------------------------------------------------------- commands

    @override
    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    @override
    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.lease_id

    @override
    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    @override
    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run(*command, env=await self.state.manifest.environment.resolve(), timeout=timeout)

    @in_event_loop
    async def _run(self, *command: str | Path, env: dict[str, str], timeout: float | None) -> ExecResult:
        held = self._slot()
        user, argv = as_user([str(part) for part in command], held.user)
        with self._lost(*argv):
            result = await held.slot.exec(
                argv,
                timeout_s=timeout,
                workdir=self.state.manifest.root,
                env=env,
                user=user,
                split=True,
                concurrent=True,
            )
        if result.timed_out:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        if result.exit_code is None:
            code, error = not_started(result)
            return ExecResult(stdout=b"", stderr=error.encode(), exit_code=code)
        stdout, stderr = result.stdout_bytes or b"", result.stderr_bytes or b""
        return ExecResult(stdout=stdout, stderr=stderr, exit_code=shell_code(result.exit_code))

    @override
    def supports_pty(self) -> bool:
        return True

    @override
    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        prepared = self._prepare_exec_command(*command, shell=shell, user=user)
        env = await self.state.manifest.environment.resolve()
        held = self._slot()
        who, argv = as_user(prepared, held.user)
        with self._lost(*argv):
            return await self._pty().start(
                argv,
                workdir=self.state.manifest.root,
                env=env,
                user=who,
                tty=tty,
                yield_time_s=yield_time_s,
                max_output_tokens=max_output_tokens,
            )

    @override
    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        with self._lost("write_stdin"):
            return await self._pty().write(session_id, chars, yield_time_s, max_output_tokens)

    @override
    async def pty_terminate_all(self) -> None:
        if self._terminals is not None:
            await self._terminals.close()

    def _pty(self) -> Terminals:
        self._slot()
        assert self._terminals is not None
        return self._terminals

    @override
    @in_event_loop
    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            return ExposedPortEndpoint(host="127.0.0.1", port=await self._slot().expose(port), tls=False)
        except SandboxError as error:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=error
            ) from error

    # ------------------------------------------------------------------------------------------------------- files

    @override
    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        return io.BytesIO(await self._read(path, await self._validate_path_access(path), user))

    @in_event_loop
    async def _read(self, path: Path, place: Path, user: str | User | None) -> bytes:
        held = self._slot()
        with self._lost("read", str(path)):
            try:
                return await held.slot.read_file(place.as_posix(), user=name_of(user) or held.user)
            except FileNotFoundError as error:
                raise WorkspaceReadNotFoundError(path=path, cause=error) from error
            except OSError as error:
                raise WorkspaceArchiveReadError(path=path, cause=error, retryable=False) from error

    @override
    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        await self._write(path, await self._validate_path_access(path, for_write=True), data.read(), user)

    @in_event_loop
    async def _write(self, path: Path, place: Path, data: bytes | str, user: str | User | None) -> None:
        held = self._slot()
        with self._lost("write", str(path)):
            try:
                await held.slot.write_file(place.as_posix(), data, user=name_of(user) or held.user)
            except OSError as error:
                raise WorkspaceArchiveWriteError(path=path, cause=error, retryable=False) from error

    @override
    @in_event_loop
    async def persist_workspace(self) -> io.IOBase:
        """The workspace as a tar archive on disk, without what the manifest leaves out."""
        root = self.state.manifest.root
        with self._lost("persist", root), tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "archive.tar"
            try:
                await self._slot().slot.download_to(root, archive)
            except OSError as error:
                raise WorkspaceArchiveReadError(path=Path(root), cause=error, retryable=False) from error
            return await asyncio.to_thread(_without, archive, self._persist_workspace_skip_relpaths())

    @override
    @in_event_loop
    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root, held = self.state.manifest.root, self._slot()
        with self._lost("hydrate", root), tempfile.TemporaryDirectory() as folder:
            try:
                await asyncio.to_thread(_extract, data, Path(folder))
                await held.slot.upload(folder, root)
            except (OSError, ValueError, tarfile.TarError) as error:
                raise WorkspaceArchiveWriteError(path=Path(root), cause=error, retryable=False) from error
            if held.user is not None:
                await held.slot.exec(["chown", "-R", held.user, root], user="0:0", concurrent=True)


def gone(error: SandboxError, *command: str) -> ExecTransportError:
    """The SDK's error for a failure of the infrastructure; it runs no command again."""
    return ExecTransportError(command=command, message=f"{error.code}: {error}", cause=error, retryable=False)


def name_of(user: str | User | None) -> str | None:
    """A user's name."""
    return user.name if isinstance(user, User) else user


def as_user(argv: list[str], user: str | None) -> tuple[str | None, list[str]]:
    """Who runs a command, and the command without the `sudo` by which the SDK names that user."""
    match argv:
        case ["sudo", "-u", name, "--", *command] if command:
            return name, command
        case _:
            return user, argv


def _without(archive: Path, left_out: set[Path]) -> io.IOBase:
    """A copy of an archive, without what is below these paths."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    with tarfile.open(archive, mode="r:", tarinfo=WholeTar) as old, tarfile.open(fileobj=copy, mode="w") as new:
        for member in old:
            if not should_skip_tar_member(member.name, skip_rel_paths=left_out, root_name=None):
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    copy.seek(0)
    return copy  # pyright: ignore[reportReturnType]


def _extract(data: io.IOBase, folder: Path) -> None:
    with tarfile.open(fileobj=data, mode="r:*", tarinfo=WholeTar) as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
        safe_extract_tarfile(archive, root=folder, allow_external_symlink_targets=False)
