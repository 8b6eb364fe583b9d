"""What a slot does, each a function of a host. Those named in ROOT_ONLY need cgroups or a range of ids."""

import asyncio
import errno
import gc
import hashlib
import io
import itertools
import os
import re
import resource
import signal
import subprocess
import tarfile
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from unittest import mock

from atropos import wire
from atropos.errors import NotSupported, OutcomeUnknown, SandboxError, SlotLost
from atropos.sandbox.host import slot as host_slot
from atropos.sandbox.host import slot_calls
from atropos.sandbox.host.process import pid_1
from atropos.sandbox.linux import disks, host_limits
from atropos.wire import (
    Exec,
    ProcKill,
    ProcList,
    ProcRead,
    ProcStart,
    ProcWrite,
    Quiesce,
    ReadFile,
    Search,
    Tar,
    Untar,
    ViewFolders,
    WriteFile,
)
from tests.processes import descendants, parent_of
from tests.unit.sandbox.driver import LIMITS

ON_DISK_ONLY = {
    "layers_on_disk_are_counted_while_they_are_imported",
    "places_on_disk_are_used_again_once_they_are_empty",
}
ROOT_ONLY = {
    "programs_can_see_the_slots_own_limits",
    "memory_limit_is_named_and_the_slot_goes_on",
    "many_users_inside",
    "commands_and_background_processes_run_as_users_of_the_slot",
    "files_are_read_and_written_as_users_of_the_slot",
    "a_program_runs_without_a_shell",
    "an_archive_has_names_links_modes_owners_and_times_of_all_kinds",
}
_numbers = itertools.count(1)


@asynccontextmanager
async def slot(host, **options):
    sandbox = await started(host, f"test-{next(_numbers)}", **options)
    try:
        yield sandbox
    finally:
        stopped = await sandbox.stop()
        assert stopped.clean, stopped


async def started(host, name, *, layers=(), base=None, **options):
    sandbox = await host.start(name, **options)
    if layers or base is not None:
        try:
            await sandbox.change_root(layers, base)
        except BaseException:
            assert (await sandbox.stop()).clean
            raise
    return sandbox


async def sh(sandbox, command, **options):
    result = await sandbox.run(f"call-{next(_numbers)}", Exec(command=command, **options))
    assert isinstance(result, wire.CommandResult), result
    return result


async def out(sandbox, command, **options):
    result = await sh(sandbox, command, **options)
    assert result.exit_code == 0, result
    return result.output.decode()


async def freed(host):
    """Until what was detached has been freed too."""
    while host.state.disposer.pending:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def do(sandbox, operation):
    return await sandbox.run(f"call-{next(_numbers)}", operation)


async def until_said(sandbox, process, words):
    """All that a background process has written, once these words are in it."""
    said = b""
    while words not in said:
        state = await do(sandbox, ProcRead(id=process, offset=len(said), wait_s=20, until="output"))
        assert state.output, (said, state)
        said += state.output
    return said


# ------------------------------------------------------------------------------------------------------------ commands


async def output_and_exit_code(host):
    async with slot(host) as s:
        result = await sh(s, "echo one; echo two >&2; echo three; exit 7")
        assert (result.exit_code, result.output) == (7, b"one\ntwo\nthree\n")
        assert result.limit is None and not result.truncated and result.stdout is None
        assert (await sh(s, "kill -TERM $$")).exit_code == -15
        assert (await sh(s, "printf '\\377\\000\\n'")).output == b"\xff\0\n"
        assert (await out(s, "id -u; pwd; echo $HOME")) == "0\n/workspace\n/root\n"


async def environment_and_working_directory(host):
    async with slot(host) as s:
        assert await out(s, "echo $WORD", env={"WORD": "ä b"}) == "ä b\n"
        assert await out(s, "mkdir -p a/b; cd a/b; pwd") == "/workspace/a/b\n"
        assert await out(s, "pwd", workdir="a/b") == "/workspace/a/b\n"
        assert await out(s, "pwd", workdir="/tmp") == "/tmp\n"
        missing = await do(s, Exec(command="pwd", workdir="/nowhere"))
        assert missing.error == "not_found" and "/nowhere" in missing.message
        found = await out(s, "env")
        assert "HOST_SECRET" not in found and "TERM=" not in found, "nobody sets it where there is no terminal"


async def stdin_of_any_size(host):
    async with slot(host) as s:
        assert await out(s, "cat", stdin=b"hello") == "hello"
        big = os.urandom(1 << 16) * 24
        assert (await out(s, "sha256sum", stdin=big)).split()[0] == hashlib.sha256(big).hexdigest()
        assert await out(s, "wc -c") == "0\n"


FILTERED = {
    "exec > >(tee log); echo one; echo two": "one\ntwo\n",
    "exec 2> >(sed 's/^/E:/'); echo a >&2; echo b >&2": "E:a\nE:b\n",
    "echo a | tee >(sed s/a/b/) > /dev/null": "b\n",
    "exec > >(grep o | sort -r | tee log); echo one; echo x; echo two": "two\none\n",
    'exec > >(while read l; do date > /dev/null; echo "L $l"; done); echo one': "L one\n",
    "exec > >(sleep 0.1; cat); echo slow": "slow\n",
    "mkfifo f; tee log < f & exec > f; rm f; echo fifo": "fifo\n",
    "exec > >(tee log); sleep 60 & echo held": "held\n",
    "seq 3 & :": "1\n2\n3\n",
    "sleep 60 & (for i in 1 2 3; do echo $i; done) & :": "1\n2\n3\n",
    "(for i in {1..9000}; do :; done; seq 3) 2> /dev/null | sort & :": "1\n2\n3\n",
    "exec > >(tee log); seq 9000": "".join(f"{number}\n" for number in range(1, 9001)),
    "echo a | tee >(tr a b > file) > /dev/null": "",
}


async def what_filters_of_a_command_print_is_in_its_output(host):
    """A shell ends before what it feeds: `exec > >(tee log)`."""
    async with slot(host) as s:
        for _ in range(4):
            for command, expected in FILTERED.items():
                result = await sh(s, command)
                assert (result.output.decode()[-1000:], result.truncated) == (expected[-1000:], False), (
                    command,
                    result,
                )
            await do(s, Quiesce())
        assert await out(s, "cat file") == "b\n"
        begun = await do(
            s, ProcStart(command="exec > >(tee log) 2> >(sed s/^/E:/ >&2); echo o; echo e >&2", split=True)
        )
        state = await do(s, ProcRead(id=begun.id, wait_s=20))
        assert (state.output, state.exit_code) == (b"o\n", 0)
        assert (await do(s, ProcRead(id=begun.errors))).output == b"E:e\n"


async def filters_that_hang_are_cut_off_with_a_word(host):
    async with slot(host) as s:
        result = await sh(s, "exec > >(cat; exec sleep 60); echo one", split=True)
        assert result.stdout == result.output and not result.stderr
        assert result.output.startswith(b"one\n") and b"filters" in result.output
        assert (result.exit_code, result.truncated, result.dropped_bytes, result.limit) == (0, True, 0, "output")
        begun = await do(s, ProcStart(command="exec > >(cat; exec sleep 60); echo one"))
        state = await do(s, ProcRead(id=begun.id, wait_s=20))
        assert state.output.startswith(b"one\n") and b"filters" in state.output and not state.running


async def pid_1_keeps_the_score_of_its_server(host):
    """A service's or a desktop's programs may have one below which the kernel lets nobody go."""
    async with slot(host) as s:
        own = Path("/proc/self/oom_score_adj").read_text(encoding="ascii")
        assert await out(s, "cat /proc/self/oom_score_adj") == "1000\n"
        assert Path(f"/proc/{s.host_pid}/oom_score_adj").read_text(encoding="ascii") == own


async def what_prints_in_the_background_is_whole_or_cut_off_with_a_word(host):
    """More than a pipe holds."""
    async with slot(host) as s:
        for _ in range(4):
            result = await sh(s, "seq 60000 & :")
            assert (result.output[-6:], len(result.output) + result.dropped_bytes >= 348_894) == (b"60000\n", True)
        for command in ("echo x; yes &", "echo x; yes | cat &"):
            result = await sh(s, command, max_output_bytes=1000)
            assert result.output.startswith(b"x\n") and result.output.endswith(b"is missing ...]\n"), result
            assert (result.exit_code, result.truncated) == (0, True), result
            await do(s, Quiesce())


