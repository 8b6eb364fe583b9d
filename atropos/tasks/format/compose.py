"""A compose file: the machine of a task, and the services that run beside it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from atropos.errors import ConfigError
from atropos.tasks.format import compose_values as values
from atropos.tasks.format.compose_values import table
from atropos.tasks.format.config import explained
from atropos.tasks.format.files import parse_yaml, read_text
from atropos.tasks.format.service import MAIN, Service, start_order
from atropos.wire import MAX_MEMBERS

COMPOSE_FILE = "docker-compose.yaml"
"""The only name under which Harbor and terminal-bench read one."""
_MAIN = (MAIN, "client")
"""What the service that the agent works in is called: by Harbor, and by terminal-bench 1."""
_WITHOUT_EFFECT = {
    *("hostname", "labels", "init", "tty", "stdin_open", "logging", "profiles"),
    *("stop_grace_period", "stop_signal", "expose", "ports", "pull_policy", "memswap_limit"),
    *("annotations", "attach", "cpu_shares", "develop", "mem_reservation", "mem_swappiness", "oom_score_adj"),
}
"""Keys about a container's own name, its ports outside, its end or its weight, which change nothing here."""
_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT", "SYS_PTRACE"),
}
"""Which add nothing: those that Docker gives anyway, and what debuggers need, which slots have."""
_NOTHING = (None, False, "", [], {})
"""Values of keys that ask for nothing, as in `privileged: false`."""
_OF_THE_BUILDER = {"cache_from", "cache_to", "labels", "no_cache", "pull", "shm_size", "tags"}
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_])?")
_FROM_HARNESS = re.compile(r"\$\w+|\$\{\w+\}")
"""An image whose name the harness fills in."""


class _ComposeBuild(BaseModel):
    """`build`, where it says more than a folder."""

    model_config = ConfigDict(frozen=True, extra="allow")

    context: str = "."
    dockerfile: str = "Dockerfile"
    args: dict[str, str | int | float | bool | None] | list[str] | None = None
    target: str | None = None
    platforms: list[str] = []


class _ServiceTable(BaseModel):
    """A service in the file: the keys that are read."""

    model_config = ConfigDict(frozen=True, extra="allow")

    build: _ComposeBuild | str | None = None
    image: str | None = None
    platform: str | None = None
    gpus: Literal["all"] | list[dict[str, object]] | None = None
    entrypoint: str | list[str] | None = None
    command: str | list[str] | None = None
    environment: dict[str, str | int | float | bool | None] | list[str] | None = None
    env_file: str | list[str | dict[str, object]] | None = None
    tmpfs: str | list[str] | None = None
    working_dir: str | None = None
    user: str | int | None = None
    container_name: str | None = None
    network_mode: str | None = None
    networks: list[str] | dict[str, dict[str, object] | None] | None = None
    volumes: list[str | dict[str, object]] | None = None
    depends_on: list[str] | dict[str, dict[str, object]] | None = None
    healthcheck: dict[str, object] | None = None
    restart: str | bool | None = None
    extra_hosts: dict[str, str | list[str]] | list[str] | None = None
    cap_add: list[str] | None = None
    mem_limit: str | int | None = None
    shm_size: str | int | None = None
    cpus: str | float | None = None
    deploy: dict[str, object] | None = None


def read_compose(folder: Path, *, made: bool) -> Service | None:
    """The main service of a folder's compose file, with the others beside it; None: there is no such file.

    Args:
        folder: of the file.
        made: whether the main one's machine is there without it, since Harbor lays it over a file of its own: by a
            Dockerfile, or a named image.

    Raises:
        ConfigError: the file can't be read, or asks for what no slot has.
    """
    path = folder / COMPOSE_FILE
    if not path.exists():
        return None
    tables, closed = _tables(path)
    services = {
        name: _service(name, entry, folder, f"{path}: services.{name}", tables) for name, entry in tables.items()
    }
    services = {
        name: replace(each, offline=each.offline or closed.issuperset(values.networks(tables[name].networks)))
        for name, each in services.items()
    }
    known = [name for each in services.values() for name in each.names]
    services = {name: _without_proxy(each, known) for name, each in services.items()}
    main = next((name for name in _MAIN if name in services), None)
    if main is None and len(services) == 1:
        [only] = services.values()
        main = None if made and only.dockerfile != folder / "Dockerfile" else only.name
    if main is not None:
        _check_logs(services[main], path)
    first = services.pop(main) if main is not None else Service()
    if made and first.dockerfile is None:
        first = replace(first, image=None)
    if holder := next((each.name for each in services.values() if each.gpus), None):
        raise ConfigError(f"{path}: services.{holder}: services beside the agent's have no GPUs; leave the task out")
    beside = tuple(each for each in start_order((first, *services.values()), str(path)) if each is not first)
    if len(beside) > MAX_MEMBERS:
        raise ConfigError(f"{path}: {len(beside)} services beside the agent's; at most {MAX_MEMBERS}")
    return replace(first, beside=beside)


