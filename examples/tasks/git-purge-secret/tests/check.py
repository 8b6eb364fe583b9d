import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same

KEY = "sk-live-9f8e7d6c5b4a"
MAIN = ["Start", "Add configuration", "Answer pings", "Debug on", "Readme"]
FEATURE = ["Start", "Add configuration", "Answer pings", "Begin feature", "Limit in configuration"]


def git(work, *arguments):
    code, out, err = run(["git", *arguments], cwd=work / "service")
    same(code, 0, err[-300:])
    return out


def key_is_nowhere():
    with copy_of() as work:
        every = git(work, "cat-file", "--batch-all-objects", "--unordered", "--batch-check=%(objectname) %(objecttype)")
        names = [line.split()[0] for line in every.splitlines() if line.endswith(("blob", "commit", "tag"))]
        assert len(names) > 10, "objects are missing"
        code, out, _ = run(["git", "cat-file", "--batch"], cwd=work / "service", text="\n".join(names) + "\n")
        same(code, 0)
        same(KEY in out, False, "the key is in the object database")
        for path in (work / "service").rglob("*"):
            if path.is_file() and not path.is_symlink() and KEY.encode() in path.read_bytes():
                raise AssertionError(f"the key is in {path.name}")


def history_is_kept():
    with copy_of() as work:
        for branch, subjects in (("main", MAIN), ("feature", FEATURE)):
            same(git(work, "log", "--reverse", "--format=%s", branch).splitlines(), subjects, branch)
            same(set(git(work, "log", "--format=%an %ae", branch).splitlines()), {"Kim kim@example.org"})
        dates = git(work, "log", "--reverse", "--date=format-local:%d", "--format=%ad", "main").split()
        same(dates, ["01", "02", "03", "04", "07"])
        fork = git(work, "merge-base", "main", "feature").strip()
        same(git(work, "log", "-1", "--format=%s", fork).strip(), "Answer pings")
        same(git(work, "rev-parse", "v1^{commit}").strip(), fork, "tag v1")


def content_is_kept():
    with copy_of() as work:
        same(git(work, "show", "main:config.env"), "PORT=8080\nAPI_KEY=REMOVED\nDEBUG=1\n")
        same(git(work, "show", "feature:config.env"), "PORT=8080\nAPI_KEY=REMOVED\nDEBUG=0\nLIMIT=5\n")
        same(git(work, "show", "v1:config.env"), "PORT=8080\nAPI_KEY=REMOVED\nDEBUG=0\n")
        same(git(work, "show", "main:service.py"), 'print("service")\ndef ping(): return "pong"\n')
        same(git(work, "show", "feature:feature.txt"), "feature\n")
        same(git(work, "show", "main:README.md"), "docs\n")


main(key_is_nowhere, history_is_kept, content_is_kept)