async def nothing_waits_for_what_runs_in_the_background(host):
    async with slot(host) as s:
        computes = "(while :; do :; done) & echo x; echo $! > busy"
        for command in (
            "sleep 60 & echo x",
            "tail -f /dev/null | cat & echo x",
            "(sleep 60; echo late) & echo x",
            computes,
        ):
            result = await sh(s, command)
            assert (result.output, result.truncated) == (b"x\n", False), command
        assert await out(s, 'kill $(cat busy); until [ "$(pgrep -c sleep)" = 2 ]; do :; done') == ""


async def a_cancelled_call_waits_for_no_filter(host):
    async with slot(host) as s:
        ended = asyncio.get_running_loop().create_future()
        s.begin("c", Exec(command="exec > >(while :; do :; done); echo $$ > shell"), ended.set_result)
        await out(s, "until [ -s shell ] && ! kill -0 $(cat shell) 2>/dev/null; do sleep 0.01; done")
        s.cancel("c")
        result = await ended
        assert (result.cancelled, result.exit_code) == (True, 0), result
        async with asyncio.timeout(30):  # what was killed may take a moment to be gone
            while await out(s, "sleep 0.05; pgrep -c bash || :") != "1\n":
                pass


async def stdout_and_stderr_apart(host):
    async with slot(host) as s:
        result = await sh(s, "echo a; echo b >&2", split=True)
        assert (result.stdout, result.stderr) == (b"a\n", b"b\n")
        assert sorted(result.output.split()) == [b"a", b"b"]


async def a_background_child_delays_nothing_and_lives_on(host):
    async with slot(host) as s:
        async with asyncio.timeout(10):
            result = await sh(
                s, "(for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo x >> ticks; sleep 0.05; done) & echo started"
            )
        assert b"started" in result.output
        # its writes after the command's end went into nothing, and did not kill it
        for _ in range(200):
            ticks = await out(s, "cat ticks | wc -l")
            if ticks == "9\n":
                break
            await asyncio.sleep(0.05)
        assert ticks == "9\n", ticks


async def a_timeout_ends_the_whole_session(host):
    async with slot(host) as s:
        result = await sh(s, "set -m; echo before; sleep 1000 & sleep 1001 | sleep 1002", timeout_s=3)
        assert result.timed_out and result.limit == "time" and b"before" in result.output
        left = await out(s, "cat /proc/[0-9]*/stat 2> /dev/null; true")  # one may be reaped meanwhile
        assert "(atropos-runner)" in left
        assert not re.search(r"\(sleep\) [^Z]", left), left  # one that has ended may not be reaped yet
        assert (await sh(s, "echo well")).output == b"well\n"


async def output_keeps_head_and_tail_with_an_exact_count(host):
    async with slot(host) as s:
        result = await sh(s, "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last")
        assert result.output.startswith(b"first\n") and result.output.endswith(b"\nlast\n")
        note = f"\n[... {result.dropped_bytes} bytes dropped ...]\n".encode()
        assert note in result.output
        assert len(result.output) - len(note) + result.dropped_bytes == 5_000_012
        assert result.truncated and result.limit == "output" and len(result.output) < 100_200
        small = await sh(s, "seq 1000", max_output_bytes=100)
        assert small.truncated and small.output.endswith(b"1000\n") and len(small.output) < 160


async def a_command_longer_than_the_kernel_takes(host):
    async with slot(host) as s:
        assert await out(s, "true " + "x" * 1_000_000 + "\necho $0; echo done") != ""
        assert await out(s, f"printf %s {'中' * 60_000} | wc -c") == "180000\n"  # the kernel counts bytes


async def a_cancelled_call_says_so(host):
    async with slot(host) as s:
        call = asyncio.create_task(s.run("long", Exec(command="echo begun; : > said; sleep 100")))
        await out(s, "until [ -e said ]; do sleep 0.02; done")
        s.cancel("long")
        result = await call
        assert result.cancelled and result.output == b"begun\n"
        waiting = asyncio.create_task(s.run("dropped", Exec(command=": > runs; sleep 100")))
        await out(s, "until [ -e runs ]; do sleep 0.02; done")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await out(s, "while grep -qsx sleep /proc/[0-9]*/comm; do sleep 0.02; done")


async def pid_1_shows_nothing_of_the_server(host):
    async with slot(host) as s:
        assert await out(s, "tr -d '\\0' < /proc/1/cmdline; echo; cat /proc/1/comm") == "atropos-runner\n" * 2
        files = [f"cat /proc/1/{name}" for name in ("environ", "maps", "mem", "auxv", "syscall", "stack")]
        for look in (
            *files,
            "readlink /proc/1/exe",
            "readlink /proc/1/fd/3",
            "ls /proc/1/map_files",
            "readlink /proc/1/ns/user",
        ):
            assert await out(s, f"{look} 2>/dev/null | wc -c") == "0\n", look


async def no_link_in_a_program_s_place_leads_to_the_server_s_python(host):
    """A child of PID 1 executes it, and has PID 1's own program until then: it lies outside of the slot."""
    async with slot(host) as s:
        await out(s, "ln -s /proc/self/exe link; echo '#!/proc/self/exe' > script; chmod +x script")
        for program in ("/proc/self/exe", "/workspace/link", "/workspace/script"):
            refused = await do(s, Exec(command=(program, "-c", "print(1)")))
            assert refused.kind == "op_error" and refused.error == "permission", refused
            refused = await do(s, ProcStart(command=(program, "-c", "print(1)"), pty=True))
            assert refused.kind == "op_error" and refused.error == "permission", refused


async def calls_run_beside_each_other(host):
    async with slot(host) as s:
        slow = asyncio.create_task(out(s, "until [ -e go ]; do sleep 0.02; done; echo slow"))
        for _ in range(20):
            assert await out(s, "echo quick") == "quick\n"
        assert not slow.done()
        await out(s, ": > go")
        assert await slow == "slow\n"


async def the_process_limit_is_named_and_the_slot_goes_on(host):
    async with slot(host) as s:
        code = "import os,time\nn=0\ntry:\n  while True:\n    if os.fork()==0: time.sleep(60); os._exit(0)\n    n+=1\nexcept OSError as e: print(n, e.errno, flush=True)"
        result = await sh(s, f'python3 -c "{code}"')
        count, number = result.output.split()[:2]
        assert int(count) <= 48 and int(number) == 11, result
        # what an ended command left running is ended with it; what runs may keep every place
        assert await out(s, "echo usable") == "usable\n"
        await do(s, Quiesce())
        holder = await do(s, ProcStart(command=f'exec python3 -c "{code}; time.sleep(100)"'))
        holder = await do(s, ProcRead(id=holder.id, wait_s=30, until="output"))
        assert holder.output and holder.running, holder
        never = await sh(s, "echo no")
        assert never.exit_code is None and never.limit == "pids", never
        assert (await do(s, ProcRead(id=holder.id))).running
        killed = await do(s, Quiesce())
        assert killed.kind == "done" and killed.count >= 20
        assert await out(s, "echo again") == "again\n"


async def memory_limit_is_named_and_the_slot_goes_on(host):
    async with slot(host) as s, slot(host) as neighbour:
        result = await sh(s, "exec python3 -c 'x = bytearray(300 << 20)'")
        assert (result.exit_code, result.limit) == (-9, "memory"), result
        assert await out(s, "echo alive") == "alive\n"
        assert (await sh(s, "python3 -c 'x = bytearray(300 << 20)'; echo survived")).limit == "memory"
        assert await out(neighbour, "echo untouched") == "untouched\n"


