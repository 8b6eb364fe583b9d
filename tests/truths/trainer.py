"""A trainer to be killed: holds slots with work in them, and says when it does."""

from __future__ import annotations

import asyncio
import signal
import sys

from atropos.slots import SlotPool, SlotPoolConfig


async def main(mark: str) -> None:
    async with SlotPool(SlotPoolConfig(slots_per_container=4, max_containers=1)) as pool:
        slots = [await pool.acquire(f"t{n}") for n in range(3)]
        for slot in slots:
            await slot.exec(f"(setsid sleep {mark} >/dev/null 2>&1 &)")
        calls = [asyncio.create_task(slot.exec(f"sleep {mark}")) for slot in slots]
        await asyncio.sleep(0.1)
        print("working", slots[0].container, flush=True)
        await asyncio.gather(*calls)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    asyncio.run(main(sys.argv[1]))
