"""What a tool is: one class, or one decorated async function with typed arguments."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, create_model

from atropos import wire
from atropos.errors import ConfigError
from atropos.tools.arguments import Arguments, FrozenModel, parameters
from atropos.tools.models import ToolResult, ToolSchema

if TYPE_CHECKING:
    from atropos.slots import Slot

_T = TypeVar("_T")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""OpenAI's rule for a function's name."""


class ToolError(Exception):
    """Raised by a tool for an error that the model should read: the executor makes a `ToolResult` of it."""

    def __init__(self, message: str, *, limit: wire.Limit | None = None) -> None:
        super().__init__(message)
        self.limit: wire.Limit | None = limit


class ToolLimits(FrozenModel):
    """Bounds on a model's requests and on what it is shown. Times in seconds."""

    command_timeout_s: float = Field(default=120, gt=0, description="of a terminal command that names none")
    max_timeout_s: float = Field(default=600, gt=0, description="longest a terminal command may ask for")
    max_wait_s: float = Field(default=120, gt=0, description="longest a wait for a process or a screen may ask for")
    max_output_bytes: int = Field(default=50_000, ge=1000, description="of one result, as head and tail")
    max_sessions: int = Field(default=16, ge=1, description="terminal sessions of one trajectory")
    max_recording_bytes: int = Field(default=8_000_000, ge=1000, description="of one session's recording")
    record_sessions: bool = Field(default=False, description="record every terminal session, asked for or not")


class ToolState:
    """A tool's state of one trajectory, kept in `ToolScope.state`, with hooks that the executor calls."""

    async def after_call(self, result: ToolResult, scope: ToolScope) -> ToolResult:  # noqa: ARG002 - for subclasses
        """Called after each sandboxed call of the trajectory; returns its result, perhaps with a note added.

        Raises:
            SandboxError: the infrastructure failed.
        """
        return result

    async def finish(self, scope: ToolScope) -> None:
        """Called before the trajectory's slot is released."""

    def recordings(self) -> dict[str, str]:
        """Recorded terminals by session id, as asciinema v2 text."""
        return {}


def tool_states(state: Mapping[str, object]) -> list[ToolState]:
    """The states of tools that have hooks, of a trajectory's `ToolScope.state`."""
    return [value for value in state.values() if isinstance(value, ToolState)]


@dataclass
class ToolScope:
    """The context of one call: its trajectory, its slot, and the state of tools between calls of one lease.

    Attributes:
        trajectory_id: whose call this is.
        call_id: the call's id.
        limits: the executor's bounds.
        state: kept from call to call, dropped with the lease; keyed by the tool's own name. The executor calls the
            hooks of values that are `ToolState`.
    """

    trajectory_id: str
    call_id: str
    limits: ToolLimits = field(default_factory=ToolLimits)
    state: dict[str, object] = field(default_factory=dict[str, object])
    _slot: Slot | None = None

    @property
    def slot(self) -> Slot:
        """The trajectory's slot; only sandboxed tools have one."""
        if self._slot is None:
            raise ConfigError("an external tool has no slot; declare it with sandboxed=True")
        return self._slot

    def get_state(self, key: str, kind: type[_T]) -> _T:
        """The value of a key in `state`, made at its first use."""
        state = self.state.setdefault(key, kind())
        assert isinstance(state, kind)
        return state

    async def run(self, operation: wire.Operation) -> Any:
        """Run a wire operation in the slot.

        Raises:
            ToolError: the operation failed inside the slot.
            SandboxError: the infrastructure failed.
        """
        result = await self.slot.run(operation)
        if isinstance(result, wire.OpError):
            raise ToolError(result.message, limit=result.limit)
        return result


class Tool(ABC):
    """A tool. Subclass it, or decorate a function with `tool`.

    Attributes:
        name: what the model calls it: letters, digits, `_` and `-`.
        description: what the model reads about it.
        arguments: the pydantic model of its arguments.
        toolsets: the groups it belongs to; `default` puts it among the default tools.
        sandboxed: whether it works in the trajectory's slot; else it runs on the ToolServer.
        read_only: changes nothing, so that it may run twice.
        timeout_s: how long a call may take; its result then says that it timed out. None: no bound of the tool's own.
        replaces_built_in: whether it replaces the built-in tool of its name.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    toolsets: tuple[str, ...] = ()
    sandboxed: bool = True
    read_only: bool = False
    timeout_s: float | None = None
    replaces_built_in: bool = False

    @abstractmethod
    async def run(self, arguments: Any, scope: ToolScope) -> object:
        """Run the tool.

        Returns:
            A `ToolResult`, text, or any value that JSON can hold.

        Raises:
            ToolError: the model should read what went wrong.
            SandboxError: the infrastructure failed; the caller gets the exception.
        """

    @cached_property
    def schema(self) -> ToolSchema:
        """The tool's schema for a model."""
        return ToolSchema(name=self.name, description=self.description, parameters=parameters(self.arguments))

    def __repr__(self) -> str:
        return f"<Tool {self.name} {'sandboxed' if self.sandboxed else 'external'} {'/'.join(self.toolsets)}>"


