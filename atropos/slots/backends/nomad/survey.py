"""An operator's view of a pool's allocations in Nomad."""

from __future__ import annotations

from atropos.slots.backends.container import Container
from atropos.slots.backends.nomad.access import NomadAccess
from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.job import count, group_of
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.nomad.view import Allocation, placement_failures
from atropos.slots.backends.survey import Survey


async def open_nomad(job_id: str, address: str | None) -> Survey:
    """See `Backend.survey`."""
    api = NomadApi(NomadAccess.from_environment(address), job_id)
    try:
        await api.find_namespace()  # in a missing namespace no job is listed, and a purge would seem to succeed
    except BaseException:
        await api.close()
        raise

    async def containers() -> tuple[list[Container], str]:
        if (job := await api.job()) is None:
            return [], ""
        secret = await api.secret(make=False)
        tls = secret.certificate is not None
        rows = [Allocation.read(row, tls=tls) for row in await api.allocations()]
        answering = {row.run for row in rows if row.state != "starting"}
        view = JobView(placement_s=0, secret=secret, target=count(job), ready=answering)
        view.apply(rows, view.merge(rows, ()))
        if view.lacking:
            view.placement = placement_failures(await api.evaluations())
        if (item := view.latest_failing()) is not None:
            view.judge_crash(item, await api.last_line(item.id))
        return view.containers(), view.trouble()

    async def end(container: Container) -> None:
        await api.stop_allocation(container.id.partition(".")[0])

    async def purge() -> None:
        if (job := await api.job()) is not None:
            group_of(job)
            await api.deregister(purge=False)
            await api.deregister(purge=True)
        await api.drop_secret()

    return Survey(containers, end, purge, api.close)