def read_only_service(folder: Path, what: str) -> Service | None:
    """As `read_compose`, where a service is a machine alone, which nothing starts.

    Args:
        folder: of the file.
        what: where that is, for messages.

    Raises:
        ConfigError: as `read_compose`; or there are several, or it has what is made at a start.
    """
    service = read_compose(folder, made=(folder / "Dockerfile").is_file())
    if service is None:
        return None
    if service.beside:
        names = ", ".join(each.name for each in (service, *service.beside))
        raise ConfigError(f"{folder}: several services ({names}) can't be honoured: {what}")
    for field, cure in (
        ("volumes", "use COPY in the Dockerfile"),
        ("tmpfs", "remove it"),
        ("healthcheck", "remove it"),
        ("extra_hosts", "remove it"),
    ):
        if getattr(service, field):
            raise ConfigError(f"{folder}: services.{service.name}.{field}: can't be honoured: {what}; {cure}")
    return service


def _tables(path: Path) -> tuple[dict[str, _ServiceTable], set[str]]:
    """The services of a file that are started where no profile is chosen, and the networks that lead nowhere."""
    text = read_text(path, "write one, or remove it")
    try:
        raw = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: can't be read: {error}".replace("\n", " ")) from None
    if "include" in table(raw):
        raise ConfigError(f"{path}: include: other files aren't read; write their services here")
    services = table(table(raw).get("services"))
    if not services:
        raise ConfigError(f"{path}: has no services; name one, `main`")
    chosen = {name: entry for name, entry in services.items() if name in _MAIN or not table(entry).get("profiles")}
    closed = {
        name for name, entry in table(table(raw).get("networks")).items() if values.truth(table(entry).get("internal"))
    }
    return {name: _table(entry, f"{path}: services.{name}") for name, entry in (chosen or services).items()}, closed


def _table(given: object, where: str) -> _ServiceTable:
    try:
        service = _ServiceTable.model_validate(given or {})
    except ValidationError as error:
        raise ConfigError(explained(where, error, loc=1)) from None
    build = service.build.model_extra if isinstance(service.build, _ComposeBuild) else None
    asked = [key for key, value in (service.model_extra or {}).items() if value not in _NOTHING]
    unknown = [key for key in asked if key not in _WITHOUT_EFFECT and not key.startswith("x-")]
    unknown += [f"build.{key}" for key, value in (build or {}).items() if value and key not in _OF_THE_BUILDER]
    if table(service.deploy).get("replicas", 1) != 1:
        unknown.append("deploy.replicas")
    unknown += [
        f"cap_add.{each}" for each in service.cap_add or () if each.upper().removeprefix("CAP_") not in _CAPABILITIES
    ]
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: can't be honoured in a slot; remove it")
    return service


