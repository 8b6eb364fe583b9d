"""Which tests show the effect of which setting of an env, so that none is left without one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def shows(*fields: str) -> Callable[[Test], Test]:
    """The decorated test sees what these fields change, beyond their being stored."""

    def unchanged(test: Test) -> Test:
        return test

    return unchanged


def shown() -> set[str]:
    """The fields whose effect a test shows."""
    return {
        ast.literal_eval(field)
        for path in Path(__file__).parent.rglob("test_*.py")
        if "@shows(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "shows"
        for field in decorator.args
    }
