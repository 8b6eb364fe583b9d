"""Sync calls inside async code: within `await bridged(f)`, sync code called by `f` can wait for awaitables.

The technique is that of SQLAlchemy's asyncio extension. The function runs in a greenlet. To wait, it switches to the event
loop's greenlet with the awaitable, which is awaited there as in any coroutine; its result is switched back. The loop is
never blocked. Unlike SQLAlchemy's bridge, this one also drives a coroutine function, whose own awaits pass through.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Generic, TypeVar, cast

from greenlet import getcurrent, greenlet

Value = TypeVar("Value")

_YIELD, _AWAIT = "yield", "await"
_Switch = Callable[[object], object]
"""Continues a greenlet or a coroutine with a value or an exception."""


class _Bridged(greenlet):
    """The greenlet that runs one bridged function."""


class _Run(Generic[Value]):
    def __init__(self, function: Callable[[], Value | Awaitable[Value]]) -> None:
        self._function = function

    def __await__(self) -> Generator[object, object, Value]:
        runner = _Bridged(body)
        runner.gr_context = getcurrent().gr_context
        request = self._switch(runner, runner.switch, self._function)
        while not runner.dead:
            kind, payload = cast("tuple[str, Awaitable[object]]", request)
            try:
                # A coroutine's own await is passed on as it is; a sync call's awaitable is awaited here.
                answer = (yield payload) if kind == _YIELD else (yield from payload.__await__())
            except BaseException as error:
                request = self._switch(runner, cast("_Switch", runner.throw), error)
            else:
                request = self._switch(runner, runner.switch, answer)
        return cast("Value", request)

    @staticmethod
    def _switch(runner: _Bridged, how: _Switch, argument: object) -> object:
        # A task may be resumed from another greenlet than the last time, where bridges are nested.
        runner.parent = getcurrent()
        return how(argument)


def body(function: Callable[[], object]) -> object:
    """What runs in the greenlet: the outermost frame of a bridged function."""
    value = function()
    return _drive(value) if inspect.iscoroutine(value) else value


def _drive(coroutine: Coroutine[object, object, object]) -> object:
    """Run a coroutine to its end, handing what it awaits to the event loop's greenlet."""
    resume: _Switch = coroutine.send
    argument: object = None
    try:
        while True:
            try:
                waited = resume(argument)
            except StopIteration as stop:
                return stop.value
            try:
                argument = _to_parent(_YIELD, waited)
                resume = coroutine.send
            except BaseException as error:
                argument, resume = error, cast("_Switch", coroutine.throw)
    finally:
        coroutine.close()


def _to_parent(kind: str, payload: object) -> object:
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch((kind, payload))


def bridged(function: Callable[[], Value | Awaitable[Value]]) -> Awaitable[Value]:
    """Await a function, sync or async, whose sync parts may call `wait`.

    What it raises is raised here, and a cancellation here is one there.
    """
    return _Run(function)


def in_bridge() -> bool:
    """Whether the current code runs inside `bridged`, so that `wait` works."""
    return isinstance(getcurrent(), _Bridged)


def wait(awaitable: Awaitable[Value]) -> Value:
    """Wait for an awaitable, inside `bridged` alone.

    Raises:
        RuntimeError: outside of it.
    """
    if not in_bridge():
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError("wait() works only inside bridged()")
    return cast("Value", _to_parent(_AWAIT, awaitable))
