"""A view: the slot's folders and network on a root that its programs never wrote, and nothing of the view for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atropos.aio import cancel_and_wait
from atropos.errors import NotSupported
from atropos.slots import SlotPool
from atropos.slots.slot.profile import Profile
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from tests import privileges
from tests.backends import Engine
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TASK = Path(__file__).resolve().parents[2] / "examples/tasks/fix-ledger"
LISTENS = "until (echo > /dev/tcp/127.0.0.1/8123) 2>/dev/null; do sleep 0.05; done"
SERVER = f"cd /workspace; (setsid python3 -m http.server 8123 >/dev/null 2>&1 &); {LISTENS}"
WRITER = """
import http.server, os
class Writer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        open("new", "w").write("new"); os.replace("new", "state"); open("made", "w").close()
        self.send_response(200); self.end_headers(); self.wfile.write(b"done"); self.wfile.flush(); THEN
http.server.HTTPServer(("127.0.0.1", 8123), Writer).serve_forever()
"""
FETCH = "python3 -I -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/answer').read().decode(), end='')\""


async def test_only_workspace_is_shown(pool):
    async with pool.lease("agent") as slot:
        await slot.exec(
            "echo 42 > answer; mkdir -p /data/x sub; echo d > /data/x/y; echo e > /etc/made; echo t > /tmp/made"
        )
        await slot.exec("echo s > sub/one; ln -s one sub/two; ln -s /etc/hostname out; mkdir /unittest")
        await slot.view(optional=["/data", "/none"])
        assert (await slot.exec("cat answer sub/two /data/x/y out")).output.startswith("42\ns\nd\n")
        assert (await slot.exec("ls -d /etc/made /tmp/made /unittest /none 2>/dev/null")).output == ""


async def test_view_shows_image_s_folder(pool):
    prepared = await TaskImages(pool).prepare(load_task(TASK))
    async with pool.lease("agent", image=prepared.image) as slot:
        await slot.exec("cd /workspace; ls; echo 42 > answer; rm ledger.py")
        await slot.view(["/workspace"])
        assert (await slot.exec("ls /workspace")).output == "answer\ntest_ledger.py\n"


async def test_servers_answer_in_view(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("echo 42 > answer")
        assert (await slot.exec(SERVER)).exit_code == 0
        await slot.view()
        assert (await slot.exec(FETCH)).output == "42\n"


@pytest.mark.parametrize("running", ["true", "(setsid sleep 1000 >/dev/null 2>&1 &)"])
async def test_files_move_within_a_view(pool, running):
    """Beside programs where it is asked for; the slot keeps its files."""
    prepared = await TaskImages(pool).prepare(load_task(TASK))
    async with pool.lease("agent", image=prepared.image) as slot:
        await slot.exec(f"echo 42 > answer; rm test_ledger.py; {running}", workdir="/workspace")
        await slot.view(as_layer=running != "true")
        code = "import os; os.rename('answer', '/tmp/a'); os.link('/tmp/a', 'b'); os.rename('ledger.py', '/opt/l')"
        assert (await slot.exec(["python3", "-I", "-c", code], workdir="/workspace")).exit_code == 0
        assert (await slot.exec("ls /workspace; cat /workspace/b")).output == "b\n42\n"


async def test_links_lead_on_among_many_files(pool):
    """More than a copy for the view has room for."""
    async with pool.lease("agent") as slot:
        await slot.exec(
            "for i in $(seq 3000); do : > f$i; done; echo 42 > answer; ln -s answer link; ln -s /tests/x way"
        )
        await slot.view()
        assert (await slot.exec("cat link; mkdir /tests; echo 1 > /tests/x; cat way")).output.startswith("42\ncat: way")


async def test_writes_pass_one_way(pool):
    async with pool.lease("agent") as slot:
        loop = "while :; do cp test seen 2>/dev/null; ls /tests > tests 2>/dev/null; date +%N > beat; sleep 0.02; done"
        await slot.exec(f"(setsid bash -c '{loop}' >/dev/null 2>&1 &)")
        await slot.view()
        await slot.exec("mkdir /tests; echo secret > test; echo secret > /tests/secret")
        # it shows what they write: they have looked twice since
        twice = "for i in 1 2; do cp beat last; while cmp -s beat last; do sleep 0.02; done; done"
        assert (await slot.exec(twice)).exit_code == 0
        assert (await slot.exec("cat test; ls seen tests; cat tests")).output.splitlines()[0] == "secret"
        assert "secret" not in (await slot.exec("cat seen tests")).output


@pytest.mark.parametrize("then", ["pass", "os._exit(0)"], ids=["goes on", "ends"])
async def test_names_are_looked_up_again(pool, then):
    """Tests that wait for what a server makes or replaces see it, though they had looked before."""
    server = WRITER.replace("THEN", then)
    async with pool.lease("agent") as slot:
        await slot.exec(f"echo old > state; (setsid python3 -I -c '{server}' >/dev/null 2>&1 &); {LISTENS}")
        await slot.view()
        assert (await slot.exec(f"[ -e made ] || cat state; {FETCH}")).output == "old\ndone"
        seen = "until [ -e made ] && [ $(cat state) = new ]; do sleep 0.05; done"
        assert (await slot.exec(seen, timeout_s=30)).exit_code == 0


async def test_links_lead_into_no_view(pool):
    links = "ln -s /tests/expected a; ln -s ../tests/expected b; ln -s / c; ln -s c/tests/expected d; ln -s ../proc/self/root e; mkdir f; ln -s f/../../tests/expected g"
    async with pool.lease("agent") as slot:
        for more in ("", "ln -s f h; echo 1 > f/x; "):  # links that must be followed, and none
            await slot.exec(f"rm -rf *; {more}{links}")
    for more in ("", "ln -s f h; echo 1 > f/x"):
        async with pool.lease("agent") as slot:
            await slot.exec(f"{links}; {more}")
            await slot.view()
            await slot.exec("mkdir /tests; echo 42 > /tests/expected")
            names = "a b c/tests/expected d e/tests/expected g"
            assert "42" not in (await slot.exec(f"cat {names} 2>/dev/null; ls -l")).output.split()
            if more:
                assert (await slot.exec("cat h/x")).output == "1\n"


async def test_programs_stop_meanwhile(pool):
    async with pool.lease("agent") as slot:
        command = "> go; until [ -e over ]; do sleep 0.02; done; echo done"
        agent = asyncio.create_task(slot.exec(command, concurrent=True, timeout_s=60))
        await slot.exec("until [ -e go ]; do sleep 0.02; done; echo made > /etc/made")
        await slot.settle()
        await slot.exec("touch over")
        assert (await agent).output == "done\n"
        await slot.view()
        assert (await slot.exec("cat /etc/made")).output == "made\n"


LINKS_FOR_EVER = """\
ln -s /tests/expected hidden; mkdir /data; ln -s f h; echo 1 > f; echo 0 > beat
loop() {
    for ((i = 0; ; i++)); do
        ln -s /tests/expected $1/la$i; ln -s ../tests/expected $1/lb$i; ln -P hidden $1/lc$i 2>/dev/null
        mkdir $1/ld$i; rmdir $1/ld$i; ln -s /tests $1/ld$i; echo $i > beat; sleep 0.01
    done
}
(loop /workspace >/dev/null 2>&1 &) ; (loop /data >/dev/null 2>&1 &)
"""


@pytest.mark.parametrize("volume", ["memory", pytest.param("disk", marks=privileges.volumes_on_disk)])
async def test_later_links_stay_out(volume):
    """Beside links that must be followed. What is written into files that are there shows through meanwhile."""
    config = Engine("local").config(slots_per_container=1, max_containers=1, volume=volume)
    async with SlotPool(config) as pool, pool.lease("agent") as slot:
        await slot.exec(LINKS_FOR_EVER)
        await slot.view()
        await slot.exec("mkdir /tests; echo 42 > /tests/expected; cp beat /tmp/beat")
        later = "until [ $(cat beat) -gt $(($(cat /tmp/beat) + 20)) ] 2>/dev/null; do sleep 0.02; done"
        assert (await slot.exec(later)).exit_code == 0
        found = await slot.exec("cat h; cat {/workspace,/data}/l* {/workspace,/data}/ld*/expected hidden 2>/dev/null")
        assert found.output == "1\n"


async def test_without_room_no_link_is_followed(pool):
    """Beside a program, which could change one at any time."""
    async with pool.lease("agent") as slot:
        await slot.exec(
            "echo 42 > answer; ln -s answer h; for i in $(seq 99999); do : > f$i || break; done 2>/dev/null; "
            "(setsid sleep 1000 >/dev/null 2>&1 &)"
        )
        await slot.view()
        assert (await slot.exec("cat answer; cat h")).output.splitlines()[0] == "42"
        assert (await slot.exec("cat h 2>/dev/null")).output == ""


DEEP = "d/" * 100
HOSTILE = {
    "a link at a path longer than any": 'p=$(printf "d%.0s" $(seq 250)); for i in $(seq 20); do mkdir $p; cd -P $p; done; ln -s /tests link',
    "links without end": 'python3 -c \'import os\nfor n in range(10**6): os.symlink("/tests", f"l{n}")\' 2>/dev/null',
    "links without end, deep": 'python3 -c \'import os\nfor n in range(10**6): os.makedirs(f"{n}/" + "d/" * 150); os.symlink("/tests", f"{n}/" + "d/" * 150 + "l")\' 2>/dev/null',
    "links without room to remove them": f"mkdir -p {DEEP} && cd {DEEP} && for i in $(seq 500); do ln -s /tests l$i; done; (setsid sleep 1000 >/dev/null 2>&1 &)",
    "links that change places": """python3 -c '
