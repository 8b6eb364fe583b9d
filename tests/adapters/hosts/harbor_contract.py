"""What Harbor asks of an environment, on slots; tests/adapters/test_harbor.py runs it with that package."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio
import side_by_side
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from atropos.adapters.harbor import AtroposEnvironment

LIMITS = {"memory_mib": 512, "disk_mib": 400, "wall_s": 20}
POOL = {"backend": "local", "slots_per_container": 2, "max_containers": 1, "limits": LIMITS}
TASK = Path(__file__).parent / "top-words" / "environment"
pytestmark = pytest.mark.asyncio(loop_scope="module")
NO_NETWORK = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)


def make(folder, **settings):
    return AtroposEnvironment(TASK, "top-words", "one", TrialPaths(folder), EnvironmentConfig(), **POOL, **settings)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("trial"))
    await made.start(force_build=False)
    yield made
    await made.stop(delete=True)


async def test_a_folder_is_downloaded_while_it_is_written(environment, tmp_path):
    await environment.exec("mkdir -p /logs/busy; head -c 50m /dev/zero >/logs/busy/log")
    await environment.exec("(while true; do echo line; done >>/logs/busy/log) >/dev/null 2>&1 &")
    for number in range(3):
        await environment.download_dir("/logs/busy", tmp_path / str(number))
        assert (tmp_path / str(number) / "log").stat().st_size >= 50 * 1024**2
    await environment.exec("pkill -f 'while true'; rm -r /logs/busy")


async def test_a_folder_is_downloaded_that_has_no_room_beside_it(environment, tmp_path):
    await environment.exec("mkdir -p /large/in; head -c 250m /dev/zero >/large/in/x; ln -s in/x /large/link")
    await environment.download_dir("/large", tmp_path / "large")
    assert (tmp_path / "large" / "link").stat().st_size == 250 * 1024**2
    await environment.exec("rm -rf /large")


async def test_thousands_of_files_are_filtered_by_whole_names(environment, tmp_path):
    names = "file-with-a-name-of-a-length-that-makes-their-list-longer-than-a-megabyte-"
    await environment.exec(f"mkdir /many; cd /many; seq -f {names}%g 1 15000 | xargs touch")
    await environment.download_dir_filtered(
        source_dir="/many", target_dir=tmp_path / "many", include=["**"], exclude=[]
    )
    assert len([*(tmp_path / "many").iterdir()]) == 15_000
    assert environment._config.limits.output_bytes == 10 * 1024**2


async def test_a_file_is_uploaded_to_a_path_or_into_a_folder(environment, tmp_path):
    (tmp_path / "file").write_text("x")
    await environment.exec("mkdir -p /up/there")
    for target in ("/up/there", "/up/new/", "/up/named"):
        await environment.upload_file(tmp_path / "file", target)
    assert (await environment.exec("cd /up; find -type f | sort")).stdout == "./named\n./new/file\n./there/file\n"


async def test_a_limit_of_zero_seconds_is_none_and_the_slots_own_is_named(environment):
    assert (await environment.exec("sleep 0.5; echo slept", timeout_sec=0)).stdout == "slept\n"
    with pytest.raises(RuntimeError, match="after 1 seconds"):
        await environment.exec("sleep 60", timeout_sec=1)
    with pytest.raises(RuntimeError, match=r"limits\.wall_s"):
        await environment.exec("sleep 60")


async def test_a_killed_command_has_the_code_of_docker(environment):
    assert (await environment.exec("kill -9 $$")).return_code == 137


async def test_policies_hold_at_once(tmp_path):
    """A pool's network is narrowed for one environment; `refused` is what its proxy says of a host that is not named."""
    allowed = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["allowed.test", "*.x.test"])
    environment = make(tmp_path, network_policy=NO_NETWORK, phase_network_policies=[allowed])
    await environment.start(force_build=False)

    async def refused(host):
        ask = f"curl -s -o /dev/null -w '%{{http_code}} %header{{x-atropos-refused}}' http://{host}/"
        return "list of allowed hosts" in ((await environment.exec(ask)).stdout or "")

    try:
        assert await refused("allowed.test")
        await environment.set_network_policy(allowed)
        assert await refused("other.test")
        assert not await refused("allowed.test")
        assert not await refused("a.x.test")
        await environment.set_network_policy(NetworkPolicy())
        assert not await refused("other.test")
        await environment.set_network_policy(NO_NETWORK)
        assert await refused("allowed.test")
    finally:
        await environment.stop(delete=True)


async def test_a_trial_without_network_has_none(tmp_path):
    environment = make(tmp_path, network_policy=NO_NETWORK)
    await environment.start(force_build=False)
    try:
        assert not environment._held.network
    finally:
        await environment.stop(delete=True)


async def test_a_command_is_answered_while_another_waits_for_it():
    assert await side_by_side.answer(side_by_side.harbor) == "42\n"
