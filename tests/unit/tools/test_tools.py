"""The sandboxed tools: what a model reads for right and for wrong calls."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from typing import get_args
from unittest.mock import AsyncMock

import pytest
from pydantic import ValidationError

from atropos import wire
from atropos.slots.slot.profile import Profile, UserAccount
from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, ToolLimits, build_tool_registry
from atropos.tools.sandboxed import search
from atropos.tools.sandboxed.diffs import apply
from atropos.tools.sandboxed.files import split_lines
from atropos.tools.sandboxed.search import NESTED
from atropos.tools.sandboxed.sessions import SessionArguments
from atropos.tools.sandboxed.text import command_result, without_escapes
from tests.files import write_files
from tests.unit.tools.fakes import FakePool


@pytest.fixture
async def root(executor):
    return (await executor.slot("t")).root


class TestTerminal:
    async def test_exit_codes_and_output(self, use):
        good = await use("terminal", command="echo out; echo err >&2")
        assert (good.success, good.output, good.error, good.exit_code) == (True, "out\nerr\n", None, 0)
        bad = await use("terminal", command="echo out; exit 7")
        assert (bad.success, bad.output, bad.error, bad.exit_code) == (False, "out\n", "exit code 7", 7)

    async def test_endless_command_is_ended(self, use):
        result = await use("terminal", command="echo begun; exec sleep 60", timeout=0.3)
        assert (result.success, result.timed_out) == (False, True)
        assert "0.3 s" in result.error

    async def test_long_timeout_is_cut(self, use):
        result = await use("terminal", command="echo hi", timeout=1e9)
        assert result.success
        assert result.output.startswith("hi\n[timeout 1e+09 s was shortened to 600 s")

    async def test_a_flood_is_head_and_tail(self, use):
        result = await use("terminal", command="seq 200000")
        assert result.truncated
        assert result.dropped_bytes > 1_000_000
        assert len(result.output) < 60_000
        assert result.output.startswith("1\n2\n")
        assert result.output.endswith("200000\n")

    async def test_binary_can_be_read(self, use):
        small = await use("terminal", command="printf '\\xff\\xfehi\\x00'")
        assert "hi" in small.output
        large = await use("terminal", command="head -c 100000 /dev/zero")
        assert "binary output" in large.output
        assert len(large.output) < 2000
        assert (large.truncated, large.dropped_bytes) == (True, 100_000 - 600)
        json.loads(large.to_json())
        report = await use("terminal", command="printf 'got \\0\\n'; seq 1000; echo 1 failed")
        assert (report.output.startswith("got \x00\n1\n2\n"), report.truncated) == (True, False)
        assert report.output.endswith("\n1000\n1 failed\n")

    async def test_a_megabyte_of_command(self, use):
        result = await use("terminal", command=f"cat > f <<'EOF'\n{'x' * 100_000}\nEOF\nwc -c < f")
        assert result.output.strip() == "100001"
        result = await use("terminal", command="x" * 3_000_000)
        assert "longer than 2,097,152 bytes" in result.error

    async def test_background_processes(self, use):
        started = await use("terminal", command="echo begun; read x; echo got $x; read y", background=True)
        session = started.data["session_id"]
        assert session in started.output
        async with asyncio.timeout(10):
            while "begun" not in (await use("process", action="log", session_id=session)).output:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        polled = await use("process", action="wait", session_id=session, timeout=0.2)
        assert "begun" in polled.output
        assert "still running" in polled.output
        await use("process", action="submit", session_id=session, data="it")
        async with asyncio.timeout(10):
            while "got it" not in (await use("process", action="log", session_id=session)).output:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "begun" not in (await use("process", action="poll", session_id=session)).output
        listed = await use("process", action="list")
        assert f"{session}  running" in listed.output
        await use("process", action="close", session_id=session)
        ended = await use("process", action="wait", session_id=session)
        assert "exit code" in ended.output
        late = await use("process", action="write", session_id=session, data="x")
        assert "has ended" in late.error

    async def test_split_are_joined(self, use):
        command = r"printf 'gr\303'; read x; printf '\274n'; read x; printf 'end\303'"
        session = (await use("terminal", command=command, background=True)).data["session_id"]
        polled = ""
        for piece in ("gr", "ün", "end\ufffd"):
            async with asyncio.timeout(10):
                while not polled.endswith(piece):
                    polled += (await use("process", action="poll", session_id=session)).output.partition("\n")[2]
                    polled = polled.replace("no new output", "")
                    await asyncio.sleep(0.01)
            if piece != "end\ufffd":
                await use("process", action="submit", session_id=session)
        assert polled == "grünend\ufffd"

    async def test_log_shows_last_lines(self, use):
        started = await use("terminal", command="seq 100000", background=True)
        session = started.data["session_id"]
        await use("process", action="wait", session_id=session)
        log = await use("process", action="log", session_id=session, lines=2)
        assert "99999\n100000\n" in log.output
        assert log.dropped_bytes > 0
        assert f"{log.dropped_bytes:,} bytes before were dropped" in log.output

    async def test_kill_and_over_long_wait(self, use):
        session = (await use("terminal", command="exec sleep 60", background=True)).data["session_id"]
        wait = asyncio.create_task(use("process", trajectory="t", action="wait", session_id=session, timeout=99999))
        await asyncio.sleep(0.05)
        wait.cancel()
        killed = await use("process", action="kill", session_id=session)
        assert "killed by signal 9" in killed.output

    async def test_due_check_comes_later(self, use):
        await use("terminal", command="exec sleep 60", background=True, check_interval=0.01)
        await asyncio.sleep(0.05)
        await use("terminal", command="true")
        await asyncio.sleep(0.05)
        assert "[session p1: running, 0 new bytes of output]" in (await use("terminal", command="echo hi")).output

    @pytest.mark.parametrize(
        ("arguments", "wanted"),
        [
            ({"action": "poll"}, "needs session_id; there are no sessions"),
            ({"action": "poll", "session_id": "p9"}, "no session 'p9'"),
            ({"action": "write", "session_id": "p9"}, "needs data"),
            ({"action": "fly"}, "'list', 'poll', 'log'"),
            ({}, "'action' is missing"),
        ],
    )
    async def test_wrong_process_calls(self, use, arguments, wanted):
        result = await use("process", **arguments)
        assert not result.success
        assert wanted in result.error


class TestFiles:
    async def test_lines_read_in_parts(self, use, root):
        (root / "f").write_text("".join(f"line {i}\n" for i in range(1, 1001)))
        part = await use("read_file", path="f", offset=10, limit=2)
        assert (
            part.output
            == "    10|line 10\n    11|line 11\n[lines 10 to 11; more lines follow; continue with offset=12]"
        )
        assert part.data["content"] == "line 10\nline 11"
        end = await use("read_file", path="f", offset=-2)
        assert end.output == "   999|line 999\n  1000|line 1000"
        beyond = await use("read_file", path="f", offset=2000)
        assert beyond.error == "f has no line 2000; it has 1,000 lines"

    async def test_a_large_file_is_read_within_bounds(self, use, root):
        with (root / "f").open("w") as file:
            file.writelines(f"{i:07}\n" for i in range(600_000))
        far = await use("read_file", path="f", offset=500_000, limit=1)
        assert far.output.startswith("500000|0499999\n")
        much = await use("read_file", path="f", limit=1_000_000)
        assert len(much.output) < 60_000
        assert much.truncated
        assert "continue with offset=" in much.output
        assert "too large" in (await use("read_file", path="f", offset=-1)).error
        (root / "long").write_bytes(b"x" * 5_000_000)
        long = await use("read_file", path="long")
        assert len(long.output) < 3000
        assert "more characters" in long.output

    async def test_numbering_across_chunks(self, use, root, monkeypatch):
        monkeypatch.setattr("atropos.tools.sandboxed.files.CHUNK_BYTES", 7)
        text = "".join(f"{'x' * (i % 13)}{i}\n" for i in range(60)) + "no end"
        (root / "f").write_text(text)
        lines = text.split("\n")
        for offset in (1, 2, 17, 59, 61):
            result = await use("read_file", path="f", offset=offset, limit=3)
            wanted = [f"{number:>6}|{line}" for number, line in enumerate(lines, 1)][offset - 1 : offset + 2]
            assert result.output.split("\n")[: len(wanted)] == wanted

    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x02\x80\x00\x00\x01\xe0", "a PNG image, 640x480"),
            (b"\x7fELF\x00\x01", "an ELF program"),
            (b"%PDF-1.7\n", "a PDF document"),
            (b"\x00\x01\x02", "a binary file"),
            (b"\xff\xfeh\x00i\x00", "UTF-16 text"),
        ],
    )
    async def test_what_is_no_text_is_named(self, use, root, data, kind):
        (root / "f").write_bytes(data)
        result = await use("read_file", path="f")
        assert not result.success
        assert kind in result.error

    async def test_missing_files_and_folders(self, use, root):
        (root / "src").mkdir()
        (root / "src/main.py").write_text("")
        assert "did you mean src/main.py?" in (await use("read_file", path="src/mian.py")).error
        assert "directory" in (await use("read_file", path="src")).error
        assert (await use("read_file", path="src/main.py")).output == "[the file is empty]"
        assert "no such file" in (await use("read_file", path="nowhere/x")).error

    async def test_write_file(self, use, root):
        result = await use("write_file", path="a/b/é.txt", content="one\ntwo")
        assert result.output == "wrote a/b/é.txt: 2 lines, 7 bytes"
        assert (root / "a/b/é.txt").read_text() == "one\ntwo"
        assert (await use("write_file", path="e", content="")).output == "wrote e: 0 lines, 0 bytes"
        assert "longer than" in (await use("write_file", path="x", content="y" * 40_000_000)).error


class TestPatch:
    async def test_an_exact_replacement(self, use, root):
        (root / "f").write_text("a\nb\nc\n")
        assert (await use("patch", path="f", old="b\n", new="B\nB2\n")).output.startswith("changed f (lines 2 to 3")
        assert (root / "f").read_text() == "a\nB\nB2\nc\n"

    async def test_ambiguous_is_explained(self, use, root):
        (root / "f").write_text("x = 1\n    y = 2\nx = 1\n")
        twice = await use("patch", path="f", old="x = 1", new="x = 3")
        assert "2 times (lines 1, 3)" in twice.error
        assert (await use("patch", path="f", old="x = 1", new="x = 3", replace_all=True)).success
        blank = await use("patch", path="f", old="  y = 2", new="z")
        assert blank.success
        near = await use("patch", path="f", old="x  =  3\n", new="q")
        assert "white space only" in near.error
        close = await use("patch", path="f", old="x = 3  # three, of course", new="q")
        assert "nothing similar" in close.error or "most similar lines" in close.error
        assert (root / "f").read_text() == "x = 3\n  z\nx = 3\n"

    async def test_lines_count_as_read_file(self, use, root):
        (root / "f").write_bytes(b"\x0cone\x0cpage\r100%\ntwo  words\n")
        assert "     2|two  words" in (await use("read_file", path="f")).output
        assert "lines 2 to 2 differ in white space" in (await use("patch", path="f", old="two words", new="x")).error
        assert "changed f (lines 2 to 2," in (await use("patch", path="f", old="two  words", new="2")).output

    async def test_lines_counted_off_loop(self, use, root, monkeypatch):
        """Of 32 MiB of short lines it takes seconds."""
        threads = []

        def counted(data):
            threads.append(threading.current_thread())
            return split_lines(data)

        monkeypatch.setattr("atropos.tools.sandboxed.patch.split_lines", counted)
        (root / "f").write_text("old\n" + "x\n" * 40_000)
        assert "40001 now" in (await use("patch", path="f", old="old", new="new")).output
        assert threads
        assert threading.current_thread() not in threads

    async def test_hunks_applied_off_loop(self, use, root, monkeypatch):
        """Each may search its whole file: 2,000 of them take seconds in a file of 32 KiB."""
        threads = []

        def applied(text, change):
            threads.append(threading.current_thread())
            return apply(text, change)

        monkeypatch.setattr("atropos.tools.sandboxed.diffs.apply", applied)
        (root / "f").write_text("".join(f"\n{number}\n" for number in range(1000)))
        hunks = "".join(f"@@ -9999,2 +1,2 @@\n \n-{number}\n+x\n" for number in range(100))
        assert (await use("patch", diff=f"--- a/f\n+++ b/f\n{hunks}")).success
        assert threads
        assert threading.current_thread() not in threads

    async def test_lf_text_matches_crlf(self, use, root):
        (root / "f").write_bytes(b"a\r\nb\r\nc\r\n")
        assert (await use("patch", path="f", old="a\nb", new="a\nB")).success
        assert (root / "f").read_bytes() == b"a\r\nB\r\nc\r\n"
        await use("patch", path="f", old="B", new="b1\nb2\r\nb3")  # no line end in old
        assert (root / "f").read_bytes() == b"a\r\nb1\r\nb2\r\nb3\r\nc\r\n"
        (root / "f").write_bytes(b"a\r\nb\nc\n")
        await use("patch", path="f", old="b", new="b1\nb2")
        assert (root / "f").read_bytes() == b"a\r\nb1\nb2\nc\n"

    @pytest.mark.parametrize(
        ("before", "old", "new", "after"),
        [
            (b"a\r\nb\r\n", "a\r\nb", "a\nb", b"a\nb\r\n"),  # whoever writes a CRLF changes line ends
            (b"a\r\nb\r\n", "a\r\nb\n", "x\n", b"x\r\n"),  # a mixture is a slip
            (b"a\rb\r\n", "a\rb", "a\nb", b"a\r\nb\r\n"),  # a CR alone ends no line
            (b"a\nb\n", "b", "b\r\nc", b"a\nb\r\nc\n"),
            (b"\xff\r\nb\r\n", "b", "b\nc", b"\xff\r\nb\r\nc\r\n"),
        ],
    )
    async def test_line_ends_of_the_file(self, use, root, before, old, new, after):
        (root / "f").write_bytes(before)
        assert (await use("patch", path="f", old=old, new=new)).success
        assert (root / "f").read_bytes() == after

    async def test_a_diff_of_several_files(self, use, root):
        (root / "a.py").write_text("one\ntwo\nthree\nfour\n")
        (root / "gone").write_text("bye\n")
        (root / "old name").write_text("same\n")
        (root / "a.py").chmod(0o755)
        diff = (
            "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -99,2 +99,7 @@ def f():\n two\n-three\n+THREE\n four\n"
            "--- /dev/null\n+++ b/new/file.txt\n@@ -0,0 +1,2 @@\n+hello\n+world\n"
            "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n"
            "diff --git a/old name b/new name\nsimilarity index 100%\nrename from old name\nrename to new name\n"
        )
        result = await use("patch", diff=diff)
        assert result.success, result.error
        assert (root / "a.py").read_text() == "one\ntwo\nTHREE\nfour\n"
        assert (root / "a.py").stat().st_mode & 0o777 == 0o755
        assert (root / "new/file.txt").read_text() == "hello\nworld\n"
        assert not (root / "gone").exists()
        assert (root / "new name").read_text() == "same\n"
        assert not (root / "old name").exists()

    async def test_a_diff_may_replace_a_file(self, use, root, pool):
        (root / "run.sh").write_text("x\n")
        mode = await use("patch", diff="diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n")
        assert (mode.output, (root / "run.sh").stat().st_mode & 0o777) == ("changed the mode of run.sh", 0o755)
        delete = "--- a/run.sh\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        make = "--- /dev/null\n+++ b/run.sh\n@@ -0,0 +1 @@\n+y\n"
        assert (await use("patch", diff=f"{delete}{make}")).success
        assert (root / "run.sh").read_text() == "y\n"
        again = await use("patch", diff=f"{delete.replace('-x', '-y')}{make}{make}")
        assert "run.sh is to be created and exists already" in again.error
        pool.refuse_write = "refused"
        replace = f"{delete.replace('-x', '-y')}{make.replace('+y', '+z')}"
        failed = await use("patch", diff=f"{replace}{make.replace('run.sh', 'refused')}")
        assert not failed.success
        assert (root / "run.sh").read_text() == "y\n", "what was there is restored"

    async def test_diff_changes_what_is(self, use, root):
        (root / "f").write_text("a\n")
        assert (await use("patch", diff="--- f.orig\n+++ f\n@@ -1 +1 @@\n-a\n+b\n")).success
        assert (await use("patch", diff="--- f\t2026-01-01\n+++ f.new\n@@ -1 +1 @@\n-b\n+c\n")).success
        assert (root / "f").read_text() == "c\n"
        assert [path.name for path in root.iterdir()] == ["f"]

    @pytest.mark.parametrize(
        ("last", "wanted"),
        [
            ("--- a/b\n+++ b/b\n@@ -1 +1 @@\n-not there\n+x\n", "does not apply to b"),
            ("--- a/nope\n+++ b/nope\n@@ -1 +1 @@\n-a\n+x\n", "no such file"),
            ("--- /dev/null\n+++ b/b\n@@ -0,0 +1 @@\n+x\n", "exists already"),
            (f"--- /dev/null\n+++ b/{'n' * 300}\n@@ -0,0 +1 @@\n+x\n", "too long"),
            ("--- a/b\n+++ b/b\nno hunk\n", "does not apply"),
            ("--- /dev/null\n+++ b/refused\n@@ -0,0 +1 @@\n+x\n", "nothing was changed"),
        ],
    )
    async def test_diff_applies_whole_or_not(self, use, root, pool, last, wanted):
        (root / "a").write_text("a\n")
        (root / "b").write_text("b\n")
        pool.refuse_write = "refused"
        result = await use("patch", diff=f"--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\n+A\n{last}")
        assert wanted.lower() in result.error.lower()
        assert (root / "a").read_text() == "a\n"
        assert (root / "b").read_text() == "b\n"
        assert sorted(path.name for path in root.iterdir()) == ["a", "b"]

    @pytest.mark.parametrize(
        ("arguments", "wanted"),
        [
            ({}, "'path' is missing"),
            ({"path": "f", "old": "", "new": "x"}, "old is empty"),
            ({"path": "f", "old": "x", "new": "x"}, "the same"),
            ({"diff": "hello"}, "no unified diff"),
            ({"diff": "x", "old": "y"}, "not both"),
            ({"path": "missing", "old": "x", "new": "y"}, "no such file"),
        ],
    )
    async def test_wrong_calls(self, use, arguments, wanted):
        assert wanted in (await use("patch", **arguments)).error


def test_an_unended_escape_hides_one_line():
    assert without_escapes("a\x1b]0;title\nb\n") == "a\nb\n"
    assert without_escapes("\x1b]0;title\x07a\x1b[31mred\x1b[0m \x1bP1;2q\n\x1b\\b") == "ared b"


def test_tilde_is_profile_users():
    app = UserAccount("app", 1000, 1000, "/home/app")
    assert Profile("/srv").path("~/f") == "/root/f"
    assert Profile("/srv", user=app).path("~/f") == "/home/app/f"
    assert Profile("/srv", {"HOME": "/h"}, app).path("~") == "/h"
    assert Profile("/srv").path("~f") == "/srv/~f"


@pytest.mark.parametrize("limit", [each for each in get_args(wire.Limit) if each != "output"])
def test_limits_say_what_was_reached(limit: wire.Limit):
    ended = wire.CommandResult(exit_code=-9, output=b"", limit=limit, duration_s=1)
    told = command_result(ended, timeout_s=5, note="").error
    assert told == f"stopped by the {limit} limit: {wire.LIMIT_REACHED[limit]}"


class TestSearch:
    @pytest.fixture
    async def repository(self, use, root):
        names = ("src/a.py", "src/b.txt", "build/out.py", "notes.md")
        write_files(root, {name: f"first\nneedle in {name}\nlast\n" for name in names} | {".gitignore": "build/\n"})
        await use("terminal", command="git init -q .")
        return root

    async def test_git_ignored_left_out(self, use, repository):
        result = await use("search_files", pattern="n[e]+dle")
        assert "src/a.py:2:needle in src/a.py" in result.output
        assert "build" not in result.output
        assert "[3 matches in 3 files]" in result.output
        listed = await use("search_files", pattern="", glob="*.py")
        assert listed.output == "src/a.py\n[1 file]"

    async def test_paths_start_at_workdir(self, use, executor, repository, monkeypatch):
        slot = await executor.slot("t")
        slot.profile = Profile("/app")
        run = slot.run

        async def searched(operation):
            if operation.op != "search":
                return await run(operation)
            paths = [f"/app/{operation.path}/{name}" for name in ("build/out.py", "src/a.py")]
            return wire.SearchResult(matches=tuple(wire.Match(path=path, line=0, text="") for path in paths), files=2)

        monkeypatch.setattr(slot, "run", searched)
        monkeypatch.setattr(search, "_ripgrep", AsyncMock(return_value=None))  # the machine may have it
        assert (await use("search_files", pattern="")).output == "src/a.py\n[1 file]"

    async def test_repository_below(self, use, root):
        (root / "repo").mkdir()
        await use("terminal", command="cd repo && git init -q . && echo x > .gitignore && echo needle > x && cp x y")
        result = await use("search_files", pattern="needle")
        assert result.output == "repo/y:1:needle\n[1 match in 1 file]"

    async def test_bounds_and_nothing_found(self, use, root):
        (root / "f").write_text("needle\n" * 500)
        result = await use("search_files", pattern="needle", limit=3)
        assert result.output.count("needle") == 3
        assert result.truncated
        assert "there may be more" in result.output
        assert (await use("search_files", pattern="absent")).output == "no match found in ."

    async def test_own_rg_is_bounded(self, use, tmp_path, monkeypatch):
        for name, script in {"rg": r"printf '%0.sf\0001-x\n' {1..1000}; printf 'f\0002:x\n'", "head": "cat"}.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert (await use("search_files", pattern="x", limit=1)).output == "no match found in ."

    async def test_repositories_are_bounded(self, use, executor, root, tmp_path, monkeypatch):
        """Each takes a command in the slot, and time on the event loop for each path."""
        for name, script in {"rg": "exit 97", "git": "exit 1", "head": r"printf './%.0s\n' {1..100}"}.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        (root / "f").write_text("x\n")
        assert (await use("search_files", pattern="x")).output == "f:1:x\n[1 match in 1 file]"
        ran = [op.command for op in (await executor.slot("t")).ran if op.op == "exec"]
        assert sum("check-ignore" in command for command in ran) == NESTED

    @pytest.mark.parametrize(
        ("pattern", "given"),
        [("x$", True), (r"C:\\readme", True), (r"x\r$", False), (r"\\\r", False), (r"\x0D", False), ("\r", False)],
    )
    async def test_rg_keeps_a_wanted_cr(self, use, tmp_path, monkeypatch, pattern, given):
        (tmp_path / "rg").write_text("#!/bin/bash\nprintf 'f\\0001:%s\\n' \"$*\"\n")
        (tmp_path / "rg").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert ("--crlf" in (await use("search_files", pattern=pattern)).output) == given

    async def test_own_rgs_bad_rows_dropped(self, use, tmp_path, monkeypatch):
        (tmp_path / "rg").write_text("#!/bin/bash\nprintf 'f\\0%05000d:x\\ng\\0007:x\\n' 1\n")
        (tmp_path / "rg").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert (await use("search_files", pattern="x")).output == "g:7:x\n[1 match in 1 file]"

    async def test_wrong_pattern_or_folder(self, use):
        assert "pattern" in (await use("search_files", pattern="(")).error
        assert not (await use("search_files", pattern="x", path="nowhere")).success


@pytest.mark.parametrize("pattern", ["x{999999999}", "(?:x{1000}){1000}", "((x{30}){30}){30}+", "(?ix)x{9 9 9 9 9 9}"])
def test_huge_patterns_are_refused(pattern):
    with pytest.raises(ValidationError, match="repeats too much"):
        SessionArguments(action="wait", pattern=pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12} \d{4}(-\d{2}){2}", r"(?:.{80}\n){24}", r"(?i:x)*\$ $", "x{0,9999}"],
)
def test_screen_pattern_is_taken(pattern):
    assert SessionArguments(action="wait", pattern=pattern).pattern == pattern


WRONG = [
    ("{", "not valid JSON"),
    ("[1]", "must be a JSON object, not a list"),
    ("null", "must be a JSON object, not null"),
    ('{"command": 5}', "'command' is wrong"),
    ('{"command": null}', "'command' is wrong"),
    ('{"command": "x", "extra": 1}', "'extra' is not an argument"),
    ('{"comand": "x"}', "did you mean 'command'?"),
    ('{"command": "x", "timeout": "soon"}', "'timeout' is wrong"),
    ('{"command": "x", "timeout": -1}', "greater than 0"),
    ('{"command": "x", "timeout": 1e999}', "finite"),
    ('{"command": "x\\u0000y"}', "NUL"),
    ('{"command": "  "}', "empty"),
    ('{"command": "\\ud800"}', "'command' is wrong"),
    ("[" * 100_000, "not valid JSON"),
    ('{"command": ' + "9" * 5000 + "}", "not valid JSON"),
]


@pytest.mark.parametrize(("arguments", "wanted"), WRONG)
async def test_wrong_arguments_are_told(executor, arguments, wanted):
    result = await executor.execute("t", ToolCall(name="terminal", arguments=arguments))
    assert not result.success
    assert wanted in result.error
    assert len(result.error) < 1500
    result.to_xml().encode()


async def test_near_right_are_taken(executor):
    for arguments in ('{"command": "echo hi", "timeout": "5"}', '"{\\"command\\": \\"echo hi\\"}"',
                      {"command": "echo hi", "timeout": "5", "background": "false"}):  # fmt: skip
        result = await executor.execute("t", ToolCall(name="terminal", arguments=arguments))
        assert result.output == "hi\n", result.error


async def test_unknown_names_the_known(executor):
    result = await executor.execute("t", ToolCall(name="terminl"))
    assert "Did you mean 'terminal'?" in result.error
    assert "read_file" in result.error
    huge = await executor.execute("t", ToolCall(name="x" * 1_000_000))
    assert len(huge.error) < 1000


async def test_megabyte_of_arguments(executor):
    for arguments in (json.dumps({"command": "x", "junk": "y" * 1_000_000}), {"comm": "z" * 1_000_000}):
        result = await executor.execute("t", ToolCall(name="terminal", arguments=arguments))
        assert not result.success
        assert len(result.error) < 1000


async def test_overhead_is_small():
    # Not a bound on time: a bound on work, one operation for one call.
    from atropos.tools import ToolExecutor

    pool = FakePool()
    async with ToolExecutor(pool, build_tool_registry()) as executor:
        for _ in range(3):
            await executor.execute("t", ToolCall(name="terminal", arguments={"command": "true"}))
        assert len(pool.slots[0].ran) == 3


async def test_stopped_misses_no_pattern(pool):
    async with ToolExecutor(pool, build_tool_registry(["session"])) as executor:

        async def use(**arguments):
            return await executor.execute("t", ToolCall(name="session", arguments=arguments))

        await use(action="start", command="exec sleep 60")
        slot = pool.slots[0]
        log, run = slot.procs["p1"].log, slot.run

        async def stopped(operation, **options):
            if operation.op != "proc_read" or operation.until != "output" or log:
                return await run(operation, **options)
            log.extend(b"one\r\n")
            state = await run(operation, **options)
            time.sleep(1.5)  # noqa: ASYNC251 (the process is stopped, or the event loop blocked)
            log.extend(b"two\r\n")
            return state

        slot.run = stopped
        found = await use(action="wait", pattern="^two$", timeout=1)
        assert (found.success, found.data["found"]) == (True, True), found.output


async def test_recordings_are_bounded(pool, monkeypatch):
    limits = ToolLimits(max_sessions=1, record_sessions=True)
    async with ToolExecutor(pool, build_tool_registry(["session"]), ToolExecutorConfig(limits=limits)) as executor:

        async def start(what):
            call = ToolCall(name="session", arguments={"action": "start", "command": f"echo {what}"})
            assert (await executor.execute("t", call)).success

        for what in "abcd":
            await start(what)
        kept = executor.recordings("t")
        assert [(name, what in text) for (name, text), what in zip(kept.items(), "abcd", strict=True)] == [
            (f"p{number}", True) for number in range(1, 5)
        ]
        monkeypatch.setattr("atropos.tools.sandboxed.sessions.PAST_BYTES", len(kept["p2"]) + len(kept["p3"]))
        await start("e")
        assert [*executor.recordings("t")] == ["p2", "p3", "p4", "p5"]
