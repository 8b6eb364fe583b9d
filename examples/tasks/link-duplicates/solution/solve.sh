#!/bin/bash
set -e
cd /workspace
cat > dedupe.py <<'PY'
import hashlib
import os
import stat
import sys
from collections import defaultdict

root = os.fsencode(sys.argv[1])
by_size = defaultdict(list)
for folder, names, files in os.walk(root):
    for name in files:
        path = os.path.join(folder, name)
        seen = os.lstat(path)
        if stat.S_ISREG(seen.st_mode) and seen.st_size:
            by_size[seen.st_size, seen.st_mode].append((os.path.relpath(path, root), path, seen.st_ino))


def digest(path):
    value = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value.update(block)
    return value.digest()


count = saved = 0
for (size, _), group in by_size.items():
    if len({number for _, _, number in group}) < 2:
        continue
    first = {}
    for _, path, number in sorted(group):
        keeper, inode = first.setdefault(digest(path), (path, number))
        if inode != number:
            fresh = path + b".dedupe-new"
            os.link(keeper, fresh)
            os.replace(fresh, path)
            count += 1
            saved += size
print(f"saved {saved} bytes in {count} files")
PY
cp -r photos /tmp/photos && python3 dedupe.py /tmp/photos
