"""Requests to a Docker engine. Blocking; `DockerBackend` calls it from threads."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
import time
from collections.abc import Callable, Generator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import CancellableStream

from atropos.archives import WholeTar
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.assets import asset
from atropos.slots.backends.container import Container
from atropos.slots.backends.docker.facts import EngineFacts, pull_is_denied
from atropos.slots.backends.docker.gpus import container_gpus
from atropos.slots.backends.engines import in_thread
from atropos.slots.backends.spec import CAP_ADD, CONTAINER_PORT, HOSTNAME, IMAGE_FOLDER, ContainerSpec

log = logging.getLogger(__name__)
POOL, OWNER, INDEX, SPEC = "atropos.pool", "atropos.owner", "atropos.index", "atropos.spec"
"""Labels of a container: its pool, the process that made it, its place in the scaling order, its spec's fingerprint."""
TOKEN_DIR, TOKEN_FILE = "/run", "atropos-secret/token"
DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
PROFILE = "docker/sandbox/seccomp.json"
REMOTE_PROFILE = "/etc/atropos/seccomp.json"
"""Where a Podman on another machine has the profile, as Nomad's clients do."""
LOOPBACK = "127.0.0.1"
REFUSALS = {400, 403, 404, 406, 409, 500}
"""Statuses of an engine that refuses a container; others are of what stands between."""
REMOVAL_S = 20
"""How long a removal by another process may take, in seconds."""
ANSWER_S = 60
"""How long Docker may take to answer, in seconds; starting a container on a busy disk is the slowest request."""
LIST_S = 15
"""How long it may take to list containers, in seconds. Nothing is replaced before they are listed, so that a lost
request, for example to a daemon that is starting, must not take long."""
PULL_S = 300.0
"""How long a pull may get nowhere, in seconds: Docker itself waits for a registry without end. Unpacking a large layer
may show nothing for a minute."""
PULL_NOTE_S = 20.0
"""How often the log says that a pull gets nowhere, in seconds."""


@dataclass(frozen=True)
class ListedContainer:
    """A container of the pool as Docker lists it."""

    id: str
    name: str
    index: int
    spec: str
    owner: str
    state: str
    age_s: float
    url: str | None


@dataclass(frozen=True)
class Ending:
    """How a container ended: its exit code, where it had one, and the reason, if only the last line that it printed."""

    code: int | None
    reason: str


REMOVED = Ending(None, "removed by another process")


class EngineRefused(BackendUnavailable):
    """The engine's answer is an error."""


class CreationRefused(EngineRefused):
    """It makes no such container, which a retry doesn't change."""


class ImageGone(EngineRefused):
    """The engine has the image of that id no more."""


