"""Slots as environments of Google's ADK: `EnvironmentToolset(environment=AtroposEnvironment())`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atropos.adapters.extras import extra

with extra("google-adk"):
    from google.adk.environment import BaseEnvironment, ExecutionResult

from typing_extensions import override

from atropos.adapters.process_slots import lease_until_exit, release_and_wait
from atropos.adapters.sharing import CANNOT_EXECUTE, HeldSlot, SlotRequest, infrastructure, shell_code, time_limit
from atropos.event_loop import in_event_loop


class EnvironmentGoneError(BaseException):
    """The infrastructure failed, so that the run ends: ADK's tools show the model each `Exception`, and go on."""


class AtroposEnvironment(BaseEnvironment):
    """One slot, from `initialize` until `close`.

    Args:
        settings: fields of `SlotRequest`.
    """

    def __init__(self, **settings: Any) -> None:
        self._request = SlotRequest(**settings)
        self._held: HeldSlot | None = None

    @override
    @in_event_loop
    async def initialize(self) -> None:
        """Lease a slot, unless there is one.

        Raises:
            EnvironmentGoneError: there is none.
        """
        if self._held is None:
            with infrastructure(EnvironmentGoneError):
                self._held = await lease_until_exit(self._request, "google-adk")
            self.is_initialized = True

    @override
    async def close(self) -> None:
        """Give the slot back, with all that runs in it."""
        held, self._held = self._held, None
        self.is_initialized = False
        if held is not None:
            await release_and_wait(held)

    @property
    @override
    def working_dir(self) -> Path:
        return Path(self._slot().folder)

    def _slot(self) -> HeldSlot:
        if self._held is None:
            raise RuntimeError("the environment is not initialized, or closed")
        return self._held

    @override
    @in_event_loop
    async def execute(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """Run a command line for bash.

        Raises:
            EnvironmentGoneError: the infrastructure failed.
        """
        held = self._slot()
        with infrastructure(EnvironmentGoneError):
            result = await held.slot.exec(
                command, timeout_s=timeout, workdir=held.folder, user=held.user, split=True, concurrent=True
            )
        stdout, stderr = result.stdout or "", result.stderr or ""
        if result.timed_out:
            late = f"{stderr}took longer than {time_limit(result, timeout)}\n"
            return ExecutionResult(exit_code=-1, stdout=stdout, stderr=late, timed_out=True)
        if result.exit_code is None:
            return ExecutionResult(exit_code=CANNOT_EXECUTE, stderr=result.error or "")
        return ExecutionResult(exit_code=shell_code(result.exit_code), stdout=stdout, stderr=stderr)

    @override
    @in_event_loop
    async def read_file(self, path: Path) -> bytes:
        """A file's content.

        Raises:
            OSError: it can't be read.
            EnvironmentGoneError: the infrastructure failed.
        """
        held = self._slot()
        with infrastructure(EnvironmentGoneError):
            return await held.slot.read_file(held.path(str(path)), user=held.user)

    @override
    @in_event_loop
    async def write_file(self, path: Path, content: str | bytes) -> None:
        """Write a file, making its parents.

        Raises:
            OSError: it can't be written.
            EnvironmentGoneError: the infrastructure failed.
        """
        held = self._slot()
        with infrastructure(EnvironmentGoneError):
            await held.slot.write_file(held.path(str(path)), content, user=held.user)
