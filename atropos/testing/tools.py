"""The sandboxed tools in real slots, through the executor alone. On every backend."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from atropos.errors import LeaseExpired
from atropos.slots import SlotPool
from atropos.slots.slot.profile import Profile, UserAccount
from atropos.testing.waiting import SLOWNESS, until
from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, ToolLimits, ToolResult, build_tool_registry

pytestmark = pytest.mark.asyncio(loop_scope="module")


Use = Callable[..., Awaitable[ToolResult]]


@pytest_asyncio.fixture(name="executor", scope="module", loop_scope="module")
async def executor_fixture(pool: SlotPool) -> AsyncIterator[ToolExecutor]:
    """An executor with the file, terminal and session tools."""
    async with ToolExecutor(pool, build_tool_registry(["default", "session"]), ToolExecutorConfig()) as executor:
        yield executor


@pytest_asyncio.fixture(name="use", loop_scope="module")
async def use_fixture(executor: ToolExecutor) -> AsyncIterator[Use]:
    """`await use("terminal", command="ls")`, in the trajectory `t` if no other is named."""

    async def call(name: str, trajectory: str = "t", **arguments: object) -> ToolResult:
        async with asyncio.timeout(60 * SLOWNESS):
            return await executor.execute(trajectory, ToolCall(name=name, arguments=arguments))

    yield call
    await executor.release_trajectory("t")


async def require(use: Use, *programs: str) -> None:
    """Skip the test if the slots of this backend lack a program."""
    for program in programs:
        if not (await use("terminal", command=f"command -v {program}")).success:
            pytest.skip(f"the slots of this backend have no {program}")


async def until_shown(use: Use, wanted: str, **arguments: object) -> ToolResult:
    """Repeat a call until its output holds `wanted`."""
    async with asyncio.timeout(30 * SLOWNESS):
        while wanted not in (result := await use(**arguments)).output:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return result


async def until_matched(use: Use, pattern: str, **arguments: object) -> ToolResult:
    """Wait until the screen of a terminal session matches a pattern."""
    result = await use("session", action="wait", pattern=pattern, timeout=30, **arguments)
    assert result.success, result
    return result


def session_id(result: ToolResult) -> str:
    """The id of the background process or terminal session that a call started."""
    assert result.data is not None, result
    session = result.data["session_id"]
    assert isinstance(session, str), session
    return session


def error(result: ToolResult) -> str:
    """Why a call failed."""
    assert result.error is not None, result
    return result.error


class TestTerminal:
    """Commands in the foreground."""

    async def test_output_exit_code_and_state_on_disk(self, use: Use) -> None:
        result = await use("terminal", command="echo out; echo err >&2; exit 4")
        assert (result.success, result.output, result.exit_code) == (False, "out\nerr\n", 4)
        await use("terminal", command="mkdir -p d && echo kept > d/f")
        assert (await use("terminal", command="cat f", workdir="d")).output == "kept\n"
        missing = await use("terminal", command="true", workdir="/no/such")
        assert not missing.success
        assert missing.error

    async def test_an_endless_command_is_ended(self, use: Use) -> None:
        result = await use("terminal", command="echo begun; sleep 600", timeout=3 * SLOWNESS**0.5)
        assert (result.timed_out, result.output) == (True, "begun\n")
        assert (await use("terminal", command="pgrep -c sleep || true")).output.strip() in {"0", ""}

    async def test_long_output_is_head_and_tail(self, use: Use) -> None:
        result = await use(
            "terminal", command="echo first; head -c 100000000 /dev/zero | tr '\\0' 'x'; echo; echo last"
        )
        assert result.success
        assert result.truncated
        assert result.dropped_bytes > 99_000_000
        assert result.output.startswith("first\nx")
        assert result.output.endswith("last\n")
        assert len(result.output) < 60_000

    async def test_binary_output_is_readable(self, use: Use) -> None:
        result = await use("terminal", command="printf '\\xff\\x00\\xfe ok'; head -c 3000 /dev/urandom")
        assert result.success
        json.loads(result.to_json())
        result.to_xml().encode()

    async def test_a_megabyte_of_arguments(self, use: Use) -> None:
        text = "é" * 400_000 + "\n" + "x" * 200_000
        assert (await use("write_file", path="big", content=text)).success
        result = await use(
            "terminal", command=f"cat > copy <<'END'\n{text}\nEND\ncmp big <(head -c -1 copy) && echo same"
        )
        assert result.output == "same\n"

    async def test_a_limit_that_ends_a_program_is_named(self, use: Use) -> None:
        result = await use("terminal", command="head -c 300000000 /dev/zero > big; echo end")
        assert "No space" in result.output or result.limit is not None


class TestProcesses:
    """Commands in the background."""

    async def test_a_server_in_the_background_is_asked(self, use: Use) -> None:
        await require(use, "curl", "python3")
        await use("write_file", path="site/index.html", content="hello from the slot")
        started = await use(
            "terminal", command="exec python3 -u -m http.server 8000 --bind 127.0.0.1", workdir="site", background=True
        )
        session = session_id(started)
        await until_shown(use, "hello", name="terminal", command="curl -sf http://127.0.0.1:8000/ || true")
        log = await until_shown(use, "GET /", name="process", action="log", session_id=session)
        assert "running" in log.output
        killed = await use("process", action="kill", session_id=session)
        assert killed.data == {**(killed.data or {}), "running": False}
        assert (await use("terminal", command="curl -sf http://127.0.0.1:8000/")).exit_code == 7

    async def test_a_question_is_answered_on_a_terminal(self, use: Use) -> None:
        await use("write_file", path="ask.sh", content='read -p "Continue? [y/n] " x; test -t 0 && echo "tty $x"\n')
        session = session_id(await use("terminal", command="bash ask.sh", background=True, pty=True))
        await until_shown(use, "[y/n]", name="process", action="log", session_id=session)
        await use("process", action="submit", session_id=session, data="y")
        ended = await use("process", action="wait", session_id=session, timeout=30)
        assert ended.exit_code == 0
        assert "tty y" in ended.output

    async def test_foreground_on_a_terminal(self, use: Use) -> None:
        result = await use("terminal", command="test -t 1 && printf '\\033[31mred\\033[0m\\n'; exit 3", pty=True)
        assert (result.output, result.exit_code) == ("red\n", 3)
        late = await use("terminal", command="echo begun; sleep 600", pty=True, timeout=3 * SLOWNESS**0.5)
        assert (late.output, late.timed_out, late.limit) == ("begun\n", True, "time")
        flood = await use("terminal", command="seq 100000", pty=True)
        assert flood.output.startswith("[488,895 bytes before this were dropped]\n")
        assert flood.output.endswith("\n100000\n")
        assert (flood.truncated, flood.limit) == (True, "output")

    async def test_pipes_close_exit_codes_stay(self, use: Use) -> None:
        session = session_id(await use("terminal", command="sort; exit 5", background=True))
        await use("process", action="write", session_id=session, data="b\na\n")
        await use("process", action="close", session_id=session)
        assert (await use("process", action="wait", session_id=session, timeout=30)).exit_code == 5
        again = await use("process", action="log", session_id=session)
        assert "exit code 5" in again.output
        assert "a\nb\n" in again.output

    async def test_several_sessions_at_once(self, use: Use) -> None:
        first = session_id(await use("terminal", command="seq 100000", background=True))
        second = session_id(await use("terminal", command="exec sleep 600", background=True))
        ended = await use("process", action="wait", session_id=first, timeout=30)
        assert ended.exit_code == 0
        log = await use("process", action="log", session_id=first, lines=1)
        assert "100000" in log.output
        assert log.dropped_bytes == 588_895 - 200_000
        listed = await use("process", action="list")
        assert f"{first}  exit code 0" in listed.output
        assert f"{second}  running" in listed.output

    async def test_progress_bars(self, use: Use) -> None:
        command = "for i in 1 2 3 4 5; do printf '\\rProgress %d0%%' $i; sleep 0.02; done; echo"
        session = session_id(await use("terminal", command=command, background=True, pty=True))
        ended = await use("process", action="wait", session_id=session, timeout=30)
        assert "Progress 50%" in ended.output

    async def test_others_sessions_are_unknown(self, use: Use, executor: ToolExecutor) -> None:
        session = session_id(await use("terminal", command="exec sleep 600", background=True))
        other = await use("process", trajectory="other", action="poll", session_id=session)
        assert f"no session '{session}'" in error(other)
        await executor.release_trajectory("other")

    async def test_processes_end_with_the_trajectory(self, use: Use, executor: ToolExecutor) -> None:
        await use("terminal", command="exec sleep 600", background=True)
        await executor.release_trajectory("t")
        assert (await use("process", action="list")).output == "no background processes"


class TestFiles:
    """Reading, writing, patching and searching."""

    async def test_write_read_patch_search(self, use: Use) -> None:
        assert (await use("write_file", path="src/a.py", content="def f():\n    return 1\n")).success
        assert (await use("read_file", path="src/a.py")).output == "     1|def f():\n     2|    return 1"
        assert (await use("patch", path="src/a.py", old="return 1", new="return 2")).success
        diff = (
            "--- a/src/a.py\n+++ b/src/a.py\n@@ -1,2 +1,2 @@\n def f():\n-    return 2\n+    return 3\n"
            "--- /dev/null\n+++ b/src/b.py\n@@ -0,0 +1 @@\n+from a import f\n"
        )
        assert (await use("patch", diff=diff)).success
        assert (
            await use("terminal", command="python3 -c 'from b import f; print(f())'", workdir="src")
        ).output == "3\n"
        assert (await use("search_files", pattern="return .")).output == "src/a.py:2:    return 3\n[1 match in 1 file]"

    async def test_unfit_patch_changes_nothing(self, use: Use) -> None:
        await use("write_file", path="a", content="a\n")
        await use("write_file", path="b", content="b\n")
        diff = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\n+A\n--- a/b\n+++ b/b\n@@ -1 +1 @@\n-x\n+X\n"
        assert "does not apply to b" in error(await use("patch", diff=diff))
        assert (await use("terminal", command="cat a b")).output == "a\nb\n"

    async def test_failed_patch_is_undone(self, use: Use) -> None:
        await use("terminal", command="echo one > a; chmod 755 a; echo two > b; mkdir d")
        diff = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-one\n+ONE\n--- /dev/null\n+++ b/b/c\n@@ -0,0 +1 @@\n+x\n"
        assert not (await use("patch", diff=diff)).success
        assert (await use("terminal", command="cat a b; stat -c %a a")).output == "one\ntwo\n755\n"
        assert (await use("patch", path="a", old="one", new="uno")).success
        assert (await use("terminal", command="cat a; stat -c %a a")).output == "uno\n755\n"

    async def test_names_of_every_kind(self, use: Use) -> None:
        for name in ("with space", "-dash", "quo'te\"s", "näme😀", "new\nline", "a/../b"):
            assert (await use("write_file", path=name, content="x\n")).success, name
            assert (await use("read_file", path=name)).output == "     1|x", name
            assert (await use("patch", path=name, old="x", new="y")).success, name

    async def test_tilde_is_the_commands_home(self, use: Use) -> None:
        assert (await use("write_file", path="~/notes.txt", content="kept at home")).success
        assert (await use("terminal", command="cat notes.txt", workdir="~")).output == "kept at home"
        assert (await use("read_file", path="~/notes.txt")).output.endswith("kept at home")
        result = await use("search_files", path="~", pattern="kept at", glob="notes.*")
        assert result.output.split(":")[0].endswith("/notes.txt"), result.output
        deleted = await use("patch", diff="--- ~/notes.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-kept at home\n")
        assert deleted.success, deleted.error
        assert not (await use("read_file", path="~/notes.txt")).success

    async def test_a_patch_deletes_as_root_as_it_writes(self, use: Use, executor: ToolExecutor) -> None:
        slot = await executor.slot("t")
        if (await slot.exec(["true"], user="nobody")).error is not None:
            pytest.skip("the slots of this backend have one user")
        await use("write_file", path="old", content="x\n")
        slot.profile = Profile(user=UserAccount("nobody", 65534, 65534, "/"))
        make, lost = "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+y\n", "--- /dev/null\n+++ b/old/z\n@@ -0,0 +1 @@\n+z\n"
        assert "nothing was changed" in error(await use("patch", diff=f"{make}{lost}"))
        assert (await use("terminal", command="id -un; ls")).output == "nobody\nold\n"
        deleted = await use("patch", diff=f"{make}--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n")
        assert deleted.success, deleted.error
        assert (await use("terminal", command="ls")).output == "new\n"

    async def test_special_files_and_links_are_told(self, use: Use) -> None:
        await use("terminal", command="mkfifo pipe; ln -s /etc/passwd link; ln -s loop loop")
        assert not (await use("read_file", path="pipe")).success
        assert not (await use("read_file", path="loop")).success
        assert (await use("read_file", path="link", limit=1)).success
        assert not (await use("read_file", path="/dev/zero")).success
        missing = await use("read_file", path="lnik")
        assert "no such file" in error(missing)

    @pytest.mark.parametrize("ripgrep", [True, False])
    async def test_search_leaves_out_what_git_ignores(self, use: Use, ripgrep: bool) -> None:
        await use("terminal", command="mkdir -p src build && git init -q . && echo build > .gitignore")
        await use("terminal", command="for f in src/a.py build/b.py c.txt; do echo 'a needle' > $f; done")
        if not ripgrep:
            await use("terminal", command="rm -f $(which -a rg)")
        result = await use("search_files", pattern="n[e]+dle")
        assert sorted(result.output.splitlines()[:2]) == ["c.txt:1:a needle", "src/a.py:1:a needle"]
        assert "[2 matches in 2 files]" in result.output
        for glob in ("*.py", "**/*.py", "src/**/*.py", "*.{c,py}", "{src,build}/*.{h,py}"):
            assert (await use("search_files", pattern="", glob=glob)).output == "src/a.py\n[1 file]", glob
        assert (await use("search_files", pattern="", glob="**/*.txt")).output == "c.txt\n[1 file]"
        assert (await use("search_files", pattern="needle", path="src", context=1)).output.startswith("src/a.py:1:")
        assert (await use("search_files", pattern="needle", path="/workspace/src")).output.startswith(
            "/workspace/src/a.py"
        )
        assert "pattern" in error(await use("search_files", pattern="("))

    @pytest.mark.parametrize("ripgrep", [True, False])
    async def test_patterns_match_line_by_line(self, use: Use, ripgrep: bool) -> None:
        await use("write_file", path="lines", content="import os\r\nclass É:\r\n\r\n    end\n")
        if not ripgrep:
            await use("terminal", command="rm -f $(which -a rg)")
        line_numbers = {
            "^class": 2,
            "S É:$": 2,
            "c.ass .:": 2,
            "^$": 3,
            r"^\s+\w": 4,
            r"(?<!.)\s*end\b": 4,
            r":\r$": 2,
            r"^\x0d": 3,
        }
        for pattern, number in line_numbers.items():
            result = await use("search_files", pattern=pattern, path="lines", ignore_case=True)
            assert result.output.startswith(f"lines:{number}:"), (pattern, result)

    async def test_a_search_says_what_it_left_out(self, use: Use) -> None:
        await use("terminal", command="rm -f $(which -a rg); yes | head -c 17000000 > long; echo needle >> long")
        ripgrep = (await use("terminal", command="which rg")).success  # in a /usr of the machine, which is read-only
        result = await use("search_files", pattern="needle", path="long")
        assert ("not all was searched" in result.output, result.truncated) == (not ripgrep, not ripgrep)


class TestSessions:
    """Programs that draw on a terminal."""

    async def test_a_python_prompt(self, use: Use) -> None:
        await require(use, "python3")
        await use("session", action="start", command="python3 -q")
        await until_matched(use, ">>>")
        await use("session", action="send", text="6 * 7", keys=["Enter"])
        await until_matched(use, "^42\n>>> ?$")
        await use("session", action="send", keys=["C-d"])
        ended = await until_shown(use, "ended with exit code 0", name="session", action="list")
        assert ended.success

    async def test_vim_edits_a_file(self, use: Use) -> None:
        await require(use, "vi")
        await use("write_file", path="f.txt", content="one\ntwo\n")
        shown = await use("session", action="start", command="vi f.txt", rows=20, cols=60)
        session = session_id(shown)
        await until_matched(use, "two")
        await use("session", action="send", keys=["G", "o", "three", "Escape", ":wq", "Enter"])
        await until_shown(use, "ended", name="session", action="screen", session_id=session)
        assert (await use("terminal", command="cat f.txt")).output == "one\ntwo\nthree\n"

    async def test_less_pages_and_searches(self, use: Use) -> None:
        await require(use, "less")
        await use("terminal", command="seq 1000 > n")
        await use("session", action="start", command="less n", rows=10)
        await until_matched(use, "^9$")
        await use("session", action="send", keys=["/^500$", "Enter"])
        await until_matched(use, "^500$")
        await use("session", action="send", keys=["q"])

    async def test_top_shows_the_slots_processes(self, use: Use) -> None:
        await require(use, "top")
        await use("session", action="start", command="top -d 1")
        await until_matched(use, "COMMAND")
        await use("session", action="resize", rows=30, cols=100)
        assert "100x30" in (await use("session", action="screen")).output
        await use("session", action="send", keys=["q"])

    async def test_window_size_is_known(self, use: Use) -> None:
        await use("session", action="start", command="trap 'stty size' WINCH; stty size; while :; do sleep 0.05; done",
                  rows=17, cols=53)  # fmt: skip
        await until_matched(use, "^17 53$")
        await use("session", action="resize", rows=31, cols=97)
        await until_matched(use, "^31 97$")
        await use("session", action="close")

    async def test_installer_is_answered(self, use: Use) -> None:
        """As apt does it: a question, a bar that is drawn over itself on the last row, and a line at the end."""
        script = """
        read -p 'After this operation, 12 MB will be used. Do you want to continue? [Y/n] ' answer
        case $answer in n*|N*) echo Abort.; exit 1;; esac
        rows=$(stty size | cut -d' ' -f1)
        printf '\\0337\\033[0;%dr\\0338' $((rows - 1))
        for i in 10 55 100; do
          echo "Unpacking package-$i ..."
          printf '\\0337\\033[%d;0fProgress: [%3d%%] [####....]\\0338' $rows $i
          sleep 0.05
        done
        printf '\\0337\\033[0;%dr\\0338\\033[1A\\033[J' $rows
        echo 'Setting up done.'
        """
        await use("write_file", path="install.sh", content=script)
        await use("session", action="start", command="bash install.sh", rows=12)
        await until_matched(use, r"\[Y/n\]")
        await use("session", action="send", keys=["y", "Enter"])
        shown = await until_matched(use, "Setting up done")
        assert "Unpacking package-55" in shown.output
        assert "Progress" not in shown.output.splitlines()[-1]
        refused = await use("terminal", command="bash install.sh <<< n")
        assert (refused.exit_code, "Abort." in refused.output) == (1, True)
        assert (await use("terminal", command="yes | bash install.sh", pty=True)).success

    async def test_git_rebase_interactive(self, use: Use) -> None:
        await require(use, "vi")
        script = (
            "git init -q r && cd r && git config user.name n && git config user.email e@x && git config core.editor "
            "vi\nfor i in 1 2 3; do echo $i > f$i; git add .; git commit -qm commit$i; done"
        )
        assert (await use("terminal", command=script)).success
        await use("session", action="start", command="git rebase -i HEAD~2", workdir="r")
        await until_matched(use, "pick .*commit3")
        await use("session", action="send", keys=["j", "cw", "fixup", "Escape", ":wq", "Enter"])
        await until_shown(use, "ended", name="session", action="list")
        log = await use("terminal", command="git log --format=%s; ls", workdir="r")
        assert log.output == "commit2\ncommit1\nf1\nf2\nf3\n"

    async def test_keys_scrollback_and_recordings(self, use: Use, executor: ToolExecutor) -> None:
        one = session_id(await use("session", action="start", command="bash --norc", record=True))
        two = session_id(await use("session", action="start", command="cat"))
        unclear = await use("session", action="screen")
        assert one in error(unclear)
        assert two in error(unclear)
        await use("session", action="send", session_id=one, keys=["seq 100", "Enter"])
        await until_matched(use, "^100$", session_id=one)
        history = await use("session", action="history", session_id=one)
        assert "\n1\n2\n3\n" in history.output
        await use("session", action="send", session_id=two, text="héllo", keys=["Enter"])
        await until_matched(use, "héllo\nhéllo", session_id=two)
        missed = await use("session", action="wait", session_id=two, pattern="never", timeout=0.2)
        assert "did not show within 0.2 s" in error(missed)
        await use("session", action="close", session_id=two)
        cast = [json.loads(line) for line in executor.recordings("t")[one].splitlines()]
        assert (cast[0]["version"], cast[0]["width"], cast[0]["height"]) == (2, 80, 24)
        assert {row[1] for row in cast[1:]} == {"o", "i"}
        assert "100" in "".join(row[2] for row in cast[1:] if row[1] == "o")
        assert [row[0] for row in cast[1:]] == sorted(row[0] for row in cast[1:])

    async def test_a_flood_is_shown_and_ended(self, use: Use) -> None:
        session = session_id(await use("session", action="start", command="yes flood"))
        await until_shown(use, "flood", name="session", action="screen", session_id=session)
        assert (await use("session", action="close", session_id=session)).success


async def test_release_midway_ends_the_call(executor: ToolExecutor) -> None:
    call = asyncio.create_task(executor.execute("r", ToolCall(name="terminal", arguments={"command": "sleep 600"})))
    await until(lambda: executor.stats().leased, "the lease")
    await executor.release_trajectory("r")
    with pytest.raises(LeaseExpired):
        await call


async def test_cancelled_call_ends_alone(executor: ToolExecutor) -> None:
    async def run(command: str) -> ToolResult:
        return await executor.execute("c", ToolCall(name="terminal", arguments={"command": command}))

    await run("true")
    running = asyncio.create_task(run("sleep 600 & echo $! > pid; wait"))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(30 * SLOWNESS):
        while (await run("test -f pid && kill -0 $(cat pid)")).success:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await executor.release_trajectory("c")


async def test_release_writes_recordings(pool: SlotPool, tmp_path: Path) -> None:
    config = ToolExecutorConfig(recordings_dir=str(tmp_path), limits=ToolLimits(record_sessions=True))
    async with ToolExecutor(pool, build_tool_registry(["session", "default"]), config) as executor:
        command = "echo recorded; until [ -e go ]; do sleep 0.02; done; echo late; touch over"
        start = ToolCall(name="session", arguments={"action": "start", "command": command})
        session = session_id(await executor.execute("rec/1", start))
        # no call of the session shows late output
        late: dict[str, object] = {"command": "touch go; until [ -e over ]; do sleep 0.02; done"}
        assert (await executor.execute("rec/1", ToolCall(name="terminal", arguments=late))).success
        await executor.release_trajectory("rec/1")
    text = (tmp_path / f"rec_1-{session}.cast").read_text()
    assert "recorded" in text
    assert "late" in text


async def test_random_ends_free_every_slot(pool: SlotPool) -> None:
    commands = [
        "echo hi > f; cat f",
        "sleep 600",
        "seq 100000",
        "cat /dev/zero",
        "sleep 600 & echo $!",
        "exit 3",
        ":(){ :|:& };:",
    ]
    async with ToolExecutor(pool, build_tool_registry(["default"])) as executor:

        async def one(index: int) -> ToolResult | BaseException:
            generator = random.Random(index)
            name = f"x{index % 6}"
            call = ToolCall(name="terminal", arguments={"command": generator.choice(commands), "timeout": 0.3})
            task = asyncio.create_task(executor.execute(name, call))
            await asyncio.sleep(generator.random() * 0.3)
            if generator.random() < 0.4:
                task.cancel()
            if generator.random() < 0.3:
                await executor.release_trajectory(name)
            return (await asyncio.gather(task, return_exceptions=True))[0]

        results = await asyncio.gather(*(one(index) for index in range(60)))
        assert executor.stats().running == 0
    kinds = {type(one) for one in results}
    assert kinds <= {ToolResult, asyncio.CancelledError, LeaseExpired}, kinds
    await until(lambda: not pool.stats().leased, "the return of every slot")


WILD: list[object] = [
    None, 0, -1, 1e308, float("nan"), "", " ", "a" * 1000, "\x00", "\ud800", "../../../etc/passwd", "/proc/1/mem",
    "/dev/full", [], {}, [1], {"a": 1}, True, "*", "[", "(a+)+$", "-rf", "$(id)", "'; id; '", "\n", "😀", "/" * 5000,
    "proc-1", ["C-c", "Enter"], 10**20, "1e400", ".", "/proc", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_model_writes_is_answered(pool: SlotPool, seed: int) -> None:
    generator = random.Random(seed)
    tools = build_tool_registry(["default", "session"])
    limits = ToolLimits(command_timeout_s=1, max_timeout_s=1, max_wait_s=0.2)
    async with ToolExecutor(pool, tools, ToolExecutorConfig(limits=limits)) as executor:
        for _ in range(40):
            chosen = generator.choice(list(tools))
            arguments: dict[str, object] = {}
            for name, field in chosen.schema.parameters["properties"].items():
                if generator.random() < (0.9 if name in chosen.schema.parameters.get("required", ()) else 0.35):
                    arguments[name] = generator.choice(field.get("enum", WILD))
            if generator.random() < 0.1:
                arguments[generator.choice(["x", "cmd", "\ud800"])] = generator.choice(WILD)
            async with asyncio.timeout(60 * SLOWNESS):
                result = await executor.execute("w", ToolCall(name=chosen.name, arguments=arguments))
            assert f"the tool {chosen.name} failed" not in (result.error or ""), (chosen.name, arguments)
            text = result.to_xml()
            text.encode()
            assert len(text) < 150_000
            json.loads(text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"))
