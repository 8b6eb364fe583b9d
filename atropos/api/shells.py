"""Terminals into what a server's keys have open: started, fed and followed over HTTP, each noted in the audit log."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import FastAPI, Path, Request
from fastapi.responses import StreamingResponse

from atropos.aio import Tasks
from atropos.api.executor.models import OpenShell, ShellEnd, ShellInfo, ShellSize
from atropos.api.executor.trajectories import refusal_of
from atropos.api.http import Refusal, problems
from atropos.api.tenants import RELOAD_S, Tenant, Tenants, tenant_of
from atropos.errors import SandboxError
from atropos.slots.slot import Slot
from atropos.slots.slot.processes import Process

MAX_SHELLS = 64
"""Shells that a key may have open at once."""
COMMAND = "command -v bash >/dev/null && exec bash -l; exec sh -l"
UNFOLLOWED_S = 60.0
"""How long a shell is kept while no request follows its output."""
_ERRORS = problems(401, 404, 409, 410, 429)
Id = Annotated[str, Path(min_length=1, max_length=200)]


@dataclass(eq=False)
class Shell:
    """One terminal.

    Attributes:
        by: who opened it.
        owner: whose slot it is in.
        unfollowed_since: when its last follower left, or its start; None while somebody follows it.
    """

    by: Tenant
    owner: Tenant
    subject: str
    process: Process
    began: float = field(default_factory=time.monotonic)
    unfollowed_since: float | None = field(default_factory=time.monotonic)


class Shells:
    """The shells of a server. One ends with its program, its slot, or the request that follows its output."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._open: dict[str, Shell] = {}
        self._starting: list[Tenant] = []
        """Who is opening one, once for each."""
        self._ends = Tasks("shells")

    async def open(self, by: Tenant, wanted: OpenShell) -> str:
        """Start one; its id.

        Raises:
            Refusal: 404, the key knows nothing of that id; 409, several keys have it; 429, there are too many shells.
        """
        for shell_id, shell in list(self._open.items()):
            if shell.unfollowed_since is not None and time.monotonic() - shell.unfollowed_since > UNFOLLOWED_S:
                await self.end(shell_id)
        with by.account.noting_refusals("shell", wanted.id):
            shell = await self._start(by, wanted)
        shell_id = secrets.token_hex(16)
        self._open[shell_id] = shell
        by.account.note("shell.open", wanted.id, owner=shell.owner.account.name)
        return shell_id

    async def _start(self, by: Tenant, wanted: OpenShell) -> Shell:
        if [*(shell.by for shell in self._open.values()), *self._starting].count(by) >= MAX_SHELLS:
            raise Refusal(429, "full", f"{MAX_SHELLS} shells of this key are open", retry_after_s=5)
        owner, slot = self._slot(by, wanted.id)
        self._starting.append(by)
        try:
            process = await slot.start(COMMAND, pty=(wanted.rows, wanted.cols), hold=True, concurrent=True)
        except SandboxError as error:
            raise refusal_of(error) from None
        except OSError as error:
            raise Refusal(409, "no_shell", f"{wanted.id} has no shell that starts: {error.strerror or error}") from None
        finally:
            self._starting.remove(by)
        return Shell(by, owner, wanted.id, process)

    def _slot(self, by: Tenant, subject: str) -> tuple[Tenant, Slot]:
        """What a key's holder means by an id, or by KEY/ID."""
        owner, slash, name = subject.rpartition("/")
        seen = list(self._tenants.all()) if by.account.key.admin else [by]
        owners = [
            (tenant, slot)
            for tenant in seen
            if not slash or tenant.account.name == owner
            for slot in (tenant.slot_of(name),)
            if slot is not None
        ]
        if len(owners) == 1:
            return owners[0]
        if not owners:
            raise Refusal(
                404,
                "not_found",
                f"nothing that is open has the id {subject[:200]!r}; `atropos top URL` lists all to admins",
            )
        names = ", ".join(f"{tenant.account.name}/{name}" for tenant, _ in owners)
        raise Refusal(409, "ambiguous", f"several are called so; write one of {names}")

    def get(self, by: Tenant, shell_id: str) -> Shell:
        """A shell of this key's.

        Raises:
            Refusal: 404, it has none of this id.
        """
        shell = self._open.get(shell_id)
        if shell is None or shell.by is not by or not self._permitted(shell):
            raise Refusal(404, "not_found", "there is no such shell; it has ended, or never existed")
        return shell

    def _permitted(self, shell: Shell) -> bool:
        """Whether the keys file, as it is now, lets its opener's key have it."""
        return shell.by in self._tenants.all() and (shell.by is shell.owner or shell.by.account.key.admin)

    async def follow(self, shell_id: str, shell: Shell) -> AsyncGenerator[bytes]:
        """Its output as it comes. Ends with the shell, or its opener's key; who stops listening ends the shell."""
        shell.unfollowed_since = None
        try:
            # Not only while its program runs: one in a slot that answers nobody is ended, too.
            while shell_id in self._open and not shell.process.over:
                output = await shell.process.read(wait_s=RELOAD_S)
                if not self._permitted(shell):
                    return
                yield output
        except (SandboxError, OSError):  # `end` says why
            return
        finally:
            shell.unfollowed_since = time.monotonic()
            if shell.process.exit_code is None:
                self._ends.spawn(self.end(shell_id), f"end {shell_id}")

    async def end(self, shell_id: str) -> int | None:
        """End it; its exit code, where that is known."""
        shell = self._open.pop(shell_id, None)
        if shell is None:
            return None
        try:
            if await shell.process.poll() is None:
                await shell.process.kill()
        except (SandboxError, OSError):  # its slot is gone
            pass
        code, seconds = shell.process.exit_code, round(time.monotonic() - shell.began, 1)
        shell.by.account.note("shell.end", shell.subject, owner=shell.owner.account.name, outcome=code, seconds=seconds)
        return code

    async def aclose(self) -> None:
        """End all."""
        await self._ends.cancel()
        await asyncio.gather(*map(self.end, list(self._open)))


