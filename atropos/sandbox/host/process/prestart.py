"""Work that starts early, in processes of its own, while the server's libraries load.

That is the process which starts sandboxes, and the making of what all slots share: the private Python, the seccomp
filter, the skeleton. Standard library only, and little of it: it stands before everything that takes time to load.
"""

from __future__ import annotations

import errno
import marshal
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atropos.errors import IsolationUnavailable
from atropos.sandbox.host.files.skeleton import Base
from atropos.sandbox.linux import syscalls

_SCRATCH_OPTIONS = "mode=755,size=512m"
_FOLDERS = ("empty", "slots", "own", "runtime", "bases")


@dataclass(frozen=True)
class Prestarted:
    """The process that starts sandboxes, our end of its socket, and the one that prepares what all slots share.

    /proc/self/exe leads PID 1, which the spawner forks, out of its slot, to the spawner's Python; a program may put a
    link to it in the place of a shell. So the spawner is executed from a mount of its own, which is read-only, and
    where nothing can be executed once it runs.
    """

    spawner: subprocess.Popen[bytes]
    sock: socket.socket
    _python: str
    _maker: int
    _answer: int

    def shared(self) -> tuple[bytes, Base | None, int | None]:
        """Wait for what all slots share; once.

        Returns:
            The seccomp filter; the base over the host's folders, where no root file system is given; and the family of
            addresses of slots' gateways, where there are any.

        Raises:
            IsolationUnavailable: it could not be made.
        """
        with os.fdopen(self._answer, "rb") as file:
            data = file.read()
        os.waitpid(self._maker, 0)
        # a text: why it could not be made
        answer: tuple[bytes, dict[str, Any] | None, int | None] | str = (
            marshal.loads(data) if data else "the process that prepared them ended at once"  # noqa: S302 (our fork's)
        )
        if isinstance(answer, str):
            raise IsolationUnavailable(f"the server's own files could not be set up: {answer}")
        # It has loaded its Python: only now may that file become unexecutable.
        if not self.sock.recv(1):
            raise IsolationUnavailable("the process that starts sandboxes ended at once")
        self.sock.setblocking(False)
        # The spawner's own /proc/self/exe keeps this mount after it is detached.
        syscalls.remount_read_only(self._python, syscalls.MS_NOEXEC)
        syscalls.umount(self._python)
        program, skeleton, family = answer
        return program, None if skeleton is None else Base(**skeleton), family


def default_base(base: str | None) -> str | None:
    """The root file system that slots stand on unless one is configured; None: the host's programs over a skeleton."""
    return base or ("/rootfs" if os.path.isdir("/rootfs") else None)


def prestart(scratch: str, base: str | None) -> Prestarted:
    """Mount the server's own file system on `scratch`, and start what it holds.

    Raises:
        IsolationUnavailable: it could not be mounted.
    """
    try:
        syscalls.mount("atropos", scratch, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _SCRATCH_OPTIONS)
        for name in _FOLDERS:
            os.mkdir(f"{scratch}/{name}", 0o755)
        # a mount of its own, so that a slot's start can take all the others away at once
        syscalls.mount(f"{scratch}/slots", f"{scratch}/slots", None, syscalls.MS_BIND)
        # The file itself: a mount on a link would cover what it leads to under another name.
        python = os.path.realpath(sys.executable)
        syscalls.bind_read_only(python)
    except OSError as error:
        cure = ": set TMPDIR to a folder that every user may enter, as /tmp" if error.errno == errno.EACCES else ""
        raise IsolationUnavailable(f"the server's own files could not be set up: {error}{cure}") from error
    answer_r, answer_w = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    # Beside this process, which loads its libraries meanwhile.
    maker = os.fork()
    if maker == 0:
        _make(scratch, parent, answer_w, skeleton=default_base(base) is None)
    os.close(answer_w)
    sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = str(Path(__file__).parents[2] / "programs" / "spawner.py")
    process = subprocess.Popen(
        # -I -S: neither the environment nor site-packages load anything into what every PID 1 is forked from.
        [sys.executable, "-I", "-S", script],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        cwd="/",
        env={},
    )
    theirs.close()
    return Prestarted(process, sock, python, maker, answer_r)


def _make(scratch: str, parent: int, answer: int, *, skeleton: bool) -> None:
    """Prepare what slots share, in the fork, and write the result to `answer`."""
    try:
        syscalls.die_with(parent)
        try:
            from atropos.sandbox.host.files.skeleton import build
            from atropos.sandbox.host.process import runtime, seccomp
            from atropos.sandbox.programs import gateway

            runtime.build(f"{scratch}/runtime")
            base = asdict(build(f"{scratch}/skeleton")) if skeleton else None
            data = marshal.dumps((seccomp.program(), base, gateway.usable_family()))
        except Exception as error:  # its text goes to the server, which ends with it
            data = marshal.dumps(str(error) or type(error).__name__)
        with os.fdopen(answer, "wb") as file:
            file.write(data)
    finally:
        # Without Python's own end, which would run handlers and flush buffers of the process that it was forked from.
        os._exit(0)