import ctypes, os, platform
number = {"x86_64": 316, "aarch64": 276}[platform.machine()]
for n in range(2000):
    os.symlink("/tests", f"l{n}")
if os.fork() == 0:
    os.setsid()
    while True:
        for n in range(1000):
            ctypes.CDLL(None).syscall(ctypes.c_long(number), -100, f"l{n}".encode(), -100, f"l{1999 - n}".encode(), 2)
' >/dev/null 2>&1""",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_link_keeps_a_view_shut(pool, name):
    async with pool.lease("agent") as slot:
        await slot.exec(f"echo 42 > answer; {HOSTILE[name]}")
        await slot.view()
        found = await slot.exec(
            f"cat answer; mkdir /tests; echo t > /tests/t; cat /tests/t l1/t {DEEP}l*/t 2>/dev/null"
        )
        assert found.output == "42\nt\n"


@privileges.processes
async def test_deep_folders_are_cheap(pool):
    """A list of their whole paths took 235 MB; the default limits allow 50 times as many."""
    code = """
import os
os.mkdir("/deep")
os.chdir("/deep")
for _ in range(195):
    os.mkdir("d" * 255)
    os.chdir("d" * 255)
try:
    for n in range(10**6):
        os.mkdir(f"{n}")
except OSError:
    pass
"""
    async with pool.lease("agent") as slot:
        status = Path(f"/proc/{slot.link.container.id.partition('-')[0]}/status")
        await slot.exec("exec python3 -I -", stdin=code)
        Path(f"{status.parent}/clear_refs").write_text("5")  # the peak so far
        before = peak_kib(status)
        await slot.view()
        assert peak_kib(status) < before + 32_000


