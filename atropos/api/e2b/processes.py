"""`process.Process`: commands and terminals of a sandbox."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Generator

from atropos.aio import Tasks
from atropos.api.accounts.account import Latest
from atropos.api.e2b import messages
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.files import path_of
from atropos.api.e2b.sandbox import E2bCommand, E2bSandbox
from atropos.errors import SandboxError
from atropos.slots.slot.processes import Process

_log = logging.getLogger(__name__)
BUFFER_BYTES = 1 << 20
"""Output of each stream that is buffered for a slow client."""
PIECE_BYTES = 256 * 1024
QUEUE = 4
"""Most pieces of output queued for a client."""
WAIT_S = 20.0
"""Longest wait of one read of output."""
_END_GRACE_S = 5.0
_REFUSED = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EFBIG)
"""Failures to start that no retry mends; EFBIG: arguments that are too long."""


async def running(sandbox: E2bSandbox) -> dict[int, E2bCommand]:
    """The sandbox's processes that have not ended; the others are forgotten."""
    known = dict(sandbox.commands)
    alive = {process.pid for process in await sandbox.slot.processes() if process.exit_code is None}
    for pid in known.keys() - alive:
        sandbox.forget(known[pid])
    return {pid: command for pid, command in known.items() if pid in alive}


async def list_all(sandbox: E2bSandbox, _: messages.Empty) -> Json:
    """`List`."""
    return {"processes": [command.info() for command in (await running(sandbox)).values()]}


async def _selected(sandbox: E2bSandbox, selector: messages.Selector) -> E2bCommand:
    for pid, command in (await running(sandbox)).items():
        if selector.pid == pid or (selector.tag is not None and selector.tag == command.start.tag):
            return command
    raise RpcError("not_found", f"no process {selector.tag or selector.pid} runs in the sandbox")


async def start(
    sandbox: E2bSandbox, message: messages.Start, *, user: str | None, deadline_s: float | None, ping_s: float
) -> AsyncGenerator[Json]:
    """`Start`: the process's events. It continues when the client disconnects, and is killed at its deadline."""
    command = await _started(sandbox, message, user)
    process = command.process
    sandbox.commands[process.pid] = command
    sandbox.latest = Latest(message.process.line())
    if deadline_s is not None:  # even if the client has disconnected by then
        command.killing = sandbox.tasks.spawn(_kill_after(process, deadline_s), f"deadline of {process.pid}")
    async with contextlib.aclosing(_events(sandbox, process, command, deadline_s, ping_s)) as events:
        async for event in events:
            yield event


async def _kill_after(process: Process, deadline_s: float) -> None:
    await asyncio.sleep(deadline_s)
    try:
        await process.kill()
    except (SandboxError, OSError) as error:
        _log.debug("%r was not killed at its deadline: %s", process, error)


async def _started(sandbox: E2bSandbox, message: messages.Start, user: str | None) -> E2bCommand:
    config, pty = message.process, message.pty
    try:
        process = await sandbox.slot.start(
            [config.cmd, *config.args],
            workdir=path_of(sandbox, config.cwd) if config.cwd else None,
            env=config.envs,
            user=user,
            pty=None if pty is None else (pty.size.rows, pty.size.cols),
            split=pty is None,
            hold=True,
            buffer_bytes=BUFFER_BYTES,
        )
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise RpcError("invalid_argument", f"{config.cmd} can't be started: {error}") from None
    if pty is None and not message.stdin:
        with contextlib.suppress(OSError):  # it has ended already
            await process.close_stdin()
    return E2bCommand(process, message)


async def connect(
    sandbox: E2bSandbox, message: messages.Selected, *, deadline_s: float | None, ping_s: float
) -> AsyncGenerator[Json]:
    """`Connect`: what a process prints from now on."""
    command = await _selected(sandbox, message.process)
    process = next(one for one in await sandbox.slot.processes() if one.id == command.process.id)
    for output in filter(None, (process, process.errors)):
        await output.read(max_bytes=BUFFER_BYTES)
        output.dropped_bytes = 0
    async with contextlib.aclosing(_events(sandbox, process, command, deadline_s, ping_s)) as events:
        async for event in events:
            yield event


@contextlib.contextmanager
def _following(sandbox: E2bSandbox, process: Process, command: E2bCommand) -> Generator[None]:
    """Around reading a command's output; the last follower leaves a task that discards what comes later."""
    if command.draining is not None:
        command.draining.cancel()
        command.draining = None
    command.followers += 1
    try:
        yield
    finally:
        command.followers -= 1
        if process.exit_code is not None:
            sandbox.forget(command)
        elif not command.followers:
            command.draining = sandbox.tasks.spawn(_drain(sandbox, command, process), f"output of {process.pid}")


async def _drain(sandbox: E2bSandbox, command: E2bCommand, process: Process) -> None:
    outputs = [one for one in (process, process.errors) if one is not None]
    try:
        async with asyncio.TaskGroup() as tasks:
            for output in outputs:
                tasks.create_task(_discard(output))
    except* (SandboxError, OSError) as failed:
        _log.debug("%r is no longer read: %s", process, failed.exceptions[0])
    else:
        sandbox.forget(command)


