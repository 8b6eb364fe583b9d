"""The `e2b` package, as its users have it, against `atropos executor-server`: sync and async."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import e2b
import httpx
import pytest
from e2b import AsyncSandbox, Sandbox

from tests.adapters.peers import ROOT
from tests.waiting import until

TOKEN = "e2b_0123456789abcdef"
ATROPOS = Path(sys.executable).with_name("atropos")


class Server:
    """A running server and its container."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid, self.log = url, pid, ""

    @property
    def options(self) -> dict[str, str]:
        return {"api_url": f"{self.url}/e2b", "sandbox_url": f"{self.url}/e2b", "api_key": TOKEN}

    def kill_containers(self) -> None:
        """As a machine that fails: the sandbox servers are killed."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        servers = [pid for pid in children if b"atropos.sandbox" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert servers
        for pid in servers:
            os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Server]:
    command = [ATROPOS, "executor-server", "--backend", "local", "--port", "0", "--max-containers", "1", *options]
    environment = {**os.environ, "ATROPOS_EXECUTOR_TOKEN": TOKEN}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while (found := re.search(r"http://\S+", lines[-1] if lines else "")) is None:
                lines.append(process.stderr.readline())  # after warnings, if there are any
                assert lines[-1], "".join(lines)
            running = Server(found[0], process.pid)
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                _, said = process.communicate(timeout=60)
            finally:
                process.kill()
        running.log = said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = tmp_path_factory.mktemp("server") / "settings.toml"
    settings.write_text("acquire_s = 60")  # twenty at once, on a busy machine
    with serving("--slots-per-container", "20", "--config", str(settings)) as running:
        yield running


@pytest.fixture
def sandbox(server: Server) -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=120, envs={"FOO": "bar"}, metadata={"test": "a & b"}, **server.options)
    yield made
    made.kill()


def test_a_sandbox_is_found_moved_and_ended(server: Server, sandbox: Sandbox):
    assert sandbox.is_running()
    info = sandbox.get_info()
    assert (info.sandbox_id, info.template_id, info.metadata) == (sandbox.sandbox_id, "base", {"test": "a & b"})
    sandbox.set_timeout(500)
    assert (sandbox.get_info().end_at - info.end_at).total_seconds() > 300
    for earlier, options, more_s in ((400, {}, 0), (30, {"timeout": 10}, 0), (30, {}, 200)):  # connect shortens no life
        sandbox.set_timeout(earlier)
        end = sandbox.get_info().end_at
        again = Sandbox.connect(sandbox.sandbox_id, **options, **server.options)
        assert (sandbox.get_info().end_at - end).total_seconds() >= more_s
        assert more_s or sandbox.get_info().end_at == end
    assert again.commands.run("echo $FOO").stdout == "bar\n"
    query = e2b.SandboxQuery(metadata={"test": "a & b"})
    assert [one.sandbox_id for one in Sandbox.list(query=query, **server.options).next_items()] == [sandbox.sandbox_id]
    for other in ({"test": "a"}, {"test": ""}, {"none": ""}):
        assert Sandbox.list(query=e2b.SandboxQuery(metadata=other), **server.options).next_items() == []
    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not Sandbox.kill(sandbox.sandbox_id, **server.options)
    with pytest.raises(e2b.NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **server.options)
    with pytest.raises(e2b.TimeoutException, match="was not found"):
        sandbox.files.read("a")


def ids(server: Server, *states: e2b.SandboxState) -> set[str]:
    return {
        one.sandbox_id for one in Sandbox.list(query=e2b.SandboxQuery(state=[*states]), **server.options).next_items()
    }


def test_a_paused_sandbox_keeps_its_files(server: Server, sandbox: Sandbox):
    sandbox.files.write("kept.txt", "kept")
    running = sandbox.commands.run("sleep 600", background=True)
    assert sandbox.pause()
    assert not sandbox.pause()
    assert not sandbox.is_running()
    assert sandbox.get_info().state == e2b.SandboxState.PAUSED
    assert sandbox.sandbox_id in ids(server, e2b.SandboxState.PAUSED) - ids(server, e2b.SandboxState.RUNNING)
    with pytest.raises(e2b.SandboxException):
        running.wait()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=100, **server.options)
    assert again.files.read("kept.txt") == "kept"
    assert again.commands.run("echo $FOO $E2B_SANDBOX_ID").stdout == f"bar {sandbox.sandbox_id}\n"
    assert [one.cmd for one in again.commands.list()] == []
    assert again.get_info().metadata == {"test": "a & b"}
    assert again.pause()
    assert sandbox.kill()
    with pytest.raises(e2b.NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **server.options)


async def test_a_paused_sandbox_may_resume_itself(server: Server):
    ends = {"on_timeout": "pause", "auto_resume": True}
    sandbox = Sandbox.create(timeout=1, lifecycle=ends, **server.options)
    sandbox.files.write("kept.txt", "kept")
    try:
        await until(lambda: sandbox.sandbox_id in ids(server, e2b.SandboxState.PAUSED), "the pause")
        assert sandbox.files.read("kept.txt") == "kept"
        assert sandbox.get_info().state == e2b.SandboxState.RUNNING
    finally:
        sandbox.kill()


def test_forks_leave_programs_running(server: Server, sandbox: Sandbox):
    sandbox.files.write("kept.txt", "first")
    running = sandbox.commands.run("cat", background=True, stdin=True)
    forks = sandbox.fork(timeout=60, count=3)
    sandbox.files.write("kept.txt", "second")
    kept = sandbox.create_snapshot("team/state:1")
    sandbox.files.write("kept.txt", "third")
    other = Sandbox.create(kept.snapshot_id, timeout=60, **server.options)
    try:
        assert [fork.files.read("kept.txt") for fork in forks] == ["first"] * 3
        assert len({fork.sandbox_id for fork in forks} | {sandbox.sandbox_id}) == 4
        assert forks[0].commands.run("echo $FOO").stdout == "bar\n"
        assert other.files.read("kept.txt") == "second"
        assert [one.snapshot_id for one in Sandbox.list_snapshots(**server.options).next_items()] == [kept.snapshot_id]
        running.send_stdin("still here\n")
        sandbox.commands.close_stdin(running.pid)
        assert running.wait().stdout == "still here\n"
        with pytest.raises(e2b.SandboxException, match="base of the pool"):
            sandbox.create_snapshot("base")
    finally:
        for one in (*forks, other):
            one.kill()
        assert Sandbox.delete_snapshot(kept.snapshot_id, **server.options)
    assert not Sandbox.delete_snapshot(kept.snapshot_id, **server.options)


BY_ID = """
from e2b import Sandbox
with Sandbox.create(timeout=300) as sandbox:
    sandbox.files.write("kept", "kept")
    (sandbox.beta_pause if hasattr(sandbox, "beta_pause") else sandbox.pause)()
    again = Sandbox.connect(sandbox.sandbox_id)
    print(again.files.read("kept"), again.commands.run("cat kept").stdout, again.is_running())
