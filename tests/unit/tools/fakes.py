"""A pool whose slots are folders and plain subprocesses: small, and true enough for tools and executor."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import os
import re
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from atropos import wire
from atropos.aio import outlive
from atropos.errors import SandboxError
from atropos.slots import Share
from atropos.slots.slot.profile import PLAIN


class FakeSlot:
    def __init__(self, pool, trajectory_id, options):
        self.pool, self.trajectory_id, self.options = pool, trajectory_id, options
        self._folder = tempfile.TemporaryDirectory(prefix="fake-slot-")
        self.root = Path(self._folder.name)
        self.ran = []
        self.procs = {}
        self.fault: SandboxError | None = None
        self.profile = PLAIN
        self.released = 0

    async def run(self, operation, *, call_id=None):
        self.ran.append(operation)
        if self.fault is not None:
            raise self.fault
        return await getattr(self, f"_{operation.op}")(operation)

    async def check_alive(self):
        pass

    async def snapshot(self):
        self.pool.snapshots.append(FakeSnapshot())
        return self.pool.snapshots[-1]

    async def release(self):
        self.released += 1
        await outlive(self._end())

    async def _end(self):
        for proc in self.procs.values():
            proc.kill()
            await proc.reader
        await asyncio.sleep(self.pool.release_s)
        self._folder.cleanup()
        self.pool.free += 1

    def path(self, name):
        return self.root / name if not name.startswith("/") else Path(name)

    async def _exec(self, op):
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", op.command, cwd=self.path(op.workdir or "."), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, "HOME": str(self.root)},
        )  # fmt: skip
        timed_out, output = False, b""
        try:
            async with asyncio.timeout(op.timeout_s):
                output, _ = await process.communicate(op.stdin or b"")
        except TimeoutError:
            timed_out = True
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        most = op.max_output_bytes or 1_000_000
        dropped = max(len(output) - most, 0)
        if dropped:
            output = output[: most // 2] + output[-(most - most // 2) :]
        return wire.CommandResult(
            exit_code=process.returncode, output=output, timed_out=timed_out, truncated=bool(dropped),
            dropped_bytes=dropped, duration_s=time.monotonic() - started,
        )  # fmt: skip

    async def _read_file(self, op):
        path = self.path(op.path)
        if len(path.name) > 255:
            return wire.OpError(error="bad_path", message=f"File name too long: {op.path}")
        if path.is_dir():
            return wire.OpError(error="is_directory", message=f"{op.path}: is a directory")
        if not path.exists():
            return wire.OpError(error="not_found", message=f"{op.path}: not found")
        data = path.read_bytes()
        return wire.FileResult(
            data=data[op.offset : op.offset + op.max_bytes], size=len(data), mode=path.stat().st_mode & 0o7777
        )

    async def _write_file(self, op):
        path = self.path(op.path)
        if self.pool.refuse_write and self.pool.refuse_write in op.path:
            return wire.OpError(error="no_space", message=f"{op.path}: no space left", limit="disk")
        if op.if_sha256 is not None and hashlib.sha256(path.read_bytes()).hexdigest() != op.if_sha256:
            return wire.OpError(error="changed", message=f"{op.path}: changed meanwhile")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(op.data)
        if op.mode is not None:
            path.chmod(op.mode)
        return wire.Done(count=len(op.data))

    async def _search(self, op):
        try:
            wanted = re.compile(op.pattern, re.IGNORECASE if op.ignore_case else 0)
        except re.error as error:
            return wire.OpError(error="bad_pattern", message=f"bad pattern: {error}")
        matches = []
        top = self.path(op.path)
        if not top.exists():
            return wire.OpError(error="not_found", message=f"{op.path}: not found")
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = str(path.relative_to(self.root))
            if not path.is_file() or (op.glob and not fnmatch.fnmatch(path.name, op.glob)):
                continue
            if not op.pattern:
                matches.append(wire.Match(path=name, line=0, text=""))
                continue
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if wanted.search(line):
                    matches.append(wire.Match(path=name, line=number, text=line))
        kept = tuple(matches[: op.max_matches])
        return wire.SearchResult(matches=kept, files=len(matches), truncated=len(kept) < len(matches))

    async def _proc_start(self, op):
        proc = FakeProc(f"p{len(self.procs) + 1}", op)
        self.procs[proc.id] = proc
        await proc.start(self.path(op.workdir or "."))
        return proc.state(0, 0)

    async def _proc_list(self, op):
        return wire.ProcListing(processes=tuple(proc.state(0, 0) for proc in self.procs.values()))

    async def _proc_read(self, op):
        proc = self.procs.get(op.id)
        if proc is None:
            return wire.OpError(error="unknown_process", message=f"no process {op.id}")
        end = time.monotonic() + op.wait_s
        while proc.running and time.monotonic() < end and not (op.until == "output" and len(proc.log) > op.offset):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return proc.state(op.offset, op.max_bytes)

    async def _proc_write(self, op):
        proc = self.procs[op.id]
        proc.process.stdin.write(op.data)
        if op.eof:
            proc.process.stdin.close()
        return wire.Done(count=len(op.data))

    async def _proc_kill(self, op):
        self.procs[op.id].kill()
        return wire.Done()


class FakeProc:
    def __init__(self, name, op):
        self.id, self.op, self.log, self.began = name, op, bytearray(), time.monotonic()

    async def start(self, folder):
        self.process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", self.op.command, cwd=folder, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self.reader = asyncio.create_task(self._read())

    async def _read(self):
        while piece := await self.process.stdout.read(65536):
            self.log += piece
        await self.process.wait()

    @property
    def running(self):
        return not self.reader.done()

    def kill(self):
        if self.process.returncode is None:
            self.process.kill()

    def state(self, offset, most):
        kept_from = max(len(self.log) - self.op.buffer_bytes, 0)
        start = max(offset, kept_from)
        return wire.ProcState(
            id=self.id, command=self.op.command, pid=self.process.pid, running=self.running,
            exit_code=None if self.running else self.process.returncode, output=bytes(self.log[start : start + most]),
            offset=start, total_bytes=len(self.log), dropped_bytes=start - offset, pty=self.op.pty,
            uptime_s=time.monotonic() - self.began,
        )  # fmt: skip


class FakeSnapshot:
    dropped = False

    async def drop(self):
        self.dropped = True
        await asyncio.sleep(0)


class FakePool:
    def __init__(self, slots=8):
        self.snapshots = []
        self.share = Share()
        self.config = SimpleNamespace(bases={})
        self.free, self.slots, self.release_s, self.refuse_write = slots, [], 0, ""
        self.acquire_error: Exception | None = None
        self.hold_acquire: asyncio.Event | None = None

    def bound_frames(self, max_batch_size):
        self.max_batch_size = max_batch_size

    async def acquire(self, trajectory_id, **options):
        if self.hold_acquire is not None:
            await self.hold_acquire.wait()
        if self.acquire_error is not None:
            raise self.acquire_error
        assert self.free > 0
        self.free -= 1
        slot = FakeSlot(self, trajectory_id, options)
        self.slots.append(slot)
        return slot
