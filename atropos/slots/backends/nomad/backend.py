"""Containers as allocations of one Nomad job, which any number of processes may share.

The job's `count` is the only shared state: growing is `scale`; shrinking drains the highest index, then lowers the
count if the job is unchanged. Nomad replaces allocations that end. Requests follow changes (by its event stream, or a
blocking query), never calls or leases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from atropos.aio import Backoff, Tasks
from atropos.errors import BackendUnavailable, ConfigError
from atropos.net.tls import read_pair
from atropos.slots.backends.base import Backend
from atropos.slots.backends.container import Container
from atropos.slots.backends.engines import ChangeFlag, Outage, Pace, persist
from atropos.slots.backends.nomad import job as nomad_job
from atropos.slots.backends.nomad.access import NomadAccess
from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.growing import Grower
from atropos.slots.backends.nomad.job_view import READY_S, JobView
from atropos.slots.backends.nomad.purging import purge_job
from atropos.slots.backends.nomad.refusals import JobStopped, NomadMisconfigured, NomadRefused
from atropos.slots.backends.nomad.secret import read_secret
from atropos.slots.backends.nomad.settings import NomadSettings
from atropos.slots.backends.nomad.shrinking import DOUBT_S, Shrinker
from atropos.slots.backends.nomad.survey import open_nomad
from atropos.slots.backends.nomad.view import Allocation, Json, placement_failures
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.spec import ContainerSpec
from atropos.slots.backends.survey import Survey
from atropos.slots.config import SlotPoolConfig

log = logging.getLogger("atropos.slots.nomad")

POLL_S = 60.0
"""How often allocations are listed when no change is reported, in seconds."""
LIST_S, LIST_BURST, LIST_SHARE, LONGEST_LIST_S = 1.0, 10, 4.0, 10.0
"""Under constant change, the least time between lists after a burst, in seconds; that time in durations of a list,
where it is longer; and its bound. A job of 10,000 containers changes all the time, and Nomad's servers have other
clients."""
STOP_S, STOP_BURST = 0.2, 20
"""Time between stops of unreachable containers after a burst, in seconds. When nodes vanish, thousands are unreachable
seconds before Nomad gives them up; those need no stop."""
FIRST_ANSWERS = 100
"""Most servers whose first answer is awaited at once: with thousands, requests time out."""
LASTED_S = 5.0
"""The end of an event stream or blocking query that lasted this long resets the back-off, in seconds."""
PURGE_RETRY_S, PURGE_UNANSWERED_S, PURGE_AWAY_S = 20.0, 8.0, 2.0
"""How long a purge is retried, in seconds, before the job is left and logged: while Nomad answers with errors, while it
doesn't answer, and where it hadn't answered for a while before."""
OTHERWISE = "for other settings, give this pool another sandbox_job_id, or purge the job first (docs/cluster.md)"
"""What to do where a job isn't as the pool would have it."""


