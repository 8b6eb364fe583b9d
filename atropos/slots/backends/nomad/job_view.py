"""What is known of a job and its allocations, and what follows from news: plain data in, actions out, no requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.base import Container
from atropos.slots.backends.nomad.view import DRIVER, Allocation, JobSecret, container, newest, set_up_fault
from atropos.slots.backends.spec import BAD_CONFIG, hopeless

READY_S = 60.0
"""A server that doesn't answer for this long after it started is said to be in trouble, in seconds."""


@dataclass(frozen=True)
class Actions:
    """What is to be done after a list of allocations was applied.

    Attributes:
        changed: the containers are others than before, or in another state.
        expect: servers that run, whose first answer is to be awaited.
        ask_placement: containers are missing: the scheduler is to be asked why.
        diagnose: an allocation whose failure is to be explained, by its server's last words.
        alone: no other container may still come up beside that one.
    """

    changed: bool
    expect: tuple[Allocation, ...]
    ask_placement: bool
    diagnose: Allocation | None = None
    alone: bool = False


@dataclass(frozen=True)
class Shrink:
    """The next step of making the job smaller.

    Attributes:
        item: the container to take away; None: there is none too many.
        drained: it was drained already, and Nomad has not been asked to lower the count yet.
    """

    item: Allocation | None
    drained: bool = False