def peak_kib(status: Path) -> int:
    """The most memory that a process has had."""
    return int(status.read_text().split("VmHWM:")[1].split()[0])


async def test_folder_over_link_opens(pool):
    async with pool.lease("base") as slot:
        await slot.exec("ln -s /opt /data; echo x > /start")
        async with await slot.snapshot() as snapshot, pool.lease("agent", snapshot=snapshot) as agent:
            await agent.exec("echo 42 > answer; rm /data /start; mkdir /data /start")
            await agent.view()
            assert (await agent.exec("cat answer; readlink /data; cat /start")).output == "42\n/opt\nx\n"


async def test_earlier_links_nowhere(pool):
    async with pool.lease("agent") as slot:
        await slot.exec(
            "ln -s /tests/expected a; ln -s /tests/expected b; ln -s f h; echo 1 > f; mkdir s; ln -s /tests s/t"
        )
        async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
            await fork.exec("rm b; echo 2 > b")
            await fork.view()
            await fork.exec("mkdir /tests; echo 42 > /tests/expected")
            assert (await fork.exec("cat a b h s/t/expected 2>/dev/null")).output == "2\n1\n"


@privileges.volumes_on_disk
async def test_view_of_volume_on_disk():
    config = Engine("local").config(slots_per_container=1, max_containers=1, volume="disk")
    async with SlotPool(config) as pool, pool.lease("agent") as slot:
        await slot.exec("echo 42 > answer; mkdir /data; echo d > /data/x; echo e > /etc/made")
        await slot.settle()
        await slot.exec("echo 43 >> answer; echo t > /etc/later")
        await slot.view()
        assert (
            await slot.exec("cat answer /data/x /etc/made; ls /etc/later 2>&1 | wc -l")
        ).output == "42\n43\nd\ne\n1\n"
        assert "No such" in (await slot.exec("ls /etc/later")).output


