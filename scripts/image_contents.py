"""Whether two builds of an image hold the same: `image_contents.py TAG [TAG]` prints a digest of each, and differences.

What counts: every path with its type, mode, owner, link and bytes. Times don't: Docker's classic builder writes the
hour of the build into folders, which is why two builds of the same content have different image ids.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile

IGNORED = {".dockerenv", "etc/hostname", "etc/hosts", "etc/resolv.conf", "dev/console"}
"""What `docker create` itself puts into a container."""
SHOWN = 20


def contents(tag: str) -> dict[str, str]:
    """Path -> everything about it that counts."""
    made = subprocess.run(["docker", "create", tag, "true"], capture_output=True, text=True, check=True).stdout.strip()
    found: dict[str, str] = {}
    try:
        with subprocess.Popen(["docker", "export", made], stdout=subprocess.PIPE) as export:
            assert export.stdout is not None
            with tarfile.open(fileobj=export.stdout, mode="r|") as archive:
                for item in archive:
                    data = archive.extractfile(item) if item.isreg() else None
                    digest = hashlib.file_digest(data, "sha256").hexdigest() if data else ""
                    facts = (item.type, item.mode, item.uid, item.gid, item.linkname, item.size, digest)
                    if item.name not in IGNORED:
                        found[item.name] = repr(facts)
    finally:
        subprocess.run(["docker", "rm", "-f", made], capture_output=True, check=False)
    return found


def main() -> int:
    seen = [contents(tag) for tag in sys.argv[1:3]]
    for tag, found in zip(sys.argv[1:3], seen, strict=False):
        digest = hashlib.sha256("\n".join(f"{k} {v}" for k, v in sorted(found.items())).encode()).hexdigest()
        print(f"{tag}: {len(found)} paths, sha256 {digest}")
    if len(seen) == 2:
        differing = sorted(name for name in seen[0].keys() | seen[1].keys() if seen[0].get(name) != seen[1].get(name))
        for name in differing[:SHOWN]:
            print(f"differs: {name}")
        print(f"{len(differing)} paths differ")
        return 1 if differing else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
