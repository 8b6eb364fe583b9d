# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
"""PID 1 of a slot: starts commands, serves file operations and background processes, reaps.

One file, standard library only, and little of it: this process is the idle cost of every slot and the path of every
call. It speaks frames over one inherited socket. From the server: a length and a marshalled tuple (the server is
trusted, and it is the same Python). To the server: a length, a header length, a JSON header and raw bytes (nothing from
here is trusted there). It never blocks, never asks the name service (NSS would load the slot's own libraries), and never
loads a file of the slot.
"""

import _ctypes  # the package around it would cost 2 MB a slot for the one call made here
import _signal
import errno
import gc
import marshal
import posix as os  # what the module of that name adds would cost each slot's start 1.3 ms
import select
import sys
import time
from _json import encode_basestring_ascii as quote
from _posixsubprocess import fork_exec

SOCKET = 3
CHUNK = 65536
READ_AFTER_S = (0.004, 0.048)
"""How long a command's output waits in its pipe (64 KiB) before it is read: most commands are over by then. Twice what the
last command took, within these bounds: on a busy machine a short command takes long, and each look costs a call. After
one that printed more than half a pipe the shortest: it may have waited for us."""
WORKSPACE = "/workspace"
SMALL_FILE = 1 << 20
"""Files up to this size are served here; a larger one would keep other calls waiting, so a child does it."""
WORK_DEADLINE_S = 30.0
KILL_PATIENCE_S = 5.0
TERM_GRACE_S = 5.0
MAX_PROCS = 64
MAX_REAPED = 256
"""Ended processes taken in one go, before those that wait for an answer get it."""
MAX_ORPHAN_PIPES = 256
"""Pipes of ended commands that background children still hold, and a quarter of all descriptors at most."""
MAX_STDIN_QUEUE = 1 << 20
MAX_SEARCH_FILES = 100_000
MAX_SEARCH_BYTES = 512 << 20
MAX_SEARCH_FILE = 16 << 20
MAX_LINE_CHARS = 2000
ARGUMENT_LIMIT = 120_000
"""The kernel refuses an argument of 128 KiB, so that a longer command goes through a file."""

CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31)  # as bwrap.CAPABILITIES, by number
OPS = {}
IN, OUT = select.POLLIN, select.POLLOUT
WRITABLE = select.POLLOUT | select.POLLERR
"""A full pipe that nobody reads any more is an error and no room: its writer has to learn of it, too."""
now = time.monotonic
PLAIN = (_signal.SIGINT, _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1)
"""Without a handler here, which every program started inherits; the kernel drops such a signal where PID 1 gets it."""


class OpFailed(Exception):
    """An operation that could not be done: a value for the model, not a fault."""

    def __init__(self, error, message, limit=None):
        super().__init__(message)
        self.error, self.message, self.limit = error, message, limit


ERRNO = {
    errno.ENOENT: "not_found",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EEXIST: "exists",
    errno.ENOTEMPTY: "exists",
    errno.ENAMETOOLONG: "bad_path",
    errno.ELOOP: "bad_path",
    errno.EINVAL: "bad_path",
    errno.ENXIO: "not_regular",
    errno.EFBIG: "too_large",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EMFILE: "limit",
    errno.EAGAIN: "limit",
    errno.ENOMEM: "limit",
}
LIMIT = {errno.EMFILE: "files", errno.EAGAIN: "pids", errno.ENOMEM: "memory"}


def failure(error, path=""):
    """The `OpFailed` that an exception stands for."""
    if isinstance(error, OpFailed):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {text(path)}" if path else ""
        return OpFailed(ERRNO.get(error.errno, "io"), os.strerror(error.errno) + where, full(error.errno))
    if isinstance(error, (ValueError, UnicodeError)):
        return OpFailed("bad_path", f"{error}: {text(path)}")
    if isinstance(error, MemoryError):
        return OpFailed("limit", "out of memory", "memory")
    return OpFailed("io", f"{type(error).__name__}: {error}")


def full(number):
    """The limit that an error number tells of."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        try:
            return "inodes" if os.statvfs("/").f_favail == 0 else "disk"
        except OSError:
            return "disk"
    return LIMIT.get(number)


def text(value):
    """Text that any JSON reader takes: what isn't UTF-8 is shown as a replacement character."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.encode("utf-8", "replace").decode("utf-8")


