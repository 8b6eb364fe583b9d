"""The slot pool: leases on sandboxes in containers that a backend provides."""

from atropos.slots.config import Quotas, SlotPoolConfig
from atropos.slots.containers.share import QuotaUse, Share, Usage
from atropos.slots.pool import SlotPool
from atropos.slots.pool.stats import PoolStats
from atropos.slots.slot import Slot
from atropos.slots.slot.ports import PortForward
from atropos.slots.slot.processes import Process, Signal
from atropos.slots.slot.results import ExecResult, SlotFileError
from atropos.slots.slot.snapshots import Snapshot
from atropos.wire import EgressSecret, LeaseLimits

__all__ = [
    "EgressSecret",
    "ExecResult",
    "LeaseLimits",
    "PoolStats",
    "PortForward",
    "Process",
    "QuotaUse",
    "Quotas",
    "Share",
    "Signal",
    "Slot",
    "SlotFileError",
    "SlotPool",
    "SlotPoolConfig",
    "Snapshot",
    "Usage",
]
