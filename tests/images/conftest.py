"""One registry for all tests of a module."""

import pytest

from tests.images.registry import MISSING, registry


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A registry, or a skip that says what is missing."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    with registry(tmp_path_factory.mktemp("registry")) as found:
        yield found
