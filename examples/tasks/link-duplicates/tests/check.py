import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same


def tree(rng, root):
    """Files with duplicates; returns name -> (content, mode)."""
    contents = [rng.randbytes(rng.choice([10, 10, 500, 70_000])) for _ in range(6)]
    made = {}
    for number in range(40):
        name = f"{rng.choice(['', 'a/', 'a/b c/', 'z/', '-d/'])}f{number} x{rng.choice(['', '.jpg', chr(0xE9)])}"
        content = rng.choice([*contents, b"", rng.randbytes(10)])
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        mode = rng.choice([0o644, 0o644, 0o600])
        path.chmod(mode)
        made[name] = (content, mode)
    return made


def links_duplicates():
    rng = random.Random()
    with copy_of() as work:
        for turn in range(3):
            root = work / f"fresh {turn}"
            root.mkdir()
            made = tree(rng, root)
            (root / "alias").symlink_to(next(iter(made)))
            (root / "outside").symlink_to(work)
            give(root)
            unique = root / "unreadable"
            unique.write_bytes(b"s" * 123_457)  # root's, and of a size that no other has: reading it fails
            unique.chmod(0)
            groups = {}
            for name, (content, mode) in made.items():
                if content:
                    groups.setdefault((content, mode), []).append(name)
            keepers = {key: min(names, key=os.fsencode) for key, names in groups.items()}
            inodes = {key: (root / name).stat().st_ino for key, name in keepers.items()}
            replaced = [(len(key[0]), name) for key, names in groups.items() for name in names if name != keepers[key]]
            code, out, err = run([sys.executable, "dedupe.py", root.name], cwd=work)
            same(
                (code, out),
                (0, f"saved {sum(size for size, _ in replaced)} bytes in {len(replaced)} files\n"),
                err[-300:],
            )
            for key, names in groups.items():
                same({(root / name).stat().st_ino for name in names}, {inodes[key]}, f"inodes of {names}")
            for name, (content, mode) in made.items():
                same(((root / name).read_bytes() == content, (root / name).stat().st_mode & 0o777), (True, mode), name)
            empty = [name for name, (content, _) in made.items() if not content]
            same(len({(root / name).stat().st_ino for name in empty}), len(empty), "empty files")
            expected = {*made, "alias", "outside", "unreadable"}
            found = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file()}
            same(found, expected, "names")
            same((root / "alias").is_symlink(), True)
            again = run([sys.executable, "dedupe.py", root.name], cwd=work)
            same(again[:2], (0, "saved 0 bytes in 0 files\n"), "a second run")


main(links_duplicates)
