"""Every scenario of a slot, as root and as an ordinary user."""

import pytest

from tests.settings import shows
from tests.unit.sandbox import scenarios
from tests.unit.sandbox.conftest import OWN_BASE

pytestmark = [pytest.mark.slow("starts servers"), pytest.mark.waits]

MODULE = "tests.unit.sandbox.scenarios"


@pytest.mark.parametrize("name", scenarios.ALL)
def test_as_root(root_driver, name):
    root_driver.run(MODULE, name)


ON_DISK = [
    "disk_and_inode_limits_are_named",
    "files_round_trip",
    "forks_share_a_frozen_layer",
    "layers_on_disk_are_counted_while_they_are_imported",
    "nothing_is_left_after_a_stop",
    "places_on_disk_are_used_again_once_they_are_empty",
    "the_probe_finds_every_property",
    "tools_of_the_base_work",
]


@shows("volume")
@pytest.mark.parametrize("name", ON_DISK)
def test_with_volumes_on_disk(disk_driver, name):
    disk_driver.run(MODULE, name)


@pytest.mark.parametrize("name", [name for name in scenarios.ALL if name not in scenarios.ROOT_ONLY])
def test_as_an_ordinary_user(user_driver, name):
    if name == scenarios.a_base_of_one_s_own_is_writable_and_stays_as_it_is.__name__ and not OWN_BASE:
        pytest.skip("slots with ids of their own have no owner of a base that this user makes")
    user_driver.run(MODULE, name)
