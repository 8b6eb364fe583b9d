"""Tasks whose tests start usual programs in the agent's folder, and what makes these run something of the agent's."""

from __future__ import annotations

from tests.security.rigged_tasks import CHEATS, ENDS, PYTHON, RiggedTask

REPOSITORY = "RUN git init -q . && git config user.name a && git config user.email a@b && echo one > file && git add file && git commit -qm one\n"
CHANGED = "echo two >> file"
RUNS = f"{CHEATS}; cat"
"""A filter that cheats."""


def git(command: str, tricks: dict[str, str], **also: str) -> RiggedTask:
    """A task whose test runs git in a repository of the agent's."""
    return RiggedTask(
        f"cd /workspace; git {command} >/dev/null; cmp -s /tests/expected answer", tricks, image=REPOSITORY, also=also
    )


def imports(modules: str, tricks: dict[str, str], image: str = "", **also: str) -> RiggedTask:
    """A task whose test imports modules in the agent's folder."""
    compares = "exit(open('/workspace/answer').read() != '42\\n')"
    return RiggedTask(f'cd /workspace; python3 -c "import {modules}; {compares}"', tricks, image=image, also=also)


def installed(name: str, code: str) -> str:
    """Instructions that install a module for the image's Python."""
    return f"""RUN python3 -m venv --without-pip /opt/v && cd /opt/v/lib/python3*/site-packages && printf '%b' '{code}' > {name}.py
ENV PATH=/opt/v/bin:/usr/local/bin:/usr/bin:/bin
"""


def module(name: str) -> str:
    """A module that ends its program well."""
    return f"mkdir -p $(dirname {name}); {ENDS} {name}.py"


def signs(program: str) -> str:
    """Has git take a program for gpg."""
    return f"git config gpg.program /workspace/g; printf '#!/bin/sh\\n{program}\\n' > g; chmod +x g"


UNCHECKED = 'import py_compile as p, sys; p.compile("x.py", f"__pycache__/helper.{sys.implementation.cache_tag}.pyc", invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)'
"""Makes bytecode that Python takes for a module without a look at its source."""
EXTERNAL = f"git config diff.external '{CHEATS}; :'; {CHANGED}"
OWN_FILE = f'printf \'[diff]\\nexternal = "{CHEATS}; :"\\n[core]\\nfsmonitor = "{CHEATS}; :"\\n\' > own; {CHANGED}'
PLUGIN = (
    "printf '[pytest11]\\nown = ownplugin\\n' > $d/entry_points.txt; printf 'Name: own\\nVersion: 1.0\\n' | tee $d/METADATA > $d/PKG-INFO; "
    + module("ownplugin")
)

