"""Sync calls inside async code: within `await bridged(f)`, sync code called by `f` can wait for awaitables.

The technique is that of SQLAlchemy's asyncio extension. The function runs in a greenlet. To wait, it switches to the
event loop's greenlet with the awaitable, which is awaited there as in any coroutine; its result is switched back. The
loop is never blocked. Unlike SQLAlchemy's bridge, this one also drives a coroutine function, whose own awaits pass
through.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TypeVar, cast

from greenlet import getcurrent, greenlet

Value = TypeVar("Value")

_Switch = Callable[[object], object]
"""Continues a greenlet or a coroutine with a value or an exception."""


class _Bridged(greenlet):
    """The greenlet that runs one bridged function."""


async def bridged(function: Callable[[], Value | Awaitable[Value]]) -> Value:
    """Await a function, sync or async, whose sync parts may call `wait`.

    What it raises is raised here, and a cancellation here is one there.
    """
    runner = _Bridged(body)
    runner.gr_context = getcurrent().gr_context
    request = _switch(runner, runner.switch, function)
    while not runner.dead:
        try:
            answer = await cast("Awaitable[object]", request)
        except BaseException as error:
            request = _switch(runner, cast("_Switch", runner.throw), error)
        else:
            request = _switch(runner, runner.switch, answer)
    return cast("Value", request)


def _switch(runner: _Bridged, how: _Switch, argument: object) -> object:
    """Continue the runner: what it waits for next, or at its end what the function returned."""
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
                argument = _to_parent(_yielding(waited))
                resume = coroutine.send
            except BaseException as error:
                argument, resume = error, cast("_Switch", coroutine.throw)
    finally:
        coroutine.close()


@types.coroutine
def _yielding(waited: object) -> Generator[object, object, object]:
    """An awaitable that yields to the event loop just what a coroutine's own await did."""
    return (yield waited)


def _to_parent(awaitable: Awaitable[object]) -> object:
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(awaitable)


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
    return cast("Value", _to_parent(awaitable))
