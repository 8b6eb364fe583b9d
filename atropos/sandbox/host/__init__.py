"""Slots on one machine: their file systems, sandboxes, filters and limits."""
