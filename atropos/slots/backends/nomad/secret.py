"""The secret that all clients of a job share: the token and the certificate of its servers."""

from __future__ import annotations

from atropos.slots.backends.nomad.api import NomadApi
from atropos.slots.backends.nomad.job_view import JobView
from atropos.slots.backends.server_http import ServerHttp


async def read_secret(api: NomadApi, http: ServerHttp, view: JobView, pair: tuple[str, str] | None = None) -> None:
    """Read it, or make it with this certificate and key, for requests to the job's servers.

    Raises:
        ConfigError: the job has another certificate than `pair`.
    """
    view.secret = await api.secret(pair=pair)
    http.trust(view.secret.certificate)
