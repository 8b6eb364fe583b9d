import os
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import WORK, main, read, same

MODES = {
    "share": 0o750,
    "share/docs": 0o750,
    "share/docs/a b": 0o750,
    "share/docs/a b/it's.txt": 0o640,
    "share/docs/-rf": 0o640,
    "share/docs/plain": 0o640,
    "share/bin": 0o750,
    "share/bin/run": 0o750,
    "share/bin/job.sh": 0o750,
    "share/bin/with space.sh": 0o750,
    "share/bin/readme.md": 0o640,
    "share/-odd": 0o750,
    "share/-odd/-n.sh": 0o750,
    "share/private": 0o700,
    "share/private/open": 0o700,
    "share/private/keys": 0o700,
    "share/private/keys/id.pem": 0o600,
    "outside": 0o755,
    "outside/safe.txt": 0o644,
}
CONTENT = {
    "share/docs/a b/it's.txt": "one\n",
    "share/docs/-rf": "two\n",
    "share/docs/plain": "three\n",
    "share/bin/run": "#!/bin/bash\necho run\n",
    "share/private/keys/id.pem": "key\n",
    "share/-odd/-n.sh": "x\n",
    "outside/safe.txt": "safe\n",
}


def modes_are_right():
    got = {name: stat.S_IMODE(os.lstat(WORK / name).st_mode) for name in MODES}
    same({n: oct(m) for n, m in got.items() if m != MODES[n]}, {}, "modes")


def nothing_else_changed():
    same({name: read(name) for name in CONTENT}, CONTENT, "content")
    same(os.readlink(WORK / "share/docs/link.txt"), "../../outside/safe.txt")
    same(os.readlink(WORK / "share/docs/linked"), "../../outside")
    inside = {str(path.relative_to(WORK)) for path in (WORK / "share").rglob("*") if not path.is_symlink()}
    same(inside - set(MODES), set(), "unexpected files")


main(modes_are_right, nothing_else_changed)
