"""One pool for all environments of a process with the same settings, and the slots that they hold."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atropos.errors import ConfigError, ImageUnavailable, SandboxError
from atropos.slots import ExecResult, LeaseLimits, PortForward, Slot, SlotPool, SlotPoolConfig
from atropos.wire import SlotLimits

WAIT_FOR_SLOT_S = 3600.0
"""How long an environment waits for a slot, where `acquire_timeout_s` doesn't say."""
MAX_OUTPUT_BYTES = 10 * 1024**2
"""Output kept of a command, where `limits` has no `output_bytes`."""
LONGEST_COMMAND_S = 24 * 3600.0
"""Longest a command may run, where `limits` has no `wall_s`: an agent may be one, and the host has its own time
limits."""

SLEEP = ("sleep", "infinity")
"""What hosts start an image's containers with, so that they run until they are removed."""
CANNOT_EXECUTE, NOT_FOUND = 126, 127
"""Exit codes of a shell for a command that it can't start."""
READ_WAIT_S = 30.0
"""Longest wait of one request for a terminal's output."""
BUFFER_BYTES = 4_000_000
"""Output of a terminal that the slot keeps until it is read."""


class SandboxGoneError(RuntimeError):
    """The infrastructure failed: nothing is known about the command, and nothing may be concluded about the model."""


@dataclass
class SharedPool:
    """A pool of one event loop, started for its first holder and stopped with its last."""

    config: SlotPoolConfig
    holders: int = 0
    _pool: SlotPool | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self) -> SlotPool:
        """The running pool, until the matching `leave`.

        Raises:
            SandboxError: it can't be started.
        """
        self.holders += 1
        try:
            async with self._lock:
                if self._pool is None:
                    pool = SlotPool(self.config)
                    await pool.start()
                    self._pool = pool
                return self._pool
        except BaseException:
            self.holders -= 1
            raise

    async def leave(self) -> None:
        """One holder fewer; after the last one nothing of the pool is left."""
        self.holders -= 1
        async with self._lock:
            if not self.holders and self._pool is not None:
                pool, self._pool = self._pool, None
                await pool.stop()


_shared: dict[tuple[asyncio.AbstractEventLoop, str], SharedPool] = {}


def pool_config(settings: Mapping[str, object], *, network: bool) -> SlotPoolConfig:
    """A pool's settings, with an hour's wait for a slot, a day for a command and 10 MiB of output where they don't say.

    Args:
        settings: fields of `SlotPoolConfig`.
        network: `allow_network` where they don't say.
    """
    config = SlotPoolConfig(**{"acquire_timeout_s": WAIT_FOR_SLOT_S, "allow_network": network, **settings})
    own = {"output_bytes": MAX_OUTPUT_BYTES, "wall_s": LONGEST_COMMAND_S}
    limits = SlotLimits.model_validate({**own, **config.limits.model_dump(exclude_unset=True)})
    return config.model_copy(update={"limits": limits})


def shared_pool(config: SlotPoolConfig) -> SharedPool:
    """The pool of this event loop for these settings."""
    loop = asyncio.get_running_loop()
    # Some hosts run a loop for each command. A pool of one that was closed can't be stopped any more.
    for key in [key for key in _shared if key[0].is_closed()]:
        del _shared[key]
    return _shared.setdefault((loop, config.model_dump_json()), SharedPool(config))


