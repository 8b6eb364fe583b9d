"""External tools through the executor: the real ToolServer in this process and over TCP, and every way it can fail."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette

from atropos.api.settings import ToolServerSettings
from atropos.api.tool_server import create_app
from atropos.errors import ConfigError, LeaseExpired, OutcomeUnknown, ToolServerUnavailable
from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, build_tool_registry, tool
from atropos.tools.tool_server import client as remote_module
from atropos.tools.tool_server import transport

runs = []


@tool(sandboxed=False, toolsets=("test",))
async def note(text: str, numbers: list[int] | None = None, seconds: float = 0) -> str:
    """Take a note."""
    runs.append(text)
    await asyncio.sleep(seconds)
    return f"{text} {numbers}"


@tool(sandboxed=False, toolsets=("test",))
async def broken() -> str:
    """Break."""
    raise RuntimeError("its own fault")


class Count:
    def __str__(self):
        return "3"


@tool(sandboxed=False, toolsets=("test",))
async def odd():
    """Answer what JSON doesn't have, as numbers of NumPy."""
    return {"lines": Count(), 7: [Count()]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.clear()
    monkeypatch.setattr(remote_module, "MAX_DELAY_S", 0.05)


def executor(pool, url, *, token=None, tools=(note, broken), enabled=("default", "test"), **more):
    registry = build_tool_registry(list(enabled), None, url, tools=list(tools))
    return ToolExecutor(pool, registry, ToolExecutorConfig(tool_server_url=url, tool_server_token=token), **more)


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


@pytest.fixture
async def served():
    """The real application on a port of its own."""
    app = create_app(ToolServerSettings(token="right"), tools=[note, broken])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(20):
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


async def test_in_this_process(pool):
    async with executor(pool, "inprocess") as made:
        assert (await made.execute("t", call("note", text="hi", numbers="[1, 2]"))).output == "hi [1, 2]"
        wrong = await made.execute("t", call("note", txt="hi"))
        assert "'text' is missing" in wrong.error
        failed = await made.execute("t", call("broken"))
        assert "its own fault" in failed.error
        assert (await made.execute("t", call("terminal", command="echo hi"))).output == "hi\n"
        assert pool.free == 7
    assert pool.free == 8


async def test_tokens_of_any_characters(pool):
    async with executor(pool, "inprocess", token="schlüssel-🔑") as made:
        assert (await made.execute("t", call("note", text="hi"))).output == "hi None"


async def test_no_json_becomes_text(pool):
    async with executor(pool, "inprocess", tools=[odd]) as made:
        answer = await made.execute("t", call("odd"))
        assert (answer.output, answer.data) == ('{"lines": "3", "7": ["3"]}', {"lines": "3", "7": ["3"]})


async def test_external_calls_alone_lease_no_slot(pool):
    async with executor(pool, "inprocess") as made:
        await made.execute("t", call("note", text="hi"))
        assert pool.free == 8
        await made.release_trajectory("t")


async def test_over_tcp_and_with_token(pool, served):
    async with executor(pool, served, token="right") as made:
        results = await asyncio.gather(*(made.execute(f"t{i}", call("note", text=str(i))) for i in range(50)))
        assert [one.output for one in results] == [f"{i} None" for i in range(50)]
        await asyncio.gather(*(made.release_trajectory(f"t{i}") for i in range(50)))


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_wrong_token_told_early(pool, served, token):
    with pytest.raises(ToolServerUnavailable, match="tool_server_token"):
        async with executor(pool, served, token=token):
            pass


async def test_a_token_has_no_line_break(pool, served):
    with pytest.raises(ConfigError, match=r"tool_server_token: .* line break"):
        executor(pool, served, token="right\n")


async def test_one_hanging_tool_delays_no_other(pool, served):
    async with executor(pool, served, token="right") as made:
        hanging = asyncio.create_task(made.execute("slow", call("note", text="slow", seconds=60)))
        async with asyncio.timeout(20):
            await asyncio.gather(*(made.execute(f"t{i}", call("note", text="x")) for i in range(20)))
        assert not hanging.done()
        await made.release_trajectory("slow")
        await asyncio.gather(hanging, return_exceptions=True)


async def test_what_a_model_can_write_is_answered(pool):
    async with executor(pool, "inprocess") as made:
        for arguments in (
            '{"text": "\\ud800"}',
            '{"text": ' + "[" * 500 + "]" * 500 + "}",
            "[]",
            {"text": "x" * 9_000_000},
        ):
            result = await made.execute("t", ToolCall(name="note", arguments=arguments))
            assert not result.success
            assert result.error
    assert runs == []


async def test_lacking_are_not_offered(pool):
    def factory():
        return create_app(ToolServerSettings(only=("web_extract",)), tools=[note])

    async with executor(pool, "inprocess", tool_server_app=factory) as made:
        assert "note" in made.tools
        assert "broken" not in made.tools
        assert "Did you mean" not in (await made.execute("t", call("broken"))).error
    with pytest.raises(ConfigError, match="no tool of 'browser'"):
        async with executor(pool, "inprocess", tool_server_app=factory, enabled=("default", "browser")):
            pass


@pytest.mark.parametrize(
    ("enabled", "disabled", "offered"),
    [
        (["mcp"], None, True),
        (["mcp-notes"], None, True),
        (["all"], None, True),
        (["default"], None, False),
        (["default", "mcp"], ["mcp"], False),
        (["all"], ["mcp"], False),
    ],
)
async def test_server_tools_join(pool, enabled, disabled, offered):
    @tool("jot", sandboxed=False, toolsets=("mcp-notes",))
    async def jot(text: str) -> str:
        """Jot it down."""
        return text.upper()

    def factory():
        return create_app(ToolServerSettings(), tools=[jot])

    registry = build_tool_registry(enabled, disabled, "inprocess")
    config = ToolExecutorConfig(tool_server_url="inprocess")
    async with ToolExecutor(pool, registry, config, tool_server_app=factory) as made:
        assert ("jot" in made.tools) is offered
        if offered:
            assert (await made.execute("t", call("jot", text="hi"))).output == "HI"
            schema = made.tools.get("jot").schema.parameters
            assert schema["required"] == ["text"]


async def test_server_toolsets_enabled(pool):
    registry = build_tool_registry(["test"], None, "inprocess")
    config = ToolExecutorConfig(tool_server_url="inprocess")
    app = create_app(ToolServerSettings(), tools=[note])
    async with ToolExecutor(pool, registry, config, tool_server_app=lambda: app) as made:
        assert made.tools.names == ["note"]
        assert (await made.execute("t", call("note", text="hi"))).output == "hi None"


@pytest.mark.parametrize("name", ["mcp-isues", "mcp", "defualt"])
async def test_empty_are_refused(pool, name):
    app = create_app(ToolServerSettings(), tools=[note])
    with pytest.raises(ConfigError, match=f"no tool of '{name}'; its toolsets: .*test"):
        async with executor(pool, "inprocess", enabled=("default", name), tool_server_app=lambda: app):
            pass
    assert app.state.host.draining, "the ToolServer in this process outlived the refusal"


async def test_cancelled_start_ends_it(pool):
    begun, ended = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def endless(_):
        begun.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.set()

    async with asyncio.timeout(30):
        start = asyncio.create_task(
            executor(pool, "inprocess", tool_server_app=lambda: Starlette(lifespan=endless)).start()
        )
        await begun.wait()
        start.cancel()
        await asyncio.wait([start])
    assert start.cancelled()
    assert ended.is_set()


async def test_no_server_at_all(pool):
    with pytest.raises(ToolServerUnavailable, match=r"127\.0\.0\.1:1"):
        async with executor(pool, "http://127.0.0.1:1"):
            pass


# ------------------------------------------------------------------------------------------------------ scripted server


class Scripted:
    """An HTTP server that answers each request by the next step of a script."""

    def __init__(self):
        self.steps, self.seen, self.ended, self.boot = [], [], [], "one"

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0]) if "content-length: " in head else 0
                body = await reader.readexactly(length)
                if head.startswith("get /tools"):
                    schema = {"type": "function", "function": {"name": "note", "description": "d", "parameters": {}}}
                    info = {"name": "note", "toolset": "test", "schema": schema, "timeout_s": 5}
                    self._answer(writer, 200, {"version": 1, "boot_id": self.boot, "tools": [info]})
                elif head.startswith("delete"):
                    self.ended.append(head.split()[1])
                    self._answer(writer, 200, {"ended": True})
                else:
                    self.seen.append(json.loads(body))
                    step = self.steps.pop(0) if self.steps else "ok"
                    if step == "drop":
                        return
                    if step == "ok":
                        result = {"success": True, "output": "done"}
                        answer = {"call_id": self.seen[-1]["call_id"], "boot_id": self.boot, "result": result}
                        self._answer(writer, 200, answer)
                    elif step == "nonsense":
                        self._answer(writer, 200, {"hello": 1})
                    else:
                        self._answer(writer, step, {"code": "x", "message": "because"})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\ncontent-type: application/json\r\n\r\n".encode()
            + data
        )


