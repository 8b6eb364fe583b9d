"""What atropos/ imports is what pyproject.toml declares, and nothing more."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from atropos.adapters.extras import NO_EXTRA

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "atropos/api": "server",
    "atropos/envs": "env",
    "atropos/slots/backends/docker": "docker",
    "atropos/slots/backends/nomad": "nomad",
    "atropos/slots/pool/image_sources": "docker",
    "atropos/tools/executor": "server",
    "atropos/tools/tool_server": "server",
    "atropos/slots/backends/modal": "modal",
    "atropos/slots/backends/ssh": "ssh",
    "atropos/testing": "testing",
    "atropos/tracing": "otel",
    "atropos/adapters/harbor": "harbor",
    "atropos/adapters/inspect": "inspect",
    "atropos/adapters/mini": "mini-swe-agent",
    "atropos/adapters/nemo": "nemo-gym",
    "atropos/adapters/swerex": "swerex",
    "atropos/adapters/verifiers": "verifiers",
}
"""Folders whose imports an extra may bring; those of atropos/api that belong to `web` or `mcp` are imported inside
functions, and those of atropos/tools are types."""
KITS = {
    "atropos/adapters/deepagents": "deepagents",
    "atropos/adapters/google_adk": "google-adk",
    "atropos/adapters/openai_agents": "openai-agents",
    "atropos/adapters/openhands": "openhands-sdk",
    "atropos/adapters/pydantic_ai": "pydantic-ai",
    "atropos/adapters/tinker_cookbook": "tinker-cookbook",
}
"""Adapters of kits that no extra brings."""
OPTIONAL = {"web", "mcp"}
ALTERNATIVES = {
    "agents": "openai-agents",
    "chz": "tinker-cookbook",
    "google": "google-adk",
    "minisweagent": "mini-swe-agent",
    "nemo_gym": "nemo-gym",
    "openhands": "openhands-sdk",
    "pydantic_ai": "pydantic-ai-slim",
    "seccomp": "pyseccomp",
    "swerex": "swe-rex",
}
"""Modules that may not be installed here, and what brings them; seccomp is Debian's binding of the same."""
NAMESPACES = {"opentelemetry": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")}
"""Modules that several distributions share, with those that are used."""
PRIVATE = {"_sha2", "_sha256"}
"""Modules of CPython that not every version lists as its own."""


def normal(requirement: str) -> str:
    """The distribution that a requirement names, as PEP 503 writes it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


CORE = {normal(one) for one in PROJECT["dependencies"]}
OF_EXTRA = {
    name: {normal(one) for one in listed} - {"atropos"} for name, listed in PROJECT["optional-dependencies"].items()
}
BROUGHT = {"httpcore", "typing-extensions", "urllib3", "yarl"}
"""By httpx, pydantic, requests and aiohttp."""
EXTRA_ONLY = set().union(*OF_EXTRA.values()) - CORE - BROUGHT


def imported(source: str) -> set[str]:
    """The top-level modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    tops = {name.partition(".")[0] for name in found}
    return tops - set(sys.stdlib_module_names) - PRIVATE - {"atropos"}


provided_by = functools.cache(packages_distributions)


@functools.cache
def distributions() -> dict[str, set[str]]:
    """Files of atropos/, each with the distributions that it imports."""
    provided = provided_by()
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "atropos").rglob("*.py")):
        modules = {ALTERNATIVES.get(module, module) for module in imported(path.read_text())}
        found[str(path.relative_to(ROOT))] = {
            normal(name) for module in modules for name in NAMESPACES.get(module) or provided.get(module, [module])[:1]
        }
    return found


def test_every_import_is_declared() -> None:
    undeclared: list[str] = []
    for file, needed in distributions().items():
        allowed = CORE | set().union(*(OF_EXTRA[extra] for folder, extra in EXTRAS.items() if file.startswith(folder)))
        for module, kit in KITS.items():
            if file.startswith(module):
                allowed |= {normal(NO_EXTRA[kit]), "typing-extensions"}
        if file.startswith("atropos/api"):
            allowed |= set().union(*(OF_EXTRA[extra] for extra in OPTIONAL))
        undeclared += [f"{file}: {name}" for name in sorted(needed - allowed)]
    assert undeclared == []


def test_dependencies_are_imported() -> None:
    used = set().union(*distributions().values())
    assert CORE - used == set()
    assert {name: listed - used for name, listed in OF_EXTRA.items() if listed - used} == {}


