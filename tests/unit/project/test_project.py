"""The project's own promises: links lead somewhere, documented targets exist, tables match the models."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from atropos.agent.config import PromptTooLong
from atropos.cli.app import command_line
from atropos.envs.running.rollout import HookError, TaskFault, VerifierError, WorkspaceLost
from atropos.errors import BY_CODE, InferenceError

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_hold(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


def test_no_page_installs_namesake() -> None:
    named = re.compile(r"pip install (?:-\S+ )*['\"]?atropos\b")
    assert [page.name for page in PAGES if page.name != "CHANGELOG.md" and named.search(page.read_text())] == []


def test_named_targets_exist() -> None:
    rules = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named: set[str] = set()
    for page in PAGES:
        named |= set(re.findall(r"(?:^|`|\$ )make ([a-z][a-z0-9-]*)", page.read_text(), flags=re.MULTILINE))
    assert named - rules == set()
    assert {"demo", "test", "lint", "bench", "clean"} <= rules


@functools.cache
def whole_command() -> Any:
    return typer.main.get_command(command_line())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_option_exists(page: Path) -> None:
    blocks = "".join(re.findall(r"^ *```console\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE))
    unknown: list[str] = []
    for line in re.findall(r"^ *\$ (?:\.venv/bin/)?atropos (.*)$", blocks.replace("\\\n", " "), re.MULTILINE):
        command: Any = whole_command()
        words = shlex.split(line, comments=True)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        unknown += [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert unknown == []


def test_every_page_is_there() -> None:
    pages = set(re.findall(r"- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert all((ROOT / "docs" / page).exists() for page in pages)
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")}
    assert written <= pages
    for front in ("docs/index.md", "README.md"):
        linked = set(re.findall(r"\]\((?:docs/)?([a-z0-9-]+\.md)", (ROOT / front).read_text()))
        assert written - {"index.md"} <= linked, front


def test_codes_are_documented() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    alerts = yaml.safe_load((ROOT / "monitoring/alerts.yml").read_text())["groups"][0]["rules"]
    dropped = {kind.code for kind in (HookError, PromptTooLong, TaskFault, VerifierError, WorkspaceLost)}
    named = {*BY_CODE, InferenceError.code, *dropped, *(rule["alert"] for rule in alerts)}
    assert [name for name in named if f"`{name}`" not in guide] == []


@pytest.mark.slow("starts Python anew")
def test_site_builds_cleanly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_settings_table_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["config_table.py", "--check"])
    runpy.run_path(str(ROOT / "scripts/config_table.py"), run_name="__main__")


def test_a_plain_import_is_light() -> None:
    code = (
        "import sys, atropos, atropos.slots, atropos.tools, atropos.envs;"
        "print([m for m in ('atroposlib', 'torch', 'transformers', 'docker', 'nomad') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_no_foreign_file_is_there() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout, so nothing says which files belong to the project")
    assert not [name for name in tracked if name.endswith((".jsonl", ".jsonl.gz", ".pyc", ".whl"))]


FOLDERS = {path.name for place in (ROOT, ROOT / "atropos") for path in place.iterdir() if path.is_dir()}
FILE = re.compile(r"`([\w.-]+/[\w./*-]*(?:/|\.(?:py|md|sh|hcl|json|toml|yml)))`")
OF_A_TASK = {"tests/test.sh", "tests/docker-compose.yaml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_file_exists(page: Path) -> None:
    """Paths begin at the root or, as in the tables of the design, at `atropos/`."""
    named = {name for name in FILE.findall(page.read_text()) if name.split("/")[0] in FOLDERS} - OF_A_TASK
    missing = [name for name in named if not any([*ROOT.glob(name), *(ROOT / "atropos").glob(name)])]
    assert missing == []


def test_shared_state_has_methods():
    """No module assigns to an attribute of the shared state, its fleet, a seat or the counters but their own."""
    shared = {"_state", "state", "fleet", "seat", "counters"}
    own = {"containers/state.py", "containers/fleet.py", "containers/seats.py", "containers/counters.py"}
    changed = []
    slots = ROOT / "atropos/slots"
    for path in slots.rglob("*.py"):
        if str(path.relative_to(slots)) in own or "backends" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (each for one in targets for each in getattr(one, "elts", [one])):
                holder = target.value if isinstance(target, ast.Attribute) else None
                if getattr(holder, "attr", getattr(holder, "id", None)) in shared:
                    changed.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert changed == []
