"""Takes a job's containers away from the highest index down, each once it is drained.

Other processes may use the job: a container that another client works in stays, and the job's count is changed only where
nobody has changed the job since it was read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from atropos.errors import BackendUnavailable
from atropos.slots.backends.nomad import job as nomad_job
from atropos.slots.backends.nomad.api import Json, NomadApi
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.supervise import ChangeFlag

log = logging.getLogger("atropos.slots.nomad")

DOUBT_S = 2.0
"""Pause before Nomad is asked again while an answer of its is in doubt, in seconds."""
LONGEST_DRAIN_S = 3600.0
CHANGES = 5
"""How often a change of the job is tried again when another process changed it at the same moment."""


class Shrinker:
    """Makes one job smaller when it is asked to.

    Attributes:
        wanted: set it when the job may be larger than it has to be.

    Args:
        job_id: the job.
        api: Nomad's.
        http: requests to the containers' servers.
        view: what is known of the job's containers.
        token: gives the token of the servers.
        changed: set when a container begins to end.
    """

    def __init__(
        self, job_id: str, api: NomadApi, http: ServerHttp, view: JobView, token: Callable[[], str], changed: ChangeFlag
    ) -> None:
        self.wanted = ChangeFlag()
        self._job_id, self._api, self._http = job_id, api, http
        self._view, self._token, self._changed = view, token, changed

    async def run(self, client_id: str) -> None:
        """Shrink until cancelled; leases of `client_id` keep no container."""
        while True:
            await self.wanted.wait()
            try:
                while await self._shrink_once(client_id):
                    pass
            except BackendUnavailable as error:
                log.info("job %s can't be made smaller yet: %s", self._job_id, error)
                await asyncio.sleep(DOUBT_S)
                self.wanted.set()

    async def _shrink_once(self, client_id: str) -> bool:
        """Take one container away; False: there is none too many, or none that may go."""
        step = self._view.next_shrink()
        if (item := step.item) is None:
            await self._cancel_unplaced()
            return False
        if not step.drained:
            if item.url is not None and item.run in self._view.ready:
                if await self._http.used_by_others(item.url, self._token(), client_id):
                    return False
                self._view.ending.add(item.run)
                self._changed.set()
                await self._http.drain(item.url, self._token(), LONGEST_DRAIN_S)
                await self._http.until_idle(item.url, self._token())
            self._view.ending.add(item.run)
            self._view.drained.add(item.run)  # it takes no leases any more: whatever Nomad answers, it has to go
        if not await self._lower(item.index):
            await self._api.stop_allocation(item.id)  # it is drained, and wanted again: let Nomad make a fresh one
        self._view.drained.discard(item.run)
        self._changed.set()
        return True

    async def _cancel_unplaced(self) -> None:
        """Take back what was asked for and found no place; what another process asked for beyond that stays."""
        if not self._view.surplus:
            return
        if (job := await self._api.job(self._job_id)) is not None and not job.get("Stop"):
            wanted = self._view.unplaced_count(nomad_job.count(job))
            if wanted is not None and await self._set_count(job, wanted):
                log.info("job %s has %d containers asked for: no more have found a place", self._job_id, wanted)
        self._view.surplus = False

    async def _lower(self, index: int) -> bool:
        """Set the job's count so that `index` is the first to go; False: it isn't the highest any more."""
        for _ in range(CHANGES):
            job = await self._api.job(self._job_id)
            if job is None or job.get("Stop"):
                return True
            if not self._view.may_lower(index, nomad_job.count(job)):
                return False
            if await self._set_count(job, index):
                return True
        return False

    async def _set_count(self, job: Json, count: int) -> bool:
        """Register a job as it was read, with another count; False: somebody has changed it since."""
        nomad_job.group_of(job)["Count"] = count
        if done := await self._api.register(job, modify_index=job["JobModifyIndex"]):
            self._view.most = max(count, self._view.target)
        return done
