"""What one client of several may use of a pool, and has used: quotas hold to the unit, and a lease counts once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from atropos.errors import QuotaReached
from atropos.resources import Resources
from atropos.slots.config import Quotas
from atropos.slots.containers import share as share_module
from atropos.slots.containers.share import BASE, MAX_IMAGES, OTHERS, Share, Usage

MIB = 1 << 20
DAY_S = 86_400
ROOM = Resources(memory_mib=100)


@dataclass(eq=False)
class Claim:
    room: Resources = ROOM
    image: str = BASE
    cpu: float = 0.5
    disk_mib: int = 10
    network: bool = False
    granted_at: float | None = None


class Snapshot:
    def __init__(self, size: int) -> None:
        self.info = SimpleNamespace(bytes=size)
        self.places = ["a container"]


def result(cpu_s: float | None, egress_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(cpu_s=cpu_s, egress_bytes=egress_bytes)


@pytest.mark.parametrize(
    ("quotas", "says"),
    [
        ({"slots": 2}, "quota slots: 2 of 2 are used, and 1 more asked for"),
        ({"memory_mib": 200}, "quota memory_mib: 200 of 200 are used, and 100 more asked for"),
        ({"memory_mib": 299}, "quota memory_mib: 200 of 299 are used, and 100 more asked for"),
        ({"cpu": 1.0}, r"quota cpu: 1 of 1 are used, and 0\.5 more asked for"),
        ({"disk_mib": 20}, "quota disk_mib: 20 of 20 are used, and 10 more asked for"),
    ],
)
def test_quotas_hold_to_the_unit(quotas, says):
    share = Share(Quotas(**quotas))
    first = Claim()
    share.claim(first)
    share.claim(Claim())
    with pytest.raises(QuotaReached, match=f"^{says}$"):
        share.claim(Claim())
    assert share.slots == 2
    share.end(first, 1.0)
    share.claim(Claim())


def test_snapshots_take_disk():
    share = Share(Quotas(disk_mib=30, snapshots=2))
    share.claim(Claim())
    share.snapshots = {Snapshot(5 * MIB), small := Snapshot(5 * MIB + 1)}  # 11 MiB, rounded up once
    share.claim(Claim(disk_mib=9))
    with pytest.raises(QuotaReached, match=r"disk_mib: 30 of 30 are used"):
        share.claim(Claim(disk_mib=1))
    with pytest.raises(QuotaReached, match="quota snapshots: 2 of 2 are used, and 1 more"):
        share.check_snapshot()
    small.places = []  # its container is gone
    share.check_snapshot()
    assert len(share.snapshots) == 1
    share.claim(Claim(disk_mib=5))
    share.check_snapshot()
    share.claim(Claim(disk_mib=1))
    with pytest.raises(QuotaReached, match="disk_mib: 30 of 30"):
        share.check_snapshot()
    share.check_snapshot(stays=False)  # what it freezes was counted as its slot's


def test_images_are_counted_by_day(monkeypatch):
    now = 10 * DAY_S
    monkeypatch.setattr(share_module.time, "time", lambda: now)
    share = Share(Quotas(images=2))
    for image in ("a", "b", "a", BASE, "atropos-build:" + "0" * 64):
        share.use_image(image)
    with pytest.raises(QuotaReached, match=r"images \(a day\): 2 of 2 are used, and 1 more"):
        share.claim(Claim(image="c"))
    assert share.slots == 0
    now += DAY_S - 1
    with pytest.raises(QuotaReached):
        share.use_image("c")
    now += 1
    share.use_image("c")


def test_used_up_egress_ends_networks(monkeypatch):
    now = 0.0
    monkeypatch.setattr(share_module.time, "time", lambda: now)
    share = Share(Quotas(egress_mib=2))
    share.claim(lease := Claim(network=True, granted_at=1.0))
    share.end(lease, 3.0, result(None, 2 * MIB - 1))
    share.claim(lease := Claim(network=True, granted_at=1.0))
    share.end(lease, 3.0, result(None, 1))
    with pytest.raises(QuotaReached, match=r"^quota egress_mib \(a day\): 2 of 2 MiB are used$"):
        share.claim(Claim(network=True))
    share.claim(Claim())
    now += DAY_S
    share.claim(Claim(network=True))


def test_load_is_what_it_holds_by_weight():
    share, claim = Share(Quotas(weight=4)), Claim()
    for _ in range(2):
        share.hold(claim)
    assert (share.held_mib, share.load) == (100, 25)
    share.hold(Claim(room=Resources(memory_mib=20)))
    assert share.load == 30
    for _ in range(2):
        share.let_go(claim)
    assert share.load == 5


def test_usage_counts_a_lease_once():
    share, lease = Share(), Claim(image="a", granted_at=10.0)
    share.claim(lease)
    share.hold(lease)
    assert share.usage(12.0) == {"a": Usage(leases=1, slot_s=2.0)}
    for _ in range(2):
        share.end(lease, 15.0, result(1.5, 7))
    assert share.usage(99.0) == {"a": Usage(leases=1, slot_s=5.0, cpu_s=1.5, egress_bytes=7)}
    assert (share.slots, share.held_mib) == (0, 0)
    share.claim(failed := Claim(image="a"))
    assert share.usage(99.0)["a"].leases == 1
    share.end(failed, 100.0)
    share.claim(lost := Claim(image="a", granted_at=100.0))
    share.end(lost, 101.0)
    assert share.usage(200.0) == {"a": Usage(leases=2, slot_s=6.0, cpu_s=1.5, egress_bytes=7)}


def test_many_images_are_others():
    share = Share()
    leases = [Claim(image=f"image-{n}", granted_at=0.0) for n in range(MAX_IMAGES + 1)]
    for lease in leases:
        share.claim(lease)
    usage = share.usage(1.0)
    assert len(usage) == MAX_IMAGES + 1
    assert usage[OTHERS].leases == 1
    for lease in [*leases, *leases]:
        share.end(lease, 1.0)
    share.claim(again := Claim(image="image-0", granted_at=1.0))
    share.claim(Claim(image="another", granted_at=1.0))
    assert {name: used.leases for name, used in share.usage(2.0).items() if used.leases > 1} == {
        "image-0": 2,
        OTHERS: 2,
    }
    share.end(again, 3.0)
    assert share.usage(3.0)["image-0"] == Usage(leases=2, slot_s=3.0)