@contextlib.contextmanager
def _refused() -> Generator[None]:
    """Answer a client whose shell or slot is gone."""
    try:
        yield
    except SandboxError as error:
        raise refusal_of(error) from None
    except OSError:
        raise Refusal(410, "shell_ended", "the shell has ended") from None


def add_shells(app: FastAPI) -> None:
    """Add the routes to an app that has its `tenants`."""
    shells = app.state.shells = Shells(app.state.tenants)

    @app.post("/shells", status_code=201, responses={**_ERRORS, **problems(422, 503)})
    async def opened(request: Request, wanted: OpenShell) -> ShellInfo:
        """Start a shell on a terminal in the slot of a trajectory or sandbox. An admin's key may name anybody's."""
        return ShellInfo(shell_id=await shells.open(tenant_of(request), wanted))

    @app.get(
        "/shells/{shell_id}/output",
        responses={**_ERRORS, 200: {"content": {"application/octet-stream": {}}}},
        response_model=None,
    )
    async def output(request: Request, shell_id: Id) -> StreamingResponse:
        """What the terminal shows, as it comes, to its end. To close this request is to end the shell."""
        shell = shells.get(tenant_of(request), shell_id)
        if shell.unfollowed_since is None:
            raise Refusal(409, "followed", "another request follows this shell")
        return StreamingResponse(shells.follow(shell_id, shell), media_type="application/octet-stream")

    @app.post("/shells/{shell_id}/input", status_code=204, responses=_ERRORS)
    async def typed(request: Request, shell_id: Id) -> None:
        """Type the request's body on the terminal."""
        shell = shells.get(tenant_of(request), shell_id)
        with _refused():
            await shell.process.write(await request.body())

    @app.put("/shells/{shell_id}/size", status_code=204, responses={**_ERRORS, **problems(422)})
    async def sized(request: Request, shell_id: Id, size: ShellSize) -> None:
        """Give the terminal another size."""
        shell = shells.get(tenant_of(request), shell_id)
        with _refused():
            await shell.process.resize(size.rows, size.cols)

    @app.delete("/shells/{shell_id}", responses=_ERRORS)
    async def ended(request: Request, shell_id: Id) -> ShellEnd:
        """End the shell, and everything that its terminal started; its exit code, if it had ended by itself."""
        shells.get(tenant_of(request), shell_id)
        return ShellEnd(exit_code=await shells.end(shell_id))
