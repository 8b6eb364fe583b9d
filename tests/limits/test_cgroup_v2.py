"""Where a server may find itself on cgroup v2, and what is left of it there. Run by `make test-cgroup2`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import scenarios
from tests.limits.test_container_memory import ROOM_MIB
from tests.unit.sandbox.as_user import USER
from tests.unit.sandbox.conftest import Driver, tiny_base
from tests.waiting import SLOWNESS

TOP = Path("/sys/fs/cgroup")
UNIFIED = (TOP / "cgroup.controllers").exists() and os.geteuid() == 0
pytestmark = pytest.mark.skipif(not UNIFIED, reason="needs root on a machine with cgroup v2 alone: make test-cgroup2")
SOME = (
    "memory_limit_is_named_and_the_slot_goes_on",
    "processes_are_counted_by_the_cgroup",
    "memory_returns_and_the_directories_go",
)


class Place:
    """A cgroup of its own for a test."""

    def __init__(self, name: str, controllers: str = "+memory +pids +cpu") -> None:
        (TOP / "cgroup.subtree_control").write_text(controllers)
        self.path = TOP / name
        self.path.mkdir()
        self.others: list[subprocess.Popen[bytes]] = []

    def enter(self, *namespaces: str) -> list[str]:
        """What a command is started with, to run in it."""
        # once a server has been there, nothing can join the group itself: what runs there is in the leaf for the rest
        rest = f"{self.path}/atropos/rest"
        move = [
            "sh",
            "-c",
            f'echo $$ > $([ -d {rest} ] && echo {rest} || echo {self.path})/cgroup.procs; exec "$@"',
            "sh",
        ]
        return [*move, "unshare", *namespaces] if namespaces else move

    def neighbour(self) -> None:
        """Another process in it."""
        self.others.append(subprocess.Popen([*self.enter(), "sleep", "100000"]))
        while not (self.path / "cgroup.procs").read_text():
            time.sleep(0.01)

    def give(self, user: int) -> None:
        """Delegate it, as systemd does."""
        for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(self.path / name, user, user)

    def below(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*/"))

    def end(self) -> None:
        for process in self.others:
            process.kill()
            process.wait()
        deadline = time.monotonic() + 10 * SLOWNESS
        while True:
            for path in sorted(self.path.rglob("*/"), reverse=True):
                path.rmdir()
            try:
                return self.path.rmdir()
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.fixture
def place(request):
    place = Place(f"place-{os.getpid()}")
    yield place
    place.end()


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"), 0)


def check(driver: Driver, names=SOME) -> None:
    try:
        for name in names:
            driver.run(scenarios.__name__, name)
    finally:
        driver.close()


def groups_of(pid: int) -> list[Path]:
    return list(TOP.rglob(f"atropos-{pid}-*/"))


def test_alone_in_a_cgroup(place, base):
    check(Driver(base, as_user=False, before=place.enter()), [one.__name__ for one in scenarios.ALL])
    assert place.below() == ["atropos", "atropos/rest"], "what is left is what the next server uses again"


def test_container_oom_is_no_result(place, base):
    driver = Driver(base, as_user=False, before=place.enter())
    used = int((place.path / "memory.current").read_text())
    (place.path / "memory.max").write_text(str(used + (ROOM_MIB << 20)))
    check(driver, [scenarios.a_kill_for_want_of_the_container_s_memory_is_no_result.__name__])


def test_beside_others_in_a_cgroup(place, base):
    """They are not the server's to move: its own is made beside theirs."""
    place.neighbour()
    before = (place.path / "cgroup.procs").read_text()
    driver = Driver(base, as_user=False, before=place.enter())
    assert groups_of(driver.process.pid)
    check(driver)
    assert (place.path / "cgroup.procs").read_text() == before
    assert place.below() == []
    assert not groups_of(driver.process.pid)


def test_in_a_cgroup_namespace(place, base):
    """The namespace's root is the container's own: what else runs there goes to a leaf."""
    place.neighbour()
    check(Driver(base, as_user=False, before=place.enter("--cgroup", "--mount")))
    assert place.below() == ["atropos", "atropos/rest"]
    assert str(place.others[0].pid) in (place.path / "atropos/rest/cgroup.procs").read_text()


@pytest.mark.parametrize("beside", [False, True])
def test_delegated_to_a_user(place, tmp_path_factory, beside):
    place.give(USER)
    if beside:
        place.neighbour()
    folder = tmp_path_factory.mktemp("user")
    for path in (folder, *folder.parents[:3]):
        os.chmod(path, 0o755)
    check(Driver(tiny_base(folder, USER), as_user=True, before=place.enter()))
    assert place.below() == ["atropos", "atropos/rest"]


def test_one_of_two_servers_killed(place, base):
    first, second = (Driver(base, as_user=False, before=place.enter()) for _ in range(2))
    first.process.kill()
    first.process.wait()
    assert groups_of(first.process.pid), "a killed server can't remove its directories"
    check(second, SOME[:1])
    third = Driver(base, as_user=False, before=place.enter())
    assert not groups_of(first.process.pid), "so the next one does"
    check(third, SOME[:1])
    assert place.below() == ["atropos", "atropos/rest"]


def test_missing_controller_named(place):
    (place.path / "cgroup.subtree_control").write_text("+memory +pids")
    inner = place.path / "inner"
    inner.mkdir()
    code = (
        "from atropos.config import ServerConfig\nfrom atropos.sandbox.boot import root_phase\n"
        "passed = root_phase.passed_on() or root_phase.enter(root_phase.RootPhaseSettings.of(ServerConfig(token='-')))\n"
        "print(passed[1].cgroups)"
    )
    command = ["sh", "-c", f'echo $$ > {inner}/cgroup.procs; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'memory', 'pids'" in done.stdout and "missing={'cpu': " in done.stdout, done
