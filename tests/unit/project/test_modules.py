"""Every module of the package can be imported, and says what it is for."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import atropos

PROGRAM = "atropos.slots.slot.port_relay"
"""Its source runs in a slot, with arguments; it is never imported."""
GIVEN_NAMES = {"AtroposEnvironment", "AtroposRuntime", "PortForward", "Process", "Slot", "SlotPool", "Snapshot"}
"""Classes that other evaluation stacks' configurations name, and those of `slots.sync`, which are called as the async
ones."""


def test_modules_can_be_imported() -> None:
    def failed(name: str) -> None:
        raise AssertionError(f"the package {name} can't be imported")

    names = [found.name for found in pkgutil.walk_packages(atropos.__path__, "atropos.", failed)]
    assert len(names) > 200
    for name in sorted(set(names) - {PROGRAM}):
        try:
            module = import_module(name)
        except ImportError as error:  # an extra that this environment has not got
            assert name.startswith("atropos.adapters."), name
            assert not (error.name or "").startswith("atropos"), error
        else:
            assert module.__doc__, f"{name} says nothing of itself"


def test_archives_read_to_the_end() -> None:
    """The tar module takes a damaged header for the end: what opens one without `WholeTar` loses files in silence."""
    opened = [
        f"{path}:{call.lineno}"
        for path in Path(atropos.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tarfile.open"
        if not any(ast.unparse(each.value).strip("'|") == "w" for each in call.keywords if each.arg == "mode")
        if not any(isinstance(each, ast.Constant) and each.value == "w" for each in call.args)
        if not any(each.arg == "tarinfo" for each in call.keywords)
    ]
    assert opened == []


def test_every_task_has_an_owner():
    """`atropos.aio` alone starts tasks, beside groups that wait for theirs. The conformance suite's are its tests' own."""
    package = Path(atropos.__file__).parent
    started = [
        f"{path.relative_to(package)}:{call.lineno}"
        for path in sorted({*package.rglob("*.py")} - {package / "aio.py", *(package / "testing").glob("*.py")})
        for tree in [ast.parse(path.read_text())]
        for groups in [{ast.unparse(item.optional_vars) for item in _contexts(tree) if item.optional_vars is not None}]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and re.search(r"(?:^|\.)(create_task|ensure_future)$", ast.unparse(call.func))
        if ast.unparse(call.func).rpartition(".")[0] not in groups
    ]
    assert started == []


def _contexts(tree: ast.Module) -> Iterator[ast.withitem]:
    return (item for each in ast.walk(tree) if isinstance(each, ast.AsyncWith) for item in each.items)


def test_classes_have_own_names():
    """But for `GIVEN_NAMES`: one concept a noun, over the whole package."""
    names = Counter(
        name
        for path in Path(atropos.__file__).parent.rglob("*.py")
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.MULTILINE)
    )
    assert {name for name, count in names.items() if count > 1} == GIVEN_NAMES
