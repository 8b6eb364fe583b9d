"""Which ids slots have, by what their server's namespace maps."""

from __future__ import annotations

import pytest

from atropos.errors import IsolationUnavailable
from atropos.sandbox.boot.namespaces import CREATORS, SLOT_IDS, free_extents, outside

ALL = SLOT_IDS + 1 + CREATORS


@pytest.mark.parametrize(
    ("uid_map", "extents"),
    [
        ("0 0 4294967295", [(0, 100_000, ALL)]),
        # a rootless engine's container: the image's files belong to 100,000 and above, whatever is left for the rest
        ("0 1000 1\n1 300000 165536", [(0, 100_000, 65_537), (65_537, 1000, CREATORS)]),
        ("0 300000 170000", [(0, 100_000, ALL)]),
        ("0 300000 120000", [(0, 100_000, 20_000), (20_000, 1000, ALL - 20_000)]),
        # too few for the image's owners
        ("0 1000 1\n1 300000 65536", [(0, 1000, 64_537)]),
    ],
)
def test_slots_have_image_s_ids(uid_map, extents):
    found = free_extents(uid_map)
    assert found == extents
    assert outside(found, 0) == extents[0][1]
    begin, first, count = extents[-1]
    assert outside(found, begin + count - 1) == first + count - 1


def test_few_ids_are_refused():
    with pytest.raises(IsolationUnavailable, match=r"this container maps only 2 user ids; .*/etc/subuid"):
        free_extents("0 1000 2")
