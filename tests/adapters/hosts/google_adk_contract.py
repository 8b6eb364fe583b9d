"""What environments of Google's ADK do, on slots; run by tests/adapters/test_agent_kits.py with that package."""

from __future__ import annotations

from pathlib import Path

import pytest
from accident import kill_container
from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools.environment import EnvironmentToolset
from google.genai import types

from atropos.adapters.google_adk import AtroposEnvironment, EnvironmentGoneError

POOL = {"backend": "local", "slots_per_container": 3, "max_containers": 1}


@pytest.fixture
async def environment():
    environment = AtroposEnvironment(pool=POOL)
    await environment.initialize()
    await environment.initialize()
    yield environment
    await environment.close()
    await environment.close()


async def test_commands(environment):
    assert (environment.working_dir, environment.is_initialized) == (Path("/workspace"), True)
    result = await environment.execute("pwd; echo no >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "/workspace\n", "no\n")
    assert (await environment.execute("kill -9 $$")).exit_code == 137
    late = await environment.execute("echo begun; sleep 60", timeout=0.5)
    assert (late.timed_out, late.stdout) == (True, "begun\n")


async def test_files_go_there_and_back(environment):
    await environment.write_file(Path("deep/er/a"), "text")
    assert await environment.read_file(Path("/workspace/deep/er/a")) == b"text"
    with pytest.raises(FileNotFoundError):
        await environment.read_file(Path("nothing"))


async def test_use_after_close_is_a_mistake():
    with pytest.raises(RuntimeError, match="not initialized"):
        await AtroposEnvironment(pool=POOL).execute("true")


class Scripted(BaseLlm):
    turns: list

    async def generate_content_async(self, llm_request, stream=False):
        part = self.turns.pop(0)
        yield LlmResponse(content=types.Content(role="model", parts=[part() if callable(part) else part]))


async def run(*turns, pool):
    environment = AtroposEnvironment(pool=pool)
    toolset = EnvironmentToolset(environment=environment)
    agent = LlmAgent(name="worker", model=Scripted(model="scripted", turns=[*turns]), tools=[toolset])
    runner = InMemoryRunner(agent=agent, app_name="app")
    try:
        session = await runner.session_service.create_session(app_name="app", user_id="u")
        message = types.Content(role="user", parts=[types.Part(text="go")])
        return [event async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message)]
    finally:
        await toolset.close()


def call(command):
    return types.Part(function_call=types.FunctionCall(name="Execute", args={"command": command}))


async def test_an_agent_works_in_a_slot():
    events = await run(call("echo $((6 * 7))"), types.Part(text="done"), pool=POOL)
    assert "42" in str(events[1].content)
    assert events[-1].content.parts[0].text == "done"


async def test_a_killed_container_is_an_error():
    def accident():
        kill_container()
        return call("sleep 30")

    with pytest.raises(EnvironmentGoneError):
        await run(accident, types.Part(text="I give up"), pool={**POOL, "slots_per_container": 1})
