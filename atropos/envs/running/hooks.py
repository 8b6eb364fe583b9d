"""Calls of an env's hooks: bounded in time; every failure gets a code and never becomes a score."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import posixpath
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from types import CodeType, FrameType
from typing import TypeVar, cast

from atropos import tracing
from atropos.agent import ExecuteTool, PromptTooLong
from atropos.aio import Allowance, cancelled_from_outside, first_of
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import HookError, TaskFault, VerifierError
from atropos.envs.running.verification import HookTexts
from atropos.errors import ConfigError, InferenceError, SandboxError, code_of
from atropos.slots import Slot
from atropos.tasks.verifier.preceding import make_way, preceded
from atropos.tasks.verifier.surroundings import FOLDERS
from atropos.tools import ToolCall, ToolExecutor, ToolResult

KNOWN = (SandboxError, InferenceError, ConfigError, HookError, PromptTooLong)
"""Errors that already belong to one of the three failure channels."""
TAIL_CHARS = 600
"""Length of a failed set-up call's output in the error."""

HOOK_CODE: set[CodeType] = set()
"""Code objects that call hooks: while one is on the stack, a hook blocks the event loop."""

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class Interrupted(asyncio.CancelledError):
    """A signal ends a hook that blocks the event loop, before the run can cancel its task."""


WRITES = ("write_file", "patch")
"""Tools by which a hook brings files of its own."""


class HookCalls:
    """A hook's access to one trajectory's slot and tools.

    Args:
        executor: runs the calls.
        trajectory_id: whose slot it is.
        setup: whether the workspace is being prepared, so that a call that fails is a fault of the task.
        texts: what knows of each call of a hook that verifies in a view.

    Attributes:
        failure: the first failure of a call, which no hook may turn into a score.
        unstarted: calls that were made and not awaited.
        unanswered: calls that run or were cancelled, as by a timeout of the hook's own.
    """

    def __init__(
        self, executor: ToolExecutor, trajectory_id: str, *, setup: bool = False, texts: HookTexts | None = None
    ) -> None:
        self._executor = executor
        self._texts = texts
        self._setup = setup
        self._fault = TaskFault if setup else HookError
        self.trajectory_id = trajectory_id
        self._own: set[str] = set()
        self.failure: SandboxError | HookError | None = None
        self.unstarted = 0
        self.unanswered = 0

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Around a call: records its failure and re-raises it."""
        # Not undone in a `finally`: a call that was cancelled stays unanswered.
        self.unanswered += 1
        try:
            yield
        except Exception as error:
            self.unanswered -= 1
            if isinstance(error, SandboxError | HookError):
                # The first: later ones mostly follow from it.
                self.failure = self.failure or error
            raise
        self.unanswered -= 1

    def own_file_fault(self, what: str) -> HookError:
        """The fault of a file of the hook's own that could not be written: no tests are run without it.

        In a verifying hook it may be the agent's doing, as of a folder with the file's name, so it counts as a
        verifier's.
        """
        return (
            TaskFault(what)
            if self._setup
            else VerifierError(f"{what}; a verifying hook goes on with check=False alone")
        )

    async def take_place(self, path: str) -> None:
        """Before a verifying hook writes a file: remove a link in its place, which leads to another of the agent's.

        Raises:
            SandboxError: the slot was lost.
        """
        if self._setup:
            return
        slot = await self._executor.slot(self.trajectory_id)
        place = posixpath.normpath(slot.profile.path(path))
        folders = filter(None, slot.profile.env.get(FOLDERS, "").split(":"))
        # The agent has left nothing elsewhere.
        if any(place.startswith(f"{folder}/") for folder in folders):
            await slot.exec(["sh", "-c", '[ ! -L "$1" ] || rm -f -- "$1"', "sh", place])

    @property
    def is_read(self) -> bool:
        """Whether it matters what calls say."""
        return self._texts is not None

    async def say(self, *texts: str | bytes, paths: Sequence[str] = ()) -> None:
        """Before a call: what it says, and the paths of the hook's own files that it brings; see `HookTexts`."""
        if self._texts is not None:
            slot = await self._executor.slot(self.trajectory_id)
            read = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts]
            await self._texts.before(slot, read, self._places(slot, paths))

    async def say_call(self, call: ToolCall) -> None:
        """`say` what a call of a tool says."""
        await self.say(*texts_of(call), paths=written(call) if call.name in WRITES else ())

    @staticmethod
    def _places(slot: Slot, paths: Sequence[str]) -> list[str]:
        return [posixpath.normpath(slot.profile.path(path)) for path in paths]

    async def make_way(self, paths: Sequence[str]) -> None:
        """After a verifying hook wrote files beside the agent's: remove what would run in the place of `preceded` ones.

        What the hook itself brought is left, now or before.

        Raises:
            VerifierError: a package of the same name is there.
            SandboxError: the slot was lost.
        """
        if self._setup or not paths:
            return
        slot = await self._executor.slot(self.trajectory_id)
        # Remembered over all calls: a hook may write a module first, and a package that precedes it later.
        brought = self._places(slot, paths)
        self._own.update(brought)
        if fault := await make_way(slot, await asyncio.to_thread(preceded, brought, self._own)):
            raise self.own_file_fault(fault)

    def left_over(self) -> HookError | None:
        """The fault of a hook that ended before its calls did, if it is one."""
        if self.unstarted:
            return self._fault("a call was not awaited, so it never ran; write `await` before it")
        # In a verifying hook it is none: it may give up a command of the agent's that hangs.
        if self._setup and self.unanswered:
            return TaskFault("a call was given up, or was not awaited; give the call itself a timeout")
        return None

    async def settled(self) -> SandboxError | HookError | None:
        """The first failure after the hook's end; that the slot no longer answers is one."""
        if self.failure is None:
            try:
                await self._executor.check_alive(self.trajectory_id)
            except SandboxError as error:
                self.failure = error
        return self.failure