def json(value):
    """JSON of the few types that are sent; the standard module would cost memory in every slot."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        return quote(text(value))
    if isinstance(value, dict):
        return "{" + ",".join(quote(k) + ":" + json(v) for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(json, value)) + "]"
    return repr(value)


# ---------------------------------------------------------------------------------------------------------------- loop


class Loop:
    """Descriptors with a function each, timers, and the frames to the server."""

    def __init__(self):
        self.poll = select.poll()  # not epoll: its watches are counted per user, and other slots can use them all up
        self.readers = {}
        self.writers = {}
        self.timers = {}
        self.incoming = bytearray()
        self.outgoing = []
        self.children = {}
        self.calls = {}
        self.procs = {}
        self.orphans = {}
        self.quiescing = []
        self.serial = 0
        self.environment = {}
        self.block = []
        self.patience = READ_AFTER_S[0]
        self.trouble = -1
        self.alone = False
        self.output_bytes = 1_000_000
        self.wall_s = 3600.0
        self.special = set()
        self.wake = -1
        self.ptrace = 0
        self.max_orphans = min(MAX_ORPHAN_PIPES, os.sysconf("SC_OPEN_MAX") // 4)
        self.oom = -1
        self.null = -1

    def watch(self, fd, function):
        self.readers[fd] = function
        self.poll.register(fd, IN)

    def unwatch(self, fd):
        if self.readers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def later(self, when, function):
        self.serial += 1
        self.timers[self.serial] = (when, function)
        return self.serial

    def run(self):
        poll, readers, writers, timers = self.poll.poll, self.readers, self.writers, self.timers
        while True:
            timeout = None
            if timers:
                timeout = max(0.0, min(when for when, _ in timers.values()) - now()) * 1000
            for fd, event in poll(timeout):
                if event & WRITABLE and fd in writers:
                    writers[fd]()
                    event &= ~OUT
                if event and fd in readers:
                    readers[fd]()
            if timers:
                moment = now()
                for key in [key for key, (when, _) in timers.items() if when <= moment]:
                    timer = timers.pop(key, None)
                    if timer is not None:
                        timer[1]()

    # -- frames

    def receive(self):
        try:
            data = os.read(SOCKET, CHUNK) if self.oom >= 0 else first_message(self)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)  # noqa: SLF001 - the server is gone, and with PID 1 everything here goes
        buffer = self.incoming
        if not buffer and len(data) >= 4 and len(data) == 4 + int.from_bytes(data[:4], "little"):
            self.dispatch(marshal.loads(data[4:]))
            return
        buffer += data
        while len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "little")
            if len(buffer) < 4 + size:
                break
            message = marshal.loads(bytes(buffer[4 : 4 + size]))
            del buffer[: 4 + size]
            self.dispatch(message)

    def dispatch(self, message):
        call, op, arguments = message
        if op == "cancel":
            task = self.calls.get(call)
            if task is not None:
                task.cancel()
            return
        try:
            OPS[op](call, **arguments)
        except Exception as error:
            self.fail(call, failure(error, arguments.get("path", "")))

    def send(self, call, header, *blobs):
        self.calls.pop(call, None)
        raw = header.encode()
        size = 4 + len(raw) + sum(map(len, blobs))
        frame = b"".join((size.to_bytes(4, "little"), len(raw).to_bytes(4, "little"), raw, *blobs))
        if not self.outgoing:
            try:
                sent = os.write(SOCKET, frame)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return
            frame = frame[sent:]
            self.writers[SOCKET] = self.flush
            self.poll.modify(SOCKET, IN | OUT)
        self.outgoing.append(frame)

    def flush(self):
        while self.outgoing:
            frame = self.outgoing[0]
            try:
                sent = os.write(SOCKET, frame[: 1 << 20])
            except BlockingIOError:
                return
            if sent < len(frame):
                self.outgoing[0] = frame[sent:]
            else:
                self.outgoing.pop(0)
        self.writers.pop(SOCKET, None)
        self.poll.modify(SOCKET, IN)

    def answer(self, call, kind, fields, **blobs):
        body = {"kind": kind, **fields}
        sizes = [(name, len(data)) for name, data in blobs.items() if data is not None]
        header = '{"id":%d,"r":%s,"b":%s}' % (call, json(body), json(sizes))
        self.send(call, header, *[data for data in blobs.values() if data is not None])

    def fail(self, call, error):
        self.answer(call, "op_error", {"error": error.error, "message": error.message[:4000], "limit": error.limit})

    # -- children

    def reap(self):
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        ended, self.alone = [], False
        for _ in range(MAX_REAPED):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alone = True
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self.untrace(pid, os.WSTOPSIG(status))
                continue
            child = self.children.pop(pid, None)
            if child is not None:
                ended.append((child, status))
        else:
            self.later(now(), self.reap)
        for child, status in ended:
            child.ended(os.waitstatus_to_exitcode(status))
        if self.alone:
            for call, count in self.quiescing:
                self.answer(call, "done", {"count": count})
            self.quiescing = []

    def untrace(self, pid, number):
        """A child that asked its parent to trace it has stopped: it goes on by itself, with the signal that stopped it."""
        if _ctypes.call_function(self.ptrace, (17, pid, 0, 0 if number == _signal.SIGTRAP else number)) != 0:
            try:
                os.kill(pid, _signal.SIGKILL)
            except OSError:
                pass

    def spawn(self, argv, block, workdir, stdin, stdout, stderr, keep):
        """Start a program in a session of its own. vfork underneath: nothing of this process is copied.

        The C part of `subprocess` does it, with fewer calls to the kernel than posix_spawn. Its child reports a failure by
        writing to `trouble`, an empty file in memory; by the time vfork returns, the child has become the program or
        written.
        """
        kept = tuple(sorted((self.trouble, *keep)))
        if self.oom >= 0:
            # inherited by the child: in a slot out of memory it goes before this process does
            os.pwrite(self.oom, b"1000", 0)
        try:
            pid = fork_exec(
                *(argv, (argv[0].encode(),), False, kept, workdir, block, stdin, -1, -1, stdout, -1, stderr),
                # the child closes one end of the pipe that `subprocess` would have here: any descriptor does
                *(self.wake, self.trouble, False, True, -1, None, None, None, -1, None, True),
            )
        finally:
            if self.oom >= 0:
                os.pwrite(self.oom, b"0", 0)
        told = os.pread(self.trouble, 64, 0)
        if told:
            os.ftruncate(self.trouble, 0)
            os.lseek(self.trouble, 0, 0)
            number = int(told.split(b":")[1], 16)
            raise OSError(number, os.strerror(number))
        return pid

    def shell(self, command, start):
        """Start bash, or sh where there is none, on a command line of any length; `start(argv, keep)` does it."""
        script = -1
        if len(command) > ARGUMENT_LIMIT:
            script = memory_file(command.encode("utf-8", "surrogateescape"))
            arguments, keep = (f"/dev/fd/{script}",), (script,)
        else:
            arguments, keep = ("-c", command), ()
        try:
            return with_room(lambda: start(("/bin/bash", *arguments), keep))
        except FileNotFoundError:
            if exists("/bin/bash"):
                raise
            return with_room(lambda: start(("/bin/sh", *arguments), keep))
        finally:
            if script >= 0:
                os.close(script)


def block_of(environment):
    """An environment as programs get it.

    Raises:
        ValueError: a name that no environment can hold.
    """
    block = []
    for name, value in environment.items():
        if not name or "=" in name:
            raise ValueError("illegal environment variable name")
        block.append(f"{name}={value}".encode("utf-8", "surrogateescape"))
    return block


loop = Loop()


def first_message(loop):
    """The first message carries this process's own oom_score_adj: from inside nobody, this process included, opens it."""
    from _socket import socket

    sock = socket(fileno=SOCKET)
    try:
        data, extra, _, _ = sock.recvmsg(1 << 18, 64, 0x40000000)  # MSG_CMSG_CLOEXEC
    finally:
        sock.detach()
    for _, _, numbers in extra:
        loop.oom = int.from_bytes(numbers[:4], "little")
    return data


def memory_file(data):
    """An unlinked file in memory that holds `data`, at its start."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def members(wanted):
    """Pids of all processes but zombies of which `wanted(pid, session, group)` says so, by /proc."""
    found = []
    try:
        names = os.listdir("/proc")
    except OSError:  # no descriptor is left for it
        return found
    for name in names:
        if name.isdigit() and name != "1":
            try:
                fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fields = os.read(fd, 1024).rpartition(b")")[2].split()
                if fields[0] != b"Z" and wanted(int(name), int(fields[3]), int(fields[2])):
                    found.append(int(name))
            except (OSError, IndexError, ValueError):
                pass
            finally:
                os.close(fd)
    return found


def session_members(session, *, but_group=-1):
    """Pids of all processes in a session, but those of one process group."""
    return members(lambda _, its_session, group: its_session == session and group != but_group)


def signal_each(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def signal_session(session, number):
    """Signal the first process group at once (nothing forks out of it meanwhile), then the session's other groups."""
    try:
        os.killpg(session, number)
    except OSError:
        pass
    again = number == _signal.SIGKILL
    for _ in range(20):
        found = session_members(session, but_group=-1 if again else session)
        signal_each(found, number)
        if not found or not again:
            return