async def disk_and_inode_limits_are_named(host):
    async with slot(host) as s:
        result = await sh(s, "head -c 40000000 /dev/zero > big")
        assert result.exit_code != 0 and result.limit == "disk", result
        written = await do(s, WriteFile(path="more", data=b"x" * 100_000))
        assert (written.error, written.limit) == ("no_space", "disk"), written
        await out(s, "rm big")
        result = await sh(s, "mkdir many; cd many; for i in $(seq 4000); do : > f$i || exit 1; done")
        assert result.exit_code != 0 and result.limit == "inodes", result
        for place in ("/tmp", "/dev/shm", "/var/tmp"):
            result = await sh(
                s, f"rm -rf many; head -c 40000000 /dev/zero > {place}/big; code=$?; rm -f {place}/big; exit $code"
            )
            assert result.exit_code != 0, place


OWN_SHELL = "rm /bin && mkdir /bin && cp /usr/bin/bash /bin/bash && cp /usr/bin/bash /bin/sh"
"""Makes the shell a file of the slot's own, where the base's can't be changed."""


async def what_the_agent_did_to_its_shell_is_named(host):
    for act, words in (
        ("rm /bin", "neither /bin/bash nor /bin/sh exists in this slot"),
        (f"{OWN_SHELL}; rm -r /bin; mkdir /bin", "neither /bin/bash nor /bin/sh exists in this slot"),
        (f"{OWN_SHELL}; /usr/bin/chmod 644 /bin/bash", "the shell /bin/bash is not executable in this slot (mode 644)"),
        (f"{OWN_SHELL}; rm /bin/bash; mkdir /bin/bash", "the shell /bin/bash is not a file any more"),
        (f"{OWN_SHELL}; echo x > /bin/b; chmod 755 /bin/b; mv /bin/b /bin/bash", "/bin/bash is not a program any more"),
        ("rm /lib64", "the loader that it names is missing"),
    ):
        async with slot(host) as s:
            done = await sh(s, act)
            assert done.exit_code == 0, (act, done)
            refused = await sh(s, "echo no")
            assert refused.exit_code is None and words in refused.output.decode(), (act, refused)
            assert b"files still work" in refused.output
            refused = await do(s, ProcStart(command="echo no"))
            assert refused.kind == "op_error" and words in refused.message, (act, refused)
            assert (await do(s, WriteFile(path="still", data=b"works"))).kind == "done"
            assert (await do(s, ReadFile(path="/workspace/still"))).data == b"works"


async def a_workspace_that_is_gone_is_made_anew_and_one_that_is_a_file_is_named(host):
    async with slot(host) as s:
        assert await out(s, "rm -r /workspace; echo gone") == "gone\n"
        started = await do(s, ProcStart(command="pwd"))
        ended = await do(s, ProcRead(id=started.id, wait_s=20))
        assert ended.output == b"/workspace\n", ended
        assert await out(s, "rm -r /workspace; echo gone") == "gone\n"
        assert await out(s, "pwd") == "/workspace\n"
        await out(s, "rm -r /workspace; echo > /workspace", workdir="/")
        for refused in (await do(s, Exec(command="pwd")), await do(s, ProcStart(command="pwd"))):
            assert "the working directory does not exist or can't be entered: /workspace" in refused.message, refused


HOLD = """exec python3 -c "
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
open('/bin/leased', 'wb').write(open('/usr/bin/bash', 'rb').read())
os.chmod('/bin/leased', 0o755)
fcntl.fcntl(os.open('/bin/leased', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)
os.rename('/bin/leased', '/bin/bash')
print('held', flush=True)
time.sleep(60)
" """


async def a_lease_on_the_shell_does_not_end_the_next_call(host):
    async with slot(host) as s:
        await out(s, OWN_SHELL)
        await out(s, f"({HOLD}) > held & until read -r line < held; do sleep 0.05; done 2> /dev/null")
        assert await out(s, "echo next") == "next\n"
        holder = await do(s, ProcStart(command=HOLD))
        assert (await do(s, ProcRead(id=holder.id, wait_s=20, until="output"))).output == b"held\n"
        refused = await sh(s, "echo no", timeout_s=20)
        assert refused.exit_code is None and refused.limit is None, refused
        assert b"holds a lease (F_SETLEASE) on the shell" in refused.output, refused
        await do(s, ProcKill(id=holder.id, signal="KILL"))
        assert await out(s, "echo well") == "well\n"


async def commands_and_background_processes_run_as_users_of_the_slot(host):
    async with slot(host) as s:
        await out(s, "useradd -m -u 1234 alice; groupadd -g 2000 crew; usermod -aG crew alice; groupadd -g 2001 other")
        show = "id -u; id -g; id -G; echo $HOME $USER $LOGNAME $WORD"
        wanted = "1234\n1234\n1234 2000\n/home/alice alice alice x\n"
        assert await out(s, show, user="alice", env={"WORD": "x"}) == wanted
        assert await out(s, show, user="1234", env={"WORD": "x"}) == wanted
        assert await out(s, "id -u; id -G", user="alice:other") == "1234\n2001\n", "who names a group has no other"
        assert await out(s, "id -u; id -G; echo $HOME", user=":2001") == "0\n2001\n/root\n"
        await out(s, "echo 1234:x:5:5::/five:/bin/sh >> /etc/passwd")
        assert await out(s, "id -u", user="1234") == "1234\n", "the first row of that name or number"
        assert await out(s, "id -u; id -g; echo $HOME", user="4321:77") == "4321\n77\n/\n"
        assert await out(s, "echo $HOME", user="alice", env={"HOME": "/tmp"}) == "/tmp\n"
        assert await out(s, "id -u; echo $HOME") == "0\n/root\n"
        # what belongs to root stays root's, and its own pipes open again
        assert (await sh(s, "cat /etc/shadow || echo > /etc/passwd || kill -9 1", user="alice")).exit_code != 0
        assert await out(s, "cat > /dev/stdout; echo err > /dev/stderr", user="alice", stdin=b"in\n") == "in\nerr\n"
        assert await out(s, "true " + "x" * 200_000 + "\nid -u", user="alice") == "1234\n"
        missing = await do(s, Exec(command="id", workdir="/nowhere", user="alice"))
        assert missing.error == "not_found" and "/nowhere" in missing.message
        for pty in (False, True):
            started = await do(
                s, ProcStart(command="id -u; tty; echo $HOME > /dev/tty || true; read x", user="alice", pty=pty)
            )
            assert started.kind == "proc_state", started
            await do(s, ProcWrite(id=started.id, data=b"go\n"))
            ended = await do(s, ProcRead(id=started.id, wait_s=20))
            assert ended.exit_code == 0 and b"1234" in ended.output, ended
            assert (b"/dev/pts/" in ended.output and b"/home/alice" in ended.output) == pty, ended


async def files_are_read_and_written_as_users_of_the_slot(host):
    async with slot(host) as s:
        await out(s, "mkdir -m 777 /open; echo mine > /open/root; chmod 600 /open/root; mkdir -m 700 /closed")
        write = {"data": b"theirs", "user": "4321:77"}
        assert (await do(s, WriteFile(path="/open/new/file", **write))).kind == "done"
        assert (await do(s, WriteFile(path="/open/new/file", **write, append=True))).kind == "done"
        assert await out(s, "stat -c '%u:%g %a' /open/new/file; cat /open/new/file") == "4321:77 644\ntheirstheirs"
        assert (await do(s, ReadFile(path="/open/new/file", user="4321"))).data == b"theirstheirs"
        large = b"x" * (3 << 20)
        assert (await do(s, WriteFile(path="/open/new/file", data=large, user="4321"))).kind == "done"
        assert (await do(s, ReadFile(path="/open/new/file", user="4321"))).data == large
        for operation in (
            ReadFile(path="/open/root", user="4321"),
            ReadFile(path="/closed/any", user="4321"),
            WriteFile(path="/open/root", **write),
            WriteFile(path="/closed/new", **write),
            WriteFile(path="/new/folder", **write),
        ):
            refused = await do(s, operation)
            assert refused.kind == "op_error" and refused.error == "permission", (operation, refused)
        await out(s, "chmod a-w /open/new/file")
        assert (await do(s, WriteFile(path="/open/new/file", **write))).error == "permission"
        assert (await do(s, ReadFile(path="/open/root", user="nobody-here"))).error == "unknown_user"

        assert await out(s, "cat /open/root") == "mine\n"
        await out(s, "chown 4321:77 /open/root; chmod 4751 /open/root")
        await do(s, WriteFile(path="/open/root", data=b"new"))
        assert await out(s, "stat -c '%u:%g %a' /open/root") == "4321:77 4751\n"


