"""What all tests of small parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from tests.processes import kept_port


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
