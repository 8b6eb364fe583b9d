"""What all tests of small parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from tests.processes import kept_port

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes says what else runs here


@pytest.fixture(autouse=True, scope="module")
def _one_certificate_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is asked here is on loopback; to read all authorities' certificates takes each HTTP client 20 ms of CPU."""
    end = "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("authority") / "one.pem"
    file.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture
def port() -> Iterator[int]:
    """For a server that ends and comes back at it: nobody else gets it meanwhile."""
    with kept_port() as kept:
        yield kept
