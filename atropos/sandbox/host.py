"""Slots on this machine: making them, running operations in them, and confirming that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos.config import ServerConfig, SlotLimits
from atropos.errors import ConfigError, IsolationUnavailable, NotSupported, OutcomeUnknown, SandboxError, SlotLost
from atropos.sandbox import bwrap, cgroups, filter, rootphase, runtime, skeleton, syscalls, volumes  # noqa: A004
from atropos.sandbox.channel import Channel
from atropos.sandbox.contract import Layer, Stopped
from atropos.wire import ExecResult, Feature, Operation, OpResult

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0
ANSWER_GRACE_S = 15.0
"""How much longer than an operation's own limit an answer may take before the slot counts as broken."""
FILE_DEADLINE_S = 30.0
_SCRATCH_OPTIONS = "mode=755,size=512m"


@dataclass(frozen=True)
class _Exit:
    """How bubblewrap ended."""

    code: int


class Spawner:
    """The server's side of the process that starts bubblewraps."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("spawner.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(os.getpid())],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={},
        )
        theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._readable)
        self._numbers = itertools.count(1)
        self._started: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, asyncio.Future[_Exit]] = {}
        self.broken: str | None = None

    async def start(self, request: dict[str, Any], fds: list[int]) -> tuple[int, asyncio.Future[_Exit]]:
        """Start a bubblewrap; its pid, and a future of its end. Call from the event loop's thread."""
        if self.broken is not None:
            raise SandboxError(self.broken)
        number = next(self._numbers)
        started: asyncio.Future[int] = self._loop.create_future()
        ended: asyncio.Future[_Exit] = self._loop.create_future()
        self._started[number], self._exits[number] = started, ended
        data = json.dumps({"id": number, **request}).encode()
        while True:
            try:
                socket.send_fds(self._sock, [data], fds)
                break
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                self._broke(str(error))
                break
        # a start once asked for is waited for: a cancelled caller must not lose a process
        pid = await asyncio.shield(started)
        return pid, ended

    def _readable(self) -> None:
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                self._broke(str(error))
                return
            if not data:
                self._broke("it ended")
                return
            self._report(json.loads(data))

    def _report(self, report: dict[str, Any]) -> None:
        number = report["id"]
        if "pid" in report:
            self._started.pop(number).set_result(report["pid"])
        elif "error" in report:
            self._exits.pop(number).cancel()
            self._started.pop(number).set_exception(SandboxError(f"a sandbox could not be started: {report['error']}"))
        else:
            ended = self._exits.pop(number)
            if not ended.done():
                ended.set_result(_Exit(report["exit"]))

    def _broke(self, why: str) -> None:
        if self.broken is not None:
            return
        self.broken = f"the process that starts sandboxes is gone ({why})"
        self._loop.remove_reader(self._sock)
        for future in self._started.values():
            future.set_exception(SandboxError(self.broken))
        for ended in self._exits.values():
            if not ended.done():
                ended.set_result(_Exit(-9))
        self._started.clear()
        self._exits.clear()

    async def aclose(self) -> None:
        """End it, and with it any bubblewrap that is left."""
        if self.broken is None:
            self._loop.remove_reader(self._sock)
            self.broken = "closed"
        self._sock.close()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


