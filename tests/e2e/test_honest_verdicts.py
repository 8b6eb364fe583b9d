"""Honest work is not scored 0 by what the machine did to it."""

import asyncio
import contextlib
import errno
import os
import signal
import tempfile
import time
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest

from atropos.envs.humaneval_problems import load_problems
from atropos.errors import NotSupported, SandboxError
from atropos.tasks import workspace
from atropos.tasks.builder import transfer
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.fit import Room, fit
from atropos.tasks.verifier import artifacts, carry, services
from atropos.wire import LeaseLimits
from benchmarks.honest import EXAMPLES, Condition, fitting_tasks, host, measure
from tests.e2e.test_humaneval import DATA
from tests.e2e.test_tasks import Attempt, make_task, pool, working_on
from tests.processes import descendants
from tests.waiting import SLOWNESS, until

__all__ = ["pool"]
MODES = ("view", "shared", "separate")
APP = "FROM debian:13\nWORKDIR /app\n"


def running(name):
    """Processes whose command line begins so."""
    return [pid for pid, line in descendants().items() if line.startswith(name)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", MODES)
async def test_stopped_tests_run_again(pool, tmp_path, mode, caplog):
    name = f"stopped-{mode}-{os.getpid()}"
    test = f"(exec -a {name} sleep 0.5); cp answer /logs/verifier/reward.txt"
    task = make_task(tmp_path, test=test, toml=f"[verifier]\ntimeout_sec = {3 * SLOWNESS:g}\n", dockerfile=APP)
    async with working_on(pool, task) as run:
        await run.slot.write_file("/app/answer", b"1")
        verifying = asyncio.create_task(run.verify(mode))
        await until(lambda: running(name), "its tests")
        for pid in running(name):
            os.kill(pid, signal.SIGSTOP)
        assert (await verifying).reward == 1
    assert "they run again" in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_rerun_finds_agents_server(pool, tmp_path):
    name = f"stopped-server-{os.getpid()}"
    test = f"(exec -a {name} sleep 0.5); : < /dev/tcp/127.0.0.1/8124 && echo 1 > /logs/verifier/reward.txt"
    task = make_task(tmp_path, test=f"#!/bin/bash\n{test}", toml=f"[verifier]\ntimeout_sec = {3 * SLOWNESS:g}\n")
    async with working_on(pool, task) as run:
        await run.slot.exec("setsid python3 -m http.server 8124 >/dev/null 2>&1 &")
        await run.slot.exec("until : < /dev/tcp/127.0.0.1/8124; do sleep 0.05; done 2>/dev/null", timeout_s=30)
        verifying = asyncio.create_task(run.verify("shared"))
        await until(lambda: running(name), "its tests")
        for pid in running(name):
            os.kill(pid, signal.SIGSTOP)
        assert (await verifying).reward == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("test", "runs"), [("while :; do :; done", 1), ("sleep 100", 2)])
async def test_two_timeouts_no_reward(pool, tmp_path, test, runs):
    test = f"echo >> /app/runs; {test}"
    toml = "[verifier]\ntimeout_sec = 3\n"
    async with working_on(pool, make_task(tmp_path, test=test, toml=toml, dockerfile=APP)) as run:
        # a busy machine may keep the loop from the CPU as well
        with pytest.raises(VerifierFailed, match="took longer than 3 s"):
            await run.verify("shared")
        assert len(await run.slot.read_file("/app/runs")) in {runs, 2}


@pytest.mark.asyncio(loop_scope="module")
async def test_own_commands_run_again(pool, tmp_path, monkeypatch):
    """Where one took as long as all do on a host that stands still."""
    monkeypatch.setattr(transfer, "PLAIN_S", 2 * SLOWNESS)
    async with working_on(pool, make_task(tmp_path)) as run:
        done = await transfer.exec_plain(run.slot, "mkdir /stalled && sleep 1000; echo done")
        assert (done.exit_code, done.output.splitlines()[-1]) == (0, "done")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("written", ["1e0", " 1\\n", "1.0\\r\\n", "\\357\\273\\2771.0\\r\\n"])
async def test_each_form_of_a_number_is_read(pool, tmp_path, written):
    test = f"printf '{written}' > /logs/verifier/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=APP)) as run:
        assert (await run.verify("shared")).reward == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", MODES)