async def a_program_runs_without_a_shell(host):
    async with slot(host) as s:
        assert await out(s, ("printf", "%s|", "a b", "$HOME", "*", "")) == "a b|$HOME|*||"
        assert await out(s, ("sh", "-c", "echo $# ${#16}", "sh", *["x" * 65536] * 16)) == "16 65536\n"
        await out(s, "mkdir /own; printf '#!/bin/sh\necho own' > /own/tool; chmod +x /own/tool")
        assert await out(s, ("tool",), env={"PATH": "/nowhere:/own"}) == "own\n"
        assert await out(s, ("./tool",), workdir="/own", user="4321") == "own\n"
        for program, error in ((("no-such",), "not_found"), (("/etc/passwd",), "permission"), (("/",), "permission")):
            for operation in (Exec(command=program), ProcStart(command=program)):
                refused = await do(s, operation)
                assert refused.kind == "op_error" and refused.error == error and program[0] in refused.message, refused
        huge = await do(s, Exec(command=("true", "x" * 200_000)))
        assert huge.kind == "op_error" and huge.error == "too_large", huge
        started = await do(s, ProcStart(command=("cat", "-")))
        assert started.command == "cat -"
        await do(s, ProcWrite(id=started.id, data=b"in", eof=True))
        ended = await do(s, ProcRead(id=started.id, wait_s=20))
        assert (ended.exit_code, ended.output) == (0, b"in")


async def a_user_that_the_slot_does_not_have_is_an_error(host):
    async with slot(host) as s:
        for user in ("nobody-here", "root:no-group", "4294967295", "-1", "root:4294967295", ":", "a\0b"):
            for operation in (Exec(command="id", user=user), ProcStart(command="id", user=user)):
                refused = await do(s, operation)
                assert refused.kind == "op_error" and refused.error == "unknown_user", (user, refused)
        await out(s, "rm /etc/passwd /etc/group && mkdir /etc/passwd && ln -s /dev/zero /etc/group")
        assert (await do(s, Exec(command="id", user="root"))).error == "unknown_user"
        assert await out(s, "echo $USER", user="0") == "0\n"


async def many_users_inside(host):
    async with slot(host) as s:
        assert (
            await out(s, "useradd -m alice && su alice -c id -s /bin/sh")
            == "uid=1000(alice) gid=1000(alice) groups=1000(alice)\n"
        )
        assert await out(s, "chown 4242:99 /workspace && stat -c %u:%g /workspace") == "4242:99\n"


async def tools_of_the_base_work(host):
    async with slot(host) as s:
        program = '#include <stdio.h>\\nint main(){puts(\\"built\\");return 0;}'
        assert await out(s, f'printf "{program}" > a.c && cc a.c -o a && ./a', timeout_s=20) == "built\n"
        assert (
            await out(
                s,
                "git init -q . && git config user.email a@b && git config user.name n && git add . && git commit -qm x && git rev-list --count HEAD",
            )
            == "1\n"
        )
        assert await out(s, "python3 -c 'import json, ssl, sqlite3; print(6*7)'") == "42\n"
        assert await out(s, "mktemp -d | grep -c /tmp/") == "1\n"


# --------------------------------------------------------------------------------------------------------------- files


async def files_round_trip(host):
    async with slot(host) as s:
        data = os.urandom(3000)
        assert (await do(s, WriteFile(path="a/b/c.bin", data=data, mode=0o600))).count == 3000
        read = await do(s, ReadFile(path="/workspace/a/b/c.bin"))
        assert (read.data, read.size, read.mode) == (data, 3000, 0o600)
        assert read.sha256 == hashlib.sha256(data).hexdigest()
        part = await do(s, ReadFile(path="a/b/c.bin", offset=100, max_bytes=50))
        assert part.data == data[100:150] and part.sha256 is None
        await do(s, WriteFile(path="a/b/c.bin", data=b"tail", append=True))
        assert (await do(s, ReadFile(path="a/b/c.bin"))).data == data + b"tail"
        changed = await do(s, WriteFile(path="a/b/c.bin", data=b"new", if_sha256=read.sha256))
        assert changed.error == "changed"
        now = hashlib.sha256(data + b"tail").hexdigest()
        assert (await do(s, WriteFile(path="a/b/c.bin", data=b"new", if_sha256=now))).kind == "done"
        assert await out(s, "cat a/b/c.bin; stat -c %a a/b/c.bin") == "new600\n"
        large = os.urandom(1 << 20) * 10
        assert (await do(s, WriteFile(path="large", data=large))).kind == "done"
        assert (await do(s, ReadFile(path="large"))).data == large
        assert (await do(s, ReadFile(path="~/.bashrc"))).size > 0


async def a_file_that_takes_a_fifth_of_the_slot_s_memory_can_be_written_and_asked_for(host):
    most = "grep VmHWM /proc/1/status"
    async with slot(host) as s:
        before_kib = int((await out(s, most)).split()[1])
        assert (await do(s, WriteFile(path="file", data=bytes(20_000_000)))).kind == "done"
        assert int((await out(s, most)).split()[1]) - before_kib < 50_000, "PID 1 held three copies"
        for _ in range(3):
            read = await do(s, ReadFile(path="file"))  # by a child of PID 1, which is killed where memory is short
            assert read.kind == "file_result" or (read.error, read.limit) == ("limit", "memory"), read
        assert await out(s, "echo next") == "next\n"


async def bad_paths_are_values(host):
    async with slot(host) as s:
        await out(
            s,
            "mkdir d; mkfifo pipe; ln -s loop loop; ln -s /proc/self/mem mem; ln -s /nowhere dangling; touch plain; chmod 0 d",
        )
        cases = [
            (ReadFile(path="none"), "not_found"),
            (ReadFile(path="d"), "is_directory"),
            (ReadFile(path="pipe"), "not_regular"),
            (ReadFile(path="/dev/zero"), "not_regular"),
            (ReadFile(path="loop"), "bad_path"),
            (ReadFile(path="plain/x"), "not_directory"),
            (ReadFile(path="x" * 5000), "bad_path"),
            (ReadFile(path="a\0b"), "bad_path"),
            (ReadFile(path=""), "bad_path"),
            (WriteFile(path="d", data=b""), "is_directory"),
            (WriteFile(path="pipe", data=b"x"), "not_regular"),
            (WriteFile(path="mem", data=b"x"), "bad_path"),
            (WriteFile(path="/proc/1/oom_score_adj", data=b"1000"), "bad_path"),
            (WriteFile(path="/proc/self/mem", data=b"x"), "bad_path"),
            (WriteFile(path="/proc/self/fd/3", data=b"x"), "bad_path"),
            (WriteFile(path="/dev/null", data=b"x"), "bad_path"),
            (WriteFile(path="/usr/x", data=b"x"), "permission"),
            (WriteFile(path="loop", data=b"x"), "bad_path"),
            (WriteFile(path="plain/x", data=b"x"), "not_directory"),
        ]
        for operation, error in cases:
            result = await do(s, operation)
            assert result.kind == "op_error" and result.error == error, (operation.path[:50], result)
            assert error not in {"is_directory", "not_regular"} or operation.path in result.message
        assert b"MemTotal" in (await do(s, ReadFile(path="/proc/meminfo"))).data
        assert (await do(s, WriteFile(path="dangling", data=b"through"))).kind == "done"
        await out(s, "mkdir /elsewhere; ln -s /elsewhere/target link; ln -s /proc/self/root/workspace round")
        assert (await do(s, WriteFile(path="link", data=b"through"))).kind == "done"
        assert await out(s, "cat /elsewhere/target; test -L link && echo link") == "throughlink\n"
        assert (await do(s, WriteFile(path="round/inside", data=b"1"))).kind == "done"
        assert await out(s, "cat inside") == "1"


