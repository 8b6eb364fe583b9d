"""Slots as workspaces of OpenHands, with its agent server in them: `AtroposRemoteWorkspace`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any

from atropos.adapters.extras import extra

with extra("openhands-sdk"):
    from openhands.sdk.workspace import RemoteWorkspace

import httpx
from pydantic import ConfigDict, Field, PrivateAttr
from typing_extensions import override

from atropos.adapters.sharing import HeldSlot, SandboxGoneError, SlotRequest, infrastructure
from atropos.errors import ConfigError
from atropos.event_loop import event_loop, release
from atropos.slots import Process

PORT = 38000
"""Of the agent server, on its slot's loopback."""
POLL_S = 0.2
"""Interval of looks whether the server answers."""


class AtroposRemoteWorkspace(RemoteWorkspace):
    """One slot with OpenHands' agent server in it, until `cleanup`, the end of a `with`, or that of the process.

    Attributes:
        image: has the server, as its ENTRYPOINT, unless `command` says what starts it; None: the pool's base.
        command: what starts the server.
        env: variables of the server.
        reach: ports of this machine's loopback that the slot has as its own, as of an inference server.
        start_s: longest that the server may take until it answers.
        user, network, gpus, gpu_types, pool: as `SlotRequest`'s.
    """

    model_config = ConfigDict(hide_input_in_errors=True)
    """Variables may be secrets."""
    working_dir: str = "/workspace"
    host: str = ""
    image: str | None = "ghcr.io/openhands/agent-server:latest-python"
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    reach: tuple[int, ...] = ()
    start_s: float = Field(default=120.0, gt=0)
    user: str | None = None
    network: bool = False
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    pool: dict[str, Any] = Field(default_factory=dict)

    _held: HeldSlot | None = PrivateAttr(default=None)

    @override
    def model_post_init(self, context: Any) -> None:
        """Lease the slot and start the server.

        Raises:
            SandboxGoneError: there is no slot, or it was lost.
            ValidationError: the image has no server, or that ends.
        """
        with infrastructure():
            event_loop().run(self._start())
        super().model_post_init(context)

    async def _start(self) -> None:
        names = SlotRequest.model_fields.keys()
        request = SlotRequest(**{name: value for name, value in self if name in names})
        held = await HeldSlot.lease(request, "openhands")
        event_loop().hold(held, held.release)
        try:
            self.api_key = self.api_key or secrets.token_hex(16)
            process = await self._started(held, self.api_key)
            for port in self.reach:
                await held.reach(port)
            self.host = f"http://127.0.0.1:{await held.expose(PORT)}"
            await self._answers(process)
        except BaseException:
            await held.release()
            raise
        self._held = held

    async def _started(self, held: HeldSlot, key: str) -> Process:
        image = held.slot.image
        argv = self.command or (image.entrypoint if image is not None else ())
        if not argv:
            raise ConfigError(
                f"command: {self.image or 'the base'} has no ENTRYPOINT that would start the agent server"
            )
        if refused := await held.make_folder(self.working_dir):
            raise ConfigError(f"working_dir: {self.working_dir} can't be made: {refused}")
        argv = [*argv, "--host", "127.0.0.1", "--port", str(PORT)]
        env = {**self.env, "OH_SESSION_API_KEYS_0": key}
        try:
            return await held.slot.start(argv, env=env, user=held.user, workdir=held.folder)
        except OSError as error:
            raise ConfigError(f"command: {argv[0]} can't be started: {error}") from error

    async def _answers(self, process: Process) -> None:
        """Wait until the server does."""
        late = time.monotonic() + self.start_s
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    if (await client.get(f"{self.host}/health", timeout=5)).is_success:
                        return
                except httpx.TransportError:
                    pass
                output = (await process.read()).decode(errors="replace")[-1000:]
                if process.exit_code is not None:
                    raise ConfigError(f"command: the agent server ended with {process.exit_code}: {output}")
                if time.monotonic() > late:
                    raise ConfigError(f"start_s: the agent server doesn't answer after {self.start_s:g} s: {output}")
                await asyncio.sleep(POLL_S)

    @override
    def _execute(self, generator: Generator[dict[str, Any], httpx.Response, Any]) -> Any:
        """As the base class, whose results hide that the server can't be reached: then the slot is asked.

        Raises:
            SandboxGoneError: it is lost, or its agent server is, so that nothing is known of what was to be done.
        """
        try:
            result = super()._execute(generator)
        except httpx.HTTPError:
            self._check()
            raise
        if getattr(result, "exit_code", 0) == -1 or getattr(result, "success", True) is False:
            self._check()
        return result

    def _check(self) -> None:
        if self._held is None:
            raise SandboxGoneError("the workspace was cleaned up")
        with infrastructure():
            event_loop().run(self._held.slot.processes())
        if not self.alive:
            raise SandboxGoneError("the agent server in the slot doesn't answer")

    @override
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self.cleanup()

    def __del__(self) -> None:
        private = getattr(self, "__pydantic_private__", None)  # there is none after a refused argument
        if (held := (private or {}).get("_held")) is not None:
            release(held)

    def cleanup(self) -> None:
        """Give the slot back, with all that runs in it. Idempotent."""
        held, self._held = self._held, None
        self.reset_client()
        if held is not None and (given_back := release(held)) is not None:
            given_back.result()