def _service(name: str, entry: _ServiceTable, folder: Path, where: str, tables: Mapping[str, _ServiceTable]) -> Service:
    build = entry.build if isinstance(entry.build, _ComposeBuild) else _ComposeBuild(context=entry.build or ".")
    context, file = (None, None) if entry.build is None else _build(build, folder, where)
    image = None if file is not None or _FROM_HARNESS.fullmatch(entry.image or "") else entry.image
    workdir = values.filled(entry.working_dir or "", f"{where}.working_dir")
    if workdir and not workdir.startswith("/"):
        raise ConfigError(f"{where}.working_dir: {workdir!r:.80} doesn't begin with /; write the whole path")
    resources = table(table(entry.deploy).get("resources"))
    limits, reserved = table(resources.get("limits")), table(resources.get("reservations"))
    platforms = [entry.platform] if entry.platform else build.platforms
    memory = values.number(entry.mem_limit or limits.get("memory"), f"{where}.mem_limit")
    in_memory = values.number(entry.shm_size, f"{where}.shm_size")
    shared = values.shared_sources(each.volumes or () for each in tables.values())
    networks = values.networks(entry.networks, f"{where}.networks")
    hosts = values.extra_hosts(entry.extra_hosts, f"{where}.extra_hosts")
    return Service(
        name=name,
        names=_names(name, entry, networks, hosts, where),
        context=context,
        dockerfile=file,
        arguments=values.environment(build.args, f"{where}.build.args"),
        target=values.filled(build.target or "", f"{where}.build.target") or None,
        image=None if image is None else values.filled(image, f"{where}.image"),
        entrypoint=None if entry.entrypoint is None else values.words(entry.entrypoint, f"{where}.entrypoint"),
        command=values.words(entry.command or "", f"{where}.command"),
        env={
            **values.env_files(entry.env_file, folder, f"{where}.env_file"),
            **values.environment(entry.environment, f"{where}.environment"),
        },
        workdir=workdir or None,
        user=None if entry.user is None else values.filled(str(entry.user), f"{where}.user"),
        platforms=tuple(values.filled(each, f"{where}.platform") for each in platforms),
        networks=tuple(networks),
        offline=_is_offline(entry, where, alone=len(tables) == 1),
        memory_mib=None if memory is None else max(1, int(memory) >> 20),
        shm_mib=None if in_memory is None else max(1, int(in_memory) >> 20),
        cpus=values.number(entry.cpus or limits.get("cpus"), f"{where}.cpus"),
        gpus=values.gpus(entry.gpus, reserved.get("devices"), where),
        depends_on=values.dependencies(entry.depends_on, tuple(tables), f"{where}.depends_on"),
        healthcheck=values.healthcheck(entry.healthcheck, f"{where}.healthcheck"),
        restart=values.restarts(entry.restart, f"{where}.restart"),
        volumes=values.volumes(entry.volumes or (), folder, f"{where}.volumes", shared),
        tmpfs=values.tmpfs(entry.tmpfs, entry.volumes or (), f"{where}.tmpfs"),
        extra_hosts=hosts,
    )


def _names(
    name: str,
    entry: _ServiceTable,
    networks: Mapping[str, Sequence[str]],
    hosts: Iterable[str],
    where: str,
) -> tuple[str, ...]:
    """By which others reach a service; those are checked, and of its `networks` and `hosts`."""
    own = entry.container_name
    container = [] if own is None or "$" in own else [own]
    names = tuple(dict.fromkeys((name, *container, *itertools.chain.from_iterable(networks.values()))))
    if unfit := next((each for each in (*names, *hosts, *networks) if not _NAME.fullmatch(each)), None):
        raise ConfigError(f"{where}: {unfit!r:.80} can't be the name of a host or network; use letters, digits and -")
    return names


def _is_offline(entry: _ServiceTable, where: str, *, alone: bool) -> bool:
    """Whether `network_mode` is none, which only a service that is `alone` may say."""
    mode = values.filled(entry.network_mode or "bridge", f"{where}.network_mode")
    if mode not in {"bridge", "default"} and not (alone and mode == "none"):
        raise ConfigError(f"{where}.network_mode: {mode!r} can't be honoured in a slot; leave it out")
    return mode == "none"


def _without_proxy(service: Service, known: Sequence[str]) -> Service:
    """A service whose programs ask the slot's proxy, which can't know them, neither for `extra_hosts` nor for others.

    The slot's own variables name the others alone.
    """
    if not service.extra_hosts:
        return service
    hosts = ",".join(("localhost", "127.0.0.1", "::1", *known, *service.extra_hosts))
    return replace(service, env={"NO_PROXY": hosts, "no_proxy": hosts, **service.env})


def _check_logs(main: Service, path: Path) -> None:
    """Refuse a volume in which other services would see the verifier's folder."""
    for volume in main.volumes:
        if volume.target == "/logs" or f"{volume.target}/".startswith("/logs/verifier/"):
            raise ConfigError(
                f"{path}: services.{main.name}.volumes: {volume.name}:{volume.target}: other services would see the "
                "verifier's folder; mount another folder below /logs"
            )


def dockerfile_in(folder: Path, service: Service | None) -> Path:
    """The Dockerfile of a folder: its service names it, or it has the usual name."""
    return (service and service.dockerfile) or folder / "Dockerfile"


def _build(build: _ComposeBuild, folder: Path, where: str) -> tuple[Path | None, Path]:
    """The context and Dockerfile that `build` names, as seen from the compose file's folder."""
    context = folder if build.context.startswith("$") else folder / build.context
    if not context.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{where}.build.context: {build.context} is outside of {folder}; put it there")
    own = None if context.resolve() == folder.resolve() else context.resolve()
    return own, (own or folder) / build.dockerfile