async def searching(host):
    async with slot(host) as s:
        await out(
            s,
            "mkdir -p src .git; printf 'one\\ntwo needle\\nthree\\n' > src/a.py; echo Needle > src/b.txt; echo needle > .git/x; printf 'needle\\0' > src/bin; mkfifo src/pipe; ln -s /proc/self proc",
        )
        found = await do(s, Search(pattern="needle", path="."))
        assert [(m.path, m.line, m.text) for m in found.matches] == [("/workspace/src/a.py", 2, "two needle")], found
        found = await do(s, Search(pattern="needle", path="src", ignore_case=True, context=1))
        assert [(m.line, m.context) for m in found.matches] == [(1, True), (2, False), (3, True), (1, False)]
        names = await do(s, Search(pattern="", path="src", glob="*.py"))
        assert [m.path for m in names.matches] == ["/workspace/src/a.py"] and names.matches[0].line == 0
        await out(s, "ln -s . link")
        linked = await do(s, Search(pattern="", path="link", glob="src/*.py"))
        assert [m.path for m in linked.matches] == ["/workspace/src/a.py"]
        assert (await do(s, Search(pattern="(", path="."))).error == "bad_pattern"
        assert (await do(s, Search(pattern="x", path="none"))).error == "not_found"
        many = await do(s, Search(pattern=".", path="/usr/include", max_matches=5))
        assert len(many.matches) == 5 and many.truncated


async def a_search_that_finds_more_than_pid_1_can_hold_is_cut(host):
    async with slot(host) as s:
        for name in ("a", "b"):  # each byte of which takes six in JSON
            await do(s, WriteFile(path=name, data=(b"\1" * 2000 + b"\n") * 4000))
        await do(s, WriteFile(path="full", data=b"x" * 4_000_000))
        found = await do(s, Search(pattern="\1", max_matches=10_000))
        assert found.truncated and 100 < len(found.matches) < 1000
        assert {(m.path, m.text) for m in found.matches} == {("/workspace/a", "\1" * 2000)}
        assert await out(s, "echo next") == "next\n"


async def archives(host):
    async with slot(host) as s:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data, mode in (("x/run.sh", b"#!/bin/sh\necho ran\n", 0o755), ("x/data", b"d" * 5000, 0o644)):
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.uid = len(data), mode, 12345
                archive.addfile(info, io.BytesIO(data))
            link = tarfile.TarInfo("x/link")
            link.type, link.linkname = tarfile.SYMTYPE, "data"
            archive.addfile(link)
        done = await do(s, Untar(path="up", data=buffer.getvalue()))
        assert done.kind == "done" and done.count == 3, done
        assert await out(s, "up/x/run.sh; wc -c < up/x/link; stat -c %u up/x/data") == "ran\n5000\n0\n"
        packed = await do(s, Tar(path="up"))
        with tarfile.open(fileobj=io.BytesIO(packed.data)) as archive:
            assert {i.name for i in archive} >= {"./x/run.sh", "./x/data", "./x/link"}
        assert (await do(s, Tar(path="up", max_bytes=1000))).error == "too_large"
        assert (await do(s, Tar(path="none"))).error == "not_found"
        assert (await do(s, Untar(path="up", data=b"no archive" * 100))).kind == "op_error"
        evil = io.BytesIO()
        with tarfile.open(fileobj=evil, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("../../etc/evil"))
        assert (await do(s, Untar(path="up", data=evil.getvalue()))).error == "bad_path"


TREE = """
mkdir -p tree/deep "tree/$(printf 'x%.0s' $(seq 120))" && cd tree
printf 'one' > one; : > empty; head -c 300000 /dev/urandom > large; printf '%513s' x > deep/odd-size; chmod 4751 one
ln one deep/same; ln -s one link; ln -s "$(printf 'y%.0s' $(seq 150))" far; mkfifo pipe
printf 'n' > 'nämé'; printf 'b' > $'\\xff\\xfe'; printf 'l' > "$(printf 'z%.0s' $(seq 200))"
chown 1234:4321 deep/odd-size; touch -d @-5 empty; touch -d @9000000000 large
"""
LISTED = """
cd %s && { find . -type f -printf '%%p %%m %%n %%T@\\n' | sed 's/[.][0-9]*$//'; find . -type d -printf '%%p %%m\\n' -o -type l -printf '%%p %%l\\n'
sha256sum large one deep/*; } | LC_ALL=C sort | cat -v"""


async def an_archive_has_names_links_modes_owners_and_times_of_all_kinds(host):
    """As Python's own reader sees it, and as ours unpacks it again."""
    async with slot(host) as s:
        await out(s, TREE)
        packed = await do(s, Tar(path="tree"))
        with tarfile.open(fileobj=io.BytesIO(packed.data)) as archive:
            found = {member.name: member for member in archive}
            assert archive.extractfile("./deep/odd-size").read() == b"x".rjust(513)  # type: ignore[union-attr]
        assert {name for name in found if name.count("/") < 2} == {
            *(".", "./deep", "./one", "./empty", "./large", "./link", "./far", "./nämé"),
            *("./\udcff\udcfe", "./" + "x" * 120, "./" + "z" * 200),
        }
        assert (found["./one"].mode, found["./far"].linkname) == (0o4751, "y" * 150)
        assert (found["./deep/same"].islnk(), found["./deep/same"].linkname) == (True, "./one")
        assert (found["./empty"].mtime, found["./large"].mtime) == (-5, 9_000_000_000)
        assert (found["./deep/odd-size"].uid, found["./deep/odd-size"].gid) == (1234, 4321)
        assert (await do(s, Untar(path="again", data=packed.data))).kind == "done"
        again, tree = await out(s, LISTED % "again"), await out(s, LISTED % "tree")
        assert again == tree, (again, tree)


# ------------------------------------------------------------------------------------------------- background processes


async def background_processes(host):
    async with slot(host) as s:
        begun = await do(s, ProcStart(command="echo hello; read line; echo got $line; exit 3"))
        state = await do(s, ProcRead(id=begun.id, wait_s=20, until="output"))
        assert state.output == b"hello\n" and state.running
        assert (await do(s, ProcWrite(id=begun.id, data=b"word\n"))).count == 5
        state = await do(s, ProcRead(id=begun.id, wait_s=20, offset=6))
        assert (state.output, state.running, state.exit_code) == (b"got word\n", False, 3)
        assert (await do(s, ProcWrite(id=begun.id, data=b"more"))).kind == "op_error"
        sleeper = await do(s, ProcStart(command="trap 'echo bye; exit 0' TERM; echo up; read forever"))
        await do(s, ProcRead(id=sleeper.id, wait_s=20, until="output"))
        listed = await do(s, ProcList())
        assert [p.running for p in listed.processes] == [False, True]
        await do(s, ProcKill(id=sleeper.id))
        state = await do(s, ProcRead(id=sleeper.id, wait_s=20))
        assert state.output == b"up\nbye\n" and state.exit_code == 0
        assert (await do(s, ProcRead(id="proc-999"))).error == "unknown_process"
        flood = await do(s, ProcStart(command="head -c 3000000 /dev/zero | tr '\\0' y; echo end", buffer_bytes=2000))
        state = await do(s, ProcRead(id=flood.id, wait_s=20))
        assert state.total_bytes == 3_000_004 and state.output.endswith(b"yend\n") and len(state.output) == 2000
        assert state.dropped_bytes == state.total_bytes - 2000
        eof = await do(s, ProcStart(command="cat; echo closed"))
        await do(s, ProcWrite(id=eof.id, data=b"x", eof=True))
        assert (await do(s, ProcRead(id=eof.id, wait_s=20))).output == b"xclosed\n"


async def a_process_whose_output_is_held_is_kept_until_it_is_read_to_its_end(host):
    held = ProcStart(command="echo error >&2", split=True, hold=True)
    async with slot(host) as s:
        unread, terminal = await do(s, held), await do(s, ProcStart(command="echo typed", pty=True, hold=True))
        assert not (await do(s, ProcRead(id=unread.id, wait_s=20))).running
        for _ in range(64):
            begun = await do(s, ProcStart(command="true"))
            assert not (await do(s, ProcRead(id=begun.id, wait_s=20))).running
        assert (await do(s, ProcRead(id=f"{unread.id}-errors"))).output == b"error\n"
        assert (await do(s, ProcRead(id=terminal.id, wait_s=20))).output == b"typed\r\n"
        begun = [await do(s, held) for _ in range(64)]
        for one in begun:
            assert not (await do(s, ProcRead(id=one.id, wait_s=20))).running
        assert (await do(s, held)).error == "limit"
        await do(s, ProcKill(id=begun[9].id))  # its starter gives it up
        assert (await do(s, held)).kind == "proc_state"
        assert (await do(s, ProcRead(id=begun[9].id))).error == "unknown_process"