async def test_the_image_has_git_settings(pool, tmp_path, mode):
    """Of the machine: safe.directory, a proxy, a mirror."""
    machine = f"{APP}RUN git config --system http.proxy http://mirror:3128\n"
    task = make_task(tmp_path, test="git config http.proxy && echo 1 > /logs/verifier/reward.txt", dockerfile=machine)
    async with working_on(pool, task) as run:
        assert (await run.verify(mode)).reward == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_large_artifacts_are_carried(pool, tmp_path):
    test = "[ -e /app/done ] && [ $(stat -c %s /app/large) = 320000000 ]; echo $((! $?)) > /logs/verifier/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=APP)) as run:
        assert (await run.slot.exec("head -c 320000000 /dev/zero > large && touch done")).exit_code == 0
        assert (await run.verify("separate")).reward == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_large_artifacts_take_turns(pool, tmp_path, monkeypatch):
    """On this machine's disk, of which they take no more than that; small ones pass them."""
    monkeypatch.setattr(artifacts, "SMALL_BYTES", 100_000)
    monkeypatch.setattr(artifacts, "MAX_BYTES", 1_000_000)
    monkeypatch.setattr(artifacts, "AT_ONCE", 1)
    monkeypatch.setattr(artifacts, "_turns", WeakKeyDictionary())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    most = 0

    async def carry(slot, path):
        nonlocal most
        async with artifacts.taken_along([(slot, path, ()), (slot, "/app/given", ())]) as carried:
            here = sum(file.stat().st_size > 100_000 for file in tmp_path.glob("atropos-artifacts-*/*"))
            most = max(most, here)
            if path != "/app/small":
                async with artifacts.taken_along([(slot, "/app/small", ())]):
                    pass
            await artifacts.put_down(slot, carried)
            assert not [*tmp_path.glob("atropos-artifacts-*/[01]")] or path == "/app/small"

    async with working_on(pool, make_task(tmp_path, dockerfile=APP)) as run:
        made = "mkdir large; head -c 400000 /dev/zero | tee file > large/x; head -c 2000000 /dev/zero > huge; echo 1 | tee small > given"
        assert (await run.slot.exec(made)).exit_code == 0
        await asyncio.gather(*(carry(run.slot, f"/app/{name}") for name in ("large", "file", "large")))
        assert most == 1
        with pytest.raises(VerifierFailed, match="carried over"):
            await carry(run.slot, "/app/huge")
    assert not [*tmp_path.glob("atropos-artifacts-*")]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("module", "name"), [(carry, "copy_safely"), (carry, "unpack_archive"), (artifacts, "carry_out")]
)
async def test_a_full_disk_is_no_agents_fault(pool, tmp_path, monkeypatch, module, name):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, full)
    async with working_on(pool, make_task(tmp_path, dockerfile=APP)) as run:
        await run.slot.exec("echo > given")
        with pytest.raises(SandboxError, match="No space left"):
            await run.verify("separate")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", ["view", "separate"])
async def test_settings_of_the_image_stay(pool, tmp_path, mode):
    dockerfile = f"{APP}RUN echo image > .Rprofile && mkdir kept && echo image > kept/own\n"
    test = (
        "#!/bin/sh\npython3 -m venv kept\n: Rscript prove octave\n"
        "cat .Rprofile .proverc kept/own | tr '\\n' ' ' | grep -qx 'image agent image ' && echo 1 > /logs/verifier/reward.txt"
    )
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=dockerfile)) as run:
        await run.slot.exec("echo agent > .proverc")
        assert (await run.verify(mode)).reward == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", MODES)
async def test_pythons_of_tests_keep_bytecode(pool, tmp_path, mode):
    """Images of Python have none: each start would compile its library, and tests with deadlines fail."""
    dockerfile = f"{APP}RUN mkdir /opt/own && touch /opt/own/own.py\nENV PYTHONPATH=/opt/own\n"
    test = "python3 -c 'import own, work' && ls /opt/own/__pycache__/own.*.pyc && ! ls /opt/own/work.*"
    test += "; echo $((! $?)) > /logs/verifier/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=dockerfile)) as run:
        left = "touch work.py" if mode == "shared" else "touch work.py; ln -s /opt/own __pycache__"
        assert (await run.slot.exec(left)).exit_code == 0
        assert (await run.verify(mode)).reward == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_tests_link_beside_a_server(pool, tmp_path):
    """In the agent's folder, of which a view shows later changes."""
    test = "cd /app; ln -s /logs/verifier new; echo 1 > new/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=APP)) as run:
        await run.slot.exec("setsid python3 -m http.server 8127 >/dev/null 2>&1 &")
        assert (await run.verify("view")).reward == 1


