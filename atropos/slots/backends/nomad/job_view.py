"""The state of a job and its allocations, and what follows from a change: plain data, no requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.container import Container
from atropos.slots.backends.nomad.view import DRIVER, Allocation, JobSecret, Json, newest, set_up_fault
from atropos.slots.backends.spec import BAD_CONFIG, hopeless

READY_S = 60.0
"""A server that doesn't answer for this long after its start is reported, in seconds."""


@dataclass
class JobView:
    """One job, as this process knows it.

    Attributes:
        secret: of the job's servers.
        target: containers that this process wants.
        most: the highest count that this process may lower; a higher one is another process's, while there is one.
        surplus: the job's count is above the target.
        known: the live allocations as Nomad last listed them, by run.
        ready: runs whose server has answered.
        ending: runs that this process is draining or has stopped.
        drained: runs that were drained to shrink the job, while its count is still to be lowered.
        failing: the last list's allocations of wanted containers that don't start.
        diagnosed: runs whose failure has been counted.
        live: this process has seen the job registered, and not stopped.
        count: the job's count as this process last read or set it.
        differences: how the job differs from this process's settings, as it was last logged.
        deployment: why the job's count can't be raised now; empty when it can.
        placement: why containers are not placed; empty when all are.
        crash: why a placed container doesn't start.
        unplaced_since: when Nomad first could place no container, by the caller's clock.
        failure: why no container will ever start, as long as none has.
    """

    placement_s: float
    secret: JobSecret = field(default_factory=JobSecret)
    target: int = 0
    most: int = 0
    surplus: bool = False
    known: dict[str, Allocation] = field(default_factory=dict[str, Allocation])
    ready: set[str] = field(default_factory=set[str])
    ever_ready: bool = False
    ending: set[str] = field(default_factory=set[str])
    drained: set[str] = field(default_factory=set[str])
    failing: list[Allocation] = field(default_factory=list[Allocation])
    diagnosed: set[str] = field(default_factory=set[str])
    live: bool = False
    count: int = 0
    differences: str = ""
    deployment: str = ""
    placement: str = ""
    crash: str = ""
    failures: int = 0
    unplaced_since: float | None = None
    failure: Exception | None = None

    def containers(self) -> list[Container]:
        """The live allocations, by index."""
        return [self._container(item) for item in newest(self.known.values())]

    def _container(self, item: Allocation) -> Container:
        state: Literal["starting", "running", "ending"] = "starting"
        if item.run in self.ending or item.state == "ending":
            state = "ending"
        elif item.run in self.ready and item.state in {"running", "unknown"}:
            state = "running"
        detail = item.detail or item.doing
        place = f"{item.node} {item.id.partition('-')[0]}".strip()
        return Container(
            item.run, item.index, item.url, self.secret.token, state, detail, self.secret.certificate, place
        )

    def trouble(self) -> str:
        """Why containers are missing; empty when none is."""
        return "; ".join(text for text in (self.deployment, self.placement, self.crash) if text)

    # ---------------------------------------------------------------------------------------------------------- lists

    def doubtful(self, rows: Sequence[Allocation]) -> list[Allocation]:
        """Allocations that a list lacks or calls lost, whose servers may still answer."""
        listed = {item.id for item in rows}
        missing = [item for item in self.known.values() if item.id not in listed]
        return missing + [item for item in rows if item.state == "lost" and item.run in self.known]

    def read(self, rows: Iterable[Json]) -> list[Allocation]:
        """Allocations as Nomad lists them."""
        tls = self.secret.certificate is not None
        return [Allocation.read(row, tls=tls) for row in rows]

    def merge(self, rows: Sequence[Allocation], answering: Sequence[Allocation]) -> dict[str, Allocation]:
        """The live allocations, by run.

        An allocation that Nomad lost with its node may still run: its leases go on, and it gets no new ones. One that
        Nomad doesn't list though its server answers is kept as it was.
        """
        others = (replace(item, state="ending") if item.state == "lost" else item for item in answering)
        return {item.run: item for item in (*newest(rows), *others)}

    def needs_token(self, now: dict[str, Allocation]) -> bool:
        """Whether to read the token again, which is so while servers start.

        An earlier purge of the job may have deleted the secret of its successor.
        """
        # Not with each list: it is a request more, to a path with encryption.
        return bool(now.keys() - self.known.keys()) or any(item.state == "starting" for item in now.values())

    def apply(self, rows: Sequence[Allocation], now: dict[str, Allocation]) -> bool:
        """Apply a list of allocations, then `merge`; returns whether containers came, went, or changed their state."""
        changed = now != self.known
        if changed:
            self.known = now
            self.ready &= now.keys()
            self.ending &= now.keys()
            self.drained &= now.keys()
        # By all rows, over ones included: a failed run may be listed for hours, and is to be counted once.
        self.diagnosed &= {item.run for item in rows}
        serving = {item.index for item in self._live() if item.run in self.ready}
        self.failing = [
            item
            for item in rows
            if item.detail
            and (item.state == "starting" or item.failed)
            # A failed allocation whose successor answers is history.
            and item.index not in serving
            and item.index < max(self.target, self.placed())
        ]
        if not self.failing:
            self.crash = ""
        return changed

    def _live(self) -> list[Allocation]:
        return [item for item in self.known.values() if item.state != "ending"]

    def _staying(self) -> list[Allocation]:
        return [item for item in self._live() if item.run not in self.ending]

    @property
    def lacking(self) -> bool:
        """Whether containers are missing: the scheduler's evaluations say why."""
        return len(self._live()) < self.target

    def unanswered(self) -> dict[str, str]:
        """The addresses of running servers that have not answered yet, by run."""
        running = [item for item in self.known.values() if item.state == "running" and item.run not in self.ready]
        return {item.run: item.url for item in running if item.url is not None}

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
        """Store the scheduler's reason; `failure` is set where nothing has been placed for `placement_s`.

        Args:
            placement: why containers are missing; empty when none is.
            now_s: the caller's clock.
        """
        self.placement = placement
        if not placement and not self.lacking:
            self.deployment = ""
        # What is placed will start; only a job with nothing at all is given up.
        if self._live() or not placement:
            if self.unplaced_since is not None and isinstance(self.failure, BackendUnavailable):
                self.failure = None
            self.unplaced_since = None
            return
        self.unplaced_since = now_s if self.unplaced_since is None else self.unplaced_since
        if now_s >= self.unplaced_since + self.placement_s and self.failure is None:
            self.failure = BackendUnavailable(placement)

    def latest_failing(self) -> Allocation | None:
        """The allocation that `judge_crash` is to be called for; None: there is none."""
        return max(self.failing, key=lambda item: item.modified, default=None)

    def judge_crash(self, item: Allocation, last_line: str) -> None:
        """Set why an allocation doesn't start, and whether a retry can help; `last_line` is of its server's log."""
        # While any other container starts, the fault may be one node's.
        alone = {item.index for item in self._live()} <= {item.index for item in self.failing}
        cure = set_up_fault(item.detail)
        if item.run not in self.diagnosed:
            self.crash = f"container {item.index} on {item.node}: {item.detail}" + "".join(
                f"{mark}{text}" for mark, text in ((": ", last_line), ("; ", cure)) if text
            )
            if item.exit_code is None and not item.detail.startswith(DRIVER):
                return  # it may still start, for example when a template waits for its variable
            self.diagnosed.add(item.run)
            self.failures += 1
        if alone and (cure or item.unrecoverable):
            self.failure = ConfigError(self.crash)
        elif alone or item.exit_code == BAD_CONFIG:
            self.failure = hopeless(item.exit_code, self.crash, self.failures)

    # ---------------------------------------------------------------------------------------------------------- count

    def ask(self, count: int) -> None:
        """Set the number of containers that this process wants."""
        self.target, self.most = count, max(self.most, count)

    def adopt(self, count: int) -> None:
        """Take over an existing job of this size."""
        self.target = self.most = self.count = count
        self.live = True

    def lowered(self, count: int) -> bool:
        """Whether another hand has lowered the job's count to less than this process wants; remembers the count."""
        before, self.count = self.count, count
        return count < min(before, self.target)

    def placed(self) -> int:
        """The highest placed index that this process isn't ending, plus 1."""
        return max((item.index + 1 for item in self._staying()), default=0)

    def next_shrink(self) -> Allocation | None:
        """The next container to end: a drained one, else the highest of a surplus; None: there is none."""
        for item in self.known.values():
            if item.run in self.drained:
                return item
        staying = newest(self._staying())
        return staying[-1] if len(staying) > self.target else None

    def unplaced_count(self, count: int) -> int | None:
        """The count without containers that could not be placed and are no longer wanted; None: it stays."""
        needed = max(self.target, self.placed())
        # Above `most` the rest belongs to another process.
        return needed if needed < count <= self.most else None

    def may_lower(self, index: int, count: int) -> bool:
        """Whether lowering a job's count to `index` ends exactly that container, and it isn't wanted."""
        # Nomad ends the highest indexes when a count is lowered, so it must be the last one of the job.
        highest = self.placed() <= index + 1 <= count <= max(index + 1, self.most)
        return highest and self.target <= index
