"""How a workspace is made: the steps of a Dockerfile, as data."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from atropos.images.manifests import MACHINE
from atropos.wire import HealthConfig

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that sets none."""
DEFAULT_WORKDIR = "/workspace"
"""Working directory of a task that has no Dockerfile."""
SHELL = ("/bin/sh", "-c")
CACHES = "/.cache-mounts"
"""Where a stage keeps what is in cache mounts between its commands."""
ROOT = frozenset({"", "0", "root", "0:0", "root:root"})
"""How root is written where a user is named."""


@dataclass(frozen=True)
class StepSettings:
    """What an instruction starts with: ENV and ARG, WORKDIR, USER.

    Attributes:
        user: `name`, `uid`, `name:group` or `uid:gid`; None: root.
        onbuild: of an image: instructions that its FROM carries out.
        entrypoint: what a container would start with; nothing of the build.
        cmd: of an image: what that starts where nobody says another thing.
        command: of a compose file: what it starts instead; empty: of the agent's own machine what waits, else `cmd`.
        shell: what the shell form of RUN, and of a health check, begins with.
        healthcheck: by what a container of it is known to be healthy.
        volumes: of an image: folders that its containers have (VOLUME).
    """

    workdir: str = "/"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    onbuild: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    shell: tuple[str, ...] = SHELL
    healthcheck: HealthConfig | None = None
    volumes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.user in ROOT:
            object.__setattr__(self, "user", None)


@dataclass(frozen=True)
class BuildInputs:
    """What a recipe depends on beside its own files.

    Attributes:
        settings: what images set, by the name that a task gives them, where that is known.
        architecture: the one that is built for, as images name it.
    """

    settings: Mapping[str, StepSettings] = field(default_factory=dict[str, StepSettings])
    architecture: str = MACHINE


@dataclass(frozen=True)
class Folder:
    """A WORKDIR: made where it is missing, as the user who works in it."""

    path: str
    owner: str | None = None


@dataclass(frozen=True)
class Copy:
    """Files that go into the slot: of the build context, of another stage, or written in the Dockerfile itself.

    Attributes:
        target: absolute; ends in `/` when it names a folder.
        mode: of the files: a number, or words as chmod takes them; None keeps theirs.
        keep_folder_name: a folder goes in under its own name; else, as Docker has it, its content does.
        owner: `user`, `user:group` or numbers; None: root, and whoever owns them where they come from a stage or
            archive.
        stage: index of the stage that the sources are in; None: the build context. Negative: an image, which is a stage
            without steps.
        files: (name, content) of here-documents.
        exclude: patterns of files that stay behind, by their names in the source.
        unpack: the sources are archives, and their members go into the target.
        parents: the sources keep the folders above them, from the context on or from what is behind `/./` in their
            name.
    """

    sources: tuple[str, ...]
    target: str
    mode: int | str | None = None
    keep_folder_name: bool = False
    owner: str | None = None
    stage: int | None = None
    files: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()
    unpack: bool = False
    parents: bool = False


@dataclass(frozen=True)
class Mount:
    """What a RUN finds at a path while it runs. Afterwards the path is as it was before.

    Attributes:
        target: absolute.
        content: the files of a bind mount, copied to `target`; None: a folder.
        mode: of an empty folder; None: a tmpfs, which has that of the folder that it covers.
        owner: of an empty folder, in numbers.
        cache: by which name later commands of the stage find what is in it; empty: they don't.
    """

    target: str
    content: Copy | None = None
    mode: int | None = 0o755
    owner: tuple[int, int] = (0, 0)
    cache: str = ""


@dataclass(frozen=True)
class Run:
    """A command of the build: a program and its arguments; `offline`: without a network."""

    command: tuple[str, ...]
    settings: StepSettings = StepSettings()
    mounts: tuple[Mount, ...] = ()
    offline: bool = False


@dataclass(frozen=True)
class Download:
    """ADD of an address: its content as a file.

    Attributes:
        target: as `Copy`'s.
        checksum: SHA-256 that the content must have.
        unpack: it may be an archive, whose members go into the target.
    """

    address: str
    target: str
    checksum: str | None = None
    mode: int = 0o600
    owner: str | None = None
    unpack: bool = False


def file_name(address: str) -> str:
    """The name of what is at an address, without escapes; empty where its path ends in none.

    Raises:
        ValueError: it is no address.
    """
    return posixpath.basename(unquote(urlsplit(address).path))


Step = Folder | Copy | Run | Download


def copies(step: Step) -> tuple[Copy, ...]:
    """What a step copies, its bind mounts included."""
    if isinstance(step, Copy):
        return (step,)
    if isinstance(step, Run):
        return tuple(mount.content for mount in step.mounts if mount.content is not None)
    return ()


@dataclass(frozen=True)
class Stage:
    """One FROM with what follows it.

    Attributes:
        image: the base that its steps start from.
    """

    index: int
    image: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Recipe:
    """How a workspace is made.

    Attributes:
        image: the base of the last stage; None: whatever the slot has.
        settings: what every command in the workspace starts with.
        stages: the earlier stages that files are copied from, in order; images come before all.
        dockerfile: where it was read from; None: it was made of something else.
    """

    image: str | None
    settings: StepSettings
    steps: tuple[Step, ...]
    stages: tuple[Stage, ...] = ()
    dockerfile: Path | None = field(default=None, compare=False)

    @property
    def workdir(self) -> str:
        """The working directory."""
        return self.settings.workdir
