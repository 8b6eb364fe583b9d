"""Events of a watched folder, from two listings."""

from __future__ import annotations

import pytest

from atropos.api.e2b.watching import changes

FILE = (7, "f", 0o644, 3, 1.0)
OTHER = (8, "f", 0o644, 3, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        ({}, {"/a": FILE}, [("CREATE", "/a"), ("WRITE", "/a")]),
        ({"/a": FILE}, {}, [("REMOVE", "/a")]),
        ({"/a": FILE}, {"/b": FILE}, [("RENAME", "/a"), ("CREATE", "/b")]),
        ({"/a": FILE}, {"/a": OTHER}, [("WRITE", "/a")]),
        ({"/a": FILE}, {"/a": (7, "f", 0o755, 3, 1.0)}, [("CHMOD", "/a")]),
        ({"/a": FILE, "/b": FILE}, {}, [("REMOVE", "/a"), ("REMOVE", "/b")]),
        ({"/a": FILE, "/b": FILE}, {"/c": FILE}, [("RENAME", "/a"), ("CREATE", "/c"), ("REMOVE", "/b")]),
    ],
)  # fmt: skip
def test_changes_are_told(before, after, events) -> None:
    assert changes(before, after) == events
