"""Requests to Nomad: by python-nomad in threads, and by aiohttp where they wait for changes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar, cast

import aiohttp
import nomad
import requests
import urllib3
from nomad.api import exceptions
from requests.adapters import HTTPAdapter

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.engines import BlockingCalls
from atropos.slots.backends.nomad.access import NomadAccess
from atropos.slots.backends.nomad.refusals import (
    NomadRefused,
    denied,
    from_proxy,
    missing_namespace,
    refused,
    unreachable,
)
from atropos.slots.backends.nomad.view import GROUP, TASK, JobSecret, Json

log = logging.getLogger("atropos.slots.nomad")
T = TypeVar("T")
ANSWER_S = 15
"""How long Nomad may take to answer, in seconds; without a leader it takes 5 s."""
SILENCE_S = 15.0
"""Time without a byte after which an event stream is dead, in seconds; it has a heartbeat every 10 s."""
BLOCK_S = 60
"""How long a blocking query waits for a change, in seconds."""
LOG_LAGS_S = (0.0, 0.3, 1.0)
"""Pauses before an ended server's log is read: what writes it is another process, which may be later than the end."""
DENIED, NOT_FOUND, HTTP_ERROR = frozenset({401, 403}), 404, 500


class _TlsAdapter(HTTPAdapter):
    """Makes requests use our TLS settings, the expected server name included."""

    def __init__(self, access: NomadAccess) -> None:
        self._access = access
        # As many as `BlockingCalls` runs at once.
        super().__init__(pool_maxsize=4)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        kwargs["ssl_context"] = self._access.tls()
        if self._access.tls_server_name:
            kwargs["server_hostname"] = self._access.tls_server_name  # OpenSSL checks it
        super().init_poolmanager(*args, **kwargs)