class SlotSandbox:
    """One live sandbox on one volume. Made by `SlotHost.start`."""

    def __init__(
        self,
        host: SlotHost,
        name: str,
        volume: volumes.Volume,
        cgroup: cgroups.SlotCgroup,
        layers: Sequence[Layer],
        limits: SlotLimits,
    ) -> None:
        self.name = name
        self.layers = tuple(layers)
        self.limits = limits
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.host_pid: int | None = None
        """PID 1 of the slot, as the server sees it."""
        self._host = host
        self._volume = volume
        self._cgroup = cgroup
        self._channel: Channel | None = None
        self._ended: asyncio.Future[_Exit] | None = None
        self._bwrap_fd = self._init_fd = -1
        self._calls: dict[str, int] = {}
        self._stopping: asyncio.Task[Stopped] | None = None
        self._frozen: Layer | None = None
        self._gone = False

    def __repr__(self) -> str:
        state = "stopped" if self._gone else "dead" if self.died.done() else "live"
        return f"<SlotSandbox {self.name} {state} pid={self.host_pid} calls={len(self._calls)}>"

    # ------------------------------------------------------------------------------------------------------- operations

    async def run(self, call_id: str, operation: Operation) -> OpResult:
        """Run one operation; see `contract.Sandbox.run`."""
        channel = self._channel
        if channel is None or channel.closed:
            raise SlotLost(f"slot {self.name} is gone: {self._why()}")
        limits = self.limits
        arguments = dict(operation.__dict__)
        op: str = arguments.pop("op")
        deadline = FILE_DEADLINE_S
        before: dict[str, int] | None = None
        if operation.op == "exec":
            arguments.pop("clean_env")
            deadline = min(operation.timeout_s or limits.wall_s, limits.wall_s)
            before = self._cgroup.counts()
        elif operation.op == "proc_read":
            deadline = min(operation.wait_s, limits.wall_s)
        number, future = channel.call(op, arguments)
        self._calls[call_id] = number
        watchdog = asyncio.get_running_loop().call_later(deadline + ANSWER_GRACE_S, self._unanswered)
        try:
            result = await future
        except asyncio.CancelledError:
            channel.cancel(number, forget=True)
            raise
        finally:
            watchdog.cancel()
            if self._calls.get(call_id) == number:
                del self._calls[call_id]
        if before is not None and isinstance(result, ExecResult):
            return self._name_limit(result, before)
        return result

    def _name_limit(self, result: ExecResult, before: dict[str, int]) -> OpResult:
        """Say which limit ended the program, by the kernel's own counters; nothing that it printed matters."""
        if result.timed_out or result.cancelled or (result.limit is not None and result.limit != "output"):
            return result
        limit: Any = None
        for name, count in self._cgroup.counts().items():
            if count > before.get(name, 0):
                limit = name
                break
        if limit is None and result.exit_code != 0:
            limit = volumes.exhausted(self._volume)
        return result if limit is None else result.model_copy(update={"limit": limit})

    def cancel(self, call_id: str) -> None:
        """Kill what the call started."""
        number = self._calls.get(call_id)
        if number is not None and self._channel is not None:
            self._channel.cancel(number)

    def memory_bytes(self) -> int:
        """Memory that the volume's files take, in bytes."""
        return volumes.used_bytes(self._volume)

    # ------------------------------------------------------------------------------------------------------------ start

    async def start(self, base: volumes.Base) -> None:
        """Start bubblewrap and wait for the runner's first word.

        Raises:
            SandboxError: it could not be started; `stop` cleans up.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        status_r, status_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        errors_r, errors_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(status_w, True)
        os.set_blocking(errors_w, True)
        limits = self.limits
        self._channel = Channel(ours, output_bytes=limits.output_bytes, on_broken=self._broke)
        try:
            request = self._host.request(self._volume, base, self._cgroup, limits)
            try:
                pid, self._ended = await self._host.spawner.start(request, [theirs.fileno(), status_w, errors_w])
            finally:
                theirs.close()
                os.close(status_w)
                os.close(errors_w)
            self._bwrap_fd = _hold(pid)
            self._ended.add_done_callback(lambda _: self._broke("its bubblewrap ended"))
            self._channel.start(self._host.environment, limits.output_bytes, limits.wall_s)
            try:
                await asyncio.wait_for(asyncio.shield(self._channel.ready), START_DEADLINE_S)
            except (SlotLost, OutcomeUnknown) as error:
                raise SandboxError(f"slot {self.name} could not be started: {_said(errors_r) or error}") from None
            except TimeoutError:
                told = _said(errors_r) or "no word from PID 1"
                raise SandboxError(
                    f"slot {self.name} could not be started within {START_DEADLINE_S} s: {told}"
                ) from None
        finally:
            self.host_pid = _child_pid(status_r)
            if self.host_pid is not None:
                self._init_fd = _hold(self.host_pid)
            os.close(status_r)
            os.close(errors_r)

    def _unanswered(self) -> None:
        self._broke("PID 1 of the slot did not answer in time")

    def _why(self) -> str:
        return self.died.result() if self.died.done() else "it was stopped"

    def _broke(self, reason: str) -> None:
        """The sandbox ended by itself, or can't be trusted: it is killed, and its owner told."""
        if self._channel is not None and not self._channel.closed:
            self._channel.close(OutcomeUnknown(f"slot {self.name} ended while the call ran: {reason}"))
        if self._stopping is None and not self._gone:
            self._kill()
            if not self.died.done():
                self.died.set_result(reason)

    def _kill(self, *, bubblewrap: bool = False) -> None:
        """Kill PID 1. Bubblewrap itself only where there is no PID 1: it is what reaps, and so what confirms."""
        fd = self._bwrap_fd if bubblewrap or self._init_fd < 0 else self._init_fd
        if fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------------------- stop

    async def stop(self) -> Stopped:
        """Kill everything in it and confirm; see `contract.Sandbox.stop`."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name=f"stop {self.name}")
        return await asyncio.shield(self._stopping)

    async def _stop(self) -> Stopped:
        begun = time.monotonic()
        problems = [await self._end_processes()]
        keep = self._volume.data if self._frozen is not None else None
        if keep is None:
            problems.append(await asyncio.to_thread(self._volume.detach))
        problems.append(await self._remove_cgroup())
        self._gone = True
        self._host.forget(self)
        detail = "; ".join(problem for problem in problems if problem)
        return Stopped(clean=not detail, seconds=time.monotonic() - begun, detail=detail)

    async def _end_processes(self) -> str:
        """Kill PID 1, which ends every process of its namespace, and wait until it is reaped. '' when confirmed."""
        if self._channel is not None:
            self._channel.close(OutcomeUnknown(f"slot {self.name} was stopped while the call ran"))
        self._kill()
        problem = ""
        if self._ended is not None and not self._ended.done():
            try:
                # the one confirmation that counts: bubblewrap ends after it has reaped PID 1, and PID 1 is reaped after
                # every process of the namespace
                await asyncio.wait_for(asyncio.shield(self._ended), STOP_DEADLINE_S)
            except TimeoutError:
                self._kill(bubblewrap=True)
                problem = f"its processes did not end within {STOP_DEADLINE_S} s"
        for fd in (self._bwrap_fd, self._init_fd):
            if fd >= 0:
                os.close(fd)
        self._bwrap_fd = self._init_fd = -1
        return problem

    async def _remove_cgroup(self) -> str:
        pause = 0.0005
        while not self._cgroup.remove():
            if pause > 1:
                return f"cgroup still in use: {', '.join(self._cgroup.paths)}"
            await asyncio.sleep(pause)
            pause *= 2
        return ""

    async def freeze(self, layer_id: str) -> Layer:
        """End the sandbox and keep its volume as a read-only layer; see `contract.Sandbox.freeze`."""
        if self._stopping is not None or self._gone:
            raise SandboxError(f"slot {self.name} has ended, there is nothing to freeze")
        self._stopping = asyncio.get_running_loop().create_task(self._freeze(layer_id), name=f"freeze {self.name}")
        stopped = await asyncio.shield(self._stopping)
        if self._frozen is None:
            raise SandboxError(f"the snapshot of slot {self.name} can't be trusted: {stopped.detail}")
        return self._frozen

    async def _freeze(self, layer_id: str) -> Stopped:
        begun = time.monotonic()
        problems = [await self._end_processes()]
        volume = self._volume
        problems.append(await asyncio.to_thread(volume.detach, keep=volume.data))
        if not any(problems):
            try:
                if not volume.on_disk:
                    volumes.freeze(volume)
                self._frozen = Layer(layer_id, volume.upper, volumes.used_bytes(volume))
                self._host.keep(self._frozen, volume)
            except OSError as error:
                problems.append(f"a writer was left: {error}")
        if self._frozen is None:
            problems.append(await asyncio.to_thread(volume.detach))
        problems.append(await self._remove_cgroup())
        self._gone = True
        self._host.forget(self)
        detail = "; ".join(problem for problem in problems if problem)
        return Stopped(clean=not detail, seconds=time.monotonic() - begun, detail=detail)


def _said(fd: int) -> str:
    """What bubblewrap wrote before it ended, in one line."""
    try:
        return " ".join(os.read(fd, 4096).decode(errors="replace").split())
    except BlockingIOError:
        return ""


def _child_pid(fd: int) -> int | None:
    """The pid of PID 1 that bubblewrap told; None when it ended before it had one."""
    try:
        return int(json.loads(os.read(fd, 4096).split(b"\n", 1)[0])["child-pid"])
    except (BlockingIOError, ValueError, KeyError):
        return None


def _hold(pid: int) -> int:
    """A handle on a process that can't come to mean another one; -1 when it has gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


