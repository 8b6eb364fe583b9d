"""A cluster that can't do what is asked says so in seconds, in Nomad's own words; and the job's variables do what they
say."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess

import pytest
from aiohttp import web

from atropos.errors import AcquireTimeout, BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.images.manifests import MACHINE
from atropos.slots import SlotPool
from atropos.slots.backends.loading import open_survey
from atropos.slots.backends.nomad.view import Allocation, explain, set_up_fault
from tests.engines import BACKENDS, NOMAD, ROOT, nomad, nothing_left, pool_config
from tests.settings import shows
from tests.waiting import until

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
]
PORT = 18_402
"""A port that no agent of the tests gives away by itself."""


OTHER = "amd64" if MACHINE == "arm64" else "arm64"


def most_of_the_node() -> int:
    """More than half of what the one node has, in MiB: a second container of this size has no room."""
    (node,) = nomad("GET", "/v1/nodes?resources=true")
    return int(node["NodeResources"]["Memory"]["MemoryMB"] * 0.6)


async def refused(kind: type[Exception], **changes) -> str:
    """What the start of such a pool fails with, long before it would time out; nothing is left of it."""
    config = pool_config("nomad", start_timeout_s=600, **changes)
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(SlotPool(config).start(), 90)
    await nothing_left("nomad", config.job_id)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@shows("nomad_variables")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"container_memory_mib": 4_000_000}, "memory exhausted on 1 of 1 nodes (lower slots_per_container or"),
        ({"nomad_variables": {"cpu_mhz": 9_000_000}}, "cpu exhausted on 1 of 1 nodes"),
        ({"nomad_variables": {"datacenters": ["mars"]}}, "in the job's datacenters"),
        ({"nomad_variables": {"node_pool": "gpu"}}, 'nonexistent node pool "gpu"'),
        (
            {"nomad_variables": {"constraints": [{"attribute": "${attr.cpu.arch}", "operator": "=", "value": "z80"}]}},
            "'${attr.cpu.arch} = z80' filtered 1 of 1 nodes",
        ),
        ({"architecture": OTHER}, f"'${{attr.cpu.arch}} = {OTHER}' filtered 1 of 1 nodes"),
    ],
    ids=["memory", "cpu", "datacenter", "node pool", "constraint", "architecture"],
)
async def test_unplaceable_jobs_say_why(changes, says):
    assert says in await refused(BackendUnavailable, placement_s=0.3, **changes)


async def test_failed_tasks_name_cure(tmp_path):
    weak = json.loads((ROOT / "docker/sandbox/seccomp.json").read_text())
    for rule in weak["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name != "unshare"]
    (tmp_path / "weak.json").write_text(json.dumps(weak))
    image = "atropos-crashes:local"
    text = b'FROM atropos-sandbox:local\nENTRYPOINT ["sh", "-c", "echo boom: out of luck >&2; exit 7"]\n'
    await asyncio.to_thread(
        subprocess.run, ["docker", "build", "-q", "-t", image, "-"], input=text, check=True, capture_output=True
    )
    try:
        image_missing, crash, no_profile, weak_profile = await asyncio.gather(
            refused(ConfigError, image="no-such-image:local"),
            refused(BackendUnavailable, image=image),
            refused(ConfigError, nomad_variables={"seccomp_profile": "/nowhere.json"}),
            refused(IsolationUnavailable, nomad_variables={"seccomp_profile": str(tmp_path / "weak.json")}),
        )
    finally:
        await asyncio.to_thread(subprocess.run, ["docker", "rmi", "-f", image], check=True, capture_output=True)
    assert "Failed to pull `no-such-image:local`" in image_missing
    assert "docker load" in image_missing
    assert "exit code 7: boom: out of luck" in crash
    assert "/nowhere.json" in no_profile
    assert "copy docker/sandbox/seccomp.json there" in no_profile
    assert "a seccomp profile that allows mount and unshare" in weak_profile


async def test_a_slow_pull_is_named():
    async def drip(request: web.Request) -> web.StreamResponse:
        if request.path == "/v2/":
            return web.Response()
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": "5000"})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", drip)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    image = f"127.0.0.1:{runner.addresses[0][1]}/atropos-sandbox:1"
    try:
        async with SlotPool(pool_config("nomad", image=image, min_containers=0)) as pool:
            started, acquired = await asyncio.gather(
                SlotPool(pool_config("nomad", image=image, start_timeout_s=12)).start(),
                pool.acquire("t", timeout_s=12),
                return_exceptions=True,
            )
        assert isinstance(started, BackendUnavailable)
        assert re.search(r"start_timeout_s \(12 s\): container .* is starting: Downloading", str(started))
        assert isinstance(acquired, AcquireTimeout)
        assert "is starting: Downloading image" in str(acquired)
    finally:
        await runner.cleanup()


def test_driver_messages_have_cure():
    # the words of Nomad 1.11.3's driver on clients without the plugin's settings of nomad/client-plugin.hcl
    begin = 'Driver Failure: Failed to create container configuration for image "x": '
    caps = set_up_fault(f"{begin}driver does not allow the following capabilities: sys_admin")
    assert "allow_caps: merge nomad/client-plugin.hcl" in caps
    assert "pids_limit" in set_up_fault(f"{begin}pids_limit cannot be greater than nomad plugin config pids_limit: 100")
    assert set_up_fault("Driver Failure: Failed to pull `x`: toomanyrequests: slow down") == ""
    assert set_up_fault("its server ended with exit code 1") == ""
    events = [
        {"Type": "Driver Failure", "DisplayMessage": "refused"},
        {"Type": "Not Restarting", "RestartReason": "Error was unrecoverable"},
    ]
    row = {"ID": "a", "Name": "job.sandbox[3]", "ClientStatus": "failed", "DesiredStatus": "run"}
    read = Allocation.read(row | {"TaskStates": {"server": {"State": "dead", "Events": events}}})
    assert (read.index, read.state, read.unrecoverable, read.detail) == (3, "over", True, "Driver Failure: refused")


def test_quota_and_class_are_told():
    said = explain({"NodesEvaluated": 4, "NodesInPool": 4, "ClassFiltered": {"gpu": 3}, "QuotaExhausted": ["memory"]})
    assert said == "node class 'gpu' filtered 3 of 4 nodes; quota limit hit: memory"
    said = explain({"NodesEvaluated": 2, "NodesInPool": 2, "ConstraintFiltered": {"missing drivers": 2}})
    assert said.startswith("constraint 'missing drivers' filtered 2 of 2 nodes (install Docker on the clients")
    said = explain({"NodesEvaluated": 0, "NodesInPool": 0, "NodePool": "default"})  # so too when each node drains
    assert "no ready node of node pool 'default'" in said
    assert "`nomad node status` shows nodes that drain or are ineligible; else set node_pool" in said


async def test_others_job_is_left_alone():
    config = pool_config("nomad", purge_job_on_start=True)
    group = {"Name": "web", "Count": 0, "Tasks": [{"Name": "web", "Driver": "docker", "Config": {"image": "x:local"}}]}
    job = {"ID": config.job_id, "Name": config.job_id, "Datacenters": ["*"], "TaskGroups": [group]}
    await asyncio.to_thread(nomad, "POST", "/v1/jobs", json.dumps({"Job": job}).encode())
    try:
        with pytest.raises(ConfigError, match=r"sandbox_job_id: job 'test-.*' in Nomad is no sandbox job.*not changed"):
            await SlotPool(config).start()
        async with await open_survey("nomad", config.job_id, address=NOMAD) as survey:
            with pytest.raises(ConfigError, match="no sandbox job"):
                await survey.purge()
        assert not (await asyncio.to_thread(nomad, "GET", f"/v1/job/{config.job_id}"))["Stop"]
    finally:
        await asyncio.to_thread(nomad, "DELETE", f"/v1/job/{config.job_id}?purge=true")


async def test_a_job_is_taken_as_it_is(caplog):
    async with SlotPool(pool_config("nomad")) as first:
        other = {"job_id": first.config.job_id, "slots_per_container": 3, "image": "atropos-sandbox:2"}
        async with SlotPool(pool_config("nomad", **other)) as second, second.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
            assert second.stats().slots == 2
    (told,) = [message for message in caplog.messages if "taken as it is" in message]
    assert "its sandbox_image is atropos-sandbox:local, not atropos-sandbox:2" in told
    assert "its slots_per_container is 2, not 3" in told
    assert "give this pool another sandbox_job_id" in told


@shows("nomad_address")
async def test_wrong_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"nomad_variables.*no variable colour"):
        await SlotPool(pool_config("nomad", nomad_variables={"colour": "red"})).start()
    with pytest.raises(ConfigError, match=r"nomad_variables: slots is set by slots_per_container"):
        await SlotPool(pool_config("nomad", nomad_variables={"slots": 3})).start()
    for config, says in (('{"slots": 3}', r"config\.slots is set by the pool"), ("5", "config must be an object")):
        with pytest.raises(ConfigError, match=rf"nomad_variables: {says}"):
            await SlotPool(pool_config("nomad", nomad_variables={"config": config})).start()
    with pytest.raises(ConfigError, match=r"nomad_variables.*a number is required"):
        await SlotPool(pool_config("nomad", nomad_variables={"priority": "high"})).start()
    with pytest.raises(BackendUnavailable, match=r"nomad_address or NOMAD_ADDR.*Connection refused"):
        await SlotPool(pool_config("nomad", nomad_address="http://127.0.0.1:9")).start()
    with pytest.raises(ConfigError, match="nomad_address"):
        SlotPool(pool_config("nomad", nomad_address="localhost:4646"))


async def test_excess_demand_waits():
    # of three containers that are asked for, this one node can take one
    config = pool_config("nomad", max_containers=3, placement_s=0.3, container_memory_mib=most_of_the_node())
    async with SlotPool(config) as pool:
        order: list[int] = []
        stays, goes = [await pool.acquire(f"first {n}") for n in range(2)]

        async def trajectory(number: int) -> None:
            async with pool.lease(f"t{number}", timeout_s=60) as slot:
                order.append(number)
                assert (await slot.exec("ls -A; echo mine > f")).output == ""

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(trajectory(number))
                await asyncio.sleep(0)
            await until(lambda: "memory" in pool.trouble(), "Nomad's reason", 30)
            with pytest.raises(AcquireTimeout) as caught:
                await pool.acquire("late", timeout_s=0.2)
            assert not order
            await goes.release()  # one slot for all of them: with two, the answers could overtake each other
        await stays.release()
        assert order == list(range(6))
        told = str(caught.value)
        assert "1 of 3 containers ready (at most 3), 2 slots (0 free, 2 leased, 0 retired), 6 waiting" in told
        assert re.search(r"Nomad can't place [12] of its containers: memory exhausted on 1 of 1 nodes", told)


@shows("container_memory_mib", "placement_s")
async def test_a_job_waits_for_a_place():
    large = {"container_memory_mib": most_of_the_node(), "placement_s": 0.3}
    async with SlotPool(pool_config("nomad", min_containers=0, **large)) as late:
        async with SlotPool(pool_config("nomad", **large)) as early:
            with pytest.raises(BackendUnavailable, match="Nomad can't place 1 of its containers: memory exhausted"):
                await late.acquire("t", timeout_s=120)
            async with early.lease("t") as slot:
                assert (await slot.exec("echo ok")).output == "ok\n"
        await until(lambda: not late.trouble(), "a place for the other job", 60)
        async with late.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"


async def test_host_networks_one_address():
    chosen = {"host_network": True, "static_port": PORT, "node_pool": "all", "priority": 70}
    async with SlotPool(pool_config("nomad", nomad_variables=chosen)) as pool, pool.lease("t") as slot:
        assert (await slot.exec("tail -n +3 /proc/net/dev | wc -l")).output == "1\n"
        listening = await asyncio.to_thread(
            subprocess.run, ["ss", "-Hltn", f"sport = :{PORT}"], capture_output=True, text=True, check=True
        )
        assert listening.stdout.split()[3] in {f"127.0.0.1:{PORT}", f"[::1]:{PORT}"}