@pytest.fixture
async def scripted():
    async with Scripted() as server:
        yield server


@pytest.fixture
async def made(pool, scripted):
    async with executor(pool, scripted.url, tools=[note]) as one:
        yield one


@pytest.mark.parametrize("steps", [[503, 429, 503], ["drop"], ["drop", 503, "drop"], [502]])
async def test_safe_is_tried_again(made, scripted, steps):
    scripted.steps = list(steps)
    assert (await made.execute("t", call("note", text="x"))).output == "done"
    assert len(scripted.seen) == len(steps) + 1
    assert len({one["call_id"] for one in scripted.seen}) == 1


async def test_a_resend_names_its_server(made, scripted):
    scripted.steps = ["drop"]
    await made.execute("t", call("note", text="x"))
    assert [one["boot_id"] for one in scripted.seen] == [None, "one"]


async def test_restarted_is_another(made, scripted):
    scripted.steps = ["drop", 409]
    scripted.boot = "two"
    with pytest.raises(OutcomeUnknown):
        await made.execute("t", call("note", text="x"))
    assert [one["boot_id"] for one in scripted.seen] == [None, "one"]


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (500, OutcomeUnknown),
        (409, OutcomeUnknown),
        (401, ToolServerUnavailable),
        (404, ToolServerUnavailable),
        ("nonsense", OutcomeUnknown),
    ],
)
async def test_unsafe_is_told_as_it_is(made, scripted, step, kind):
    scripted.steps = [step]
    with pytest.raises(kind):
        await made.execute("t", call("note", text="x"))
    assert len(scripted.seen) == 1, "what may have run was sent again"
    assert (await made.execute("t", call("note", text="y"))).success