class FunctionTool(Tool):
    """A decorated function as a tool; calling it calls the function."""

    def __init__(
        self, function: Callable[..., Awaitable[object]], arguments: type[BaseModel] | None = None, **fields: object
    ) -> None:
        self.function = function
        self._by_model: str | None = None
        self._injected: list[str] = []
        for name, value in fields.items():
            setattr(self, name, value)
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"tool {self.name!r}: the function must be `async def`")
        if not self.description:
            raise ConfigError(f"tool {self.name!r}: give the function a docstring, or description=...")
        self._read_signature(arguments)
        self.__doc__ = self.description

    def _read_signature(self, model: type[BaseModel] | None) -> None:
        fields: dict[str, Any] = {}  # as `create_model` takes them
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
                raise ConfigError(f"tool {self.name!r}: parameter {name!r} must be named, not * or positional-only")
            if name in {"slot", "scope"}:
                self._injected.append(name)
                continue
            if name == "model_config" or (name.startswith("_") and parameter.default is parameter.empty):
                raise ConfigError(f"tool {self.name!r}: parameter {name!r} can be no argument of a model; rename it")
            kind = model if name == "arguments" and model else self._annotation(parameter)
            if isinstance(kind, type) and issubclass(kind, BaseModel) and self._by_model is None and not fields:
                self._by_model, self.arguments = name, kind
                continue
            fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
        if self._by_model is not None and fields:
            raise ConfigError(f"tool {self.name!r}: take one arguments model, or plain parameters, not both")
        if self._by_model is None:
            self.arguments = create_model(f"{self.name}_arguments", __base__=Arguments, **fields)

    def _annotation(self, parameter: inspect.Parameter) -> object:
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"tool {self.name!r}: parameter {parameter.name!r} needs a type")
        if not isinstance(parameter.annotation, str):
            return parameter.annotation
        try:
            return eval(parameter.annotation, self.function.__globals__)  # noqa: S307 - the author's own annotation
        except (NameError, AttributeError, LookupError, SyntaxError, TypeError) as error:
            raise ConfigError(
                f"tool {self.name!r}: the type of {parameter.name!r} can't be resolved ({error}); "
                "define it at module level, or pass arguments=Model to @tool"
            ) from None

    async def run(self, arguments: BaseModel, scope: ToolScope) -> object:
        """Call the function with its arguments, and with the slot or scope where it has such a parameter."""
        injected = {name: scope if name == "scope" else scope.slot for name in self._injected}
        if self._by_model is not None:
            return await self.function(**{self._by_model: arguments}, **injected)
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        return await self.function(**values, **injected)

    def __call__(self, *args: object, **kwargs: object) -> Awaitable[object]:
        """Call the plain function."""
        return self.function(*args, **kwargs)


def tool(
    name: str | None = None,
    *,
    description: str | None = None,
    arguments: type[BaseModel] | None = None,
    toolsets: tuple[str, ...] | list[str] = ("custom",),
    sandboxed: bool = True,
    read_only: bool = False,
    timeout_s: float | None = None,
    replaces_built_in: bool = False,
) -> Callable[[Callable[..., Awaitable[object]]], FunctionTool]:
    """Turn an async function into a tool.

    Its parameters are the arguments (or one parameter is a pydantic model of them); a parameter named `slot` gets the
    trajectory's slot, one named `scope` the `ToolScope`. The docstring's first paragraph is the description.

        @tool(toolsets=("text",))
        async def count_words(slot, path: str) -> str:
            "Count the words of a file."
            return str(len((await slot.read_file(path)).split()))

    Raises:
        ConfigError: the function can't be a tool; the message says what to change.
    """

    def wrap(function: Callable[..., Awaitable[object]]) -> FunctionTool:
        text = description or (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
        wrapped = FunctionTool(
            function,
            arguments,
            name=name or getattr(function, "__name__", ""),
            description=text,
            toolsets=tuple(toolsets),
            sandboxed=sandboxed,
            read_only=read_only,
            timeout_s=timeout_s,
            replaces_built_in=replaces_built_in,
        )
        check_tool(wrapped)
        return wrapped

    return wrap


def check_tool(candidate: Tool) -> None:
    """Check a tool's declaration.

    Raises:
        ConfigError: its name, description, arguments or timeout are invalid.
    """
    name = getattr(candidate, "name", None)
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(f"tool name {name!r}: use 1 to 64 letters, digits, '_' or '-'")
    if not getattr(candidate, "description", None):
        raise ConfigError(f"tool {name!r}: description is missing")
    model = getattr(candidate, "arguments", None)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise ConfigError(f"tool {name!r}: arguments must be a pydantic model")
    if candidate.timeout_s is not None and candidate.timeout_s <= 0:
        raise ConfigError(f"tool {name!r}: timeout_s must be above 0")


def as_result(value: object) -> ToolResult:
    """Convert what a tool returned.

    Raises:
        ToolError: JSON can't hold it.
    """
    if isinstance(value, ToolResult):
        return value
    if value is None:
        return ToolResult(success=True)
    if isinstance(value, str):
        return ToolResult(success=True, output=value)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        data = json.loads(text)  # what JSON has of it: the result can be sent, whatever the keys and values were
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool's answer can't be written as JSON: {error}") from None
    return ToolResult(success=True, output=text, data=data if isinstance(value, dict) else {"value": data})