async def _discard(output: Process) -> None:
    async for _ in output.output():
        pass


async def _events(
    sandbox: E2bSandbox, process: Process, command: E2bCommand, deadline_s: float | None, ping_s: float
) -> AsyncGenerator[Json]:
    """A process's events: its start, its output as it comes, its end.

    Raises:
        TimeoutError: it still runs after `deadline_s`.
        SandboxError: its slot is gone.
    """
    loop = asyncio.get_running_loop()
    deadline = None if deadline_s is None else loop.time() + deadline_s
    with _following(sandbox, process, command):
        yield _event("start", {"pid": process.pid})
        queue: asyncio.Queue[Json | None] = asyncio.Queue(QUEUE)
        outputs = [("pty" if command.pty else "stdout", process)]
        if process.errors is not None:
            outputs.append(("stderr", process.errors))
        async with Tasks(f"output of {process.pid}") as tasks:
            pump = tasks.spawn(_pump(outputs, queue), "events", awaited=True)
            while True:
                left_s = ping_s if deadline is None else min(ping_s, deadline - loop.time())
                try:
                    async with asyncio.timeout(left_s):
                        event = await queue.get()
                except TimeoutError:
                    if deadline is not None and loop.time() >= deadline:
                        raise
                    yield _event("keepalive", {})
                    continue
                if event is None:
                    break
                yield event
            await pump
            assert process.exit_code is not None
            yield _event("end", _ending(process.exit_code))


async def _pump(outputs: list[tuple[str, Process]], queue: asyncio.Queue[Json | None]) -> None:
    """Put what processes print into the queue, and at last None."""
    error: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for name, output in outputs:
                tasks.create_task(_copy(name, output, queue))
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
    await queue.put(None)
    if error is not None:
        raise error


async def _copy(name: str, output: Process, queue: asyncio.Queue[Json | None]) -> None:
    dropped = 0
    while not output.over:
        data = await output.read(max_bytes=PIECE_BYTES, wait_s=WAIT_S)
        if output.dropped_bytes > dropped:
            lost = f"\n[{output.dropped_bytes - dropped:,} bytes of output were lost: the client read too slowly]\n"
            data, dropped = lost.encode() + data, output.dropped_bytes
        if data:
            await queue.put(_event("data", {name: base64.b64encode(data).decode()}))


def _event(name: str, value: Json) -> Json:
    return {"event": {name: value}}


def _ending(code: int) -> Json:
    if code == 0:
        return {"exitCode": 0, "exited": True, "status": "exit status 0"}
    status = f"exit status {code}"
    if code < 0:
        try:
            status = f"signal: {signal.strsignal(-code)}".lower()
        except ValueError:
            status = f"signal: {-code}"
    return {"exitCode": max(code, -1), "exited": code > 0, "status": status, "error": status}


# ------------------------------------------------------------------------------------------------------------- input


async def send_input(sandbox: E2bSandbox, message: messages.SendInput) -> Json:
    """`SendInput`."""
    await _give(await _selected(sandbox, message.process), message.input)
    return {}


async def stream_input(sandbox: E2bSandbox, given: AsyncIterator[bytes]) -> None:
    """`StreamInput`: pieces as the client sends them, each after the process had room for the last."""
    command: E2bCommand | None = None
    async for data in given:
        message = messages.parse(messages.StreamInput, data)
        if message.start is not None:
            command = await _selected(sandbox, message.start.process)
        elif message.data is not None:
            if command is None:
                raise RpcError("invalid_argument", "the first message of the stream names no process")
            await _give(command, message.data.input)


async def _give(command: E2bCommand, given: messages.Input) -> None:
    data = given.pty if command.pty else given.stdin
    if data is None:
        raise RpcError("invalid_argument", f"the process has {'a terminal' if command.pty else 'no terminal'}")
    await command.process.write(data)


async def close_stdin(sandbox: E2bSandbox, message: messages.Selected) -> Json:
    """`CloseStdin`."""
    command = await _selected(sandbox, message.process)
    if command.pty:
        raise RpcError("invalid_argument", "a terminal's input ends with ^D")
    await command.process.close_stdin()
    return {}


async def send_signal(sandbox: E2bSandbox, message: messages.SendSignal) -> Json:
    """`SendSignal`; answered when a killed process is gone."""
    process = (await _selected(sandbox, message.process)).process
    if message.signal == "SIGNAL_SIGTERM":
        await process.kill("TERM")
    else:
        await process.kill("KILL")
        await process.wait(_END_GRACE_S)
    return {}


async def update(sandbox: E2bSandbox, message: messages.Update) -> Json:
    """`Update`: another size of a terminal."""
    command = await _selected(sandbox, message.process)
    if message.pty is not None:
        await command.process.resize(message.pty.size.rows, message.pty.size.cols)
    return {}
