"""Containers as subprocesses of this one: sandbox servers with the host's /usr as base, without an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from atropos.cgroup_paths import start_time
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable
from atropos.images.locks import is_still, try_lock
from atropos.slots.backends.local.server_process import COMMAND, ServerProcess
from atropos.slots.backends.supervised import DRAIN_S, SupervisedBackend, SupervisedServer
from atropos.slots.config import SlotPoolConfig

log = logging.getLogger(__name__)
HOST_AS_BASE = (
    "slots without an image have this machine's programs, and its /usr read-only: pip installs into /root/.local and "
    "virtual environments; apt-get, npm -g and what else writes to /usr fail. For a whole machine name an image "
    "(slot_image, or image= of a lease), or have `debootstrap trixie /srv/debian` make a root file system for "
    "base='/srv/debian'"
)


class LocalBackend(SupervisedBackend):
    """Supervised sandbox servers on this machine."""

    name = "local"

    def __init__(self, config: SlotPoolConfig, *, command: Sequence[str] = COMMAND) -> None:
        super().__init__(config)
        self.command = command
        self.scratch: Path | None = None
        self._base_noted = False

    async def start(self) -> None:
        """Create a scratch folder, and remove those of ended processes."""
        # At the start, as a killed process can't clean up after itself.
        remove_stale_scratch()
        self.scratch = make_scratch()

    def note_base(self) -> None:
        """Say it once."""
        if self._base_noted:
            return
        self._base_noted = True
        if self.config.base is None and not os.path.isdir("/rootfs"):
            # without a network nothing is installed from elsewhere
            log.log(logging.WARNING if self.config.allow_network else logging.INFO, HOST_AS_BASE)

    async def launch(self, index: int, token: str) -> SupervisedServer:
        """A subprocess with a scratch folder below ours."""
        del index
        assert self.scratch is not None
        config = self.config.server_config(token, drain_s=DRAIN_S)
        return await LocalServer.launch(config, self.scratch, self.command)

    async def aclose(self, *, purge: bool) -> None:
        """End all servers and remove our scratch folder."""
        try:
            await super().aclose(purge=purge)
        finally:
            if self.scratch is not None:
                remove_scratch(self.scratch)


class LocalServer(ServerProcess):
    """A server that ends with this process, and its scratch folder."""

    folder: Path

    @classmethod
    async def launch(cls, config: ServerConfig, scratch: Path, command: Sequence[str] = COMMAND) -> Self:
        """Start it in a new folder of `scratch`.

        Raises:
            BackendUnavailable: the process could not be started.
        """
        try:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            folder.chmod(0o755)  # the server passes through it as another user
        except OSError as error:  # no space, or somebody has removed `scratch`
            raise BackendUnavailable(f"a sandbox server could not be started: {error}") from error
        # PR_SET_PDEATHSIG (prctl(2)): a trainer killed with SIGKILL leaves no servers.
        own = config.model_copy(update={"die_with_parent": True, "state_dir": str(folder)})
        server = await cls.start(own, command)
        server.folder = folder
        return server

    @property
    def url(self) -> str:
        """On this machine's loopback."""
        return f"http://127.0.0.1:{self.port}"

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`; returns when it and its folder are gone."""
        try:
            await super().stop(grace_s)
        finally:
            remove_scratch(self.folder)


# -------------------------------------------------------------------------------------------------------------- scratch

_SCRATCH = re.compile(r"atropos-(\d+)-(\d+)-")
_locks: dict[Path, int] = {}


def make_scratch() -> Path:
    """Create an empty folder, named after this process and locked by it, for the servers' private mounts.

    Raises:
        BackendUnavailable: the temporary folder can't hold it: no space, or a file system without locks.
    """
    pid = os.getpid()
    try:
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"atropos-{pid}-{start_time(pid)}-"))
            try:
                path.chmod(0o755)  # the server passes through it as another user
                # Between mkdtemp and the lock another process may take it for a stale one, and remove it: then once
                # more.
                if lock(path):
                    return path
            except OSError:
                path.rmdir()
                raise
    except OSError as error:
        raise BackendUnavailable(
            f"no folder for sandbox servers can be made and locked in the temporary folder: {error}; "
            "set TMPDIR to a folder of a local disk"
        ) from error


def lock(path: Path) -> bool:
    """Lock a folder until it is removed or this process ends. False: another process has locked it, or it is gone.

    Raises:
        OSError: its file system has no locks, as Lustre may not.
    """
    try:
        # /tmp is everybody's: O_NOFOLLOW, as a link of this name may lead anywhere.
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    locked = False
    try:
        locked = try_lock(fd) and is_still(path, fd)
    finally:
        if locked:
            _locks[path] = fd
        else:
            os.close(fd)
    return locked


def remove_scratch(path: Path) -> None:
    """Remove a scratch folder, empty folders only: files in a mount that shows here are kept."""
    # rmdir alone, which removes no file, and no folder that something is mounted on here (EBUSY).
    for folder, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    if (fd := _locks.pop(path, None)) is not None:
        os.close(fd)


def remove_stale_scratch() -> None:
    """Remove scratch folders of killed processes.

    A folder's name has its process, but one in another PID namespace is not visible here, so its lock decides. Removing
    a folder detaches what is mounted on it elsewhere.
    """
    with contextlib.suppress(OSError):  # without locks, unused ones can't be told from those in use
        for path in Path(tempfile.gettempdir()).glob("atropos-*"):
            # Cheap tests first: most folders are of processes that run.
            if (match := _SCRATCH.match(path.name)) and start_time(int(match[1])) != int(match[2]) and lock(path):
                remove_scratch(path)