@dataclass
class JobView:
    """One job, as this process knows it.

    Attributes:
        target: containers that this process asks for.
        most: the job's count may be lowered from up to here; what is above was asked for by another process.
        surplus: the job's count is above the target.
        known: by run, what Nomad last said of the allocations that are not over.
        ready: runs whose server has answered.
        ending: runs that this process is draining or has stopped.
        drained: runs that were drained to make the job smaller, while its count is still to be lowered.
        diagnosed: runs whose failure has been counted.
        deployment: why the job's count can't be raised now; empty when it can.
        placement: why containers have no place; empty when all have one.
        crash: why a container that has a place doesn't come up.
        unplaced_since: when Nomad first said that it can place nothing at all, by the caller's clock.
        failure: why no container will ever come, as long as none ever has.
    """

    placement_s: float
    target: int = 0
    most: int = 0
    surplus: bool = False
    known: dict[str, Allocation] = field(default_factory=dict[str, Allocation])
    ready: set[str] = field(default_factory=set[str])
    ever_ready: bool = False
    ending: set[str] = field(default_factory=set[str])
    drained: set[str] = field(default_factory=set[str])
    diagnosed: set[str] = field(default_factory=set[str])
    deployment: str = ""
    placement: str = ""
    crash: str = ""
    failures: int = 0
    unplaced_since: float | None = None
    failure: Exception | None = None

    def containers(self, secret: JobSecret) -> list[Container]:
        """The allocations that are not over, by index."""
        return [
            container(item, secret, ready=item.run in self.ready, ending=item.run in self.ending)
            for item in newest(self.known.values())
        ]

    def trouble(self) -> str:
        """Why containers are missing; empty when none is."""
        return "; ".join(text for text in (self.deployment, self.placement, self.crash) if text)

    # ---------------------------------------------------------------------------------------------------------- news

    def doubtful(self, rows: Sequence[Allocation]) -> list[Allocation]:
        """Allocations that are missing from a list, or given up in it, and whose servers may answer all the same."""
        listed = {item.id for item in rows}
        missing = [item for item in self.known.values() if item.id not in listed]
        return missing + [item for item in rows if item.state == "lost" and item.run in self.known]

    def merge(self, rows: Sequence[Allocation], answering: Sequence[Allocation]) -> dict[str, Allocation]:
        """The allocations that are not over, by run.

        What Nomad gave up with its node may be whole, and merely out of Nomad's reach: its leases go on, and it gets no
        new ones. What Nomad doesn't list though its server answers is kept as it was.
        """
        kept = (replace(item, state="ending") if item.state == "lost" else item for item in answering)
        return {item.run: item for item in (*newest(rows), *kept)}

    def needs_token(self, now: dict[str, Allocation]) -> bool:
        """Whether to read the token again: as long as servers start.

        Who purged the job just before may have taken the secret of its successor.
        """
        return bool(now.keys() - self.known.keys()) or any(item.state == "starting" for item in now.values())

    def apply(self, rows: Sequence[Allocation], now: dict[str, Allocation]) -> Actions:
        """Take a list of allocations, and its `merge`, for what is known from now on."""
        changed = now != self.known
        if changed:
            self.known = now
            self.ready &= now.keys()
            self.ending &= now.keys()
            self.drained &= now.keys()
        self.diagnosed &= {item.run for item in rows}
        ailing = self._ailing(rows)
        worst = max(ailing, key=lambda item: item.modified, default=None)
        if worst is None:
            self.crash = ""
        hopeful = {item.index for item in self._live()} - {item.index for item in ailing}
        return Actions(
            changed=changed,
            expect=tuple(item for item in now.values() if self.awaited(item)),
            ask_placement=len(self._live()) < self.target,
            diagnose=worst,
            alone=not hopeful,
        )

    def _live(self) -> list[Allocation]:
        return [item for item in self.known.values() if item.state != "ending"]

    def _ailing(self, rows: Iterable[Allocation]) -> list[Allocation]:
        """Allocations of containers that are wanted and don't come up."""
        serving = {item.index for item in self._live() if item.run in self.ready}
        return [
            item
            for item in rows
            if item.detail
            and (item.state == "starting" or item.failed)
            and item.index not in serving
            and item.index < max(self.target, self.placed())
        ]

    def awaited(self, item: Allocation) -> bool:
        """Whether a server runs that has not answered yet."""
        return item.state == "running" and item.url is not None and item.run not in self.ready

    def answered(self, run: str) -> None:
        """A server has answered for the first time."""
        self.ready.add(run)
        self.ever_ready = True
        self.crash, self.failures = "", 0

    def silent(self, url: str) -> None:
        """A server has not answered for `READY_S`."""
        self.crash = f"{url} does not answer though its task runs: is the client's network reachable from here?"

    # ---------------------------------------------------------------------------------------------------------- trouble

    def judge_placement(self, placement: str, now_s: float) -> None:
        """Take the scheduler's reason, and give up on a job of which nothing has been placed for `placement_s`.

        Args:
            placement: why containers are missing; empty when none is.
            now_s: the caller's clock.
        """
        self.placement = placement
        if not placement and len(self._live()) >= self.target:
            self.deployment = ""
        if self._live() or not placement:
            if self.unplaced_since is not None and isinstance(self.failure, BackendUnavailable):
                self.failure = None
            self.unplaced_since = None
            return
        self.unplaced_since = now_s if self.unplaced_since is None else self.unplaced_since
        if now_s >= self.unplaced_since + self.placement_s and self.failure is None:
            self.failure = BackendUnavailable(placement)

    def judge_crash(self, item: Allocation, words: str, *, alone: bool) -> None:
        """Say why a container doesn't come up, and whether another try can help.

        Args:
            item: its allocation.
            words: its server's own last words.
            alone: no other container may still come up.
        """
        cure = set_up_fault(item.detail)
        if item.run not in self.diagnosed:
            self.crash = f"container {item.index} on {item.node}: {item.detail}" + "".join(
                f"{mark}{text}" for mark, text in ((": ", words), ("; ", cure)) if text
            )
            if item.exit_code is None and not item.detail.startswith(DRIVER):
                return  # it may still come up: a template that waits for its variable, say
            self.diagnosed.add(item.run)
            self.failures += 1
        if alone and (cure or item.unrecoverable):
            self.failure = ConfigError(self.crash)
        elif alone or item.exit_code == BAD_CONFIG:
            self.failure = hopeless(item.exit_code, self.crash, self.failures)

    # ---------------------------------------------------------------------------------------------------------- count

    def ask(self, count: int) -> None:
        """This process asks for so many containers."""
        self.target, self.most = count, max(self.most, count)

    def adopt(self, count: int) -> None:
        """A job is there already, of this size."""
        self.target = self.most = count

    def placed(self) -> int:
        """How many containers reach up to the highest index that has a place."""
        return max((item.index + 1 for item in self._live()), default=0)

    def next_shrink(self) -> Shrink:
        """Which container goes next: one that is drained already, else the highest where there are too many."""
        for item in self.known.values():
            if item.run in self.drained:
                return Shrink(item, drained=True)
        live = [item for item in newest(self.known.values()) if item.state != "ending" and item.run not in self.ending]
        return Shrink(live[-1] if len(live) > self.target else None)

    def unplaced_count(self, count: int) -> int | None:
        """To what a job's count is lowered where nobody waits any more for what found no place; None: it stays."""
        wanted = max(self.target, self.placed())
        return wanted if wanted < count <= self.most else None

    def may_lower(self, index: int, count: int) -> bool:
        """Whether lowering a job's count to `index` takes that very container away, and nobody asks for it."""
        highest = self.placed() <= index + 1 <= count <= max(index + 1, self.most)
        return highest and self.target <= index
