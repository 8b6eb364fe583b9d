"""One live sandbox: operations in it, its end, and the confirmation that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from atropos.aio import Tasks, done_within
from atropos.errors import ConfigError, NotSupported, OutcomeUnknown, SandboxError, SlotLost
from atropos.sandbox.contract import RootUnchanged, Sandbox, SnapshotLayer, Stopped
from atropos.sandbox.host import egress_supervisor, trust
from atropos.sandbox.host.files import skeleton, views, volumes
from atropos.sandbox.host.gpus import SlotGpus
from atropos.sandbox.host.host_state import HostState
from atropos.sandbox.host.limit_watch import LimitWatch
from atropos.sandbox.host.process.pid_1 import FirstProcess
from atropos.sandbox.host.runner_link import RunnerLink
from atropos.sandbox.host.slot_calls import SlotCalls
from atropos.sandbox.host.slot_network import SlotNetwork
from atropos.sandbox.linux import host_limits, memory_files, slot_cgroup, stopped_children
from atropos.slot_python import INSIDE
from atropos.wire import (
    CommandResult,
    Done,
    EgressSecret,
    ImageInfo,
    Operation,
    OpError,
    OpResult,
    SetNetwork,
    SlotLimits,
    StartOperation,
    ViewFolders,
    WriteFile,
)

if TYPE_CHECKING:
    from atropos.sandbox.contract import OnResult

START_DEADLINE_S = 20.0
COUNT_S = 1.0
"""Longest that the egress proxy may take to say what an ended slot moved."""
SHOWN_S = 0.25
"""How long a file that a program of the slot's has made or replaced may be missing in a view that has looked for it."""
ERRORS_BYTES = 4096
"""Most bytes of a start's error output that are kept."""


