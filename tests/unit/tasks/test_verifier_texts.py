"""What a verifier knows before it runs: by a task's texts, an image's variables, and the times of files."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from atropos.slot_python import VERIFIER_PYTHON
from atropos.slots import ExecResult
from atropos.slots.slot.profile import PLAIN, Profile, UserAccount
from atropos.tasks.folder import load_task
from atropos.tasks.verifier import disarming, elsewhere
from atropos.tasks.verifier.disarming import understand
from atropos.tasks.verifier.mode import choose
from atropos.tasks.verifier.preceding import make_way, preceded, take_places
from atropos.tasks.verifier.surroundings import Surroundings, Wishes, environment, notes
from atropos.tasks.verifier.texts import TaskTexts, is_spoken_of, unspoken_names, written
from atropos.wire import VIEW_HOME
from tests.files import write_files
from tests.unit.tasks.test_task_folder import folder

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("test", "mode"),
    [
        ("if ! pgrep -f server.py; then exit 1; fi", "shared"),
        ("names = subprocess.check_output(['ps', 'aux'])", "shared"),
        ("up = [p for p in psutil.process_iter() if p.name() == 'x']", "shared"),
        ("kill -0 $(cat /app/server.pid)", "shared"),
        ("tmux has-session -t work", "shared"),
        ("x=$(lsof -ti :8080)", "shared"),
        ("os.kill(server.pid, 9); pkill -f mine; psutil.virtual_memory()", "view"),
        ("# pgrep is not needed, maps are", "view"),
        ("assert os.stat('/app/a').st_nlink == 2", "shared"),
        ("[ $(stat -c %h a) = 2 ]; stat -c '%h' b", "shared"),
        ("find /app -type f -links +1", "shared"),
        ("stat -c %s a; os.path.samefile(a, b)", "view"),
    ],
)
def test_some_tests_need_the_agents_slot(folder, test, mode):
    (folder / "tests/helper.py").write_text(test)
    assert choose(load_task(folder)).mode == mode


@pytest.mark.parametrize(
    ("solution", "mode"),
    [("mkfifo /app/pipe", "shared"), ("inotifywait -m in", "shared"), ("echo fifo > queue.py; notify", "view")],
)
def test_programs_that_wait_for_files_need_it(folder, solution, mode):
    write_files(
        folder, {"solution/solve.sh": f"#!/bin/sh\n{solution}\n", "environment/Dockerfile": "FROM x\nWORKDIR /app\n"}
    )
    assert choose(load_task(folder)).mode == mode


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("echo 42 > t/expected 2>/dev/null", ["/app/t/expected"]),
        ("cp -f /tests/a.py '/app/b.py' && mv x y/", ["/app/b.py", "/app/b.py/a.py", "/app/y", "/app/y/x"]),
        ("cd sub; echo x | tee -a log", ["/app/log", "/app/sub/log"]),
        ("open('/app/in.txt', 'w').write(x); open('/app/out.txt')", ["/app/in.txt"]),
        ("Path('one').write_text(x); Path('two').read_text()", ["/app/one"]),
        ("shutil.copy('/tests/a', '/app/b'); fs.writeFileSync('c', x)", ["/app/b", "/app/c"]),
        ("if [ a -> b ] || [[ 3 >= 2 ]]; then x 2>&1; fi; f = a=>b", []),
        ("cp -r /tests/data/. o", ["/app/o", "/app/o/data/b", "/app/o/b"]),
        ("cp -r /tests/da* o", ["/app/o", "/app/o/da*", "/app/o/data/b", "/app/o/b"]),
        ("cp /tests/*.txt o", ["/app/o", "/app/o/*.txt", "/app/o/a.txt"]),
        (
            "cp -r /tests .",
            ["/app", "/app/tests", "/app/tests/a.txt", "/app/tests/data/b", "/app/a.txt", "/app/data/b"],
        ),
    ],
)
def test_what_tests_write_is_known(test, found):
    paths, _ = written(TaskTexts("", (test,), ("a.txt", "data/b")), "/app")
    assert list(paths) == sorted(found)


def test_a_path_is_spoken_of_whole():
    asked = "Write /app/out/result.json; expected are three rows."
    assert is_spoken_of("/app/out/result.json", "/app", asked)
    assert not is_spoken_of("/app/expected/rows.json", "/app", asked)
    assert not is_spoken_of("/app/result.js", "/app", asked)


def test_what_tests_alone_name():
    test = "assert open('result.json').read() == open('/tests/expected.txt').read()"
    names = unspoken_names(TaskTexts("Write result.json.", (test,), ("data/rows.csv",))).split()
    assert "result.json" not in names
    assert {"expected.txt", "rows.csv"} <= set(names)


@pytest.mark.parametrize(
    ("brought", "own", "found"),
    [
        ("/a/x.py /a/x.txt /a/x.js", "", "/a/x.py /a/x.js"),
        ("/a/x.py", "/a/x/__init__.py", ""),
        ("/a/x.py", "/a/x.cpython-311-x86_64-linux-gnu.so", ""),
        ("/a/x.py /b/x.py", "/b/x.so /a/y.so", "/a/x.py"),
        ("/a/x.js /b/x.js", "/a/x", "/b/x.js"),
        ("/a/Makefile", "/a/Makefile", "/a/Makefile"),
        ("/a/makefile /a/Makefile", "/a/Makefile /a/makefile", "/a/makefile"),
        ("/a/Makefile /b/Makefile", "/a/GNUmakefile /a/Makefile /b/Makefile", "/b/Makefile"),
    ],
)
def test_what_else_would_be_taken_for_a_file(brought, own, found):
    """One's own may be: a package for a module, rules that make reads first."""
    assert preceded(brought.split(), own.split()) == found.split()


