"""The `ctx` of a reward function: the rollout's slot and the tools.

Every method works three ways: called plainly in a reward function (`ctx.terminal("pytest")["exit_code"]`, see
`bridge`), awaited, and from another thread. None of them blocks the event loop.

An infrastructure failure is remembered besides being raised, so that a reward function that catches everything can't
turn it into a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import json
import os
import shlex
import tarfile
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from atropos import wire
from atropos.archives import WholeTar
from atropos.envs.hermes.bridge import in_bridge, wait
from atropos.envs.running.hooks import TAIL_CHARS, WRITES, HookCalls, failed_call, written
from atropos.envs.running.rollout import TaskFault
from atropos.envs.running.verification import HookTexts
from atropos.errors import SandboxError
from atropos.slots import Slot, SlotFileError
from atropos.slots.slot.files import MAX_READ_BYTES
from atropos.tasks.verifier.texts import folder_texts
from atropos.tools import ToolCall, ToolExecutor, ToolResult

Value = TypeVar("Value")
CLEANUP_S = 10.0
"""How long a cleanup may take."""
SEARCH_MATCHES = 200
OF_NAMES = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.EISDIR, errno.ENOTDIR})
"""Errors of unpacking that names in a slot's folder can cause; all others are the local disk's."""


class AwaitableDict(dict[str, Any]):
    """A finished call's answer; awaiting it gives the answer itself."""

    def __await__(self) -> Generator[None, None, AwaitableDict]:
        """Give the answer itself."""
        return _ready(self).__await__()


class AwaitableStr(str):
    """A finished call's text answer, which may be awaited as well."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, str]:
        """Give the text itself."""
        return _ready(str(self)).__await__()


class AwaitableNone:
    """A finished call without an answer, which may be awaited as well."""

    def __await__(self) -> Generator[None, None, None]:
        """Give None."""
        return _ready(None).__await__()


async def _ready(value: Value) -> Value:
    return value


class Pending:
    """A call that was made in a task of its own, where only `await` can wait for it."""

    def __init__(self, calls: HookCalls, work: Coroutine[Any, Any, Any], name: str) -> None:
        self._calls = calls
        self._work = work
        self._name = name
        calls.unstarted += 1

    def __await__(self) -> Any:
        """Make the call."""
        self._calls.unstarted -= 1
        return (yield from self._work.__await__())  # a generator, so that it keeps this object alive

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self._hint())

    def __getitem__(self, key: object) -> NoReturn:
        raise RuntimeError(self._hint())

    def __del__(self) -> None:
        self._work.close()

    def _hint(self) -> str:
        return f"write `await ctx.{self._name}(...)`: this runs in a task of its own, not in the reward function itself"


def _either(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Make a coroutine method usable without `await`, with it, and from other threads."""

    @functools.wraps(method)
    def call(self: ToolContext, *args: Any, **kwargs: Any) -> Any:
        work = self._limited(functools.partial(method, self, *args, **kwargs))  # pyright: ignore[reportPrivateUsage]
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:  # pyright: ignore[reportPrivateUsage]
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()  # pyright: ignore[reportPrivateUsage]
        if in_bridge():
            value = wait(work)
            if value is None:
                return AwaitableNone()
            return AwaitableStr(value) if isinstance(value, str) else value
        return Pending(self, work, method.__name__)

    return call


