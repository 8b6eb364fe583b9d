"""One sandbox server in a Modal sandbox: its start, its tunnel and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Generator

import modal
from grpclib.exceptions import GRPCError, StreamTerminatedError
from modal import exception

from atropos.aio import Tasks, outlive
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.local.server_process import SHOWN_CHARS, last_line
from atropos.slots.backends.modal.settings import ModalSettings
from atropos.slots.backends.server_http import DOUBT_S, ServerHttp
from atropos.slots.backends.spec import CONTAINER_PORT, SERVER_COMMAND, ContainerSpec, refused
from atropos.slots.config import SlotPoolConfig, server_json

LIFETIME_S = 86_400
"""Longest life of a sandbox at Modal, after which it is replaced."""
GONE_S = 4.0
"""How long Modal may take to end a sandbox."""
AGAIN_S = 1.0
"""Pause before Modal is asked again whether a sandbox has ended, where it gave no answer."""
_REFUSED = (
    exception.AuthError,
    exception.ImageBuildError,
    exception.InvalidError,
    exception.NotFoundError,
    exception.PermissionDeniedError,
    exception.VersionError,
)
_UNANSWERED = (exception.Error, GRPCError, StreamTerminatedError, OSError)
"""The SDK raises its transport's own errors where its retries have failed."""


@contextlib.contextmanager
def _failures() -> Generator[None]:
    """Raise Modal's errors as ours."""
    try:
        yield
    except exception.AuthError as error:
        raise ConfigError(
            f"backend: 'modal' finds no valid token ({_line(error)}): make one with `modal token new`"
        ) from error
    except _REFUSED as error:
        raise ConfigError(f"backend: Modal refused the sandbox: {_line(error)}") from error
    except _UNANSWERED as error:
        raise BackendUnavailable(f"Modal: {_line(error)}") from error


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[-SHOWN_CHARS:]


class ModalServer:
    """One sandbox and the server in it.

    Args:
        pool: whose settings say what the sandbox is made of.
        config: the server's settings, without those of its address.
        http: requests to the server.
    """

    def __init__(self, pool: SlotPoolConfig, config: ServerConfig, http: ServerHttp) -> None:
        self.id = self.place = f"modal-{secrets.token_hex(6)}"
        self.url = ""
        self._pool = pool
        self._config = config.model_copy(update={"host": "0.0.0.0", "port": CONTAINER_PORT})
        self._http = http
        self._tasks = Tasks(self.id)
        self._creating: asyncio.Task[modal.Sandbox] | None = None

    async def ready(self, timeout_s: float) -> None:
        """Create the sandbox, start the server in it, and wait until it answers through its tunnel."""
        try:
            async with asyncio.timeout(timeout_s):
                with _failures():
                    await self._start(timeout_s)
        except TimeoutError:
            raise BackendUnavailable(f"Modal: no sandbox server was ready within {timeout_s:g} s") from None

    async def _start(self, timeout_s: float) -> None:
        # a sandbox may be created though this is cancelled: `stop` waits for it
        # Shielded below for the same reason.
        self._creating = self._tasks.spawn(self._create(), "create", awaited=True)
        sandbox = await asyncio.shield(self._creating)
        sandbox.stdin.write(server_json(self._config))
        sandbox.stdin.write_eof()
        await sandbox.stdin.drain.aio()
        # Modal may print lines of its own before the server's.
        async for line in sandbox.stdout:
            with contextlib.suppress(ValueError):
                if "port" in json.loads(line):
                    break
        else:
            raise await self.ended()
        tunnels = await sandbox.tunnels.aio()
        self.url = tunnels[CONTAINER_PORT].url
        # A tunnel is there some time before it leads anywhere.
        if not await self._http.until_healthy(self.url, timeout_s):
            raise BackendUnavailable(f"Modal: {self.url} leads to no sandbox server")

    async def _create(self) -> modal.Sandbox:
        pool = self._pool
        memory_mib = ContainerSpec.from_pool(pool).room.memory_mib
        image = modal.Image.from_registry(pool.image)
        return await modal.Sandbox.create.aio(
            *SERVER_COMMAND,
            app=await modal.App.lookup.aio(pool.job_id, create_if_missing=True),
            image=image.entrypoint([]),  # the image's own starts a server with other settings
            tags={"atropos": self.id},
            cpu=pool.of(ModalSettings).modal_cpus,
            memory=(memory_mib, memory_mib),  # request and limit
            timeout=LIFETIME_S,
            encrypted_ports=[CONTAINER_PORT],  # the tunnel terminates TLS
            runtime="vm",  # gVisor, Modal's default, lacks namespaces and mounts that slots need
        )

    async def ended(self) -> Exception:
        """Wait until the server and its sandbox have ended. Returns why: one of the errors of `ready`."""
        assert self._creating is not None
        sandbox = await self._creating
        # While Modal's API is away, the server itself says that it runs.
        while not await self._ended(sandbox) and self.url and await self._http.until_healthy(self.url, DOUBT_S):  # noqa: ASYNC110 (Modal is asked)
            await asyncio.sleep(AGAIN_S)
        last = last_line(())
        with contextlib.suppress(*_UNANSWERED):
            last = last_line((await sandbox.stderr.read.aio()).split("\n"))
        why = refused(sandbox.returncode, f"in Modal's sandbox: {last}")
        return why or BackendUnavailable(f"Modal's sandbox ended ({sandbox.returncode}): {last}")

    @staticmethod
    async def _ended(sandbox: modal.Sandbox) -> bool:
        """Wait until a sandbox has ended; False: Modal doesn't answer, which says nothing of it."""
        try:
            await sandbox.wait.aio(raise_on_termination=False)
        except _UNANSWERED:
            return False
        return True

    async def stop(self, grace_s: float) -> None:
        """Ask the server to end, and after `grace_s` end the sandbox; returns when it is gone."""
        if self._creating is None:
            return
        try:
            if self.url and grace_s > 0:
                async with asyncio.timeout(grace_s):
                    if await self._http.drain(self.url, self._config.token.get_secret_value(), grace_s):
                        await self.ended()
        except TimeoutError:
            pass
        finally:
            await outlive(self._gone(self._creating))  # also where a shutdown's last deadline has ended the wait above

    async def _gone(self, creating: asyncio.Task[modal.Sandbox]) -> None:
        with contextlib.suppress(*_UNANSWERED):
            async with asyncio.timeout(GONE_S):
                sandbox = await asyncio.shield(creating)
                await sandbox.terminate.aio(wait=True)

    async def tidy(self) -> None:
        """Nothing is left to remove."""
