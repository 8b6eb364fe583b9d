"""An amount of what slots are made of: what a slot has, a lease takes, a container has left, a task asks for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Resources:
    """Amounts of memory, files, processes, cores and GPUs; what isn't named is none.

    Attributes:
        pids: processes and threads.
        gpus: GPUs, or shares of them where slots share one.
    """

    memory_mib: int = 0
    disk_mib: int = 0
    pids: int = 0
    cpus: float = 0
    gpus: int = 0

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def _each(self, amount: Callable[[Any, Any], Any], other: Resources) -> Resources:
        """Both, amount by amount."""
        return Resources(*map(amount, self._amounts, other._amounts))

    @property
    def _amounts(self) -> tuple[Any, ...]:
        return self.memory_mib, self.disk_mib, self.pids, self.cpus, self.gpus

    def __add__(self, other: Resources) -> Resources:
        return self._each(operator.add, other)

    def __sub__(self, other: Resources) -> Resources:
        """What is left without the other: of nothing less than none."""
        return self._each(_less, other)

    def __mul__(self, times: int) -> Resources:
        return Resources(*(amount * times for amount in self._amounts))

    def __floordiv__(self, shares: int) -> Resources:
        """An equal share; of cores a part will do."""
        return replace(Resources(*(amount // shares for amount in self._amounts)), cpus=self.cpus / shares)

    def __bool__(self) -> bool:
        return any(self._amounts)

    def fits(self, room: Resources) -> bool:
        """Whether there is room for all of it."""
        # Written out, as it is asked of each container for each waiting acquire.
        return (
            self.memory_mib <= room.memory_mib
            and self.pids <= room.pids
            and self.disk_mib <= room.disk_mib
            and self.cpus <= room.cpus
            and self.gpus <= room.gpus
        )

    def most(self, *others: Resources) -> Resources:
        """The larger amount of each: what has room for any of them."""
        largest = self
        for other in others:
            largest = largest._each(max, other)
        return largest

    def least(self, other: Resources) -> Resources:
        """The smaller amount of each."""
        return self._each(min, other)

    def holds(self, part: Resources) -> int:
        """How many of `part` there is room for."""
        return int(
            min((has // each for has, each in zip(self._amounts, part._amounts, strict=True) if each), default=0)
        )

    def parts(self, part: Resources) -> int:
        """How many of `part` it takes to have as much."""
        needed = (has / each for has, each in zip(self._amounts, part._amounts, strict=True) if each)
        return math.ceil(max(needed, default=0))

    def __str__(self) -> str:
        texts = {
            f"{self.memory_mib} MiB": self.memory_mib,
            f"{self.disk_mib} MiB of files": self.disk_mib,
            f"{self.pids} processes": self.pids,
            f"{self.cpus:g} cores": self.cpus,
            f"{self.gpus} GPU{'s' * (self.gpus > 1)}": self.gpus,
        }
        return ", ".join(text for text, amount in texts.items() if amount) or "nothing"


def _less(one: float, other: float) -> float:
    return max(0, one - other)


NOTHING = Resources()
