"""What changed in a folder, from two archives of it: right, bounded, and made of whatever a slot may send."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from dataclasses import asdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atropos.dashboard import changes
from atropos.dashboard.changes import Changes, changes_of, compare
from atropos.dashboard.render import write_page
from tests.unit.dashboard.support import EVIL, group, trajectory


def archive(files: dict[str, bytes | str], *, modes: dict[str, int] | None = None, links: dict[str, str] | None = None):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mode = len(data), (modes or {}).get(name, 0o644)
            tar.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"./{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return out.getvalue()


def compared(old: dict, new: dict, **more) -> Changes:
    return compare("/workspace", archive(old), archive(new, **more))


def test_changes_are_listed_by_path():
    old = {"a.py": "one\ntwo\nthree\n", "gone.txt": "bye\n", "same": "s", ".git/index": "1"}
    new = {"a.py": "one\n2\nthree\n", "new/b.txt": "hi\n", "same": "s", ".git/index": "2"}
    found = compared(old, new)
    assert [(each.path, each.change, each.added, each.removed) for each in found.files] == [
        ("a.py", "changed", 1, 1),
        ("gone.txt", "removed", 0, 1),
        ("new/b.txt", "added", 1, 0),
    ]
    assert found.files[0].diff == "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"
    assert found.files[2].diff == "@@ -0,0 +1 @@\n+hi"


def test_diffs_have_line_numbers():
    lines = [str(n) for n in range(1, 101)]
    [found] = compared({"f": "\n".join(lines)}, {"f": "\n".join([*lines[:49], "x", *lines[50:]])}).files
    assert found.diff.split("\n") == ["@@ -47,7 +47,7 @@", " 47", " 48", " 49", "-50", "+x", " 51", " 52", " 53"]


def test_modes_and_links_are_noted():
    found = compare(
        "/w",
        archive({"run": "x", "b": b"\0\1"}, links={"l": "here"}),
        archive(
            {"run": "x", "b": b"\0\2\3", "long": "y" * (changes.MAX_TEXT_BYTES + 1)},
            modes={"run": 0o755},
            links={"l": "there"},
        ),
    )
    assert {each.path: each.note for each in found.files} == {
        "b": "binary, 3 bytes",
        "l": "symbolic link",
        "long": "too long to compare, 262,145 bytes",
        "run": "mode 644 to 755",
    }


def test_changes_are_bounded():
    found = compared({}, {f"f{n:04}": "line\n" * 4000 for n in range(50)} | {f"g{n}": "" for n in range(300)})
    assert len(found.files) == changes.MAX_FILES
    assert found.more == 300
    assert sum(len(each.diff) for each in found.files) < changes.MAX_CHARS + 50 * 40
    assert found.files[0].diff.endswith("more lines of the diff]")
    assert found.files[-1].added == 4000


def test_hostile_files_compare_fast():
    old = "\n".join(str(n % 90) for n in range(20_000))
    new = "\n".join(str(n * 7 % 90) for n in range(20_000))
    started = time.process_time()
    compared({f"f{n}": old for n in range(5)}, {f"f{n}": new for n in range(5)})
    assert time.process_time() - started < 2


def header(kind: bytes, *, size: int = 0) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@given(st.binary(max_size=2000))
@example(header(tarfile.XHDTYPE, size=1 << 80))
@example(header(tarfile.GNUTYPE_LONGNAME) * 1000)
def test_no_archive_is_named(data):
    with contextlib.suppress(ValueError):
        compare("/w", archive({"a": "b"}), data)


@pytest.mark.parametrize(
    "record", [{}, {"files": 7}, {"files": [7, {"path": 1, "added": "x", "diff": None}], "more": "no"}]
)
def test_other_shapes_are_read_in_part(record):
    found = changes_of(record)
    assert found.folder == ""
    assert found.more == 0
    assert changes_of(json.loads(json.dumps(asdict(found)))) == found


def test_the_static_page_shows_them_escaped(tmp_path):
    found = compared({"a": "old\n"}, {"a": f"{EVIL}\n", "</code><img>": "x"})
    one = group("i", trajectory("t", 1.0, changes=asdict(found)), trajectory("u", 0.0, changes={"folder": "/w"}))
    (tmp_path / "g.jsonl").write_text(json.dumps(one) + "\n")
    page = write_page(tmp_path / "g.jsonl").read_text()
    assert '<span class="del">-old\n' in page
    assert '<span class="add">+&lt;script&gt;' in page
    assert "&lt;/code&gt;&lt;img&gt;" in page
    assert "Nothing in /w differs from its start." in page
    assert "\u202e" not in page


@pytest.mark.parametrize("header", [1, 2])
def test_damaged_archives_show_no_removals(header):
    damaged = bytearray(archive({"a": "", "b": "", "c": ""}))
    damaged[512 * header + 10] ^= 0xFF
    with pytest.raises(ValueError, match="cut off or damaged"):
        compare("/workspace", archive({"a": "", "b": "", "c": ""}), bytes(damaged))