@pytest.mark.parametrize(
    ("asked", "test", "found"),
    [
        ("", "cp /tests/Makefile .; cp /tests/own.js .", "/app/Makefile /app/own.js"),
        ("Write GNUmakefile.", "cp /tests/Makefile .", ""),
        ("Write a makefile.", "cp /tests/Makefile .", "/app/Makefile"),
        ("", "cp /tests/own.py .", ""),
        ("", "cp /tests/own.py .; chmod -R a+r .", "/app/own.py"),
        ("Write own.py and own.js.", "cp /tests/own.py .; cp /tests/own.js .; chmod -R a+r .", ""),
    ],
)
def test_which_files_others_would_be_taken_for(asked, test, found):
    """Python's modules only where their times don't tell it."""
    assert " ".join(understand(TaskTexts(asked, (test,)), "/app", ("/app",), ()).preceded) == found


@pytest.mark.parametrize(("asked", "cut"), [("", (["/app/own"], "own")), ("Make symlinks.", ((), ""))])
async def test_links_that_are_spoken_of_stay(monkeypatch, asked, cut):
    async def cut_links(_slot, _folders, _places, *what):
        calls.append(what[:2])

    calls = []
    monkeypatch.setattr(disarming, "cut_links", cut_links)
    read = understand(TaskTexts(asked, ("mkdir own",)), "/app", ("/app",), ())
    read = replace(read, written=("/app/own", "/tmp/other", "/app"), names="own")
    surroundings = Surroundings(("/app",), wishes=read.wishes)
    await disarming.disarm(None, surroundings, read, links=False)
    await disarming.disarm(None, surroundings, read, links=True)
    assert calls == [cut]


@pytest.mark.parametrize(
    ("test", "leads", "looked", "refused"),
    [
        ("git clone x", True, [(True, True)], True),
        ("git status", False, [(True, False)], False),
        ("true", True, [], False),
    ],
)
async def test_repositories_of_tests_with_git_are_looked_through(monkeypatch, test, leads, looked, refused):
    async def take_out(_slot, _folders, _programs, *, links, clones):
        calls.append((links, clones))
        return leads

    async def remove_venvs(_, paths):
        removed.extend(paths)

    calls, removed = [], []
    monkeypatch.setattr(disarming, "take_out", take_out)
    monkeypatch.setattr(disarming, "remove_venvs", remove_venvs)
    read = replace(understand(TaskTexts("", (test,)), "/app", ("/app",), ()), venvs=("/app/venv", "/opt/venv"))
    surroundings = await disarming.disarm(None, Surroundings(("/app",), wishes=read.wishes), read, links=False)
    assert (calls, removed, surroundings.wishes.refuses_links) == (looked, ["/app/venv"], refused)


