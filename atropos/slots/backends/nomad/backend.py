"""Containers as allocations of one Nomad job, which any number of processes share.

The job's `count` is the only shared state: growing is `scale`, shrinking takes the highest index away once it is
drained, with a check that nobody changed the job meanwhile. Nomad replaces what dies. It is asked when something
changed (its event stream says so, or a blocking query), never for a call or a lease.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.base import Backend, Container
from atropos.slots.backends.nomad import job as nomad_job
from atropos.slots.backends.nomad.api import Json, NomadApi
from atropos.slots.backends.nomad.refusals import NomadMisset, NomadRefused
from atropos.slots.backends.nomad.settings import NomadSettings
from atropos.slots.backends.nomad.view import (
    DRIVER,
    GROUP,
    TASK,
    Allocation,
    container,
    newest,
    placement_failures,
    set_up_fault,
)
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.spec import BAD_CONFIG, ContainerSpec, hopeless
from atropos.slots.backends.supervise import ChangeFlag, Outage, Patience, persist

if TYPE_CHECKING:
    from atropos.slots.config import SlotPoolConfig

log = logging.getLogger("atropos.slots.nomad")

LOOK_AGAIN_S = 60.0
"""How often allocations are listed even when no change was told, in seconds."""
LASTED_S = 5.0
"""An event stream or a blocking query that lasted for this long was sound, in seconds."""
DOUBT_S = 2.0
"""How soon to look again while an answer of Nomad's is not believed, in seconds."""
READY_S = 60.0
"""A server that doesn't answer for this long after it started is said to be in trouble, in seconds."""
LONGEST_DRAIN_S = 3600.0
PURGE_AGAIN_S, PURGE_UNANSWERED_S, PURGE_AWAY_S = 20.0, 8.0, 2.0
"""How long a purge is tried again at the end, in seconds; then the job is left, and told: while Nomad answers with errors,
while it doesn't answer, and where it hadn't answered for a while before."""
DEPLOYMENT = "active deployment"
"""In Nomad's words when it doesn't scale a job because a changed version of it is being rolled out."""
CHANGES = 5
"""How often a change of the job is tried again when another process changed it at the same moment."""


