"""The pool: how leases are granted, and images prepared for them."""

from atropos.slots.pool.pool import SlotPool

__all__ = ["SlotPool"]