class Here:
    """What takes a slot's commands, and runs them on this machine."""

    async def exec(self, command, **_):
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=False)
        return ExecResult(done.returncode, done.stdout.decode(), done.stdout)


async def test_empty_folders_are_seen(tmp_path):
    write_files(tmp_path, {"full/x": "a", "hidden/.x": "a"})
    empty = [str(tmp_path / name) for name in ("first", "last")]
    for path in empty:
        os.mkdir(path)
    folders = [empty[0], f"{tmp_path}/full", f"{tmp_path}/hidden", empty[1]]
    looked = await elsewhere.bring(Here(), folders)
    assert (looked.company, sorted(looked.empty)) == (True, sorted(empty))


@pytest.mark.parametrize(
    ("exit_code", "programs", "asked"),
    [(0, (), 1), (1, None, ["1", "/a"]), (1, ("/v",), ["/a", elsewhere.PACKAGES, "/usr/local", "/usr", "/v"])],
)
async def test_what_lies_elsewhere_is_brought_where_there_is_any(exit_code, programs, asked, caplog):
    """Packages only where they are of use."""

    class Slot:
        async def exec(self, command, **_):
            commands.append(command)
            return ExecResult(exit_code, "", b"")

    commands = []
    assert await elsewhere.bring(Slot(), ["/a"], programs) == (False, ())
    assert ("not all shown" in caplog.text) == (exit_code != 0)
    if exit_code == 0:
        assert len(commands) == asked
    else:
        bounds = {str(elsewhere.MAX_COPY_BYTES), str(elsewhere.MAX_COPY_FILES)}
        bounds |= {str(elsewhere.MAX_PACKAGE_FILES), str(elsewhere.MAX_LIST_CHARS)}
        given = [word for word in commands[1] if word not in bounds]
        assert given[-len(asked) :] == asked


async def test_what_would_be_taken_is_removed(tmp_path):
    write_files(
        tmp_path, dict.fromkeys(("GNUmakefile", "x.so", "__pycache__/x.cpython-311.pyc", "y.so", "z/__init__.py"), "a")
    )
    assert await make_way(None, []) == await take_places(None, []) == ""
    assert await make_way(Here(), [f"{tmp_path}/Makefile", f"{tmp_path}/x.py"]) == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["__init__.py", "__pycache__", "y.so", "z"]
    assert await make_way(Here(), [f"{tmp_path}/z.py"]) == (
        f"{tmp_path}/z.py would not be what runs: {tmp_path}/z/__init__.py is imported in its place"
    )
    assert await take_places(Here(), [f"{tmp_path}/z"]) == ""
    assert not (tmp_path / "z").exists()


LOADING = (
    "BASH_ENV COMPILER_PATH GIT_CONFIG_GLOBAL IPYTHONDIR JAVA_TOOL_OPTIONS LD_PRELOAD LESSOPEN LUA_INIT MYPYPATH NODE_OPTIONS "
    "NUMBA_CACHE_DIR OPENSSL_CONF PERL5OPT PHPRC PYTHONUSERBASE RUBYOPT RUSTC_WRAPPER R_LIBS TMPDIR XDG_CONFIG_HOME npm_config_prefix"
)
NAMING = "GITHUB_WORKSPACE LDAP_DIR LESSONS PGDATA PIPELINE_DIR REPO REQUESTS_CA_BUNDLE RESULTS_DIR ROOT_DIR SSL_CERT_FILE UVICORN_APP"


def test_variables_that_load_are_left_out():
    env = dict.fromkeys(f"{LOADING} {NAMING}".split(), "/app/x")
    assert set(Surroundings(("/app",)).variables(env)) == set(NAMING.split())
    assert Surroundings(("/opt",)).variables(env) == env


