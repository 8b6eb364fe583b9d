"""What sandboxes of OpenAI's Agents SDK do, on slots; run by tests/adapters/test_agent_kits.py with that package."""

from __future__ import annotations

import io
from pathlib import Path

import entrypoint_images
import pytest
import pytest_asyncio
from accident import kill_container
from agents import RunConfig, Runner
from agents.exceptions import UserError
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExposedPortUnavailableError,
    PtySessionNotFoundError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call

from atropos.adapters.openai_agents import AtroposSandboxClient, AtroposSandboxClientOptions

POOL = {"backend": "local", "slots_per_container": 3, "max_containers": 1}
MANIFEST = Manifest(entries={"given/hello.txt": File(content=b"hello\n")}, environment={"value": {"WORD": "word"}})


@pytest.fixture(scope="module")
def client():
    return AtroposSandboxClient(pool=POOL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session(client):
    async with await client.create(manifest=MANIFEST) as session:
        yield session


async def test_a_manifests_files_are_there(session):
    result = await session.exec("pwd; cat given/hello.txt; echo $WORD; echo no >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == (b"/workspace\nhello\nword\n", b"no\n", 3)
    assert (await session.exec("no-such-program", shell=False)).exit_code == 127
    assert (await session.exec("kill -9 $$")).exit_code == 137
    assert await session.running()


async def test_users_are_the_slots_own(session):
    result = await session.exec("id -un; echo $HOME", user="nobody")
    assert result.stdout.decode().split()[0] == "nobody"
    await session.exec("install -d -o nobody shared")
    await session.write(Path("shared/file"), io.BytesIO(b"x"), user="nobody")
    assert (await session.exec("stat -c %U shared/file")).stdout == b"nobody\n"


async def test_a_time_out_is_the_sdks_error(session):
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 60", timeout=0.5)


async def test_files_go_there_and_back(session):
    data = bytes(range(256)) * 4000
    await session.write(Path("deep/er/a"), io.BytesIO(data))
    assert (await session.read(Path("deep/er/a"))).read() == data
    assert await session.read_bounded(Path("deep/er/a"), max_bytes=3) == b"\0\1\2"
    assert [entry.path for entry in await session.ls("deep")] == ["/workspace/deep/er"]
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("nothing"))


async def test_a_program_on_a_terminal_is_spoken_with(session):
    started = await session.pty_exec_start("cat", tty=True, yield_time_s=0.3)
    assert started.exit_code is None
    said = await session.pty_write_stdin(session_id=started.process_id, chars="one\n", yield_time_s=1)
    assert b"one" in said.output
    ended = await session.pty_write_stdin(session_id=started.process_id, chars="\x04", yield_time_s=5)
    assert (ended.exit_code, ended.process_id) == (0, None)
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=started.process_id, chars="x")
    done = await session.pty_exec_start("echo out; exit 3", yield_time_s=10)
    assert (done.output, done.exit_code) == (b"out\n", 3)


async def test_a_port_of_the_slot_is_reached(client):
    options = AtroposSandboxClientOptions(exposed_ports=(8000,))
    async with await client.create(options=options) as session:
        endpoint = await session.resolve_exposed_port(8000)
        assert endpoint.host == "127.0.0.1"
        with pytest.raises(ExposedPortUnavailableError):
            await session.resolve_exposed_port(8001)


async def test_a_kept_state_finds_its_slot(client, tmp_path):
    session = await client.create(
        manifest=MANIFEST, snapshot=LocalSnapshotSpec(base_path=tmp_path), options=AtroposSandboxClientOptions()
    )
    await session.start()
    await session.exec("echo kept >kept; echo gone >/tmp/gone; ln -s kept link")
    kept = client.serialize_session_state(session.state)
    assert "pool" not in str(kept)
    again = await client.resume(client.deserialize_session_state(dict(kept)))
    await again.start()
    assert (await again.exec("cat link /tmp/gone")).stdout == b"kept\ngone\n"
    await again.aclose()
    kept = client.serialize_session_state(again.state)
    async with await client.resume(client.deserialize_session_state(dict(kept))) as filled:
        assert (await filled.exec("cat link; ls /tmp/gone")).stdout == b"kept\n"


async def test_an_image_of_the_options_is_the_slots(client, tmp_path):
    programs = ("ls", "test", "readlink", "dirname", "basename", "head", "mktemp", "mv", "rm", "chmod", "cp", "sed")
    image = entrypoint_images.image(tmp_path, *(entrypoint_images.link(f"bin/{name}", "busybox") for name in programs))
    options = AtroposSandboxClientOptions(image=image)
    async with await client.create(options=options) as session:
        assert (await session.exec("cat", "/said", shell=False)).stdout == b"sleep infinity /srv\n"


async def test_a_missing_image_fails_the_start(client):
    session = await client.create(options=AtroposSandboxClientOptions(image="127.0.0.1:1/none:1"))
    with pytest.raises(WorkspaceStartError, match="image_unavailable"):
        await session.start()


async def test_a_start_that_fails_keeps_no_slot():
    client = AtroposSandboxClient(pool={**POOL, "slots_per_container": 1, "acquire_timeout_s": 60})
    with pytest.raises(WorkspaceStartError, match="/etc/passwd/no"):
        await (await client.create(manifest=Manifest(root="/etc/passwd/no"))).start()
    async with await client.create() as session:
        assert await session.running()


def agent(*turns):
    return SandboxAgent(name="worker", instructions="Work.", model=ScriptedModel(turns))


async def run(worker, client):
    settings = RunConfig(sandbox=SandboxRunConfig(client=client), tracing_disabled=True)
    return await Runner.run(worker, "go", run_config=settings)


async def test_an_agent_works_in_a_slot(client):
    worker = agent(
        [function_call("exec_command", {"cmd": "echo $((6 * 7))"}, call_id="a")], [assistant_message("done")]
    )
    result = await run(worker, client)
    assert "42" in str(result.to_input_list())
    assert result.final_output == "done"


async def test_a_killed_container_is_an_error():
    """Not as what the model made of a tool that failed."""
    client = AtroposSandboxClient(pool={**POOL, "slots_per_container": 1})

    def accident(call):
        kill_container()
        return [function_call("exec_command", {"cmd": "sleep 30"}, call_id="a")]

    with pytest.raises(UserError, match="lost"):
        await run(agent(ModelStep.respond(accident), [assistant_message("I give up")]), client)
