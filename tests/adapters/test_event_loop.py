"""The event loop that hosts without one share, at the end of its process."""

from __future__ import annotations

import asyncio
import threading

from atropos import event_loop
from atropos.errors import SandboxError
from atropos.event_loop import ENDING, EventLoop

HEAD_START_S = 1.0


def test_work_that_comes_as_the_process_ends_is_refused_or_ended(monkeypatch) -> None:
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
