"""What a server has of the process that starts it changes nothing in its slots."""

import os
import subprocess
import sys

import pytest

from tests.unit.sandbox.conftest import ROOT, Driver, tiny_base
from tests.waiting import SLOWNESS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who has several users in a slot")
STARTS = {
    "a umask that lets nobody else in": ("os.umask(0o077)", "many_users_inside"),
    "signals of children ignored": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "many_users_inside"),
    "a score for the memory killer": (
        "open('/proc/self/oom_score_adj', 'w').write('300')",
        "pid_1_keeps_the_score_of_its_server",
    ),
}


@pytest.mark.parametrize("state", STARTS)
def test_slots_are_as_ever(folder, state):
    setup, scenario = STARTS[state]
    code = f"import os, signal, sys; {setup}; os.execvp(sys.argv[1], sys.argv[1:])"
    driver = Driver(tiny_base(folder / state, 0), as_user=False, before=[sys.executable, "-c", code])
    driver.run("tests.unit.sandbox.scenarios", scenario)
    driver.close()


def test_no_home_has_no_store(folder):
    place = folder / "here"
    place.mkdir()
    place.chmod(0o777)
    code = "import os; from atropos.sandbox.boot.folders import image_folder; print(image_folder(None, os.getuid()))"
    without_home = ["env", "-u", "HOME", "-C", str(place), sys.executable, "-c", code]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sandbox.as_user", *without_home],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=20 * SLOWNESS,
        env={**os.environ, "ATROPOS_TEST_USER": "65530", "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.startswith("(None, 'image_store.folder: "), done
    assert not list(place.iterdir())


@pytest.mark.parametrize("ids", [0, 65_536])
def test_stores_are_shared_by_users(folder, ids):
    """Where slots have root alone, all files of images are root's, and who installs uidmap then would find them so."""
    store = folder / f"store of {ids}"
    store.mkdir()
    store.chmod(0o777)
    code = (
        "import shutil, sys; from atropos.sandbox.boot import root_phase; from atropos.sandbox.boot import namespaces\n"
        f"namespaces.subordinate = lambda _: (100_000, {ids})\n"
        "namespaces.enter_namespaces = lambda _: root_phase.syscalls.unshare(0x10020000)\n"
        "root_phase.claim_delegated = lambda _: ''\n"
        "shutil.which = lambda program: program\n"
        "settings = root_phase.RootPhaseSettings('', None, {}, False, None, 1, image_folder=sys.argv[1])\n"
        "print(root_phase._as_user(settings, '', None).image_folder)"
    )
    asked = [sys.executable, "-m", "tests.unit.sandbox.as_user", sys.executable, "-c", code, str(store)]
    done = subprocess.run(asked, check=True, capture_output=True, text=True, cwd=ROOT, timeout=20 * SLOWNESS)
    assert done.stdout == f"{store}{'' if ids else '/one-user'}\n"


@pytest.mark.parametrize("closed", [".", "layers"])
def test_read_only_is_refused(folder, closed):
    """As another user, or root, left it."""
    store = folder / f"store {closed}"
    (store / "layers").mkdir(parents=True)
    for part in (store, store / "layers"):
        part.chmod(0o777)
    (store / closed).chmod(0o755)
    code = "import sys; from atropos.sandbox.boot.folders import image_folder; print(image_folder(sys.argv[1], 1))"
    asked = [sys.executable, "-m", "tests.unit.sandbox.as_user", sys.executable, "-c", code, str(store)]
    done = subprocess.run(asked, check=False, capture_output=True, text=True, cwd=ROOT, timeout=20 * SLOWNESS)
    assert "ConfigError: image_store.folder: " in done.stderr and "give it to this user, or name another" in done.stderr


def test_each_test_user_has_a_home():
    code = "from atropos.sandbox.boot.folders import image_folder; print(image_folder(None, 1))"
    asked = [sys.executable, "-m", "tests.unit.sandbox.as_user", sys.executable, "-c", code]
    for _ in range(2):
        done = subprocess.run(asked, check=True, capture_output=True, text=True, cwd=ROOT, timeout=20 * SLOWNESS)
        assert done.stdout == "('/media/.cache/atropos/images', '')\n"
    assert not os.path.exists("/media/.cache")
