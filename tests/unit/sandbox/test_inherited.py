"""What a server has of the process that starts it changes nothing in its slots."""

import os
import sys

import pytest

from tests.unit.sandbox.conftest import Driver, tiny_base

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
