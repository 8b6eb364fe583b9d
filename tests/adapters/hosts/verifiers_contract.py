"""The contract of verifiers' runtimes, on slots; tests/adapters/test_verifiers.py runs it with that package."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request

import pytest
import pytest_asyncio
import side_by_side
import verifiers.v1 as vf
from accident import kill_container
from verifiers.v1.errors import SandboxError

from atropos.adapters.verifiers import AtroposRuntime

LIMITS = {"memory_mib": 192, "pids": 64, "disk_mib": 64}
POOL = {"backend": "local", "slots_per_container": 2, "max_containers": 1, "limits": LIMITS}
pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVER = ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"]


class Task(vf.Task):
    def runtime_env(self):
        return {"WORD": "hello"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime():
    async with AtroposRuntime(Task(vf.TaskData(prompt="x", workdir="/work/here")), pool=POOL) as started:
        await started.start()
        yield started


async def test_programs_have_folder_and_user(runtime):
    result = await runtime.run(["sh", "-c", "pwd; echo $WORD $MORE; echo no >&2; exit 3"], {"MORE": "world"})
    assert result == vf.ProgramResult(3, "/work/here\nhello world\n", "no\n")
    view = runtime.with_user("nobody", home="/tmp").with_env({"WORD": "bye"})
    view.user, view.home = "nobody", "/tmp"
    assert (await view.run(["sh", "-c", "id -un; echo $HOME $WORD"], {})).stdout == "nobody\n/tmp bye\n"
    assert (await runtime.run(["nothing-here"], {})).exit_code == 127
    assert (await runtime.run(["sh", "-c", "kill -9 $$"], {})).exit_code == 137
    assert await runtime.alive()


async def test_a_missing_folder_is_made(runtime):
    async with AtroposRuntime(Task(vf.TaskData(prompt="x", workdir="/srv/here")), user="nobody", pool=POOL) as other:
        await other.start()
        await other.write("a", b"mine")
        assert (await other.run(["sh", "-c", "pwd; id -un; cat a"], {})).stdout == "/srv/here\nnobody\nmine"
    async with AtroposRuntime(Task(vf.TaskData(prompt="x", workdir="/etc/passwd/no")), pool=POOL) as other:
        with pytest.raises(SandboxError, match="/etc/passwd/no"):
            await other.start()


async def test_files_go_there_and_back(runtime):
    data = bytes(range(256)) * 4000
    await runtime.write("deep/er/a", data)
    assert await runtime.read("/work/here/deep/er/a") == data
    assert await runtime.read("deep/er/a", max_bytes=len(data)) == data
    with pytest.raises(SandboxError, match="byte limit"):
        await runtime.read("deep/er/a", max_bytes=len(data) - 1)
    with pytest.raises(SandboxError, match="nothing"):
        await runtime.read("/nothing")


async def test_a_live_process_is_spoken_with(runtime):
    process = await runtime.open_process(["sh", "-c", "echo warn >&2; cat; sleep 60"], {})
    await process.write(b"\x00one\n")
    assert await anext(process.stdout) == b"\x00one\n"
    assert await anext(process.stderr) == b"warn\n"
    assert await process.poll() is None
    await process.terminate()
    assert await process.wait() == 128 + signal.SIGTERM
    assert await process.poll() == 128 + signal.SIGTERM
    with pytest.raises(SandboxError, match="no-such"):
        await runtime.open_process(["no-such"], {})


async def test_a_slots_service_is_reached(runtime):
    await runtime.write("page", b"from the slot")
    await runtime.run_background(SERVER, {}, "server.log")
    url, again = await asyncio.gather(runtime.expose(8000), runtime.expose(8000))
    assert await fetched(f"{url}/page") == b"from the slot"
    assert url == again == await runtime.expose(8000)
    assert b"GET /page" in await runtime.read("server.log")


async def test_a_slot_reaches_this_machines_endpoint(runtime):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(list(range(100_000))).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = runtime.host_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        code = f"import urllib.request; print(len(urllib.request.urlopen({url!r}).read()))"
        result = await runtime.run(["python3", "-c", code], {})
    assert result.stdout == f"{len(json.dumps(list(range(100_000))))}\n", result.stderr


async def test_a_killed_container_is_an_error():
    async with AtroposRuntime(pool={**POOL, "slots_per_container": 1}) as runtime:
        with pytest.raises(SandboxError, match="not started"):
            await runtime.run(["true"], {})
        await runtime.start()
        process = await runtime.open_process(["sleep", "60"], {})
        running = asyncio.create_task(runtime.run(["sleep", "60"], {}))
        await asyncio.sleep(0.5)
        kill_container()
        for failing in (running, process.wait(), runtime.read("x"), runtime.write("x", b"")):
            with pytest.raises(SandboxError):
                await failing
        assert not await runtime.alive()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"resources": {"gpu": "A100"}}, "gpu"),
        ({"resources": {"memory": 8}}, "a slot has 192"),
        ({"resources": {"disk": 8}}, "a slot has 64 MiB"),
        ({"network_block": ["example.org"]}, "network_block"),
        ({"network_allow": ["pypi.*"]}, "network_allow"),
    ],
)
async def test_what_a_slot_can_t_have_is_refused(data, says):
    with pytest.raises(ValueError, match=says):
        AtroposRuntime(vf.Task(vf.TaskData(prompt="x", **data)), network=True, pool=POOL)


async def test_a_policy_holds_once_the_agent_runs():
    """A slot of a pool with network reaches nothing that the task doesn't allow; setup does."""
    task = vf.Task(vf.TaskData(prompt="x", network_allow=["allowed.test"]))
    async with AtroposRuntime(task, network=True, pool=POOL) as runtime:
        await runtime.prepare_setup()
        ask = [
            "sh",
            "-c",
            "curl -s -o /dev/null -w '%{http_code} %header{x-atropos-refused}' http://other.test/ || true",
        ]
        before = (await runtime.run(ask, {})).stdout
        await runtime.prepare_execution([])
        after = (await runtime.run(ask, {})).stdout
        await runtime.prepare_execution(None)
        assert before == (await runtime.run(ask, {})).stdout != after


async def test_a_policy_may_have_urls(runtime):
    """As for verifiers' Docker runtimes: of a host the one port, and no path."""
    rules = ["https://one.test/path", "http://two.test", "https://[::1]:8443", "three.test:80"]
    task = vf.Task(vf.TaskData(prompt="x", network_allow=rules))
    async with AtroposRuntime(task, network=True, pool=POOL) as restricted:
        await restricted.prepare_setup()
        await restricted.prepare_execution([])
        asked = "for url in http://one.test http://two.test http://two.test:81; do curl -s -o /dev/null -w '%{http_code} ' $url; done"
        answers = (await restricted.run(["sh", "-c", asked], {})).stdout.split()
    assert answers == ["403", "502", "403"]  # 502: allowed, and a name that nobody has


async def fetched(url):
    def fetch():
        with urllib.request.urlopen(url) as response:
            return response.read()

    for _ in range(100):
        try:
            return await asyncio.to_thread(fetch)
        except OSError:
            await asyncio.sleep(0.1)
    return await asyncio.to_thread(fetch)


async def test_commands_run_beside_a_waiting_one(runtime):
    async def run(line):
        return (await runtime.run(["sh", "-c", line], {})).stdout

    assert await side_by_side.answer(run) == "42\n"