async def test_too_long_is_the_models(made, scripted):
    scripted.steps = [413]
    result = await made.execute("t", call("note", text="x"))
    assert "too long" in result.error


async def test_gone_is_unavailable(made, scripted, monkeypatch):
    pauses = []

    def pause_s(attempt, **_):
        pauses.append(attempt)
        return 0

    monkeypatch.setattr(remote_module, "backoff_s", pause_s)
    scripted.steps = [503] * 20
    with pytest.raises(ToolServerUnavailable, match="because"):
        await made.execute("t", call("note", text="x"))
    scripted.steps = ["drop"] * 20
    with pytest.raises(OutcomeUnknown, match="may have run"):
        await made.execute("t", call("note", text="x"))
    assert len(scripted.seen) == 2 * remote_module.MAX_ATTEMPTS
    assert pauses == 2 * [*range(remote_module.MAX_ATTEMPTS - 1)]  # nobody waits after the last attempt


async def test_each_execution_has_an_id(made, scripted):
    one = ToolCall(name="note", arguments={"text": "a"}, id="call_0")
    other = ToolCall(name="note", arguments={"text": "b"}, id="call_0")
    await made.execute("t", one)
    await made.execute("t", other)
    assert len({seen["call_id"] for seen in scripted.seen}) == 2


async def test_each_life_has_its_name(made, scripted):
    await made.execute("t", call("note", text="a"))
    await made.execute("t", call("note", text="b"))
    await made.execute("u", call("note", text="c"))
    await made.release_trajectory("t")
    await made.execute("t", call("note", text="d"))
    first, again, other, second = (seen["life"] for seen in scripted.seen)
    assert first == again
    assert len({first, other, second}) == 3
    assert scripted.ended == [f"/trajectories/t?life={first}"]


async def test_namesake_has_its_own_life(made, scripted, pool):
    pool.release_s = 0.2
    await made.execute("t", call("terminal", command="true"))
    await made.execute("t", call("note", text="a"))
    await made.release_trajectory("t", reset_workspace=False)
    await made.execute("t", call("note", text="b"))
    assert scripted.ended == [], "the slot of the first is still being released"
    await made.close()
    first, second = (seen["life"] for seen in scripted.seen)
    assert first != second
    assert {*scripted.ended} == {f"/trajectories/t?life={first}", f"/trajectories/t?life={second}"}


async def test_late_call_begins_nothing(pool, served, monkeypatch):
    """It is sent, its trajectory is released, and only then does it arrive."""
    held = []

    class Slow(transport.Connections):
        async def send(self, method, path, body, timeout_s):
            if method == "POST" and b"late" in body:
                held.append(asyncio.create_task(self.arrive(method, path, body, timeout_s)))
                await asyncio.sleep(3600)
            return await super().send(method, path, body, timeout_s)

        async def arrive(self, *request):
            await released.wait()
            return await super().send(*request)

    monkeypatch.setattr(remote_module, "Connections", Slow)
    released = asyncio.Event()
    async with executor(pool, served, token="right") as made:
        await made.execute("t", call("note", text="early"))
        late = asyncio.create_task(made.execute("t", call("note", text="late")))
        async with asyncio.timeout(20):
            while not held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await made.release_trajectory("t")
        with pytest.raises(LeaseExpired):
            await late
        released.set()
        assert (await held[0]).status == 410
        assert runs == ["early"]
