"""What a lease asks for beyond a plain slot, to the unit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atropos.resources import Resources
from atropos.tasks.fit import Room, fit, largest_on_disk
from atropos.tasks.folder import load_task
from atropos.wire import LeaseLimits
from tests.files import write_files

ROOM = Room(Resources(memory_mib=512, disk_mib=256))


@pytest.mark.parametrize(
    ("wanted", "limits"),
    [
        (Resources(memory_mib=512, disk_mib=256, cpus=1), None),
        (Resources(memory_mib=513), LeaseLimits(memory_mib=513)),
        (Resources(disk_mib=257), LeaseLimits(disk_mib=257)),
        (Resources(cpus=1.5), LeaseLimits(cpu_quota=1.5)),
        (Resources(gpus=1), LeaseLimits(gpus=1, gpu_types=("H100",))),
    ],
)
def test_only_what_is_more_is_asked_for(wanted, limits):
    assert ROOM.beyond(wanted, ["H100"]) == limits


def test_a_slot_s_cores_are_its_own():
    room = replace(ROOM, slot=Resources(memory_mib=512, disk_mib=256, cpus=2))
    assert room.beyond(Resources(cpus=2)) is None
    assert room.beyond(Resources(cpus=2.5)) == LeaseLimits(cpu_quota=2.5)


def test_files_beyond_memory_are_on_disk():
    for limits, on_disk in (
        (None, 0),
        (LeaseLimits(), 0),
        (LeaseLimits(disk_mib=512), 0),
        (LeaseLimits(disk_mib=513), 513),
        (LeaseLimits(disk_mib=1024, memory_mib=1024), 0),
        (LeaseLimits(disk_mib=1025, memory_mib=1024), 1025),
    ):
        assert ROOM.on_disk(limits) == on_disk
        assert replace(ROOM, volume="memory").on_disk(limits) == 0


def test_memory_is_of_all_that_join():
    assert ROOM.memory_of(None) == 512
    limits = LeaseLimits(memory_mib=256, members=(LeaseLimits(memory_mib=1024), LeaseLimits(disk_mib=9)))
    assert ROOM.memory_of(limits) == 512 + 1024 + 512
    assert (ROOM.most, replace(ROOM, most_mib=4096).most) == (512, 4096)


def test_a_default_justifies_no_larger_lease(tmp_path):
    files = {"instruction.md": "Do it.\n", "environment/a": "a", "tests/test.sh": "true\n"}
    room = Room(Resources(memory_mib=512, disk_mib=20_000), most_mib=1024)
    for memory, lease in ((2048, None), (2000, LeaseLimits(memory_mib=1024))):
        toml = f'version = "1.0"\n[environment]\nmemory_mb = {memory}\n'
        found = fit(
            load_task(write_files(tmp_path / f"of-{memory}", {**files, "task.toml": toml})), room, policy="clamp"
        )
        assert found.limits == lease
        assert found.clamped == (f"environment.memory_mb: {memory} wanted, slots have at most 1024",)
        assert "raise slot_memory_mib" in found.lowered["memory"]


def test_a_default_may_be_meant(tmp_path):
    toml = 'version = "1.0"\n[environment]\nstorage_mb = 10240\n'
    files = {"instruction.md": "Do it.\n", "environment/a": "a", "tests/test.sh": "true\n", "task.toml": toml}
    task = load_task(write_files(tmp_path / "demo", files))
    lowered, meant = fit(task, ROOM), fit(task, ROOM, policy="refuse")
    assert (lowered.limits, lowered.clamped) == (
        LeaseLimits(disk_mib=512),
        ("environment.storage_mb: 10240 wanted, slots have 512",),
    )
    assert (meant.limits, meant.clamped, meant.refused) == (LeaseLimits(disk_mib=10240), (), ())


def test_networks_within_the_pool_s_are_reached(tmp_path):
    toml = "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.1.0.0/16', '10.2.0.0/16:81', '11.0.0.0/8']\n"
    files = {"instruction.md": "Do it.\n", "environment/a": "a", "tests/test.sh": "true\n", "task.toml": toml}
    found = fit(load_task(write_files(tmp_path / "demo", files)), replace(ROOM, egress=("10.0.0.0/8",)))
    assert [note.text.split()[1] for note in found.notes if note.setting == "egress"] == [
        "10.2.0.0/16:81",
        "11.0.0.0/8",
    ]


@pytest.mark.parametrize(
    ("volume", "storage", "most", "lease", "clamped"),
    [
        ("disk", 256, None, None, ""),
        ("disk", 1000, None, None, "1000 wanted, slots have 256"),
        ("memory", 512, None, LeaseLimits(disk_mib=512), ""),
        ("memory", 513, None, LeaseLimits(disk_mib=512), "513 of files in memory beside 0 for programs"),
        ("auto", 512, None, LeaseLimits(disk_mib=512), ""),
        ("auto", 513, None, LeaseLimits(disk_mib=513), ""),
        ("auto", 1000, 1000, LeaseLimits(disk_mib=1000), ""),
        ("auto", 1000, 999, LeaseLimits(disk_mib=999), "1000 wanted, more than fits in memory, and leases have 999"),
    ],
)
def test_files_are_where_there_is_room(tmp_path, volume, storage, most, lease, clamped):
    toml = f"[environment]\nstorage_mb = {storage}\n"
    files = {"instruction.md": "Do it.\n", "environment/a": "a", "tests/test.sh": "true\n", "task.toml": toml}
    task = load_task(write_files(tmp_path / "demo", files))
    room = replace(ROOM, volume=volume, largest_disk_mib=most)
    found = fit(task, room, policy="clamp")
    assert found.limits == lease
    assert clamped in "".join(found.clamped)
    assert bool(found.clamped) == bool(found.lowered.get("disk")) == bool(clamped)
    assert bool(fit(task, room, policy="refuse").refused) == bool(clamped)
    on_disk = {"auto": storage if most is None else min(storage, most)}.get(volume, 0) if storage > 512 else 0
    assert largest_on_disk([replace(task, limits=found.limits)], room) == (on_disk or None)