class SlotRequest(BaseModel):
    """The slot that an environment of a host gets, and the pool that it comes from.

    Attributes:
        image: root file system: `python:3.12-slim`, `oci-archive:FILE` …; None: the pool's base.
        user: who commands run as and files belong to where the host names nobody; None: the image's user, else root.
        network: whether commands have (filtered) egress.
        gpus: GPUs of the slot's own (docs/gpu.md).
        gpu_types: what these may be; empty: anything.
        pool: settings of `SlotPoolConfig`; an environment waits an hour for a slot, and a command has a day and 10 MiB
            of output, unless these say otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    image: str | None = None
    user: str | None = None
    network: bool = False
    gpus: int = Field(default=0, ge=0)
    gpu_types: tuple[str, ...] = ()
    pool: dict[str, object] = Field(default_factory=dict)

    @field_validator("pool")
    @classmethod
    def _checked(cls, value: dict[str, object]) -> dict[str, object]:
        """Refuse what no pool takes before there is one."""
        SlotPoolConfig(**value)
        return value

    def __hash__(self) -> int:  # inspect_ai hashes a sandbox's configuration, which a frozen model with a dict can't
        return hash(self.model_dump_json())

    def with_gpus(self, gpus: int, types: Sequence[str] = ()) -> Self:
        """The same with GPUs that a task asks for, if it does."""
        return self.model_copy(update={"gpus": gpus, "gpu_types": tuple(types)}) if gpus else self

    def refusal(self, memory_mib: float | None, disk_mib: float | None) -> str | None:
        """Why a slot can't meet a task's requests, naming the setting; None: it can."""
        config = SlotPoolConfig(**self.pool)
        limits = config.limits
        if refused := config.gpu_refusal(self.gpus, self.gpu_types):
            return f"gpu: {refused}, in pool"
        if (memory_mib or 0) > limits.memory_mib:
            return f"memory ({memory_mib:g} MiB): a slot has {limits.memory_mib}; raise pool.limits.memory_mib"
        if (disk_mib or 0) > limits.disk_mib:
            return f"disk ({disk_mib:g} MiB): a slot has {limits.disk_mib} MiB; raise pool.limits.disk_mib"
        return None

    def shared(self) -> SharedPool:
        """The pool of all environments with the same settings."""
        return shared_pool(pool_config(self.pool, network=self.network))


@dataclass(frozen=True, eq=False)
class HeldSlot:
    """A slot of a shared pool, which runs at least until `release`.

    Attributes:
        slot: the slot.
        user: who commands run as and files belong to; None: root.
        folder: what relative paths start from.
    """

    slot: Slot
    user: str | None
    folder: str
    _undo: AsyncExitStack
    _exposed: dict[int, int] = field(default_factory=dict[int, int])
    _reached: set[int] = field(default_factory=set[int])
    _forwarding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def lease(cls, request: SlotRequest, name: str, *, waits: Sequence[str] | None = None) -> Self:
        """Start or join the pool and lease a slot.

        Args:
            request: which one.
            name: for the server's status and logs.
            waits: what the image's ENTRYPOINT is started with, in the place of its CMD, as hosts keep a container
                running; its services may be part of the task. None: it isn't started.

        Raises:
            SandboxError: there is none, or its image's ENTRYPOINT can't be started.
            ConfigError: it has no such user.
        """
        shared = request.shared()
        async with AsyncExitStack() as undo:
            pool = await shared.enter()
            undo.push_async_callback(shared.leave)
            limits = LeaseLimits(gpus=request.gpus, gpu_types=request.gpu_types) if request.gpus else None
            slot = await pool.acquire(name, image=request.image, network=request.network, limits=limits)
            undo.push_async_callback(slot.release)
            image = slot.image
            folder = "/workspace" if image is None else image.workdir or "/"
            if request.user is not None:
                await give(slot, request.user, folder)
            if waits is not None and image is not None and image.entrypoint:
                try:
                    await slot.start([*image.entrypoint, *waits])
                except OSError as error:
                    raise ImageUnavailable(f"ENTRYPOINT: {error}") from error
            user = request.user or (image.user if image is not None else None) or None
            return cls(slot, user, folder, undo.pop_all())

    async def make_folder(self, path: str) -> str | None:
        """Make a folder that commands of the user start in, unless it is there, as Docker does.

        Returns:
            Why it can't be made, if it can't.
        """
        script = '[ -d "$1" ] || { mkdir -p "$1" && chown "$2" "$1"; }'
        result = await self.slot.exec(["sh", "-c", script, "sh", self.path(path), self.user or "0"], user="0:0")
        return None if result.exit_code == 0 else result.error or result.output.strip()

    async def release(self) -> None:
        """Give the slot back, with all that runs in it; the pool stops with its last holder. Idempotent."""
        await self._undo.aclose()

    async def expose(self, port: int) -> int:
        """The port of this machine's loopback that leads to the slot's, until `release`.

        Raises:
            SandboxError: the slot is gone.
        """
        async with self._forwarding:
            if port not in self._exposed:
                forward = await self._undo.enter_async_context(await PortForward.to_slot(self.slot, port))
                self._exposed[port] = forward.port
            return self._exposed[port]

    async def reach(self, port: int) -> None:
        """Let the slot reach a port of this machine's loopback as its own, until `release`.

        Raises:
            SandboxError: the slot is gone.
            OSError: the port is taken in the slot.
        """
        async with self._forwarding:
            if port not in self._reached:
                await self._undo.enter_async_context(await PortForward.from_slot(self.slot, port, port))
                self._reached.add(port)

    def path(self, path: str) -> str:
        """An absolute path."""
        return posixpath.normpath(posixpath.join(self.folder, path))


async def upload_file(slot: Slot, source: Path, target: str) -> str:
    """Copy a file, as root, to a path or into a folder (one that exists, or a path with a final slash), as `docker cp`.

    Returns:
        Where it is.

    Raises:
        OSError: it can't be read here or written there.
        SandboxError: the infrastructure failed.
    """
    inside = f"{target.rstrip('/')}/{source.name}"
    if not target.endswith("/"):
        with suppress(IsADirectoryError):
            await slot.upload(source, target)
            return target
    await slot.upload(source, inside)
    return inside


async def give(slot: Slot, user: str, path: str) -> None:
    """Give a file or folder to the user who works with it.

    Raises:
        ConfigError: there is no such user; as a result of each command, that would be taken for the model's failure.
    """
    if (await slot.exec(["chown", user, path], user="0:0")).exit_code != 0:
        refused = await slot.exec(["true"], user=user, workdir="/")
        if refused.error is not None and refused.error.partition(":")[0] in {"unknown_user", "not_supported"}:
            raise ConfigError(f"user: {refused.output}")


def shell_code(exit_code: int) -> int:
    """An exit code as a shell and `docker exec` give it: 128 + N where signal N ended the program."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def not_started(result: ExecResult) -> tuple[int, str]:
    """Exit code, as a shell gives it, and reason of a program that could not be started."""
    error = result.error or "it never ran"
    return NOT_FOUND if error.startswith("not_found") else CANNOT_EXECUTE, error


def time_limit(result: ExecResult, timeout_s: float | None) -> str:
    """What ended a command that took too long, for a message: its own time-out, or the slot's limit before it."""
    if timeout_s is None or result.duration_s < timeout_s:
        return "the slot's limits.wall_s"
    return f"{timeout_s:g} seconds"


@contextmanager
def infrastructure(failure: type[BaseException] = SandboxGoneError) -> Generator[None]:
    """Turn an infrastructure failure into the host's own error for one, which it never scores."""
    try:
        yield
    except SandboxError as error:
        raise failure(f"{error.code}: {error}") from error
