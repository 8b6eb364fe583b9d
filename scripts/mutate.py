"""Makes one small mistake after the other in a module, and says which of them no test notices.

python scripts/mutate.py atropos/net/relay.py tests/unit/net/test_relay.py           # every mistake
python scripts/mutate.py atropos/net/relay.py tests/unit/net -k head --lines 280-320 # some
python scripts/mutate.py MODULE TESTS --most 40 --seed 7 --within 150                # drawn, for 150 seconds

The module's file stays as it is: a process of its own is given each mistake as it imports the module. So only tests
that run the module in their own process can notice; what runs in a sandbox server's process is mutated by nothing here.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
LOGS = {"log", "_log", "logging"}


@dataclass(frozen=True)
class Mistake:
    """One change of a module's tree, which `make` carries out."""

    line: int
    what: str
    make: Callable[[], None]


def mistakes(tree: ast.AST) -> Iterator[Mistake]:
    """All that are made here, in the order of the lines."""
    found: list[Mistake] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        found += _of(node)
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns", "decorator_list"}:
                pending += [
                    each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)
                ]
    yield from sorted(found, key=lambda each: each.line)


def _of(node: ast.AST) -> Iterator[Mistake]:
    line = getattr(node, "lineno", 0)
    shown = ast.unparse(node)[:60] if line else ""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        other = SWAPPED[type(node.ops[0])]()
        yield Mistake(
            line,
            f"{shown}: {type(node.ops[0]).__name__} is {type(other).__name__}",
            lambda: node.ops.__setitem__(0, other),
        )
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        swapped = SWAPPED[type(node.op)]()
        yield Mistake(
            line, f"{shown}: {type(node.op).__name__} is {type(swapped).__name__}", lambda: setattr(node, "op", swapped)
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        twice = ast.copy_location(ast.UnaryOp(ast.Not(), node.operand), node)
        yield Mistake(line, f"{shown}: without not", lambda: setattr(node, "operand", twice))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | bytes) and node.value != b"":
        value = node.value
        wrong = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else b"\xff" + value
        yield Mistake(line, f"{shown}: {wrong!r}", lambda: setattr(node, "value", wrong))
    elif isinstance(node, ast.If | ast.IfExp) and "TYPE_CHECKING" not in shown:
        never = ast.copy_location(ast.Constant(value=False), node.test)
        yield Mistake(line, f"if {ast.unparse(node.test)[:60]}: never", lambda: setattr(node, "test", never))
    for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        for index, statement in enumerate(body if isinstance(body, list) else ()):
            if _matters(statement):
                nothing = ast.copy_location(ast.Pass(), statement)
                what = f"{ast.unparse(statement).splitlines()[0][:60]}: left out"
                yield Mistake(
                    statement.lineno,
                    what,
                    lambda body=body, index=index, nothing=nothing: body.__setitem__(index, nothing),
                )


def _matters(statement: ast.stmt) -> bool:
    """Whether a statement can be left out and should be missed."""
    if isinstance(statement, ast.Expr):
        call = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
        return isinstance(call, ast.Call) and ast.unparse(call.func).partition(".")[0] not in LOGS
    return isinstance(statement, ast.Raise | ast.AugAssign | ast.Delete)


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Gives the module with a mistake in it, instead of the file's."""

    def __init__(self, name: str, path: Path, tree: ast.AST) -> None:
        super().__init__(name, str(path))
        self._tree = tree

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname):  # noqa: ARG002
        return compile(ast.fix_missing_locations(self._tree), self.path, "exec")


class Absent(importlib.abc.MetaPathFinder):
    """Refuses to import a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002
        if fullname == self._name:
            raise ImportError(fullname)


def load_others(module: Path, arguments: list[str]) -> None:
    """Import what the tests need and what doesn't import the module, once, before the processes part."""
    with tempfile.TemporaryFile("w+") as names:

        def collect() -> int:
            code = pytest.main(["--collect-only", "-p", "no:xdist", *arguments])
            names.write("\n".join(sys.modules))
            names.flush()
            return int(code)

        if not parted(collect, 1200):
            return
        names.seek(0)
        absent = Absent(dotted(module))
        sys.meta_path.insert(0, absent)
        for name in names.read().split():
            if not name.startswith(("tests", "conftest")):  # whose assertions pytest rewrites
                before = set(sys.modules)
                try:
                    importlib.import_module(name)
                except Exception:  # it needs the module: what it imported may have some of its half-made package
                    for half in {each for each in sys.modules if each.split(".")[0] == "atropos"} - before:
                        del sys.modules[half]
        sys.meta_path.remove(absent)


def dotted(module: Path) -> str:
    """The name by which a module is imported."""
    return ".".join(module.relative_to(ROOT).with_suffix("").parts)


def tested(module: Path, mistake: Mistake | None, tree: ast.AST, arguments: list[str], within_s: float) -> bool:
    """Whether the tests pass, run in a process of its own."""

    def run() -> int:
        if mistake is not None:
            mistake.make()
        sys.meta_path.insert(0, Mutated(dotted(module), module, tree))
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]))

    return parted(run, within_s)


def parted(work: Callable[[], int], within_s: float) -> bool:
    """Whether work ends with 0 in a process of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=lambda text: Path(text).resolve())
    parser.add_argument("--lines", default="1-1000000", help="FIRST-LAST")
    parser.add_argument("--most", type=int, help="draw so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=math.inf, help="begin no further one after so many seconds")
    options, arguments = parser.parse_known_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    tree = ast.parse(options.module.read_text())
    first, last = map(int, options.lines.split("-"))
    chosen = [each for each in mistakes(tree) if first <= each.line <= last]
    if options.most is not None and options.most < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.most)
    load_others(options.module, arguments)
    began = time.monotonic()
    if not tested(options.module, None, tree, arguments, 1200):
        print("the tests fail without a mistake")
        return 2
    within_s = 30 + 5 * (time.monotonic() - began)
    tried = unnoticed = 0
    for mistake in chosen:
        if time.monotonic() - began > options.within:
            break
        tried += 1
        if tested(options.module, mistake, tree, arguments, within_s):
            unnoticed += 1
            print(f"{options.module.relative_to(ROOT)}:{mistake.line}: {mistake.what}", flush=True)
    print(f"{tried} of {len(chosen)} mistakes tried, {unnoticed} unnoticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