@pytest.mark.parametrize(
    ("name", "value", "left_out"),
    [
        ("GIT_CONFIG_GLOBAL", "gitconfig", True),
        ("OPENSSL_CONF", "conf/openssl.cnf", True),
        ("MAKEFILES", "/opt/a.mk /app/b.mk", True),
        ("npm_config_userconfig", "npmrc", True),
        ("NODE_OPTIONS", "--max-old-space-size=64 --require dotenv/config", True),
        ("NODE_OPTIONS", "--max-old-space-size=64 --require /opt/x.js", False),
        ("PERL5OPT", "-I. -MOwn", True),
        ("PERL5OPT", "-MStrict", False),
        ("JAVA_TOOL_OPTIONS", "-Xmx1g -javaagent:agent.jar", True),
        ("JAVA_TOOL_OPTIONS", "-Xmx1g", False),
        ("PYTEST_ADDOPTS", "-rA -p no:cacheprovider", False),
        ("PYTEST_ADDOPTS", "-p own", True),
        ("PYTEST_ADDOPTS", "-q --color=yes -c own.ini", True),
        ("PYTEST_ADDOPTS", "--color=yes --pyargs --no-cov --ignore=tests/slow-cases", False),
        ("PYTEST_ADDOPTS", "-p no:randomly -q --continue-on-collection-errors -c /etc/pytest.ini", False),
        ("PERL5OPT", "-I /usr/share/own", False),
        ("NODE_CONFIG", '{"a":1}', False),
        ("PIP_CONFIG_FILE", "/dev/null", False),
        ("GIT_CONFIG_NOSYSTEM", "1", False),
    ],
)
def test_relative_names_lead_to_the_agents(name, value, left_out):
    assert Surroundings(("/app",)).leads(name, value) == left_out


def test_tools_of_a_home_are_the_images():
    found = Surroundings(("/root",), home="/root")
    path = "/root/.local/bin:/root/tools:/usr/bin:/root/go/bin"
    assert found.variables({"PATH": path})["PATH"].split(":")[:3] == [
        *("/run/home/.local/bin", "/usr/bin", "/run/home/go/bin"),
    ]


def test_what_the_agent_wrote_is_not_run(folder):
    """Beside it, by the variables of usual programs; where it wrote nothing, tests have the machine's alone."""
    task, user = load_task(folder), Profile(user=UserAccount("judge", 1000, 1000, "/home/judge"))
    own = {"PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "npm_config_ignore_scripts", "PYTHONPATH", "HOME"}
    assert not own & set(environment(task, PLAIN, Surroundings()))
    beside = environment(task, PLAIN, Surroundings(("/root",), home="/root", wishes=Wishes(installs=True)))
    assert own <= set(beside)
    assert (beside["HOME"], beside["PYTHONPATH"]) == (VIEW_HOME, VERIFIER_PYTHON)
    beside = environment(task, user, Surroundings(("/app",)))
    assert own & set(beside) == {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "HOME"}
    assert beside["HOME"] == "/home/judge"


@pytest.mark.parametrize(("workdir", "named"), [("/app", ["PYTHONPATH"]), ("/", [])])
def test_variables_that_tests_lack_are_named(folder, workdir, named):
    lines = f"FROM debian\nENV PYTHONPATH=/app/lib OWN=/app\nWORKDIR {workdir}\n"
    (folder / "environment/Dockerfile").write_text(lines)
    assert [note.split()[0] for note in notes(load_task(folder))] == named


@pytest.mark.parametrize(("asked", "links"), [("Make a symlink.", True), ("Make a file.", False)])
def test_links_that_are_asked_for_are_wanted(asked, links):
    wishes = Wishes.of(TaskTexts(asked, ()))
    assert (wishes.links, wishes.refuses_links) == (links, False)
    assert wishes.where_links_lead_out().refuses_links == (not links)


def test_a_stepped_clock_hides_nothing(tmp_path):
    """A file that was made before the clock of the machine was set forward is no older than the machine for it."""
    (tmp_path / "shown").mkdir()
    (tmp_path / "own").write_text("42")
    (tmp_path / "shown/link").symlink_to(tmp_path / "own")
    stepped = "import time; now = time.time; time.time = lambda: now() + 1e9\n"
    script = stepped + elsewhere._LINKS + elsewhere._BRING
    bounds = ("1", str(elsewhere.MAX_COPY_BYTES), str(elsewhere.MAX_COPY_FILES))
    subprocess.run([sys.executable, "-c", script, *bounds, tmp_path / "shown"], check=True)
    assert not (tmp_path / "shown/link").is_symlink()
    assert os.path.samefile(tmp_path / "shown/link", tmp_path / "own")