async def nothing_of_an_output_that_is_held_is_dropped(host):
    slowly = "for n in 1 2 3; do head -c 33000 /dev/zero; sleep 0.3; done; exec head -c 131072 /dev/zero"
    async with slot(host) as s:
        for command, size, whole in (
            (slowly, 200_000, bytes(99_000 + 131_072)),
            ("exec seq 20000", 10_000, "".join(f"{n}\n" for n in range(1, 20_001)).encode()),
        ):
            begun = await do(s, ProcStart(command=command, hold=True, buffer_bytes=size))
            state = await do(s, ProcRead(id=begun.id, wait_s=3, max_bytes=1))  # to its end, or where it waits
            read = b""
            while state.running or len(read) < state.total_bytes:
                state = await do(s, ProcRead(id=begun.id, offset=len(read), wait_s=20, until="output"))
                assert state.dropped_bytes == 0
                read += state.output
            assert read == whole


async def terminals(host):
    async with slot(host) as s:
        begun = await do(
            s,
            ProcStart(
                command="stty size; tty; python3 -c 'import os; print(os.get_terminal_size().columns)'; read x; stty size; echo $x",
                pty=True,
                rows=30,
                cols=99,
            ),
        )
        said = await until_said(s, begun.id, b"\r\n99\r\n")
        assert said.startswith(b"30 99\r\n/dev/pts/"), said
        await do(s, ProcWrite(id=begun.id, data=b"typed\n", rows=40, cols=120))
        state = await do(s, ProcRead(id=begun.id, wait_s=20))
        assert b"40 120" in state.output and state.output.rstrip().endswith(b"typed") and state.exit_code == 0
        shell = await do(s, ProcStart(command="exec bash --norc", pty=True))
        await do(s, ProcWrite(id=shell.id, data=b"sleep 100\n"))
        await out(s, "until grep -qsx sleep /proc/[0-9]*/comm; do sleep 0.02; done")
        await do(s, ProcWrite(id=shell.id, data=b"\x03"))
        await do(s, ProcWrite(id=shell.id, data=b"echo alive-$((40+2))\n"))
        for _ in range(100):
            state = await do(s, ProcRead(id=shell.id, wait_s=0.1, until="quiet", quiet_s=0.1))
            if b"alive-42" in state.output:
                break
        assert b"alive-42" in state.output
        await do(s, ProcKill(id=shell.id, signal="KILL"))


async def quiesce_ends_everything_but_files(host):
    async with slot(host) as s:
        await out(s, "echo kept > file; setsid sleep 1000 & (sleep 1000 & ) ; sleep 0.05")
        long = asyncio.create_task(sh(s, "sleep 1000"))
        await asyncio.sleep(0.1)
        result = await do(s, Quiesce())
        assert result.count >= 3, result
        assert (await long).exit_code == -9
        assert await out(s, "cat file; grep -c sleep /proc/[0-9]*/comm | grep -c :1; true") == "kept\n0\n"


# ------------------------------------------------------------------------------------------------------ life and death


async def starting_many_at_once(host):
    sandboxes = await asyncio.gather(*(host.start(f"many-{i}") for i in range(12)))
    outputs = await asyncio.gather(*(out(s, f"echo {i} > mine; cat mine; ls") for i, s in enumerate(sandboxes)))
    assert outputs == [f"{i}\nmine\n" for i in range(12)]
    stopped = await asyncio.gather(*(s.stop() for s in sandboxes))
    assert all(found.clean for found in stopped), stopped


async def nothing_is_left_after_a_stop(host):
    def mounted():
        return Counter(Path("/proc/self/mounts").read_text().splitlines())

    await freed(host)
    mounts = mounted()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sandbox = await host.start("left")
        await sh(sandbox, "setsid sleep 1000 & for i in $(seq 20); do sleep 1000 & done; disown -a; echo x > /tmp/x")
        pid = sandbox.host_pid
        again = asyncio.gather(sandbox.stop(), sandbox.stop())
        assert [s.clean for s in await again] == [True, True]
        assert not os.path.exists(f"/proc/{pid}")
    await freed(host)
    assert not mounted() - mounts, "what others unmounted meanwhile may be missing"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for tree in host.state.entered.cgroups.trees:
        assert [name for name in os.listdir(tree.path) if name.startswith("slot")] == []


async def a_call_on_an_ended_sandbox_is_slot_lost(host):
    sandbox = await host.start("lost")
    running = asyncio.create_task(sandbox.run("r", Exec(command="sleep 100")))
    await asyncio.sleep(0.1)
    os.kill(sandbox.host_pid, 9)
    assert await asyncio.shield(sandbox.died)
    for call, kind in ((running, OutcomeUnknown), (sandbox.run("n", Exec(command="true")), SlotLost)):
        try:
            await call
        except kind:
            pass
        else:
            raise AssertionError(kind)
    assert (await sandbox.stop()).clean


async def a_slot_that_cannot_start_leaves_nothing(host):
    await freed(host)
    before = os.listdir(f"{host.state.scratch}/slots"), len(os.listdir("/proc/self/fd"))
    for options, kind in (({"network": True}, NotSupported), ({"base": "none"}, NotSupported)):
        try:
            await started(host, "bad", **options)
        except kind as error:
            assert error.code == "not_supported"
        else:
            raise AssertionError(options)
    bwrap, host.state.bwrap = host.state.bwrap, "/bin/false"
    try:
        await host.start("bad")
    except SandboxError as error:
        assert "could not be started" in str(error)
    else:
        raise AssertionError("started")
    finally:
        host.state.bwrap = bwrap
    await freed(host)
    assert (os.listdir(f"{host.state.scratch}/slots"), len(os.listdir("/proc/self/fd"))) == before


async def a_start_that_runs_out_of_descriptors_leaves_nothing(host):
    await freed(host)
    before = os.listdir(f"{host.state.scratch}/slots"), len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1 + spare, hard))
        try:
            await host.start("without")
        except SandboxError as error:
            assert "Too many open files" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sandbox in list(host.state.live):
            assert (await sandbox.stop()).clean
        await freed(host)
        assert os.listdir(f"{host.state.scratch}/slots") == before[0], spare
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before[1]


async def a_slot_that_started_as_the_last_descriptor_went_is_stopped(host):
    await freed(host)
    before = os.listdir(f"{host.state.scratch}/slots")
    no_descriptor = OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # for its PID 1, which runs by then
    with mock.patch.object(pid_1, "pidfd_of", side_effect=no_descriptor):
        try:
            await host.start("without")
        except SandboxError as error:
            assert "Too many open files" in str(error)
        else:
            raise AssertionError("it started")
    for sandbox in list(host.state.live):
        assert (await sandbox.stop()).clean
    await freed(host)
    assert os.listdir(f"{host.state.scratch}/slots") == before


