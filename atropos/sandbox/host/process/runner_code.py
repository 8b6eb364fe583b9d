"""Joins the modules of `programs.runner` into the one code object that PID 1 of each slot runs.

Why one: docs/decisions/0006. The modules are executed in order in one namespace, each from a code object of its own, so
that a traceback names module and line. Imports of one another, annotations, docstrings and what only a type checker
reads are left out: they would cost every slot memory and start time.
"""

from __future__ import annotations

import ast
import errno
from pathlib import Path
from types import CodeType

_PACKAGE = "atropos.sandbox.programs.runner"
FOLDER = Path(__file__).parents[2] / "programs" / "runner"


def join(folder: Path = FOLDER) -> CodeType:
    """The runner as one code object.

    Args:
        folder: where its modules are.

    Raises:
        SyntaxError: two modules define one name, or a module imports another's under a new name.
    """
    modules: dict[str, CodeType] = {}
    owners: dict[str, str] = {}
    _add(folder, "main", modules, owners, set())
    # a list, so that a module's own code is freed once it has run
    joined = compile("for module in iter('modules'.pop, None): exec(module)", "runner", "exec")
    pending = [None, *reversed(modules.values())]
    return joined.replace(co_consts=tuple(pending if const == "modules" else const for const in joined.co_consts))


def _add(folder: Path, name: str, modules: dict[str, CodeType], owners: dict[str, str], seen: set[str]) -> None:
    """Add a module after those that it imports."""
    seen.add(name)
    file = f"{name.replace('.', '/')}.py"
    tree = ast.parse((folder / file).read_bytes())
    stripped = _Strip()
    tree = ast.fix_missing_locations(stripped.visit(tree))
    for below in stripped.imported:
        if below not in seen:
            _add(folder, below, modules, owners, seen)
    for defined in _defined(tree):
        if owners.setdefault(defined, name) != name:
            raise SyntaxError(f"{defined} is defined by two modules of {_PACKAGE}: {owners[defined]} and {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt):
            node.col_offset = node.end_col_offset = -1  # lines are enough for a traceback
    modules[name] = compile(tree, f"runner/{file}", "exec", dont_inherit=True, optimize=2)


def _defined(tree: ast.Module) -> list[str]:
    """Names that a module defines."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            found = (each for target in node.targets for each in ast.walk(target))
            names += [each.id for each in found if isinstance(each, ast.Name)]
    return names


class _Strip(ast.NodeTransformer):
    """Removes what a running slot doesn't need."""

    def __init__(self) -> None:
        self.imported: list[str] = []

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None if [alias.name for alias in node.names] == ["errno"] else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "errno":
            return ast.Constant(getattr(errno, node.attr))  # the module with all numbers and names takes 16 KiB
        self.generic_visit(node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        if node.module is not None and node.module.startswith(f"{_PACKAGE}."):
            if any(alias.asname for alias in node.names):
                raise SyntaxError(f"a name of {node.module} is imported under another name")
            self.imported.append(node.module.removeprefix(f"{_PACKAGE}."))
            return None
        return None if node.module in {"__future__", "typing"} else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node
