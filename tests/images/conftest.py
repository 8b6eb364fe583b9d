"""One registry for all tests of a module, and stores that are never closed."""

import pytest

from tests.images.registry import MISSING, registry


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A registry, or a skip that says what is missing."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    with registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_sync_at_the_end(monkeypatch):
    """A loop that is closed while a program of a store starts would wait for ever (CPython 3.11)."""
    monkeypatch.setattr("atropos.images.layer_store.SYNC_AFTER_S", 3600.0)
