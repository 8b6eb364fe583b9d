"""What the holder of a lease has: a slot, its files, processes, ports and snapshots."""

from atropos.slots.slot.slot import Slot

__all__ = ["Slot"]
