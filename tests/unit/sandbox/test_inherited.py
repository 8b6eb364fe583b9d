"""What a server has of the process that starts it changes nothing in its slots."""

import os
import subprocess
import sys

import pytest

from tests.unit.sandbox.conftest import ROOT, Driver, tiny_base
from tests.waiting import SLOWNESS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who has several users in a slot")
STARTS = {
    "a umask that lets nobody else in": "os.umask(0o077)",
    "signals of children ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
}


@pytest.mark.parametrize("state", STARTS)
def test_a_server_starts_and_its_slots_are_as_ever(folder, state):
    code = f"import os, signal, sys; {STARTS[state]}; os.execvp(sys.argv[1], sys.argv[1:])"
    driver = Driver(tiny_base(folder / state, 0), as_user=False, before=[sys.executable, "-c", code])
    driver.run("tests.unit.sandbox.scenarios", "many_users_inside")
    driver.close()


def test_a_user_without_a_home_has_no_store_of_images_and_no_folder_is_made_for_one(folder):
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
