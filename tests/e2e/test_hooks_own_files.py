"""What a verifying hook writes is what it runs: in both envs, whatever the agent left in its place or beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import pytest_asyncio

from atropos.envs import AgentEnvConfig, ToolContext
from atropos.envs.running import verification
from atropos.envs.running.hooks import ExecTool
from atropos.envs.running.rollout import TaskFault, VerifierError
from atropos.tasks.verifier.surroundings import FOLDERS
from atropos.tools import ToolCall
from tests.e2e.test_example_verifiers import executor
from tests.files import write_files

__all__ = ["executor"]
pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPILED = """
import os, py_compile
os.makedirs("tests", exist_ok=True)
for path in ("hidden.py", "tests/hidden.py"):
    open(path, "w").write("print('agent')")
    py_compile.compile(path, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    os.remove(path)
"""
"""Bytecode that Python runs without a look at the source."""


class Agent:
    """`exec_tool` of `AgentEnv` under the names of `ctx`."""

    def __init__(self, executor, trajectory, **options):
        self.calls = self._exec = ExecTool(
            executor, trajectory, lambda call: executor.execute(trajectory, call), **options
        )

    async def write_file(self, path, content, **check):
        call = ToolCall(name="write_file", arguments={"path": path, "content": content})
        return (await self._exec(call, **check)).for_model()

    async def terminal(self, command):
        return (await self._exec(ToolCall(name="terminal", arguments={"command": command}))).for_model()


class Hermes(ToolContext):
    @property
    def calls(self):
        return self


@pytest_asyncio.fixture(loop_scope="module", params=[Agent, Hermes], ids=["AgentEnv", "HermesAgentBaseEnv"])
async def left(request, executor):
    """Gives a verifying hook's access to a workspace that an agent left after these commands."""
    taken = []

    async def make(*commands):
        trajectory = f"{request.node.name}-{len(taken)}"
        taken.append(trajectory)
        slot = await executor.slot(trajectory)
        for command in commands:
            done = await slot.exec(command)
            assert done.exit_code == 0, done.output
        await executor.view(trajectory, ["/workspace"])
        return request.param(executor, trajectory)

    yield make
    for trajectory in taken:
        await executor.release_trajectory(trajectory)


@pytest.mark.parametrize("path", ["hidden.py", "tests/hidden.py"])
async def test_a_failed_write_is_a_fault(left, path):
    hook = await left(f"mkdir -p {path}; echo 'print(42)' > {path}/__main__.py")
    with pytest.raises(VerifierError, match="write_file"):
        await hook.write_file(path, "raise SystemExit(1)")
    assert isinstance(await hook.calls.settled(), VerifierError)
    quiet = await left(f"mkdir -p {path}")
    assert "error" in await quiet.write_file(path, "...", check=False)
    assert await quiet.calls.settled() is None


async def test_failed_uploads_are_faults(executor, tmp_path):
    (tmp_path / "hidden.py").write_text("...")
    slot = await executor.slot("reward")
    await slot.exec("mkdir hidden.py; echo kept > kept")
    try:
        for call in (
            lambda ctx: ctx.upload(tmp_path / "hidden.py", "hidden.py"),
            lambda ctx: ctx.call_tool("write_file", {"path": "hidden.py", "content": "..."}),
            lambda ctx: ctx.call_tool("patch", {"path": "kept", "old_text": "absent", "new_text": "x"}),
        ):
            ctx = ToolContext(executor, "reward")
            with pytest.raises(VerifierError):
                await call(ctx)
            assert ctx.failure is not None
        with pytest.raises(TaskFault, match="upload"):
            await ToolContext(executor, "reward", setup=True).upload(tmp_path / "hidden.py", "hidden.py")
        assert "error" in await ToolContext(executor, "reward").read_file("hidden.py"), (
            "what is read may be the agent's"
        )
    finally:
        await executor.release_trajectory("reward")


@pytest.mark.parametrize("path", ["hidden.py", "tests/hidden.py"])
async def test_planted_bytecode_is_idle(left, path):
    folder, _, _ = path.rpartition("/")
    imports = f"cd ./{folder} && python3 -c 'import hidden'"
    hook = await left(f"python3 -c '{COMPILED.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'")
    await hook.write_file(path, "print('hook')")
    assert (await hook.terminal(imports))["output"].strip() == "hook"
    hook = await left("for d in . tests; do mkdir -p $d/hidden; echo 'print(42)' > $d/hidden/__init__.py; done")
    with pytest.raises(VerifierError, match="would not be what runs"):
        await hook.write_file(path, "print('hook')")


@pytest.mark.parametrize("path", ["hidden", "/workspace/tests/../hidden"])
async def test_a_link_leads_no_write_elsewhere(left, executor, path):
    hook = await left("echo agent > answer; mkdir tests; ln -s answer hidden")
    slot = await executor.slot(hook.calls.trajectory_id)
    slot.profile = replace(slot.profile, env={**slot.profile.env, FOLDERS: "/workspace"})
    await hook.write_file(path, "hook\n")
    assert (await hook.terminal("cat answer hidden"))["output"].split() == ["agent", "hook"]


@pytest.mark.parametrize("name", ["Makefile", "makefile"])
async def test_planted_rules_are_idle(left, name):
    hook = await left("printf 'all:\\n\\techo agent\\n' | tee GNUmakefile > makefile")
    await hook.write_file(name, "all:\n\techo hook\n")
    assert (await hook.terminal("make -s"))["output"].strip() == "hook"


async def test_what_one_wrote_stays(left):
    hook = await left("echo '$(error agent)' > makefile")
    for name in ("GNUmakefile", "Makefile"):
        await hook.write_file(name, f"all:\n\techo {name}\n")
    assert (await hook.terminal("make -s"))["output"].strip() == "GNUmakefile"


async def test_a_young_server_is_awaited(executor):
    slot = await executor.slot("young")
    try:
        await slot.exec("(sleep 2; exec python3 -m http.server 8123) >/dev/null 2>&1 &")
        texts = await verification.begin(executor, "young", AgentEnvConfig(tokenizer_name="none"), "Serve on 8123.")
        asked = "import urllib.request as u; u.urlopen('http://localhost:8123/').read()"
        assert (await Hermes(executor, "young", texts=texts).terminal(f'python3 -c "{asked}"'))["exit_code"] == 0
    finally:
        await executor.release_trajectory("young")


@pytest.mark.parametrize("kind", [Agent, Hermes])
async def test_its_own_links_are_followed(executor, kind):
    slot = await executor.slot("links")
    try:
        await slot.exec("echo agent > answer; ln -s answer seen")
        texts = await verification.begin(executor, "links", AgentEnvConfig(tokenizer_name="none"), "Write answer.")
        hook = kind(executor, "links", texts=texts)
        await hook.terminal("mkdir t; ln -s ../answer t/expected")
        await hook.terminal("echo hook > t/expected")
        assert (await hook.terminal("cat answer"))["output"] == "hook\n"
    finally:
        await executor.release_trajectory("links")


async def test_an_upload_leaves_its_own(executor, tmp_path):
    files = {name: f"all:\n\techo {name}\n" for name in ("GNUmakefile", "Makefile", "a/makefile", "a/Makefile")}
    write_files(tmp_path, {**files, "m.py": "", "m.abi3.so": "own", "p.py": "", "p/__init__.py": "print('package')"})
    slot = await executor.slot("uploads")
    try:
        await slot.exec("mkdir a; echo '$(error agent)' | tee makefile > a/GNUmakefile")
        await ToolContext(executor, "uploads").upload(tmp_path, ".")
        done = await slot.exec("make -s; make -s -C a; cat m.abi3.so; python3 -c 'import p'")
        assert done.output.split() == ["GNUmakefile", "a/makefile", "ownpackage"]
    finally:
        await executor.release_trajectory("uploads")


async def test_uploaded_modules_run(executor, tmp_path):
    (tmp_path / "suite/tests").mkdir(parents=True)
    (tmp_path / "suite/Makefile").write_text("all:\n\techo hook\n")
    for name in ("hidden.py", "tests/hidden.py"):
        (tmp_path / "suite" / name).write_text("print('hook')")
    slot = await executor.slot("uploads")
    try:
        assert (await slot.exec(["python3", "-c", COMPILED])).exit_code == 0
        await slot.exec("printf 'all:\\n\\techo agent\\n' > GNUmakefile")
        ctx = ToolContext(executor, "uploads")
        await ctx.upload(tmp_path / "suite", ".")
        for folder in (".", "tests"):
            assert (await slot.exec(f"cd {folder}; python3 -c 'import hidden'")).output == "hook\n"
        assert (await slot.exec("make -s")).output == "hook\n"
    finally:
        await executor.release_trajectory("uploads")
