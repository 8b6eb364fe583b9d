"""Every attack program, as root of its own slot beside neighbours at work: none succeeds, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest

from atropos.errors import SandboxError
from tests import privileges
from tests.security import programs
from tests.security.conftest import NEIGHBOUR, SECRET
from tests.security.prelude import program
from tests.waiting import SLOWNESS

pytestmark = pytest.mark.asyncio(loop_scope="session")
COUNTED_TOGETHER = (
    "descriptors_in_flight",
    "socket_buffers_without_end",
    "pipe_buffers_without_end",
    "inotify_without_end",
    "queued_signals_and_timers_without_end",
    "message_queues_without_end",
    "terminals_without_end",
    "watches_of_epoll_without_end",
    "timers_without_end",
    "mapped_and_locked_memory",
)
"""What they use up is counted for a user, or for the whole machine, and not in a slot's cgroup."""
ALONE = dict.fromkeys(COUNTED_TOGETHER, pytest.mark.alone("uses up what slots of all servers have together"))


def marked(names, **marks):
    """Programs as parameters of a test; `marks`: of some, beside those that run alone."""
    marks |= ALONE
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def source(slot, body: str, secret_file) -> str:
    """The whole program, with what it is to look for."""
    port = int(slot.link.container.url.rsplit(":", 1)[1].split("/")[0])
    names = f"SECRET = {SECRET[:12]!r} + {SECRET[12:]!r}\nSECRET_FILE = {str(secret_file)!r}\nNEIGHBOUR = {NEIGHBOUR!r}\nSERVER_PORT = {port}\n"
    return names + program(body)


async def attack(slot, body: str, secret_file, pool, timeout_s: float = 30 * SLOWNESS):
    result = await slot.exec("exec python3 -I -", stdin=source(slot, body, secret_file), timeout_s=timeout_s)
    assert "BREACH" not in result.output, result.output
    return result


async def usable(slot) -> None:
    await slot.quiesce()
    result = await slot.exec("echo usable")
    assert (result.exit_code, result.output) == (0, "usable\n"), result


@pytest.mark.parametrize("name", programs.ESCAPE)
async def test_no_program_escapes_or_sees_outside(attacker, pool, secret_file, name):
    result = await attack(attacker, programs.ESCAPE[name], secret_file, pool)
    assert result.output.endswith("HELD\n") and result.exit_code == 0, result
    await usable(attacker)


@pytest.mark.parametrize("name", programs.NEIGHBOURS)
async def test_no_neighbour_is_reached(attacker, pool, secret_file, name):
    result = await attack(attacker, programs.NEIGHBOURS[name], secret_file, pool)
    assert result.output.endswith("HELD\n") and result.exit_code == 0, result
    await usable(attacker)


@privileges.cgroups
@pytest.mark.parametrize("name", marked(programs.BOMBS))
async def test_no_bomb_harms_others(attacker, pool, secret_file, name):
    await attack(attacker, programs.BOMBS[name], secret_file, pool)
    await usable(attacker)


@pytest.mark.parametrize("name", marked(programs.TRICKS, processes_of_other_users=privileges.cgroups))
async def test_no_trick_takes_the_slot(attacker, pool, secret_file, name):
    await attack(attacker, programs.TRICKS[name], secret_file, pool, timeout_s=2)
    await usable(attacker)


RELEASED = ("fork_without_end", "threads_without_end", "memory_without_end", "fill_every_file_system", "use_up_inodes",
            "a_folder_deeper_than_any_path", "descriptors_in_flight", "socket_buffers_without_end", "pipe_buffers_without_end",
            "orphans_and_zombies_without_end", *programs.TRICKS)  # fmt: skip


@pytest.mark.parametrize("name", marked(RELEASED))
async def test_released_midway_is_whole(pool, beside, secret_file, name):
    body = {**programs.BOMBS, **programs.TRICKS}[name]
    async with pool.lease(f"leaver-{name}") as slot:
        running = asyncio.create_task(slot.exec("exec python3 -I -", stdin=source(slot, body, secret_file)))
        await asyncio.sleep(0.15)
    await asyncio.wait([running])
    assert running.exception() is None or isinstance(running.exception(), SandboxError)
    async with pool.lease(f"next-{name}") as slot:
        result = await slot.exec(
            "ls -A /workspace /tmp /dev/shm | wc -l; ls -d /proc/[0-9]* | wc -l; dd if=/dev/zero of=f bs=1M count=40 status=none && echo room"
        )
        lines = result.output.split()
        assert int(lines[0]) <= 5 and int(lines[1]) <= 4 and lines[2:] == ["room"], result
    assert pool.stats().retired == 0, repr(pool)
