"""What schemathesis can't know: names of tools and arguments that they take, so that not every call is of an unknown
one."""

from __future__ import annotations

import random
import threading
from typing import Any
from urllib.parse import quote

import httpx
import schemathesis
from pydantic import BaseModel, ValidationError

from atropos.api.executor.models import CallBody, OpenTrajectory, PrepareImage
from atropos.tools.tool_server.messages import BatchRequest, ExternalCall
from tests.e2e.servers import TOKEN

_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("echo", {"text": "é"}),
    ("explode", {}),
    ("flood", {"megabytes": 1}),
    ("nap", {"seconds": 0.01}),
    ("terminal", {"command": "echo hi"}),
    ("terminal", {"command": "sleep 600", "timeout": 0.05}),
    ("process", {"action": "list"}),
    ("read_file", {"path": "/etc/hostname"}),
    ("write_file", {"path": "a", "content": "b"}),
    ("patch", {"path": "a", "old": "b", "new": "c"}),
    ("search_files", {"pattern": "b"}),
)

_TOO_LONG = {"hang"}
"""Rightly answered, but after a minute: longer than any case waits."""


def _known(call: Any) -> Any:
    """Of a right call, often one of a tool that exists, with the drawn arguments or right ones."""
    generator = random.Random(repr(call))  # the same body for the same draw, or nothing could be shrunk
    if generator.random() < 0.3 and call.get("name") not in _TOO_LONG:
        return call
    name, arguments = generator.choice(_CALLS)
    return {**call, "name": name, **({"arguments": arguments} if generator.random() < 0.6 else {})}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if _right(BatchRequest, body):
        return {**body, "calls": [_known(one) for one in body["calls"]]}
    if context.operation.path == "/prepare" and _right(PrepareImage, body):  # no registry of the outside is asked
        return {**body, "image": "127.0.0.1:1/nothing", "wait_s": 1}
    if context.operation.path == "/trajectories" and _right(OpenTrajectory, body):
        return {**body, "image": None}
    return _known(body) if _right(ExternalCall, body) or _right(CallBody, body) else body


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if case.operation.path == "/shells/{shell_id}/output":  # which ends with the shell
        shell = (
            f"{str(case.operation.base_url).rstrip('/')}/shells/{quote(str(case.path_parameters['shell_id']), safe='')}"
        )
        asked = {"headers": {"Authorization": f"Bearer {TOKEN}"}, "timeout": 60}  # as long as the case may take
        threading.Timer(0.3, httpx.delete, [shell], asked).start()


def _right(model: type[BaseModel], body: Any) -> bool:
    """Whether it is one: a body that was drawn to be wrong must stay wrong."""
    try:
        model.model_validate(body)
    except ValidationError:
        return False
    return True
