import os
import random
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same


def numbers(store):
    return sorted(int(p.name[7:-7]) for p in store.glob("backup-*.tar.gz") if p.is_file() and p.name[7:-7].isdigit())


def rotates():
    rng = random.Random()
    with copy_of() as work:
        source = work / "the data"
        (source / "sub folder").mkdir(parents=True)
        texts = {"x y.txt": str(rng.random()), "sub folder/z": str(rng.random()), "-n": "dash"}
        for name, text in texts.items():
            (source / name).write_text(text)
        give(source)
        store = work / "the store"
        for turn in range(1, 14):
            code, out, err = run(["./rotate.sh", "the data", "the store", 3], cwd=work)
            same((code, Path(out.strip()).name), (0, f"backup-{turn}.tar.gz"), err[-300:])
            same(numbers(store), list(range(max(1, turn - 2), turn + 1)))
        with tarfile.open(store / "backup-13.tar.gz") as archive:
            got = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers() if m.isfile()}
        same(got, {f"the data/{name}": text for name, text in texts.items()})
        same(sorted(os.listdir(store)), [f"backup-{n}.tar.gz" for n in (11, 12, 13)], "files in the store")


def touches_nothing_else():
    with copy_of() as work:
        store = work / "s"
        store.mkdir()
        others = ["backup-x.tar.gz", "backup-3.tar.gz.part", "notes.txt", "backup-1.tar.bz2", "old backup-2.tar.gz"]
        for name in [*others, "backup-5.tar.gz", "backup-40.tar.gz"]:
            (store / name).write_text("kept")
        (store / "backup-99.tar.gz").mkdir()
        (work / "src").mkdir()
        give(work)
        code, _, err = run(["./rotate.sh", "src", "s", 2], cwd=work)
        same(code, 0, err[-300:])
        same(sorted(os.listdir(store)), sorted([*others, "backup-40.tar.gz", "backup-41.tar.gz", "backup-99.tar.gz"]))
        same((store / "backup-40.tar.gz").read_text(), "kept")


def refuses_nonsense():
    with copy_of() as work:
        (work / "src").mkdir()
        give(work)
        before = sorted(os.listdir(work))
        for arguments in (
            ("missing", "s", "2"),
            ("src", "s", "0"),
            ("src", "s", "x"),
            ("src", "s", "-1"),
            ("rotate.sh", "s", "2"),
        ):
            code, out, err = run(["./rotate.sh", *arguments], cwd=work)
            same((code, out, bool(err)), (1, "", True), str(arguments))
        same(sorted(os.listdir(work)), before)


main(rotates, touches_nothing_else, refuses_nonsense)
