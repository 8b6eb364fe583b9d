"""The shipped tests of slots, on every backend."""

from atropos.testing.slots import *  # noqa: F403
