"""A complete backend: each container is a sandbox server that this process starts. See docs/backends.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import shutil
from collections.abc import Sequence

from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.slots import SlotPoolConfig
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from atropos.slots.config import server_json
from examples.backends.settings import ProcessSettings

SERVER = ("-m", "atropos.sandbox", "--config", "-")
"""Arguments of Python."""
REFUSED = {2: ConfigError, 3: IsolationUnavailable}
"""Exit codes of a server with which trying again makes no sense: a wrong setting, a host that can't isolate."""
PAUSE_S = (0.1, 10.0)
"""First and longest pause before a server that ended by itself is started again."""
STOP_S = 2.0
"""How long a server may take to end in order."""


class ProcessBackend(Backend):
    """Keeps `count` servers running; they end with this process."""

    name = "processes"

    def __init__(self, config: SlotPoolConfig) -> None:
        self._config = config
        self._python = config.of(ProcessSettings).processes_python
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._containers: dict[int, Container] = {}
        self._trouble: dict[int, str] = {}
        self._failure: Exception | None = None
        self._ever_ready = False
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Check the setting: there is nothing to connect to, and nothing that an earlier run could have left."""
        if shutil.which(self._python) is None:
            raise ConfigError(f"processes_python: there is no program {self._python!r}")

    async def scale(self, count: int) -> None:
        for index in [index for index in self._keepers if index >= count]:
            self._end(index)
        for index in range(count):
            if index not in self._keepers:
                self._keepers[index] = asyncio.create_task(self._keep(index), name=f"container {index}")
        self._news.set()

    def containers(self) -> Sequence[Container]:
        return list(self._containers.values())

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()

    def trouble(self) -> str:
        return "; ".join(self._trouble.values())

    def failure(self) -> Exception | None:
        return self._failure

    async def retire(self, container: Container) -> None:
        if self._containers.get(container.index) == container:
            count = len(self._keepers)
            self._end(container.index)
            await self.scale(count)

    async def aclose(self, *, purge: bool) -> None:
        for index in list(self._keepers):
            self._end(index)
        if self._ending:
            await asyncio.wait(self._ending)
        self._news.set()

    # ------------------------------------------------------------------------------------------------------ inside

    def _end(self, index: int) -> None:
        task = self._keepers.pop(index)
        self._containers.pop(index, None)
        self._trouble.pop(index, None)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    async def _keep(self, index: int) -> None:
        """Start a server, and another one when it ends by itself, until cancelled."""
        pause, longest = PAUSE_S
        while True:
            try:
                await self._run(index)
            except (ConfigError, IsolationUnavailable) as error:
                if not self._ever_ready:
                    self._failure = error
                    self._news.set()
                    return
                self._trouble[index] = str(error)
            except BackendUnavailable as error:
                self._trouble[index] = str(error)
            self._news.set()
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(2 * pause, longest)

    async def _run(self, index: int) -> None:
        """One server from start to end; raises when it ends by itself."""
        token = secrets.token_urlsafe(32)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._python, *SERVER, stdin=pipe, stdout=pipe, cwd="/", start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        me = asyncio.current_task()
        try:
            with contextlib.suppress(OSError):  # it has ended already: its exit code says why
                process.stdin.write(server_json(self._config.server_config(token, die_with_parent=True, drain_s=0)))
                process.stdin.write_eof()
            if line := await process.stdout.readline():
                url = f"http://127.0.0.1:{json.loads(line)['port']}"
                container = Container(f"{process.pid}-{secrets.token_hex(4)}", index, url, token, "running")
                self._containers[index] = container
                self._trouble.pop(index, None)
                self._ever_ready = True
                self._news.set()
            code = await process.wait()
            raise REFUSED.get(code, BackendUnavailable)(f"a sandbox server ended with exit code {code}; see its log")
        finally:
            if self._keepers.get(index) is me:
                self._containers.pop(index, None)
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_S)
                process.kill()
            await process.wait()
