"""The event loop that hosts without one share, at the end of its process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from atropos import event_loop
from atropos.errors import SandboxError
from atropos.event_loop import ENDING, EventLoop

HEAD_START_S = 1.0


def test_work_at_a_process_end_is_refused(monkeypatch) -> None:
    loop, said = EventLoop(), list[str]()
    closing = threading.Thread(target=loop.close, daemon=True)
    submit = asyncio.run_coroutine_threadsafe

    def overtaken(work, target):
        if threading.current_thread() is worker:
            closing.start()
            closing.join(HEAD_START_S)
        return submit(work, target)

    def work() -> None:
        try:
            loop.run(asyncio.sleep(3600))
        except SandboxError as error:
            said.append(str(error))

    monkeypatch.setattr(event_loop.asyncio, "run_coroutine_threadsafe", overtaken)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(20)
    assert said == [ENDING]
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.parametrize("first", [0.0, 0.2], ids=["before it began", "while it runs"])
def test_an_interrupt_cancels_early_work(monkeypatch, first) -> None:
    loop, ended = EventLoop(), threading.Event()
    submit = asyncio.run_coroutine_threadsafe

    def interrupted(work, target):
        submit(work, target).add_done_callback(lambda _: ended.set())
        time.sleep(first)
        raise KeyboardInterrupt

    monkeypatch.setattr(event_loop.asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(asyncio.sleep(3600))
    monkeypatch.undo()
    assert ended.wait(20)
    loop.close()
