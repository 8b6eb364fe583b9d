"""What developers do all day, each as a script of bash that fails where a step of it does.

They run as root in an empty folder of a slot on the workshop (`workshop.py`), with a network that leads to package registries. Ports and files
of two never meet: each has a lease of its own.
"""

from __future__ import annotations

WAIT = """
wait_for() { for i in $(seq 300); do if "$@" > /dev/null 2>&1; then return; fi; sleep 0.1; done; echo "never: $*" >&2; return 1; }
"""
"""Before every script: `wait_for COMMAND...` until it succeeds, 30 seconds at most."""
SSHD = """
mkdir -p -m 700 /run/sshd ~/.ssh; ssh-keygen -A > /dev/null; [ -e ~/.ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys; printf 'Host *\\nStrictHostKeyChecking accept-new\\n' > ~/.ssh/config
/usr/sbin/sshd 2> /dev/null || true; wait_for ssh localhost true
"""
PACKAGES = {
    "apt": "apt-get -qq update; apt-get -qq install -y --no-install-recommends hello > log 2>&1; hello | grep Hello",
    "dpkg": """
mkdir -p d/DEBIAN d/usr/bin; printf '#!/bin/sh\\necho mine\\n' > d/usr/bin/mine; chmod +x d/usr/bin/mine
printf 'Package: mine\\nVersion: 1\\nArchitecture: all\\nMaintainer: me\\nDescription: mine\\n' > d/DEBIAN/control
dpkg-deb --build d > /dev/null; dpkg -i d.deb > /dev/null; mine; dpkg -r mine > /dev/null""",
    "pip, in a venv": "python3 -m venv v; v/bin/pip install -q six; v/bin/python -c 'import six; print(six.__version__)'",
    "pip, for the system": "pip install -q --break-system-packages --root-user-action ignore six; python3 -c 'import six'",
    "pip, a C extension": """
printf '[build-system]\\nrequires = ["setuptools"]\\nbuild-backend = "setuptools.build_meta"\\n[project]\\nname = "fast"\\nversion = "1"\\n' > pyproject.toml
printf 'from setuptools import Extension, setup\\nsetup(ext_modules=[Extension("fast", ["fast.c"])])\\n' > setup.py
printf '#include <Python.h>\\nstatic struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "fast", 0, -1, 0};\\nPyMODINIT_FUNC PyInit_fast(void) { return PyModule_Create(&d); }\\n' > fast.c
python3 -m venv v; v/bin/pip install -q .; cd /; OLDPWD=$OLDPWD "$OLDPWD/v/bin/python" -c 'import fast'""",
    "uv": "python3 -m venv v; v/bin/pip install -q uv; PATH=$PWD/v/bin:$PATH; uv init -q p; cd p; uv add -q six; uv run -q python -c 'import six'; uv tree",
    "pipx": "pipx install -q cowsay; ~/.local/bin/cowsay -t 42 | grep 42",
    "poetry": """
export POETRY_VIRTUALENVS_IN_PROJECT=1; poetry new -q a; echo 'A = 42' > a/src/a/__init__.py; pip wheel -q ./a
mkdir b; cd b; poetry init -q -n --name b --python '>=3.13'; poetry add -q ../a-*.whl
poetry run python -c 'import a; print(a.A)' | grep 42""",
    "pytest": "python3 -m venv v; v/bin/pip install -q pytest pytest-xdist; echo 'def test_a(): assert 6 * 7 == 42' > test_a.py; v/bin/pytest -q -n 2",
    "numpy": "python3 -m venv v; v/bin/pip install -q numpy; v/bin/python -c 'import numpy; a = numpy.ones((300, 300)); print((a @ a).sum())'",
    "npm": "npm init -y > log; npm install --silent is-number; node -e 'console.log(require(\"is-number\")(42))' | grep true",
    "npm, for the system": "npm install --silent --global cowsay; cowsay 42 | grep 42",
    "pnpm": "npm install --silent --global pnpm@9; pnpm init > log; pnpm add --silent is-number; node -e 'console.log(require(\"is-number\")(42))' | grep true",
    "yarn": "yarnpkg init -y > log; yarnpkg add --silent is-number; node -e 'console.log(require(\"is-number\")(42))' | grep true",
    "TypeScript": "npm init -y > log; npm install --silent typescript@5; echo 'const a: number = 42; console.log(a)' > a.ts; npx tsc a.ts; node a.js | grep 42",
    "esbuild, a binary of a package": "npm init -y > log; npm install --silent esbuild@0.25; echo 'export default 42; console.log(42)' > a.js; npx esbuild --bundle a.js | node | grep 42",
    "cargo": "cargo init -q --name p; cargo add -q itoa@1; echo 'fn main() { println!(\"{}\", itoa::Buffer::new().format(42)); } #[test] fn t() {}' > src/main.rs; cargo run -q | grep 42; cargo test -q",
    "go": """
go mod init p 2> log; go get -v github.com/google/uuid@v1.6.0 2>> log
printf 'package main\\nimport "github.com/google/uuid"\\nfunc main() { println(uuid.Nil.String()) }\\n' > m.go; go run . 2>&1 | grep 0000""",
    "Maven": """
mkdir -p src/main/java src/test/java
cat > pom.xml <<'END'
<project><modelVersion>4.0.0</modelVersion><groupId>g</groupId><artifactId>a</artifactId><version>1</version>
<properties><maven.compiler.release>17</maven.compiler.release><project.build.sourceEncoding>UTF-8</project.build.sourceEncoding></properties>
<dependencies><dependency><groupId>junit</groupId><artifactId>junit</artifactId><version>4.13.2</version><scope>test</scope></dependency></dependencies>
</project>
END
echo 'public class A { public static int f() { return 42; } }' > src/main/java/A.java
echo 'public class ATest { @org.junit.Test public void f() { org.junit.Assert.assertEquals(42, A.f()); } }' > src/test/java/ATest.java
mvn -B -ntp test | grep 'Tests run: 1, Failures: 0, Errors: 0'""",
    "Gradle": """
mkdir -p src/main/java; echo 'class A { public static void main(String[] a) { System.out.println(6 * 7); } }' > src/main/java/A.java
printf 'apply plugin: "java"\\ntask go(type: JavaExec) { classpath = sourceSets.main.runtimeClasspath; main = "A" }\\n' > build.gradle
gradle --offline -q go | grep 42""",
    "gem and bundler": """
mkdir -p a/lib; echo 'A = 42' > a/lib/a.rb
printf 'Gem::Specification.new { |s| s.name = "a"; s.version = "1"; s.summary = s.author = "a"; s.files = ["lib/a.rb"] }\\n' > a/a.gemspec
(cd a; gem build -q a.gemspec 2> /dev/null; gem install --silent --local --no-document a-1.gem; ruby -e 'require "a"; puts A' | grep 42)
mkdir b; cd b; echo 'gem "a", path: "../a"' > Gemfile; bundle install --quiet; bundle exec ruby -e 'require "a"; puts A' | grep 42""",
    "composer": """
mkdir -p a/src; echo '{"name": "m/a", "version": "1.0.0", "autoload": {"files": ["a.php"]}}' > a/composer.json; echo '<?php const A = 42;' > a/a.php
echo '{"require": {"m/a": "1.0.0"}, "repositories": [{"type": "path", "url": "a"}, {"packagist.org": false}]}' > composer.json
COMPOSER_ALLOW_SUPERUSER=1 composer install -q; php -r 'require "vendor/autoload.php"; echo A;' | grep 42""",
    "cpanm": """
mkdir -p A-1/lib; cd A-1; echo 'package A; our $VERSION = "1"; sub f { 42 } 1;' > lib/A.pm
echo 'use ExtUtils::MakeMaker; WriteMakefile(NAME => "A", VERSION_FROM => "lib/A.pm");' > Makefile.PL
cpanm -q . > log 2>&1; cd /; perl -MA -e 'print A::f()' | grep 42""",
    "R": """
mkdir -p tool/R; printf 'Package: tool\\nVersion: 1.0\\nTitle: A\\nDescription: A.\\nLicense: GPL\\nAuthor: A\\nMaintainer: A <a@b.c>\\n' > tool/DESCRIPTION
echo 'export(f)' > tool/NAMESPACE; echo 'f <- function() cat(42)' > tool/R/f.R; R CMD INSTALL tool > log 2>&1; Rscript -e 'tool::f()' | grep 42""",
}
HELLO = "printf '#include <stdio.h>\\nint main(void) { printf(\"%%d\\\\n\", 6 * 7); return 0; }\\n' > a.c"
BUILDS = {
    "make": f"{HELLO}; printf 'a: a.c\\n\\tcc -o a a.c\\n' > Makefile; make -s -j2; ./a | grep 42; make | grep 'up to date'",
    "CMake with Ninja": f"{HELLO}; printf 'cmake_minimum_required(VERSION 3.20)\\nproject(a C)\\nadd_executable(a a.c)\\nenable_testing()\\nadd_test(a a)\\n' > CMakeLists.txt; cmake -G Ninja -B b > log; cmake --build b > log; ctest --test-dir b | grep '100% tests passed'",
    "CMake with make": f"{HELLO}; printf 'cmake_minimum_required(VERSION 3.20)\\nproject(a C)\\nadd_executable(a a.c)\\ninstall(TARGETS a)\\n' > CMakeLists.txt; cmake -B b > log; cmake --build b -j2 > log; cmake --install b > log; a | grep 42",
    "Meson": f"{HELLO}; printf \"project('a', 'c')\\ntest('a', executable('a', 'a.c'))\\n\" > meson.build; meson setup b > log; meson test -C b | grep -E 'Ok: +1'",
    "autotools": f"{HELLO}; printf 'AC_INIT([a],[1])\\nAM_INIT_AUTOMAKE([foreign])\\nAC_PROG_CC\\nAC_CONFIG_FILES([Makefile])\\nAC_OUTPUT\\n' > configure.ac; printf 'bin_PROGRAMS = a\\na_SOURCES = a.c\\n' > Makefile.am; autoreconf -i 2> log; ./configure > log; make -s; make -s install > log; a | grep 42",
    "SCons": f"{HELLO}; echo 'Program(\"a.c\")' > SConstruct; scons -Q > log; ./a | grep 42",
    "Bazel": f'{HELLO}; touch WORKSPACE; echo \'genrule(name = "g", srcs = ["a.c"], outs = ["o"], cmd = "wc -c < $< > $@")\' > BUILD; bazel --batch build --noshow_progress //:g 2> log || {{ tail log; false; }}; grep [0-9] bazel-bin/o',
    "C#": "echo 'class A { static void Main() { System.Console.WriteLine(6 * 7); } }' > a.cs; mcs a.cs; mono a.exe | grep 42",
    "Java": "echo 'public class A { public static void main(String[] a) { System.out.println(6 * 7); } }' > A.java; javac A.java; java A | grep 42; jar cfe a.jar A A.class; java -jar a.jar | grep 42",
    "C++ with threads": "printf '#include <iostream>\\n#include <thread>\\nint main() { int x = 0; std::thread t([&] { x = 42; }); t.join(); std::cout << x; }\\n' > a.cc; g++ -O2 -pthread -o a a.cc; ./a | grep 42",
    "OpenMP": "printf '#include <stdio.h>\\nint main(void) { int s = 0;\\n#pragma omp parallel for reduction(+:s)\\nfor (int i = 0; i < 42; i++) s++;\\nprintf(\"%%d\", s); }\\n' > a.c; gcc -fopenmp -o a a.c; ./a | grep 42",
    "MPI": """
printf '#include <mpi.h>\\n#include <stdio.h>\\nint main(int c, char **v) { int r, s = 0; MPI_Init(&c, &v); MPI_Comm_rank(MPI_COMM_WORLD, &r); r += 20; MPI_Reduce(&r, &s, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD); if (r == 20) printf("%%d\\\\n", s + 1); MPI_Finalize(); }\\n' > a.c
mpicc -o a a.c; mpirun --allow-run-as-root --oversubscribe -n 2 ./a | grep 42""",
}
SERVERS = {
    "http.server": "python3 -m http.server 8000 > log 2>&1 & wait_for curl -sf localhost:8000; curl -s localhost:8000 | grep 'Directory listing'",
    "uvicorn": "python3 -m venv v; v/bin/pip install -q fastapi uvicorn; printf 'import fastapi\\napp = fastapi.FastAPI()\\n@app.get(\"/\")\\ndef a(): return 42\\n' > a.py; v/bin/uvicorn a:app > log 2>&1 & wait_for curl -sf localhost:8000; curl -s localhost:8000 | grep 42",
    "Node": 'node -e \'require("http").createServer((q, a) => a.end("42")).listen(3000)\' & wait_for curl -sf localhost:3000; curl -s localhost:3000 | grep 42',
    "PHP": "echo '<?php echo 6 * 7;' > index.php; php -S localhost:8080 2> log & wait_for curl -sf localhost:8080; curl -s localhost:8080 | grep 42",
    "nginx": "echo 42 > /var/www/html/index.html; nginx; wait_for curl -sf localhost; curl -s localhost | grep 42; nginx -s quit",
    "PostgreSQL": """
pg_createcluster 17 main > log; pg_ctlcluster 17 main start; wait_for su postgres -c 'psql -c "select 1"'
su postgres -c "psql -qc \\"create role me login password 'x'\\""; PGPASSWORD=x psql -h localhost -U me -Atc 'select 6 * 7' postgres | grep 42""",
    "Redis": "redis-server --daemonize yes > log; wait_for redis-cli ping; redis-cli set a 42; redis-cli get a | grep 42; redis-cli shutdown",
    "memcached": "memcached -u nobody -d; wait_for bash -c ': < /dev/tcp/localhost/11211'; exec 5<>/dev/tcp/localhost/11211; printf 'set a 0 0 2\\r\\n42\\r\\nget a\\r\\nquit\\r\\n' >&5; grep 42 <&5",
    "SQLite": "sqlite3 a.db 'create table t (a); insert into t values (42); pragma journal_mode = wal'; sqlite3 a.db 'select a from t' | grep 42",
    "TLS": "openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -subj /CN=localhost -addext subjectAltName=DNS:localhost 2> log; openssl s_server -quiet -accept 4433 -key k -cert c -www & wait_for curl -sf --cacert c https://localhost:4433; curl -s --cacert c https://localhost:4433 | grep -i TLSv1.3 | head -1",
}
CRASHES = "printf '#include <stdio.h>\\nint f(int a) {\\n  int b = a * 2;\\n  return b;\\n}\\nint main(void) { int c = 0; for (int i = 0; i < 3; i++) c += f(7); printf(\"%%d\\\\n\", c); }\\n' > a.c; gcc -g -O0 -o a a.c"
DEBUGGERS = {
    "gdb": f"{CRASHES}; gdb -nx -batch -ex 'break 4' -ex run -ex 'set var b = 42' -ex bt -ex 'print b' -ex 'watch b' -ex continue -ex delete -ex 'print f(21)' -ex kill ./a | tee log; grep 'f (a=7)' log; grep -c '= 42' log | grep 2",
    "gdb, attached": "sleep 30 & gdb -nx -batch -p $! -ex bt -ex detach 2> /dev/null | grep -E 'nanosleep|main'; kill %1",
    "a core file, by gcore": f"{CRASHES}; sleep 30 & gcore -o core $! > log 2>&1; gdb -nx -batch -ex bt sleep core.$! 2> /dev/null | grep -E '#0'; kill %1",
    "pdb": "printf 'def f(a):\\n    return a * 2\\nprint(f(21))\\n' > a.py; printf 'b f\\nc\\np a + 21\\nc\\nq\\n' | python3 -m pdb a.py | grep 42",
    "jdb and jstack": """
echo 'public class A { public static void main(String[] a) throws Exception { int x = 42; Thread.sleep(60000); } }' > A.java; javac -g A.java
java A & wait_for jstack $!; jstack $! | grep A.main; jcmd $! VM.flags | grep -o MaxHeapSize; kill $!
{ echo 'stop in A.main'; echo run; wait_for grep 'Breakpoint hit' log; echo step; echo quit; } | jdb A > log; grep 'Breakpoint hit' log""",
    "strace": "strace -f -o t sh -c '/bin/true; /bin/true'; grep -c execve t; strace -c ls > log 2>&1; grep total log; sleep 9 & timeout 1 strace -p $! 2>&1 | grep attached",
    "ltrace": f"{CRASHES}; ltrace ./a 2>&1 | grep -E 'printf|puts'",
    "Valgrind": "printf '#include <stdlib.h>\\nint main(void) { char *a = malloc(4); return a[4]; }\\n' > a.c; gcc -g -o a a.c; valgrind ./a 2>&1 | grep 'Invalid read of size 1'",
    "sanitizers": "printf '#include <stdlib.h>\\nint main(void) { volatile char *a = malloc(4); return a[4]; }\\n' > a.c; gcc -g -fsanitize=address -o a a.c; ./a 2>&1 | grep heap-buffer-overflow | head -1; printf 'int x;\\n#include <pthread.h>\\nvoid *f(void *a) { x++; return a; }\\nint main(void) { pthread_t t; pthread_create(&t, 0, f, 0); x++; pthread_join(t, 0); }\\n' > b.c; gcc -g -fsanitize=thread -o b b.c; ./b 2>&1 | grep 'data race' | head -1; printf '#include <stdlib.h>\\nvoid *p; int main(void) { for (int i = 0; i < 9; i++) p = malloc(3); }\\n' > c.c; gcc -fsanitize=address -o c c.c; ./c 2>&1 | grep LeakSanitizer",
    "py-spy": "python3 -m venv v; v/bin/pip install -q py-spy; python3 -c 'import time; time.sleep(60)' & wait_for v/bin/py-spy dump --pid $!; v/bin/py-spy dump --pid $! | grep Thread; kill $!",
    "lsof and fuser": "sleep 30 > held & lsof held | grep sleep; fuser held; kill $!",
}
BROWSERS = {
    "Chromium": "chromium --headless --no-sandbox --disable-gpu --dump-dom 'data:text/html,<script>document.write(6*7)</script>' 2> log | grep 42",
    "Playwright": """
python3 -m venv v; v/bin/pip install -q playwright
cat > a.py <<'END'
from playwright.sync_api import sync_playwright
with sync_playwright() as p:
    page = p.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"]).new_page()
    page.set_content("<button onclick='document.title=6*7'>b</button>"); page.click("button"); page.screenshot(path="a.png"); print(page.title())
END
v/bin/python a.py | grep 42; head -c 4 a.png | grep PNG""",
}
WORK = {
    "git": """
git config --global user.name me; git config --global user.email me@example.com; git config --global init.defaultBranch main
git init -q a; cd a; echo 1 > f; git add f; git commit -qm one; git switch -qc side; echo 2 > g; git add g; git commit -qm two
git switch -q main; echo 3 > h; git add h; git commit -qm three; git merge -qm merged side; git rebase -q HEAD~1; git stash list; git worktree add -q ../w side
git clone -q . ../b; cd ../b; git log --oneline | grep three; git bisect start HEAD HEAD~1 > ../log; git gc -q; git fsck""",
    "git over ssh": f"{SSHD}git init -q --bare r.git; git clone -q localhost:$PWD/r.git c; cd c; git -c user.name=me -c user.email=a@b commit -q --allow-empty -m one; git push -q origin HEAD; git ls-remote | grep HEAD",
    "ssh, scp and rsync": f"{SSHD}echo 42 > a; scp -q a localhost:$PWD/b; rsync -a a localhost:$PWD/c; ssh localhost cat $PWD/b $PWD/c | uniq | grep 42; ssh -tt localhost tty | grep pts; ssh -fN -L 8001:localhost:8000 localhost; python3 -m http.server 8000 2> log & wait_for curl -sf localhost:8001; curl -s localhost:8001 | grep Directory",
    "Subversion": "svnadmin create r; svn -q checkout file://$PWD/r w; cd w; echo 42 > a; svn -q add a; svn -q commit -m one; svn -q update; svn log | grep one",
    "tmux": "tmux new-session -d -s a -x 80 -y 24; tmux send-keys -t a 'echo $((6*7))' Enter; wait_for sh -c 'tmux capture-pane -pt a | grep ^42'; tmux kill-server",
    "screen": "screen -dmS a sh -c 'echo 42 > out; sleep 30'; wait_for test -s out; screen -ls | grep Detached; screen -S a -X quit",
    "expect": 'expect -c \'spawn python3 -q; expect ">>>"; send "6*7\\r"; expect "42"; send "exit()\\r"; expect eof\' | grep 42',
    "cron": "echo '@reboot root echo 42 > /tmp/o' > /etc/cron.d/a; cron; wait_for test -s /tmp/o; grep 42 /tmp/o",
    "supervisord": "printf '[supervisord]\\n[unix_http_server]\\nfile=/tmp/s\\n[rpcinterface:supervisor]\\nsupervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\\n[supervisorctl]\\nserverurl=unix:///tmp/s\\n[program:a]\\ncommand=sleep 60\\n' > c; supervisord -c c; wait_for sh -c 'supervisorctl -c c status | grep RUNNING'; supervisorctl -c c stop a | grep stopped; supervisorctl -c c shutdown",
    "sudo, as root": "sudo -u nobody id -un | grep nobody",
    "another user": "useradd -m mia; su mia -c 'cd; git init -q a; touch a/b; id -un' | grep mia; runuser -u mia -- id -un",
    "vi": "printf 'one\\n' > a; vim.tiny -Es -c 's/one/42/' -c wq a; grep 42 a",
    "archives": "mkdir a; echo 42 > a/f; tar czf a.tgz a; tar cJf a.txz a; zip -qr a.zip a 2> /dev/null || python3 -m zipfile -c a.zip a; mkdir o; unzip -q a.zip -d o; tar xf a.txz -C o; cat o/a/f | grep 42",
    "ping and DNS": "ping -c 1 -W 2 localhost | grep '1 received'; { host no.such.name.invalid || true; } | grep 'not found'",
}
WORKFLOWS = PACKAGES | BUILDS | SERVERS | DEBUGGERS | BROWSERS | WORK
