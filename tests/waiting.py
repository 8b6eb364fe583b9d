"""Waiting in tests, as the shipped conformance suite does it."""

from __future__ import annotations

from atropos.testing.waiting import SLOWNESS, until

__all__ = ["SLOWNESS", "until"]
