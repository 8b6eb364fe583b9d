"""`atropos shell`: a terminal into a slot of an executor server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Generator
from typing import Annotated
from urllib.parse import quote

import httpx
import typer

from atropos.aio import Tasks
from atropos.api.cli import EXECUTOR_TOKEN_VARIABLE
from atropos.cli.looking import refuse
from atropos.errors import BackendUnavailable, ConfigError

_ANSWER_S = 30.0
_END = b"\x04"
"""What ^D types."""


def shell(
    slot: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A trajectory or sandbox, or KEY/ID; an admin's `atropos top URL` lists all."
        ),
    ],
    url: Annotated[str, typer.Option(help="The executor server.")] = "http://127.0.0.1:8461",
    token: Annotated[
        str | None, typer.Option(envvar=EXECUTOR_TOKEN_VARIABLE, help="Whose key; an admin's opens what others have.")
    ] = None,
) -> None:
    """A shell in a running slot, beside its calls; noted in the server's audit log.

    Its exit code becomes this command's.
    """
    if not token:
        raise ConfigError(f"token: missing; set {EXECUTOR_TOKEN_VARIABLE}, or pass --token")
    raise typer.Exit(asyncio.run(_run(url.rstrip("/"), token, slot)))


async def _run(url: str, token: str, slot: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_ANSWER_S, trust_env=False) as client:
            answer = await client.post("/shells", json={"id": slot, **_size()})
            if answer.status_code != 201:
                refuse(url, answer)
            return await _attached(client, f"/shells/{quote(answer.json()['shell_id'])}")
    except (httpx.TransportError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise BackendUnavailable(f"{url} does not answer: {error or type(error).__name__}") from None


def _size() -> dict[str, int]:
    try:
        columns, rows = os.get_terminal_size(sys.stdin.fileno())
    except OSError:
        columns, rows = 0, 0
    return {"rows": min(rows or 24, 1000), "cols": min(columns or 80, 1000)}


async def _attached(client: httpx.AsyncClient, path: str) -> int:
    """Pass keys and output on until the shell ends; its exit code."""
    async with Tasks("shell") as tasks:
        tasks.spawn(_send(client, path), "keys")
        with _raw():
            async with client.stream("GET", f"{path}/output", timeout=httpx.Timeout(_ANSWER_S, read=None)) as output:
                async for data in output.aiter_raw():
                    _print(data)
    answer = await client.delete(path)
    code = answer.json().get("exit_code") if answer.status_code == 200 else None
    if code is None:
        raise BackendUnavailable("the slot has ended, and the shell with it")
    return code if code >= 0 else 128 - code


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


async def _send(client: httpx.AsyncClient, path: str) -> None:
    """What is typed, in its order, and the terminal's size whenever it changes."""
    loop, changes = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
    keys = sys.stdin.fileno()

    def read() -> None:
        data = os.read(keys, 65_536)
        changes.put_nowait(data or _END)
        if not data:
            loop.remove_reader(keys)

    try:
        loop.add_reader(keys, read)
    except PermissionError:  # a file, which is there as a whole
        changes.put_nowait(sys.stdin.buffer.read() + _END)
    loop.add_signal_handler(signal.SIGWINCH, changes.put_nowait, None)
    try:
        while True:
            data = await changes.get()
            if data is None:
                await client.put(f"{path}/size", json=_size())
            else:
                await client.post(f"{path}/input", content=data)
    finally:
        loop.remove_reader(keys)
        loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.contextmanager
def _raw() -> Generator[None]:
    """Each key goes to the slot's terminal, ^C too, where this is one."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