def with_room(start):
    """What `start` returns. Where the limit of processes refuses it, what ended commands left running makes room for it."""
    try:
        return start()
    except BlockingIOError:
        patience = now() + KILL_PATIENCE_S
    while True:
        end_leftovers()
        loop.reap()
        try:
            return start()
        except BlockingIOError:
            if now() > patience:
                raise
        time.sleep(0.002)


def leftovers():
    """Pids of all processes but this one, running commands, background processes, and the sessions of those two."""
    return members(lambda pid, session, _: pid not in loop.children and session not in loop.children)


def end_leftovers():
    """End what commands left running, a bomb that forks faster than it is killed too; children that were asked for stay."""
    if not loop.children:
        kill_all()
        return
    stopped = set()
    # what is stopped forks no more but still counts: after a round or two there is no place left to fork into
    for _ in range(50):
        found = [pid for pid in leftovers() if pid not in stopped]
        signal_each(found, _signal.SIGSTOP)
        stopped.update(found)
        if not found:
            break
    signal_each(stopped, _signal.SIGKILL)


def kill_all():
    """Kill everything but this process. One call to the kernel: nothing can fork away from it."""
    try:
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def path_of(path):
    """An absolute path; relative ones stand in the workspace, `~` is root's home."""
    if path == "~" or path.startswith("~/"):
        path = "/root" + path[1:]
    if "\0" in path or not path:
        raise OpFailed("bad_path", "a path must not be empty or contain NUL")
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"


def exists(path):
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def is_folder(path):
    try:
        return os.stat(path).st_mode & 0o170000 == 0o040000
    except (OSError, ValueError):
        return False


def make_folders(path):
    """A folder and those above it; one that is there already is right."""
    try:
        os.mkdir(path, 0o755)
    except FileNotFoundError:
        parent = path.rstrip("/").rpartition("/")[0]
        if not parent:
            raise
        make_folders(parent)
        make_folders(path)
    except OSError:
        if not is_folder(path):
            raise


# ------------------------------------------------------------------------------------------------------------- commands


class Kept:
    """The head and the tail of a stream, within a bound."""

    __slots__ = ("half", "head", "tail", "tail_size", "total")

    def __init__(self, limit):
        self.half = max(1, limit // 2)
        self.head = b""
        self.tail = []
        self.tail_size = 0
        self.total = 0

    def add(self, data):
        if not self.total and len(data) <= self.half:
            self.head = data  # as a rule it is all there is
            self.total = len(data)
            return
        if type(self.head) is bytes:
            self.head = bytearray(self.head)
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail.append(data)
            self.tail_size += len(data)
            if self.tail_size > 4 * self.half + 4 * CHUNK:
                self.trim()

    def trim(self):
        joined = b"".join(self.tail)[-self.half :]
        self.tail = [joined]
        self.tail_size = len(joined)

    def dropped(self):
        return max(0, self.total - len(self.head) - min(self.half, self.tail_size))

    def value(self):
        if not self.tail:
            return bytes(self.head)
        self.trim()
        lost = self.dropped()
        note = b"\n[... %d bytes dropped ...]\n" % lost if lost else b""
        return b"".join((self.head, note, self.tail[0]))


class Command:
    """One exec call, from its start to its answer."""

    __slots__ = (
        "all",
        "call",
        "cancelled",
        "ends",
        "err",
        "err_fd",
        "fd",
        "limit",
        "out",
        "pid",
        "started",
        "timed_out",
        "timer",
    )

    def __init__(self, call, limit, split):
        self.call = call
        self.all = Kept(limit)
        self.out = Kept(limit) if split else None
        self.err = Kept(limit) if split else None
        self.fd = self.err_fd = self.pid = -1
        self.limit = None
        self.timed_out = self.cancelled = False
        self.started = now()
        self.timer = 0
        self.ends = 0.0

    def listen(self):
        """Read what it prints from now on. Not sooner: a short command is over by then, and is read once, at its end."""
        self.timer = loop.later(self.ends, self.timeout)
        loop.watch(self.fd, self.readable)
        if self.err_fd >= 0:
            loop.watch(self.err_fd, self.readable_err)

    def readable(self):
        self.take(self.fd, self.out)

    def readable_err(self):
        self.take(self.err_fd, self.err)

    def take(self, fd, part):
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self.close(fd)
            return 0
        self.all.add(data)
        if part is not None:
            part.add(data)
        return len(data)

    def close(self, fd):
        if fd < 0:
            return
        loop.unwatch(fd)
        os.close(fd)
        if fd == self.fd:
            self.fd = -1
        else:
            self.err_fd = -1

    def drain(self, fd, part):
        """What the ended program left in the pipe, and not what a background child goes on writing."""
        left = 1 << 20
        while left > 0 and fd in (self.fd, self.err_fd):
            got = self.take(fd, part)
            if not got:
                return
            left -= got

    def ended(self, code):
        loop.timers.pop(self.timer, None)
        least, most = READ_AFTER_S
        loop.patience = least if self.all.total > CHUNK // 2 else min(max(2 * (now() - self.started), least), most)
        if self.timed_out or self.cancelled:
            self.settle(code, now() + KILL_PATIENCE_S)
        else:
            self.finish(code)

    def settle(self, code, until):
        """Answer a killed command when all that was killed with it is gone, not only its first process."""
        if not session_members(self.pid) or now() > until:
            self.finish(code)
            return
        signal_session(self.pid, _signal.SIGKILL)
        loop.later(now() + 0.002, lambda: self.settle(code, until))

    def finish(self, code):
        for fd, part in ((self.fd, self.out), (self.err_fd, self.err)):
            if fd >= 0:
                self.drain(fd, part)
        # a background child may hold the pipe: it goes on reading into nothing, so that the child isn't killed by SIGPIPE
        for fd in (self.fd, self.err_fd):
            if fd >= 0:
                adopt(fd)
        self.fd = self.err_fd = -1
        self.reply(code)

    def reply(self, code):
        output = self.all.value()
        lost = self.all.dropped()
        if not (lost or self.timed_out or self.cancelled or self.limit or self.out) and code is not None:
            # as a rule: what is left out has its default
            header = '{"id":%d,"r":{"kind":"exec_result","exit_code":%d,"duration_s":%.6f},"b":[["output",%d]]%s}' % (
                *(self.call, code, now() - self.started, len(output)),
                ',"alone":true' if loop.alone else "",
            )
            loop.send(self.call, header, output)
            return
        limit = self.limit or ("time" if self.timed_out else "output" if lost else None)
        blobs = [("output", output)]
        if self.out is not None:
            blobs += [("stdout", self.out.value()), ("stderr", self.err.value())]
        header = (
            '{"id":%d,"r":{"kind":"exec_result","exit_code":%s,"timed_out":%s,"cancelled":%s,"truncated":%s,'
            '"dropped_bytes":%d,"limit":%s,"duration_s":%.6f},"b":%s}'
            % (
                self.call,
                json(code),
                "true" if self.timed_out else "false",
                "true" if self.cancelled else "false",
                "true" if lost else "false",
                lost,
                json(limit),
                now() - self.started,
                "[" + ",".join('["%s",%d]' % (name, len(data)) for name, data in blobs) + "]",
            )
        )
        loop.send(self.call, header, *[data for _, data in blobs])

    def kill(self):
        signal_session(self.pid, _signal.SIGKILL)
        # a process that even SIGKILL doesn't end (it waits in the kernel) doesn't keep the caller
        self.timer = loop.later(now() + KILL_PATIENCE_S, self.give_up)

    def give_up(self):
        if loop.children.pop(self.pid, None) is not None:
            self.ended(-9)

    def timeout(self):
        self.timed_out = True
        self.kill()

    def cancel(self):
        if self.pid in loop.children and not self.cancelled:
            self.cancelled = True
            loop.timers.pop(self.timer, None)
            self.kill()


def adopt(fd):
    """Read a pipe into nothing until its last writer is gone; beyond a number, the oldest is closed."""
    loop.unwatch(fd)
    while len(loop.orphans) >= loop.max_orphans:
        forget(next(iter(loop.orphans)))
    loop.orphans[fd] = True

    def sink():
        try:
            if os.read(fd, CHUNK):
                return
        except BlockingIOError:
            return
        forget(fd)

    loop.watch(fd, sink)


def forget(fd):
    loop.orphans.pop(fd, None)
    loop.unwatch(fd)
    os.close(fd)


def op_exec(call, command, timeout_s, workdir, env, stdin, split, max_output_bytes):
    block = block_of({**loop.environment, **env}) if env else loop.block
    limit = min(max_output_bytes or loop.output_bytes, loop.output_bytes)
    where = path_of(workdir) if workdir else WORKSPACE
    task = Command(call, limit, split)
    fds = []
    try:
        task.fd, write = os.pipe2(os.O_CLOEXEC)
        fds.append(write)
        os.set_blocking(task.fd, False)
        write_err = write
        if split:
            task.err_fd, write_err = os.pipe2(os.O_CLOEXEC)
            fds.append(write_err)
            os.set_blocking(task.err_fd, False)
        source = loop.null
        if stdin is not None:
            source = memory_file(stdin)
            fds.append(source)

        def start(argv, keep):
            return loop.spawn(argv, block, where, source, write, write_err, keep)

        try:
            task.pid = loop.shell(command, start)
        except (FileNotFoundError, NotADirectoryError):
            if workdir is not None or is_folder(WORKSPACE):
                raise
            make_folders(WORKSPACE)  # the slot's own programs may have removed it
            task.pid = loop.shell(command, start)
    except BaseException as error:
        for fd in (task.fd, task.err_fd):
            if fd >= 0:
                os.close(fd)
        if not isinstance(error, OSError):
            raise
        not_started(task, error, workdir)
        return
    finally:
        for fd in fds:
            os.close(fd)
    loop.children[task.pid] = task
    loop.calls[call] = task
    task.ends = task.started + min(timeout_s or loop.wall_s, loop.wall_s)
    if task.ends <= task.started + loop.patience:
        task.listen()
    else:
        task.timer = loop.later(task.started + loop.patience, task.listen)


def not_started(task, error, workdir):
    """A command that never ran: exit code None, and the reason as its output."""
    task.limit = full(error.errno)
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES) and not is_folder(path_of(workdir or ".")):
        raise OpFailed(
            ERRNO[error.errno], f"the working directory does not exist or can't be entered: {workdir or WORKSPACE}"
        )
    reason = {"pids": "the slot's limit of processes is reached", "memory": "the slot's memory is used up"}
    told = reason.get(task.limit, os.strerror(error.errno))
    task.all.add(f"the command could not be started: {told}\n".encode())
    task.reply(None)