"""


@pytest.mark.parametrize(
    "python", [ROOT / ".peers/e2b-2.7.0/bin/python", Path(sys.executable)], ids=["oldest", "newest"]
)
def test_the_programs_of_its_page_run(server: Server, python: Path, tmp_path: Path):
    if not python.exists():
        pytest.skip("no e2b 2.7.0: scripts/peers.sh installs it")
    (tmp_path / "app.py").write_text("print('built')")
    page = (ROOT / "docs/adapters/e2b.md").read_text()
    first, templates = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    here = templates.replace("python:3.13-slim", "base").replace("pip install httpx", "true")
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), f"{server.url}/e2b")
    printed: list[str] = []
    for program in (first, here, BY_ID):
        done = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **urls, "E2B_API_KEY": TOKEN},
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout.split()
    assert printed == ["hello", "a", "line", "3", "built", "kept", "kept", "True"]


def test_pages_list_all_sandboxes(server: Server):
    made = {Sandbox.create(metadata={"page": "1"}, **server.options).sandbox_id for _ in range(5)}
    pages = Sandbox.list(query=e2b.SandboxQuery(metadata={"page": "1"}), limit=2, **server.options)
    seen = [[one.sandbox_id for one in pages.next_items()] for _ in range(3)]
    assert ([len(page) for page in seen], pages.has_next) == ([2, 2, 1], False)
    assert {one for page in seen for one in page} == made
    first, second, *_ = Sandbox.list(query=pages.query, order="asc", **server.options).next_items()
    later = e2b.SandboxQuery(metadata={"page": "1"}, started_after=second.started_at)
    found = Sandbox.list(query=later, limit=2, order="asc", **server.options)
    ended: list[str] = []
    while found.has_next:  # what a page named is gone when the next one is asked for
        ended += [one.sandbox_id for one in found.next_items() if Sandbox.kill(one.sandbox_id, **server.options)]
    assert sorted([first.sandbox_id, *ended]) == sorted(made)
    assert Sandbox.kill(first.sandbox_id, **server.options)
    endless = {"limit": "9" * 5000}
    assert httpx.get(f"{server.url}/e2b/v2/sandboxes", params=endless, headers={"X-API-Key": TOKEN}).status_code == 200


def reached(sandbox: Sandbox) -> list[str]:
    """Which of two hosts the sandbox's programs may ask for; that these don't exist here is not the question."""
    asked = {host: f"curl -sS -m 9 http://{host}.example.org/ 2>&1 || true" for host in "ab"}
    return [host for host, command in asked.items() if "egress: " in sandbox.commands.run(command).stdout]


def test_a_creator_says_what_is_reached(tmp_path: Path):
    settings = tmp_path / "settings.toml"
    settings.write_text("[pool]\nallow_network = true")
    only_a = {"deny_out": [e2b.ALL_TRAFFIC], "allow_out": ["a.example.org"]}
    with serving("--slots-per-container", "4", "--config", str(settings)) as server:
        for options, hosts in (
            ({}, ["a", "b"]),
            ({"allow_internet_access": False}, []),
            ({"network": {"deny_out": lambda context: [context.all_traffic], "allow_public_traffic": False}}, []),
            ({"network": only_a}, ["a"]),
        ):
            with Sandbox.create(**options, **server.options) as sandbox:
                assert reached(sandbox) == hosts, options
                if not hosts:
                    with pytest.raises(e2b.SandboxException, match="created without"):
                        sandbox.update_network(only_a)
        with Sandbox.create(**server.options) as sandbox:
            for update, hosts in ((only_a, ["a"]), ({}, ["a", "b"]), ({"allow_internet_access": False}, [])):
                sandbox.update_network(update)
                assert reached(sandbox) == hosts, update


def test_unknown_option_is_refused(server: Server):
    identity = {"tokens": {"cloud": {"audience": "a", "token_type": "JWT-SVID"}}}
    for field, option in (
        ("volumeMounts", {"volume_mounts": {"/mnt": "volume"}}),
        ("iam", {"iam": identity}),
        ("network", {"network": {"deny_out": ["8.8.8.8"]}}),
        ("network", {"network": {"allow_out": ["pypi.org"]}}),
        ("network", {"network": {"deny_out": [e2b.ALL_TRAFFIC], "allow_out": ["no host"]}}),
        ("network.maskRequestHost", {"network": {"mask_request_host": "a"}}),
    ):
        with pytest.raises(e2b.SandboxException, match=f"400: {field}"):
            Sandbox.create(**option, **server.options)
    with pytest.raises(
        e2b.SandboxException, match=r"400: template 'code-interpreter-v1': .*`Sandbox` of the package e2b"
    ):
        Sandbox.create("code-interpreter-v1", **server.options)
    with Sandbox.create(lifecycle={"on_timeout": "kill"}, **server.options) as sandbox:
        assert sandbox.is_running()


def test_a_sandbox_ends_when_its_time_is_over(server: Server):
    sandbox = Sandbox.create(**server.options)
    sleeping = sandbox.commands.run("sleep 60", background=True)
    sandbox.set_timeout(1)
    with pytest.raises(e2b.TimeoutException, match="sandbox was"):
        sleeping.wait()
    assert not sandbox.is_running()


def test_output_comes_as_it_is_printed(sandbox: Sandbox):
    seen: list[str] = []

    def out(_: str) -> None:
        seen.append("out")
        sandbox.files.write("shown", "")  # the command goes on once its first words are here

    result = sandbox.commands.run(
        "echo one; echo two >&2; until [ -e shown ]; do sleep 0.02; done; printf 'th\\303\\251'",
        on_stdout=out,
        on_stderr=lambda _: seen.append("err"),
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("one\nthé", "two\n", 0)
    assert sorted(seen) == ["err", "out", "out"]
    with pytest.raises(e2b.CommandExitException) as failed:
        sandbox.commands.run("echo no >&2; exit 7")
    assert (failed.value.exit_code, failed.value.stderr, failed.value.error) == (7, "no\n", "exit status 7")
    assert sandbox.commands.run("pwd; echo $X", cwd="/tmp", envs={"X": "1"}).stdout == "/tmp\n1\n"
    long = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert long.stdout == "x" * 3_000_000
    sandbox.files.make_dir("in")
    for cwd in ("in", "~/in", "/home/user/in"):
        assert sandbox.commands.run("pwd", cwd=cwd).stdout == "/home/user/in\n"
    for refused in ({"cwd": "/nowhere"}, {"user": "nobody-here"}, {"envs": {"LONG": "x" * 200_000}}):
        with pytest.raises(e2b.InvalidArgumentException):
            sandbox.commands.run("true", **refused)


def test_a_late_command_is_killed(sandbox: Sandbox):
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("touch began; sleep 1000; touch ended", timeout=3)
    assert sandbox.files.exists("began")
    deadline = time.monotonic() + 60
    while sandbox.commands.list():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not sandbox.files.exists("ended")


def test_a_background_commands_life(sandbox: Sandbox):
    handle = sandbox.commands.run("read x; echo got $x; cat", background=True, stdin=True, timeout=0)
    (listed,) = sandbox.commands.list()
    assert (listed.pid, listed.cmd, listed.args[-1]) == (handle.pid, "/bin/bash", "read x; echo got $x; cat")
    handle.send_stdin("it\n")
    with pytest.raises(e2b.InvalidArgumentException, match="longer than"):
        handle.send_stdin("x" * 20_000_000)
    assert next(iter(handle))[0] == "got it\n"
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.stream_input(handle.pid, ["a", b"b", "c\n"])
    sandbox.commands.close_stdin(handle.pid)
    assert again.wait().stdout == "abc\n"
    sleeping = sandbox.commands.run("sleep 60", background=True)
    assert sandbox.commands.kill(sleeping.pid)
    with pytest.raises(e2b.CommandExitException) as killed:
        sleeping.wait()
    assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(sleeping.pid)
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.connect(99_999)


def test_slow_and_lost_clients_harm_nobody(sandbox: Sandbox):
    command = "seq 4000000; touch printed; read x"  # 31 MB: more than sockets on the way hold
    handle = sandbox.commands.run(command, background=True, stdin=True)
    time.sleep(1)
    assert not sandbox.files.exists("printed")
    lines = bytearray()
    for piece, _, _ in handle:
        lines += (piece or "").encode()
        if lines.endswith(b"4000000\n"):
            break
    assert lines == b"".join(b"%d\n" % number for number in range(1, 4_000_001))
    again = sandbox.commands.run(command.replace("printed", "again"), background=True, stdin=True)
    again.disconnect()
    deadline = time.monotonic() + 60
    while not sandbox.files.exists("again"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_files_come_out_as_they_went_in(sandbox: Sandbox):
    files = sandbox.files
    assert files.write("new/text.txt", "zwölf").path == "/home/user/new/text.txt"
    assert files.read("/home/user/new/text.txt") == "zwölf"
    data = os.urandom(3_500_000)
    files.write("data.bin", io.BytesIO(data))
    assert bytes(files.read("data.bin", format="bytes")) == data
    with files.read("data.bin", format="stream") as stream:
        assert b"".join(stream) == data
    files.write("packed.bin", data, gzip=True)
    assert bytes(files.read("packed.bin", format="bytes")) == data
    written = files.write_files([{"path": "many/a b.txt", "data": "a"}, {"path": "many/c", "data": b"\r\n--\x00"}])
    assert [one.path for one in written] == ["/home/user/many/a b.txt", "/home/user/many/c"]
    assert (files.read("many/a b.txt"), bytes(files.read("many/c", format="bytes"))) == ("a", b"\r\n--\x00")
    files.write("empty", "")
    assert files.read("empty") == ""
    with pytest.raises(e2b.NotFoundException):
        files.read("absent")
    with pytest.raises(e2b.InvalidArgumentException):
        files.read("many")


def test_upload_to_an_ending_one(server: Server):
    sandbox = Sandbox.create(**server.options)

    def content() -> Iterator[bytes]:
        yield bytes(1_500_000)
        sandbox.kill()
        yield bytes(1_500_000)

    with pytest.raises(e2b.SandboxNotRunningException):
        sandbox.files.write("file", content())


def test_a_download_ends_with_its_sandbox():
    with serving("--slots-per-container", "1") as own:
        sandbox = Sandbox.create(**own.options)
        sandbox.files.write("file", io.BytesIO(bytes(24 << 20)))
        with (
            pytest.raises(Exception, match=r"body|closed"),
            sandbox.files.read("file", format="stream") as stream,
        ):
            next(stream)
            sandbox.kill()
            for _ in stream:
                pass
    assert "a download broke off" in own.log
    assert "Traceback" not in own.log


def test_a_folders_life(sandbox: Sandbox):
    files = sandbox.files
    assert (files.make_dir("d/e"), files.make_dir("d/e")) == (True, False)
    files.write("d/f", "12345")
    sandbox.commands.run("ln -s f d/link; chmod 640 d/f")
    listed = {one.name: one for one in files.list("d")}
    assert [one.type for one in listed.values()] == [e2b.FileType.DIR, e2b.FileType.FILE, e2b.FileType.SYMLINK]
    assert (listed["f"].size, listed["f"].permissions, listed["link"].symlink_target) == (
        5,
        "-rw-r-----",
        "/home/user/d/f",
    )
    assert {one.path for one in files.list("~", depth=2)} >= {"/home/user/d", "/home/user/d/f"}
    assert files.rename("d/f", "g/h").path == "/home/user/g/h"
    assert (files.exists("d/f"), files.exists("g/h"), files.get_info("g/h").owner) == (False, True, "root")
    files.remove("d")
    assert not files.exists("d")
    with pytest.raises(e2b.NotFoundException):
        files.rename("d", "i")
    with pytest.raises(e2b.NotFoundException):
        files.list("d")
    if sandbox.commands.run("runuser -u nobody true || echo one").stdout == "":
        assert sandbox.commands.run("id -un", user="nobody", cwd="/").stdout == "nobody\n"
        assert files.write("/tmp/n", "1", user="nobody").path == "/tmp/n"
        assert files.get_info("/tmp/n").owner == "nobody"
        with pytest.raises(e2b.SandboxException, match="ermission"):
            files.list("/root", user="nobody")


def test_a_closed_file_is_not_missing(server: Server, sandbox: Sandbox):
    sandbox.files.write("file", "1")
    for refused in (sandbox.files.exists, sandbox.files.list, sandbox.files.get_info, sandbox.files.read):
        with pytest.raises(e2b.InvalidArgumentException, match="no user"):
            refused("file", user="nobody-here")
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.make_dir("file")
    with Sandbox.create(envs={"PATH": "/nowhere", "LC_ALL": "C.UTF-8"}, **server.options) as lost:
        assert lost.files.make_dir("d")
        assert (lost.files.exists("d"), lost.files.exists("e")) == (True, False)
    sandbox.commands.run("mkdir -p many && cd many && seq -f %0200g 6000 | xargs touch", timeout=0)
    with pytest.raises(e2b.SandboxException, match="too much") as refused:
        sandbox.files.list("many")
    assert not isinstance(refused.value, e2b.RateLimitException)


def test_files_are_there_without_a_home(sandbox: Sandbox):
    files = sandbox.files
    files.remove("/home/user")
    assert "etc" in {one.name for one in files.list("/")}
    assert (files.exists("/home/user"), files.exists("/etc/passwd")) == (False, True)
    assert files.make_dir("/home/user/again")
    assert files.rename("again", "renamed").path == "/home/user/renamed"


def test_a_file_of_any_age_is_listed(sandbox: Sandbox):
    sandbox.commands.run("mkdir ages; cd ages; touch -d @-99999999999 first; touch -d @999999999999 last")
    assert [one.modified_time.year for one in sandbox.files.list("ages")] == [1, 9999]


def test_a_target_of_a_link_forges_no_path(sandbox: Sandbox):
    sandbox.commands.run("mkdir -p 'links/b\t'; cd links; touch 'b\t/etc'; ln -s 'b\t/etc' a")
    link, folder = sandbox.files.list("links")
    assert (link.path, link.symlink_target) == ("/home/user/links/a", "/home/user/links/b\t/etc")
    assert folder.path == "/home/user/links/b\t"


def test_watched_folder_tells_changes(sandbox: Sandbox):
    sandbox.files.write("w/old", "1")
    watcher = sandbox.files.watch_dir("w", recursive=True)
    sandbox.commands.run("cd w; mkdir s; echo > s/new; echo 2 >> old")
    events = {(one.name, one.type.value) for one in watcher.get_new_events()}
    assert events == {("s", "create"), ("s/new", "create"), ("s/new", "write"), ("old", "write")}
    sandbox.commands.run("cd w; mv old older; rm -r s; chmod 600 older")
    events = {(one.name, one.type.value) for one in watcher.get_new_events()}
    assert events == {("old", "rename"), ("older", "create"), ("s", "remove"), ("s/new", "remove")}
    watcher.stop()
    with pytest.raises(e2b.NotFoundException):
        sandbox.files.watch_dir("nowhere")


async def test_watchers_have_one_bound(server: Server):
    sandbox = await AsyncSandbox.create(**server.options)
    same = Sandbox.connect(sandbox.sandbox_id, **server.options)
    for _ in range(63):
        same.files.watch_dir(".")

    def one_more() -> bool:
        try:
            same.files.watch_dir(".").stop()
        except e2b.RateLimitException:
            return False
        return True

    for _ in range(2):  # one that has ended leaves its place to another
        streaming = await sandbox.files.watch_dir(".", on_event=lambda event: None)
        with pytest.raises(e2b.RateLimitException, match="64 watchers"):
            await sandbox.files.watch_dir(".", on_event=lambda event: None)
        await streaming.stop()
        await until(one_more, "the place of the watcher that has ended")
    await sandbox.kill()


def test_a_terminals_life(sandbox: Sandbox):
    terminal = sandbox.pty.create(e2b.PtySize(rows=20, cols=70), envs={"PS1": ""})
    sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=33, cols=99))
    terminal.disconnect()
    again = sandbox.pty.connect(terminal.pid)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo $FOO; exit 3\n")
    screen = bytearray()
    with pytest.raises(e2b.CommandExitException) as ended:
        again.wait(on_pty=screen.extend)
    assert ended.value.exit_code == 3
    assert b"33 99\r\nbar\r\n" in screen
    another = sandbox.pty.create(e2b.PtySize(rows=20, cols=70))
    assert (sandbox.pty.kill(another.pid), sandbox.pty.kill(another.pid)) == (True, False)


async def test_twenty_sandboxes_at_once_run_apart(server: Server):
    async def one(number: int) -> str:
        sandbox = await AsyncSandbox.create(timeout=120, **server.options)
        try:
            events: list[str] = []
            await sandbox.files.make_dir("in")
            watch = await sandbox.files.watch_dir("in", on_event=lambda event: events.append(event.name))
            await sandbox.files.write("in/number", str(number))
            handle = await sandbox.commands.run("cat in/number; cat", background=True, stdin=True)
            await sandbox.commands.send_stdin(handle.pid, "!")
            await sandbox.commands.close_stdin(handle.pid)
            result = await handle.wait()
            async with asyncio.timeout(30):
                while "number" not in events:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await watch.stop()
            return result.stdout
        finally:
            await sandbox.kill()

    assert await asyncio.gather(*(one(number) for number in range(20))) == [f"{number}!" for number in range(20)]


async def test_lost_server_is_no_exit_code(tmp_path: Path):
    settings = tmp_path / "settings.toml"
    settings.write_text("acquire_s = 0.5")
    with serving("--slots-per-container", "3", "--config", str(settings)) as server:
        sandboxes = [await AsyncSandbox.create(**server.options) for _ in range(3)]
        with pytest.raises(e2b.ServiceBusyException):
            await AsyncSandbox.create(retries=0, **server.options)
        assert await sandboxes.pop().kill()
        sandboxes.append(await AsyncSandbox.create(**server.options))
        handles = [await one.commands.run("sleep 60", background=True) for one in sandboxes]
        server.kill_containers()
        ends = await asyncio.gather(*(handle.wait() for handle in handles), return_exceptions=True)
        assert [type(end) for end in ends] == [e2b.SandboxNotRunningException] * 3, ends
        assert [await one.is_running() for one in sandboxes] == [False] * 3
        fresh = await AsyncSandbox.create(request_timeout=100, retries=100, **server.options)
        assert (await fresh.commands.run("echo again")).stdout == "again\n"


def test_a_lost_client_gets_no_sandbox(tmp_path: Path):
    settings = tmp_path / "settings.toml"
    settings.write_text("acquire_s = 10")
    with serving("--slots-per-container", "1", "--config", str(settings)) as server:
        first = Sandbox.create(**server.options)
        with pytest.raises(httpx.TimeoutException):
            Sandbox.create(request_timeout=1, retries=0, **server.options)
        assert first.kill()
        assert Sandbox.create(retries=0, **server.options).is_running()


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"X-Access-Token": "wrong"}])
def test_no_answer_without_the_token(server: Server, headers: dict[str, str]):
    for path in ("/e2b/v2/sandboxes", "/e2b/health", "/e2b/files?path=/etc/passwd", "/e2b/nothing"):
        assert httpx.get(server.url + path, headers=headers).status_code == 401
    right = {"X-API-Key": TOKEN}
    assert httpx.get(f"{server.url}/e2b/v2/sandboxes", headers=right).status_code == 200
    assert httpx.get(f"{server.url}/trajectories", headers=right).status_code == 401
    assert httpx.post(f"{server.url}/e2b/volumes", headers=right).status_code == 501
    with pytest.raises(e2b.AuthenticationException):
        Sandbox.create(**{**server.options, "api_key": "e2b_ff"})


def test_a_nameless_part_is_written_nowhere(server: Server, sandbox: Sandbox):
    headers = {
        "X-Access-Token": TOKEN,
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "Content-Type": "multipart/form-data; boundary=x",
    }
    named = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nfirst\r\n'
    for head in (b"", b"Content-Type: text/plain\r\n", b'Content-Disposition: form-data; name="file"\r\n'):
        body = named + b"--x\r\n" + head + b"\r\nsecond\r\n--x--\r\n"
        answer = httpx.post(f"{server.url}/e2b/files", content=body, headers=headers)
        assert (answer.status_code, answer.json()["message"]) == (400, "a part of the form has no filename"), head
        assert sandbox.files.read("a") == "first"
    alone = b"--x\r\n\r\nalone\r\n--x--\r\n"
    answer = httpx.post(f"{server.url}/e2b/files?path=b", content=alone, headers=headers)
    assert (answer.status_code, sandbox.files.read("b")) == (200, "alone")


def test_what_no_sdk_sends_is_refused(server: Server, sandbox: Sandbox):
    headers = {"X-Access-Token": TOKEN, "E2b-Sandbox-Id": sandbox.sandbox_id}
    with httpx.Client(base_url=f"{server.url}/e2b", headers=headers) as client:
        for path, body in (
            ("/process.Process/SendInput", b"{}"),
            ("/process.Process/SendSignal", b'{"process": {"pid": 1}, "signal": 4}'),
            ("/filesystem.Filesystem/Stat", b"not json"),
            ("/filesystem.Filesystem/Stat", b'{"path": "a\\u0000b"}'),
        ):
            answer = client.post(path, content=body)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument"), path
        answer = client.post("/process.Process/Start", content=b"\x00\xff\xff\xff\xff")
        assert b"invalid_argument" in answer.content
        for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "text/plain"):
            answer = client.post("/files?path=a", content=b"--y\r\n", headers={"Content-Type": kind})
            assert (answer.status_code, answer.json()["code"]) == (400, 400), kind
        name = "n" * 400
        octets, asked = {"Content-Type": "application/octet-stream"}, {"path": "a", "username": name}
        refused = [
            client.get("/files", params=asked),
            client.post("/files", params=asked, content=b"x", headers=octets),
        ]
        refused.append(client.post("/filesystem.Filesystem/Stat", json={"path": "a"}, auth=(name, "")))
        assert [answer.status_code for answer in refused] == [400] * 3
        packed = gzip.compress(os.urandom(5000))
        for body in (packed[: len(packed) // 2], b""):
            kind = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
            answer = client.post("/files?path=cut", content=body, headers=kind)
            assert (answer.status_code, "cut off" in answer.json()["message"]) == (400, True)
        assert not sandbox.files.exists("cut")
    with pytest.raises(e2b.SandboxException, match="timeout: from 0"):
        Sandbox.create(timeout=100_000, **server.options)
    with pytest.raises(e2b.SandboxException, match="template"):
        Sandbox.create("dir:/etc", **server.options)
    with pytest.raises(e2b.SandboxException, match="an image of a registry"):
        Sandbox.create("atropos-base:default", **server.options)
