import pytest

from atropos.tools import ToolCall, ToolExecutor, build_tool_registry
from tests.unit.tools.fakes import FakePool


@pytest.fixture
def pool():
    return FakePool()


@pytest.fixture
async def executor(pool):
    async with ToolExecutor(pool, build_tool_registry(["default"])) as made:
        yield made


@pytest.fixture
def use(executor):
    async def call(name, trajectory="t", **arguments):
        return await executor.execute(trajectory, ToolCall(name=name, arguments=arguments))

    return call