class SlotHost:
    """Makes sandboxes on this machine; `await SlotHost.create(config)` after `rootphase.enter(config)`."""

    def __init__(self, config: ServerConfig, entered: rootphase.Entered) -> None:
        self.config = config
        self._entered = entered
        self._scratch = entered.scratch
        self._live: set[SlotSandbox] = set()
        self._layers: dict[str, volumes.Volume] = {}
        self._bases: dict[str | None, volumes.Base] = {}
        self._creators = list(range(entered.creators[0], sum(entered.creators)))
        self._serial = itertools.count(1)
        self._bwrap = shutil.which("bwrap") or ""
        self.environment = environment(config)
        self.spawner: Spawner
        self._runtime: runtime.Runtime
        self._seccomp: str
        self._empty = f"{self._scratch}/empty"

    def __repr__(self) -> str:
        return f"<SlotHost {len(self._live)} live, {len(self._layers)} layers>"

    @classmethod
    async def create(cls, config: ServerConfig) -> SlotHost:
        """Set up what all slots share.

        Raises:
            IsolationUnavailable: this machine can't make slots; the message says what to change.
            ConfigError: a base is not there.
        """
        host = cls(config, rootphase.entered())
        rootphase.check_programs()
        try:
            syscalls.mount("atropos", host._scratch, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _SCRATCH_OPTIONS)
            for name in ("empty", "slots", "runtime", "bases"):
                os.mkdir(f"{host._scratch}/{name}", 0o755)
            host._seccomp = filter.program().hex()
            host._runtime = await asyncio.to_thread(runtime.build, f"{host._scratch}/runtime")
            host._prepare_bases()
        except OSError as error:
            raise IsolationUnavailable(f"the server's own files could not be set up: {error}") from error
        host.spawner = Spawner()
        return host

    def _prepare_bases(self) -> None:
        default = self.config.base or ("/rootfs" if os.path.isdir("/rootfs") else None)
        if default is None:
            self._bases[None] = skeleton.build(f"{self._scratch}/skeleton")
        named = {**({} if default is None else {None: default}), **self.config.bases}
        for index, (name, path) in enumerate(named.items()):
            if not os.path.isdir(path):
                field = "base" if name is None else f"bases[{name!r}]"
                raise ConfigError(f"{field}: {path} is not a folder that the server can read")
            # bound to a short path of ours: overlay options have their own meaning for ':' and ','
            target = f"{self._scratch}/bases/{index}"
            os.mkdir(target)
            syscalls.mount(path, target, None, syscalls.MS_BIND)
            self._bases[name] = volumes.Base(target)

    # ------------------------------------------------------------------------------------------------------------ slots

    async def start(
        self,
        name: str,
        *,
        layers: Sequence[Layer] = (),
        base: str | None = None,
        network: bool = False,
        limits: SlotLimits | None = None,
    ) -> SlotSandbox:
        """Start a sandbox on a fresh volume; see `contract.Host.start`. `limits`: instead of the configured ones."""
        limits = limits or self.config.limits
        if network:
            raise NotSupported("network=True: this server has no egress proxy yet; lease without a network")
        stands_on = self._bases.get(base)
        if stands_on is None:
            known = ", ".join(repr(key) for key in self._bases if key is not None) or "none"
            raise NotSupported(f"base={base!r} is not one of this server's (bases: {known})")
        unique = f"{next(self._serial)}"
        folder = f"{self._scratch}/slots/{unique}"
        disk = f"{self._disk()}/{unique}" if self.config.volume == "disk" else None
        cgroup: cgroups.SlotCgroup | None = None
        try:
            cgroup = cgroups.SlotCgroup(self._entered.cgroups, f"slot{unique}", limits)
            volume = volumes.create(
                folder,
                stands_on,
                [layer.path for layer in layers],
                limits,
                self._runtime.path,
                self._empty,
                disk,
            )
        except OSError as error:
            if cgroup is not None:
                cgroup.remove()
            raise SandboxError(f"slot {name} could not be made: {error}") from error
        sandbox = SlotSandbox(self, name, volume, cgroup, layers, limits)
        self._live.add(sandbox)
        try:
            await sandbox.start(stands_on)
        except BaseException as error:
            await asyncio.shield(sandbox.stop())
            if isinstance(error, (OSError, ValueError)):
                raise SandboxError(f"slot {name} could not be started: {error}") from error
            raise
        return sandbox

    def _disk(self) -> str:
        raise NotSupported("volume='disk' is not offered by this server yet; use volume='memory'")

    def request(
        self, volume: volumes.Volume, base: volumes.Base, cgroup: cgroups.SlotCgroup, limits: SlotLimits
    ) -> dict[str, Any]:
        """What the spawner needs to know to start one slot."""
        counted = any("pids" in tree.controllers for tree in self._entered.cgroups.trees)
        processes = limits.pids + (64 if counted else 2)
        shares = 2 * self.config.slots + 2
        creator = self._creators.pop(0) if self._creators else None
        if creator is not None:
            self._creators.append(creator)  # round and round: reused long after its last slot is gone
        ranged = creator is not None
        return {
            "argv": bwrap.command(self._bwrap, volume, base, self._runtime.empty, self._runtime.argv),
            "ids": self._entered.slot_ids,
            "creator": creator,
            "cgroups": cgroup.paths,
            "seccomp": self._seccomp,
            # before the namespace is made: what it then allows in sum, to all its uids together
            "rlimits_before": {
                "SIGPENDING": 4096,
                "MSGQUEUE": 262_144,
                "MEMLOCK": 65_536,
                **({"NPROC": processes} if ranged else {}),
            },
            "rlimits": {"NOFILE": limits.open_files, "CORE": 0, "NPROC": processes, "RTPRIO": 0, "NICE": 0},
            "counters": {
                **dict.fromkeys(
                    (f"max_{kind}_namespaces" for kind in ("pid", "net", "mnt", "ipc", "uts", "cgroup")), 1
                ),
                "max_user_namespaces": 0,
                "max_time_namespaces": 0,
                "max_inotify_instances": max(4, _sysctl("fs/inotify/max_user_instances", 128) // shares),
                "max_inotify_watches": max(1024, _sysctl("fs/inotify/max_user_watches", 65_536) // shares),
                "max_fanotify_groups": 0,
                "max_fanotify_marks": 0,
            },
        }

    def forget(self, sandbox: SlotSandbox) -> None:
        """A sandbox has ended."""
        self._live.discard(sandbox)

    def keep(self, layer: Layer, volume: volumes.Volume) -> None:
        """A sandbox's volume has become a layer."""
        self._layers[layer.id] = volume

    async def drop_layer(self, layer: Layer) -> None:
        """Forget a layer on which nothing stands any more."""
        volume = self._layers.pop(layer.id, None)
        if volume is not None:
            problem = await asyncio.to_thread(volume.detach)
            if problem:
                raise SandboxError(f"layer {layer.id} could not be dropped: {problem}")

    async def probe(self) -> Sequence[Feature]:
        """Try every isolation property from inside a throw-away sandbox."""
        from atropos.sandbox import probe

        return await probe.run(self, self._entered)

    async def aclose(self) -> None:
        """Undo what was set up for the server as a whole."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._live)))
        for volume in self._layers.values():
            await asyncio.to_thread(volume.detach)
        self._layers.clear()
        await self.spawner.aclose()
        with contextlib.suppress(OSError):
            syscalls.umount(self._scratch)
        cgroups.release(self._entered.cgroups)


def _sysctl(name: str, default: int) -> int:
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default


def environment(config: ServerConfig) -> dict[str, str]:
    """The environment that every command starts with."""
    cores = os.cpu_count() or 1
    quota = config.limits.cpu_quota
    # what a program should use of the machine, not what it can see of it
    threads = str(max(1, min(cores, round(quota) if quota is not None else cores // config.slots)))
    libraries = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "BLIS", "RAYON", "JULIA")
    names = [f"{name}_NUM_THREADS" for name in libraries]
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
        "TERM": "xterm",
        "LC_CTYPE": "C.UTF-8",
        "PIP_ROOT_USER_ACTION": "ignore",
        **dict.fromkeys(names, threads),
        **dict.fromkeys(("POLARS_MAX_THREADS", "GOMAXPROCS", "PYTHON_CPU_COUNT"), threads),
    }