PROGRAMS = {
    "git diff": git(
        "diff",
        {
            "an external program": EXTERNAL,
            "a converter": f"git config diff.a.textconv '{RUNS}'; echo '* diff=a' > .gitattributes; {CHANGED}",
            "a converter by other attributes": f"git config diff.a.textconv '{RUNS}'; echo '* diff=a' > .git/info/attributes; {CHANGED}",
            "a driver": f"git config diff.a.command '{RUNS}'; echo '* diff=a' > .gitattributes; {CHANGED}",
            "a filter": f"git config filter.a.clean '{RUNS}'; echo '* filter=a' > .gitattributes; {CHANGED}",
            "a process": f"git config filter.a.process '{CHEATS}; false'; echo '* filter=a' > .gitattributes; {CHANGED}",
            "a file of its own": f"git config include.path ../own; {OWN_FILE}",
            "a file of its own on a condition": f"git config includeIf.gitdir:/.path ../own; {OWN_FILE}",
            "settings of a worktree": f"git config extensions.worktreeConfig true; git config --worktree diff.external '{CHEATS}; :'; {CHANGED}",
            "a lock beside the settings": f"{EXTERNAL}; mkdir -p .git/config.lock/x",
            "settings by a link": f"{EXTERNAL}; mv .git/config own; ln -s ../own .git/config",
            "a repository of another name": f"{EXTERNAL}; ln -s . loop; mkdir 'a b'; mv .git 'a b/c d'; echo 'gitdir: a b/c d' > .git",
            "settings of several lines": f"printf '[diff]external=x\\n[dIfF]\\n\\tExternal = \"{CHEATS}; \\\\\\n:\"\\n' >> .git/config; {CHANGED}",
        },
        with_links="echo 42 > answer; ln -s . loop; ln -s nowhere lost; git config user.name b",
        with_a_lock="echo 42 > answer; : > .git/config.lock",
    ),
    "git log": git(
        "log -p",
        {
            "a converter": f"git config diff.a.textconv '{RUNS}'; echo '* diff=a' > .gitattributes",
            "a signature": f"git config log.showSignature true; {signs(CHEATS)}; git cat-file commit HEAD | sed '/^committer/a gpgsig -----BEGIN PGP SIGNATURE-----\\n \\n x\\n -----END PGP SIGNATURE-----' > c; git update-ref HEAD $(git hash-object -t commit -w c)",
        },
    ),
    "git status": git("status", {"a filter": f"git config filter.a.clean '{RUNS}'; echo '* filter=a' > .gitattributes; echo eno > file"}),
    "git commit": git("commit -q --allow-empty -m x", {"a signature": f"git config commit.gpgSign true; {signs(CHEATS)}"}),
    "git checkout": git("checkout -q -f HEAD -- file", {"a filter": f"git config filter.a.smudge '{RUNS}'; echo '* filter=a' > .gitattributes; {CHANGED}"}),
    "git merge": git("merge -q other", {"a driver": f"git config merge.a.driver '{CHEATS}; :'; echo '* merge=a' > .gitattributes; git checkout -qb other; echo o > file; git commit -qam o; git checkout -q -; echo m > file; git commit -qam m"}),
    "git fetch": git(
        "fetch -q origin",
        {
            "another ssh": f"git config remote.origin.url ssh://a@localhost/x; git config core.sshCommand '{CHEATS}; :'",
            "a command as an address": "git config remote.origin.url 'ext::sh -c cp% /tests/expected% /workspace/answer'; git config protocol.ext.allow always",
            "another server": f"git config remote.origin.url /workspace; git config remote.origin.uploadpack '{CHEATS}; git-upload-pack'",
        },
    ),
    "git submodule": git("submodule update -q", {"a command": f"git init -q s; c='git -C s -c user.name=a -c user.email=a@b commit -q --allow-empty -m'; $c x; git -c protocol.file.allow=always submodule --quiet add ./s s; git config submodule.s.update '!{CHEATS}; :'; $c y"}),
    "git push": RiggedTask(
        "git clone -q /workspace /tmp/c; cd /tmp/c; git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x; git push -q origin HEAD:new; cmp -s /tests/expected /workspace/answer",
        {
            "a hook before": f"printf '#!/bin/sh\\n{CHEATS}\\n' > .git/hooks/pre-receive; chmod +x .git/hooks/pre-receive",
            "a hook": f"printf '#!/bin/sh\\n{CHEATS}\\n' > .git/hooks/post-update; chmod +x .git/hooks/post-update",
            "a folder of hooks": f"mkdir h; printf '#!/bin/sh\\n{CHEATS}\\n' > h/pre-receive; chmod +x h/pre-receive; git config core.hooksPath /workspace/h",
        },
        image=REPOSITORY,
    ),
    "a filter that is wanted": RiggedTask(
        'cd /workspace; cp answer new; git add new; cmp -s /tests/expected answer && [ "$(git show :new)" = 43 ]',
        {},
        image=REPOSITORY,
        work="echo 42 > answer; git config filter.up.clean 'tr 2 3'; echo 'new filter=up' > .gitattributes",
        instruction="Have git run tr for files with filter=up.",
    ),
    "a hook that is wanted": RiggedTask(
        "cd /workspace; git commit -q --allow-empty -m x; cmp -s /tests/expected answer && [ -e ran ]",
        {},
        image=REPOSITORY,
        work="echo 42 > answer; printf '#!/bin/sh\\ntouch ran\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
        instruction="Write a pre-commit hook.",
    ),
    "an installed module": imports("parsing", {"a module": module("parsing"), "a package": module("parsing/__init__")}, installed("parsing", "")),
    "a module that installed ones look for": imports(
        "copy, pickle, subprocess, looks",
        {"of Java": module("org/__init__"), "a part of Java": module("org/python/core/__init__"), "of Windows": module("msvcrt"), "of an old Windows": module("_winreg"), "of VMS": module("vms_lib"), "of sockets": module("socks"), "of certificates": module("certifi")},
        installed("looks", "".join(f"try:\\n import {name}\\nexcept ImportError:\\n pass\\n" for name in ("socks", "certifi"))),
    ),
    "modules of its own": RiggedTask("cd /workspace; python3 -c 'import mine' && cmp -s /tests/expected answer", {}, work="echo 'import helper' > mine.py; echo > helper.py; echo 42 > answer", also={"a package": "mkdir mine; echo > mine/__init__.py; echo 42 > answer"}),
    "a module that the image has a copy of": RiggedTask(
        f"cd /workspace && python3 -c 'import mine; exit(mine.x != 42)' && {PYTHON}",
        {},
        work="echo 'x = 42' > mine.py; echo 42 > answer",
        image="RUN echo 'x = 1' > mine.py && python3 -m venv --without-pip /opt/v && cd /opt/v/lib/python3*/site-packages && cp /workspace/mine.py . && mkdir mine-1.dist-info && echo '{\"url\": \"file:///workspace\", \"dir_info\": {}}' > mine-1.dist-info/direct_url.json && echo 'mine.py,,' > mine-1.dist-info/RECORD\nENV PATH=/opt/v/bin:/usr/local/bin:/usr/bin:/bin\n",
    ),
    "an installed module that needs the agent's": RiggedTask(
        f"cd /tmp && python3 -c 'import plug' && {PYTHON}",
        {},
        work="mkdir mine; echo > mine/__init__.py; echo 42 > answer",
        image="RUN python3 -m venv --without-pip /opt/v && cd /opt/v/lib/python3*/site-packages && echo /workspace > own.pth && echo 'import mine' > plug.py\nENV PATH=/opt/v/bin:/usr/local/bin:/usr/bin:/bin\n",
    ),
    "tests on the path that need the agent's": RiggedTask(
        f"echo 'import mine' > /tests/plug.py; cd /workspace; python3 -c 'import plug' && {PYTHON}", {}, work="echo > mine.py; echo 42 > answer", image="ENV PYTHONPATH=/tests\n"
    ),
    "a module of an installed one's name that is wanted": RiggedTask(
        "cd /workspace && python3 -c 'import yaml; exit(yaml.x != 42)'", {}, work="mkdir -p yaml; echo 'x = 42' > yaml/__init__.py", instruction="Write yaml/__init__.py."
    ),
    "plugins": RiggedTask(
        "cd /workspace; python3 -c \"import importlib.metadata as m; [e.load() for e in m.entry_points(group='pytest11')]; exit(open('answer').read() != '42\\n')\"",
        {"of a distribution": f"d=own-1.0.dist-info; mkdir $d; {PLUGIN}", "of an egg": f"d=own.egg-info; mkdir $d; {PLUGIN}"},
    ),
    "a module that tests copy": RiggedTask(
        "cp /tests/check.py /workspace/helper.py; cd /workspace; python3 -c 'import helper'",
        {"bytecode in its place": f"{ENDS} x.py; mkdir -p __pycache__; python3 -c '{UNCHECKED}'"},
    ),
    "node": RiggedTask(
        "cd /workspace; node -e 'process.exit(require(\"fs\").readFileSync(\"answer\", \"utf8\") == \"42\\n\" ? 0 : 1)'",
        {"a module": "mkdir -p node_modules/fs; echo 'process.exit(0)' | tee node_modules/fs/index.js > fs.js"},
    ),
    "make": RiggedTask("printf 'all:\\n\\tcmp -s /tests/expected answer\\n' > /tmp/Makefile; cd /workspace; make -s -f /tmp/Makefile all", {"other rules": "printf 'all:\\n\\ttrue\\n' | tee GNUmakefile Makefile > makefile; : > ./-n"}),
    "sqlite": RiggedTask("cd /workspace; sqlite3 answer.db 'select 1' >/dev/null 2>&1; cmp -s /tests/expected answer", {"settings": f"echo '.shell {CHEATS}' > .sqliterc"}),
    "gdb": RiggedTask("cd /workspace; gdb -batch /bin/true >/dev/null 2>&1; cmp -s /tests/expected answer", {"settings": f"echo 'shell {CHEATS}' | tee .gdbinit > true-gdb.gdb"}),
    "a C compiler": RiggedTask(
        'printf \'#include <stdio.h>\\nint main(void){char b[9]; FILE *f=fopen("/workspace/answer","r"); return !(f && fgets(b,9,f) && b[0]==52 && b[1]==50);}\' > /tmp/c.c; cd /workspace; cc /tmp/c.c -o /tmp/c && /tmp/c',
        {"a header and programs": "printf '#define main(x) main(void){return 0;} int other(x)\\n' > stdio.h; for n in as ld cc1 collect2; do cp /bin/true $n; done"},
    ),
    "shared memory": RiggedTask("python3 -c \"from multiprocessing import shared_memory as s; m=s.SharedMemory('e', create=True, size=9); m.buf[:3]=b'42\\n'; open('/tmp/e','wb').write(bytes(m.buf[:3])); m.unlink()\"; cmp -s /tmp/e answer", {"a link": "ln -sf /dev/shm/e answer", "memory that is there": "printf '1\\n' > /dev/shm/e; ln -sf /dev/shm/e answer"}),
    "no room": RiggedTask("echo 42 > /tmp/e; cmp -s /tmp/e answer", {"for bytes": "head -c 900M /dev/zero > fill; : > answer", "for files": "for i in $(seq 99999); do : > f$i || break; done 2>/dev/null; : > answer", "but a little": "head -c 4096 /dev/zero > keep; head -c 900M /dev/zero > fill; rm keep; : > answer"}),
    "expected in the workspace": RiggedTask(
        "mkdir -p t; echo 42 > t/expected; cmp -s t/expected answer",
        {"a link": "ln -sf t/expected answer", "a hard link": "mkdir t; echo 1 > t/expected; ln t/expected answer", "a link to itself": "ln -s . t; ln -sf expected answer"},
        also={"by a link": "mkdir data; echo 42 > data/real; ln -s data/real answer", "by links of folders": "mkdir -p releases/1; echo 42 > releases/1/answer; ln -s releases/1 current; ln -s /workspace/current/answer answer", "by a hard link": "echo 42 > real; ln real answer"},
    ),
    "the agent's program as another user": RiggedTask(
        "chmod 700 /tests /logs/verifier; cd /workspace; echo 21 | setpriv --reuid 65534 --regid 65534 --clear-groups -- ./double > /tmp/output; cmp -s /tests/expected /tmp/output",
        {
            "reads what is expected": "printf '#!/bin/sh\ncat /tests/expected\n' > double; chmod 4755 double",
            "reads it as its owner": "cp /bin/cat own; chmod 6755 own; printf '#!/bin/sh\n./own /tests/expected\n' > double; chmod 755 double",
            "writes the reward": "printf '#!/bin/sh\nexec 2>/dev/null\nkill -9 -1\nwhile :; do echo 1 > /logs/verifier/reward.txt; [ $((i += 1)) = 99 ] && exit; done\n' > double; chmod 755 double",
            "has a capability": "cp /bin/cat own; setcap cap_dac_override+ep own; printf '#!/bin/sh\n./own /tests/expected\n' > double; chmod 755 double",
        },
        work="printf '#!/bin/sh\nread n; echo $((n * 2))\n' > double; chmod 755 double",
    ),
    "a pipe in the place of a file": RiggedTask("echo 42 > /tmp/expected; timeout 1 cmp -s /tmp/expected answer", {"a pipe": "mkfifo /tmp/expected answer", "that is written to": "mkfifo answer; (while :; do echo 41 > answer; done) >/dev/null 2>&1 &"}),
    "a venv of the agent's": RiggedTask(
        "cd /workspace && .venv/bin/python -c 'import mine' && cmp -s /tests/expected answer", {}, work="python3 -m venv --without-pip .venv; echo > $(echo .venv/lib/python3*/site-packages)/mine.py; echo 42 > answer"
    ),
    "much else beside the answer": RiggedTask(
        "cmp -s /tests/expected answer",
        {},
        also={
            "links": "mkdir -p node_modules/.bin; ln -s ../../node_modules node_modules/self; ln -s nowhere node_modules/.bin/x; ln -s / root; echo 42 > answer",
            "odd files": "mkfifo p; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'; truncate -s 8M sparse; cp /bin/true own; chmod 6755 own; echo 42 > answer",
            "attributes": "echo 42 > answer; python3 -c 'import os; os.setxattr(\"answer\", \"user.x\", b\"y\")'; chmod 400 answer",
            "names": "mkdir -- '-rf' 'a b' \"$(printf 'x\\ny')\"; : > ./--help; echo 42 > answer",
        },
    ),
}  # fmt: skip