class NomadApi:
    """Requests about one job, one or two in each method."""

    def __init__(self, access: NomadAccess, job_id: str) -> None:
        self.access = access
        self.job_id = job_id
        self._secret_path = f"nomad/jobs/{job_id}"
        session = requests.Session()
        # requests would also take credentials from ~/.netrc.
        session.trust_env = False  # proxy variables are for the internet, not for the cluster
        if access.tls() is not None:
            session.mount("https://", _TlsAdapter(access))
            if access.skip_verify:
                log.warning("NOMAD_SKIP_VERIFY: the certificate of %s is not checked", access.shown)
                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # otherwise each request warns
        verify = False if access.skip_verify else (access.cacert or access.capath or True)
        cert = (access.client_cert, access.client_key) if access.client_cert else ()
        self._nomad: Any = cast("Any", nomad).Nomad(
            address=access.address,
            token=access.token,
            namespace=access.namespace,
            region=access.region,
            timeout=ANSWER_S,
            verify=verify,
            cert=cert,
            session=session,
        )
        self._calls = BlockingCalls("nomad", at_once=4)
        # A request may wait for its turn as long as another one takes.
        self._answer_s = 2.0 * ANSWER_S
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def settled(self, answer_s: float) -> None:
        """Wait for requests whose callers were cancelled, so that their effects can be undone.

        Called at the end, which a Nomad that hangs must not delay: from now on a request may take `answer_s`. Nomad
        needs more than 5 s to answer without a leader.
        """
        self._answer_s = answer_s
        await self._calls.settled(answer_s)

    async def _ask(self, what: str, call: Callable[[], T], *, kind: type | None = None, changes: bool = False) -> T:
        """Run one blocking request off the loop.

        Args:
            what: the request in words, for an error.
            call: the request.
            kind: the type of a valid answer; a proxy in front of an unreachable Nomad gives others.
            changes: it has effects, also when the caller is cancelled; see `settled`.

        Raises:
            NomadRefused: Nomad answered with an error; the message has its reason.
            BackendUnavailable: Nomad can't be reached.
        """
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await self._calls.run(call, changes=changes)
        except TimeoutError as error:
            raise unreachable(self.access, f"no answer within {self._answer_s:g} s") from error
        except exceptions.BaseNomadException as error:
            response = cast("object", error.nomad_resp)
            if not isinstance(response, requests.Response):
                raise unreachable(self.access, response) from error
            reason = response.text.strip()[:1000] or response.reason
            # Nomad says "Permission denied" whatever is missing; who the token is makes the cure clear.
            if response.status_code in DENIED and not from_proxy(response.status_code, reason):
                known = await self._whoami()
                raise denied(self.access, what, response.status_code, known) from error
            raise refused(self.access, what, response.status_code, reason) from error
        except (requests.RequestException, ValueError) as error:
            raise self._invalid(what, error) from error
        if kind is not None and not isinstance(answer, kind):
            raise self._invalid(what, str(answer)[:200])
        return answer

    def _invalid(self, what: str, answer: object) -> BackendUnavailable:
        return BackendUnavailable(
            f"Nomad at {self.access.shown} sent an invalid answer to a request to {what}: {answer}"
        )

    async def _whoami(self) -> str | None:
        """The token's name and policies, as far as Nomad shows them; None: Nomad knows no such token."""
        try:
            async with self._get("/v1/acl/token/self", [], timeout=aiohttp.ClientTimeout(total=5)) as answer:
                # Older releases answer 500 for an unknown token.
                if answer.status in DENIED or (answer.status == HTTP_ERROR and "token" in await answer.text()):
                    return None
                body: Json = await answer.json() if answer.ok else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            body = {}
        policies = ", ".join(body.get("Policies") or []) or "none"
        return f"the token {body['Name']!r} (policies: {policies})" if body.get("Name") else "the token"

    # ------------------------------------------------------------------------------------------------------------ jobs

    async def find_namespace(self) -> None:
        """Check that the namespace exists, which Nomad itself checks only when a job is registered.

        Raises:
            NomadMisconfigured: it doesn't, or the token has no rights in it.
        """
        name = self.access.namespace
        try:
            await self._ask("find the namespace", lambda: self._nomad.namespace.get_namespace(name))
        except NomadRefused as error:
            if error.status == NOT_FOUND:
                raise missing_namespace(self.access, error.status) from error
            raise

    async def keys(self) -> frozenset[str]:
        """The ids of the cluster's signing keys, which identify it; empty where they are not published."""
        try:
            async with self._get("/.well-known/jwks.json", [], timeout=aiohttp.ClientTimeout(total=5)) as answer:
                body: Json = await answer.json() if answer.ok else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            body = {}
        return frozenset(str(key.get("kid")) for key in body.get("keys") or [])

    async def parse(self, hcl: str, variables: dict[str, str]) -> Json:
        """Parse a job definition with these variables by the agent's parser.

        Raises:
            ConfigError: the definition or a variable is wrong; the message is the parser's.
        """
        lines = "\n".join(f"{name} = {value}" for name, value in variables.items())
        # By the agent, as only Nomad itself has a parser of its HCL.
        body = {"JobHCL": hcl, "Variables": lines, "Canonicalize": True}
        try:
            return await self._ask(
                "parse the job", lambda: self._nomad.jobs.request("parse", json=body, method="post").json(), kind=dict
            )
        except NomadRefused as error:
            if error.status == HTTPStatus.BAD_REQUEST:
                raise ConfigError(f"nomad_variables, or nomad/sandbox.nomad.hcl itself: {error}") from error
            raise

    async def job(self) -> Json | None:
        """The registered job, or a stopped one (`Stop`); None when Nomad has none."""
        return await _unless_gone(self._ask("read the job", lambda: self._nomad.job.get_job(self.job_id), kind=dict))

    async def live_job(self) -> Json | None:
        """The registered job; None when Nomad has none, or it is stopped."""
        job = await self.job()
        return None if job is None or job.get("Stop") else job

    async def register(self, job: Json, *, modify_index: int) -> bool:
        """Register a job if it is unchanged since `modify_index` (0: if there is none); False: it has changed."""
        # Check-and-set: of two processes that register at once, one is refused and reads what the other wrote.
        body = {"Job": job, "EnforceIndex": True, "JobModifyIndex": modify_index}
        try:
            await self._ask(
                "register the job", lambda: self._nomad.jobs.request(json=body, method="post").json(), changes=True
            )
        except NomadRefused as error:
            # Nomad answers 500 with this text; there is no status of its own for it.
            if "Enforcing job modify index" in str(error):
                return False
            raise
        return True

    async def scale(self, count: int) -> None:
        """Set the number of containers."""
        body = {"Count": count, "Target": {"Group": GROUP}, "Message": "requested by a slot pool"}
        request = self._nomad.job.request
        await self._ask("scale the job", lambda: request(self.job_id, "scale", json=body, method="post"), changes=True)

    async def deregister(self, *, purge: bool) -> None:
        """Stop the job, if there is one; with `purge`, remove it."""
        stop = self._nomad.job.deregister_job
        await _unless_gone(self._ask("stop the job", lambda: stop(self.job_id, purge=purge), changes=True))

    # ----------------------------------------------------------------------------------------------------- allocations

    async def allocations(self) -> list[Json]:
        """All allocations of the job that Nomad lists, with addresses and task states."""
        # /v1/job/ID/allocations has no addresses of ports, so all allocations are asked, filtered by the server.
        params = {"resources": "true", "task_states": "true", "filter": f'JobID == "{self.job_id}"'}
        return await self._ask(
            "list allocations", lambda: self._nomad.allocations.request(method="get", params=params).json(), kind=list
        )

    async def stop_allocation(self, allocation_id: str) -> None:
        """Stop one allocation, if it is still there; Nomad replaces it."""
        stop = self._nomad.allocation.stop_allocation
        await _unless_gone(self._ask("stop an allocation", lambda: stop(allocation_id), changes=True))

    async def evaluations(self) -> list[Json]:
        """The scheduler's decisions about the job, failed ones with their reasons."""
        return await self._ask("read evaluations", lambda: self._nomad.job.get_evaluations(self.job_id), kind=list)

    async def last_line(self, allocation_id: str) -> str:
        """The last line of an ended server's log; empty where that can't be read."""
        # `offset` counts back from the end: the last 2,000 bytes.
        params = [("task", TASK), ("type", "stderr"), ("plain", "true"), ("origin", "end"), ("offset", "2000")]
        timeout = aiohttp.ClientTimeout(total=5)
        for pause_s in LOG_LAGS_S:
            await asyncio.sleep(pause_s)
            try:
                async with self._get(f"/v1/client/fs/logs/{allocation_id}", params, timeout=timeout) as answer:
                    text = await answer.text(errors="replace") if answer.ok else ""
            except (aiohttp.ClientError, TimeoutError, OSError):
                return ""
            if lines := [line for line in text.splitlines() if line.strip()]:
                return lines[-1][:500]
        return ""

    # ---------------------------------------------------------------------------------------------------------- secret

    async def secret(self, *, make: bool = True, pair: tuple[str, str] | None = None) -> JobSecret:
        """The job's secret, which all its clients share (check-and-set); it is created if needed.

        With `make` False nothing is written, and a missing secret is empty. `pair`: certificate and key of a new one.

        Raises:
            ConfigError: the job has a token, and no certificate or another one than `pair`.
        """
        # Another process may create the secret in the same moment; then its token is read in the next round.
        for _ in range(3):
            items, index = await self._read_variable()
            if items.get("token"):
                if pair is not None and items.get("certificate", "").strip() != pair[0].strip():
                    raise ConfigError(
                        f"tls_certificate: job {self.job_id} runs with another certificate, or without TLS: purge it "
                        "first (atropos pool purge), or name the files that it was started with"
                    )
                return JobSecret(items["token"], items.get("certificate") or None)
            if not make:
                return JobSecret()
            # Beside what is there: a person may keep other items in the job's variable.
            items |= {"token": secrets.token_hex(32)}
            if pair is not None:
                items |= {"certificate": pair[0], "key": pair[1]}
            await self._write_variable(items, index)
        raise BackendUnavailable(f"the Nomad variable {self._secret_path} keeps changing")

    async def _read_variable(self) -> tuple[dict[str, str], int]:
        """What the variable holds, and the index that it has now; 0: there is none."""
        read, namespace = self._nomad.variable.get_variable, self.access.namespace
        asking = self._ask("read the variable", lambda: read(self._secret_path, namespace), kind=dict)
        variable: Json | None = await _unless_gone(asking)
        return (variable["Items"], variable["ModifyIndex"]) if variable is not None else ({}, 0)

    async def _write_variable(self, items: dict[str, str], index: int) -> None:
        """Write the variable, unless its index is another one by now."""
        write, path, namespace = self._nomad.variable.create_variable, self._secret_path, self.access.namespace
        payload = {"Path": path, "Items": items}
        try:
            await self._ask("write the variable", lambda: write(path, payload, namespace, cas=index), changes=True)
        except NomadRefused as error:
            # 409: the index has changed, and the caller reads again.
            if error.status != HTTPStatus.CONFLICT:
                raise

    async def drop_secret(self) -> None:
        """Delete the job's secret."""
        delete, namespace = self._nomad.variable.delete_variable, self.access.namespace
        await self._ask("delete the variable", lambda: delete(self._secret_path, namespace), changes=True)

    # --------------------------------------------------------------------------------------------------------- watching

    def _get(self, path: str, params: list[tuple[str, str]], **options: Any) -> Any:
        if self._session is None:
            headers = {"X-Nomad-Token": self.access.token} if self.access.token else {}
            # No total: an event stream has no end.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        params = [*params, ("namespace", self.access.namespace)]
        if self.access.region:
            params.append(("region", self.access.region))
        tls = self.access.tls()
        return self._session.get(
            f"{self.access.address}{path}",
            params=params,
            ssl=tls if tls is not None else True,
            server_hostname=self.access.tls_server_name,
            **options,
        )

    async def _check(self, what: str, answer: aiohttp.ClientResponse) -> None:
        """Raise why Nomad, or a proxy in any encoding, refused what was asked, if it did."""
        if not answer.ok:
            why = await answer.text(errors="replace")
            raise refused(self.access, what, answer.status, why[:300])

    async def events(self) -> AsyncGenerator[None]:
        """Yield when the stream is open, then at least once for each change of the job; never ends by itself.

        Raises:
            NomadRefused: Nomad has no event stream, or refuses the token, or the stream stays empty
                (enable_event_broker).
            BackendUnavailable: the stream broke.
        """
        # Evaluations, too: a container that can't be placed changes no allocation.
        params = [("topic", f"{topic}:{self.job_id}") for topic in ("Job", "Allocation", "Evaluation")]
        silent = False
        try:
            async with self._get("/v1/event/stream", params) as answer:
                await self._check("open its event stream", answer)
                silent = True
                yield
                async for chunk in answer.content.iter_any():
                    silent = False
                    # What changed is not read from the event, as a stream may skip events: it only says when to list.
                    if chunk.strip(b"{}\r\n"):  # more than heartbeats
                        yield
        except TimeoutError as error:
            text = f"Nomad's event stream at {self.access.shown} sent nothing for {SILENCE_S:g} s"
            if silent:
                text = f"{text} since it was opened (enable_event_broker?)"
                raise NomadRefused(text, NOT_FOUND) from error
            raise BackendUnavailable(text) from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"Nomad's event stream at {self.access.shown} broke: {error}") from error
        raise BackendUnavailable(f"Nomad's event stream at {self.access.shown} ended")

    async def next_change(self, index: int) -> int:
        """Wait until the job's allocations differ from those at `index` (0: don't wait); returns the new index.

        Raises:
            NomadRefused: Nomad answered with an error.
            BackendUnavailable: it can't be reached.
        """
        params = [("index", str(index)), ("wait", f"{BLOCK_S}s")]
        # Nomad adds up to a sixteenth of the wait, so that not all clients come back at once.
        timeout = aiohttp.ClientTimeout(total=BLOCK_S * 1.2 + ANSWER_S)
        try:
            async with self._get(f"/v1/job/{self.job_id}/allocations", params, timeout=timeout) as answer:
                await self._check("list allocations", answer)
                new = int(answer.headers["X-Nomad-Index"])
                await answer.read()  # fails if the stream breaks off
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError) as error:
            raise BackendUnavailable(f"Nomad does not answer at {self.access.shown}: {error}") from error
        # An index that goes back: the cluster was restored or is another one, so the next query must not wait (Nomad,
        # blocking queries).
        return new if new >= index else 0


async def _unless_gone(asking: Awaitable[T]) -> T | None:
    """The answer to a request; None: Nomad doesn't know its subject."""
    try:
        return await asking
    except NomadRefused as error:
        if error.status != NOT_FOUND:
            raise
    return None