# --------------------------------------------------------------------------------------------------- background processes


class Proc:
    """A background process and the rolling buffer of its output."""

    def __init__(self, ident, command, size, pty):
        self.id, self.command, self.size, self.pty = ident, command, size, pty
        self.pid = self.fd = self.stdin = -1
        self.buffer = bytearray()
        self.total = 0
        self.code = None
        self.running = True
        self.started = self.last = now()
        self.finished = 0.0
        self.waiters = []
        self.queue = bytearray()
        self.eof = False

    def readable(self):
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # the last program on a terminal has gone
            data = b""
        if not data:
            self.close_output()
            return False
        self.buffer += data
        self.total += len(data)
        if len(self.buffer) > 2 * self.size:
            del self.buffer[: -self.size]
        self.last = now()
        self.wake()
        return True

    def close_output(self):
        if self.fd >= 0:
            loop.unwatch(self.fd)
            loop.writers.pop(self.fd, None)
            os.close(self.fd)
            if self.stdin == self.fd:
                self.stdin = -1
            self.fd = -1

    def close_stdin(self):
        if self.stdin >= 0 and self.stdin != self.fd:
            if loop.writers.pop(self.stdin, None) is not None:
                loop.poll.unregister(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def ended(self, code):
        budget = 64
        while budget and self.fd >= 0 and self.readable():
            budget -= 1
        self.code, self.running, self.finished = code, False, now()
        self.close_stdin()
        self.wake()

    def kept(self):
        return bytes(self.buffer[-self.size :])

    def state(self, offset, limit, *, output=True):
        data = self.kept() if output else b""
        first = self.total - len(data)
        start = min(max(offset, first), self.total)
        data = data[start - first :][:limit]
        fields = {
            "id": self.id,
            "command": self.command[:10_000],
            "pid": self.pid,
            "running": self.running,
            "exit_code": self.code,
            "offset": start if output else self.total,
            "total_bytes": self.total,
            "dropped_bytes": max(0, start - offset) if output else 0,
            "uptime_s": round((now() if self.running else self.finished) - self.started, 3),
            "pty": self.pty,
        }
        return fields, data

    def wake(self):
        for waiter in list(self.waiters):
            waiter.check()

    def write(self, data, *, eof):
        if self.stdin < 0:
            raise OpFailed("io", "its input is closed" if self.running else "the process has ended")
        if len(self.queue) + len(data) > MAX_STDIN_QUEUE:
            raise OpFailed("limit", f"more than {MAX_STDIN_QUEUE} bytes wait to be read by the process", "output")
        self.queue += data
        self.eof = self.eof or eof
        self.feed()

    def feed(self):
        try:
            while self.queue:
                sent = os.write(self.stdin, self.queue[:CHUNK])
                del self.queue[:sent]
        except BlockingIOError:
            self.want_write(wanted=True)
            return
        except OSError:
            self.queue.clear()
            self.close_stdin()
            return
        self.want_write(wanted=False)
        if self.eof:
            self.close_stdin()

    def want_write(self, *, wanted):
        if self.stdin < 0 or wanted == (self.stdin in loop.writers):
            return
        if wanted:
            loop.writers[self.stdin] = self.feed
        else:
            loop.writers.pop(self.stdin)
        if self.stdin == self.fd:
            loop.poll.modify(self.fd, IN | (OUT if wanted else 0))
        elif wanted:
            loop.poll.register(self.stdin, OUT)
        else:
            loop.poll.unregister(self.stdin)

    def harden_kill(self):
        if self.running:
            signal_session(self.pid, _signal.SIGKILL)


class Waiter:
    """A `proc_read` that waits."""

    def __init__(self, call, proc, offset, max_bytes, until, deadline, quiet_s):
        self.call, self.proc, self.offset, self.max_bytes = call, proc, offset, max_bytes
        self.until, self.deadline, self.quiet_s = until, deadline, quiet_s
        self.begun = now()
        self.timer = 0
        self.finished = False
        proc.waiters.append(self)
        loop.calls[call] = self
        self.check()

    def check(self):
        if self.finished:
            return
        moment, proc = now(), self.proc
        loop.timers.pop(self.timer, None)
        wake = self.deadline
        if not proc.running or moment >= self.deadline or (self.until == "output" and proc.total > self.offset):
            self.cancel()
            return
        if self.until == "quiet":
            quiet = max(proc.last, self.begun) + self.quiet_s
            if moment >= quiet:
                self.cancel()
                return
            wake = min(wake, quiet)
        self.timer = loop.later(wake, self.check)

    def cancel(self):
        if not self.finished:
            self.finished = True
            loop.timers.pop(self.timer, None)
            self.proc.waiters.remove(self)
            answer_state(self.call, self.proc, self.offset, self.max_bytes)


def answer_state(call, proc, offset=0, limit=0, *, output=True):
    fields, data = proc.state(offset, limit, output=output)
    loop.answer(call, "proc_state", fields, output=data)


def open_terminal(rows, cols):
    """(master, path of the other end). By hand: the C library's way may ask the name service for a group."""
    import fcntl
    import termios

    try:
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # which says nothing of the disk here
            raise OpFailed("limit", "the slot's terminals are used up") from None
        raise
    try:
        fcntl.ioctl(master, 0x40045431, (0).to_bytes(4, "little"))  # TIOCSPTLCK: unlock
        number = int.from_bytes(fcntl.ioctl(master, 0x80045430, b"\0" * 4), "little")  # TIOCGPTN
        resize(master, rows, cols, fcntl, termios)
    except OSError:
        os.close(master)
        raise
    return master, f"/dev/pts/{number}"


def resize(fd, rows, cols, fcntl, termios):
    size = rows.to_bytes(2, "little") + cols.to_bytes(2, "little") + b"\0" * 4
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def spawn_on_terminal(argv, block, workdir, path, keep):
    """Start a program with a terminal of its own: the first that the leader of a new session opens."""
    environment = dict(line.split(b"=", 1) for line in block)
    dup2 = os.POSIX_SPAWN_DUP2
    actions = [(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDWR, 0), (dup2, 0, 1), (dup2, 0, 2)]
    actions += [(dup2, fd, fd) for fd in keep]
    os.chdir(workdir)
    if loop.oom >= 0:
        os.pwrite(loop.oom, b"1000", 0)
    try:
        return os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=())
    finally:
        if loop.oom >= 0:
            os.pwrite(loop.oom, b"0", 0)
        os.chdir("/")


