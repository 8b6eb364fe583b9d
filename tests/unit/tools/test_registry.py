"""Registry, toolsets, one's own tools, distributions."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from atropos.errors import ConfigError
from atropos.tools import (
    Distribution,
    Tool,
    ToolCall,
    ToolExecutor,
    ToolRegistry,
    build_tool_registry,
    get_distribution,
    register_distribution,
    tool,
)
from atropos.tools import registry as registry_module
from atropos.tools.parsers import get_parser

DEFAULT = ["terminal", "process", "read_file", "write_file", "patch", "search_files"]


@tool(toolsets=("text",))
async def count_words(slot, path: str, least: Annotated[int, Field(ge=0, description="shortest word")] = 0) -> str:
    """Count the words
    of a file.

    More for people.
    """
    result = await slot.run(__import__("atropos.wire").wire.ReadFile(path=path))
    return str(sum(len(word) >= least for word in result.data.split()))


class Pair(BaseModel):
    left: int
    right: int


@tool(toolsets=("maths",), read_only=True)
async def add(arguments: Pair) -> dict:
    """Add two numbers."""
    return {"sum": arguments.left + arguments.right}


class Shout(Tool):
    """A tool as a class."""

    name = "shout"
    description = "Say it loudly."
    arguments = Pair
    toolsets = ("text",)

    async def run(self, arguments, scope):
        return f"{scope.trajectory_id}: {arguments.left}!"


@tool(sandboxed=False, toolsets=("mine",))
async def weather(city: str, unit: Literal["c", "f"] = "c") -> str:
    """The weather."""
    return f"fine in {city}, {unit}"


@tool()
async def adjust(level: Literal[1, 2, 3], quiet: Literal[True] | None = None, unit: Literal["1", "2"] = "1") -> str:
    """Adjust it."""
    return f"{level} {quiet} {unit}"


def test_numbers_named_as_text():
    written = "<tool_call>adjust\n" + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in {"level": "2", "quiet": "true", "unit": "2"}.items()
    )
    [asked] = get_parser("glm45").parse(f"{written}</tool_call>").calls
    assert ToolRegistry([adjust]).check(asked).arguments.model_dump() == {"level": 2, "quiet": True, "unit": "2"}


class Node(BaseModel):
    """Holds others of its kind."""

    name: str
    left: Node | None = None
    right: Node | None = None


@tool()
async def plant(tree: Node) -> str:
    """Plant it."""
    return tree.model_dump_json()


def test_recursive_models_are_read():
    assert plant.schema.parameters == {
        "type": "object",
        "properties": {"name": {"type": "string"}, "left": {}, "right": {}},
        "required": ["name"],
    }
    deep = {"name": "a", "left": {"name": "b", "right": {"name": "c"}}}
    asked = ToolRegistry([plant]).check(ToolCall(name="plant", arguments=deep))
    assert asked.arguments.model_dump(exclude_none=True) == deep


def test_default_is_what_every_slot_can_do():
    for enabled in (None, [], ["default"]):
        assert build_tool_registry(enabled).names == DEFAULT


@pytest.mark.parametrize(
    ("enabled", "disabled", "names"),
    [
        (["terminal"], None, ["terminal", "process"]),
        (["process"], None, ["process"]),
        (["file"], None, ["read_file", "write_file", "patch", "search_files"]),
        (["default"], ["terminal"], ["read_file", "write_file", "patch", "search_files"]),
        (["all"], ["file"], ["terminal", "process", "session"]),
        (["session", "process"], [], ["process", "session"]),
    ],
)
def test_toolsets(enabled, disabled, names):
    assert build_tool_registry(enabled, disabled).names == names


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((["defualt"],), "enabled_toolsets: unknown toolset 'defualt'; known: all, browser, default"),
        ((None, ["nope"]), "disabled_toolsets: unknown toolset 'nope'"),
        (("default",), "write a list"),
        ((["web"],), "set tool_server_url"),
        ((["process"], ["process"]), "leaves no tool"),
    ],
)
def test_wrong_toolsets_are_refused_by_name(arguments, wanted):
    with pytest.raises(ConfigError, match=wanted.split(";", maxsplit=1)[0]):
        build_tool_registry(*arguments)


def test_external_need_a_server():
    names = build_tool_registry(["default", "web", "browser"], None, "http://localhost:1").names
    assert {"web_search", "web_extract", "browser_navigate", "browser_click", "browser_type"} <= set(names)
    assert "web_search" not in build_tool_registry(["default"], None, "inprocess").names


def test_schemas_are_openais():
    for schema in build_tool_registry(["all"], None, "inprocess").schemas():
        assert schema["type"] == "function"
        function = schema["function"]
        assert function["parameters"]["type"] == "object"
        assert "title" not in function["parameters"]
        assert "$ref" not in str(schema)
        assert len(function["description"]) > 10
        for name, field in function["parameters"]["properties"].items():
            assert "type" in field or "enum" in field or "anyOf" in field, name
            assert {"type": "null"} not in field.get("anyOf", [])
    terminal = build_tool_registry().get("terminal").schema.parameters
    assert terminal["required"] == ["command"]
    assert terminal["additionalProperties"] is False


async def test_ones_own_in_ten_lines(pool):
    tools = build_tool_registry(["default"], tools=[count_words, add, Shout()])
    async with ToolExecutor(pool, tools) as executor:

        async def use(name, **arguments):
            return await executor.execute("t", ToolCall(name=name, arguments=arguments))

        await use("write_file", path="f", content="a bb ccc")
        assert (await use("count_words", path="f")).output == "3"
        assert (await use("count_words", path="f", least="2")).output == "2"
        assert "greater than or equal to 0" in (await use("count_words", path="f", least=-1)).error
        assert (await use("add", left=1, right=2)).data == {"sum": 3}
        assert (await use("shout", left=1, right=2)).output == "t: 1!"
    assert count_words.description == "Count the words of a file."
    assert count_words.schema.parameters["properties"]["least"]["default"] == 0


def test_own_replace_built_in():
    tools = build_tool_registry(["text"], tools=[count_words, add])
    assert tools.names == ["count_words", "add"]
    assert build_tool_registry(["default"], ["maths"], tools=[add]).names == DEFAULT

    async def mine(command: str) -> str:
        """Mine."""
        return command

    with pytest.raises(ConfigError, match=r"'terminal' has a built-in tool's name.*replaces_built_in=True"):
        build_tool_registry(tools=[tool("terminal")(mine)])
    meant = tool("terminal", replaces_built_in=True)(mine)
    assert build_tool_registry(tools=[meant]).get("terminal") is meant


def test_entry_points_offer_tools(monkeypatch):
    points = [
        EntryPoint("one", f"{__name__}:count_words", registry_module.ENTRY_POINTS),
        EntryPoint("more", f"{__name__}:offered", registry_module.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry_module, "entry_points", lambda group: points)
    assert build_tool_registry().names == DEFAULT
    assert build_tool_registry(["text", "maths"]).names == ["count_words", "add", "shout"]
    for broken in ("no.such.module:x", *(f"{__name__}:{name}" for name in ("DEFAULT", "bare", "bare_coroutine"))):
        points[:] = [EntryPoint("broken", broken, registry_module.ENTRY_POINTS)]
        with pytest.raises(ConfigError, match="'broken'"):
            build_tool_registry()


def offered():
    return [add, Shout]


@pytest.mark.parametrize("given", [lambda: [bare], lambda: [Pair], lambda: ["count_words"]])
def test_what_is_no_tool_is_refused_by_name(given):
    with pytest.raises(ConfigError, match="tools: expected a Tool \\(@tool makes one of a function\\)"):
        build_tool_registry(tools=given())


def bare(path: str) -> str:
    """Without `@tool`."""
    return path


async def bare_coroutine() -> str:
    """The same, without parameters."""
    return ""


def test_installed_offers_tools(tmp_path):
    """As a new user writes one: ten lines and an entry point, found by another process."""
    (tmp_path / "mine.py").write_text(
        "from atropos.tools import tool\n\n"
        "@tool(toolsets=('mine',))\n"
        "async def count(slot, path: str) -> str:\n"
        '    """Count the words of a file."""\n'
        "    return str(len((await slot.read_file(path)).split()))\n\n"
        "@tool(sandboxed=False, toolsets=('mine',), read_only=True)\n"
        "async def price(item: str) -> str:\n"
        '    """What an item costs."""\n'
        "    return f'{item}: 3'\n"
    )
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[atropos.tools]\ncount = mine:count\nprice = mine:price\n")
    script = (
        "import asyncio\n"
        "from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, build_tool_registry\n"
        "from tests.unit.tools.fakes import FakePool\n"
        "async def main():\n"
        "    assert build_tool_registry(['mine']).names == ['count']\n"
        "    tools = build_tool_registry(['mine'], None, 'inprocess')\n"
        "    async with ToolExecutor(FakePool(), tools, ToolExecutorConfig(tool_server_url='inprocess')) as executor:\n"
        "        result = await executor.execute('t', ToolCall(name='price', arguments={'item': 'tea'}))\n"
        "    print(tools.names, result.output)\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "['count', 'price'] tea: 3\n", done.stderr


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: tool("bad name")(weather.function), "letters, digits"),
        (lambda: tool()(lambda: None), "async def"),
        (lambda: tool(description="d")(_untyped), "needs a type"),
        (lambda: tool()(_undescribed), "docstring"),
        (lambda: tool(description="d")(_star), "must be named"),
        (lambda: tool(description="d")(_hidden), "'_a' can be no argument"),
        (lambda: tool(description="d")(_reserved), "'model_config' can be no argument"),
        (lambda: ToolRegistry([count_words, tool("count_words")(weather.function)]), "another tool has that name"),
    ],
)
def test_no_tool_is_refused(make, wanted):
    with pytest.raises(ConfigError, match=wanted):
        make()


async def _untyped(a):
    pass


async def _undescribed(a: int):
    pass


async def _star(*a: int):
    pass


async def _hidden(_a: int):
    pass


async def _reserved(model_config: int):
    pass


def test_own_external_need_server():
    with pytest.raises(ConfigError, match="'weather' is external"):
        build_tool_registry(tools=[weather])
    assert build_tool_registry(None, None, "inprocess", tools=[weather]).external == [weather]


def test_draws_are_of_toolsets():
    distribution = Distribution("test", {"terminal": 1.0, "file": 0.5, "web": 0.0})
    assert distribution.sample(7) == distribution.sample(7)
    generator = random.Random(1)
    draws = [distribution.sample(generator) for _ in range(2000)]
    assert all("terminal" in draw and "web" not in draw for draw in draws)
    assert 900 < sum("file" in draw for draw in draws) < 1100
    rare = Distribution("rare", {"terminal": 1e-9, "file": 1e-8})
    assert rare.sample(1) == ["file"]


@pytest.mark.parametrize("probabilities", [{}, {"a": 1.5}, {"a": -0.1}, {"a": 0.0}])
def test_wrong_draw_is_refused(probabilities):
    with pytest.raises(ConfigError, match="'wrong'"):
        Distribution("wrong", probabilities)


def test_distributions_by_name():
    assert get_distribution("default").sample(0) == ["terminal", "file"]
    register_distribution(Distribution("mine-for-the-test", {"terminal": 1.0}))
    assert get_distribution("mine-for-the-test").sample(0) == ["terminal"]
    with pytest.raises(ConfigError, match="other probabilities"):
        register_distribution(Distribution("mine-for-the-test", {"terminal": 0.5}))
    with pytest.raises(ConfigError, match="development"):
        get_distribution("nope")


def test_distributions_name_them():
    from atropos.tools.toolsets import DISTRIBUTIONS, TOOLSETS

    for one in DISTRIBUTIONS.values():
        assert set(one.probabilities) <= set(TOOLSETS)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, "name: Field required"), ({"name": 3}, r"name: input should be a valid string \(got 3\)")],
)
def test_a_wrong_call_is_a_config_error(fields: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        ToolCall(**fields)
