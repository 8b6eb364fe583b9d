"""Packages that build on E2B's SDK, against the server of its variables; run by tests/adapters/test_e2b_clients.py with those packages."""

from __future__ import annotations

import io
from pathlib import Path

import e2b
import pytest
from agents import RunConfig, Runner
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ScriptedModel, assistant_message, function_call
from deepagents import create_deep_agent
from e2b_code_interpreter import Sandbox as CodeInterpreter
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_e2b import AsyncE2BSandbox, E2BSandbox

CURE = "`Sandbox` of the package e2b"


def options(**more):
    return E2BSandboxClientOptions(**{"sandbox_type": E2BSandboxType.E2B, "timeout": 120} | more)


@pytest.mark.parametrize(("kept", "pauses"), [("tar", True), ("tar", False), ("snapshot", False)])
async def test_agents_sdk_goes_on_with_its_files(kept, pauses, tmp_path):
    client = E2BSandboxClient()
    session = await client.create(
        snapshot=LocalSnapshotSpec(base_path=tmp_path),
        options=options(pause_on_exit=pauses, workspace_persistence=kept),
    )
    async with session:
        assert (await session.exec("echo", "hi")).stdout == b"hi\n"
        await session.write(Path("a.txt"), io.BytesIO(b"data"))
    again = await client.resume(session.state)
    async with again:
        assert (await again.read(Path("a.txt"))).read() == b"data"
    await client.delete(again)


async def test_agents_sdk_runs_an_agent():
    call = function_call("exec_command", {"cmd": "echo $((6 * 7))"}, call_id="a")
    worker = SandboxAgent(name="w", instructions="Work.", model=ScriptedModel([[call], [assistant_message("done")]]))
    settings = RunConfig(sandbox=SandboxRunConfig(client=E2BSandboxClient(), options=options()), tracing_disabled=True)
    result = await Runner.run(worker, "go", run_config=settings)
    assert (result.final_output, "42" in str(result.to_input_list())) == ("done", True)


async def test_code_interpreters_name_the_cure():
    with pytest.raises(e2b.SandboxException, match=CURE):
        CodeInterpreter.create()
    with pytest.raises(e2b.SandboxException, match=CURE):
        await E2BSandboxClient().create(options=options(sandbox_type=E2BSandboxType.CODE_INTERPRETER))


class Model(GenericFakeChatModel):
    def bind_tools(self, tools, **kwargs):
        return self


def agent(backend):
    calls = [
        ("write_file", {"file_path": "/srv/said.txt", "content": "42"}),
        ("execute", {"command": "cat /srv/said.txt"}),
    ]
    turns = [AIMessage("", tool_calls=[{"name": name, "args": args, "id": name}]) for name, args in calls]
    return create_deep_agent(model=Model(messages=iter([*turns, AIMessage("done")])), backend=backend)


def check(result):
    assert result["messages"][-1].content == "done"
    assert result["messages"][-2].content.startswith("42")


async def test_deepagents_works_in_a_sandbox():
    with e2b.Sandbox.create(timeout=120) as sandbox:
        backend = E2BSandbox(sandbox=sandbox)
        check(agent(backend).invoke({"messages": [("user", "go")]}))
        assert backend.upload_files([("/srv/up", b"\0")])[0].error is None
        assert backend.download_files(["/srv/up", "/srv/none"])[0].content == b"\0"
    sandbox = await e2b.AsyncSandbox.create(timeout=120)
    check(await agent(AsyncE2BSandbox(sandbox=sandbox)).ainvoke({"messages": [("user", "go")]}))
    await sandbox.kill()
