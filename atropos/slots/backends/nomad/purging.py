"""Removes a job that no client uses any more."""

from __future__ import annotations

import asyncio
import logging

from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.nomad.secret import read_secret
from atropos.slots.backends.nomad.view import newest
from atropos.slots.backends.server_http import ServerHttp

log = logging.getLogger("atropos.slots.nomad")

EVALUATIONS_S = 5
"""How long a purge waits for the scheduler, in seconds."""


async def purge_job(api: NomadApi, http: ServerHttp, view: JobView, client_id: str, stop_s: float) -> None:
    """Remove the job and its secret, unless a live client uses one of its containers.

    Args:
        api: of the job.
        http: asks its servers.
        view: what is known of it.
        client_id: whose leases keep no container.
        stop_s: how long its containers may take to end.
    """
    if not view.secret.token:
        await read_secret(api, http, view)
    token = view.secret.token
    rows = newest(view.read(await api.allocations()))
    servers = [item.url for item in rows if item.url is not None]
    if any(await asyncio.gather(*(http.used_by_others(url, token, client_id) for url in servers))):
        log.warning("job %s is in use by another client: not purged", api.job_id)
        return
    # Stopped before it is purged: then Nomad would no longer list the containers that are still ending.
    await api.deregister(purge=False)
    # The leases are this pool's own, or dead clients'.
    await asyncio.gather(*(http.drain(url, token, 0) for url in servers))
    try:
        async with asyncio.timeout(stop_s):
            # The first query returns at once; then each waits for a change.
            index = 0
            while await _stopped(api) and newest(view.read(await api.allocations())):
                index = await api.next_change(index)
    except TimeoutError:
        log.warning("job %s is purged while some of its containers are still ending", api.job_id)
    if not await _stopped(api):
        log.info("job %s was registered again by another client: not purged", api.job_id)
        return
    await _settle_evaluations(api)
    await api.deregister(purge=True)
    # Else another process has registered it again, and its servers need the secret.
    if await api.job() is None:
        await api.drop_secret()


async def _settle_evaluations(api: NomadApi) -> None:
    """Wait until the scheduler has decided on the job as it is.

    A job that is removed while a plan for it is on its way ends the server of Nomad 1.11.3 (hashicorp/nomad#27739).
    """
    for _ in range(EVALUATIONS_S * 10):
        if not any(each.get("Status") == "pending" for each in await api.evaluations()):
            return
        await asyncio.sleep(0.1)


async def _stopped(api: NomadApi) -> bool:
    """Whether the job is stopped or gone, and was not registered again."""
    return await api.live_job() is None