class NomadBackend(Backend):
    """Keeps one job at the size that is asked for, and shows its allocations."""

    name = "nomad"

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        settings: NomadSettings,
        job_id: str,
        purge_on_start: bool = False,
        extra: Mapping[str, str] | None = None,
        placement_s: float = 5.0,
        outage_s: float = 900.0,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,100}", job_id):  # Nomad takes no '.' in a variable's path
            raise ConfigError(f"sandbox_job_id {job_id!r} must be letters, digits, '_' and '-', at most 100")
        self._spec = spec
        self._job_id = job_id
        self._purge_on_start = purge_on_start
        self._extra = dict(extra or {})
        self._placement_s = placement_s
        self._settings = settings
        self._api = NomadApi(settings)
        self._http = ServerHttp()
        self._token = ""
        self._changing = False
        """Whether this process has changed something in Nomad, or was about to."""
        self._target = 0
        self._most = 0
        """The job's count may be lowered from up to here: what is above was asked for by another process."""
        self._surplus = False
        """Whether the job's count is above what this process asks for."""
        self._known: dict[str, Allocation] = {}
        """By run: what Nomad last said of the allocations that are not over."""
        self._ready: set[str] = set()
        """Runs whose server has answered."""
        self._ever_ready = False
        self._ending: set[str] = set()
        """Runs that this process is draining or has stopped."""
        self._waiting: set[str] = set()
        """Runs whose first answer is awaited."""
        self._told: set[str] = set()
        self._drained: set[str] = set()
        """Runs that were drained to make the job smaller; Nomad has not been told yet."""
        self._outage = Outage(outage_s)
        self._cluster: frozenset[str] = frozenset()
        """By which the cluster is known that the job is registered in; empty where it doesn't tell."""
        self._left_behind = False
        """Whether the job was registered in another cluster before, which is out of reach."""
        self._deployment = ""
        """Why the job's count can't be raised now; empty when it can."""
        self._placement = ""
        self._unplaced_since: float | None = None
        """When Nomad first said that it can place nothing at all, by the monotonic clock."""
        self._crash = ""
        self._failures = 0
        self._failure: Exception | None = None
        self._changed = ChangeFlag()
        self._wake = ChangeFlag()
        self._shrink = ChangeFlag()
        self._streams = True
        """Whether Nomad tells changes by its event stream."""
        self._main: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        states = [c.state for c in self.containers()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("running", "starting", "ending"))
        return f"<NomadBackend {self._job_id} at {self._settings.address}: {counts}; {self.trouble() or 'no trouble'}>"

    @classmethod
    def from_pool(cls, config: SlotPoolConfig) -> Self:
        """The backend that a pool's configuration describes."""
        settings = NomadSettings.from_environment(config.nomad_address)
        spec = ContainerSpec.from_pool(config)
        if config.allow_network and not settings.local:  # Nomad's API may well have a public address
            deny = (*spec.server.egress_deny, settings.host)
            spec = replace(spec, server=spec.server.model_copy(update={"egress_deny": deny}))
        return cls(
            spec,
            settings=settings,
            job_id=config.job_id,
            purge_on_start=config.purge_job_on_start,
            extra=config.nomad_variables,
            placement_s=config.placement_s,
            outage_s=config.outage_s,
        )

    # ------------------------------------------------------------------------------------------------------ contract

    async def start(self) -> None:
        """Find the job, if there is one, and adopt its allocations."""
        try:
            await self._adopt()
        except NomadMisset as error:
            raise ConfigError(str(error)) from error
        up = asyncio.Event()
        self._main = asyncio.create_task(self._run(up), name=f"nomad backend {self._job_id}")
        await up.wait()

    async def _adopt(self) -> None:
        await self._api.find_namespace()
        job = await self._api.job(self._job_id)
        if job is not None:
            nomad_job.group_of(job)
        if job is not None and self._purge_on_start:
            await self._purge()
            job = await self._api.job(self._job_id)
        if job is not None and not job.get("Stop"):
            self._target = self._most = _count(job)
            if told := nomad_job.differences(job, self._spec):
                log.warning("job %s is there already and taken as it is: %s", self._job_id, told)
            self._token = await self._api.token(self._job_id)
            self._cluster = await self._api.keys()
            await self._look()

    async def scale(self, count: int) -> None:
        """Raise the job's count now, or lower it as the highest containers become idle."""
        if self._group is None:
            raise BackendUnavailable("the Nomad backend is not running")
        self._target, self._most = count, max(self._most, count)
        await self._grow()
        self._shrink.set()
        if not self._streams:  # no allocation changes where none finds a place
            self._wake.set()

    def containers(self) -> Sequence[Container]:
        """The job's allocations that are not over, by index."""
        return [
            container(item, self._token, ready=item.run in self._ready, ending=item.run in self._ending)
            for item in newest(self._known.values())
        ]

    async def changed(self) -> None:
        """Wait until `containers()` may answer differently."""
        await self._changed.wait()

    def trouble(self) -> str:
        """Nomad's own reasons: it is away, it can't place, what it places doesn't run."""
        return "; ".join(text for text in (self._outage.reason, self._deployment, self._placement, self._crash) if text)

    def outage(self) -> str:
        """Why Nomad doesn't answer; empty while it does."""
        return self._outage.reason

    def failure(self) -> Exception | None:
        """Nomad is gone for good; or no server ever came up, as none can run as it is set up, or none has a place."""
        return self._outage.failure() or (None if self._ever_ready else self._failure)

    async def retire(self, container: Container) -> None:
        """Stop an allocation; Nomad makes another in its place. One that was restarted meanwhile is a new one.

        While Nomad doesn't answer it is tried again; a server that works by then is left alone, since others may use it.
        """
        item = self._known.get(container.id)
        if item is not None and item.run not in self._ending:
            self._ending.add(item.run)
            self._changed.set()
            try:
                await self._api.stop_allocation(item.id)
            except BackendUnavailable:
                self._ending.discard(item.run)
                self._changed.set()
                raise

    async def aclose(self, *, purge: bool) -> None:
        """Stop watching; with `purge`, remove job and secret unless another live client works there.

        What can't be removed, because Nomad doesn't answer, is named in the log. That takes seconds, not a run's patience.
        """
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)
        unanswered_s = PURGE_AWAY_S if self._outage.away_s > PURGE_UNANSWERED_S else PURGE_UNANSWERED_S
        await self._api.settled(unanswered_s)
        try:
            if purge and (self._token or self._changing):
                await persist(
                    self._purge, lambda error: PURGE_AGAIN_S if isinstance(error, NomadRefused) else unanswered_s
                )
            if purge and self._left_behind:
                log.error(
                    "job %s may be left in the cluster that was at %s before", self._job_id, self._settings.address
                )
        except BackendUnavailable as error:
            # (its words are enough)
            log.error(  # noqa: TRY400
                "job %s and its variable nomad/jobs/%s may be left: %s; "
                "`atropos pool purge --job-id %s --address %s` removes them",
                self._job_id, self._job_id, error, self._job_id, self._settings.address,
            )  # fmt: skip
        finally:
            await self._http.close()
            await self._api.close()
            self._known.clear()

    # -------------------------------------------------------------------------------------------------- growing, shrinking

    async def _grow(self) -> None:
        """Register the job, or raise its count, until it is what this process asks for at least."""
        refused: NomadRefused | None = None
        for _ in range(CHANGES):
            job = await self._api.job(self._job_id)
            if job is None or job.get("Stop"):
                if job is None:
                    await self._recognise()
                self._changing = True
                self._token = await self._api.token(self._job_id)
                hcl, wanted = nomad_job.definition(), self._target
                chosen = nomad_job.variables(self._spec, self._settings, self._job_id, wanted, self._extra)
                fresh = await self._api.parse(hcl, chosen)
                if await self._api.register(fresh, modify_index=job["JobModifyIndex"] if job else 0):
                    self._cluster = self._cluster or await self._api.keys()
                    return
            elif _count(job) < self._target:
                try:
                    await self._api.scale(self._job_id, GROUP, self._target, "asked for by a slot pool")
                    self._deployment = ""
                except NomadRefused as error:
                    if DEPLOYMENT in str(error):  # somebody changes the job; the pool asks again in a while
                        self._deployment = (
                            f"job {self._job_id} can't grow to {self._target} yet: its deployment goes on"
                        )
                        self._changed.set()
                        return
                    if error.status < 500:
                        raise
                    refused = error
                    await asyncio.sleep(0.2)
                    continue
                return
            else:
                self._deployment = ""
                self._surplus = _count(job) > self._target
                return
        raise refused or BackendUnavailable(f"job {self._job_id} could not be changed: others change it all the time")

    async def _recognise(self) -> None:
        """Say so when the job is gone because another cluster answers now, or one that lost its state.

        The job is registered there all the same: a run of days goes on, and where there are ACLs a cluster that is
        somebody else's refuses the token.
        """
        keys = await self._api.keys()
        if self._cluster and keys and self._cluster.isdisjoint(keys):
            self._left_behind = True
            log.warning(
                "another cluster answers at %s than before, or it has lost its state: job %s is registered there anew",
                self._settings.address,
                self._job_id,
            )
        self._cluster = keys or self._cluster

    async def _shrinker(self) -> None:
        """Take containers away from the highest index down, each once it is drained."""
        while True:
            await self._shrink.wait()
            try:
                while await self._shrink_once():
                    pass
            except BackendUnavailable as error:
                log.info("job %s can't be made smaller yet: %s", self._job_id, error)
                await asyncio.sleep(DOUBT_S)
                self._shrink.set()

    async def _shrink_once(self) -> bool:
        """Take one container away; False: there is none too many, or none that may go."""
        item = next((each for each in self._known.values() if each.run in self._drained), None)
        if item is None:
            live = [
                item for item in newest(self._known.values()) if item.state != "ending" and item.run not in self._ending
            ]
            if len(live) <= self._target:
                await self._forgo()
                return False
            item = live[-1]
            if item.url is not None and item.run in self._ready:
                if await self._http.used_by_others(item.url, self._token, self.client_id):
                    return False
                self._ending.add(item.run)
                self._changed.set()
                await self._http.drain(item.url, self._token, LONGEST_DRAIN_S)
                await self._http.until_idle(item.url, self._token)
            self._ending.add(item.run)
            self._drained.add(item.run)  # it takes no leases any more: whatever Nomad answers, it has to go
        if not await self._lower(item.index):
            await self._api.stop_allocation(item.id)  # it is drained, and wanted again: let Nomad make a fresh one
        self._drained.discard(item.run)
        self._changed.set()
        return True

    async def _forgo(self) -> None:
        """Take back what was asked for and found no place; what another process asked for beyond that stays."""
        if not self._surplus:
            return
        if (job := await self._api.job(self._job_id)) is not None and not job.get("Stop"):
            wanted = max(self._target, self._placed())
            if wanted < _count(job) <= self._most and await self._set_count(job, wanted):
                log.info("job %s has %d containers asked for: no more have found a place", self._job_id, wanted)
        self._surplus = False

    def _placed(self) -> int:
        """How many containers reach up to the highest index that has a place."""
        return max((item.index + 1 for item in self._known.values() if item.state != "ending"), default=0)

    async def _lower(self, index: int) -> bool:
        """Set the job's count so that `index` is the first to go; False: it isn't the highest any more."""
        for _ in range(CHANGES):
            job = await self._api.job(self._job_id)
            if job is None or job.get("Stop"):
                return True
            highest = self._placed() <= index + 1 <= _count(job) <= max(index + 1, self._most)
            if not highest or self._target > index:
                return False
            if await self._set_count(job, index):
                return True
        return False

    async def _set_count(self, job: Json, count: int) -> bool:
        """Register a job as it was read, with another count; False: somebody has changed it since."""
        nomad_job.group_of(job)["Count"] = count
        if done := await self._api.register(job, modify_index=job["JobModifyIndex"]):
            self._most = max(count, self._target)
        return done

    # ---------------------------------------------------------------------------------------------------------- watching

    async def _run(self, up: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for item in list(self._known.values()):
                    self._expect(item)
                group.create_task(self._watch())
                group.create_task(self._look_after())
                group.create_task(self._shrinker())
                up.set()
        except* Exception:
            log.exception("the Nomad backend of %s stopped", self._job_id)
        finally:
            self._group = None

    async def _watch(self) -> None:
        """Wake whenever Nomad says that something changed: by its event stream, or where there is none by blocking."""
        patience, index = Patience(first_s=0.2, longest_s=5), 0
        while True:
            began = time.monotonic()
            try:
                if self._streams:
                    async for _ in self._api.events(self._job_id):
                        self._wake.set()
                else:
                    last, index = index, await self._api.next_change(self._job_id, index)
                    if index != last:
                        patience.worked()
                        self._wake.set()
                        continue
            except NomadRefused as error:
                if self._streams and error.status < 500 and error.status != 429:
                    log.info("no event stream, using blocking queries: %s", error)
                    self._streams = False
                    continue
                index = 0
            except BackendUnavailable as error:
                log.debug("changes are not told: %s", error)  # the look that follows says whether Nomad answers
                index = 0
            if time.monotonic() > began + LASTED_S:  # what is cut or answered at once is asked for ever less often
                patience.worked()
            await asyncio.sleep(patience.failed())
            self._wake.set()

    async def _look_after(self) -> None:
        patience = Patience(first_s=0.2, longest_s=5)
        pause = LOOK_AGAIN_S
        while True:
            await self._wake.wait(pause)
            try:
                sure = await self._look() and (self._streams or len(self._known) >= self._target)
                pause = LOOK_AGAIN_S if sure else DOUBT_S
                if self._unplaced_since is not None and not self._ever_ready and self._failure is None:
                    pause = min(pause, max(0.1, self._unplaced_since + self._placement_s - time.monotonic()))
                patience.worked()
                if self._outage.over():
                    self._changed.set()
                    self._shrink.set()
                    self._cluster |= await self._api.keys() if self._known else frozenset()
            except BackendUnavailable as error:
                self._outage.noted(error)
                self._changed.set()
                await asyncio.sleep(patience.failed())
                self._wake.set()

    async def _look(self) -> bool:
        """List the allocations; False when the answer contradicts servers that still answer, and isn't believed."""
        rows = [Allocation.read(row) for row in await self._api.allocations(self._job_id)]
        listed = {item.id for item in rows}
        kept = await self._answering(item for item in self._known.values() if item.id not in listed)
        # What Nomad gave up with its node may be whole, and merely out of Nomad's reach: its leases go on, no new ones.
        given_up = await self._answering(item for item in rows if item.state == "lost" and item.run in self._known)
        now = {item.run: item for item in (*newest(rows), *kept, *(replace(item, state="ending") for item in given_up))}
        # Asked for as long as servers start: who purged the job just before may have taken the secret of its successor.
        if now.keys() - self._known.keys() or any(item.state == "starting" for item in now.values()):
            self._token = await self._api.token(self._job_id)
        if now != self._known:
            self._known = now
            self._ready &= now.keys()
            self._ending &= now.keys()
            self._drained &= now.keys()
            self._changed.set()
        for item in now.values():
            self._expect(item)
        await self._explain(rows)
        return not kept

    async def _answering(self, doubtful: Iterable[Allocation]) -> list[Allocation]:
        """Those whose servers answer."""
        asked = [item for item in doubtful if item.url is not None]
        answers = await asyncio.gather(*(self._http.healthy(item.url or "") for item in asked))
        return [item for item, healthy in zip(asked, answers, strict=True) if healthy]

    def _expect(self, item: Allocation) -> None:
        """Await the first answer of a server that runs."""
        if item.state != "running" or item.url is None or item.run in self._ready or item.run in self._waiting:
            return
        if self._group is not None:
            self._waiting.add(item.run)
            self._group.create_task(self._await_answer(item.run, item.url))

    async def _await_answer(self, run: str, url: str) -> None:
        started = time.monotonic()
        try:
            while run in self._known:
                if await self._http.until_healthy(url, within_s=1.0):
                    self._ready.add(run)
                    self._ever_ready = True
                    self._crash, self._failures = "", 0
                    self._changed.set()
                    return
                if time.monotonic() > started + READY_S:
                    self._crash = (
                        f"{url} does not answer though its task runs: is the client's network reachable from here?"
                    )
                    self._changed.set()
        finally:
            self._waiting.discard(run)

    async def _explain(self, rows: Sequence[Allocation]) -> None:
        """Find out why containers are missing, while some are."""
        live = [item for item in self._known.values() if item.state != "ending"]
        serving = {item.index for item in live if item.run in self._ready}
        before = self.trouble()
        if len(live) < self._target:
            self._placement = placement_failures(await self._api.evaluations(self._job_id))
        else:
            self._placement = self._deployment = ""
        self._judge_placement(placed=bool(live))
        ailing = [
            item
            for item in rows
            if item.detail
            and (item.state == "starting" or item.failed)
            and item.index not in serving
            and item.index < max(self._target, self._placed())
        ]
        self._told &= {item.run for item in rows}
        if ailing:
            hopeful = {item.index for item in live} - {item.index for item in ailing}
            await self._diagnose(max(ailing, key=lambda item: item.modified), alone=not hopeful)
        else:
            self._crash = ""
        if self.trouble() != before:
            self._changed.set()
            if self.trouble():
                log.warning("job %s: %s", self._job_id, self.trouble())

    def _judge_placement(self, *, placed: bool) -> None:
        """Give up on a job of which Nomad has placed nothing for a while; take it back when it does."""
        if placed or not self._placement:
            if self._unplaced_since is not None and isinstance(self._failure, BackendUnavailable):
                self._failure = None
            self._unplaced_since = None
            return
        now = time.monotonic()
        self._unplaced_since = self._unplaced_since or now
        if now >= self._unplaced_since + self._placement_s and self._failure is None:
            self._failure = BackendUnavailable(self._placement)
            self._changed.set()

    async def _diagnose(self, item: Allocation, *, alone: bool) -> None:
        """Say why a container doesn't come up, with its server's own last words; `alone`: no other one may still."""
        cure = set_up_fault(item.detail)
        if item.run not in self._told:
            words = await self._api.last_words(item.id, TASK) if item.exit_code is not None else ""
            self._crash = f"container {item.index} on {item.node}: {item.detail}" + "".join(
                f"{mark}{text}" for mark, text in ((": ", words), ("; ", cure)) if text
            )
            if item.exit_code is None and not item.detail.startswith(DRIVER):
                return  # it may still come up: a template that waits for its variable, say
            self._told.add(item.run)
            self._failures += 1
        if alone and (cure or item.unrecoverable):
            self._failure = ConfigError(self._crash)
        elif alone or item.exit_code == BAD_CONFIG:
            self._failure = hopeless(item.exit_code, self._crash, self._failures)

    # ------------------------------------------------------------------------------------------------------------ purge

    async def _purge(self) -> None:
        """Remove the job and its secret, unless a live client works in one of its containers."""
        token = self._token or await self._api.token(self._job_id)
        rows = newest(Allocation.read(row) for row in await self._api.allocations(self._job_id))
        servers = [item.url for item in rows if item.url is not None]
        if any(await asyncio.gather(*(self._http.used_by_others(url, token, self.client_id) for url in servers))):
            log.warning("job %s is in use by another client: not purged", self._job_id)
            return
        # Stopped first and forgotten after: once purged, Nomad lists none of its containers, though some still end.
        await self._api.deregister(self._job_id, purge=False)
        # Leases that are left are this pool's own, or dead clients'.
        await asyncio.gather(*(self._http.drain(url, token, 0) for url in servers))
        try:
            async with asyncio.timeout(self._spec.stop_s):
                index = 0
                while await self._stopped() and newest(
                    Allocation.read(row) for row in await self._api.allocations(self._job_id)
                ):
                    index = await self._api.next_change(self._job_id, index)
        except TimeoutError:
            log.warning("job %s is purged while some of its containers still end", self._job_id)
        if not await self._stopped():
            log.info("job %s was registered anew by another client: not purged", self._job_id)
            return
        await self._api.deregister(self._job_id, purge=True)
        if await self._api.job(self._job_id) is None:
            await self._api.drop_token(self._job_id)

    async def _stopped(self) -> bool:
        """Whether the job is stopped or gone: nobody has registered it anew."""
        job = await self._api.job(self._job_id)
        return job is None or bool(job.get("Stop"))


def _count(job: Json) -> int:
    return int(nomad_job.group_of(job)["Count"])
