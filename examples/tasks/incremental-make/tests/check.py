import os
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same

CC = """#!/bin/bash
for word in "$@"; do case $word in *.c) echo "$(basename "$word")" >> "$CCLOG";; -o) link=1;; esac; done
case " $* " in *" -c "*|*" -M "*|*" -MM "*) ;; *) echo LINK >> "$CCLOG";; esac
exec cc "$@"
"""


def compiled(work, *arguments):
    log = work / "cc.log"
    log.write_text("")
    give(log)
    code, _, err = run(["make", f"CC={work}/cc", "CFLAGS=-O0", *arguments], cwd=work, env={"CCLOG": str(log)})
    same(code, 0, err[-300:])
    return sorted(line for line in log.read_text().split() if line)


def change(work, name, text=""):
    path = work / "src" / name
    path.write_text((path.read_text() if path.exists() else "") + text)
    give(path)
    now = time.time() - 1
    os.utime(path, (now, now))


def age(work):
    """As if everything had been built a while ago."""
    for folder, _, files in os.walk(work):
        for name in files:
            path = os.path.join(folder, name)
            seen = os.stat(path)
            os.utime(path, ns=(seen.st_atime_ns - 10**10, seen.st_mtime_ns - 10**10))


def builds_only_what_changed():
    value = random.randrange(100, 10_000)
    with copy_of() as work:
        shutil.rmtree(work / "build", ignore_errors=True)
        (work / "cc").write_text(CC)
        (work / "cc").chmod(0o755)
        same(compiled(work), ["LINK", "answer.c", "extra.c", "greet.c", "main.c"], "first build")
        same(run(["build/app"], cwd=work)[:2], (0, "hello 42\n"))
        age(work)
        same(compiled(work), [], "nothing changed")
        change(work, "extra.c", "\n")
        same(compiled(work), ["LINK", "extra.c"], "a source changed")
        age(work)
        change(work, "greet.h", "\n")
        same(compiled(work), ["LINK", "greet.c", "main.c"], "a header changed")
        age(work)
        header = work / "src/answer.h"
        header.write_text(header.read_text().replace("42", str(value)))
        change(work, "answer.h")
        same(compiled(work), ["LINK", "answer.c", "greet.c", "main.c"], "an indirect header changed")
        same(run(["build/app"], cwd=work)[:2], (0, f"hello {value}\n"))
        age(work)
        change(work, "added.c", '#include "added.h"\nint added(void) { return ADDED; }\n')
        change(work, "added.h", "#define ADDED 1\n")
        same(compiled(work), ["LINK", "added.c"], "a source was added")
        compiled(work, "clean")
        same((work / "build").exists(), False, "build/ after make clean")


main(builds_only_what_changed)
