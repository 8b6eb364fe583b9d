"""The client of a ToolServer: which requests are retried, and whose failure an error is."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import SecretStr, ValidationError

from atropos.aio import Tasks, backoff_s, retry_after_s
from atropos.errors import ConfigError, OutcomeUnknown, ToolServerUnavailable
from atropos.tools.base import Tool
from atropos.tools.models import ToolResult
from atropos.tools.tool_server.messages import VERSION, ExecuteAnswer, ExternalCall, ToolInfo, ToolList
from atropos.tools.tool_server.transport import (
    Connections,
    InProcess,
    RequestNotSent,
    ResponseLost,
    Transport,
    TransportResponse,
)
from atropos.wire import Problem

if TYPE_CHECKING:
    from starlette.applications import Starlette

INPROCESS = "inprocess"
"""The `tool_server_url` that means: run the ToolServer's application in this process."""
ENTRY_POINTS = "atropos.tool_server"
"""The entry point group in which the package names that application: a function of `token` and `tools`."""
MAX_ATTEMPTS = 8
"""Most attempts to send one call, while that is safe."""
MAX_DELAY_S = 10.0
"""Longest pause between two attempts, even where the server asks for a longer one."""
ALIVE_S = 5.0
"""How long the server may take to answer `GET /health`."""
QUEUE_S = 75.0
"""How much longer than the tool's own time a call may take, for its wait on the server and the network."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Life:
    """A trajectory from its first call to its end: its id for the server, and the id of the server's state for it."""

    trajectory_id: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state_id: str | None = None