class NomadBackend(Backend):
    """Keeps one job at the requested size, and lists its allocations."""

    name = "nomad"

    @classmethod
    async def survey(cls, job_id: str, address: str | None) -> Survey:
        """The containers of `job_id`."""
        return await open_nomad(job_id, address)

    def __init__(self, config: SlotPoolConfig) -> None:
        settings = config.of(NomadSettings)
        self._access = access = NomadAccess.from_environment(settings.nomad_address)
        self._spec = ContainerSpec.from_pool(config.model_copy(update={"unattended_s": None}))  # Nomad would restart it
        if config.allow_network and not access.local:  # Nomad's API may have a public address
            deny = (*self._spec.server.egress_deny, access.host)
            server = self._spec.server.model_copy(update={"egress_deny": deny})
            self._spec = replace(self._spec, server=server)
        self._pair = read_pair(settings.tls_certificate, settings.tls_key)
        self._job_id = config.job_id
        if "." in self._job_id:  # Nomad takes none in a variable's path
            raise ConfigError(f"sandbox_job_id {self._job_id!r} must be letters, digits, '_' and '-', at most 100")
        self._purge_on_start = config.purge_job_on_start
        self._api = NomadApi(access, self._job_id)
        self._http = ServerHttp()
        self._view = JobView(settings.placement_s)
        self._waiting: set[str] = set()
        """Runs whose first answer is awaited."""
        self._first_answers = asyncio.Semaphore(FIRST_ANSWERS)
        self._outage = Outage(config.outage_s)
        self._changed = ChangeFlag()
        self._wake = ChangeFlag()
        self._grower = Grower(
            self._api,
            self._http,
            self._view,
            self._changed,
            spec=self._spec,
            pair=self._pair,
            extra=settings.nomad_variables,
        )
        self._shrinker = Shrinker(self._api, self._http, self._view, self._changed)
        self._lists, self._stops = Pace(LIST_S, burst=LIST_BURST), Pace(STOP_S, burst=STOP_BURST)
        self._streams = True
        """Whether Nomad reports changes by its event stream."""
        self._tasks = Tasks(f"nomad backend {self._job_id}")
        self._main: asyncio.Task[None] | None = None
        """Follows the job."""

    def __repr__(self) -> str:
        states = [c.state for c in self.containers()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("running", "starting", "ending"))
        return f"<NomadBackend {self._job_id} at {self._access.shown}: {counts}; {self.trouble() or 'no trouble'}>"

    # ------------------------------------------------------------------------------------------------------ contract

    async def start(self) -> None:
        """Find the job, if there is one, and adopt its allocations."""
        try:
            await self._adopt()
        except NomadMisconfigured as error:
            raise ConfigError(str(error)) from error
        # Last: what fails above leaves no task behind.
        self._tasks.spawn(self._watch(), "changes")
        self._tasks.spawn(self._shrinker.run(self.client_id), "shrinking")
        self._main = self._tasks.spawn(self._follow(), "allocations")

    async def _adopt(self) -> None:
        await self._api.find_namespace()
        job = await self._api.job()
        if job is not None:
            # Also a stopped one: it may have another purpose, and would be taken over by registering this one.
            nomad_job.group_of(job)
        if job is not None and self._purge_on_start:
            await self._purge()
            job = await self._api.job()
        if job is not None and not job.get("Stop"):
            self._view.adopt(nomad_job.count(job))
            if differences := nomad_job.differences(job, self._spec):
                self._view.differences = differences
                log.warning("job %s exists and is taken as it is: %s; %s", self._job_id, differences, OTHERWISE)
            # Before the list, which makes addresses with http or https by it.
            await read_secret(self._api, self._http, self._view, self._pair)
            self._grower.cluster = await self._api.keys()
            await self._refresh()

    async def scale(self, count: int) -> None:
        """Raise the job's count now, or lower it as the highest containers become idle."""
        if self._main is None or self._main.done():
            raise BackendUnavailable("the Nomad backend is not running")
        self._view.ask(count)
        await self._grower.grow()
        self._shrinker.requested.set()
        if not self._streams:  # a job whose allocations can't be placed reports no change
            self._wake.set()

    def containers(self) -> Sequence[Container]:
        """The job's live allocations, by index."""
        return self._view.containers()

    async def changed(self) -> None:
        """Wait until `containers()` may have changed."""
        await self._changed.wait()

    def trouble(self) -> str:
        """Nomad doesn't answer, can't place allocations, or they don't start."""
        return "; ".join(text for text in (self._outage.reason, self._view.trouble()) if text)

    def outage(self) -> str:
        """Why Nomad doesn't answer; empty while it does."""
        return self._outage.reason

    def failure(self) -> Exception | None:
        """Nomad stayed away; or no server ever started, because of the set-up or for want of room."""
        return self._outage.failure() or (None if self._view.ever_ready else self._view.failure)

    async def retire(self, container: Container) -> None:
        """Stop an allocation, which Nomad replaces, unless it was restarted meanwhile.

        The pool retries while Nomad doesn't answer, and keeps a server that works by then, since others may use it.
        """
        item = self._view.known.get(container.id)
        if item is not None and item.run not in self._view.ending:
            # Before the first await, so that two calls stop it once.
            self._view.ending.add(item.run)
            self._changed.set()
            await self._stops.turn()
            # The turn may have taken a while, in which Nomad itself replaced it.
            now = self._view.known.get(item.run)
            if now is None or now.state in {"ending", "lost"}:
                return
            try:
                await self._api.stop_allocation(item.id)
            except BackendUnavailable:
                self._view.ending.discard(item.run)
                self._changed.set()
                raise

    async def aclose(self, *, purge: bool) -> None:
        """Stop watching; with `purge`, remove job and secret unless another live client uses it.

        What can't be removed because Nomad doesn't answer is logged, after seconds.
        """
        await self._tasks.cancel()
        # Creations that were sent must have ended, or the purge would come before what it is to remove.
        unanswered_s = PURGE_AWAY_S if self._outage.away_s > PURGE_UNANSWERED_S else PURGE_UNANSWERED_S
        await self._api.settled(unanswered_s)
        try:
            # Else this process has neither found nor made a job.
            if purge and (self._view.secret.token or self._grower.tried):
                await persist(
                    self._purge, lambda error: PURGE_RETRY_S if isinstance(error, NomadRefused) else unanswered_s
                )
            if purge and self._grower.left_behind:
                log.error("job %s may be left in the cluster that was at %s before", self._job_id, self._access.shown)
        except BackendUnavailable as error:
            log.error(  # noqa: TRY400 (the message is enough)
                "job %s and its variable nomad/jobs/%s may be left: %s; "
                "`atropos pool purge --job-id %s --address %s` removes them",
                self._job_id, self._job_id, error, self._job_id, self._access.shown,
            )  # fmt: skip
        finally:
            await self._http.close()
            await self._api.close()
            self._view.known.clear()

    async def _purge(self) -> None:
        await purge_job(self._api, self._http, self._view, self.client_id, self._spec.stop_s)

    # --------------------------------------------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        """Wake `_follow` at each change that Nomad reports, by its event stream or else by blocking queries."""
        backoff, index = Backoff(first_s=0.2, longest_s=5), 0
        while True:
            began = time.monotonic()
            try:
                if self._streams:
                    async for _ in self._api.events():
                        self._wake.set()
                else:
                    last, index = index, await self._api.next_change(index)
                    if index != last:
                        backoff.worked()
                        self._wake.set()
                        continue
            except NomadRefused as error:
                # A refusal for good, as of an agent without an event broker; 429 and 5xx may pass.
                if self._streams and error.status < 500 and error.status != 429:
                    log.info("no event stream, using blocking queries: %s", error)
                    self._streams = False
                    continue
                index = 0
            except BackendUnavailable as error:
                log.debug("no changes are reported: %s", error)  # the next list shows whether Nomad answers
                index = 0
            if time.monotonic() > began + LASTED_S:
                backoff.worked()
            await asyncio.sleep(backoff.failed())
            self._wake.set()

    async def _follow(self) -> None:
        """List the allocations when something may have changed, until cancelled."""
        view, backoff = self._view, Backoff(first_s=0.2, longest_s=5)
        pause = POLL_S
        while True:
            await self._wake.wait(pause)
            # After the wake: all changes of the time until the turn are in one list.
            await self._lists.turn()
            began = time.monotonic()
            try:
                # Without a stream nothing reports that a container still can't be placed: ask again soon.
                sure = await self._refresh() and (self._streams or len(view.known) >= view.target)
                # After the list: a job that is gone by now is seen together with its last allocations.
                await self._notice(await self._api.job())
                pause = POLL_S if sure else DOUBT_S
                if view.unplaced_since is not None and not view.ever_ready and view.failure is None:
                    # Nothing will be reported while nothing can be placed, and `placement_s` has to run out on time.
                    pause = min(pause, max(0.1, view.unplaced_since + view.placement_s - time.monotonic()))
                self._lists.every_s = min(LONGEST_LIST_S, max(LIST_S, LIST_SHARE * (time.monotonic() - began)))
                backoff.worked()
                if self._outage.over():
                    self._changed.set()
                    self._shrinker.requested.set()
                    self._grower.cluster |= await self._api.keys() if self._view.known else frozenset()
            except BackendUnavailable as error:
                stopped = f"job {self._job_id} runs" if isinstance(error, JobStopped) else "the engine answers"
                self._outage.noted(error, until=stopped)
                self._changed.set()
                await asyncio.sleep(backoff.failed())
                self._wake.set()

    async def _notice(self, job: Json | None) -> None:
        """Log what another hand has changed in the job, and do what follows.

        Raises:
            JobStopped: it was stopped, and not by a purge that goes on to remove it.
        """
        view = self._view
        if job is None:
            if view.target and not view.known:
                await self._grower.grow()  # another process may have purged the job just after this one registered it
            return
        if job.get("Stop"):
            if not view.live:
                return
            raise JobStopped(
                f"job {self._job_id} was stopped by another hand and stays stopped: `nomad job start {self._job_id}` "
                "lets it go on, and `atropos pool purge` removes it, after which a pool that still runs registers it "
                "anew"
            )
        view.live = True
        if self._grower.note_count(job):
            await self._grower.grow()
        differences = nomad_job.differences(job, self._spec)
        if differences != view.differences:
            view.differences = differences
            log.warning(
                "job %s was changed by another hand, and new containers follow it: %s",
                self._job_id,
                f"{differences}; `nomad job revert` undoes it; {OTHERWISE}"
                if differences
                else "it is as this pool has it",
            )

    async def _refresh(self) -> bool:
        """List the allocations; False when the list contradicts servers that answer, which are then kept."""
        view = self._view
        rows = view.read(await self._api.allocations())
        # A server of Nomad that lost its leader or its state may list nothing while all containers run.
        answering = await self._answering(view.doubtful(rows))
        now = view.merge(rows, answering)
        if view.needs_token(now):
            await read_secret(self._api, self._http, self._view, self._pair)
        trouble, failure = self.trouble(), view.failure
        if view.apply(rows, now):
            self._changed.set()
        for run, url in view.unanswered().items():
            if run not in self._waiting:
                self._waiting.add(run)
                self._tasks.spawn(self._await_answer(run, url), f"first answer of {run}")
        placement = placement_failures(await self._api.evaluations()) if view.lacking else ""
        # `view` has no clock and makes no requests, so that tests can give it both.
        view.judge_placement(placement, time.monotonic())
        if (item := view.latest_failing()) is not None:
            # The log is read once for each run: from the client's node, which may be slow.
            new = item.run not in view.diagnosed and item.exit_code is not None
            view.judge_crash(item, await self._api.last_line(item.id) if new else "")
        if self.trouble() not in {trouble, ""}:
            log.warning("job %s: %s", self._job_id, self.trouble())
        if self.trouble() != trouble or view.failure is not failure:
            self._changed.set()
        return all(item.state == "lost" for item in answering)

    async def _answering(self, doubtful: Iterable[Allocation]) -> list[Allocation]:
        """Those of the allocations whose servers answer."""
        asked = [item for item in doubtful if item.url is not None]
        answers = await asyncio.gather(*(self._http.healthy(item.url or "") for item in asked))
        return [item for item, healthy in zip(asked, answers, strict=True) if healthy]

    async def _await_answer(self, run: str, url: str) -> None:
        """Await the first answer of a running server."""
        started = 0.0
        try:
            while run in self._view.known:
                async with self._first_answers:
                    # From its first turn on: a queue of thousands says nothing of this server.
                    started = started or time.monotonic()
                    answers = await self._http.until_healthy(url, within_s=1.0)
                if answers:
                    self._view.answered(run)
                    self._changed.set()
                    return
                if time.monotonic() > started + READY_S:
                    self._view.silent(url)
                    self._changed.set()
        finally:
            self._waiting.discard(run)
