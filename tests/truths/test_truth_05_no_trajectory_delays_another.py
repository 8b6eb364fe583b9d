"""Truth 5: what one trajectory does never delays another's calls beyond its fair CPU share.

Told by order, not by the clock: the neighbours finish their work while the noise still goes on.
"""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOISE = {
    "sleep": "sleep 1000",
    "flood": "yes | head -c 100000000000",
    "busy loop": "while :; do :; done",
    "fork": "for i in $(seq 100000); do /bin/true & done; wait; sleep 1000",
    "fill the disk": "while :; do head -c 50000000 /dev/zero > f; rm f; done",
    "many files": "while :; do for i in $(seq 2000); do : > f$i; done; rm -f f*; done",
    "stderr and stdout": "yes & yes >&2",
    "read forever": "cat /dev/zero",
}


@pytest.mark.parametrize("name", NOISE)
async def test_neighbours_beside_noise(shared_pool, name):
    async with shared_pool.lease("noise") as noisy:
        noise = asyncio.create_task(noisy.exec(NOISE[name], timeout_s=120))
        await asyncio.sleep(0.1)

        async def neighbour(n):
            async with shared_pool.lease(f"n{n}") as slot:
                for step in range(8):
                    assert (await slot.exec(f"echo {step}")).output == f"{step}\n"
                await slot.write_file("f", b"x" * 100_000)
                assert len(await slot.read_file("f")) == 100_000

        await asyncio.wait_for(asyncio.gather(*(neighbour(n) for n in range(3))), 100)
        assert not noise.done(), f"the noise ended first: {noise.result()}"
        noise.cancel()
        with pytest.raises(asyncio.CancelledError):
            await noise
        assert (await noisy.exec("echo usable")).output == "usable\n"


async def test_only_own_calls_wait(shared_pool):
    async with shared_pool.lease("a") as a, shared_pool.lease("b") as b:
        order = []

        async def call(slot, name, command):
            await slot.exec(command)
            order.append(name)

        slow = asyncio.create_task(call(a, "slow", "while [ ! -e go ]; do sleep 0.02; done"))
        await asyncio.sleep(0.05)
        behind = asyncio.create_task(call(a, "behind it", "true"))
        for n in range(10):
            await call(b, n, "true")
        assert order == list(range(10))
        slow.cancel()
        await behind
        assert order[-1] == "behind it"
