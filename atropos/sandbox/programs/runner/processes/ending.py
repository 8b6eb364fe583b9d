"""Operations that end processes of the slot."""

from __future__ import annotations

import os

from atropos.sandbox.programs.runner.children import KILL_PATIENCE_S, children, end_leftovers, kill_all, leftovers
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import loop, now


def op_end_leftovers(call: int) -> None:
    """Kill what ended commands left running; answered when it is gone, or after `KILL_PATIENCE_S`."""
    end_leftovers()
    wait_for_leftovers(call, now() + KILL_PATIENCE_S)


def wait_for_leftovers(call: int, until: float) -> None:
    """Answer once none is left."""
    children.reap()
    if now() > until or not leftovers():
        link.answer(call, "done", {})
    else:
        loop.later(now() + 0.002, lambda: wait_for_leftovers(call, until))


def op_end_all(call: int) -> None:
    """Kill every other process; running calls are answered as their processes are reaped."""
    kill_all()
    link.answer(call, "done", {})


def op_quiesce(call: int) -> None:
    """Kill every other process, and answer when this one is alone."""
    # Before the kill; without this process itself.
    count = sum(name.isdigit() for name in os.listdir("/proc")) - 1
    kill_all()
    children.quiescing.append((call, count))
    # Where nothing runs, no SIGCHLD would come to answer the call.
    children.reap()
