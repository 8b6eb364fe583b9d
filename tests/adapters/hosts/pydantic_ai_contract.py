"""pydantic-ai's own conformance suite, and what it leaves out, on slots; tests/adapters/test_agent_kits.py runs it
there."""

from __future__ import annotations

import asyncio

import entrypoint_images
import pytest
from accident import kill_container
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import Workspace, WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from atropos.adapters.pydantic_ai import AtroposWorkspace
from atropos.errors import ImageUnavailable

POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def shared(anyio_backend):
    async with AtroposWorkspace(pool=POOL, user="nobody") as workspace:
        yield workspace


class TestSlots(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, shared):
        return shared

    @pytest.fixture
    async def fresh_backend(self):
        made = []
        yield lambda: made.append(AtroposWorkspace(pool=POOL, user="nobody")) or made[-1]
        for workspace in made:
            await workspace.aclose()

    @pytest.fixture
    def attach_backend(self):
        return AtroposWorkspace

    @pytest.fixture
    def destroy_environment(self):
        return AtroposWorkspace.aclose


pytestmark = pytest.mark.anyio


async def test_folders_are_listed_without_coreutils(tmp_path):
    image = entrypoint_images.image(tmp_path)
    async with AtroposWorkspace(pool=POOL, image=image) as backend:
        workspace = Workspace(backend)
        assert await workspace.working_dir() == "/srv"
        await workspace.write_text(".hidden\nfile", "x")
        await workspace.make_dir("folder")
        entries = await workspace.list_dir(".")
        assert [(entry.name, entry.is_dir) for entry in entries] == [(".hidden\nfile", False), ("folder", True)]


async def test_a_cancelled_caller_leaves_the_slot():
    async with AtroposWorkspace(pool=POOL) as workspace:
        first = asyncio.create_task(workspace.working_dir())
        await asyncio.sleep(0.01)
        first.cancel()
        assert await workspace.working_dir() == "/workspace"


async def test_another_process_s_ref_is_unavailable():
    with pytest.raises(WorkspaceUnavailableError, match="no slot of this process"):
        await AtroposWorkspace(WorkspaceRef(provider="atropos", id="elsewhere")).working_dir()


async def test_a_missing_image_may_be_retried():
    async with AtroposWorkspace(pool=POOL, image="127.0.0.1:1/none:1") as workspace:
        for _ in range(2):
            with pytest.raises(ImageUnavailable):
                await workspace.working_dir()


def worker(*replies):
    """An agent with a shell, whose model says these one after the other."""
    agent = Agent(FunctionModel(lambda messages, info: ModelResponse(parts=[replies[len(messages) // 2]])))

    @agent.tool
    async def shell(ctx, command: str) -> str:
        return (await ctx.workspace.run(command, shell=True)).stdout

    return agent


async def test_an_agent_works_in_a_slot():
    agent = worker(ToolCallPart("shell", {"command": "echo $((6 * 7))"}), TextPart("done"))
    async with AtroposWorkspace(pool=POOL) as workspace:
        result = await agent.run("go", workspace=workspace)
    assert result.output == "done"
    assert "42" in str(result.all_messages())


async def test_a_killed_container_is_an_error():
    async with AtroposWorkspace(pool={**POOL, "slots_per_container": 1}) as workspace:
        await workspace.working_dir()
        kill_container()
        agent = worker(ToolCallPart("shell", {"command": "sleep 30"}), TextPart("I give up"))
        with pytest.raises(WorkspaceUnavailableError):
            await agent.run("go", workspace=workspace)
