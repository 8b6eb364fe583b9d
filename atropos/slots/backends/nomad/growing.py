"""Registers a job, and raises its count: its other processes may do the same at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus

from atropos.errors import BackendUnavailable
from atropos.slots.backends.engines import ChangeFlag
from atropos.slots.backends.nomad import job as nomad_job
from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.nomad.refusals import NomadRefused
from atropos.slots.backends.nomad.secret import read_secret
from atropos.slots.backends.nomad.shrinking import CHANGES
from atropos.slots.backends.nomad.view import Json
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.spec import ContainerSpec

log = logging.getLogger("atropos.slots.nomad")

DEPLOYMENT = "active deployment"
"""In Nomad's message when it doesn't scale a job because of a deployment."""


class Grower:
    """Grows one job.

    Args:
        api: of the job.
        http: asks its servers.
        view: what is known of it.
        changed: set where something that the pool asks for has changed.
        spec: of its containers.
        pair: certificate and key of its servers; None: they are made.
        extra: more variables of its definition.

    Attributes:
        tried: whether this process has changed something in Nomad, or has tried to.
        cluster: signing keys of the cluster that the job is registered in; empty where they are not published.
        left_behind: whether the job was registered in another cluster before, which can't be reached any more.
    """

    def __init__(
        self,
        api: NomadApi,
        http: ServerHttp,
        view: JobView,
        changed: ChangeFlag,
        *,
        spec: ContainerSpec,
        pair: tuple[str, str] | None,
        extra: Mapping[str, str],
    ) -> None:
        self.tried = False
        self.cluster: frozenset[str] = frozenset()
        self.left_behind = False
        self._api, self._http = api, http
        self._view, self._changed = view, changed
        self._spec, self._pair, self._extra = spec, pair, extra

    async def grow(self) -> None:
        """Register the job, or raise its count to at least this process's target."""
        refused: NomadRefused | None = None
        for _ in range(CHANGES):
            job = await self._api.job()
            # A person's `nomad job stop` is to be respected.
            if job is not None and job.get("Stop") and self._view.live:
                return  # `_follow` says so; once another client has purged it, it is registered anew
            if job is None or job.get("Stop"):
                if await self._register(job):
                    return
            # The count is shared: what is above is another process's, or is lowered by the shrinker.
            elif nomad_job.count(job) >= self._view.target:
                self._view.deployment = ""
                self._view.surplus = nomad_job.count(job) > self._view.target
                return
            else:
                self.note_count(job)
                try:
                    await self._raise_count()
                except NomadRefused as error:
                    # 5xx: the job changed while it was scaled, or there is no leader at the moment.
                    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                        raise
                    refused = error
                    await asyncio.sleep(0.2)
                else:
                    return
        raise refused or BackendUnavailable(
            f"job {self._api.job_id} could not be changed: other processes keep changing it"
        )

    def note_count(self, job: Json) -> bool:
        """Whether another hand has lowered the job's count to less than this pool needs, which is logged."""
        if not self._view.lowered(count := nomad_job.count(job)):
            return False
        log.warning(
            "job %s was scaled to %d by another hand, and this pool, which needs %d, raises it again; stop the job to "
            "pause the pool, or give the pool a lower max_containers",
            self._api.job_id, count, self._view.target,
        )  # fmt: skip
        return True

    async def _register(self, stopped: Json | None) -> bool:
        """Register the job, anew or in place of a stopped one; False: another process has done so meanwhile."""
        if stopped is None:
            await self._check_cluster()
        self.tried = True
        # Before the job: its template waits for the variable, and counts as failing without it.
        await read_secret(self._api, self._http, self._view, self._pair)
        hcl, target = nomad_job.definition(), self._view.target
        chosen = nomad_job.variables(self._spec, self._api.access, self._api.job_id, target, self._extra)
        # Parsed in each round, since the target may have changed.
        fresh = await self._api.parse(hcl, chosen)
        if registered := await self._api.register(fresh, modify_index=stopped["JobModifyIndex"] if stopped else 0):
            self.cluster = self.cluster or await self._api.keys()
            self._view.live, self._view.count = True, target
        return registered

    async def _raise_count(self) -> None:
        """Raise the job's count to the target, unless a deployment is in progress: the pool retries later."""
        try:
            await self._api.scale(self._view.target)
            self._view.deployment, self._view.count = "", self._view.target
        except NomadRefused as error:
            if DEPLOYMENT not in str(error):
                raise
            self._view.deployment = (
                f"job {self._api.job_id} can't grow to {self._view.target} yet: its deployment is in progress"
            )
            self._changed.set()

    async def _check_cluster(self) -> None:
        """Log where the job is gone because another cluster answers now, or one that lost its state.

        The job is registered there all the same, so that a long run goes on; with ACLs, a foreign cluster refuses the
        token.
        """
        # Signing keys are made with the cluster's state, so none in common means another state.
        keys = await self._api.keys()
        if self.cluster and keys and self.cluster.isdisjoint(keys):
            self.left_behind = True
            log.warning(
                "another cluster than before answers at %s, or it has lost its state: job %s is registered again",
                self._api.access.shown,
                self._api.job_id,
            )
        self.cluster = keys or self.cluster
