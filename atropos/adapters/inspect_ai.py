"""Slots as sandboxes of inspect_ai: `sandbox="atropos"`, by its entry point."""

from __future__ import annotations

import errno
import logging
import posixpath
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from atropos.adapters.sharing import SharedPool, shared_pool
from atropos.config import SlotLimits
from atropos.errors import ConfigError, SandboxError
from atropos.slots import Slot, SlotPoolConfig

log = logging.getLogger("atropos.adapters")

MAX_OUTPUT_BYTES = 10 * 1024**2
"""Of one stream, as inspect_ai's own default says."""
FILE_NAMES = ["atropos.yaml", "atropos.yml"]
CANNOT_EXECUTE, NOT_FOUND = 126, 127
"""Exit codes of a shell for a command that it can't start."""


class AtroposSandboxConfig(BaseModel):
    """What a sample's sandbox is, and the pool that it comes from.

    Attributes:
        image: root file system: `python:3.12-slim`, `oci-archive:FILE` …; None: the pool's base.
        user: who commands run as and files belong to where inspect_ai names nobody; None: the image's user, else root.
        network: whether commands have (filtered) egress.
        pool: settings of `SlotPoolConfig`; samples wait an hour for a slot and have 10 MiB of output unless it says else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    user: str | None = None
    network: bool = False
    pool: dict[str, Any] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def shared(self) -> SharedPool:
        """The pool of all samples with the same settings."""
        settings: dict[str, Any] = {"acquire_timeout_s": 3600.0, "allow_network": self.network, **self.pool}
        settings.setdefault("limits", SlotLimits(output_bytes=MAX_OUTPUT_BYTES))
        return shared_pool(SlotPoolConfig(**settings))


def read_settings(given: BaseModel | str | None) -> AtroposSandboxConfig:
    """The settings of a sandbox as inspect_ai gives them: an object, the name of a YAML file, or nothing.

    Raises:
        ConfigError: it is something else.
    """
    if given is None:
        return AtroposSandboxConfig()
    if isinstance(given, str):
        return AtroposSandboxConfig.model_validate(yaml.safe_load(Path(given).read_text()) or {})
    if not isinstance(given, AtroposSandboxConfig):
        raise ConfigError(
            f"sandbox: {type(given).__name__} given; atropos takes an AtroposSandboxConfig or a YAML file"
        )
    return given


class SandboxGoneError(RuntimeError):
    """The infrastructure failed within a sample: the sample ends as an error, without a score.

    Not SandboxUnavailableError, which inspect_ai turns into a message to the model and then scores.
    """


@contextmanager
def infrastructure(failure: type[RuntimeError]) -> Generator[None]:
    """What fails here says nothing about the sample."""
    try:
        yield
    except SandboxError as error:
        raise failure(f"{error.code}: {error}") from error


@sandboxenv(name="atropos")  # pyright: ignore[reportUntypedClassDecorator]
class AtroposSandbox(SandboxEnvironment):
    """One slot."""

    def __init__(self, slot: Slot, config: AtroposSandboxConfig) -> None:
        super().__init__()
        self._slot = slot
        image = slot.image
        self._user = config.user or (image.user if image is not None else None) or None
        self._folder = (image.workdir or "/") if image is not None else "/workspace"

    # -------------------------------------------------------------------------------------------------------- life

    @classmethod
    @override
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Start the pool, or use the one that runs."""
        with infrastructure(SandboxUnavailableError):
            await read_settings(config).shared().enter()

    @classmethod
    @override
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """Stop the pool with its last task; slots that are kept outlive no process, so `cleanup` changes nothing."""
        await read_settings(config).shared().leave()

    @classmethod
    @override
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Lease a slot."""
        settings = read_settings(config)
        shared = settings.shared()
        with infrastructure(SandboxUnavailableError):
            pool = await shared.enter()
            slot = None
            try:
                slot = await pool.acquire(task_name, image=settings.image, network=settings.network)
                sandbox = cls(slot, settings)
                if settings.user is not None:
                    await slot.exec(["chown", settings.user, sandbox._folder], user="root")
            except BaseException:
                if slot is not None:
                    await slot.release()
                raise
            finally:
                await shared.leave()
        return {"default": sandbox}

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
            await environment.as_type(AtroposSandbox)._slot.release()  # noqa: SLF001

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
        with infrastructure(SandboxGoneError):
            result = await self._slot.exec(
                cmd,
                timeout_s=timeout,
                workdir=self._path(cwd or "."),
                env=env,
                user=user or self._user,
                stdin=input,
                split=True,
                max_output_bytes=limit,
            )
        if result.timed_out:
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            late.truncated_output = result.output  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            raise late
        if result.error is not None:
            return not_started(result.error)
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.output)
        if result.exit_code is None:
            return ExecResult(False, CANNOT_EXECUTE, "", result.output)
        code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
        return ExecResult(code == 0, code, result.stdout or "", result.stderr or "")

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        with infrastructure(SandboxGoneError), named_errors(file):
            await self._slot.write_file(self._path(file), contents, user=self._user)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with infrastructure(SandboxGoneError), named_errors(file):
            data = await self._slot.read_file(self._path(file), max_bytes=limit, user=self._user)
        return data.decode() if text else data

    @override
    def default_polling_interval(self) -> float:
        return 0.2

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._folder, path))


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
