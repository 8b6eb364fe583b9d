"""Slots as sandboxes of inspect_ai: `sandbox="atropos"`, by its entry point."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from atropos.adapters.extras import extra

with extra("inspect"):
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )

from pydantic import BaseModel, ValidationError
from typing_extensions import override

from atropos.adapters.sharing import (
    CANNOT_EXECUTE,
    MAX_OUTPUT_BYTES,
    NOT_FOUND,
    HeldSlot,
    SlotRequest,
    infrastructure,
    shell_code,
    time_limit,
)
from atropos.errors import ConfigError
from atropos.slots import ExecResult as SlotResult
from atropos.tasks.format.config import explained
from atropos.tasks.format.files import parse_yaml, read_text

FILE_NAMES = ["atropos.yaml", "atropos.yml"]
KEEP_RUNNING = ("tail", "-f", "/dev/null")
"""In the place of an image's CMD, as in inspect_ai's own compose file."""


class AtroposSandboxConfig(SlotRequest):
    """What a sample's sandbox is, and the pool that it comes from."""


def read_settings(given: BaseModel | str | None) -> AtroposSandboxConfig:
    """The settings of a sandbox as inspect_ai gives them: an object, the name of a YAML file, or nothing.

    Raises:
        ConfigError: it is something else, or the file holds what is no setting; names it.
    """
    if given is None:
        return AtroposSandboxConfig()
    if isinstance(given, str):
        text = read_text(Path(given), "name a YAML file with the settings")
        try:
            return AtroposSandboxConfig.model_validate(parse_yaml(text) or {})
        except ValidationError as error:
            raise ConfigError(explained(given, error)) from None
        except ValueError as error:
            raise ConfigError(f"{given}: {error}") from None
    if not isinstance(given, AtroposSandboxConfig):
        raise ConfigError(
            f"sandbox: {type(given).__name__} given; atropos takes an AtroposSandboxConfig or a YAML file"
        )
    return given


_begun: dict[Path, AtroposSandboxConfig] = {}
"""Settings of the files of evaluations that run."""


def settings_of(given: BaseModel | str | None) -> AtroposSandboxConfig:
    """As `read_settings`; a file's settings as they were when the evaluation began: it may be edited meanwhile."""
    known = _begun.get(Path(given).absolute()) if isinstance(given, str) else None
    return known or read_settings(given)


@sandboxenv(name="atropos")  # pyright: ignore[reportUntypedClassDecorator]
class AtroposSandbox(SandboxEnvironment):
    """One slot."""

    def __init__(self, held: HeldSlot) -> None:
        super().__init__()
        self._held = held

    # -------------------------------------------------------------------------------------------------------- life

    @classmethod
    @override
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Start the pool, or use the one that runs."""
        settings = settings_of(config)
        with infrastructure(SandboxUnavailableError):
            await settings.shared().enter()
        if isinstance(config, str):
            _begun[Path(config).absolute()] = settings

    @classmethod
    @override
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """Stop the pool with its last task; slots that are kept outlive no process, so `cleanup` changes nothing."""
        try:
            await settings_of(config).shared().leave()
        finally:
            for file in [file for file, settings in _begun.items() if not settings.shared().holders]:
                del _begun[file]

    @classmethod
    @override
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Lease a slot, with its image's ENTRYPOINT started."""
        with infrastructure(SandboxUnavailableError):
            return {"default": cls(await HeldSlot.lease(settings_of(config), task_name, waits=KEEP_RUNNING))}

    @classmethod
    @override
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Give the slots back."""
        for environment in environments.values():
            await environment.as_type(AtroposSandbox)._held.release()  # noqa: SLF001

    @classmethod
    @override
    def config_files(cls) -> list[str]:
        return FILE_NAMES

    @classmethod
    @override
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return AtroposSandboxConfig.model_validate(config)

    # -------------------------------------------------------------------------------------------------- operations

    @override
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program. A call runs at most once, so nothing is tried again."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        run = partial(
            self._held.slot.exec,
            timeout_s=timeout,
            workdir=self._held.path(cwd or "."),
            env=env,
            user=user or self._held.user,
            stdin=input,
            split=True,
            max_output_bytes=limit,
            concurrent=True,
        )
        # not SandboxUnavailableError, which inspect_ai turns into a message to the model, and then scores
        with infrastructure():
            result = await (run(cmd) if limit <= MAX_OUTPUT_BYTES else self._run_into_file(run, cmd, limit))
        if result.timed_out:
            late = TimeoutError(f"Command timed out after {time_limit(result, timeout)}")
            late.truncated_output = result.output  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            raise late
        if result.error is not None:
            return not_started(result.error)
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.output)
        if result.exit_code is None:
            return ExecResult(False, CANNOT_EXECUTE, "", result.output)
        code = shell_code(result.exit_code)
        return ExecResult(code == 0, code, result.stdout or "", result.stderr or "")

    async def _run_into_file(
        self, run: Callable[[list[str]], Awaitable[SlotResult]], cmd: list[str], limit: int
    ) -> SlotResult:
        """Run a program whose stdout may exceed the slot's bound, as inspect_ai reads its agents' requests."""
        slot, path = self._held.slot, f"/tmp/.stdout-{secrets.token_hex(8)}"
        try:
            result = await run(["/bin/sh", "-c", f'exec "$@" >{path}', "sh", *cmd])
            if result.exit_code is None or result.timed_out:
                return result
            return replace(result, stdout=(await slot.read_file(path, max_bytes=limit)).decode(errors="replace"))
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, None) from error
        finally:
            await slot.exec(["rm", "-f", path], user="0:0", concurrent=True)

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        with infrastructure(), named_errors(file):
            await self._held.slot.write_file(self._held.path(file), contents, user=self._held.user)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with infrastructure(), named_errors(file):
            data = await self._held.slot.read_file(self._held.path(file), max_bytes=limit, user=self._held.user)
        return data.decode() if text else data

    @override
    def default_polling_interval(self) -> float:
        return 0.2


def not_started(error: str) -> ExecResult[str]:
    """What a command that never ran is for inspect_ai.

    Raises:
        PermissionError: it may not be executed.
        SandboxUserUnsupportedError: slots here have one user.
    """
    code, _, message = error.partition(": ")
    if code == "permission":
        raise PermissionError(message)
    if code == "not_supported":
        raise SandboxUserUnsupportedError(message)
    return ExecResult(False, NOT_FOUND if code == "not_found" else CANNOT_EXECUTE, "", message)


@contextmanager
def named_errors(file: str) -> Generator[None]:
    """File errors that Python has no class of its own for, as inspect_ai wants them."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        if error.errno == errno.ETIMEDOUT:
            raise TimeoutError(f"{file}: {error}") from error
        raise
