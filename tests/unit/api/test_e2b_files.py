"""What the sandbox's own `find` prints, which may be any program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atropos.api.e2b.connect import RpcError
from atropos.api.e2b.files import find
from atropos.slots import ExecResult


@pytest.mark.parametrize(
    "printed",
    [
        ("1", "f", "f", "7" * 9000, "1", "u", "g", "1.0", "", "/a"),  # no decimal text may be as long
        ("1", "f", "f", "-644", "1", "u", "g", "1.0", "", "/a"),
        ("1", "f", "f", "644", "1", "u", "g", "1.0", "", ""),
        ("1", "f", "f", "644", "much", "u", "g", "1.0", "", "/a"),
        ("1", "f"),
    ],
)
async def test_nonsense_of_find_is_answered(printed: tuple[str, ...]) -> None:
    async def run(*_: object, **__: object) -> ExecResult:
        return ExecResult(
            exit_code=0, output="", output_bytes=b"", stdout="".join(f"{field}\0" for field in printed), stderr=""
        )

    sandbox: Any = SimpleNamespace(slot=SimpleNamespace(exec=run))
    with pytest.raises(RpcError, match="find printed what can't be read") as failure:
        await find(sandbox, "/a", 0, None)
    assert failure.value.code == "internal"
