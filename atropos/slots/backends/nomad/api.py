"""The one place that talks to Nomad: requests by python-nomad in threads, waiting for changes by aiohttp."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar, cast

import aiohttp
import nomad
import requests
import urllib3
from nomad.api import exceptions
from requests.adapters import HTTPAdapter

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.nomad.refusals import (
    NomadRefused,
    denied,
    missing_namespace,
    refused,
    unreachable,
)
from atropos.slots.backends.nomad.settings import NomadSettings
from atropos.slots.backends.nomad.view import JobSecret
from atropos.slots.backends.supervise import BlockingCalls

log = logging.getLogger("atropos.slots.nomad")
T = TypeVar("T")
Json = dict[str, Any]
ANSWER_S = 15
"""How long Nomad may take to answer, in seconds. Without a leader it holds a request for 5 s before it answers."""
SILENCE_S = 15.0
"""The event stream sends a heartbeat every 10 s; after this long without a byte it is dead, in seconds."""
BLOCK_S = 60
"""How long a blocking query waits for a change, in seconds."""
DENIED, NOT_FOUND, HTTP_ERROR = frozenset({401, 403}), 404, 500


class _TlsAdapter(HTTPAdapter):
    """Lets requests use our TLS settings, the expected server name among them."""

    def __init__(self, settings: NomadSettings) -> None:
        self._settings = settings
        super().__init__(pool_maxsize=4)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["ssl_context"] = self._settings.tls()
        if self._settings.tls_server_name:
            kwargs["server_hostname"] = self._settings.tls_server_name  # which OpenSSL itself then checks
        return super().init_poolmanager(*args, **kwargs)


class NomadApi:
    """What the backend asks of Nomad, each method one or two requests."""

    def __init__(self, settings: NomadSettings) -> None:
        self.settings = settings
        session = requests.Session()
        session.trust_env = False  # a proxy for the outside world is not the way to the cluster
        if settings.tls() is not None:
            session.mount("https://", _TlsAdapter(settings))
            if settings.skip_verify:
                log.warning("NOMAD_SKIP_VERIFY: nobody checks that %s is the cluster", settings.address)
                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # once is enough, not each request
        verify: Any = False if settings.skip_verify else (settings.cacert or settings.capath or True)
        cert: Any = (settings.client_cert, settings.client_key) if settings.client_cert else ()
        self._nomad: Any = cast("Any", nomad).Nomad(
            address=settings.address,
            token=settings.token,
            namespace=settings.namespace,
            region=settings.region,
            timeout=ANSWER_S,
            verify=verify,
            cert=cert,
            session=session,
        )
        self._calls = BlockingCalls("nomad", at_once=4)
        self._answer_s = 2.0 * ANSWER_S
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def settled(self, answer_s: float) -> None:
        """Until requests whose callers were cancelled are over: what they changed can be seen, and undone.

        The end has begun then: a Nomad that hangs must not hold it up, and no request is waited for longer than `answer_s`
        any more. Without a leader it takes more than 5 s to say so.
        """
        self._answer_s = answer_s
        await self._calls.settled(answer_s)

    async def _ask(self, what: str, call: Callable[[], T], *, kind: type | None = None, changes: bool = False) -> T:
        """Run one blocking request off the loop.

        Args:
            what: in a refusal's words.
            call: the request.
            kind: what its answer must be; anything else is nonsense, as proxies give it for a Nomad that is away.
            changes: it leaves something behind even when nobody waits for its answer any more; see `settled`.

        Raises:
            NomadRefused: Nomad said no; the message carries its words.
            BackendUnavailable: Nomad can't be reached.
        """
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await self._calls.run(call, changes=changes)
        except TimeoutError as error:
            raise unreachable(self.settings, f"no answer within {self._answer_s:g} s") from error
        except exceptions.BaseNomadException as error:
            response = cast("Any", error.nomad_resp)
            if not isinstance(response, requests.Response):
                raise unreachable(self.settings, response) from error
            if response.status_code in DENIED:
                known = await self._whoami()
                raise denied(self.settings, what, response.status_code, known) from error
            words = response.text.strip()[:1000] or response.reason
            raise refused(self.settings, what, response.status_code, words) from error
        except (requests.RequestException, ValueError) as error:
            raise self._nonsense(error) from error
        if kind is not None and not isinstance(answer, kind):
            raise self._nonsense(f"{str(answer)[:200]} where it was asked to {what}")
        return answer

    def _nonsense(self, what: object) -> BackendUnavailable:
        return BackendUnavailable(f"Nomad at {self.settings.address} answered nonsense: {what}")

    async def _whoami(self) -> str | None:
        """The token's name and policies, as far as Nomad tells them; None: Nomad knows no such token."""
        try:
            async with self._get("/v1/acl/token/self", [], timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status in DENIED or (answer.status == HTTP_ERROR and "token" in await answer.text()):
                    return None
                body: Json = await answer.json() if answer.ok else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            body = {}
        policies = ", ".join(body.get("Policies") or []) or "none"
        return f"the token {body['Name']!r} (policies: {policies})" if body.get("Name") else "the token"

    # ------------------------------------------------------------------------------------------------------------ jobs

    async def find_namespace(self) -> None:
        """Check that the namespace is there: Nomad itself says so only when a job is registered.

        Raises:
            NomadMisconfigured: it isn't, or the token may do nothing in it.
        """
        name = self.settings.namespace
        try:
            await self._ask("find the namespace", lambda: self._nomad.namespace.get_namespace(name))
        except NomadRefused as error:
            if error.status == NOT_FOUND:
                raise missing_namespace(self.settings, error.status) from error
            raise

    async def keys(self) -> frozenset[str]:
        """The ids of the cluster's own signing keys, by which two clusters differ; empty where they are not published."""
        try:
            async with self._get("/.well-known/jwks.json", [], timeout=aiohttp.ClientTimeout(total=5)) as answer:
                body: Json = await answer.json() if answer.ok else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            body = {}
        return frozenset(str(key.get("kid")) for key in body.get("keys") or [])

    async def parse(self, hcl: str, variables: dict[str, str]) -> Json:
        """The job that a definition gives with these variables, through the agent's own parser.

        Raises:
            ConfigError: the definition or a variable is wrong, in the parser's words.
        """
        lines = "\n".join(f"{name} = {value}" for name, value in variables.items())
        body = {"JobHCL": hcl, "Variables": lines, "Canonicalize": True}
        try:
            return await self._ask(
                "parse the job", lambda: self._nomad.jobs.request("parse", json=body, method="post").json(), kind=dict
            )
        except NomadRefused as error:
            if error.status == requests.codes.bad_request:
                raise ConfigError(f"nomad_variables, or nomad/sandbox.nomad.hcl itself: {error}") from error
            raise

    async def job(self, job_id: str) -> Json | None:
        """A job as it is registered, also one that is stopped (`Stop`); None when Nomad knows none."""
        try:
            return await self._ask("read the job", lambda: self._nomad.job.get_job(job_id), kind=dict)
        except NomadRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def register(self, job: Json, *, modify_index: int) -> bool:
        """Register a job if nobody changed it since `modify_index` (0: if it isn't there); False: somebody did."""
        body = {"Job": job, "EnforceIndex": True, "JobModifyIndex": modify_index}
        try:
            await self._ask(
                "register the job", lambda: self._nomad.jobs.request(json=body, method="post").json(), changes=True
            )
        except NomadRefused as error:
            if "Enforcing job modify index" in str(error):
                return False
            raise
        return True

    async def scale(self, job_id: str, group: str, count: int, message: str) -> None:
        """Set the number of allocations of a group."""
        body = {"Count": count, "Target": {"Group": group}, "Message": message}
        await self._ask(
            "scale the job", lambda: self._nomad.job.request(job_id, "scale", json=body, method="post"), changes=True
        )

    async def deregister(self, job_id: str, *, purge: bool) -> None:
        """Stop a job; with `purge`, forget it. One that is gone already is fine."""
        try:
            await self._ask("stop the job", lambda: self._nomad.job.deregister_job(job_id, purge=purge), changes=True)
        except NomadRefused as error:
            if error.status != NOT_FOUND:
                raise

    # ----------------------------------------------------------------------------------------------------- allocations

    async def allocations(self, job_id: str) -> list[Json]:
        """All allocations of a job that Nomad remembers, with addresses and task states."""
        params = {"resources": "true", "task_states": "true", "filter": f'JobID == "{job_id}"'}
        return await self._ask(
            "list allocations", lambda: self._nomad.allocations.request(method="get", params=params).json(), kind=list
        )

    async def stop_allocation(self, allocation_id: str) -> None:
        """Stop one allocation; Nomad makes another in its place. One that is gone already is fine."""
        try:
            await self._ask(
                "stop an allocation", lambda: self._nomad.allocation.stop_allocation(allocation_id), changes=True
            )
        except NomadRefused as error:
            if error.status != NOT_FOUND:
                raise

    async def evaluations(self, job_id: str) -> list[Json]:
        """The scheduler's decisions about a job, those that failed with their reasons."""
        return await self._ask("read evaluations", lambda: self._nomad.job.get_evaluations(job_id), kind=list)

    async def last_words(self, allocation_id: str, task: str) -> str:
        """The last line that a task printed on its stderr; empty where that can't be read."""
        params = [("task", task), ("type", "stderr"), ("plain", "true"), ("origin", "end"), ("offset", "2000")]
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with self._get(f"/v1/client/fs/logs/{allocation_id}", params, timeout=timeout) as answer:
                text = await answer.text(errors="replace") if answer.ok else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1][:500] if lines else ""

    # ---------------------------------------------------------------------------------------------------------- secret

    async def secret(self, job_id: str, *, make: bool = True, pair: tuple[str, str] | None = None) -> JobSecret:
        """What opens a job's servers, made when there is none; several clients agree on one (check-and-set).

        With `make` False nothing is written; empty then, when there is none. `pair`: the certificate and key of a new one.

        Raises:
            ConfigError: the job has a token already, and another certificate than the one of `pair`, or none.
        """
        path, namespace = f"nomad/jobs/{job_id}", self.settings.namespace
        for _ in range(3):
            try:
                found: Json = await self._ask(
                    "read the variable", lambda: self._nomad.variable.get_variable(path, namespace), kind=dict
                )
                items: dict[str, str] = found["Items"]
                if items.get("token"):
                    if pair is not None and items.get("certificate", "").strip() != pair[0].strip():
                        raise ConfigError(
                            f"tls_certificate: job {job_id} runs with another certificate, or without TLS: purge it first "
                            "(atropos pool purge), or name the files that it was started with"
                        )
                    return JobSecret(items["token"], items.get("certificate") or None)
                index = found["ModifyIndex"]
            except NomadRefused as error:
                if error.status != NOT_FOUND:
                    raise
                index, items = 0, {}
            if not make:
                return JobSecret()
            items |= {"token": secrets.token_hex(32)}
            if pair is not None:
                items |= {"certificate": pair[0], "key": pair[1]}
            payload = {"Path": path, "Items": items}
            try:
                await self._ask(
                    "write the variable",
                    lambda index=index, payload=payload: self._nomad.variable.create_variable(
                        path, payload, namespace, cas=index
                    ),
                    changes=True,
                )
            except NomadRefused as error:
                if error.status != requests.codes.conflict:
                    raise
        raise BackendUnavailable(f"the Nomad variable {path} keeps changing")

    async def drop_secret(self, job_id: str) -> None:
        """Forget what opens a job's servers."""
        path, namespace = f"nomad/jobs/{job_id}", self.settings.namespace
        await self._ask(
            "delete the variable", lambda: self._nomad.variable.delete_variable(path, namespace), changes=True
        )

    # --------------------------------------------------------------------------------------------------------- watching

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"X-Nomad-Token": self.settings.token} if self.settings.token else {}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        return self._session

    def _get(self, path: str, params: list[tuple[str, str]], **options: Any) -> Any:
        params = [*params, ("namespace", self.settings.namespace)]
        if self.settings.region:
            params.append(("region", self.settings.region))
        tls = self.settings.tls()
        return self._open().get(
            f"{self.settings.address}{path}",
            params=params,
            ssl=tls if tls is not None else True,
            server_hostname=self.settings.tls_server_name,
            **options,
        )

    async def events(self, job_id: str) -> AsyncGenerator[None]:
        """Yield once when the stream is open, then whenever something about the job changed; never ends by itself.

        Raises:
            NomadRefused: there is no event stream here, not for this token, or it says nothing, as with enable_event_broker off.
            BackendUnavailable: the stream broke.
        """
        params = [("topic", f"{topic}:{job_id}") for topic in ("Job", "Allocation", "Evaluation")]
        silent = False
        try:
            async with self._get("/v1/event/stream", params) as answer:
                if not answer.ok:
                    raise refused(self.settings, "open its event stream", answer.status, (await answer.text())[:300])
                silent = True
                yield
                buffer = b""
                async for chunk in answer.content.iter_any():
                    silent = False
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    if any(b'"Events"' in line or b"Error" in line for line in lines):
                        yield
        except TimeoutError as error:
            text = f"Nomad's event stream at {self.settings.address} said nothing for {SILENCE_S:g} s"
            if silent:
                text = f"{text} since it was opened (enable_event_broker?)"
                raise NomadRefused(text, NOT_FOUND) from error
            raise BackendUnavailable(text) from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendUnavailable(f"Nomad's event stream at {self.settings.address} broke: {error}") from error
        raise BackendUnavailable(f"Nomad's event stream at {self.settings.address} ended")

    async def next_change(self, job_id: str, index: int) -> int:
        """Wait until the job's allocations differ from those at `index` (0: answer at once); the new index.

        Raises:
            NomadRefused: Nomad said no.
            BackendUnavailable: it could not be reached.
        """
        params = [("index", str(index)), ("wait", f"{BLOCK_S}s")]
        timeout = aiohttp.ClientTimeout(total=BLOCK_S * 1.2 + ANSWER_S)
        try:
            async with self._get(f"/v1/job/{job_id}/allocations", params, timeout=timeout) as answer:
                if not answer.ok:
                    raise refused(self.settings, "list allocations", answer.status, (await answer.text())[:300])
                new = int(answer.headers["X-Nomad-Index"])
                json.loads(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError) as error:
            raise BackendUnavailable(f"Nomad does not answer at {self.settings.address}: {error}") from error
        return new if new >= index else 0