PORT_OPENS = ": < /dev/tcp/127.0.0.1/8125"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", ["view", "shared"])
@pytest.mark.parametrize(
    "asks",
    [
        pytest.param(
            f"for i in $(seq 100); do ({PORT_OPENS}) 2>/dev/null && up=1 && break; sleep 0.1; done", id="often"
        ),
        pytest.param(f"{PORT_OPENS}; up=$((! $?))", id="once"),
    ],
)
async def test_a_starting_server_is_reached(pool, tmp_path, monkeypatch, asks, mode):
    monkeypatch.setattr(services, "YOUNG_S", 10 * SLOWNESS)
    test = f"#!/bin/bash\n{asks}\necho ${{up:-0}} > /logs/verifier/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=APP)) as run:
        await run.slot.exec("setsid sh -c 'sleep 1; exec python3 -m http.server 8125' >/dev/null 2>&1 &")
        assert (await run.verify(mode)).reward == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("whose", ["image", "agent"])
async def test_a_repository_is_cloned_in_a_view(pool, tmp_path, whose):
    """By git, which takes a hard link on an overlay for another file than what it links to."""
    makes = "git init -q r && cd r && echo 1 > f && git add f && git -c user.name=a -c user.email=a@b commit -qm x"
    dockerfile = f"{APP}RUN {makes if whose == 'image' else 'true'}\n"
    test = "git clone -q /app/r /tmp/c; cp /tmp/c/f /logs/verifier/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=dockerfile)) as run:
        await run.slot.exec("true" if whose == "image" else makes)
        assert (await run.verify("view")).reward == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_stopped_collect_hooks_run_again(pool, tmp_path):
    """Here the first run takes too long."""
    command = "[ -e /tmp/once ] || { touch /tmp/once; sleep 1000; }; echo 1 > /logs/artifacts/made"
    toml = f"[[verifier.collect]]\ncommand = '{command}'\ntimeout_sec = {2 * SLOWNESS:g}\n"
    test = "cp /logs/artifacts/made /logs/verifier/reward.txt"
    async with working_on(pool, make_task(tmp_path, test=test, toml=toml, dockerfile=APP)) as run:
        assert (await run.verify("view")).reward == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("keep", "loops"), [("task", 1), ("services", 0), ("none", 0), ("all", 1)])
async def test_operator_says_what_stays(pool, tmp_path, keep, loops):
    test = "pgrep -fc ^a-mere-loop > /logs/verifier/reward.txt"
    task = make_task(tmp_path, test=test, toml="[verifier]\nkeep_processes = true\n")
    async with working_on(pool, task) as run:
        await run.slot.exec("(exec -a a-mere-loop sleep 1000 >/dev/null 2>&1 &)")
        assert (await workspace.verify(run.slot, task, mode="shared", keep=keep)).reward == loops


PAYS = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 8126))
while True:
    try:
        WHEN
        open("/logs/verifier/reward.txt", "w").write("1")
    except OSError:
        pass
    time.sleep(0.01)
"""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("when", ["pass", "os.stat('/tests/test.sh')", "os.stat('/logs/verifier/reward.txt')"])
@pytest.mark.parametrize("test", ["true", "echo 0 > /logs/verifier/reward.txt; sleep 0.1"])
async def test_server_writes_no_reward(pool, tmp_path, when, test):
    async with working_on(pool, make_task(tmp_path, test=test, dockerfile=APP)) as run:
        await run.slot.write_file("/app/pays.py", PAYS.replace("WHEN", when).encode())
        await run.slot.exec("setsid python3 pays.py >/dev/null 2>&1 &")
        await run.slot.exec("until : < /dev/tcp/127.0.0.1/8126; do sleep 0.05; done 2>/dev/null", timeout_s=30)
        with pytest.raises(VerifierFailed, match="process that its tests did not start"):
            await run.verify("shared")


@contextlib.asynccontextmanager
async def sized(pool, task):
    """An attempt in a slot that is as large as there is room for."""
    limits = pool.config.limits
    task = fit(task, Room(limits.resources)).sized(task)
    async with Attempt(pool, task) as run:
        await run.slot.release()
        prepared = await run.images.prepare(task)
        run.slot = await pool.acquire(task.name, image=prepared.image, limits=prepared.task.limits)
        await workspace.enter(run.slot, task)
        yield run


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mib", "fits"), [(700, True), (1500, False)])
async def test_lowered_limit_is_no_zero(pool, tmp_path, mode, mib, fits):
    """10 GiB of files were asked for, as old schemas do, and the slot has what fits into its memory."""
    task = make_task(
        tmp_path,
        toml=f'[environment]\nmemory = "2G"\nstorage = "10G"\n[verifier]\nenvironment_mode = "{mode}"\n',
        test="[ -e /app/done ]; echo $((! $?)) > /logs/verifier/reward.txt",
        files={"solution/solve.sh": f"#!/bin/sh\nhead -c {mib}M /dev/zero > /app/wheel.bin && touch /app/done"},
        dockerfile=APP,
    )
    async with sized(pool, task) as run:
        await workspace.solve(run.slot, run.task)
        if mode == "separate":
            await run.slot.exec("rm -f /app/wheel.bin")  # more than is carried over
        if fits:
            assert (await run.verify()).reward == 1
        else:
            with pytest.raises(NotSupported, match=r"disk limit was reached.*storage_mb: 10240 wanted"):
                await run.verify()


@pytest.mark.asyncio(loop_scope="module")
async def test_lowered_limit_of_tests_is_no_zero(pool, tmp_path):
    """As an installer's that removes what it had written."""
    task = make_task(
        tmp_path,
        toml='[environment]\nmemory = "2G"\nstorage = "10G"\n',
        test="head -c 1500M /dev/zero > /wheel.bin; rm /wheel.bin; echo 0 > /logs/verifier/reward.txt",
        dockerfile=APP,
    )
    async with sized(pool, task) as run:
        with pytest.raises(NotSupported, match=r"disk limit was reached.*storage_mb: 10240 wanted"):
            await run.verify()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", MODES)