def op_proc_start(call, command, workdir, env, pty, rows, cols, buffer_bytes):
    if sum(proc.running for proc in loop.procs.values()) >= MAX_PROCS:
        raise OpFailed("limit", f"{MAX_PROCS} background processes run already", "pids")
    while len(loop.procs) >= MAX_PROCS:
        oldest = next(key for key, proc in loop.procs.items() if not proc.running)
        loop.procs.pop(oldest).close_output()
    loop.serial += 1
    proc = Proc(f"proc-{loop.serial}", command, buffer_bytes, pty)
    environment = {**loop.environment, **env}
    fds, mine = [], []
    where = path_of(workdir) if workdir else WORKSPACE
    try:
        if pty:
            environment = {
                **environment,
                "TERM": env.get("TERM", "xterm-256color"),
                "LINES": str(rows),
                "COLUMNS": str(cols),
            }
            master, path = open_terminal(rows, cols)
            mine.append(master)
            proc.fd = proc.stdin = master
            block = block_of(environment)

            def start(argv, keep):
                return spawn_on_terminal(argv, block, where, path, keep)
        else:
            (read, write), (their_in, my_in) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
            fds += [write, their_in]
            mine += [read, my_in]
            os.set_blocking(read, False)
            os.set_blocking(my_in, False)
            proc.fd, proc.stdin = read, my_in
            block = block_of(environment)

            def start(argv, keep):
                return loop.spawn(argv, block, where, their_in, write, write, keep)

        proc.pid = loop.shell(command, start)
    except BaseException as error:
        for fd in mine:
            os.close(fd)
        raise failure(error, workdir or "") from None
    finally:
        for fd in fds:
            os.close(fd)
    loop.procs[proc.id] = proc
    loop.children[proc.pid] = proc
    loop.watch(proc.fd, proc.readable)
    answer_state(call, proc)


def proc_of(ident):
    proc = loop.procs.get(ident)
    if proc is None:
        raise OpFailed("unknown_process", f"no background process has the id {ident!r}")
    return proc


def op_proc_read(call, id, offset, max_bytes, wait_s, until, quiet_s):  # noqa: A002
    proc = proc_of(id)
    if wait_s > 0 and proc.running:
        Waiter(call, proc, offset, max_bytes, until, now() + min(wait_s, loop.wall_s), quiet_s)
    else:
        answer_state(call, proc, offset, max_bytes)


def op_proc_write(call, id, data, eof, rows, cols):  # noqa: A002
    proc = proc_of(id)
    if (rows is not None or cols is not None) and proc.pty and proc.fd >= 0:
        import fcntl
        import termios

        size = fcntl.ioctl(proc.fd, termios.TIOCGWINSZ, b"\0" * 8)
        old_rows, old_cols = int.from_bytes(size[:2], "little"), int.from_bytes(size[2:4], "little")
        resize(proc.fd, rows or old_rows, cols or old_cols, fcntl, termios)
    if data or eof:
        proc.write(data + b"\x04" if proc.pty and eof else data, eof=eof and not proc.pty)
    loop.answer(call, "done", {"count": len(data)})


def op_proc_kill(call, id, signal):  # noqa: A002
    proc = proc_of(id)
    if proc.running:
        signal_session(proc.pid, getattr(_signal, f"SIG{signal}"))
        if signal == "TERM":
            loop.later(now() + TERM_GRACE_S, proc.harden_kill)
    answer_state(call, proc, proc.total)