class ToolContext(HookCalls):
    """One rollout's slot and tools; `HermesAgentBaseEnv` makes one for each reward function.

    `limit` bounds the calls in flight, across rollouts.
    """

    def __init__(
        self,
        executor: ToolExecutor,
        trajectory_id: str,
        *,
        limit: contextlib.AbstractAsyncContextManager[None] | None = None,
        setup: bool = False,
        texts: HookTexts | None = None,
    ) -> None:
        super().__init__(executor, trajectory_id, setup=setup, texts=texts)
        self._loop = asyncio.get_running_loop()
        self._limit = limit or contextlib.nullcontext()

    async def _limited(self, work: Callable[[], Awaitable[Value]]) -> Value:
        with self.watched():
            async with self._limit:
                return await work()

    def _failed(self, what: str, error: Exception | str) -> AwaitableDict:
        """The answer of a call that failed, which is a fault of the task where a workspace is being prepared."""
        reason = str(getattr(error, "strerror", None) or error)
        if self._setup:
            raise TaskFault(f"{what} failed: {reason}")
        return AwaitableDict(error=reason)

    def _not_written(self, what: str, error: SlotFileError, *, check: bool | None) -> AwaitableDict:
        """The answer of a failed write that may be ignored; see `HookCalls.own_file_fault`."""
        if check is not False:
            raise self.own_file_fault(f"{what} failed: {error.strerror or error}")
        return AwaitableDict(error=str(error.strerror or error))

    async def _slot(self) -> Slot:
        return await self._executor.slot(self.trajectory_id)

    # ------------------------------------------------------------------------------------------------------- the slot

    @_either
    async def terminal(
        self,
        command: str,
        timeout: float = 180,
        workdir: str | None = None,
        env: dict[str, str] | None = None,
        *,
        check: bool | None = None,
    ) -> AwaitableDict:
        """Run a shell command in the rollout's slot.

        Args:
            command: for bash.
            timeout: seconds until it is killed; its exit code is then -9, and `timed_out` is there.
            workdir: None: the workspace.
            env: added to the slot's environment.
            check: whether an exit code other than 0 is a `TaskFault`; None: in set-up hooks alone.

        Returns:
            exit_code and output (stdout and stderr together), and the limits that were hit.

        Raises:
            TaskFault: the command failed, and is checked.
        """
        await self.say(command if workdir is None else f"cd {shlex.quote(workdir)}\n{command}")
        slot = await self._slot()
        result = await slot.exec(command, timeout_s=timeout, workdir=workdir, env=env)
        answer = AwaitableDict(exit_code=result.exit_code, output=result.output)
        for name in ("timed_out", "truncated", "limit", "error"):
            if value := getattr(result, name):
                answer[name] = value
        if result.exit_code != 0 and (self._setup if check is None else check):
            what = "timed out" if result.timed_out else f"ended with exit code {result.exit_code}"
            raise TaskFault(f"terminal {command[:200]!r} {what}: {result.output.strip()[-TAIL_CHARS:] or 'no output'}")
        return answer

    @_either
    async def read_file(self, path: str, max_bytes: int = MAX_READ_BYTES) -> AwaitableDict:
        """A text file's `content`, or an `error` (also when it is longer than `max_bytes`).

        Undecodable bytes are replaced.
        """
        try:
            data = await (await self._slot()).read_file(path, max_bytes=max_bytes)
            return AwaitableDict(content=data.decode("utf-8", "replace"))
        except SlotFileError as error:
            return self._failed(f"read_file {path}", error)

    @_either
    async def write_file(self, path: str, content: str | bytes, *, check: bool | None = None) -> AwaitableDict:
        """Write a file, making its parents.

        Args:
            path: a module (`*.py`) of a reward function's is the one that Python runs, whatever the agent compiled
                beside it.
            content: the file's.
            check: whether a failure is a fault; None: yes.

        Returns:
            bytes_written; with `check=False` and after a failure, an `error`.

        Raises:
            TaskFault: it can't be written, while a workspace is being prepared.
            VerifierError: it can't be written, in a reward function.
        """
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        await self.say(path, data, paths=[path])
        try:
            if check is not False:
                await self.take_place(path)
            await (await self._slot()).write_file(path, data)
        except SlotFileError as error:
            return self._not_written(f"write_file {path}", error, check=check)
        await self.make_way([path])
        return AwaitableDict(success=True, bytes_written=len(data))

    @_either
    async def search(self, query: str, path: str = ".") -> AwaitableDict:
        """Lines that match a regular expression: `matches` of path, line and text; or an `error`."""
        operation = wire.Search(pattern=query, path=path, max_matches=SEARCH_MATCHES)
        result = await (await self._slot()).run(operation)
        if isinstance(result, wire.OpError):
            return self._failed(f"search {query!r}", result.message)
        assert isinstance(result, wire.SearchResult)
        matches = [{"path": match.path, "line": match.line, "text": match.text} for match in result.matches]
        return AwaitableDict(matches=matches, truncated=result.truncated)

    @_either
    async def upload(self, source: str | Path, path: str, *, check: bool | None = None) -> AwaitableDict:
        """Copy a local file or folder into the slot: `success`, or with `check=False` an `error` of the slot's.

        Raises:
            OSError: the local file can't be read.
            TaskFault, VerifierError: see `write_file`.
        """
        if not Path(source).exists():
            raise FileNotFoundError(f"there is no local file {source}")
        places = await asyncio.to_thread(_uploaded, Path(source), path)
        texts = await asyncio.to_thread(folder_texts, Path(source)) if self.is_read else ()
        await self.say(path, *texts, paths=places)
        try:
            if check is not False and Path(source).is_file():
                await self.take_place(path)
            await (await self._slot()).upload(source, path)
        except SlotFileError as error:
            return self._not_written(f"upload {path}", error, check=check)
        await self.make_way(places)
        return AwaitableDict(success=True)

    @_either
    async def download(self, path: str, target: str | Path, max_bytes: int = MAX_READ_BYTES) -> AwaitableDict:
        """Copy a file or folder out of the slot to a local path: `success`, or an `error`, also above `max_bytes`.

        What a hostile slot packs can't leave the target: links that lead out of it, devices and `..` are refused;
        before Python 3.11.4, every link.

        Raises:
            OSError: the local path can't be written, which is no fault of the slot's.
        """
        slot = await self._slot()
        is_file = isinstance(await slot.run(wire.ReadFile(path=path, max_bytes=1)), wire.FileResult)
        try:
            data = await (slot.read_file if is_file else slot.download)(path, max_bytes=max_bytes)
        except SlotFileError as error:
            return self._failed(f"download {path}", error)
        try:
            await asyncio.to_thread(_write_local if is_file else _unpack_local, Path(target), data)
        except (OSError, tarfile.TarError) as error:
            if isinstance(error, OSError) and (is_file or error.errno not in OF_NAMES):
                raise
            return self._failed(f"download {path}", error)
        return AwaitableDict(success=True)

    @_either
    async def quiesce(self) -> AwaitableDict:
        """End every process in the slot, the model's background ones included; files stay."""
        return AwaitableDict(ended=await (await self._slot()).quiesce())

    @contextlib.asynccontextmanager
    async def fork(self) -> AsyncGenerator[ToolContext]:
        """A slot with this one's files and none of its processes, for verification; given back at the end.

        This one is given back before. If it is used again, within or after, it continues from the same files in another
        slot; within, that one must come free within the pool's acquire timeout.
        """
        name = f"{self.trajectory_id}-fork-{uuid.uuid4().hex[:8]}"
        context = ToolContext(self._executor, name, limit=self._limit, setup=self._setup)
        try:
            with self.watched():
                async with self._limit:
                    await self._executor.fork(self.trajectory_id, name)
            try:
                yield context
            finally:
                await context.settled()
        finally:
            self.failure = self.failure or context.failure or context.left_over()
            await self._executor.release_trajectory(name)

    # ---------------------------------------------------------------------------------------------------------- tools

    @_either
    async def web_search(self, query: str) -> AwaitableDict:
        """Search the web, through the ToolServer.

        This and the next three raise a `HookError` where the env has no such tool.
        """
        return await self._tool("web_search", {"query": query})

    @_either
    async def web_extract(self, urls: Sequence[str]) -> AwaitableDict:
        """Read web pages, through the ToolServer."""
        return await self._tool("web_extract", {"urls": list(urls)})

    @_either
    async def browser_navigate(self, url: str) -> AwaitableDict:
        """Open an address in the rollout's browser."""
        return await self._tool("browser_navigate", {"url": url})

    @_either
    async def browser_snapshot(self) -> AwaitableDict:
        """The page in the rollout's browser, as text."""
        return await self._tool("browser_snapshot", {})

    @_either
    async def call_tool(self, tool_name: str, arguments: Mapping[str, object] | None = None) -> str:
        """Call any tool of the env: its result as a JSON string, as the model would read it."""
        return (await self._call(tool_name, arguments or {})).to_json()

    async def _tool(self, name: str, arguments: Mapping[str, object]) -> AwaitableDict:
        tools = self._executor.tools
        if name not in tools:
            raise self._fault(
                f"ctx.{name}: {tools.unknown(name)}; offer it with enabled_toolsets and a ToolServer that has it"
            )
        result = await self._call(name, arguments)
        answer = AwaitableDict(result.for_model())
        if result.data is not None:
            answer["data"] = result.data
        elif result.success:
            with contextlib.suppress(ValueError, RecursionError):
                answer["data"] = json.loads(result.output)
        return answer

    async def _call(self, name: str, arguments: Mapping[str, object]) -> ToolResult:
        call = ToolCall(name=name, arguments=dict(arguments))
        await self.say_call(call)
        if name == "write_file":
            for path in written(call):
                await self.take_place(path)
        result = await self._executor.execute(self.trajectory_id, call)
        if self._setup and not result.success:
            raise TaskFault(failed_call(call, result))
        if name in WRITES:
            if not result.success:
                raise self.own_file_fault(failed_call(call, result))
            await self.make_way(written(call))
        return result

    # -------------------------------------------------------------------------------------------------------- the end

    @_either
    async def cleanup(self) -> None:
        """End what still runs in the slot. Idempotent; does nothing when the slot is gone."""
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(CLEANUP_S):
                await (await self._slot()).quiesce()

    def __repr__(self) -> str:
        return f"<ToolContext of {self.trajectory_id!r}{', failed' if self.failure else ''}>"


def _uploaded(source: Path, path: str) -> list[str]:
    """Where in the slot the files of what was uploaded are."""
    if source.is_file():
        return [path]
    return [f"{path}/{file.relative_to(source)}" for file in sorted(source.rglob("*"))]


def _write_local(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def _unpack_local(target: Path, data: bytes) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", tarinfo=WholeTar) as source:
        if hasattr(tarfile, "data_filter"):
            source.extractall(target, filter="data")
            return
        for member in source:  # Python before 3.11.4, as in Debian 12, has no filter
            parts = PurePosixPath(member.name).parts
            if not (member.isfile() or member.isdir()) or ".." in parts or "/" in parts:
                raise tarfile.ExtractError(
                    f"{member.name}: only files and folders below the target are unpacked before Python 3.11.4"
                )
            member.mode = 0o755 if member.isdir() else member.mode & 0o755 | 0o600
            member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
            source.extract(member, target)