async def a_start_that_is_cancelled_leaves_nothing(host):
    await freed(host)
    before = os.listdir(f"{host.state.scratch}/slots"), len(os.listdir("/proc/self/fd"))
    for number in range(12):
        start = asyncio.create_task(host.start(f"cancelled-{number}"))
        await asyncio.sleep(number * 0.003)
        start.cancel()
        found = (await asyncio.gather(start, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            await found.stop()
    for sandbox in list(host.state.live):
        await sandbox.stop()
    await freed(host)
    assert (os.listdir(f"{host.state.scratch}/slots"), len(os.listdir("/proc/self/fd"))) == before
    for tree in host.state.entered.cgroups.trees:
        assert [name for name in os.listdir(tree.path) if name.startswith("slot")] == []


async def a_slot_takes_no_more_of_the_host_than_doctor_counts(host):
    def used():
        mounts = Path("/proc/self/mountinfo").read_text().count("\n")
        return {"RLIMIT_NOFILE": len(os.listdir("/proc/self/fd")), "fs.mount-max": mounts}

    before = used()
    slots = [await started(host, f"counted-{number}", layers=[]) for number in range(4)]
    await slots[0].change_root([])
    after = used()
    for sandbox in slots:
        assert (await sandbox.stop()).clean
    per_slot = {limit.name: limit.per_slot for limit in host_limits.read()}
    for name, count in before.items():
        assert after[name] - count <= 4 * per_slot[name], (name, count, after[name])


CYCLE = """
import array, os, socket
def send(to, *fds):
    to.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
held = os.open("/workspace/held", os.O_RDWR | os.O_CREAT)
os.write(held, b"written")
a, b = socket.socketpair()
send(a, b.fileno(), held)
send(b, a.fileno(), held)
"""


async def sockets_on_their_way_that_hold_a_file_do_not_keep_a_volume_from_its_freeze(host):
    for number in range(5):
        sandbox = await host.start(f"cycle-{number}")
        await out(sandbox, 'exec python3 -c "$CODE"', env={"CODE": CYCLE})
        layer = await sandbox.freeze()
        async with slot(host, layers=[layer]) as s:
            assert await out(s, "cat held") == "written"
        await host.drop_layer(layer)


async def a_freeze_that_fails_is_its_own_error_and_the_sandbox_is_gone(host):
    """A file of the volume that somebody outside holds stands for whatever keeps a volume from being frozen."""
    sandbox = await host.start("held")
    await out(sandbox, "echo x > held")
    if sandbox.volume.disk is None:
        with open(f"{sandbox.volume.upper}/workspace/held", "a"):
            try:
                await sandbox.freeze()
            except SandboxError as error:
                assert "open for writing" in str(error)
            else:
                raise AssertionError("it was frozen")
            stopped = await sandbox.stop()
            assert stopped.clean, stopped
    else:
        await sandbox.stop()


async def forks_share_a_frozen_layer(host):
    first = await host.start("origin")
    await out(
        first,
        "mkdir -p tree; for i in $(seq 200); do echo $i > tree/$i; done; echo t > /tmp/kept; rmdir /srv; sleep 1000 & disown",
    )
    layer = await first.freeze()
    assert layer.bytes > 0
    async with slot(host, layers=[layer]) as a, slot(host, layers=[layer]) as b:
        assert (
            await out(a, "ls tree | wc -l; cat /tmp/kept; ls -d /srv 2>/dev/null; rm -r tree; echo own > own")
            == "200\nt\n"
        )
        assert (
            await out(b, "ls tree | wc -l; ls own 2>/dev/null; cat /proc/[0-9]*/comm | grep -c sleep; true")
            == "200\n0\n"
        )
        assert await out(b, "ls tree | wc -l; test ! -e own") == "200\n"
    second = await started(host, "above", layers=[layer])
    await out(second, "echo deeper > tree/deeper")
    upper = await second.freeze()
    async with slot(host, layers=[upper, layer]) as s:
        assert await out(s, "ls tree | wc -l; cat tree/deeper") == "201\ndeeper\n"
    await host.drop_layer(upper)
    await host.drop_layer(layer)


async def a_fork_s_mounts_are_those_of_any_slot(host):
    look = "cut -d' ' -f5,6 /proc/self/mountinfo | grep -v ^/.atropos/next | sort; ls -A / /dev; grep -E 'Cap|Seccomp:|NoNew' /proc/self/status"
    async with slot(host) as plain:
        expected = (await out(plain, look)).splitlines()
        layer = await (await host.start("origin-of-mounts")).freeze()
        async with slot(host, layers=[layer]) as fork:
            seen = (await out(fork, look)).splitlines()
            assert seen == expected, set(seen) ^ set(expected)
            assert (await sh(fork, "echo x > /etc/ld.so.preload")).exit_code != 0
            try:
                await fork.change_root([layer])
            except SandboxError as error:
                assert "in use" in str(error)
            else:
                raise AssertionError("a slot in use got another root")
    await host.drop_layer(layer)


async def a_base_of_one_s_own_is_writable_and_stays_as_it_is(host):
    for _ in range(2):
        async with slot(host, base="tiny") as s:
            assert (
                await out(
                    s, "stat -c %u / /etc /etc/passwd; cat /old/file; rm -r /old; echo x >> /etc/passwd; mkdir /new"
                )
                == "0\n0\n0\nold\n"
            )
            assert (
                await out(s, "ls -d /old /new 2>/dev/null; cat /etc/passwd; ls /usr/share 2>/dev/null | cat")
                == "/new\nroot:x:0:0::/root:/bin/bash\nx\n"
            )
            assert "localhost\n" in await out(
                s, "cat /etc/hosts; cat /etc/hostname /etc/resolv.conf /etc/mtab > /dev/null"
            )


async def programs_can_see_the_slots_own_limits(host):
    see = "cd /sys/fs/cgroup; cat memory.max pids.max cpu.max; read used < memory.current; [ $used -gt 0 ] && echo used"
    cores = len(os.sched_getaffinity(0))
    most = "max 100000" if cores == 1 else f"{5_000 * cores} 10000"
    for base in (None, "tiny"):
        async with slot(host, base=base) as s:
            assert await out(s, see) == f"{LIMITS.memory_mib << 20}\n{LIMITS.pids + 1}\n{most}\nused\n"
            assert (await sh(s, "echo 1 > /sys/fs/cgroup/cgroup.procs || echo 1 > /sys/x")).exit_code != 0
            seen = await out(
                s, "cat /sys/devices/system/cpu/online /sys/class/net/lo/mtu; ls /sys/class/net /sys/devices"
            )
            assert (
                seen
                == f"{Path('/sys/devices/system/cpu/online').read_text()}65536\n/sys/class/net:\nlo\n\n/sys/devices:\nsystem\nvirtual\n"
            )
    async with slot(host) as s:
        s.resize(LIMITS.model_copy(update={"memory_mib": 64, "cpu_quota": 0.5}))
        assert await out(s, "cd /sys/fs/cgroup; cat memory.max cpu.max") == f"{64 << 20}\n5000 10000\n"


async def choosing_cores_succeeds_and_changes_nothing(host):
    choose = (
        "import os; all = os.sched_getaffinity(0); os.sched_setaffinity(0, {0}); print(os.sched_getaffinity(0) == all)"
    )
    async with slot(host) as s:
        assert await out(s, f"python3 -c '{choose}'") == "True\n"


WHEEL = """
import zipfile
with zipfile.ZipFile("tool-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("tool.py", "def main(): print('installed')\\n")
    about = "tool-1.0.dist-info/"
    wheel.writestr(about + "METADATA", "Metadata-Version: 2.1\\nName: tool\\nVersion: 1.0\\n")
    wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr(about + "entry_points.txt", "[console_scripts]\\ntool = tool:main\\n")
    wheel.writestr(about + "RECORD", "")
"""


async def a_program_that_pip_installs_over_the_hosts_is_found(host):
    async with slot(host) as s:
        if (await sh(s, "python3 -m pip --version")).exit_code:
            return  # the host has none
        await out(s, "python3 -", stdin=WHEEL.encode())
        installed = await sh(s, "python3 -m pip install -q --no-index ./*.whl", timeout_s=30)
        assert installed.exit_code == 0, installed
        assert await out(s, "tool") == "installed\n"


async def planted_mount_points_lead_nowhere(host):
    first = await host.start("planter")
    await out(
        first,
        "echo /workspace/evil.so > /etc/x; rm -rf /root /media; ln -s /workspace /root; mv /tmp /t; ln -s /etc /tmp",
    )
    await out(
        first,
        "mkdir -p /workspace/.keep; rm -rf /opt; ln -s /oldroot /opt; mv /etc /etc2; ln -s /etc2 /etc; rm -rf /workspace; ln -s / /workspace",
        workdir="/",
    )
    layer = await first.freeze()
    async with slot(host, layers=[layer]) as s:
        assert (
            await out(s, "stat -c %F /etc /tmp /root /workspace /etc/ld.so.preload", workdir="/")
            == "directory\n" * 4 + "regular empty file\n"
        )
        assert (
            await out(
                s,
                "cat /etc/ld.so.preload; touch /etc/ld.so.preload 2>/dev/null; ls /proc/1 >/dev/null && echo fine",
                workdir="/",
            )
            == "fine\n"
        )
    await host.drop_layer(layer)


async def a_start_that_takes_too_long_names_a_high_load(host):
    for load, named in ((4e5, True), (0.1, False)):
        with (
            mock.patch.object(os, "getloadavg", lambda load=load: (load, 0.0, 0.0)),
            mock.patch.object(host_slot, "START_DEADLINE_S", 0.00001),
        ):
            try:
                await host.start("late")
            except SandboxError as error:
                assert (f"the load is {load:.0f} on {os.cpu_count()} cores" in str(error)) == named, error
            else:
                raise AssertionError("it started")


async def starts_that_are_given_up_at_any_moment_are_confirmed_gone(host):
    for milliseconds in [0.5 * n for n in range(20)] * 4:
        with (
            mock.patch.object(host_slot, "START_DEADLINE_S", milliseconds / 1000),
            mock.patch.object(pid_1, "STOP_DEADLINE_S", 3.0),
        ):
            try:
                await (await host.start("late")).stop()
            except SandboxError:
                pass
        assert not host.state.live, (milliseconds, [await sandbox.stop() for sandbox in host.state.live])


async def a_start_for_which_the_spawner_does_nothing_ends_too(host):
    await freed(host)
    before = os.listdir(f"{host.state.scratch}/slots")
    (spawner,) = (pid for pid, line in descendants().items() if "programs/spawner.py" in line)
    os.kill(spawner, signal.SIGSTOP)
    try:
        with (
            mock.patch.object(host_slot, "START_DEADLINE_S", 0.3),
            mock.patch.object(pid_1, "STOP_DEADLINE_S", 0.3),
        ):
            await host.start("late")
    except SandboxError as error:
        assert "could not be started within" in str(error)
    else:
        raise AssertionError("it started")
    finally:
        os.kill(spawner, signal.SIGCONT)
    for sandbox in list(host.state.live):
        stopped = await sandbox.stop()
        assert stopped.clean, stopped
    await freed(host)
    assert os.listdir(f"{host.state.scratch}/slots") == before
    async with slot(host) as s:
        assert await out(s, "echo next") == "next\n"


async def a_start_for_which_the_spawner_can_not_fork_says_so(host):
    await freed(host)
    before = os.listdir(f"{host.state.scratch}/slots")
    (spawner,) = (pid for pid, line in descendants().items() if "programs/spawner.py" in line)
    limits = resource.prlimit(spawner, resource.RLIMIT_NPROC)
    resource.prlimit(spawner, resource.RLIMIT_NPROC, (0, limits[1]))
    try:
        await host.start("without")
    except SandboxError as error:
        assert "Resource temporarily unavailable" in str(error)
    else:
        raise AssertionError("it started")
    finally:
        resource.prlimit(spawner, resource.RLIMIT_NPROC, limits)
    assert not host.state.live
    await freed(host)
    assert os.listdir(f"{host.state.scratch}/slots") == before
    async with slot(host) as s:
        assert await out(s, "echo next") == "next\n"


async def a_stop_that_could_not_be_confirmed_is_tried_again(host):
    sandbox = await started(host, "slow-to-end")
    with mock.patch.object(pid_1, "STOP_DEADLINE_S", 0.0):
        stopped = await sandbox.stop()
    assert not stopped.clean, stopped
    while not (stopped := await sandbox.stop()).clean:  # noqa: ASYNC110 (a scenario has a time limit)
        await asyncio.sleep(0.05)
    assert await sandbox.stop() == stopped
    await freed(host)


@contextmanager
def frozen(seconds, pid):
    """Stop this process and another one, as where a container or machine is frozen; the body runs as this one goes on."""
    os.kill(pid, signal.SIGSTOP)
    me = os.getpid()
    asleep = f"until grep -q '^State:.T' /proc/{me}/status; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", f"{asleep}; sleep {seconds}; kill -CONT {me}; sleep 0.2; kill -CONT {pid}"]):
        os.kill(me, signal.SIGSTOP)
        yield