def op_proc_list(call):
    states = [proc.state(0, 0, output=False)[0] for proc in loop.procs.values()]
    loop.answer(call, "proc_listing", {"processes": states})


def op_end_leftovers(call):
    """Kill what ended commands left running; answered when it is gone, or after `KILL_PATIENCE_S`."""
    end_leftovers()
    wait_for_leftovers(call, now() + KILL_PATIENCE_S)


def wait_for_leftovers(call, until):
    loop.reap()
    if now() > until or not leftovers():
        loop.answer(call, "done", {})
    else:
        loop.later(now() + 0.002, lambda: wait_for_leftovers(call, until))


def op_end_all(call):
    """Kill everything but this process; what was running is answered for as it ends."""
    kill_all()
    loop.answer(call, "done", {})


def op_quiesce(call):
    """Kill everything but this process."""
    count = sum(name.isdigit() for name in os.listdir("/proc")) - 1
    kill_all()
    loop.quiescing.append((call, count))
    loop.reap()


# ---------------------------------------------------------------------------------------------------------------- files


class Work:
    """An operation that a forked child does, because it could block or take long; it is killed at its deadline."""

    __slots__ = ("call", "data", "fd", "pid", "timer", "why")

    def __init__(self, call, job):
        self.call, self.data, self.why = call, [], None
        self.fd, write = os.pipe2(os.O_CLOEXEC)
        if loop.oom >= 0:
            os.pwrite(loop.oom, b"1000", 0)
        try:
            self.pid = with_room(os.fork)
        except OSError:
            os.close(self.fd)
            os.close(write)
            raise
        finally:
            if loop.oom >= 0 and getattr(self, "pid", 1) != 0:
                os.pwrite(loop.oom, b"0", 0)
        if self.pid == 0:
            in_child(job, write)
        os.close(write)
        os.set_blocking(self.fd, False)
        loop.children[self.pid] = self
        loop.calls[call] = self
        loop.watch(self.fd, self.readable)
        self.timer = loop.later(now() + WORK_DEADLINE_S, self.timeout)

    def readable(self):
        try:
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return
        if data:
            self.data.append(data)
            return
        self.finish()

    def timeout(self):
        self.why = OpFailed("timeout", f"the operation took longer than {WORK_DEADLINE_S:.0f} s", "time")
        self.stop()

    def cancel(self):
        self.why = OpFailed("timeout", "the operation was cancelled")
        self.stop()

    def stop(self):
        try:
            os.kill(self.pid, _signal.SIGKILL)
        except OSError:
            pass
        self.finish()

    def ended(self, code):
        pass  # the end of its pipe tells

    def finish(self):
        if self.fd < 0:
            return
        loop.timers.pop(self.timer, None)
        loop.unwatch(self.fd)
        os.close(self.fd)
        self.fd = -1
        if self.why is None:
            try:
                outcome = marshal.loads(b"".join(self.data))
            except (EOFError, ValueError, TypeError):
                self.why = OpFailed("limit", "the operation was killed before it ended", "memory")
            else:
                if outcome[0] == "ok":
                    loop.answer(self.call, outcome[1], outcome[2], **outcome[3])
                    return
                self.why = OpFailed(*outcome[1:])
        loop.fail(self.call, self.why)


def in_child(job, write):
    global os
    try:
        _signal.set_wakeup_fd(-1)
        # an open descriptor could be reached by a path through /proc/self/fd
        os.dup2(write, 0)
        os.closerange(1, 1 << 16)
        try:
            import os  # all of it

            result = marshal.dumps(("ok", *job()))
        except BaseException as error:
            failed = failure(error)
            result = marshal.dumps(("failed", failed.error, failed.message, failed.limit))
        view = memoryview(result)
        while view:
            view = view[os.write(0, view) :]
    finally:
        os._exit(0)


def is_special(device):
    """Whether a device number is /proc's or the like, where a plain file may block or be this very process."""
    return device in loop.special


def open_at_once(path, flags, mode=0o644, folder=None):
    """Without waiting for a program that holds a lease (F_SETLEASE) on the file."""
    try:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode, dir_fd=folder)
    except BlockingIOError:
        raise OpFailed("io", f"a program holds a lease on the file: {text(path)}") from None


def open_regular(path, flags=os.O_RDONLY, folder=None):
    """A regular file opened without ever waiting: not on a FIFO, not on a device, not on a lease."""
    fd = open_at_once(path, flags, folder=folder)
    try:
        found = os.fstat(fd)
        kind = found.st_mode & 0o170000
        if kind == 0o040000:
            raise OpFailed("is_directory", f"is a directory: {text(path)}")
        if kind != 0o100000:
            raise OpFailed("not_regular", f"is not a regular file: {text(path)}")
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def read_all(fd, offset, limit):
    parts = []
    while limit > 0:
        data = os.pread(fd, min(limit, 1 << 20), offset)
        if not data:
            break
        parts.append(data)
        offset += len(data)
        limit -= len(data)
    return b"".join(parts)


def sha256(data=b""):
    try:
        from _sha2 import sha256
    except ImportError:
        from _sha256 import sha256
    return sha256(data)


def digest(data):
    return sha256(data).hexdigest()


def read_result(fd, found, offset, max_bytes):
    data = read_all(fd, offset, max_bytes)
    size = max(found.st_size, offset + len(data))
    whole = offset == 0 and len(data) == size
    fields = {"size": size, "mode": found.st_mode & 0o7777, "sha256": digest(data) if whole else None}
    return "file_result", fields, {"data": data}


def op_read_file(call, path, offset, max_bytes):
    path = path_of(path)
    fd, found = open_regular(path)
    try:
        if not is_special(found.st_dev) and min(max_bytes, max(0, found.st_size - offset)) <= SMALL_FILE:
            kind, fields, blobs = read_result(fd, found, offset, max_bytes)
            loop.answer(call, kind, fields, **blobs)
            return
    finally:
        os.close(fd)

    def job():
        fd, found = open_regular(path)
        if is_special(found.st_dev):
            owner = os.readlink(f"/proc/self/fd/{fd}").split("/")[2:3]
            if owner in (["1"], [str(os.getpid())]):  # a copy of PID 1, with all that it has in memory
                raise OpFailed("permission", f"is a file of the process that serves files: {text(path)}")
        return read_result(fd, found, offset, max_bytes)

    Work(call, job)


def folder_of(path):
    """(descriptor of the parent folder, name), symbolic links in the last place followed, and never into /proc."""
    at, name = None, path
    for _ in range(40):
        parent, _, last = name.rpartition("/")
        if last in ("", ".", ".."):
            if at is not None:
                os.close(at)
            raise OpFailed("is_directory", f"is a directory: {text(path)}")
        opened = os.open(
            parent or ("/" if name.startswith("/") else "."), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at
        )
        if at is not None:
            os.close(at)
        at = opened
        if is_special(os.fstat(at).st_dev):
            os.close(at)
            raise OpFailed("bad_path", f"files under /proc and /dev are not written this way: {text(path)}")
        try:
            target = os.readlink(last, dir_fd=at)
        except OSError:
            return at, last
        name = target
    os.close(at)
    raise OpFailed("bad_path", f"too many symbolic links: {text(path)}")


