"""Programs that ask much of a kernel, as they are installed, in a slot: the filter's answers are ones that they can
live with.

Each is skipped where this machine hasn't got it (in Debian: chromium firefox-esr nodejs default-jdk-headless gdb strace
sudo apt dpkg postgresql mariadb-server nginx-light openssh-server tmux valgrind rr golang gcc).
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from tests.backends import Engine
from tests.waiting import SLOWNESS

in_one_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="services change to users of their own: only root's slots have any"
)


@dataclass(frozen=True)
class Program:
    """What is looked for on this machine, what is run in a slot, and a pattern of what must be in its output."""

    needs: tuple[str, ...]
    command: str
    shows: str = "42"


PAGE = "data:text/html,<script>document.write(6*7)</script>"
POSTGRES = next((str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), "/none")
GO = os.path.dirname(shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin") or "/none/go")
PROGRAMS = {
    "chromium": Program(
        ("/usr/lib/chromium/chromium",),
        f"/usr/lib/chromium/chromium --headless --no-sandbox --disable-gpu --dump-dom '{PAGE}'",
    ),
    "firefox": Program(
        ("firefox-esr",), f"firefox-esr --headless --screenshot /tmp/x.png '{PAGE}' && tail -c +2 /tmp/x.png | head -c 3", "PNG"
    ),
    "node": Program(("node",), "node -e 'require(\"fs\").promises.readFile(\"/etc/passwd\").then(() => console.log(6*7))'"),
    "java": Program(
        ("java", "javac"),
        "echo 'class M { public static void main(String[] a) { System.out.println(6*7); } }' > M.java\n"
        "java -XX:+UseNUMA -XX:+UseLargePages M.java",
    ),
    "gdb": Program(("gdb",), "gdb -nx -batch -ex run -ex 'print 6*7' --args /bin/true"),
    "strace": Program(("strace",), "strace -f -o t sh -c '/bin/true; /bin/true' && test $(grep -c execve t) -ge 3 && echo 42"),
    "sudo, as root": Program(
        ("sudo",), "echo 'root ALL=(ALL) ALL' > /etc/sudoers; chmod 440 /etc/sudoers; test $(sudo -n id -u) = 0 && echo 42"
    ),
    "apt": Program(("apt-get",), "apt-get -qq update 2>/dev/null; apt-config dump | grep -q 'APT::Architecture ' && echo 42"),
    "dpkg": Program(
        ("dpkg-deb",),
        "mkdir -p d/DEBIAN\n"
        "printf 'Package: d\\nVersion: 42\\nArchitecture: all\\nMaintainer: d\\nDescription: d\\n' > d/DEBIAN/control\n"
        "dpkg-deb --build d && dpkg-deb -I d.deb",
        "Version: 42",
    ),
    "postgres": Program(
        (f"{POSTGRES}/initdb",),
        "useradd -m pg; cat > run <<'END'\n"
        f"cd; PATH=$PATH:{POSTGRES}; initdb -D d > /dev/null\n"
        "pg_ctl -D d -o \"-k /tmp -h ''\" -l log -w start && psql -h /tmp postgres -Atc 'select 6*7'; pg_ctl -D d stop\n"
        "END\nsu pg -c 'sh /workspace/run'",
    ),
    "mariadb": Program(
        ("mariadbd", "mariadb-install-db"),
        "useradd -m my; install -d -o my m\n"
        "mariadb-install-db --no-defaults --datadir=$PWD/m --user=my --auth-root-authentication-method=normal > log 2>&1\n"
        "mariadbd --no-defaults --datadir=$PWD/m --user=my --socket=/tmp/s --skip-networking > log2 2>&1 &\n"
        "until test -S /tmp/s; do sleep 0.1; done; mariadb --socket=/tmp/s -e 'select 6*7'",
    ),
    "nginx": Program(
        ("nginx", "curl"),
        "mkdir -p /var/lib/nginx /run; cat > c <<'END'\n"
        "events {}\nhttp { access_log off; server { listen 127.0.0.1:8088; return 200 42; } }\nEND\n"
        "nginx -p $PWD -c c -e log && curl -s http://127.0.0.1:8088/; cat log",
    ),
    "sshd": Program(
        ("/usr/sbin/sshd", "ssh", "ssh-keygen"),
        "mkdir -p /run/sshd ~/.ssh; grep -q ^sshd /etc/passwd || useradd -r sshd\n"
        "for key in user host; do ssh-keygen -q -t ed25519 -N '' -f $key; done; cp user.pub ~/.ssh/authorized_keys\n"
        "/usr/sbin/sshd -f /dev/null -p 2200 -h $PWD/host -E log -o StrictModes=no\n"
        "until grep -qs listening log; do sleep 0.1; done\n"
        "ssh -F /dev/null -p 2200 -i user -o StrictHostKeyChecking=no root@127.0.0.1 echo 42; cat log",
    ),
    "docker's client": Program(("docker",), "docker --host tcp://127.0.0.1:9 version 2>&1", "Client"),
    "adduser": Program(
        ("adduser", "deluser"), "adduser --disabled-password --gecos '' one && su one -c 'echo 42 >> /tmp/o' && deluser one && cat /tmp/o"
    ),
    "tmux": Program(("tmux",), "tmux new-session -d 'echo 42 > out; sleep 9'; until test -s out; do sleep 0.1; done; cat out"),
    "valgrind": Program(("valgrind",), "valgrind --error-exitcode=3 /bin/true && echo 42"),
    "rr, which refuses": Program(("rr",), "rr record /bin/true 2>&1 | head", "perf_event|initialize counter"),
    "go's race detector": Program(
        (f"{GO}/go", "gcc"),
        "cat > m.go <<'END'\npackage main\nfunc main() {\n\tx, done := 41, make(chan bool)\n"
        "\tgo func() { x++; done <- true }()\n\t<-done\n\tprintln(x)\n}\nEND\n"  # no fmt, and not optimised: much less to compile
        f"PATH=$PATH:{GO} GOCACHE=/tmp/c GOTOOLCHAIN=local GO111MODULE=off go run -race -gcflags=all='-N -l' m.go",
    ),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    limits = {"memory_mib": 2000, "pids": 512, "disk_mib": 1000, "wall_s": 300.0 * SLOWNESS}
    config = Engine("local").config(slots_per_container=1, max_containers=1, limits=limits)
    async with SlotPool(config) as pool:
        yield pool


@pytest.mark.parametrize("name", PROGRAMS)
@in_one_loop
async def test_it_runs_in_a_slot(pool, name):
    program = PROGRAMS[name]
    missing = [one for one in program.needs if shutil.which(one) is None]
    if missing:
        pytest.skip(f"{name}: not installed here: {', '.join(missing)}")
    async with pool.lease(name) as slot:
        result = await slot.exec(program.command)
        assert re.search(program.shows, result.output), result


@pytest.mark.skipif(shutil.which("sudo") is None, reason="sudo is not installed here")
@in_one_loop
async def test_sudo_says_why_it_can_not(pool):
    """No program in a slot gains privilege by being executed: docs/security.md."""
    async with pool.lease("sudo") as slot:
        result = await slot.exec("useradd -m user; su user -c 'sudo -n id -u'")
        assert result.exit_code != 0 and ("no new privileges" in result.output or "setuid" in result.output), result
