"""The whole suite, for `from atropos.testing.conformance import *` in a test module with a `harness` fixture."""

from atropos.testing.fixtures import *
from atropos.testing.pool import *
from atropos.testing.slots import *
from atropos.testing.tools import *