async def test_settled_is_in_the_view(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("echo before > /etc/made")
        await slot.settle()
        await slot.exec("echo after > /etc/made; echo after > /etc/more")
        await slot.view()
        assert (await slot.exec("cat /etc/made; cat /etc/more")).output.splitlines()[0] == "before"
        assert (await slot.exec("ls /etc/more")).exit_code != 0


async def test_settled_files_are_in_view(pool):
    async with pool.lease("agent") as slot:
        assert (await slot.exec(f"echo 42 > answer; mkdir /opt/x; echo before > /etc/made; {SERVER}")).exit_code == 0
        await slot.settle()
        await slot.exec("echo 43 > answer; echo after > /etc/made; rm -r /opt/x")
        assert (await slot.exec(FETCH)).output == "43\n"
        await slot.view()
        assert (
            await slot.exec(f"cat /etc/made; ls -d /opt/x; cat answer; {FETCH}")
        ).output == "before\n/opt/x\n43\n43\n"


async def test_gone_workdir_is_settled(pool):
    async with pool.lease("agent") as slot:
        slot.profile = Profile(workdir="/app")
        await slot.exec("mkdir /app", workdir="/")
        sleeping = await slot.start("sleep 1000")
        await slot.exec("rm -r /app")
        await slot.settle()
        assert await sleeping.poll() is None


async def test_a_snapshot_ends_the_view(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("echo 42 > answer; echo e > /etc/made")
        await slot.view()
        await slot.exec("echo 43 > answer")
        async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
            for each in (slot, fork):
                assert (await each.exec("cat answer /etc/made")).output == "42\ne\n"


async def test_unshown_folder_is_inert(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("echo 42 > answer; echo e > /etc/made")
        for folder in ("/", "/proc", "/dev/shm"):
            with pytest.raises(NotSupported):
                await slot.view([folder])
        assert (await slot.exec("cat answer /etc/made")).output == "42\ne\n"


async def test_no_root_file_is_covered(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("echo run > /entrypoint.sh; ln -s /etc /app")
        await slot.settle()
        await slot.exec("rm /entrypoint.sh /app; mkdir /entrypoint.sh /app; echo e > /app/made; echo 42 > answer")
        await slot.view()
        seen = await slot.exec("cat answer /entrypoint.sh; readlink /app; ls /app/made")
        assert seen.output.startswith("42\nrun\n/etc\nls: ")


async def test_none_above_tests_is_shown(pool):
    async with pool.lease("agent") as slot:
        made = await slot.exec(
            "git init -q / && git -C / config core.fsmonitor 'echo agent >&2; echo' && mkdir -p /node_modules/chai /.cargo "
            "&& echo 'console.log(\"agent\")' > /node_modules/chai/index.js && echo 42 > answer"
        )
        assert made.exit_code == 0, made
        await slot.view()
        await slot.write_file("/tests/check.js", "require('chai')")
        seen = await slot.exec("cat /workspace/answer; git status; node check.js; ls -d /.cargo", workdir="/tests")
        assert seen.output.startswith("42\n")
        assert "agent" not in seen.output, seen


async def test_gone_workspace_is_empty(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("cd /; rm -rf /workspace; ln -s /etc /workspace", workdir="/")
        await slot.view()
        assert (await slot.exec("ls -A /workspace", workdir="/")).output == ""


async def test_made_folders_are_root_s(pool):
    """One in the place of a folder that the slot's programs removed, and those above a folder that the view's root
    lacks."""
    async with pool.lease("agent") as slot:
        await slot.exec("rm -rf /workspace; : > /workspace; mkdir -p /var/made/deep", workdir="/")
        await slot.view(["/workspace", "/var/made/deep"])
        folders = "/workspace /var/made /var/made/deep"
        done = await slot.exec(f"for d in {folders}; do mkdir $d/tests; done; stat -c %u:%g {folders}", workdir="/")
        assert done.output == "0:0\n" * 3


async def test_all_slots_may_have_a_view(pool):
    async def one(number: int) -> str:
        async with pool.lease(f"agent-{number}") as slot:
            await slot.exec(f"echo {number} > answer")
            await slot.view()
            return (await slot.exec("cat answer")).output

    assert await asyncio.gather(*map(one, range(12))) == [f"{number}\n" for number in range(12)]


async def test_cancelled_settling_is_tidy(pool):
    async with pool.lease("agent") as slot:
        await slot.exec("(setsid sleep 1000 >/dev/null 2>&1 &)")
        settling = asyncio.create_task(slot.settle())
        while not pool.stats().snapshots:  # noqa: ASYNC110 (it is there for a moment only)
            await asyncio.sleep(0)
        for _ in range(3):  # for it to come to its last call
            await asyncio.sleep(0)
        await cancel_and_wait([settling])
        await until(lambda: not pool.stats().snapshots, "the drop")