class ToolServerClient:
    """One ToolServer, over HTTP or in this process.

    A call is sent again only where that can't run it twice: it was not sent, or the server refused it (429, 503), or
    the connection broke and the server is asked for the same id, which it runs at most once.
    """

    def __init__(
        self,
        url: str,
        token: SecretStr | None = None,
        *,
        app_factory: Callable[[], Starlette] | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self.url = url
        self._token = token
        self._factory = app_factory
        self._tools = tools
        self._stack = AsyncExitStack()
        self._transport: Transport | None = None
        self._boot_id: str | None = None
        self._timeouts: dict[str, float] = {}
        if url != INPROCESS and not url.startswith(("http://", "https://")):
            raise ConfigError(f"tool_server_url: {url!r} is neither an http(s) URL nor 'inprocess'")
        if token is not None and not token.get_secret_value().isprintable():
            raise ConfigError("tool_server_token: no header can hold it; leave out its line break or control character")

    async def start(self) -> list[ToolInfo]:
        """Connect and fetch the list of tools. Also after a failure, `close` ends what was opened.

        Raises:
            ToolServerUnavailable: it can't be reached, refuses the token, or sends an invalid answer.
            ConfigError: `inprocess`, and the package's entry points are not installed.
        """
        headers: dict[str, str] = {}
        if self._token is not None:
            # In each request, also to an application in this process: it checks it in the same way.
            headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
        if self.url == INPROCESS:
            app = self._factory() if self._factory is not None else _own_app(self._token, self._tools)
            await self._stack.enter_async_context(_lifespan(app))
            self._transport = InProcess(app, headers)
        else:
            self._transport = connections = Connections(self.url, headers)
            self._stack.push_async_callback(connections.close)
        answer = await self._get_tools()
        self._boot_id = answer.boot_id
        self._timeouts = {tool.name: tool.timeout_s for tool in answer.tools}
        return list(answer.tools)

    async def _get_tools(self) -> ToolList:
        for attempt in range(MAX_ATTEMPTS):
            try:
                response = await self._open.send("GET", "/tools", None, 15.0)
            except (RequestNotSent, ResponseLost) as error:
                # At the start an address is mostly wrong rather than momentarily away: fewer tries than for a call.
                if attempt + 1 == 3:
                    raise self._unavailable(f"can't be reached: {error}") from error
                await _pause(attempt, None)
                continue
            if response.status in {429, 503} and attempt + 1 < MAX_ATTEMPTS:
                await _pause(attempt, response)
                continue
            if response.status != 200:
                raise self._refused(response)
            try:
                tools = ToolList.model_validate_json(response.body)
            except ValidationError as error:
                raise self._unavailable(f"sent an invalid answer to GET /tools: {error}"[:500]) from error
            if tools.version != VERSION:
                raise self._unavailable(f"speaks version {tools.version} of the protocol, this client {VERSION}")
            return tools
        raise self._unavailable("stayed too busy to list its tools")

    async def execute(self, life: Life, call_id: str, name: str, arguments: dict[str, object]) -> ToolResult:
        """Run one external call, which has the time that the server gives the tool.

        Raises:
            ToolServerUnavailable: the server could not be reached or refused the call, which did not run.
            OutcomeUnknown: the call may have run.
        """
        call = ExternalCall(
            trajectory_id=life.trajectory_id,
            call_id=call_id,
            name=name,
            arguments=arguments,
            state_id=life.state_id,
            life=life.id,
        )
        return await self._send(call, life, time.monotonic() + self._timeouts.get(name, 0) + QUEUE_S)

    async def _send(self, call: ExternalCall, life: Life, deadline: float) -> ToolResult:
        first_boot_id = self._boot_id  # not a later one: other calls may have reached a server restarted since
        sent_before = False  # whether an earlier attempt may have reached the server
        failure = "stayed too busy"
        response: TransportResponse | None = None
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await _pause(attempt - 1, response)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            # With the boot id the server knows that it may have run the call, and a restarted one refuses it.
            body = call.model_copy(update={"boot_id": first_boot_id}) if sent_before else call
            # Else the pause before the next try would follow an older answer's Retry-After.
            response = None
            try:
                response = await self._open.send(
                    "POST", "/execute", body.__pydantic_serializer__.to_json(body), remaining_s
                )
            except RequestNotSent as error:
                failure = f"can't be reached: {error}"
            except ResponseLost as error:
                sent_before = True
                failure = f"broke the connection: {error}"
            else:
                if response.status == 200:
                    return self._answer(response, call, life)
                # The model's own mistake, of which it is to read.
                if response.status == 413 and not sent_before:
                    return ToolResult.failure(f"{call.name}: the arguments are too long: {_problem(response).message}")
                if response.status not in {429, 502, 503, 504}:
                    self._raise_for(response, call, life, sent_before=sent_before)
                sent_before |= response.status in {502, 504}  # from a proxy: the server behind it may run the call
                failure = f"answered {response.status}: {_problem(response).message}"
        if sent_before:
            raise OutcomeUnknown(f"the ToolServer at {self.url} {failure}; call {call.call_id} may have run")
        raise self._unavailable(failure)

    async def check_alive(self) -> None:
        """Check that the server answers.

        Raises:
            ToolServerUnavailable: it doesn't.
        """
        try:
            response = await self._open.send("GET", "/health", None, ALIVE_S)
        except (RequestNotSent, ResponseLost) as error:
            raise self._unavailable(f"does not answer: {error}") from error
        if response.status != 200:
            raise self._refused(response)

    async def end(self, life: Life) -> None:
        """Release the server's state of a trajectory; a failure is logged, and the server's TTL releases it then.

        A cancelled call may reach the server after this: its `life` has ended, and it is not run.
        """
        path = f"/trajectories/{quote(life.trajectory_id, safe='')}?life={life.id}"
        try:
            await self._open.send("DELETE", path, None, 10.0)
        except (RequestNotSent, ResponseLost) as error:
            _log.warning("ToolServer: the end of trajectory %s could not be sent: %s", life.trajectory_id, error)

    async def close(self) -> None:
        """Close the connections, and the application where it runs in this process."""
        self._transport = None
        await self._stack.aclose()

    @property
    def _open(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the ToolServer client is not started, or closed")
        return self._transport

    def _answer(self, response: TransportResponse, call: ExternalCall, life: Life) -> ToolResult:
        try:
            answer = ExecuteAnswer.model_validate_json(response.body)
        except ValidationError as error:
            message = f"the ToolServer at {self.url} sent an invalid answer; call {call.call_id} may have run: {error}"
            raise OutcomeUnknown(message[:500]) from error
        self._boot_id = answer.boot_id
        # Sent with the next call, by which a server that has lost the state knows that there was one.
        life.state_id = answer.state_id
        return answer.result

    def _raise_for(self, response: TransportResponse, call: ExternalCall, life: Life, *, sent_before: bool) -> None:
        problem = _problem(response)
        if response.status == 409:
            if problem.code == "state_lost" and not sent_before:
                life.state_id = None  # reported once: later calls start without state
                raise self._unavailable(f"did not run call {call.call_id}: {problem.message}")
            raise OutcomeUnknown(f"the ToolServer at {self.url}: {problem.message}")
        # An answer to a repeated request says nothing of the first one.
        if response.status >= 500 or sent_before:
            raise OutcomeUnknown(f"the ToolServer at {self.url} answered {response.status}: {problem.message}")
        raise self._refused(response)

    def _refused(self, response: TransportResponse) -> ToolServerUnavailable:
        cure = "; check tool_server_token" if response.status in {401, 403} else ""
        return self._unavailable(f"answered {response.status}: {_problem(response).message}{cure}")

    def _unavailable(self, why: str) -> ToolServerUnavailable:
        return ToolServerUnavailable(f"the ToolServer at {self.url} {why}")


def _own_app(token: SecretStr | None, tools: Sequence[Tool]) -> Starlette:
    """The application that the package registers for `inprocess`.

    Raises:
        ConfigError: none is registered, or what it needs is not installed.
    """
    for point in entry_points(group=ENTRY_POINTS, name=INPROCESS):
        try:
            make = point.load()
        except ImportError as error:
            raise ConfigError(
                f"tool_server_url: 'inprocess' needs the extra `server`: pip install 'atropos[server]' ({error})"
            ) from error
        return make(token=token, tools=tools)
    raise ConfigError(
        f"tool_server_url: 'inprocess' needs the entry points of {ENTRY_POINTS}; install atropos (pip install -e .)"
    )


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    """Run an application's lifespan in a task of its own.

    The caller may close in another task than it started in, and what an application opens may have to be closed by the
    task that opened it.
    """
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def live() -> None:
        try:
            async with app.router.lifespan_context(app):
                ready.set_result(None)
                await over.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else RuntimeError(f"start ended: {error!r}"))

    async with Tasks("ToolServer in this process") as tasks:
        task = tasks.spawn(live(), "lifespan")
        try:
            await ready
            yield
        finally:
            over.set()
            if not ready.cancelled():  # else the caller gave up the start
                await asyncio.wait([task])


def _problem(response: TransportResponse) -> Problem:
    """What a response says; without a code where a proxy wrote it."""
    try:
        return Problem.model_validate_json(response.body)
    except ValidationError:
        text = response.body.decode(errors="replace")[:200]
        return Problem(code="", message=text or f"status {response.status}")


async def _pause(attempt: int, response: TransportResponse | None) -> None:
    asked = 0.0 if response is None else retry_after_s(response.headers.get("retry-after"))
    backoff = backoff_s(attempt, first_s=0.1, longest_s=MAX_DELAY_S)
    await asyncio.sleep(min(max(asked, backoff), MAX_DELAY_S))
