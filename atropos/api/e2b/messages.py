"""What the SDK sends: requests of the REST API, and messages of the `process` and `filesystem` services."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal, TypeVar

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from atropos.api.e2b.connect import RpcError
from atropos.tools.models import LINE_CHARS


class ConnectMessage(BaseModel):
    """Base of all: frozen, with names as the protocol's JSON writes them; what isn't known is ignored, as E2B does."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


AnyMessage = TypeVar("AnyMessage", bound=ConnectMessage)
FILES_HASH = re.compile(r"^[0-9a-f]{16,128}$")
TemplateTag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
EVERYWHERE = frozenset({"0.0.0.0/0", "::/0"})
"""Networks that are all addresses."""


def parse(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """A message of a kind.

    Raises:
        RpcError: it is none.
    """
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RpcError("invalid_argument", f"{field or 'message'}: {first['msg'][:200]}") from None


class Empty(ConnectMessage):
    """A message whose fields don't matter."""


class Network(ConnectMessage):
    """`PUT /sandboxes/{id}/network`: unsupported settings are refused, since ignoring one would open what it closes."""

    model_config = ConfigDict(extra="forbid")

    allow_out: tuple[Annotated[str, Field(max_length=270)], ...] = Field(default=(), max_length=256)
    deny_out: tuple[str, ...] = ()
    allow_internet_access: bool | None = Field(default=None, alias="allow_internet_access")
    allow_public_traffic: bool | None = None

    def hosts(self, *, internet: bool | None = None) -> tuple[str, ...] | None:
        """What is reached; None: all that the pool allows.

        Args:
            internet: False: as if all addresses were denied.

        Raises:
            RpcError: some addresses are denied and others not.
        """
        if False in {internet, self.allow_internet_access} or not EVERYWHERE.isdisjoint(self.deny_out):
            return self.allow_out
        if self.allow_out or self.deny_out:
            raise RpcError("invalid_argument", "network: denyOut has to be 0.0.0.0/0, with the exceptions in allowOut")
        return None


class AutoResume(ConnectMessage):
    """Whether a request to a paused sandbox resumes it."""

    enabled: bool = False


class NewSandbox(ConnectMessage):
    """`POST /sandboxes`."""

    template_id: str = Field(alias="templateID", min_length=1, max_length=1000)
    timeout: float | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    env_vars: dict[str, str] = Field(default_factory=dict)
    allow_internet_access: bool | None = Field(default=None, alias="allow_internet_access")
    network: Network = Network()
    auto_pause: bool | None = None
    auto_resume: AutoResume = AutoResume()
    # There are neither volumes nor roles here: whoever asks for them is refused, instead of missing them later.
    volume_mounts: tuple[Empty, ...] = Field(default=(), max_length=0)
    iam: None = None


class NewTimeout(ConnectMessage):
    """`POST /sandboxes/{id}/timeout` and `/connect`."""

    timeout: float | None = None


class NewFork(ConnectMessage):
    """`POST /sandboxes/{id}/fork`."""

    timeout: float | None = None
    count: int = Field(default=1, ge=1, le=100)


class NewSnapshot(ConnectMessage):
    """`POST /sandboxes/{id}/snapshots`."""

    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9._:/-]{0,127}$")


class NewTemplate(ConnectMessage):
    """`POST /v3/templates`: `name` of late, `alias` before."""

    name: str | None = Field(default=None, max_length=300)
    alias: str | None = Field(default=None, max_length=300)
    tags: tuple[TemplateTag, ...] = Field(default=(), max_length=64)
    cpu_count: int | None = Field(default=None, ge=1, le=1024)
    memory_mb: int | None = Field(default=None, ge=1, le=1 << 24, alias="memoryMB")


class TemplateStep(ConnectMessage):
    """One instruction of a template. Of COPY, `files_hash` names the files that were uploaded for it."""

    type: Literal["COPY", "ENV", "RUN", "USER", "WORKDIR"]
    args: tuple[str, ...] = Field(default=(), max_length=4096)
    files_hash: str | None = Field(default=None, pattern=FILES_HASH.pattern)
    force: bool = False


class StartBuild(ConnectMessage):
    """`POST /v2/templates/{id}/builds/{id}`: what is built, and what starts in each sandbox."""

    from_image: str | None = Field(default=None, max_length=500)
    from_template: str | None = Field(default=None, max_length=500)
    from_image_registry: object = None
    force: bool = False
    steps: tuple[TemplateStep, ...] = Field(default=(), max_length=1000)
    start_cmd: str = Field(default="", max_length=100_000)
    ready_cmd: str = Field(default="", max_length=100_000)


class AssignedTags(ConnectMessage):
    """`POST /templates/tags`."""

    target: str = Field(max_length=300)
    tags: tuple[TemplateTag, ...] = Field(min_length=1, max_length=64)


class DroppedTags(ConnectMessage):
    """`DELETE /templates/tags`."""

    name: str = Field(max_length=300)
    tags: tuple[TemplateTag, ...] = Field(max_length=64)


class Selector(ConnectMessage):
    """A process, by its id or its tag."""

    pid: int | None = None
    tag: str | None = None


class Selected(ConnectMessage):
    """`CloseStdin`, `Connect`, and the start of a `StreamInput`."""

    process: Selector


class TerminalSize(ConnectMessage):
    """Of a terminal."""

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class ProcessTerminal(ConnectMessage):
    """That a process is on a terminal."""

    size: TerminalSize = TerminalSize()


class ProcessConfig(ConnectMessage):
    """What a process is started as."""

    cmd: str = Field(min_length=1)
    args: tuple[str, ...] = ()
    envs: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None

    def line(self) -> str:
        """The command in a line, for people, without the shell that the SDK has it run by; a long one is cut."""
        by_shell = self.args[:-1] == ("-l", "-c")
        return (self.args[-1] if by_shell else shlex.join([self.cmd, *self.args]))[:LINE_CHARS]


class Start(ConnectMessage):
    """`Start`."""

    process: ProcessConfig
    pty: ProcessTerminal | None = None
    tag: str | None = None
    stdin: bool = True


class Input(ConnectMessage):
    """What a process reads, from its pipe or its terminal."""

    stdin: Base64Bytes | None = None
    pty: Base64Bytes | None = None


class SendInput(ConnectMessage):
    """`SendInput`."""

    process: Selector
    input: Input


class InputData(ConnectMessage):
    """A piece of a `StreamInput`."""

    input: Input


class StreamInput(ConnectMessage):
    """`StreamInput`: its first message names the process, the others bring the input."""

    start: Selected | None = None
    data: InputData | None = None


class SendSignal(ConnectMessage):
    """`SendSignal`."""

    process: Selector
    signal: Literal["SIGNAL_SIGTERM", "SIGNAL_SIGKILL"]


class Update(ConnectMessage):
    """`Update`."""

    process: Selector
    pty: ProcessTerminal | None = None


class AtPath(ConnectMessage):
    """`Stat`, `MakeDir` and `Remove`."""

    path: str = Field(max_length=4096)


class ListDir(AtPath):
    """`ListDir`."""

    depth: int = Field(default=1, ge=0, le=1000)


class Move(ConnectMessage):
    """`Move`."""

    source: str = Field(max_length=4096)
    destination: str = Field(max_length=4096)


class Watch(AtPath):
    """`WatchDir` and `CreateWatcher`."""

    recursive: bool = False


class OfWatcher(ConnectMessage):
    """`GetWatcherEvents` and `RemoveWatcher`."""

    watcher_id: str