class SlotSandbox:
    """One live sandbox on one volume. Made by `SlotHost.start`."""

    def __init__(
        self,
        host: HostState,
        name: str,
        volume: volumes.Volume,
        cgroup: slot_cgroup.SlotCgroup,
        limits: SlotLimits,
        *,
        network: bool,
        joins: SlotNetwork | None,
    ) -> None:
        self.name = name
        self.layers: tuple[SnapshotLayer, ...] = ()
        self.network = joins or SlotNetwork(host.egress if network else None)
        self._joined = joins is not None
        self._base: str | None = None
        self._image: ImageInfo | None = None
        self._gpus: SlotGpus | None = None
        self._root: dict[str, str] = {}
        """What programs of the image's root have beneath the image's own variables."""
        self.limits = limits
        self.volume = volume
        self.cgroup = cgroup
        # A future and no event: several parts await it, and the reason comes with it.
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._first = FirstProcess()
        self._host = host
        self._tasks = Tasks(f"slot {name}")
        self._loop = asyncio.get_running_loop()
        watch = LimitWatch(name, cgroup, volume, limits)
        self._calls = SlotCalls(watch, limits.wall_s, self._pid_of_living, self._fail)
        self._ending = False
        """Whether its programs were ended ahead of `stop`."""
        self._showing: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[Stopped] | None = None
        self._detached = False
        """Whether the volume is no longer its own: being freed, or a layer."""

    @property
    def watch(self) -> LimitWatch:
        """Which limits its programs reach."""
        return self._calls.watch

    @property
    def host_pid(self) -> int | None:
        """PID 1 of the slot, as the server sees it; None before its start."""
        return self._first.pid

    def _pid_of_living(self) -> int | None:
        return None if self.died.done() else self.host_pid

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """See `contract.Sandbox`."""
        return self.network.hosts

    def __repr__(self) -> str:
        stopped = self._stopping is not None and self._stopping.done()
        state = "stopped" if stopped else "dead" if self.died.done() else "live"
        return f"<SlotSandbox {self.name} {state} pid={self.host_pid} calls={len(self._calls)}>"

    # ------------------------------------------------------------------------------------------------------- operations

    def begin(self, call_id: str, operation: Operation, done: OnResult, *, stream: int = -1) -> None:
        """Start an operation; see `contract.Sandbox.begin`."""
        if self._calls.channel is None or self._calls.channel.closed:
            raise SlotLost(f"slot {self.name} is gone: {self._why()}")
        if isinstance(operation, SetNetwork):
            self._change_network(operation.hosts, done)
            return
        self._calls.begin(call_id, operation, self._arguments_of(operation), done, stream=stream)

    def _arguments_of(self, operation: Operation) -> dict[str, object]:
        """The operation's fields for the runner, with the image's settings where it starts a program."""
        arguments = {name: value for name, value in operation.__dict__.items() if name not in operation.withheld}
        if isinstance(operation, StartOperation) and self._image is not None:
            arguments["workdir"] = arguments["workdir"] or self._image.workdir or "/"
            arguments["user"] = arguments["user"] or self._image.user
            # From the weakest to the strongest: the image's root user, the image, the call.
            below = self._root
            if arguments["user"]:  # the runner knows its home
                below = {name: value for name, value in below.items() if name != "HOME"}
            arguments["env"] = below | self._image.env | arguments["env"]
        if isinstance(operation, StartOperation) and self._gpus is not None:
            arguments["env"] = self._gpus.env | arguments["env"]
        return arguments

    def _change_network(self, hosts: tuple[str, ...] | None, done: OnResult) -> None:
        async def change() -> None:
            try:
                await self.set_network(hosts)
            except ConfigError as error:
                done(OpError(error="bad_pattern", message=str(error)))
            except NotSupported as error:
                done(OpError(error="not_supported", message=str(error)))
            except SandboxError as error:  # its programs could still reach other hosts
                self._fail(str(error))
                done(SlotLost(str(error)))
            else:
                done(Done())

        self._tasks.spawn(change(), "network")

    @property
    def first_process(self) -> int:
        """Pidfd of PID 1.

        Raises:
            SlotLost: it has ended.
        """
        if self._first.pidfd < 0 or self.died.done():
            raise SlotLost(f"slot {self.name} is gone: {self._why()}")
        return self._first.pidfd

    async def set_network(self, hosts: tuple[str, ...] | None) -> None:
        """Change `hosts`; see `contract.Sandbox.set_network`."""
        await self.network.narrow(hosts)

    async def run(self, call_id: str, operation: Operation) -> OpResult:
        """Run one operation. Cancelling this task kills what it started.

        Raises:
            SlotLost: the sandbox ended, or broke its protocol, before the operation was handed to it; or the host
                killed programs of the slot for want of memory.
            OutcomeUnknown: it ended while the operation ran.
        """
        future: asyncio.Future[OpResult] = self._loop.create_future()

        def done(result: OpResult | Exception) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.begin(call_id, operation, done)
        try:
            return await future
        except asyncio.CancelledError:
            # Its answer would otherwise be kept for a caller that is gone.
            self.forget(call_id)
            raise

    def cancel(self, call_id: str) -> None:
        """Kill what the call started."""
        self._calls.cancel(call_id)

    def forget(self, call_id: str) -> None:
        """Kill what the call started, and ignore its answer."""
        self._calls.forget(call_id)

    # ------------------------------------------------------------------------------------------------------------ start

    async def start(self, base: skeleton.Base) -> None:
        """Start PID 1 and wait for the runner's first message.

        Raises:
            SandboxError: it could not be started; `stop` cleans up.
        """
        # A file and no pipe: bubblewrap's words outlive it, and nobody has to read while it starts.
        errors = memory_files.bounded("errors", ERRORS_BYTES)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._spawn(base, errors)
                await self._greet()
        except TimeoutError:
            why = memory_files.line(errors) or "PID 1 sent nothing"
            raise SandboxError(
                f"slot {self.name} could not be started within {START_DEADLINE_S} s: "
                f"{why}{host_limits.named()}{host_limits.load()}"
            ) from None
        except (OutcomeUnknown, OSError) as error:
            why = memory_files.line(errors) or error
            raise SandboxError(f"slot {self.name} could not be started: {why}{host_limits.named()}") from None
        finally:
            os.close(errors)

    async def _spawn(self, base: skeleton.Base, errors: int) -> None:
        """Have PID 1 forked, with our end of its socket for the calls, and give the slot its network."""
        # Two pairs: the stream is the runner's for life; the other one carries the namespace's descriptors once.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._calls.channel = RunnerLink(ours, output_bytes=self.limits.output_bytes, on_broken=self._fail)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, near, far:
            request = self._host.start_request(
                self.volume, base, self.cgroup, self.limits, network=self.network.has_egress, joins=self._joined
            )
            joins = [self.network.namespace] if self._joined else []
            fds = [theirs.fileno(), errors, far.fileno(), *joins]
            await self._first.start(self._host.spawner, request, fds)
            if not self._joined:
                # Else `near` would not see the end of file where PID 1 dies before it has sent the network.
                far.close()
                await self.network.open(near)
        self._first.when_ended(lambda: self._fail("its PID 1 ended"))

    def resize(self, limits: SlotLimits) -> None:
        """Change the limits; see `contract.Sandbox.resize`."""
        host = self._host
        # Without a cgroup, RLIMIT_NPROC bounds them, which was fixed when the slot started.
        if limits.pids > host.config.limits.pids and not host.counts_pids:
            raise NotSupported("limits.pids: this host has no pids controller, so that slots can't be given more")
        # Limits of a running program would change under it, and its result would name the wrong ones.
        if self._calls:
            raise SandboxError(f"slot {self.name} is in use: its limits can't change")
        if self._calls.channel is None or self.died.done():
            raise SlotLost(f"slot {self.name} is gone: {self._why()}")
        try:
            self.cgroup.change(limits, slot_cgroup.ceiling(limits, host.config.slots))
            # After the cgroup: on a tmpfs, files are memory, which must be allowed before there is room for them.
            volumes.resize(self.volume, limits)
        except OSError as error:
            raise SandboxError(f"slot {self.name}: its limits could not be set: {error}") from error
        self.limits = limits
        self._calls.watch, self._calls.wall_s = LimitWatch(self.name, self.cgroup, self.volume, limits), limits.wall_s
        self._set(host.threads(limits))

    async def move_to_disk(self, beside: Sandbox | None) -> None:
        """Keep what is written on disk; see `contract.Sandbox.move_to_disk`."""
        there = beside.volume.disk if isinstance(beside, SlotSandbox) else None
        unique = os.path.basename(self.volume.folder)
        # What the warm sandbox has in memory stays there, empty: `change_root` then takes the folders on disk.
        self.volume.disk = await self._host.cells.acquire(unique, self.limits.disk_mib, beside=there)
        try:
            volumes.make_folders(self.volume)
        except OSError as error:
            raise SandboxError(f"slot {self.name}: its files can't be on disk: {error}") from error

    async def change_root(
        self, layers: Sequence[SnapshotLayer], base: str | None = None, *, view: views.View | None = None
    ) -> None:
        """Change the root, and mount a view's folders in it; see `contract.Sandbox.change_root`."""
        # A root changes once, before anything is written: the volume has upper folders for two (`Volume.upper`).
        if self._calls or self.volume.restacked:
            raise SandboxError(f"slot {self.name} is in use: its root can't change")
        first_process = self.first_process
        host, root = self._host, self._host.base(base)
        try:
            seen = None if view is None else await asyncio.to_thread(view.layer)
            paths = [*([] if seen is None else [seen]), *(layer.path for layer in layers)]
            volumes.restack(self.volume, root, paths, host.files)
            if view is not None:
                # In a thread, as is `layer`: looking through the agent's folders takes as long as the agent made it
                # take.
                await asyncio.to_thread(view.mount, self.volume, seen)
            # The path inside the slot: the gate (a slave mount) shows what the server has just mounted.
            new_root = f"{INSIDE}/{volumes.NEXT}/{volumes.NEXT}"
            async with asyncio.timeout(START_DEADLINE_S):
                await host.roots.change(first_process, new_root)
        except (OSError, TimeoutError) as error:
            raise RootUnchanged(
                f"slot {self.name}: its root could not be changed: {error or type(error).__name__}"
            ) from error
        # Recorded after the change alone: a fork of a slot whose root stayed must not name these layers.
        self.layers = tuple(layers)
        self._base = base
        self._image, self._root = root.image, root.root
        if self.volume.changing:
            assert view is not None
            self._showing = self._tasks.spawn(self._show_changes(view.is_quiet), "show changes")

    async def _show_changes(self, is_quiet: Callable[[], bool]) -> None:
        """Have a view see what the slot's programs make and replace, also where it has looked before."""
        ended = False
        with contextlib.suppress(OSError):  # where they can't be remounted, it sees what it saw
            while not ended:
                await asyncio.sleep(SHOWN_S)
                # Before the names are forgotten: what the last program made is then seen, too.
                ended = is_quiet()
                # In a thread: it takes longer the more names there are.
                await asyncio.to_thread(self.volume.forget_names)

    async def add_gpus(self, gpus: Sequence[int]) -> None:
        """Add GPUs; see `contract.Sandbox.add_gpus`."""
        first_process = self.first_process
        # Set before they are mounted, so that `_end_processes` also undoes what was mounted halfway.
        self._gpus = SlotGpus(self._host.gpus[number] for number in gpus)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._gpus.mount(self._host.roots, first_process)
        except (OSError, TimeoutError) as error:
            # The root is the host's own /usr, read-only: no retry helps, but another root does.
            if error.errno == errno.EROFS:
                raise NotSupported(f"gpus: this root can't hold what they need: {error}; lease an image") from error
            raise RootUnchanged(f"slot {self.name}: no GPU: {error or type(error).__name__}") from error
        done = await self.run("gpus", self._gpus.make_links())
        if not isinstance(done, CommandResult) or done.exit_code:
            raise NotSupported(f"gpus: their libraries could not be made known in this root: {done}")

    async def add_secrets(self, secrets: Sequence[EgressSecret]) -> None:
        """Have requests carry secrets; see `contract.Sandbox.add_secrets`."""
        await self.network.entrust(secrets)
        await self.add_authority()

    async def add_authority(self) -> None:
        """Have programs know the hosts whose TLS the egress proxy ends, if there are any.

        Raises:
            NotSupported: the root can't hold what they need.
        """
        if self.network.authority is None:
            return
        self._set(await trust.install(self.network.authority.encode(), lambda operation: self.run("trust", operation)))

    async def know_hosts(self, more: Mapping[str, str], known: Collection[str]) -> None:
        """Have programs know others of a private network by their names.

        Args:
            more: addresses by name, to add to those that they know.
            known: all names, of those too that they know already.

        Raises:
            NotSupported: the root can't hold them.
        """
        # Each after a newline: a file of an image may not end with one.
        lines = "".join(f"\n{address}\t{name}" for name, address in more.items())
        # Through PID 1, which follows the slot's own links; the server itself opens no path in a slot.
        done = await self.run(
            "names", WriteFile(path="/etc/hosts", data=f"{lines}\n".encode(), append=True, mode=0o644)
        )
        if not isinstance(done, Done):
            raise NotSupported(f"joins: this root can't hold the names of its network in /etc/hosts: {done}")
        if self.network.has_egress:
            self._set(egress_supervisor.direct(known))

    def _set(self, environment: dict[str, str]) -> None:
        """Have programs start with these variables, and within the slot's own time."""
        assert self._calls.channel is not None
        # Not awaited: PID 1 takes orders in the order in which they are sent, so that later commands have them.
        self._calls.channel.call("limits", {"environment": environment, "wall_s": self.limits.wall_s}, lambda _: None)

    def view_of(self, folders: ViewFolders, layers: Sequence[SnapshotLayer], base: str | None) -> views.View:
        """Its folders for a view to show that stands on layers and a base."""
        own, root = self._host.base(self._base), self._host.base(base)
        # What the agent may have changed, as opposed to the image below: only this needs to be looked through.
        written = (self.upper, *(layer.path for layer in self.layers))
        return views.View(
            (*written, *own.layers, own.lower),
            len(written),
            (*(layer.path for layer in layers), *root.layers, root.lower),
            folders,
            # Without a running program its folders can be hard-linked instead of mounted (decision 8).
            lambda: self.host_pid is not None and not stopped_children.children_of(self.host_pid),
            empty=self._host.files.empty_folder,
            copies=self.volume.data,
        )

    @property
    def upper(self) -> str:
        """See `contract.Sandbox`."""
        return self.volume.upper

    async def _greet(self) -> None:
        """Send the runner its settings, and wait for its answer."""
        channel = self._calls.channel
        assert channel is not None
        # Inside, /proc is read-only (decision 17).
        oom_fd = os.open(f"/proc/{self.host_pid}/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            environment = self._host.environment | (egress_supervisor.environment() if self.network.has_egress else {})
            channel.start(environment, self.limits.output_bytes, self.limits.wall_s, oom_fd)
        finally:
            os.close(oom_fd)
        await asyncio.shield(channel.ready)

    def _why(self) -> str:
        return self.died.result() if self.died.done() else "it was stopped"

    def _fail(self, reason: str) -> None:
        """Kill a sandbox that ended by itself or can't be trusted; `died` gets the reason."""
        channel = self._calls.channel
        if channel is not None and not channel.closed:
            # Before the kill: open calls get this reason, and not the end of the socket that the kill causes.
            channel.close(OutcomeUnknown(f"slot {self.name} ended while the call ran: {reason}"))
        if self._stopping is None and not self._ending:
            self._first.kill()
            if not self.died.done():
                self.died.set_result(reason)

    # ------------------------------------------------------------------------------------------------------------- stop

    async def end_programs(self) -> str:
        """Kill everything in it; see `contract.Sandbox.end_programs`."""
        self._ending = True
        return await self._end_processes()

    async def stop(self) -> Stopped:
        """Kill everything in it and confirm; see `contract.Sandbox.stop`."""
        # An end that could not be confirmed is tried again; a clean one is not repeated.
        if self._stopping is None or (self._stopping.done() and not self._stopping.result().clean):
            self._stopping = self._tasks.spawn(self._stop(), "stop", awaited=True)
        # Cancelling a waiter leaves the end under way: half of a reset would be a slot in an unknown state.
        return await asyncio.shield(self._stopping)

    async def _stop(self) -> Stopped:
        began = time.monotonic()
        # First: connections are cut while the processes die, not after they have.
        moved = self._close_network()
        # In this order: a volume can be detached once nothing has it open, a cgroup removed once it is empty.
        problems = [await self._end_processes(), await self._dispose(), await self._remove_cgroup()]
        return await self._finished(began, problems, moved)

    def _close_network(self) -> asyncio.Future[int] | None:
        """Cut the slot's connections; what they moved. A view shares its slot's network, which stays."""
        return None if self._joined else self.network.close()

    async def _dispose(self) -> str:
        """Detach the volume, once; its files are freed later."""
        if self._detached:
            return ""
        try:
            await self._host.disposer.submit(self.volume.detach(), self.volume.disk)
        except OSError as error:
            return str(error)
        self._detached = True
        return ""

    async def _finished(self, began: float, problems: list[str], moved: asyncio.Future[int] | None) -> Stopped:
        self._calls.stop_watching()
        detail = "; ".join(problem for problem in problems if problem)
        # Unless it is confirmed, it stays in `live`, and whoever shuts the host down tries again.
        if not detail:
            self._host.live.discard(self)
        seconds = time.monotonic() - began
        egress_bytes = moved.result() if moved is not None and await done_within(moved, COUNT_S) else 0
        return Stopped(not detail, seconds, detail, self._first.cpu_s, egress_bytes)

    async def _end_processes(self) -> str:
        """Kill PID 1, which ends every process of its namespace, and wait until it is reaped. '' when confirmed."""
        if self._showing is not None:
            self._showing.cancel()
        if self._calls.channel is not None:
            self._calls.channel.close(OutcomeUnknown(f"slot {self.name} was stopped while the call ran"))
        problem = await self._first.end(self.cgroup.kill)
        # After every process has ended: nothing may hold a device open when the next lease gets it.
        if self._gpus is not None:
            self._gpus.leave(self.upper)
        return problem

    async def _remove_cgroup(self) -> str:
        # rmdir answers EBUSY until the kernel has let go of the last exited task, some time after it was reaped.
        pause = 0.0005
        while not self.cgroup.remove():
            self.cgroup.kill()  # PID 1 is gone, so nothing of the slot may be alive
            if pause > 1:
                return f"cgroup still in use: {', '.join(self.cgroup.paths)}"
            await asyncio.sleep(pause)
            pause *= 2
        return ""

    async def freeze(self) -> SnapshotLayer:
        """End the sandbox and keep its volume as a read-only layer; see `contract.Sandbox.freeze`."""
        if self._stopping is not None:
            raise SandboxError(f"slot {self.name} has ended, so it can't be frozen")
        frozen: asyncio.Future[SnapshotLayer] = self._loop.create_future()
        self._stopping = self._tasks.spawn(self._freeze(frozen), "freeze", awaited=True)
        await asyncio.shield(self._stopping)
        return frozen.result()

    async def _freeze(self, frozen: asyncio.Future[SnapshotLayer]) -> Stopped:
        """End the sandbox, and return how it ended; `frozen` gets the layer, or why there is none."""
        began = time.monotonic()
        moved = self._close_network()
        problems = [await self._end_processes()]
        try:
            if problems[0]:
                raise OSError(problems[0])
            await volumes.freeze(self.volume)
            used = await asyncio.to_thread(volumes.used_bytes, self.volume)
        except OSError as error:
            frozen.set_exception(SandboxError(f"the snapshot of slot {self.name} can't be trusted: {error}"))
            problems.append(await self._dispose())
        else:
            layer = SnapshotLayer(self.volume.upper, used)
            self._host.layers[layer] = self.volume
            # The volume is the layer's now: `_dispose` of a later `stop` must not free it.
            self._detached = True
            frozen.set_result(layer)
        problems.append(await self._remove_cgroup())
        return await self._finished(began, problems, moved)
