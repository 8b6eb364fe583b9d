"""What backends of deepagents do, on slots; run by tests/adapters/test_agent_kits.py with that package."""

from __future__ import annotations

import entrypoint_images
import pytest
from accident import kill_container
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from atropos.adapters.deepagents import AtroposBackend
from atropos.adapters.sharing import SandboxGoneError

POOL = {"backend": "local", "slots_per_container": 3, "max_containers": 1}


@pytest.fixture(scope="module")
def busybox(tmp_path_factory):
    """A backend on an image with neither Python nor coreutils."""
    with AtroposBackend(pool=POOL, image=entrypoint_images.image(tmp_path_factory.mktemp("image"))) as backend:
        yield backend


@pytest.fixture
def backend(busybox):
    busybox.execute("mkdir -p /w/src/deep /w/.github")
    for path, text in {"/w/a.py": "one\ntwo\n", "/w/src/deep/b.py": "two\n", "/w/.github/c.yml": "x"}.items():
        assert busybox.write(path, text).error is None
    yield busybox
    busybox.delete("/w")


def test_commands(backend):
    assert backend.id
    done = backend.execute("echo out; echo no >&2; exit 3")
    assert (done.output, done.exit_code, done.truncated) == ("out\nno\n", 3, False)
    late = backend.execute("echo begun; sleep 60", timeout=1)
    assert (late.exit_code, late.output.splitlines()[0]) == (124, "begun")


async def test_a_folder_is_listed(backend):
    for found in (backend.ls("/w"), await backend.als("/w")):
        assert found.entries == [
            {"path": "/w/.github", "is_dir": True},
            {"path": "/w/a.py", "is_dir": False},
            {"path": "/w/src", "is_dir": True},
        ]
    assert "No such file" in backend.ls("/nothing").error


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["/w/a.py", "/w/src/deep/b.py"]),
        ("/*.py", ["/w/a.py"]),
        ("src/**/*.py", ["/w/src/deep/b.py"]),
        ("**/*.{py,yml}", ["/w/a.py", "/w/src/deep/b.py"]),
        ("*.yml", ["/w/.github/c.yml"]),
        ("src/**", ["/w/src/deep/b.py"]),
        ("*.txt", []),
    ],
)
def test_files_are_found_as_by_its_own(backend, pattern, found):
    assert [one["path"] for one in backend.glob(pattern, "/w").matches] == found


def test_a_pattern_that_leads_out_is_refused(backend):
    assert "traversal" in backend.glob("../*.py", "/w").error


async def test_lines_are_found_literally(backend):
    assert backend.write("/w/dots", "a.b\naxb\n").error is None
    found = backend.grep("a.b", "/w")
    assert found.matches == [{"path": "/w/dots", "line": 1, "text": "a.b"}]
    assert [one["path"] for one in (await backend.agrep("two", "/w", "src/**/*.py")).matches] == ["/w/src/deep/b.py"]
    some = backend.grep("two", "/w", max_count=1)
    assert (len(some.matches), some.truncated) == (1, True)


async def test_a_page_of_a_file(backend):
    page = await backend.aread("/w/a.py", offset=1, limit=1)
    assert (page.file_data["content"], page.start_line, page.total_lines) == ("two\n", 2, 2)
    assert "file_not_found" in backend.read("/w/nothing").error
    assert backend.upload_files([("/w/binary", b"\xff\0")])[0].error is None
    assert backend.read("/w/binary").file_data["encoding"] == "base64"


def test_replacing_keeps_line_ends(backend):
    backend.write("/w/crlf", "one\r\ntwo\r\n")
    assert backend.edit("/w/crlf", "one\ntwo", "1\n2").occurrences == 1
    assert backend.download_files(["/w/crlf"])[0].content == b"1\r\n2\r\n"
    assert backend.edit("/w/crlf", "1", "0\n1").occurrences == 1
    assert backend.download_files(["/w/crlf"])[0].content == b"0\r\n1\r\n2\r\n"
    assert backend.edit("/w/crlf", "0\r\n1", "0\n1").occurrences == 1  # whoever writes a CRLF changes line ends
    assert backend.download_files(["/w/crlf"])[0].content == b"0\n1\r\n2\r\n"
    assert "not found" in backend.edit("/w/crlf", "three", "3").error
    assert backend.edit("/w/nothing", "a", "b").error


def test_unmovable_files_have_its_codes(backend):
    errors = [one.error for one in backend.download_files(["/w/nothing", "/w/src", "/w/a.py/x"])]
    assert errors == ["file_not_found", "is_directory", "invalid_path"]
    assert backend.upload_files([("/w/src", b"x")])[0].error == "is_directory"
    assert "not found" in backend.delete("/w/nothing").error


class Model(GenericFakeChatModel):
    def bind_tools(self, tools, **kwargs):
        return self


def call(name, **arguments):
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name}])


async def test_an_agent_works_in_a_slot(busybox):
    turns = [call("write_file", file_path="/srv/said.txt", content="42"), call("execute", command="cat /srv/said.txt")]
    agent = create_deep_agent(model=Model(messages=iter([*turns, AIMessage("done")])), backend=busybox)
    result = await agent.ainvoke({"messages": [("user", "go")]})
    assert result["messages"][-1].content == "done"
    assert result["messages"][-2].content.startswith("42")


def test_a_killed_container_is_an_error():
    with AtroposBackend(pool={**POOL, "slots_per_container": 1}) as backend:
        backend.execute("true")
        kill_container()
        agent = create_deep_agent(
            model=Model(messages=iter([call("execute", command="sleep 30"), AIMessage("I give up")])), backend=backend
        )
        with pytest.raises(SandboxGoneError):
            agent.invoke({"messages": [("user", "go")]})
    with pytest.raises(SandboxGoneError, match="given back"):
        backend.execute("true")
