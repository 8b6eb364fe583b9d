"""Layers as overlay shows them, and as the store's programs make them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from atropos.images import flatten, repack
from atropos.images import layers as program
from atropos.images.programs import module_command
from tests.images.making import plain


@contextlib.contextmanager
def shown(layers: Sequence[str | Path], at: Path) -> Iterator[Path]:
    """Within, the folder `at` shows a stack, topmost first."""
    at.mkdir(exist_ok=True)
    nothing = at.with_name(f"{at.name}-nothing")  # an overlay needs two
    nothing.mkdir(exist_ok=True)
    lower = ":".join(map(str, (*layers, nothing)))
    # by mount(2): the newer calls, which util-linux 2.39 and later prefer, take no option beyond 255 bytes
    env = os.environ | {"LIBMOUNT_FORCE_MOUNT2": "always"}
    options = f"ro,userxattr,lowerdir={lower}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(at)], env=env, check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def ran(module: ModuleType, *arguments: object, stdin: bytes = b"", **more) -> tuple[int, str, dict]:
    """Exit code, error text and first result of one of the programs."""
    command = module_command(module, *arguments)
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False, **more)
    return done.returncode, done.stderr.decode().strip(), json.loads((done.stdout or b"{}").splitlines()[0])


def unpacked_alone(
    place: Path, data: bytes, *, max_bytes=64 << 20, max_members=10_000, ids=65_536, digest: str | None = None
) -> tuple[int, str, dict]:
    """A layer without those below it, into a folder: as `ran`."""
    order = program.Unpack(str(place), max_bytes, digest or hashlib.sha256(plain(data)).hexdigest(), len(data))
    return ran(program, max_members, ids, stdin=program.line(order) + data)


def stacked(
    tmp_path: Path, *layers: bytes, max_bytes=64 << 20, max_members=10_000, ids=65_536, digests=None
) -> tuple[int, str, list[Path]]:
    """Unpack layers, lowest first, each over those below it: (exit code, error text, their files, topmost first)."""
    files: list[Path] = []
    for index, data in enumerate(layers):
        place = tmp_path / f"layer-{index}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        digest = digests[index] if digests else hashlib.sha256(plain(data)).hexdigest()
        bounds = {"max_bytes": max_bytes, "max_members": max_members, "ids": ids}
        code, said, found = unpacked_alone(place, data, **bounds, digest=digest)
        if code == 0 and not (found["stands_alone"] and found["has_root"]):
            order = program.Settle.on([str(each) for each in files], str(place), max_bytes)
            code, said, _ = ran(program, max_members, ids, stdin=program.line(order))
        if code:
            return code, said, files
        if (place / "tar").exists():
            assert hashlib.sha256(repacked(place)).hexdigest() == digest
        files.insert(0, place / "files")
    return 0, "", files


def repacked(place: Path) -> bytes:
    """The tar of a layer, made again."""
    done = subprocess.run(module_command(repack, place), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flattened(tmp_path: Path, files: Sequence[Path]) -> Path:
    """Layers laid together into one."""
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    assert ran(flatten, place, *files)[:2] == (0, "")
    return place / "files"


def listed(root: Path) -> dict[str, tuple]:
    """All that is in a root file system, with what matters of it."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        seen = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if stat.S_ISREG(seen.st_mode) else None
        names = [name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("user.overlay.")]
        found[str(path.relative_to(root))] = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, what, names)
    return found
