"""Shrinks a job from the highest index down, each container once it is drained.

Other processes may use the job: a container that another client uses is kept, and the job's count is changed only where
the job is unchanged since it was read.
"""

from __future__ import annotations

import asyncio
import logging

from atropos.errors import BackendUnavailable
from atropos.slots.backends.engines import ChangeFlag
from atropos.slots.backends.nomad import job as nomad_job
from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.nomad.view import Json
from atropos.slots.backends.server_http import ServerHttp

log = logging.getLogger("atropos.slots.nomad")

DOUBT_S = 2.0
"""Pause before the next request while an answer of Nomad is in doubt, in seconds."""
LONGEST_DRAIN_S = 3600.0
CHANGES = 5
"""Attempts to change the job where other processes change it at the same time."""


class Shrinker:
    """Shrinks one job on request.

    Attributes:
        requested: set it when the job may have a surplus.
    """

    def __init__(self, api: NomadApi, http: ServerHttp, view: JobView, changed: ChangeFlag) -> None:
        self.requested = ChangeFlag()
        self._api, self._http = api, http
        self._view, self._changed = view, changed

    async def run(self, client_id: str) -> None:
        """Shrink until cancelled; leases of `client_id` keep no container."""
        while True:
            await self.requested.wait()
            try:
                while await self._shrink_once(client_id):
                    pass
            except BackendUnavailable as error:
                log.info("job %s can't be shrunk yet: %s", self._api.job_id, error)
                await asyncio.sleep(DOUBT_S)
                self.requested.set()

    async def _shrink_once(self, client_id: str) -> bool:
        """End one container; False: there is no surplus, or other clients use it."""
        if (item := self._view.next_shrink()) is None:
            await self._cancel_unplaced()
            return False
        # A drained one comes again where lowering the count failed.
        if item.run not in self._view.drained:
            if item.url is not None and item.run in self._view.ready:
                token = self._view.secret.token
                # No lower index is tried: Nomad ends the highest first, which would be this one.
                if await self._http.used_by_others(item.url, token, client_id):
                    return False
                await self._take_over()
                # First, so that the pool makes no new lease while the server is asked.
                self._view.ending.add(item.run)
                self._changed.set()
                await self._http.drain(item.url, token, LONGEST_DRAIN_S)
                await self._http.until_idle(item.url, token)
            self._view.ending.add(item.run)
            self._view.drained.add(item.run)  # it takes no more leases, so it must end whatever Nomad answers
        if not await self._lower(item.index):
            await self._api.stop_allocation(item.id)  # it is drained, and wanted again: Nomad replaces it
        self._view.drained.discard(item.run)
        self._changed.set()
        return True

    async def _take_over(self) -> None:
        """No other client is there: what the count has above this process's is a person's, or a dead process's."""
        if (job := await self._api.live_job()) is not None:
            if (count := nomad_job.count(job)) > self._view.most:
                log.warning(
                    "job %s was scaled to %d by another hand, and this pool, which needs %d, lowers it as its "
                    "containers become idle; raise min_containers to keep more",
                    self._api.job_id, count, self._view.target,
                )  # fmt: skip
            self._view.most = max(self._view.most, count)

    async def _cancel_unplaced(self) -> None:
        """Lower the count by this process's containers that could not be placed."""
        if not self._view.surplus:
            return
        if (job := await self._api.live_job()) is not None:
            count = self._view.unplaced_count(nomad_job.count(job))
            if count is not None and await self._set_count(job, count):
                log.info(
                    "job %s: its count is lowered to %d, as no more containers could be placed",
                    self._api.job_id,
                    count,
                )
        self._view.surplus = False

    async def _lower(self, index: int) -> bool:
        """Set the job's count so that `index` ends; False: it isn't the highest any more."""
        for _ in range(CHANGES):
            if (job := await self._api.live_job()) is None:
                return True
            if not self._view.may_lower(index, nomad_job.count(job)):
                return False
            if await self._set_count(job, index):
                return True
        return False

    async def _set_count(self, job: Json, count: int) -> bool:
        """Register a job as it was read, with another count; False: it has changed since."""
        # The job as it was read, as another version may have set what this one doesn't know; `scale` knows no
        # check-and-set.
        nomad_job.group_of(job)["Count"] = count
        if done := await self._api.register(job, modify_index=job["JobModifyIndex"]):
            self._view.most = max(count, self._view.target)
            self._view.count = count
        return done