def make_parents(path):
    parent = path.rpartition("/")[0]
    if parent and not is_folder(parent):
        try:
            make_folders(parent)
        except FileExistsError:
            raise OpFailed("not_directory", f"a part of the path is not a directory: {text(path)}") from None


def op_write_file(call, path, data, mode, append, if_sha256):
    path = path_of(path)
    if len(data) <= SMALL_FILE:
        kind, fields, blobs = write_file(path, data, mode, append, if_sha256)
        loop.answer(call, kind, fields, **blobs)
    else:
        Work(call, lambda: write_file(path, data, mode, append, if_sha256))


def write_file(path, data, mode, append, if_sha256):
    make_parents(path)
    folder, name = folder_of(path)
    try:
        old = None
        try:
            old = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            pass
        if old is not None and old.st_mode & 0o170000 != 0o100000:
            is_folder = old.st_mode & 0o170000 == 0o040000
            raise OpFailed(
                *(("is_directory", "is a directory") if is_folder else ("not_regular", "is not a regular file"))
            )
        if if_sha256 is not None:
            check_unchanged(folder, name, if_sha256)
        if append:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            fd = open_at_once(name, flags, 0o644 if mode is None else mode, folder)
            try:
                put(fd, data, mode)
            finally:
                os.close(fd)
        else:
            replace(folder, name, data, mode, old)
    finally:
        os.close(folder)
    return "done", {"count": len(data)}, {}


def put(fd, data, mode):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    if mode is not None:
        os.fchmod(fd, mode)


def replace(folder, name, data, mode, old):
    """Write beside, then rename: a reader sees the old file or the new one, and a full disk keeps the old one."""
    beside = f".{os.urandom(9).hex()}.tmp"  # a name that no program can have taken already, and never too long
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(beside, flags, 0o644, dir_fd=folder)
    try:
        try:
            put(fd, data, mode if mode is not None or old is None else old.st_mode & 0o7777)
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, old.st_uid, old.st_gid)
        finally:
            os.close(fd)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(beside, dir_fd=folder)
        raise


def check_unchanged(folder, name, wanted):
    try:
        fd = open_at_once(name, os.O_RDONLY | os.O_NOFOLLOW, folder=folder)
    except FileNotFoundError:
        raise OpFailed("changed", "the file is gone") from None
    try:
        found, left = sha256(), 64 << 20
        while left > 0 and (data := os.read(fd, 1 << 18)):  # piece by piece: PID 1's memory is the slot's
            found.update(data)
            left -= len(data)
        if found.hexdigest() != wanted:
            raise OpFailed("changed", "the file has changed since it was read")
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------- in a child of their own


def op_search(call, path, **options):
    path = path_of(path)
    Work(call, lambda: search(path, **options))


def walk(top):
    """(path, stat) of the regular files under `top`, in order; links aren't followed, /proc and the like not entered."""
    try:
        found = os.lstat(top)
    except OSError as error:
        raise failure(error, top) from None
    if found.st_mode & 0o170000 == 0o120000:
        top = os.path.realpath(top)
        found = os.stat(top)
    if found.st_mode & 0o170000 == 0o100000:
        yield top, found
        return
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        folders = []
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if is_special(found.st_dev):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name != ".git":
                    folders.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path, found
        pending += reversed(folders)


def search(path, pattern, glob, max_matches, context, ignore_case):
    import fnmatch
    import re

    wanted = None
    if pattern:
        try:
            wanted = re.compile(pattern.encode(), re.IGNORECASE if ignore_case else 0)
        except (re.error, RecursionError, OverflowError) as error:
            raise OpFailed("bad_pattern", f"the pattern is not a regular expression: {error}") from None
    matches, files, budget, cut = [], 0, MAX_SEARCH_BYTES, False
    for name, found in walk(path):
        shown = os.path.relpath(name, path) if name != path else name
        if glob and not (fnmatch.fnmatch(shown, glob) or fnmatch.fnmatch(os.path.basename(name), glob)):
            continue
        files += 1
        if files > MAX_SEARCH_FILES or budget <= 0 or len(matches) >= max_matches:
            cut = True
            break
        if wanted is None:
            matches.append({"path": text(name), "line": 0, "text": ""})
            continue
        try:
            fd, opened = open_regular(name)
        except (OSError, OpFailed):
            continue
        try:
            if is_special(opened.st_dev):
                continue
            data = read_all(fd, 0, min(found.st_size, MAX_SEARCH_FILE))
        except OSError:
            continue
        finally:
            os.close(fd)
        budget -= len(data)
        if b"\0" not in data[:8192]:
            cut = in_file(matches, text(name), data, wanted, max_matches, context) or cut
    return "search_result", {"matches": matches, "files": files, "truncated": cut}, {}


def in_file(matches, name, data, wanted, max_matches, context):
    """Add a file's matching lines, and `context` lines around them; True when the bound was reached."""
    if not wanted.search(data):
        return False
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    hits = [number for number, line in enumerate(lines) if wanted.search(line)]
    shown = {}
    for hit in hits:
        for number in range(max(0, hit - context), min(len(lines), hit + context + 1)):
            shown.setdefault(number, True)
        shown[hit] = False
    for number in sorted(shown):
        if len(matches) >= max_matches:
            return True
        line = text(lines[number].rstrip(b"\r"))[:MAX_LINE_CHARS]
        matches.append({"path": name, "line": number + 1, "text": line, "context": shown[number]})
    return False


def op_tar(call, path, max_bytes):
    path = path_of(path)
    Work(call, lambda: tar(path, max_bytes))


def tar_module():
    import tarfile

    # both would ask the name service, which loads libraries of the slot
    tarfile.pwd = tarfile.grp = None
    return tarfile


class Bounded:
    """A file to write to, in memory, that refuses to grow beyond a bound."""

    def __init__(self, limit):
        self.limit, self.parts, self.size = limit, [], 0

    def write(self, data):
        self.size += len(data)
        if self.size > self.limit:
            raise OpFailed("too_large", f"the archive is larger than {self.limit} bytes", "output")
        self.parts.append(bytes(data))
        return len(data)


def tar(path, max_bytes):
    tarfile = tar_module()
    os.lstat(path)
    out = Bounded(max_bytes)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=512 * 128) as archive:
        if os.path.isdir(path):
            add_folders(archive, path)
        else:
            add_file(archive, None, path, os.path.basename(os.path.normpath(path)))
    return "file_result", {"size": out.size, "mode": 0o644, "sha256": None}, {"data": b"".join(out.parts)}