async def a_call_goes_on_where_all_was_frozen_for_longer_than_it_may_take(host):
    async with slot(host) as sandbox:
        with mock.patch.object(slot_calls, "ANSWER_GRACE_S", 0.5):
            call = asyncio.create_task(sh(sandbox, "echo over", timeout_s=2.5))
            await asyncio.sleep(0)
        with frozen(4.0, sandbox.host_pid):
            assert (await call).output == b"over\n"


async def a_slot_that_ends_where_all_was_frozen_is_confirmed(host):
    sandbox = await host.start("ends-late")
    spawner = parent_of(sandbox.host_pid)
    with mock.patch.object(pid_1, "STOP_DEADLINE_S", 1.0):
        stopping = asyncio.create_task(sandbox.stop())
        for _ in range(3):  # until its PID 1 is killed
            await asyncio.sleep(0)
        with frozen(2.0, spawner):
            stopped = await stopping
    assert stopped.clean, stopped
    await freed(host)


async def a_view_for_whose_copy_there_is_no_room_takes_none(host):
    async with slot(host) as sandbox:
        files = "mkdir /app && cd /app && for i in $(seq 1600); do : > $i; done; ln -s 1 link"
        await out(sandbox, f"{files}; (setsid sleep 1000 >/dev/null 2>&1 &)")
        free = os.statvfs(sandbox.volume.data).f_favail
        assert free < 1600, "the bound on inodes of the tests"
        view, _ = await host.view(sandbox, "view", (), None, ViewFolders(folders=("/app",)))
        try:
            assert os.statvfs(sandbox.volume.data).f_favail == free
            assert (
                await out(view, "cat /app/1600; test -e /app/link || echo no link is followed")
                == "no link is followed\n"
            )
        finally:
            assert (await view.stop()).clean


async def the_probe_finds_every_property(host):
    features = {feature.name: feature for feature in await host.probe()}
    assert len(features) >= 18
    assert features["pids_limit"].ok == host.state.counts_pids, "a fork bomb's processes stay where nothing counts them"
    for feature in features.values():
        assert feature.ok or (not feature.required and feature.fix), feature


def free_cells(host):
    """The places on disk in which nothing is."""
    cells = host.state.entered.cells
    return [
        cell
        for cell in os.listdir(cells)
        if cell != disks.PROBE and not {*os.listdir(f"{cells}/{cell}")} - {disks.BALLOON}
    ]


async def layers_on_disk_are_counted_while_they_are_imported(host):
    """Only with volumes on disk: `test_scenarios.ON_DISK`."""
    most = 0

    async def fill(_):
        nonlocal most
        most += 1
        await host.import_layer(fill)

    await freed(host)
    places = len(free_cells(host))
    try:
        await host.import_layer(fill)
    except SandboxError as error:
        assert f"with {host.max_layers} layers on disk" in str(error), error
    assert most == host.max_layers
    await freed(host)
    assert len(free_cells(host)) == places


async def places_on_disk_are_used_again_once_they_are_empty(host):
    """Only with volumes on disk: `test_scenarios.ON_DISK`."""
    await freed(host)  # the slots of the scenario before this one
    places = len(free_cells(host))
    assert places
    for _ in range(2):
        sandboxes = [await host.start(f"cell-{number}") for number in range(places)]
        assert not free_cells(host)
        for sandbox in sandboxes:
            assert await out(sandbox, "ls -A; mkdir -p a/b; head -c 100000 /dev/zero > a/b/c; chmod 000 a") == ""
        waiting = asyncio.create_task(host.start("one-more"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        for sandbox in sandboxes:
            assert (await sandbox.stop()).clean
        assert (await (await waiting).stop()).clean
        await freed(host)
        assert len(free_cells(host)) == places


ALL = [
    name
    for name, value in list(globals().items())
    if asyncio.iscoroutinefunction(value)
    and name not in ("sh", "out", "do", "until_said", "freed", "started", *ON_DISK_ONLY)
]
