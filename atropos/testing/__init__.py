"""The conformance suite for backends: tests that every backend of the pool passes, the built-in ones included.

It needs the extra `atropos[testing]`. A backend's author describes the backend once, as a `BackendHarness` in a
fixture called `harness`, and imports the tests:

    # tests/test_my_backend.py
    import pytest
    from atropos.slots import SlotPoolConfig
    from atropos.testing import BackendHarness
    from atropos.testing.conformance import *


    class MyHarness(BackendHarness):
        ...


    @pytest.fixture(scope="module")
    def harness() -> BackendHarness:
        return MyHarness()

`atropos.testing.slots`, `.pool` and `.tools` are the parts of it, for a backend that is not complete yet; each needs
the fixtures of `atropos.testing.fixtures` beside it.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError(
        f"the conformance suite needs the extra `testing`: pip install 'atropos[testing]' ({error})"
    ) from error

pytest.register_assert_rewrite(
    "atropos.testing.fixtures", "atropos.testing.pool", "atropos.testing.slots", "atropos.testing.tools"
)

from atropos.testing.harness import BackendHarness  # noqa: E402 - a rewritten module must not be imported before
from atropos.testing.waiting import SLOWNESS, until  # noqa: E402

__all__ = ["SLOWNESS", "BackendHarness", "until"]
