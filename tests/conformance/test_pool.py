"""The shipped tests of pools, on every backend."""

from atropos.testing.pool import *  # noqa: F403
