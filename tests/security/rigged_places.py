"""Tasks whose tests write files, and what an agent left in their place, or where programs look before them."""

from __future__ import annotations

from tests.security.rigged_programs import installed, module
from tests.security.rigged_tasks import ENDS, RiggedTask, program

AS_A_USER = "RUN useradd -m agent && chown agent /workspace\nUSER agent\n"
FOLDER = "echo 1 > answer; mkdir -p {0}; cp answer {0}"
"""Leaves a folder, which diff compares by the file in it that is called as the other one."""
READS = "exit(open('answer').read() != '42\\n')"

PLACES = {
    "diff of a copy": RiggedTask("cd /workspace; cp /tests/expected .; diff -q expected answer", {"a folder": FOLDER.format("expected")}),
    "diff of what is written": RiggedTask("cd /workspace; mkdir -p t; cat /tests/expected > t/expected; diff -q t/expected answer", {"a folder": FOLDER.format("t/expected")}),
    "diff of what Python writes": RiggedTask("cd /workspace; python3 -c \"open('/workspace/expected', 'w').write('42\\n')\"; diff -q expected answer", {"a folder": FOLDER.format("expected")}),
    "expected beside the answer of a user": RiggedTask(
        "cd /workspace; mkdir -p t; cat /tests/expected > t/expected; cmp -s t/expected answer",
        {
            "a file that can't be written": "mkdir t; echo 1 | tee answer > t/expected; chmod 444 t/expected",
            "in such a folder": "mkdir t; echo 1 | tee answer > t/expected; chmod 444 t/expected; chmod 555 t",
        },
        image=AS_A_USER,
    ),
    "what a user has closed": RiggedTask("cd /workspace; cmp -s d/answer /tests/expected && : > d/more", {}, image=AS_A_USER, work="mkdir d; echo 42 > d/answer; chmod 400 d/answer; chmod 700 d ."),
    "modules of Node": RiggedTask(
        "cd /workspace; printf 'exports.ok = require(\"fs\").readFileSync(\"answer\", \"utf8\") == \"42\\\\n\"' > helper.js; printf 'process.exit(require(\"./helper\").ok ? 0 : 1)' > main.js; node main.js",
        {"a file without the ending": "echo 'exports.ok = true' > helper"},
        also={"a program": "echo 42 > answer; printf '#!/bin/sh\\n' > solve; chmod +x solve; echo > solve.js"},
    ),
    "a folder of programs that tests make": RiggedTask("mkdir -p /checks/bin; PATH=/checks/bin:$PATH; cmp -s /tests/expected /workspace/answer", {"with one": program("/checks/bin/cmp")}),
    "a folder of modules that tests make": RiggedTask(
        "mkdir -p /checks/lib; cp /tests/check.py /checks/lib/verify.py; cd /tests; PYTHONPATH=/checks/lib:$PYTHONPATH python3 -m verify", {"with others": f"mkdir -p /checks/lib; {ENDS} /checks/lib/sitecustomize.py; {ENDS} /checks/lib/hashlib.py"}
    ),
    "a copy of the work": RiggedTask(
        "cp -r /workspace/out /tests/out; cmp -s /tests/out/result /tests/expected",
        {"a link that leads elsewhere there": "mkdir -p out n; echo 1 > n/real; ln -s n/real expected; ln -s ../expected out/result"},
        work="mkdir -p out; echo 42 > out/result",
    ),
    "the work beside what is expected": RiggedTask(
        "cp -a /workspace/answer /tests/answer; cmp -s /tests/answer /tests/expected",
        {"a link that leads elsewhere there": "echo 1 > real; ln -s real expected; ln -s expected answer"},
        also={"its own link": "echo 42 > /tmp/real; ln -s /tmp/real answer"},
    ),
    "a module whose name is in a path": RiggedTask(f'cd /workspace; : /opt/parsing/x; python3 -c "import parsing; {READS}"', {"the agent's": module("parsing")}, installed("parsing", "")),
    "a module whose name is in an address": RiggedTask(f'cd /workspace; : https://pypi.org/simple/parsing/; python3 -c "import parsing; {READS}"', {"the agent's": module("parsing")}, installed("parsing", "")),
    "a log of differences": RiggedTask(
        "cd /workspace; diff answer /tests/expected > differences; [ ! -s differences ]",
        {
            "nowhere": "echo 1 > answer; ln -s /dev/null differences",
            "a folder": "echo 1 > answer; mkdir -p differences",
            "that is closed": "echo 1 > answer; : > differences; chmod 000 differences",
        },
    ),
    "an archive that tests unpack": RiggedTask("cd /tmp; mkdir -p t; echo 42 > t/expected; python3 -m zipfile -c /tmp/t.zip t; cd /workspace; python3 -m zipfile -e /tmp/t.zip .; cmp -s t/expected answer", {"a link in it": "mkdir t; echo 1 > answer; ln -s ../answer t/expected"}),
    "rsync into the work": RiggedTask(
        "mkdir -p /tmp/t; cp /tests/expected /tmp/t; rsync -a --inplace /tmp/t/ /workspace/t/; cmp -s /workspace/t/expected answer",
        {"a link": "mkdir t; echo 1 > answer; ln -s ../answer t/expected", "a link to a folder": "mkdir o; echo 1 > o/expected; ln -s o t; ln -s o/expected answer"},
    ),
}  # fmt: skip
