"""The shipped tests of tools, on every backend."""

from atropos.testing.tools import *  # noqa: F403