async def test_unseen_lowered_limit_is_no_zero(pool, tmp_path, mode):
    """A server runs out of memory while the tests ask it, or before the agent's slot is given back."""
    name = f"hungry-{mode}-{os.getpid()}"
    asks = "until cat < /dev/tcp/127.0.0.1/8127; do sleep 0.1; done 2>/dev/null\n" if mode != "separate" else ""
    task = make_task(tmp_path, test=f"#!/bin/bash\n{asks}echo 0 > /logs/verifier/reward.txt", dockerfile=APP)
    wait = "import socket; asked = socket.create_server(('', 8127)).accept()" if asks else "input()"
    server = ["bash", "-c", f"exec -a {name} python3 -c \"{wait}; b'x' * (300 << 20)\""]
    async with working_on(pool, task) as run:
        await run.slot.release()
        limits, lowered = LeaseLimits(memory_mib=200), {"memory": "environment.memory_mb: 4096 wanted"}
        run.task = replace(run.task, limits=limits, lowered=lowered)
        run.slot = await pool.acquire(task.name, image=(await run.images.prepare(task)).image, limits=limits)
        await workspace.enter(run.slot, run.task)
        process = await run.slot.start(server)
        if not asks:
            await until(lambda: running(name), "the server")
            await process.write("\n")
            await until(lambda: not running(name), "its end")
        with pytest.raises(NotSupported, match=r"memory limit was reached.*memory_mb: 4096 wanted"):
            await run.verify(mode)


@pytest.mark.asyncio(loop_scope="module")
async def test_tasks_own_limit_is_zero(pool, tmp_path):
    task = make_task(tmp_path, test="echo 0 > /logs/verifier/reward.txt", dockerfile=APP)
    async with working_on(pool, task) as run:
        assert (await run.slot.exec("head -c 2G /dev/zero > /app/f; rm /app/f; exit 1")).exit_code == 1
        assert (await run.slot.exec("head -c 2G /dev/zero > /app/f")).limit == "disk"
        await run.slot.exec("rm /app/f")
        assert (await run.verify("shared")).reward == 0


@pytest.mark.skipif(not DATA.exists(), reason=f"HumanEval is not at {DATA}")
async def test_stopped_processes_cost_no_reward():
    tasks = fitting_tasks([EXAMPLES / "fix-ledger", EXAMPLES / "notes-server"], at_once=4)
    found = await measure(tasks, load_problems(DATA)[:6], [Condition.STORMS], at_once=4)
    assert (found["storms"]["false_zeros"], found["storms"]["dropped"]) == ({}, {})


PROGRAM = "sum(x * x for x in range(1_000_000))"
VERIFIERS, AT_ONCE = 20, 4


async def beside_it() -> float:
    """Seconds that the program takes on the host itself, as often at once as in slots."""
    began = time.perf_counter()
    programs = [await asyncio.create_subprocess_exec("python3", "-c", PROGRAM) for _ in range(AT_ONCE)]
    assert [await each.wait() for each in programs] == [0] * AT_ONCE
    return time.perf_counter() - began


@pytest.mark.alone("compares times")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_busy_host_costs_no_reward(pool, tmp_path):
    room = asyncio.Semaphore(AT_ONCE)

    async def score(number, within_s):
        test = f"timeout {within_s:.1f} python3 -c '{PROGRAM}'; echo $((! $?)) > /logs/verifier/reward.txt"
        async with room, working_on(pool, make_task(tmp_path / str(number), test=test, dockerfile=APP)) as run:
            return (await run.verify()).reward

    async with host(Condition.BUSY):
        within_s = 4 * max([await beside_it() for _ in range(3)])
        assert await asyncio.gather(*(score(n, within_s) for n in range(VERIFIERS))) == [1.0] * VERIFIERS