class DockerEngine:
    """A connection to one Docker engine, or Podman's service, for one pool's containers.

    Attributes:
        address: where it is.
        facts: what the engine says of itself, once `connect` has returned.
    """

    def __init__(self, pool: str, docker_host: str | None = None) -> None:
        self._pool = pool
        self._host = docker_host
        self.address = docker_host or os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS
        self._client: Any = None
        self._lists: Any = None
        self._local = True
        self._published_at = ""
        self.facts = EngineFacts()

    def connect(self, *, answer_s: int = ANSWER_S) -> None:
        """Connect, and read what the engine is; each answer may take `answer_s`.

        Raises:
            BackendUnavailable: no engine answers; the message names DOCKER_HOST.
            ConfigError: its address is none.
        """
        with self._failures():
            # Two clients, as the SDK has one time limit for all requests of a client.
            self._client, self._lists = self._open(answer_s), self._open(LIST_S)
            self.facts = EngineFacts.read(self._client.version(), self._client.info())
        parts = urlsplit(self.address)
        host = "" if parts.scheme == "unix" else (parts.hostname or "")
        # Where paths and addresses of the engine are those of this machine.
        self._local = host in {"", LOOPBACK, "localhost", "::1"}
        published = host or self.facts.rootless or self.facts.in_vm
        self._published_at = (LOOPBACK if self._local else host) if published else ""

    def _open(self, timeout_s: int) -> Any:
        try:
            if self._host:
                return docker.DockerClient(base_url=self._host, timeout=timeout_s)
            return docker.from_env(timeout=timeout_s)
        except ValueError as error:
            raise ConfigError(
                f"docker_host or DOCKER_HOST must look like unix://… or tcp://host:port: {error}"
            ) from error

    @contextmanager
    def _failures(self) -> Generator[None]:
        """Raise the SDK's errors as `BackendUnavailable` with the engine's message."""
        try:
            yield
        except APIError as error:
            # The SDK raises it also where a container is created from an image that is gone.
            kind = ImageGone if isinstance(error, ImageNotFound) else EngineRefused
            raise kind(self._refusal(error)) from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise BackendUnavailable(
                f"no Docker engine answers at {self.address} (start dockerd, or set DOCKER_HOST): {error}"
            ) from error

    def _refusal(self, error: APIError) -> str:
        return f"{self.facts.name} refused: {error.explanation or error}"

    def image_id(self, image: str) -> str:
        """The id of an image, which is pulled if needed, unless its tag is `local`.

        Raises:
            ConfigError: there is no such image, or no right to pull it.
            BackendUnavailable: it can't be pulled now.
        """
        with self._failures():
            try:
                return str(self._client.images.get(image).id)
            except ImageNotFound:
                reason = "it is built locally"
        # No registry has it; Docker Hub would be asked for a stranger's image of that name.
        if not image.endswith(":local"):
            log.info("%s has no image %s: pulling it", self.facts.name, image)
            try:
                self._pull(image)
                return str(self._client.images.get(image).id)
            except (DockerException, requests.RequestException, TimeoutError) as error:
                reason = str(getattr(error, "explanation", None) or error)
                # A registry that is away or busy: a retry may help, so it is no ConfigError.
                if not pull_is_denied(reason):
                    raise BackendUnavailable(
                        f"image (an env's sandbox_image): {self.facts.name} can't pull {image!r}: {reason}"
                    ) from error
        raise ConfigError(
            f"image (an env's sandbox_image): {self.facts.name} has no image {image!r} ({reason}); `make image` builds "
            "atropos-sandbox:local, and a registry that wants credentials gets them by a login of the engine's client"
        )

    def _pull(self, image: str) -> None:
        """Pull an image.

        Raises:
            TimeoutError: it got nowhere for `PULL_S`.
            DockerException, requests.RequestException: Docker refused, or broke off.
        """
        moved_at, last = time.monotonic(), "nothing; does its registry answer?"
        events: dict[str, object] = {}

        def pull() -> None:
            nonlocal moved_at, last
            for event in self._client.api.pull(image, stream=True, decode=True):
                if "error" in event:
                    raise DockerException(event["error"])
                layer = event.get("id", "")
                if events.get(layer) != event:  # Docker may repeat what it said of a layer that gets no further
                    events[layer], moved_at = event, time.monotonic()
                    last = f"{layer} {event.get('status', '')} {event.get('progress', '')}".strip()

        pulling = in_thread(pull, "docker pull")  # the SDK gives it no time limit
        # The thread is left behind after `PULL_S`: it is a daemon, and a pull that goes on harms nothing.
        while not futures.wait([pulling], timeout=min(PULL_NOTE_S, PULL_S)).done:
            still_s = time.monotonic() - moved_at
            text = f"no progress for {still_s:.0f} s; the last that {self.facts.name} said of it: {last}"
            if still_s >= PULL_S:
                raise TimeoutError(text)
            if still_s >= PULL_NOTE_S:
                log.warning("pulling %s: %s", image, text)
        pulling.result()

    def found(self) -> list[ListedContainer]:
        """All containers of the pool, in any state."""
        with self._failures():
            rows = self._lists.api.containers(all=True, filters={"label": f"{POOL}={self._pool}"})
        return [self._read(row) for row in rows]

    def _read(self, row: dict[str, Any]) -> ListedContainer:
        labels = row["Labels"]
        index = labels.get(INDEX, "0")
        return ListedContainer(
            id=row["Id"],
            name=row["Names"][0].lstrip("/") if row["Names"] else row["Id"][:12],
            # Labels are texts that anybody may have set.
            index=int(index) if re.fullmatch(r"\d+", index) else 0,
            spec=labels.get(SPEC, ""),
            owner=labels.get(OWNER, ""),
            state=row["State"],
            age_s=max(0.0, time.time() - row["Created"]),
            # Listed with the container, which saves an `inspect` for each.
            url=self._url(row),
        )

    def _url(self, row: dict[str, Any]) -> str | None:
        """Over the bridge to containers of an engine of this kernel that root runs, else to a published port."""
        if self._published_at:
            ports = [port["PublicPort"] for port in row.get("Ports") or [] if port.get("PublicPort")]
            return f"http://{self._published_at}:{ports[0]}" if ports else None
        for network in (row.get("NetworkSettings", {}).get("Networks") or {}).values():
            if network.get("IPAddress"):
                return f"http://{network['IPAddress']}:{CONTAINER_PORT}"
        return None

    def create(self, spec: ContainerSpec, wanted: Container, *, image_id: str, owner: str) -> None:
        """Create and start a container with exactly the privileges that its root phase needs.

        The token is copied into it before it starts, as `docker inspect` would show an environment variable.

        Raises:
            CreationRefused: the engine makes no such container.
            BackendUnavailable: it can't be made or started now.
        """
        # The same for memory and swap together: none is swapped, so a slot's limit means the same everywhere.
        memory = f"{spec.room.memory_mib}m"
        shared = spec.server.image_store.folder
        volumes = {shared: {"bind": IMAGE_FOLDER, "mode": "rw"}} if shared else {}
        try:
            gpus = container_gpus(spec, self.facts, same_files=self._local and not self.facts.in_vm)
        except ConfigError as error:
            raise CreationRefused(str(error)) from error
        volumes |= gpus.volumes
        with self._failures():
            try:
                container = self._client.containers.create(
                    image_id,
                    name=wanted.id,
                    hostname=HOSTNAME,
                    labels={POOL: self._pool, OWNER: owner, INDEX: str(wanted.index), SPEC: spec.fingerprint(image_id)},
                    environment={"ATROPOS_CONFIG": json.dumps(spec.config()), "ATROPOS_PORT": str(CONTAINER_PORT)},
                    # Docker's default set has MKNOD, NET_RAW and others that the root phase doesn't need.
                    cap_drop=["ALL"],
                    cap_add=list(CAP_ADD),
                    security_opt=[f"seccomp={self._profile()}"],
                    # The server makes its slots' cgroups below what it sees as the root (cgroup_namespaces(7)).
                    cgroupns="private",
                    pids_limit=spec.room.pids,
                    mem_limit=memory,
                    memswap_limit=memory,
                    # json-file has no bound of its own, and a run lasts for weeks.
                    log_config={"Type": "json-file", "Config": {"max-size": "5m", "max-file": "2"}},
                    ports=self._ports(),
                    volumes=volumes or None,
                    devices=gpus.devices or None,
                    device_requests=gpus.requests or None,
                )
            except APIError as error:
                if isinstance(error, ImageNotFound) or error.status_code not in REFUSALS:
                    raise
                raise CreationRefused(self._refusal(error)) from error
            # Between create and start: the server reads it at once.
            container.put_archive(TOKEN_DIR, _archive(TOKEN_FILE, wanted.token.encode()))
            container.start()

    def _profile(self) -> str:
        """The seccomp profile: dockerd takes its content, Podman a path on the machine that it runs on."""
        path = asset(PROFILE)
        if self.facts.name == "Podman":
            return str(path) if self._local else REMOTE_PROFILE
        # Compact: it is part of each request, and of each answer to `inspect`.
        return json.dumps(json.loads(path.read_text()))

    def _ports(self) -> dict[str, Any] | None:
        """What is published: for an engine of this machine on its loopback alone."""
        if not self._published_at:
            return None
        # A port of the engine's choice. Without an address Docker publishes on all of them, past the host's firewall
        # rules.
        return {f"{CONTAINER_PORT}/tcp": (LOOPBACK,) if self._local else None}

    def token(self, container_id: str) -> str | None:
        """The bearer token in a container; None when it has none."""
        with self._failures():
            try:
                # From the container itself, so that only who may use the engine gets it.
                chunks, _ = self._client.api.get_archive(container_id, f"{TOKEN_DIR}/{TOKEN_FILE}")
            except NotFound:
                return None
            try:
                with tarfile.open(fileobj=io.BytesIO(b"".join(chunks)), tarinfo=WholeTar) as archive:
                    member = archive.extractfile(archive.getmembers()[0])
                    return member.read().decode().strip() if member else None
            except (tarfile.TarError, IndexError) as error:  # Docker ends what it breaks off as it ends what is whole
                raise BackendUnavailable(f"Docker broke off a copy out of container {container_id}") from error

    def ending(self, container_id: str) -> Ending:
        """How a container ended."""
        with self._failures():
            try:
                state = self._client.api.inspect_container(container_id)["State"]
                text = self._last_words(container_id)
            except APIError as error:
                if error.status_code not in {404, 409}:  # 409: a removal is in progress
                    raise
                return REMOVED
        line = text.splitlines()[-1][:500] if text else "it printed nothing"
        killed = ", killed for memory" if state.get("OOMKilled") else ""
        return Ending(state.get("ExitCode"), f"exit code {state.get('ExitCode')}{killed}: {state.get('Error') or line}")

    def _last_words(self, container_id: str) -> str:
        """What a container printed last, errors first; Podman 4's tail has only the end of a line written in parts."""
        # A few lines before all: a server may have logged for days.
        for stdout, tail in ((False, 5), (True, 5), (False, "all")):
            output: bytes = self._client.api.logs(container_id, stdout=stdout, stderr=True, tail=tail)
            if text := output.decode(errors="replace").strip():
                return text
        return ""

    def end(self, container_id: str, *, within_s: float) -> None:
        """Stop a container (SIGTERM, then SIGKILL after `within_s` seconds) and remove it, if it is still there."""
        with self._failures():
            try:
                if within_s > 0:
                    # The SDK adds this time to its own time limit of the request.
                    self._client.api.stop(container_id, timeout=int(within_s))
                # `force` kills what still runs; `v` removes the anonymous volumes of the image's VOLUME lines, too.
                self._client.api.remove_container(container_id, force=True, v=True)
            except NotFound:
                pass
            except APIError as error:
                if error.status_code != HTTPStatus.CONFLICT:  # 409: a removal is in progress
                    raise
                self._await_removal(container_id)

    def _await_removal(self, container_id: str) -> None:
        deadline = time.monotonic() + REMOVAL_S
        while time.monotonic() < deadline:
            try:
                self._client.api.inspect_container(container_id)
            except NotFound:
                return
            time.sleep(0.05)

    def watch(self, on_event: Callable[[], None], on_open: Callable[[CancellableStream[object]], None]) -> None:
        """Call `on_event` whenever one of the pool's containers changes; returns when the stream ends or is closed."""
        filters = {"type": "container", "label": f"{POOL}={self._pool}"}
        with self._failures():
            stream = self._client.api.events(decode=True, filters=filters)
            on_open(stream)
            on_event()
            for event in stream:
                # Health checks and `docker exec` say nothing of a container's state, and may come every second.
                if not str(event.get("status", "")).startswith("exec_"):
                    # Once the stream is open: what changed before was not reported.
                    on_event()

    def close(self) -> None:
        """Close the connection."""
        for client in (self._client, self._lists):
            if client is not None:
                client.close()


def _archive(name: str, data: bytes) -> bytes:
    """A tar with one file that only root reads."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        # The folder, too, which only root may enter.
        folder = tarfile.TarInfo(name.rpartition("/")[0])
        folder.type, folder.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(folder)
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(data), 0o400
        archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