class ExecTool(HookCalls):
    """`exec_tool` as hooks get it: runs calls in one trajectory's slot and remembers the first failure."""

    def __init__(
        self,
        executor: ToolExecutor,
        trajectory_id: str,
        run: ExecuteTool,
        *,
        setup: bool = False,
        texts: HookTexts | None = None,
    ) -> None:
        super().__init__(executor, trajectory_id, setup=setup, texts=texts)
        self._run = run

    def __call__(self, call: ToolCall, *, check: bool | None = None) -> Coroutine[object, None, ToolResult]:
        """Run one call in the slot.

        Args:
            call: the tool and its arguments.
            check: whether a result without success is a `TaskFault`; None: in set-up hooks alone.

        Raises:
            SandboxError: the infrastructure failed.
            HookError: there is no such tool, or the arguments are wrong.
            VerifierError: a verifying hook's own file could not be written, unless `check` is False.
            TaskFault: the call failed, and is checked.
        """
        # A plain method that counts and then returns the coroutine: one that nobody awaits never runs its own first
        # line.
        self.unstarted += 1
        return self._checked(call, check)

    async def _checked(self, call: ToolCall, check: bool | None) -> ToolResult:
        self.unstarted -= 1
        with self.watched():
            # The executor answers a mistake with an error result, as for a model; a hook's author should see it raised.
            mistake = self._executor.mistake_in(call)
            if mistake is not None:
                raise self._fault(f"exec_tool: {mistake}")
            await self.say_call(call)
            if call.name == "write_file" and check is not False:
                for path in written(call):
                    await self.take_place(path)
            result = await self._run(call)
            if not result.success and (self._setup if check is None else check):
                raise TaskFault(failed_call(call, result))
            # Tests that lack one of their files may give another verdict, and an agent can bring that about.
            if call.name in WRITES and check is not False:
                if not result.success:
                    raise self.own_file_fault(failed_call(call, result))
                await self.make_way(written(call))
        return result


def written(call: ToolCall) -> list[str]:
    """The file that a call of `WRITES` wrote."""
    path = call.arguments.get("path") if isinstance(call.arguments, dict) else None
    return [path] if isinstance(path, str) else []


def texts_of(call: ToolCall) -> list[str]:
    """What a call says."""
    values = call.arguments.values() if isinstance(call.arguments, dict) else ()
    return [value for value in values if isinstance(value, str)]


def failed_call(call: ToolCall, result: ToolResult) -> str:
    """What was called, how it ended, and the end of its output."""
    command = call.arguments.get("command") if isinstance(call.arguments, dict) else None
    if result.timed_out:
        what = "timed out"
    elif result.exit_code is not None:
        what = f"ended with exit code {result.exit_code}"
    else:
        what = "failed"
    tail = (result.output or result.error or "").strip()[-TAIL_CHARS:]
    return f"{call.name} {str(command or call.arguments)[:200]!r} {what}: {tail or 'no output'}"


VERIFYING = ("verify_and_score_trajectory", "compute_reward")
"""Hooks that score a trajectory in its slot."""