def add_folders(archive, top):
    """A folder and all below it. Programs of the slot may move things meanwhile: below it no link is followed, nothing of
    /proc is read, and what vanishes is left out."""
    pending = [(top, ".")]
    while pending:
        path, name = pending.pop()
        follow = 0 if name == "." else os.O_NOFOLLOW
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            if is_special(os.fstat(folder).st_dev):
                continue
            archive.addfile(archive.gettarinfo(f"/proc/self/fd/{folder}/.", name))
            below = []
            for entry in sorted(os.listdir(folder)):
                try:
                    found = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                    if found.st_mode & 0o170000 == 0o040000:
                        below.append((f"{path}/{entry}", f"{name}/{entry}"))
                    else:
                        add_file(archive, folder, entry, f"{name}/{entry}")
                except FileNotFoundError:
                    pass
            pending += reversed(below)
        finally:
            os.close(folder)


def add_file(archive, folder, entry, name):
    """A file or link; anything else is left out, and so is what has become something else by the time it is opened."""
    found = os.stat(entry, dir_fd=folder, follow_symlinks=False)
    if is_special(found.st_dev):
        return
    kind = found.st_mode & 0o170000
    if kind == 0o120000:
        info = archive.gettarinfo(entry if folder is None else f"/proc/self/fd/{folder}/{entry}", name)
        if info.issym():
            archive.addfile(info)
    elif kind == 0o100000:
        try:
            fd, found = open_regular(entry, os.O_RDONLY | os.O_NOFOLLOW, folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return
            raise
        with os.fdopen(fd, "rb") as file:
            if not is_special(found.st_dev):
                archive.addfile(archive.gettarinfo(arcname=name, fileobj=file), file)


def op_untar(call, path, data):
    path = path_of(path)
    Work(call, lambda: untar(path, data))


def untar(path, data):
    import io

    tarfile = tar_module()
    os.makedirs(path, 0o755, exist_ok=True)
    count = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            places = Places(path)
            for info in archive:
                if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                    raise OpFailed("not_regular", f"the archive holds a device or a pipe: {text(info.name)}")
                extract(archive, info, places)
                count += 1
    except tarfile.TarError as error:
        raise OpFailed("bad_path", f"not an uncompressed tar archive: {error}") from None
    return "done", {"count": count}, {}


class Places:
    """Folders at and below one. A link in the way is followed only as long as it leads to a place below, by the kernel's
    own word of where a descriptor is: neither an archive nor a program that moves things meanwhile gets further."""

    def __init__(self, path):
        self.last, self.fd = None, -1
        self.top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.where = os.readlink(f"/proc/self/fd/{self.top}").rstrip("/")
        self.check(self.top)

    def check(self, fd):
        where = os.readlink(f"/proc/self/fd/{fd}").rstrip("/")
        if is_special(os.fstat(fd).st_dev) or not (where == self.where or where.startswith(f"{self.where}/")):
            raise OpFailed("bad_path", f"the archive leads to a path outside its folder: {text(where or '/')}")

    def below(self, folder, name, extra=0):
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | extra, dir_fd=folder)
        try:
            self.check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def of(self, name):
        """(descriptor of the folder that `name` is in, valid until the next call; last part). Folders are made as needed."""
        parts = os.path.normpath(name).split("/")
        if parts[0] in ("", ".."):
            raise OpFailed("bad_path", f"the archive names a path outside its folder: {text(name)}")
        if parts[:-1] == self.last:
            return self.fd, parts[-1]
        fd = os.dup(self.top)
        for part in parts[:-1]:
            try:
                below = self.below(fd, part)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=fd)
                below = self.below(fd, part, os.O_NOFOLLOW)
            os.close(fd)
            fd = below
        if self.fd >= 0:
            os.close(self.fd)
        self.last, self.fd = parts[:-1], fd
        return fd, parts[-1]


def extract(archive, info, places):
    """One member of an archive. What is in its place and no folder is replaced, never written to."""
    folder, name = places.of(info.name)
    if info.isdir():
        try:
            os.mkdir(name, 0o755, dir_fd=folder)
        except FileExistsError:
            pass
        finish(places.below(folder, name), info)
        return
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    if info.issym():
        os.symlink(info.linkname, name, dir_fd=folder)
    elif info.islnk():
        folder = os.dup(folder)
        source, target = places.of(info.linkname)
        os.link(target, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        os.close(folder)
    else:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        source = archive.extractfile(info)
        while data := source.read(1 << 20):
            put(fd, data, None)
        finish(fd, info)


def finish(fd, info):
    os.fchmod(fd, info.mode & 0o7777)
    os.utime(fd, (info.mtime, info.mtime))
    os.close(fd)


# ---------------------------------------------------------------------------------------------------------------- start


def op_init(call, environment, output_bytes, wall_s):
    loop.environment, loop.output_bytes, loop.wall_s = environment, output_bytes, wall_s
    loop.block = block_of(environment)
    for path in ("/proc", "/dev", "/dev/pts", "/proc/sys"):
        try:
            loop.special.add(os.stat(path).st_dev)
        except OSError:
            pass
    try:
        make_folders(WORKSPACE)
    except OSError:
        pass
    for fd in (0, 1, 2):  # up to here, what goes wrong is told on the server's side
        os.dup2(loop.null, fd, inheritable=True)
    loop.answer(call, "ready", {"pid": os.getpid()})


def main():
    # before anything else runs in this slot: no process of it may trace or read this one
    handle = _ctypes.dlopen(None, 0)
    prctl, loop.ptrace = _ctypes.dlsym(handle, "prctl"), _ctypes.dlsym(handle, "ptrace")
    if _ctypes.call_function(prctl, (4, 0, 0, 0, 0)) != 0:
        os._exit(3)  # noqa: SLF001
    for capability in range(64):  # what bubblewrap left in the bounding set: no program here can ever gain it
        if capability not in CAPABILITIES and _ctypes.call_function(prctl, (24, capability, 0, 0, 0)) != 0:
            break
    os.closerange(SOCKET + 1, 4096)
    for number in PLAIN:
        # a signal from inside that has no handler is dropped for PID 1; Python has one for SIGINT, which would end it
        _signal.signal(number, _signal.SIG_DFL)
    loop.trouble = os.memfd_create("trouble", os.MFD_CLOEXEC)
    loop.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.set_inheritable(SOCKET, False)
    os.set_blocking(SOCKET, False)
    wake, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    loop.wake = wake
    _signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    os.umask(0o022)
    os.chdir("/")
    for name, function in globals().items():
        if name.startswith("op_"):
            OPS[name[3:]] = function
    loop.watch(SOCKET, loop.receive)
    loop.watch(wake, loop.reap)
    gc.freeze()
    gc.enable()
    loop.run()


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    gc.disable()  # nothing of what is made until the loop runs is garbage
    main()
