"""Counters of a pool: leases, operations, failures, and how long they took."""

from __future__ import annotations

import collections
import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from atropos.errors import BY_CODE, AcquireTimeout, SandboxError, code_of
from atropos.metrics import Family, Histogram, counter
from atropos.wire import ReleaseResult

KEPT = 2048
"""Samples that percentiles are made of: the latest."""


@dataclass
class Measured:
    """How something measured ended."""

    result: str = "ok"


class Counters:
    """What a pool counts over its whole life, containers that ended included; bounded.

    Attributes:
        acquire: by `start` (warm: a slot was free; cold: the acquire had to wait) and result.
        fork: the same for leases on a snapshot, by result.
        prepare: an image in one container, by result.
        build: a step of a Dockerfile or task, by result; `found`: it was built already.
        operation: every operation in a slot, by its name and outcome.
        reset: slots given back, as their servers measured it; retired where the sandbox could not be confirmed gone.
        faults: infrastructure failures raised to callers, by code.
    """

    def __init__(self) -> None:
        self.leases = self.releases = self.lost = self.timeouts = self.containers_lost = 0
        self.acquire_s = deque[float](maxlen=KEPT)
        self.reset_s = deque[float](maxlen=KEPT)
        self.acquire = Histogram("atropos_pool_acquire_seconds", "Time to lease an empty slot.", "start", "result")
        self.fork = Histogram("atropos_pool_fork_seconds", "Time to lease a slot on a snapshot.", "result")
        self.prepare = Histogram("atropos_pool_prepare_seconds", "Time to prepare an image in a container.", "result")
        self.build = Histogram("atropos_pool_build_seconds", "Time to build a step of an image.", "result")
        self.operation = Histogram(
            "atropos_pool_operation_seconds", "Time of operations in slots, exec among them.", "operation", "result"
        )
        self.reset = Histogram("atropos_pool_reset_seconds", "Time to reset a slot after its lease.", "result")
        # each code from 0 on: Prometheus sees no increase in a series' first value
        self.faults = collections.Counter[str](dict.fromkeys(BY_CODE, 0))

    def granted(self) -> None:
        """A container granted a lease."""
        self.leases += 1

    def acquired(self, after_s: float) -> None:
        """An acquire got its slot after these seconds."""
        self.acquire_s.append(after_s)

    def released(self, result: ReleaseResult) -> None:
        """A server answered a release."""
        if result.released:
            self.reset_s.append(result.reset_s)
            self.reset.observe(result.reset_s, "ok" if result.clean else "retired")

    def returned(self) -> None:
        """A lease was given back."""
        self.releases += 1

    def lost_leases(self, number: int) -> None:
        """Leases ended without being given back."""
        self.lost += number

    def lost_container(self) -> None:
        """A connected container is gone."""
        self.containers_lost += 1

    def timed_out(self) -> None:
        """An acquire waited in vain."""
        self.timeouts += 1

    @contextlib.contextmanager
    def measure(self, observe: Callable[[float, str], None]) -> Generator[Measured]:
        """Context that measures its block, and calls `observe` with the seconds and the result.

        The result is the outcome's, which the block may set, or the code of the failure, which is counted.
        """
        started, outcome = time.perf_counter(), Measured()
        try:
            yield outcome
        except BaseException as error:
            outcome.result = self.failed(error)
            raise
        finally:
            observe(time.perf_counter() - started, outcome.result)

    def measure_operation(self, name: str) -> contextlib.AbstractContextManager[Measured]:
        """Context that measures an operation in a slot."""
        return self.measure(lambda seconds, result: self.operation.observe(seconds, name, result))

    def failed(self, error: BaseException) -> str:
        """Count a failure; its code."""
        # Inside `measure` an acquire's limit is still a bare TimeoutError; `SlotPool.acquire` words it later.
        code = AcquireTimeout.code if isinstance(error, TimeoutError) else code_of(error)
        # A ConfigError is the caller's own, and a cancellation is nobody's failure: neither is a fault to alert on.
        if isinstance(error, SandboxError | TimeoutError):
            self.faults[code] += 1
        return code

    def families(self) -> list[Family]:
        """Everything that only grows."""
        return [
            counter("atropos_pool_leases_total", "Leases granted.", self.leases),
            counter("atropos_pool_releases_total", "Leases given back.", self.releases),
            counter("atropos_pool_leases_lost_total", "Leases that ended with their slot or container.", self.lost),
            counter("atropos_pool_containers_lost_total", "Containers lost while connected.", self.containers_lost),
            counter("atropos_pool_faults_total", "Infrastructure failures by code.", dict(self.faults), "code"),
            *(each.family() for each in vars(self).values() if isinstance(each, Histogram)),
        ]