class Hooks:
    """Calls an env's hooks. `owner`: the env's class, for the log."""

    def __init__(self, owner: str, metrics: EnvMetrics, timeout_s: float) -> None:
        self._owner = owner
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._logged: set[tuple[str, type[BaseException]]] = set()

    async def call(
        self,
        name: str,
        hook: Callable[[], Value | Awaitable[Value]],
        *,
        calls: HookCalls | None = None,
        setup: bool = False,
    ) -> Value:
        """Call a hook, a plain function or a coroutine function.

        Args:
            name: the hook's, for messages and metrics.
            hook: takes no arguments.
            calls: the hook's access to its slot; a failure recorded there is raised even if the hook caught it.
            setup: whether the hook prepares a workspace, so that its errors are faults of the task.

        Raises:
            SandboxError, InferenceError, ConfigError: as raised in the hook.
            HookError: the hook raised something else, or took too long. `TaskFault` where it prepares a workspace.
        """
        started, result = time.perf_counter(), "ok"
        try:
            with tracing.span(f"hook {name}"):
                return await self._call(name, hook, calls, TaskFault if setup else HookError)
        except BaseException as error:
            result = error.code if isinstance(error, HookError | PromptTooLong) else code_of(error)
            raise
        finally:
            if name in VERIFYING:
                self._metrics.verify.observe(time.perf_counter() - started, result)

    async def _call(
        self, name: str, hook: Callable[[], Value | Awaitable[Value]], calls: HookCalls | None, kind: type[HookError]
    ) -> Value:
        try:
            with self.guard(name, kind):
                value = await self._bounded(name, hook, kind)
        except HookError:
            # What a hook raises after its slot was lost mostly follows from that, and then it is retried, not the
            # hook's fault.
            if calls is None or (failure := await calls.settled()) is None:
                raise
        else:
            if calls is None:
                return value
            # Before the await, during which calls that were not awaited may go on and end.
            left_over = calls.left_over()
            failure = await calls.settled() or left_over
            if failure is None:
                return value
        raise _named(name, failure)

    async def _bounded(self, name: str, hook: Callable[[], Value | Awaitable[Value]], kind: type[HookError]) -> Value:
        allowance = Allowance(self._timeout_s)
        try:
            async with allowance.once():
                return await run_hook(hook)
        except TimeoutError as error:
            if not allowance.expired:
                raise
            self._metrics.hook_errors[name] += 1
            raise kind(f"{name} did not end within hook_timeout_s ({self._timeout_s:g} s)") from error

    @contextlib.contextmanager
    def guard(self, name: str, kind: type[HookError] = HookError) -> Generator[None]:
        """Around an env's own code: what it raises is logged, counted and becomes a `HookError`."""
        try:
            with cancelled_from_outside():
                yield
        # They have their own codes already; retries and drops go by these.
        except KNOWN:
            raise
        except (Exception, SystemExit) as error:  # unittest.main() and the like exit, and would end the run
            # A hook's own task group wraps what its calls raise.
            if (inner := only_known(error)) is not None:
                raise inner from error
            self._metrics.hook_errors[name] += 1
            if (name, type(error)) not in self._logged:  # the traceback only once
                self._logged.add((name, type(error)))
                _log.exception("%s of %s failed", name, self._owner)
            raise kind(f"{name} raised {type(error).__name__}: {error}") from error


def _named(hook: str, failure: SandboxError | HookError) -> SandboxError | HookError:
    """A failure with the hook's name in its message."""
    if isinstance(failure, HookError) and not str(failure).startswith(hook):
        return type(failure)(f"{hook}: {failure}")
    return failure


async def run_hook(hook: Callable[[], Value | Awaitable[Value]]) -> Value:
    """What a hook returns, a plain function or a coroutine function."""
    value = hook()
    # By the value, not by the function: a lambda or a partial may return a coroutine.
    return cast("Value", await value if inspect.isawaitable(value) else value)


HOOK_CODE.add(run_hook.__code__)


def in_hook(frame: FrameType | None) -> bool:
    """Whether a hook is on the stack of a frame."""
    while frame is not None:
        if frame.f_code in HOOK_CODE:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def ungrouped() -> Generator[None]:
    """Unwrap a known failure from the exception group of an env's task group."""
    try:
        yield
    except ExceptionGroup as errors:
        if (inner := only_known(errors)) is None:
            raise
        raise inner from errors


def only_known(error: BaseException) -> BaseException | None:
    """The first failure in a group of errors that holds known ones alone."""
    known, others = error.split(KNOWN) if isinstance(error, ExceptionGroup) else (None, error)
    return None if known is None or others is not None else first_of(known)
