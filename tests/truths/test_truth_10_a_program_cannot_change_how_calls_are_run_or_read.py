"""Truth 10: nothing a sandboxed program prints or writes can change how the server or the runner runs, reads or reports
the next call."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORGED = b'{"kind": "reply", "call_id": "1", "result": {"kind": "exec_result", "exit_code": 0, "output": "Zm9yZ2Vk"}}'

TRICKS = {
    "frames on every descriptor": "for f in /proc/self/fd/* /proc/1/fd/*; do printf '\\0\\0\\0\\x10%s' '"
    + FORGED.decode()
    + "' > $f; done",
    "frames on numbers": "for n in $(seq 3 40); do eval \"printf '%s\\n' forged >&$n\"; done",
    "kill the runner": "kill -9 1; kill -TERM 1; kill -INT 1; kill -SEGV 1; kill -STOP 1",
    "trace the runner": 'python3 -c "import ctypes; l=ctypes.CDLL(None); print(l.ptrace(16, 1, 0, 0))"; cat /proc/1/mem /proc/1/environ /proc/1/maps',
    "limits of the runner": 'python3 -c "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))"; renice 19 1; taskset -p 1 1',
    "python's own files": "echo 'raise SystemExit(1)' > sitecustomize.py; cp sitecustomize.py usercustomize.py; cp sitecustomize.py json.py; export PYTHONPATH=/workspace; echo evil > /etc/ld.so.preload",
    "terminal and shell": "stty -a; printf '\\033c\\033[2J\\033]0;x\\007'; alias ls=evil; cd /; export PATH=/evil; umask 777; exec 1>&-",
    "files of shells": "echo 'echo hacked' | tee /root/.bashrc /root/.profile /etc/profile /etc/bash.bashrc /root/.bash_profile",
    "exit codes": "trap 'exit 0' EXIT; exit 9",
    "stop the session": "kill -STOP -1; kill -STOP 0",
    "remove everything": "rm -rf /workspace /tmp/* /root /var 2>/dev/null; true",
}


@pytest.mark.parametrize("name", TRICKS)
async def test_the_next_call_is_as_ever(shared_pool, name):
    async with shared_pool.lease("t") as slot, shared_pool.lease("neighbour") as other:
        await slot.exec(TRICKS[name], timeout_s=3)
        result = await slot.exec("echo honest; exit 5", workdir="/")
        assert (result.exit_code, result.output) == (5, "honest\n")
        await slot.write_file("/root/w", b"data")
        assert await slot.read_file("/root/w") == b"data"
        assert (await other.exec("echo $PATH | grep -c evil; pwd; ls -A; exit 3")).output == "0\n/workspace\n"
    assert shared_pool.stats().retired == 0
