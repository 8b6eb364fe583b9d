"""TLS on the sandbox ports of a Nomad job: the certificate that the operator names, known by the job's variable."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import pytest

from atropos.errors import ConfigError
from atropos.slots import SlotPool
from atropos.slots.backends.loading import open_survey
from tests.engines import BACKENDS, NOMAD, pool_config
from tests.settings import shows
from tests.unit.server.test_tls import pair

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
]


@shows("tls_certificate")
async def test_pools_speak_tls_alone(tmp_path):
    certificate, key = pair(tmp_path)
    config = pool_config("nomad", slots_per_container=2, max_containers=1, tls_certificate=certificate, tls_key=key)
    async with SlotPool(config) as pool:
        async with pool.lease("a") as slot:
            assert (await slot.exec("echo hi")).output == "hi\n"
        await refuses_plain_http(config.job_id)
        # The certificate is where the token is: who may read the one knows the other.
        shared = config.model_copy(update={"tls_certificate": None, "tls_key": None})
        async with SlotPool(shared) as other, other.lease("b") as slot:
            assert (await slot.exec("echo hi")).output == "hi\n"
        certificate, key = pair(tmp_path, "other")
        different = config.model_copy(update={"tls_certificate": certificate, "tls_key": key})
        with pytest.raises(ConfigError, match=r"tls_certificate: job .* runs with another certificate"):
            await SlotPool(different).start()


async def refuses_plain_http(job_id: str) -> None:
    async with await open_survey("nomad", job_id, address=NOMAD) as looked:
        (seen,), _ = await looked.look()
    assert seen.status is not None
    assert seen.container.url is not None
    address = seen.container.url.removeprefix("https://")
    assert address != seen.container.url
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{address}/v1/health")
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):  # an authority that this machine trusts didn't sign it
            await session.get(f"https://{address}/v1/health")


@shows("tls_key")
async def test_bad_files_fail_by_name(tmp_path):
    certificate, _ = pair(tmp_path)
    config = pool_config("nomad", tls_certificate=certificate, tls_key=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"tls_key: .*none can't be read"):
        await asyncio.wait_for(SlotPool(config).start(), 20)