@pytest.mark.slow("starts Python anew")
@pytest.mark.parametrize(
    ("modules", "extra"),
    [
        ("atropos.slots, atropos.tools, atropos.tasks.folder, atropos.cli.app; atropos.cli.app.command_line()", ""),
        ("atropos.slots.backends.docker.backend", "docker"),
        ("atropos.slots.backends.nomad.backend", "nomad"),
        ("atropos.api.tool_server, atropos.api.executor_api", "server"),
    ],
)
def test_core_needs_no_extra(modules: str, extra: str) -> None:
    """As in an installation with one extra or none: what only others bring can't be imported."""
    absent = EXTRA_ONLY - OF_EXTRA.get(extra, set())
    needed = {name for name, owners in provided_by().items() if {normal(one) for one in owners} & absent}
    needed = needed - NAMESPACES.keys() | {"opentelemetry.sdk", "opentelemetry.exporter"}  # fastapi brings its API
    code = f"import sys\nabsent = {sorted(needed)!r}\nfor name in absent: sys.modules[name] = None\nimport {modules}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("absent", "command", "said"),
    [
        (
            "fastapi",
            "executor-server",
            "atropos executor-server needs the extra `server`: pip install 'atropos[server]'",
        ),
        ("uvicorn", "tool-server", "atropos tool-server needs the extra `server`: pip install 'atropos[server]'"),
        ("nomad", "pool status", "'nomad' (atropos.slots.backends.nomad.backend:NomadBackend) can't be loaded"),
        ("docker", "pool status --backend docker", "; pip install 'atropos[docker]'"),
        ("docker", "doctor", "pip install 'atropos[docker]' (only for backend docker)"),
    ],
)
def test_commands_name_their_extra(absent: str, command: str, said: str) -> None:
    code = f"import sys; sys.modules[{absent!r}] = None; sys.argv = ['atropos', *{command.split()}]; import atropos.cli; atropos.cli.main()"
    environment = {**os.environ, "COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, env=environment
    )
    assert said in done.stdout + done.stderr, done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wanted", ["from atropos.envs import AgentEnv", "import atropos.envs.task_env"])
def test_envs_name_their_extra(wanted: str) -> None:
    assert "ImportError: the environments need the extra `env`: pip install 'atropos[env]'" in without(
        "atroposlib", wanted
    )


def test_suite_names_its_extra() -> None:
    assert "ImportError: the conformance suite needs the extra `testing`: pip install 'atropos[testing]'" in without(
        "pytest", "import atropos.testing"
    )


@pytest.mark.parametrize(
    ("module", "host", "extra"),
    [
        ("harbor", "harbor", "harbor"),
        ("inspect_ai", "inspect_ai", "inspect"),
        ("mini_swe_agent", "minisweagent", "mini-swe-agent"),
        ("nemo_gym", "nemo_gym", "nemo-gym"),
        ("swerex", "swerex", "swerex"),
        ("verifiers", "verifiers", "verifiers"),
    ],
)
def test_adapters_name_their_extra(module: str, host: str, extra: str) -> None:
    said = without(host, f"import sys; sys.version_info = (3, 12); import atropos.adapters.{module}")
    assert f"ImportError: the adapter needs the extra `{extra}`: pip install 'atropos[{extra}]'" in said


@pytest.mark.parametrize(
    ("module", "host", "kit"),
    [
        ("deepagents", "deepagents", "deepagents"),
        ("google_adk", "google.adk", "google-adk"),
        ("openai_agents", "agents", "openai-agents"),
        ("openhands", "openhands", "openhands-sdk"),
        ("pydantic_ai", "pydantic_ai", "pydantic-ai"),
        ("tinker_cookbook", "tinker_cookbook", "tinker-cookbook"),
    ],
)
def test_adapters_name_packages(module: str, host: str, kit: str) -> None:
    said = without(host, f"import atropos.adapters.{module}")
    assert f"ImportError: the adapter needs the package {kit}: pip install '{NO_EXTRA[kit]}'" in said


@pytest.mark.parametrize(("module", "extra"), [("harbor", "harbor"), ("nemo_gym", "nemo-gym")])
def test_adapters_name_pythons(module: str, extra: str) -> None:
    said = without(module, f"import sys; sys.version_info = (3, 11); import atropos.adapters.{module}")
    assert f"ImportError: atropos[{extra}] needs Python 3.12 or later" in said


def without(package: str, code: str) -> str:
    """What Python says about the code where the package isn't installed."""
    code = f"import sys; sys.modules[{package!r}] = None; {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False).stderr


def test_server_start_is_light() -> None:
    code = "import sys, atropos.sandbox.__main__, atropos.sandbox.host.process.prestart; print({'asyncio', 'pydantic'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"


def test_server_loads_no_slots() -> None:
    code = "import sys, atropos.sandbox.host.slot_host, atropos.sandbox.server.serve, atropos.sandbox.server.http.listening; print({'atropos.sandbox.programs.runner.main', 'atropos.sandbox.host.cdi'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"
